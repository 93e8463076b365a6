"""Daemon threads that log exceptions; at its end the process waits for short calls."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from agn_optax._internal.retries import Outage, retry

T = TypeVar("T")

_log = logging.getLogger("agn_optax")
_GRACE = 5.0  # s, how long the end of the process waits for running calls
_PAUSE = 0.5  # s until a loop that has raised is restarted
_LOG_INTERVAL = 60.0  # s between two logs of the same type of exception of one loop

_pending: set[Future[Any]] = set()


def in_background(
    call: Callable[[], T], name: str, *, lasting: bool = False, unread: bool = False
) -> Future[T]:
    """Run ``call`` on a new daemon thread and return its future.

    A thread pool would not do: its calls could wait for each other, and Python waits
    for a pool's threads before the process ends, without a time limit.

    Args:
      call: the function to run.
      name: name of the thread.
      lasting: whether the call runs until its owner ends it. The end of the process
        does not wait for it, and its exception is logged.
      unread: whether the result of a short call is never read. Its exception is logged.
    """
    thread = _Thread(call, name)
    thread.start()
    if not lasting:
        _pending.add(thread.future)
        thread.future.add_done_callback(_pending.discard)
    if lasting or unread:
        thread.future.add_done_callback(functools.partial(_log_failure, name))
    return thread.future


def keep_running(loop: Callable[[], object], name: str) -> Future[None]:
    """Run ``loop`` on a new daemon thread until it returns.

    If ``loop`` raises, the exception is logged with its traceback (repeats once a
    minute), and ``loop`` is called again after a pause, because the process relies on
    it. ``loop`` must return when its owner tells it to end.

    Args:
      loop: the function to run, and to restart after an exception.
      name: name of the thread.
    """
    return in_background(functools.partial(_repeat, loop, name), name, lasting=True)


def _repeat(loop: Callable[[], object], name: str) -> None:
    logged_type: type[BaseException] | None = None
    logged_at = 0.0

    def log(error: Exception) -> None:
        nonlocal logged_type, logged_at
        now = time.monotonic()
        if logged_type is not type(error) or now >= logged_at + _LOG_INTERVAL:
            _log.exception("thread %r failed, and goes on", name)
            logged_type, logged_at = type(error), now

    retry(loop, Outage(), pauses=(_PAUSE, _PAUSE), wait=time.sleep, record=log)


def _log_failure(name: str, future: Future[Any]) -> None:
    if (error := future.exception()) is not None:
        _log.error("thread %r ended with an exception", name, exc_info=error)


class _Thread(threading.Thread):
    """A thread that releases ``call`` and all it references, then sets its future."""

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        super().__init__(target=self._call, args=(call,), name=name, daemon=True)
        self.future: Future[Any] = Future()

    def run(self) -> None:
        super().run()  # releases the target and its arguments at its end
        self._set_future()

    def _call(self, call: Callable[[], Any]) -> None:
        try:
            self._set_future = functools.partial(self.future.set_result, call())
        except BaseException as error:
            self._set_future = functools.partial(self.future.set_exception, error)


# atexit is last in, first out: registered before the service's handler, this one runs
# after the service has closed its connections.
@atexit.register
def _wait() -> None:
    """Wait for running calls: Python aborts at its end if one runs a JAX program."""
    wait(tuple(_pending), _GRACE)
