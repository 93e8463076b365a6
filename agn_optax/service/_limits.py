"""Limits of the calls and connections of callers and hosts, and of their places."""

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

# In tokens of a `Limiter`: what costs others as much as five plain calls or so.
JOIN = 2.0  # also makes a place for a worker
# Bytes that cost as much as a call.
MOVED = 2 << 20  # of the center, pulled or measured
SAVED = 512 << 10  # of the center, in a snapshot
PARSED = 32 << 10  # of a schema
SPARE = 400.0  # tokens of a bucket, beside those of a start
ACCEPTED = 200.0  # connections a second of a port: each costs a tenth of a millisecond
NEWCOMERS = 128.0  # of a host's connections that do not say whose they are
LONGEST = 1.0  # seconds that a call waits for its tokens
_MOST_HELD = 64  # calls of one caller that wait and are refused then
_MOST_BUCKETS = 4096  # that are remembered
_MOST_COMPARED = 64  # of them, where one is forgotten
_QUIET = 60.0  # seconds between two warnings of one caller

_log = logging.getLogger("agn_optax")


@dataclasses.dataclass
class _Bucket:
    """The tokens that one caller has spent, less those that have come back since.

    How much it may spend is no part of it: that depends on the call, and grows with the
    model once a chief has given one.
    """

    spent: float  # tokens
    at: float  # when it was so much; monotonic seconds
    held: int = 0  # calls that wait to be refused
    said: float = -math.inf  # when its calls were last said to be too many

    def pay_back(self, tokens: float) -> None:
        self.spent = max(0.0, self.spent - tokens)


class Limiter:
    """Token buckets, one for each caller, host or port.

    Of what was spent, ``rate`` tokens come back every second. A call that finds more
    spent than its bucket holds waits until that is paid back, or is refused if it takes
    too long.

    Args:
      rate: tokens a second; None for no bound.
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
        """Take tokens and return True, when it is the caller's turn; False if never.

        Args:
          key: names the bucket.
          size: tokens that it holds for such a call.
          tokens: to take.
          patience: seconds to wait at most. Whoever is refused waits as long, so that
            it asks less often.
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
                "a caller has to wait: it makes more than %g calls a second", self.rate
            )
        if is_soon or is_held:
            time.sleep(min(wait, patience))
        if is_held:
            with self._lock:
                bucket.held -= 1
        return is_soon

    def give_back(self, key: Hashable) -> None:
        """Return a token to a bucket that somebody need not have taken."""
        if self.rate is not None:
            with self._lock:
                self._bucket(key).pay_back(1.0)

    def _bucket(self, key: Hashable) -> _Bucket:
        """Return a caller's bucket as it is now."""
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
        """Forget a bucket: of those not used for longest, the one with least spent.

        Mostly that is nothing: then it comes back as it was.
        """
        oldest = list(itertools.islice(self._buckets.items(), _MOST_COMPARED))
        for _, bucket in oldest:
            self._pay_back(bucket, now)
        key, _ = min(oldest, key=lambda each: each[1].spent)
        del self._buckets[key]


class Places:
    """Few of them, and fewer for one caller.

    Args:
      most: in all.
      each: of one caller.
    """

    def __init__(self, most: int, each: int) -> None:
        self._most, self._each = most, each
        self._changed = threading.Condition()
        self._taken: Counter[Hashable] = Counter()

    def take(self, caller: Hashable, timeout: float) -> bool:
        """Whether a caller got one within ``timeout`` seconds."""

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
        """In one of them, or raises ``otherwise`` if none is free in time."""
        if not self.take(caller, timeout):
            raise otherwise
        try:
            yield
        finally:
            self.give_back(caller)

    def give_back(self, caller: Hashable) -> None:
        """What it took."""
        with self._changed:
            self._taken[caller] -= 1
            self._taken = +self._taken  # without those that have none
            self._changed.notify_all()
