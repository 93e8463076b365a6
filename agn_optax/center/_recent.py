"""Rates of recent events, computed from the events' times without a clock."""

from __future__ import annotations

import itertools

_WINDOW = 10.0  # s, time over which a rate is measured
_MIN_POINTS = 6  # points to keep whatever their age: five intervals
_MIN_DISTANCE = 0.5  # s, minimum distance of two points; closer points are merged
_OVERDUE_FACTOR = 2.0  # multiple of the usual interval after which a rate falls


class Recent:
    """Rates of two quantities over the last ten seconds, and the time without events.

    The rate of rarer events comes from their last intervals: an event that happens once
    a minute has a constant rate of 1 / 60 per second, which falls after two minutes.
    Only a few points (a time and the totals) are stored, however frequent events are.

    Args:
      now: time at which counting begins, in seconds.
    """

    __slots__ = ("_points",)

    def __init__(self, now: float) -> None:
        self._points: list[tuple[float, float, float]] = [(now, 0.0, 0.0)]

    @property
    def totals(self) -> tuple[float, float]:
        """The totals of the counted quantities."""
        return self._points[-1][1:]

    def copy(self) -> Recent:
        """Return an independent copy."""
        copied = Recent(0.0)
        copied._points = self._points.copy()
        return copied

    def add(self, now: float, first: float, second: float) -> None:
        """Add an event: the amount by which each quantity has grown."""
        points = self._points
        _, a, b = points[-1]
        point = now, a + first, b + second
        if len(points) > 1 and now - points[-2][0] < _MIN_DISTANCE:
            points[-1] = point
            return
        points.append(point)
        while len(points) > _MIN_POINTS and points[1][0] <= now - _WINDOW:
            del points[0]

    def rates(self, now: float) -> tuple[float, ...] | None:
        """Return each quantity's growth per second; None before the first event."""
        if len(self._points) < 2:
            return None
        last, end = self._points[-1], self._points[-1][0]
        first, intervals = self._since(end - _WINDOW)
        interval = max((end - first[0]) / intervals, _MIN_DISTANCE)
        if now - end > _OVERDUE_FACTOR * interval:
            end = now
            first, _ = self._since(end - _WINDOW)
        seconds = max(end - first[0], _MIN_DISTANCE)
        grown = zip(first[1:], last[1:], strict=True)
        return tuple((b - a) / seconds for a, b in grown)

    def idle(self, now: float) -> float | None:
        """Return the seconds since the last event, or the beginning.

        None in the ten seconds after it.
        """
        idle = now - self._points[-1][0]
        return idle if idle > _WINDOW else None

    def longest(self) -> float | None:
        """Return the longest of the last intervals, in s; None before the first event.

        The first interval begins with the counting.
        """
        intervals = [b[0] - a[0] for a, b in itertools.pairwise(self._points)]
        return max([_MIN_DISTANCE, *intervals]) if intervals else None

    def _since(self, begin: float) -> tuple[tuple[float, float, float], int]:
        """Return the newest point not after ``begin``, and how many points follow it.

        If all points are after ``begin``, return the oldest one.
        """
        for after, point in enumerate(reversed(self._points)):
            if point[0] <= begin:
                return point, after
        return self._points[0], len(self._points) - 1
