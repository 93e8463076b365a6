"""Where the numbers of a run go: callbacks for `Worker` and `fit`.

A callback is any function ``callback(step, values)``: a number that says when, and
float values by their names. The classes here are such functions, which also have a
``close`` and are context managers. They write nothing that they were not given.
"""

from __future__ import annotations

import abc
import importlib
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from agn_optax import errors
from agn_optax._internal import check, extras

__all__ = ["JsonLines", "TensorBoard", "WandB"]


class _Sink(abc.ABC):
    """Closed at the end of a ``with``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class JsonLines(_Sink):
    """Appends a line of JSON to a file for every step.

    A line is an object with ``time`` (seconds since the epoch), ``step``, and the
    values; one that is not finite is null, for JSON has no other. It is written and
    flushed at once, so that a killed process loses none. Threads may share one.

    Args:
      path: of the file, which is made if it is not there, as is its folder.

    Raises:
      OSError: it cannot be written.

    Example:
      >>> import pathlib, tempfile
      >>> from agn_optax import sinks
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "run.jsonl")
      ...     with sinks.JsonLines(path) as sink:
      ...         sink(1, {"loss": 0.5})
      ...     print(path.read_text().partition(", ")[2].strip())
      "step": 1, "loss": 0.5}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._writing = threading.Lock()

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a line."""
        said: dict[str, Any] = {"time": time.time(), "step": int(step)}
        for name, value in values.items():
            said[name] = value if math.isfinite(value) else None
        line = json.dumps(said) + "\n"
        with self._writing:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard(_Sink):
    """Writes scalars that TensorBoard reads; needs the package tensorboardX.

    Args:
      folder: where event files are written; one for each worker shows them as runs of
        their own.
      prefix: of every name, such as ``"worker-0/"``.

    Raises:
      MissingExtraError: the extra ``tensorboard`` is not installed.
      OSError: the folder cannot be made, or the system has no semaphores, which
        tensorboardX needs (on Linux: /dev/shm is missing or full).

    Example:
      >>> import tempfile
      >>> from agn_optax import sinks
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with sinks.TensorBoard(folder) as sink:
      ...         sink(1, {"loss": 0.5})
    """

    def __init__(self, folder: str | os.PathLike[str], *, prefix: str = "") -> None:
        extras.require("tensorboard", "tensorboardX")
        tensorboard = importlib.import_module("tensorboardX")
        self._prefix = prefix
        try:
            self._writer = tensorboard.SummaryWriter(os.fspath(folder))
        except OSError as error:
            error.add_note(
                f"tensorboardX could not begin to write to {os.fspath(folder)}: it "
                "needs that folder, and semaphores, which Linux has in /dev/shm"
            )
            raise

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point of each scalar."""
        for name, value in values.items():
            self._writer.add_scalar(self._prefix + name, value, int(step))

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        self._writer.close()


class WandB(_Sink):
    """Logs to a run of Weights & Biases that you have begun.

    Args:
      run: what ``wandb.init(...)`` returned. It stays yours: `close` does not finish
        it.
      prefix: of every name, such as ``"worker-0/"``. With several workers in one run,
        their steps are not in one order: their values are then logged with the step
        beside them, as ``prefix + "step"``, which can be chosen as an axis there.

    Raises:
      InvalidTypeError: ``run`` is no run.

    Example:
      As in ``sinks.WandB(wandb.init(project="digits"))``.
    """

    def __init__(self, run: Any, *, prefix: str = "") -> None:
        if not callable(getattr(run, "log", None)):
            raise errors.InvalidTypeError(
                f"run must be what wandb.init() returns, got {check.show(run)}"
            )
        self._run, self._prefix = run, prefix

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values."""
        said = {self._prefix + name: value for name, value in values.items()}
        self._run.log({**said, f"{self._prefix}step": int(step)})

    def close(self) -> None:
        """Nothing: the run is finished by whoever has begun it."""
