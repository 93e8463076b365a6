"""What one caller may take of a center: a share of its time, and few of its places."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator

from agn_optax import errors

# What calls cost, in seconds that others lose. By benchmarks/bad_peers.py that is some
# three times what the center's processor does for them: others also wait for the
# interpreter, the memory and the network.
CALL = 0.002
JOIN = 0.010  # with the connection before it, and a message after it
BYTE = 2e-9  # of a pull
_SPARE = 2.0  # seconds of calls that may come together, beside those of a start
LONGEST = 1.0  # seconds that a call waits; whoever makes it waits longer
_MOST_HELD = 64  # calls of one caller that wait and are refused then
_MOST_CALLERS = 4096  # that are remembered
_QUIET = 60.0  # seconds between two warnings of one caller
_LEAST_NEWCOMERS = 128  # of one host

_log = logging.getLogger("agn_optax")


@dataclasses.dataclass
class _Account:
    """Of one caller."""

    owed: float = 0.0  # seconds of its calls that are not paid for
    at: float = 0.0  # when that was so; monotonic seconds
    held: int = 0  # calls that wait to be refused
    said: float = -math.inf  # when its calls were last said to be too many


class Shares:
    """The time that callers take with their calls, beside what they exchange.

    Calls that come together are free, as many as all workers make when they start, for
    a caller may be all of them. Whoever makes more pays for them with a share of the
    time: his next call waits until that has paid for those before it.

    Args:
      share: of the time, for each caller; None for any.
      workers: that may be there.
    """

    def __init__(self, share: float | None, workers: int) -> None:
        self.share = share
        self._workers = workers
        self._lock = threading.Lock()
        self._accounts: OrderedDict[Hashable, _Account] = OrderedDict()

    def take(self, caller: Hashable, seconds: float, size: int | None = None) -> None:
        """A call of a caller; returns when it is its turn.

        Args:
          caller: who makes it.
          seconds: that it costs.
          size: bytes of the center, which every worker pulls when it starts; None if
            the caller is none.

        Raises:
          CenterUnreachableError: that is not soon. It may try again.
        """
        if self.share is None:
            return
        free = _SPARE
        if size is not None:
            free += self._workers * (3 * CALL + JOIN + size * BYTE)
        with self._lock:
            account, now = self._of(caller), time.monotonic()
            paid = self.share * (now - account.at)
            account.owed, account.at = max(0.0, account.owed - paid), now
            wait = (account.owed - free) / self.share
            is_soon = wait <= LONGEST
            if is_soon:
                account.owed += seconds
            if wait <= 0.0:
                return
            is_held = not is_soon and account.held < _MOST_HELD
            account.held += is_held
            if says := now - account.said > _QUIET:
                account.said = now
        if says:
            _log.warning(
                "a caller has to wait: its calls take more than %g of the time of this "
                "center",
                self.share,
            )
        if is_soon or is_held:
            time.sleep(min(wait, LONGEST))
        if is_soon:
            return
        with self._lock:
            account.held -= is_held
        raise errors.CenterUnreachableError(
            f"too many calls: a caller may take {self.share:g} of the time of this "
            f"center with calls beside its exchanges, and this one is {wait:.0f} s "
            "ahead; try again"
        )

    def _of(self, caller: Hashable) -> _Account:
        account = self._accounts.setdefault(caller, _Account())
        self._accounts.move_to_end(caller)
        if len(self._accounts) > _MOST_CALLERS:
            self._accounts.popitem(last=False)
        return account


class Newcomers:
    """Connections and calls that have not said whose they are.

    Where there are too many, the oldest is cut off: a worker says it at once, so that
    before long the oldest are those that say nothing.

    Args:
      workers: that may be there, and come together.

    Attributes:
      each: of one host, at most.
    """

    def __init__(self, workers: int) -> None:
        self.each = max(_LEAST_NEWCOMERS, workers)
        self._most = 4 * self.each
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # Whence each comes, and what cuts it off, the oldest first.
        self._all: dict[int, tuple[str, Callable[[], object]]] = {}

    @contextlib.contextmanager
    def one(self, host: str, cut: Callable[[], object]) -> Iterator[None]:
        """Around what a newcomer says; ``cut`` ends it, from any thread."""
        number = next(self._numbers)
        with self._lock:
            self._all[number] = host, cut
            oldest = self._one_too_many(host)
            victim = None if oldest is None else self._all.pop(oldest)
        if victim is not None:
            victim[1]()
        try:
            yield
        finally:
            with self._lock:
                self._all.pop(number, None)

    def _one_too_many(self, host: str) -> int | None:
        if len(self._all) <= self.each:
            return None
        own = [number for number, (its, _) in self._all.items() if its == host]
        if len(own) > self.each:
            return own[0]
        return next(iter(self._all)) if len(self._all) > self._most else None


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
