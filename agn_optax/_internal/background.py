"""Daemon threads: at its end, the process waits for what they do only for a while."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_GRACE = 5.0  # seconds at the end of the process

_pending: set[Future[Any]] = set()


def in_background(
    call: Callable[[], T], name: str, *, lasting: bool = False
) -> Future[T]:
    """``call`` on a thread of its own.

    Not of a pool: calls may wait for each other in there, and Python would wait for a
    pool's threads before it lets go of the process, however long that takes.

    Args:
      call: what to run.
      name: of the thread.
      lasting: whether it runs until somebody ends it, and is not waited for at all.
    """
    thread = _Owner(call, name)
    thread.start()
    if not lasting:
        _pending.add(thread.future)
        thread.future.add_done_callback(_pending.discard)
    return thread.future


class _Owner(threading.Thread):
    """Has the call while it runs; what that holds is free before it counts as done."""

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        super().__init__(target=self._call, args=(call,), name=name, daemon=True)
        self.future: Future[Any] = Future()

    def run(self) -> None:
        super().run()  # at whose end a thread lets go of its target and arguments
        self._tell()

    def _call(self, call: Callable[[], Any]) -> None:
        try:
            self._tell = functools.partial(self.future.set_result, call())
        except BaseException as error:
            self._tell = functools.partial(self.future.set_exception, error)


@atexit.register  # before the service closes its connections, and so called after that
def _wait() -> None:
    """Python aborts where it ends under a thread that is within a compiled program."""
    wait(tuple(_pending), _GRACE)
