"""Rates of what has happened lately, by the times at which it did: no clock."""

from __future__ import annotations

import itertools
import operator
from collections import deque

_WINDOW = 10.0  # seconds that a rate is of
_FEWEST = 6  # points that are kept however old they are: five intervals
_GRAIN = 0.5  # seconds within which points become one
_LATE = 2.0  # times as long as usual


class Recent:
    """Rates of the last ten seconds, and whether what happens is overdue.

    What happens less often is told by its last intervals: something that happens once
    a minute has the rate of 1 / 60 all the time, and is not overdue for two minutes.
    However much happens, few points are kept.

    Args:
      now: seconds; when counting begins.
      width: how many numbers are counted.
    """

    def __init__(self, now: float, width: int) -> None:
        self._points: deque[tuple[float, ...]] = deque([(now, *[0.0] * width)])

    @property
    def totals(self) -> tuple[float, ...]:
        """The sums of all that was counted."""
        return self._points[-1][1:]

    def copy(self) -> Recent:
        """Return one that goes on apart."""
        made = Recent.__new__(Recent)
        made._points = self._points.copy()
        return made

    def add(self, now: float, *grown: float) -> None:
        """Count what has happened: by how much each number has grown."""
        points = self._points
        totals = map(operator.add, self.totals, grown)
        if len(points) > 1 and now - points[-2][0] < _GRAIN:
            points.pop()
        points.append((now, *totals))
        while len(points) > _FEWEST and points[1][0] <= now - _WINDOW:
            points.popleft()

    def rates(self, now: float) -> tuple[float, ...] | None:
        """Return what each number grows by a second; None before anything happened."""
        if len(self._points) < 2:
            return None
        last, end = self._points[-1], self._points[-1][0]
        first, intervals = self._since(end - _WINDOW)
        if now - end > _LATE * max((end - first[0]) / intervals, _GRAIN):
            end = now
            first, _ = self._since(end - _WINDOW)
        seconds = max(end - first[0], _GRAIN)
        grown = zip(first[1:], last[1:], strict=True)
        return tuple((b - a) / seconds for a, b in grown)

    def overdue(self, now: float) -> float | None:
        """Return the seconds since something happened, if it should have since.

        It should within ten seconds, or twice the longest of its last intervals.
        """
        if len(self._points) < 2:
            return None
        idle = now - self._points[-1][0]
        if idle <= _WINDOW:
            return None
        longest = max(b[0] - a[0] for a, b in itertools.pairwise(self._points))
        return idle if idle > _LATE * longest else None

    def _since(self, begin: float) -> tuple[tuple[float, ...], int]:
        """Return the newest point that is as old as that, and how many came after it.

        It is the oldest there is where none is as old.
        """
        for after, point in enumerate(reversed(self._points)):
            if point[0] <= begin:
                return point, after
        return self._points[0], len(self._points) - 1
