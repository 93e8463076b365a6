"""Rate limits and concurrency limits for the calls of callers and hosts."""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator

from agn_optax import errors

# Costs of calls in tokens of a `Limiter`; a plain call costs 1.
JOIN = 2.0  # also creates a worker's state; costs others as much as about 5 calls
# Bytes that cost 1 token:
MOVED = 2 << 20  # of the center, pulled or measured
SAVED = 512 << 10  # of the center, written to a snapshot
PARSED = 32 << 10  # of a schema
SPARE = 400.0  # tokens of a bucket, in addition to those for the start of all workers
ACCEPTED = 200.0  # connections per second and port; each takes about 0.1 ms
NEWCOMERS = 128.0  # unauthenticated connections of a host at once
LONGEST = 1.0  # s that a call waits for its tokens
_MOST_HELD = 64  # calls of one caller that are delayed before they are rejected
_MOST_BUCKETS = 4096  # buckets that are kept
_QUIET = 60.0  # s between two warnings

_log = logging.getLogger("agn_optax")


class Limiter:
    """A rate limiter with one token bucket for each caller, host or port.

    A bucket is refilled with ``rate`` tokens per second. A call that finds its bucket
    overdrawn waits until it has been refilled, or is rejected if this takes too long.
    The capacity of a bucket depends on the call, and on the size of the model once a
    chief has initialized the center.

    Args:
      rate: tokens per second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        # The time at which each bucket will be full again; monotonic seconds.
        self._full: dict[Hashable, float] = {}
        self._held = Places(math.inf, _MOST_HELD)  # delayed calls to be rejected
        self._warned = -math.inf  # time of the last warning

    def take(
        self,
        key: Hashable,
        size: float,
        tokens: float = 1.0,
        patience: float = LONGEST,
    ) -> bool:
        """Take tokens, after a wait if necessary; return False if rejected.

        Args:
          key: key of the bucket.
          size: capacity of the bucket for this kind of call, in tokens.
          tokens: number of tokens to take.
          patience: seconds to wait at most. A rejected call is delayed by as much, so
            that its caller retries less often.
        """
        if self.rate is None:
            return True
        with self._lock:
            now = time.monotonic()
            full = max(now, self._full.get(key, now))
            wait = full - now - size / self.rate
            is_soon = wait <= patience
            if is_soon:
                self._drop_some(key)
                self._full[key] = full + tokens / self.rate
            if wait <= 0.0:
                return True
            is_held = not is_soon and self._held.take(key, 0.0)
            if patience == LONGEST and now - self._warned > _QUIET:
                self._warned = now
                _log.warning(
                    "a caller is delayed: it makes more than %g calls a second",
                    self.rate,
                )
        if is_soon or is_held:
            time.sleep(min(wait, patience))
        if is_held:
            self._held.give_back(key)
        return is_soon

    def give_back(self, key: Hashable) -> None:
        """Put a token back that turned out not to be needed."""
        with self._lock:
            if self.rate is not None and key in self._full:
                self._full[key] -= 1.0 / self.rate

    def _drop_some(self, key: Hashable) -> None:
        """Make room for a new bucket if there are too many: drop the fullest ones."""
        if key not in self._full and len(self._full) >= _MOST_BUCKETS:
            emptiest = heapq.nlargest(
                _MOST_BUCKETS // 2, self._full, key=self._full.__getitem__
            )
            self._full = {each: self._full[each] for each in emptiest}


class Places:
    """A semaphore with a limit for all callers, and one for each caller.

    Args:
      most: places for all callers.
      each: places for one caller.
    """

    def __init__(self, most: float, each: int) -> None:
        self._most, self._each = most, each
        self._changed = threading.Condition()
        self._taken: Counter[Hashable] = Counter()

    def take(self, caller: Hashable, timeout: float) -> bool:
        """Take a place; return False if none is free within ``timeout`` seconds."""

        def is_free() -> bool:
            there = self._taken
            return there.total() < self._most and there[caller] < self._each

        with self._changed:
            got = self._changed.wait_for(is_free, timeout)
            self._taken[caller] += got
            return got

    @contextlib.contextmanager
    def one(
        self, caller: Hashable, otherwise: errors.AgnOptaxError, timeout: float = 0.0
    ) -> Iterator[None]:
        """Hold a place within the block.

        Args:
          caller: the caller.
          otherwise: the error to raise if no place is free in time.
          timeout: seconds to wait at most.
        """
        if not self.take(caller, timeout):
            raise otherwise
        try:
            yield
        finally:
            self.give_back(caller)

    def give_back(self, caller: Hashable) -> None:
        """Give back a place that the caller has taken."""
        with self._changed:
            self._taken[caller] -= 1
            self._taken = +self._taken  # drops callers without a place
            self._changed.notify_all()
