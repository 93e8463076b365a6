"""Callbacks for `Worker` and `fit` that write the numbers of a run.

A callback is any function ``callback(step, values)``: the step's number, and float
values by name. An instance of a class here is a callback; it also has a ``close``
method and is a context manager. It writes the given values; `JsonLines`
adds the time and the step, `WandB` the step.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from agn_optax import errors
from agn_optax._internal import check, extras

__all__ = ["JsonLines", "TensorBoard", "WandB"]


class _Sink:
    """A context manager that closes itself at the end of a ``with``."""

    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class JsonLines(_Sink):
    """A callback that appends a line of JSON to a file for every step.

    A line is an object with ``time`` (seconds since the epoch), ``step`` and the
    values. A value that is not finite is null, because JSON has no such numbers. Each
    line is written and flushed at once, so that a killed process loses none. Threads
    may share one sink.

    Args:
      path: path of the file. The file and its folder are created if they do not exist.

    Raises:
      OSError: the file cannot be written.

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
        """Write a line."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = json.dumps({"time": time.time(), "step": int(step), **finite}) + "\n"
        with self._writing:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard(_Sink):
    """A callback that writes scalars for TensorBoard; needs the package tensorboardX.

    Args:
      folder: folder of the event files. With a folder for each worker, TensorBoard
        shows each worker as a run of its own.
      prefix: prefix of every name, such as ``"worker-0/"``.

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
                f"tensorboardX cannot write to {os.fspath(folder)}: it needs that "
                "folder, and semaphores, which Linux has in /dev/shm"
            )
            raise

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point of each scalar."""
        for name, value in values.items():
            self._writer.add_scalar(self._prefix + name, value, int(step))

    def close(self) -> None:
        """Write the buffered points and close the file."""
        self._writer.close()


class WandB(_Sink):
    """A callback that logs to an existing run of Weights & Biases.

    Args:
      run: the return value of ``wandb.init(...)``. `close` does not finish the run.
      prefix: prefix of every name, such as ``"worker-0/"``. The steps of several
        workers in one run are not in order, so the step is logged as a value too, under
        ``prefix + "step"``, and can be chosen as an axis in Weights & Biases.

    Raises:
      InvalidTypeError: ``run`` has no method ``log``.

    Example:
      ``sinks.WandB(wandb.init(project="digits"))``
    """

    def __init__(self, run: Any, *, prefix: str = "") -> None:
        if not callable(getattr(run, "log", None)):
            raise errors.InvalidTypeError(
                f"run must be the return value of wandb.init(), got {check.show(run)}"
            )
        self._run, self._prefix = run, prefix

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values."""
        named = {self._prefix + name: value for name, value in values.items()}
        self._run.log({**named, f"{self._prefix}step": int(step)})

    def close(self) -> None:
        """Do nothing: the caller of ``wandb.init`` finishes the run."""
