"""Daemon threads: at its end, the process waits for what they do only for a while."""

from __future__ import annotations

import atexit
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
    future: Future[T] = Future()
    calls = [call]
    del call

    def run() -> None:
        try:
            # The arrays that it holds are let go of before it counts as done.
            future.set_result(calls.pop()())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    if not lasting:
        _pending.add(future)
        future.add_done_callback(_pending.discard)
    try:
        thread.start()
    except BaseException:
        _pending.discard(future)
        raise
    return future


@atexit.register  # before the service closes its connections, and so called after that
def _wait() -> None:
    """Python aborts where it ends under a thread that is within a compiled program."""
    wait(tuple(_pending), _GRACE)
