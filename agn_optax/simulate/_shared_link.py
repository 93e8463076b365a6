"""A link that transfers share fairly: max-min fairness of a fluid."""

from __future__ import annotations

import heapq
import math
from typing import Any

_ROUNDING = 1e-3  # bytes by which a transfer may seem incomplete


class SharedLink:
    """One direction of a link, whose capacity all transfers share.

    Each transfer also has a limit of its own, the rate of its worker's link. At any
    time, the transfers with a limit below the fair share have their limit, and the
    others share the rest equally. Transfers with the same limit always have the same
    rate, so that one number, the bytes that each of them has received, describes all.
    An event takes time for the number of different limits, and not of transfers.

    Args:
      capacity: bytes per second.

    Attributes:
      changes: number of times that the rates may have changed.
    """

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity / 1e9  # bytes per ns
        self._groups: dict[float, _Group] = {}  # by limit
        self._last = 0  # time of the last change, ns
        self.changes = 0

    def start(self, now: int, nbytes: int, limit: float, what: Any) -> None:
        """Start a transfer at a time in ns; ``limit`` is its highest rate, bytes/s."""
        self._advance(now)
        group = self._groups.get(limit)
        if group is None:
            group = self._groups[limit] = _Group(limit / 1e9)
        group.order += 1
        heapq.heappush(group.ends, (group.received + nbytes, group.order, what))
        self._share()

    def end(self, now: int) -> list[Any]:
        """Return the transfers that have ended by a time in ns."""
        self._advance(now)
        ended = []
        for limit, group in [*self._groups.items()]:
            while group.ends and group.ends[0][0] <= group.received + _ROUNDING:
                ended.append(heapq.heappop(group.ends)[2])
            if not group.ends:
                del self._groups[limit]
        self._share()
        return ended

    @property
    def next_end(self) -> int | None:
        """The time in ns of the next end of a transfer; None without transfers."""
        waits = [
            (group.ends[0][0] - group.received) / group.rate
            for group in self._groups.values()
        ]
        return self._last + max(1, math.ceil(min(waits))) if waits else None

    def _advance(self, now: int) -> None:
        passed, self._last = now - self._last, now
        for group in self._groups.values():
            group.received += group.rate * passed

    def _share(self) -> None:
        """Divide the capacity: the lowest limits first, then equally."""
        self.changes += 1
        rest = self._capacity
        count = sum(len(group.ends) for group in self._groups.values())
        for group in sorted(self._groups.values(), key=lambda group: group.limit):
            group.rate = min(group.limit, rest / count)
            rest -= group.rate * len(group.ends)
            count -= len(group.ends)


class _Group:
    """The transfers with one limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit  # bytes per ns
        self.rate = limit  # of each transfer
        self.received = 0.0  # bytes, by a transfer that began with the group
        self.order = 0  # number of transfers so far
        self.ends: list[tuple[float, int, Any]] = []  # by `received` at the end
