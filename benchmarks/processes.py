"""Helper processes that run functions for this one.

They are spawned, never forked: neither JAX nor gRPC survives a fork.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

PATIENCE = 600.0  # s for one answer; a longer wait is an error


class Process:
    """A separate process, which runs functions for this one, in order.

    Args:
      cores: cores on which it may run; None for all cores of this process.
    """

    def __init__(self, cores: Collection[int] | None = None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        with on_cores(cores):  # inherited by the child, before it imports anything
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin to run a function in the process; `answer` returns its result."""
        self._pipe.send(functools.partial(function, *args, **kwargs))

    def answer(self) -> Any:
        """Wait for the function's result, and return it or raise its error."""
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"process {self.pid} has not answered in {PATIENCE} s")
        try:
            value, error = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise ChildProcessError(
                f"process {self.pid} ended with status {self._process.exitcode}"
            ) from None
        if error is not None:
            raise error
        return value

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in the process, and return its result."""
        self.ask(function, *args, **kwargs)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10.0)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _serve(pipe: Any) -> None:
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (function := pipe.recv()) is not None:
            try:
                pipe.send((function(), None))
            except Exception as error:
                pipe.send((None, error))


@contextlib.contextmanager
def on_cores(cores: Collection[int] | None) -> Iterator[None]:
    """Let threads and processes that this thread starts run on these cores only."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, before if cores is None else cores)
        yield
    finally:
        os.sched_setaffinity(0, before)
