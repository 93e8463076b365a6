"""What takes too long is ended: links of workers, and a center's ends of theirs."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from agn_optax._internal import keep_running

_log = logging.getLogger("agn_optax")

# Bytes a second. Whoever is slower as long as a packet takes is as good as gone, and
# holds memory and a thread.
LEAST_RATE = 32 << 10
_MANY = 256  # transfers that are remembered


class Watched(Protocol):
    """What the watchdog ends once its time is over."""

    deadline: float  # monotonic seconds; it may move meanwhile
    is_late: bool  # whether it has been ended for that

    def cancel(self) -> None:
        """Ends it, from any thread; must not block."""


class Watchdog:
    """Cancels what is late.

    Its thread looks when the earliest deadline that it knows of is over, and not at
    every exchange: deadlines are mostly later by then.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[Watched] = set()
        self._looks = math.inf  # when
        self._runs = False

    @contextlib.contextmanager
    def watching(self, watched: Watched) -> Iterator[None]:
        """Cancels ``watched`` if it is late."""
        with self._changed:
            if not self._runs:
                keep_running(self._run, "agn-optax watchdog")
                self._runs = True  # if there could be one more thread
            self._watched.add(watched)
            if watched.deadline < self._looks:
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
                deadlines = [each.deadline for each in self._watched]
                self._looks = min(deadlines, default=math.inf)
                left = self._looks - now
                self._changed.wait(None if left == math.inf else left)

    def _cancel_late(self, now: float) -> None:
        """A call of its own, for nothing may stay here while the thread waits."""
        late = [each for each in self._watched if each.deadline <= now]
        self._watched.difference_update(late)
        for each in late:
            each.is_late = True
            _cancel(each)


def _cancel(watched: Watched) -> None:
    """Cancel what is watched; the others are cancelled whatever that raises."""
    try:
        watched.cancel()
    except Exception:
        _log.exception("%r could not be cancelled", watched)


watchdog = Watchdog()


class Transfer:
    """One packet on its way between a center and a worker, at the center's end.

    Args:
      cancel: ends the connection, from any thread.
      size: bytes of it.
      patience: seconds in which some of it must move.
    """

    def __init__(self, cancel: Callable[[], None], size: int, patience: float) -> None:
        self.cancel = cancel
        self.is_late = False
        self._patience = patience
        self.began = time.monotonic()
        self._over_by = self.began + patience + size / LEAST_RATE
        self.went()

    def went(self) -> None:
        """Some of it moved."""
        self.moved = time.monotonic()
        self.deadline = min(self._over_by, self.moved + self._patience)


class Transfers:
    """All packets that are on their way to and from a center."""

    def __init__(self) -> None:
        self._all: set[Transfer] = set()
        self._took: deque[float] = deque(maxlen=_MANY)  # seconds

    @property
    def longest(self) -> float:
        """Seconds that one of the last took that count."""
        return max(self._took, default=0.0)

    @contextlib.contextmanager
    def under_way(
        self,
        cancel: Callable[[], None],
        size: int,
        patience: float,
        *,
        counts: bool = False,
    ) -> Iterator[Transfer]:
        """Around one packet's way, see `Transfer`; `longest` is of those that count."""
        transfer = Transfer(cancel, size, patience)
        self._all.add(transfer)
        try:
            with watchdog.watching(transfer):
                yield transfer
            if counts:
                self._took.append(time.monotonic() - transfer.began)
        finally:
            self._all.discard(transfer)

    def cut(self, seconds: float) -> None:
        """Ends connections on which nothing has moved for so many seconds."""
        now = time.monotonic()
        for transfer in list(self._all):
            if now - transfer.moved > seconds:
                _cancel(transfer)
