"""Rate limits and concurrency limits for the calls of callers and hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
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
_MOST_COMPARED = 64  # buckets that are compared to choose one to drop
_QUIET = 60.0  # s between two warnings about one caller

_log = logging.getLogger("agn_optax")


@dataclasses.dataclass
class _Bucket:
    """The tokens that one caller has spent, less those that have been refilled since.

    The capacity is not stored here: it depends on the call, and on the size of the
    model once a chief has initialized the center.
    """

    spent: float  # tokens
    at: float  # time of the last refill; monotonic seconds
    held: int = 0  # delayed calls that will be rejected
    said: float = -math.inf  # time of the last warning about too many calls

    def pay_back(self, tokens: float) -> None:
        self.spent = max(0.0, self.spent - tokens)


class Limiter:
    """A rate limiter with one token bucket for each caller, host or port.

    A bucket is refilled with ``rate`` tokens per second. A call that finds its bucket
    overdrawn waits until it has been refilled, or is rejected if this takes too long.

    Args:
      rate: tokens per second; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._buckets: OrderedDict[Hashable, _Bucket] = OrderedDict()  # by last use

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
            bucket, now = self._bucket(key), time.monotonic()
            wait = (bucket.spent - size) / self.rate
            is_soon = wait <= patience
            if is_soon:
                bucket.spent += tokens
            if wait <= 0.0:
                return True
            is_held = not is_soon and bucket.held < _MOST_HELD
            bucket.held += is_held
            if says := now - bucket.said > _QUIET and patience == LONGEST:
                bucket.said = now
        if says:
            _log.warning(
                "a caller is delayed: it makes more than %g calls a second", self.rate
            )
        if is_soon or is_held:
            time.sleep(min(wait, patience))
        if is_held:
            with self._lock:
                bucket.held -= 1
        return is_soon

    def give_back(self, key: Hashable) -> None:
        """Put a token back that turned out not to be needed."""
        if self.rate is not None:
            with self._lock:
                self._bucket(key).pay_back(1.0)

    def _bucket(self, key: Hashable) -> _Bucket:
        """Return a caller's bucket, refilled up to now."""
        now = time.monotonic()
        if key not in self._buckets and len(self._buckets) >= _MOST_BUCKETS:
            self._forget_one(now)
        bucket = self._buckets.setdefault(key, _Bucket(0.0, now))
        self._buckets.move_to_end(key)
        self._pay_back(bucket, now)
        return bucket

    def _pay_back(self, bucket: _Bucket, now: float) -> None:
        assert self.rate is not None
        bucket.pay_back(self.rate * (now - bucket.at))
        bucket.at = now

    def _forget_one(self, now: float) -> None:
        """Drop the least spent bucket among those that have not been used for longest.

        Usually nothing of it is spent, so that dropping it changes nothing.
        """
        oldest = list(itertools.islice(self._buckets.items(), _MOST_COMPARED))
        for _, bucket in oldest:
            self._pay_back(bucket, now)
        key, _ = min(oldest, key=lambda each: each[1].spent)
        del self._buckets[key]


class Places:
    """A semaphore with a limit for all callers, and one for each caller.

    Args:
      most: places for all callers.
      each: places for one caller.
    """

    def __init__(self, most: int, each: int) -> None:
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
