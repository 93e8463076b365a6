"""Daemon threads: what they raise is logged, and the process's end waits a while."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger("agn_optax")
_GRACE = 5.0  # seconds at the end of the process
_PAUSE = 0.5  # seconds until a loop that has raised begins again
_QUIET = 60.0  # seconds between two logs of the same exception of one loop

_pending: set[Future[Any]] = set()


def in_background(
    call: Callable[[], T], name: str, *, lasting: bool = False, unread: bool = False
) -> Future[T]:
    """Run ``call`` on a thread of its own.

    Not of a pool: calls may wait for each other in there, and Python would wait for a
    pool's threads before it lets go of the process, however long that takes.

    Args:
      call: what to run.
      name: of the thread.
      lasting: whether it runs until somebody ends it, and is not waited for at all.
        What it raises is logged.
      unread: whether nobody reads the result of a short call. What it raises is logged.
    """
    thread = _Owner(call, name)
    thread.start()
    if not lasting:
        _pending.add(thread.future)
        thread.future.add_done_callback(_pending.discard)
    if lasting or unread:
        thread.future.add_done_callback(functools.partial(_log_failure, name))
    return thread.future


def keep_running(loop: Callable[[], object], name: str) -> Future[None]:
    """Run ``loop`` on a thread of its own until it returns.

    An exception is logged with its traceback, and the loop begins again after a pause:
    the process relies on it. ``loop`` must return when whoever began it says so.

    Args:
      loop: what to run, again and again.
      name: of the thread.
    """
    return in_background(functools.partial(_repeat, loop, name), name, lasting=True)


def _repeat(loop: Callable[[], object], name: str) -> None:
    said: tuple[type[BaseException], float] | None = None  # the last one, and when
    while True:
        try:
            loop()
        except Exception as error:
            now = time.monotonic()
            if said is None or said[0] is not type(error) or now >= said[1] + _QUIET:
                _log.exception("thread %r failed, and goes on", name)
                said = type(error), now
        else:
            return
        time.sleep(_PAUSE)


def _log_failure(name: str, future: Future[Any]) -> None:
    if (error := future.exception()) is not None:
        _log.error("thread %r ended with an exception", name, exc_info=error)


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
