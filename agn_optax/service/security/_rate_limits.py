"""Rate limits by token buckets, and semaphores that share places between callers."""

from __future__ import annotations

import contextlib
import heapq
import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator

from agn_optax import errors

MAX_WAIT = 1.0  # s that a call waits for its token
_MAX_WAITING = 64  # calls of one caller that wait at the same time
_MAX_BUCKETS = 4096  # buckets that are kept


class RateLimiter:
    """A rate limiter with one token bucket for each key.

    A bucket is refilled with ``rate`` tokens per second. A call that finds its bucket
    empty waits for its token, or is rejected if this takes too long.

    Args:
      rate: tokens per second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        # The time at which each bucket will be full again; monotonic seconds.
        self._full_at: dict[Hashable, float] = {}
        self._waiting = CallerSemaphore(math.inf, _MAX_WAITING)

    def take(self, key: Hashable, burst: float, max_wait: float = MAX_WAIT) -> bool:
        """Take a token, after a wait if necessary; return False if rejected.

        Args:
          key: key of the bucket.
          burst: capacity of the bucket in tokens.
          max_wait: seconds to wait at most. A rejected call is delayed by as much, so
            that its caller retries less often.
        """
        if self.rate is None:
            return True
        with self._lock:
            now = time.monotonic()
            full_at = max(now, self._full_at.get(key, now))
            wait = full_at - now - burst / self.rate
            is_accepted = wait <= max_wait
            if is_accepted:
                self._drop_buckets(key)
                self._full_at[key] = full_at + 1.0 / self.rate
        if wait > 0.0 and self._waiting.acquire(key, 0.0):
            time.sleep(min(wait, max_wait))
            self._waiting.release(key)
        return is_accepted

    def _drop_buckets(self, key: Hashable) -> None:
        """If there are too many buckets to add a new key, drop the fullest half."""
        if key not in self._full_at and len(self._full_at) >= _MAX_BUCKETS:
            emptiest = heapq.nlargest(
                _MAX_BUCKETS // 2, self._full_at, key=self._full_at.__getitem__
            )
            self._full_at = {kept: self._full_at[kept] for kept in emptiest}


class CallerSemaphore:
    """A semaphore with a limit for all callers, and one for each caller.

    Args:
      limit: limit for all callers.
      limit_of_caller: limit for one caller.
    """

    def __init__(self, limit: float, limit_of_caller: int) -> None:
        self._limit, self._limit_of_caller = limit, limit_of_caller
        self._changed = threading.Condition()
        self._counts: Counter[Hashable] = Counter()

    def acquire(self, caller: Hashable, timeout: float) -> bool:
        """Acquire the semaphore; return False if that takes more than ``timeout`` s."""
        with self._changed:
            is_acquired = self._changed.wait_for(lambda: self._is_free(caller), timeout)
            self._counts[caller] += is_acquired
            return is_acquired

    def _is_free(self, caller: Hashable) -> bool:
        is_below = self._counts.total() < self._limit
        return is_below and self._counts[caller] < self._limit_of_caller

    def release(self, caller: Hashable) -> None:
        """Release what a caller has acquired."""
        with self._changed:
            self._counts[caller] -= 1
            self._counts = +self._counts  # drops callers with a count of zero
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(
        self, caller: Hashable, error: errors.AgnOptaxError, timeout: float = 0.0
    ) -> Iterator[None]:
        """Hold the semaphore within the block.

        Args:
          caller: the caller.
          error: the error to raise if it cannot be acquired in time.
          timeout: seconds to wait at most.
        """
        if not self.acquire(caller, timeout):
            raise error
        try:
            yield
        finally:
            self.release(caller)


class OneCallerSemaphore(CallerSemaphore):
    """A semaphore of one caller at a time, which may acquire it repeatedly."""

    def __init__(self) -> None:
        super().__init__(math.inf, 1)

    def _is_free(self, caller: Hashable) -> bool:
        return self._counts.total() == self._counts[caller]
