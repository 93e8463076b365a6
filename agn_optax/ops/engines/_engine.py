"""The interface of engines, which start the tasks of a run."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from agn_optax.ops.engines._run import Run

# Called with the name of a task, and a line of its output or about the task.
Output = Callable[[str, str], None]


class Engine(abc.ABC):
    """An engine, which carries out a run that its constructor has checked.

    Args:
      run: the run to carry out.

    Attributes:
      name: the engine's name for ``--on``.
      Settings: a dataclass of the settings in the engine's table of a run's file, if
        it has any.

    Raises:
      InvalidArgumentError: this engine cannot carry out the run.
    """

    name: ClassVar[str]
    Settings: ClassVar[type] = object

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = self.Settings(**run.settings)

    def files(self) -> Mapping[str, str]:
        """Return the files to submit: their texts by name, without secrets."""
        return {}

    @abc.abstractmethod
    def commands(self) -> list[str]:
        """Return the shell commands that submit the files, to run in their folder."""

    @abc.abstractmethod
    def launch(self, output: Output) -> dict[str, Any]:
        """Carry out the run, and return when nothing is left to be done here.

        Returns:
          A summary as JSON values. Its ``"returncode"`` is 0, or that of the task at
          fault.
        """
