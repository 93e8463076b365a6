"""Timeouts: the watchdog cancels links and transfers that take too long."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from agn_optax._internal import keep_running

_log = logging.getLogger("agn_optax")

# Minimum rate in bytes per second, on average over a frame. A slower peer is treated as
# lost, because it occupies memory and a thread.
MIN_RATE = 32 << 10


class Watched(Protocol):
    """An operation that the watchdog cancels after its deadline."""

    deadline: float  # monotonic seconds; may be moved later at any time
    is_late: bool  # whether the watchdog has cancelled it

    def cancel(self) -> None:
        """End the operation, from any thread; must not block."""


class Watchdog:
    """A thread that cancels operations whose deadline has passed.

    The thread sleeps until the earliest deadline that it knows of. Moving a deadline
    later does not wake it, because most deadlines are moved many times.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[Watched] = set()
        self._next_check = math.inf  # when the thread wakes; monotonic seconds
        self._is_running = False

    @contextlib.contextmanager
    def watching(self, watched: Watched) -> Iterator[None]:
        """Cancel ``watched`` if its deadline passes within the block."""
        with self._changed:
            if not self._is_running:
                keep_running(self._run, "agn-optax watchdog")
                self._is_running = True  # only after the thread could be started
            self._watched.add(watched)
            if watched.deadline < self._next_check:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._watched.discard(watched)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                self._cancel_late(now)
                deadlines = [watched.deadline for watched in self._watched]
                self._next_check = min(deadlines, default=math.inf)
                pause = self._next_check - now
                self._changed.wait(None if pause == math.inf else pause)

    def _cancel_late(self, now: float) -> None:
        """Cancel the operations whose deadline has passed.

        This is a method of its own so that its local variables do not keep the
        operations alive while the thread waits.
        """
        late = [watched for watched in self._watched if watched.deadline <= now]
        self._watched.difference_update(late)
        for watched in late:
            watched.is_late = True
            _cancel(watched)


def _cancel(watched: Watched) -> None:
    """Cancel an operation; log an exception, so that others are cancelled, too."""
    try:
        watched.cancel()
    except Exception:
        _log.exception("%r could not be cancelled", watched)


watchdog = Watchdog()


class TimedTransfer:
    """A frame that is being sent or received, at the center's end.

    Args:
      cancel: ends the connection, from any thread.
      size: size of the frame in bytes.
      timeout: maximum seconds between the transfers of two parts of the frame.
    """

    def __init__(self, cancel: Callable[[], None], size: int, timeout: float) -> None:
        self.cancel = cancel
        self.is_late = False
        self._timeout = timeout
        self._last_deadline = time.monotonic() + timeout + size / MIN_RATE
        self.progress()

    def progress(self) -> None:
        """Record that a part of the frame was transferred."""
        self.deadline = min(self._last_deadline, time.monotonic() + self._timeout)


@contextlib.contextmanager
def timed(
    cancel: Callable[[], None], size: int, timeout: float
) -> Iterator[TimedTransfer]:
    """Transfer a frame within the block, and cancel it if it takes too long.

    See `TimedTransfer`.
    """
    transfer = TimedTransfer(cancel, size, timeout)
    with watchdog.watching(transfer):
        yield transfer
