"""The seam: what starts the tasks of a run, somewhere."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from agn_optax.ops.engines._run import Run

# Called with the name of a task, and a line that it has said or that is said of it.
Output = Callable[[str, str], None]


class Engine(abc.ABC):
    """Carries out a run. One that is made has checked that it can.

    Args:
      run: what is to be run.

    Attributes:
      name: by which ``--on`` names it.
      Settings: a dataclass of what its own table of a run's file may have.

    Raises:
      InvalidArgumentError: this engine cannot run it; says why.
    """

    name: ClassVar[str]
    Settings: ClassVar[type]

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = self.Settings(**run.settings)

    @abc.abstractmethod
    def files(self) -> Mapping[str, str]:
        """What is submitted: texts by the names of their files, without secrets."""

    @abc.abstractmethod
    def commands(self) -> list[str]:
        """The lines of a shell that submit these, from the folder where they are."""

    @abc.abstractmethod
    def launch(self, output: Output) -> dict[str, Any]:
        """Does it, and returns when there is nothing left to be done here.

        Returns:
          In terms of JSON what became of it, ``"returncode"`` among it: 0, or that of
          the task at fault.
        """
