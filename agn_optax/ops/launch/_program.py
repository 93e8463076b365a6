"""What is run, and what became of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from agn_optax import errors


@dataclasses.dataclass(frozen=True)
class Program:
    """One program to run.

    Attributes:
      name: what its lines are marked with, such as ``"worker-0"``.
      command: program and arguments.
      environment: added to the launcher's own environment.
      restarts: how often it is started again after it has failed.
      waited_for: whether the others go on until it has ended. False is for a server,
        which runs for as long as it has clients: when all programs that are waited for
        have ended, it is ended as well; and when it ends before, so are they.
      delay: seconds before it is started for the first time.
      followers: called with each line of its output until it returns programs, which
        are started then: those that need what this one has to say first.

    Raises:
      InvalidArgumentError: there is no name or no command, or ``restarts`` or ``delay``
        is negative.
      InvalidTypeError: ``command`` is a str instead of a list.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    waited_for: bool = True
    delay: float = 0.0
    followers: Callable[[str], Sequence[Program]] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise errors.InvalidArgumentError("a program must have a name, got ''")
        if isinstance(self.command, str):
            raise errors.InvalidTypeError(
                f"the command of {self.name!r} must be a list of a program and its "
                f"arguments, got {self.command!r}"
            )
        if not self.command:
            raise errors.InvalidArgumentError(f"{self.name!r} has an empty command")
        if self.restarts < 0:
            raise errors.InvalidArgumentError(
                f"restarts of {self.name!r} must not be negative, got {self.restarts}"
            )
        if not 0 <= self.delay < math.inf:
            raise errors.InvalidArgumentError(
                f"delay of {self.name!r} must be a number of seconds >= 0, got "
                f"{self.delay!r}"
            )


@dataclasses.dataclass(frozen=True)
class Ended:
    """What became of one program.

    Attributes:
      name: the program's name.
      returncode: the last exit status, or the negative number of the signal that
        killed it.
      restarts: how often it was started again.
      seconds: from its first start to its last end.
      stopped: whether the launcher ended it, so that ``returncode`` says nothing of the
        program. At fault are those that are not ``stopped``, with one that is not 0.
    """

    name: str
    returncode: int
    restarts: int
    seconds: float
    stopped: bool
