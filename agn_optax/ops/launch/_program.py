"""The description of a program to run, and its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from agn_optax import errors


@dataclasses.dataclass(frozen=True)
class Program:
    """One program to run.

    Attributes:
      name: label of the program's lines, such as ``"worker-0"``.
      command: program and arguments.
      environment: variables that are added to the launcher's own environment.
      restarts: maximum number of restarts after failures.
      waited_for: whether the run goes on until this program has ended. False is for a
        server, which runs for as long as it has clients: the launcher ends the server
        after all programs that are waited for, and ends these if the server ends first.
      followers: function that is called with each line of this program's output, until
        it returns programs. These are then started; they need the output of this one.

    Raises:
      InvalidArgumentError: the name or the command is empty, or ``restarts`` is
        negative.
      InvalidTypeError: ``command`` is a str instead of a list.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    waited_for: bool = True
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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one program.

    Attributes:
      name: the program's name.
      returncode: the last exit status, or the negative number of the signal that
        killed the program.
      restarts: number of restarts.
      seconds: time from the first start to the last end.
      stopped: whether the launcher ended the program, so that ``returncode`` says
        nothing about the program. A program is at fault if it is not ``stopped`` and
        its ``returncode`` is not 0.
    """

    name: str
    returncode: int
    restarts: int
    seconds: float
    stopped: bool
