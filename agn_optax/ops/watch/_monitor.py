"""The bounded history of a served center, for its page and its metrics.

Once a second, the monitor's thread looks at the status of the service, and records what
has changed. Calls report only what a status does not show, by appending to an inbox
without a lock: exchanges with their staleness, and rejected calls.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

from agn_optax import errors
from agn_optax._internal import keep_running
from agn_optax._version import __version__
from agn_optax.center import Answer, Recent
from agn_optax.service import EVERYBODY, Servicer, as_dict
from agn_optax.service import messages as pb

MAX_POINTS = 600  # points of a series
MAX_CURVES = 256  # reported numbers of all workers together, a `Series` each
MAX_EVENTS = 50  # of each kind
MAX_ENDED = 32  # workers whose sessions ended last, which are still shown
_MAX_INBOX = 1 << 16  # entries of the inbox
_INTERVAL = 1.0  # seconds between two updates
_REPEAT_WINDOW = 60.0  # seconds within which a repeated event only increases its count
_REPEATED = ("call rejected", "message rejected")  # kinds of such events
_MAX_TEXT = 500  # characters of an event's text
_BITS = 5  # leading bits of a staleness that select its bin: 16 bins from 32 to 63, ...

_Status = dict[str, Any]


class Monitor:
    """The recent history of a service, as its page and its metrics show it.

    Everything is bounded: the points of a series, and the numbers of curves, events and
    ended workers.

    The servicer reports events only if its attribute `on_event` is set to `record`.

    Args:
      servicer: the servicer of the center.
    """

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._update_lock = threading.Lock()  # orders updates: times must not decrease
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Any, ...]] = deque(maxlen=_MAX_INBOX)
        self._started_at = time.time()
        self._started_monotonic = time.monotonic()
        self._workers: dict[str, _WorkerHistory] = {}  # those that ended last come last
        self._last: dict[str, tuple[str, int]] = {}  # session and number of an exchange
        self._events: defaultdict[str, deque[dict[str, Any]]] = defaultdict(
            lambda: deque(maxlen=MAX_EVENTS)
        )
        self._kinds: Counter[str] = Counter()  # events by kind since the start
        self._number = 0  # of the last event
        self._bins: Counter[int] = Counter()  # exchanges by first staleness of the bin
        self._staleness_sum = 0  # of all exchanges
        self._recent = Recent(self._started_monotonic)  # exchanges, and their bytes
        self._rates = Series(2)
        self._draining = False
        self._status = self._look()[0]
        self._keeper = keeper = servicer.core.keeper
        self._saved = None if keeper is None else keeper.saved_version
        self._closed = threading.Event()
        self._thread: Future[None] | None = None
        found = "" if keeper is None else keeper.restore_message
        kind = "restarted" if found else "started"
        text = found or "the center has started"
        self._add_event(self._started_at, kind, text=text)

    def start(self) -> None:
        """Update now, and once a second until `close`."""
        self.update()
        self._thread = keep_running(self._run, "agn-optax monitor")

    def close(self, timeout: float) -> None:
        """Stop updating."""
        self._closed.set()
        if self._thread is not None:
            wait([self._thread], timeout)

    def record(self, *event: Any) -> None:
        """Append an event to the inbox: its kind and its details."""
        self._inbox.append((time.time(), *event))

    def drain(self) -> None:
        """Record that the service is about to end."""
        with self._lock:
            self._draining = True
            self._add_event(time.time(), "draining", text="the center is draining")

    def update(self) -> None:
        """Process the inbox and the current status of the service."""
        with self._update_lock:
            # Not with `_lock`: this may wait for the center, and `view` must not.
            status, sessions = self._look()
            saved = None if self._keeper is None else self._keeper.saved_version
            with self._lock:
                while self._inbox:
                    at, kind, *details = self._inbox.popleft()
                    getattr(self, f"_on_{kind}")(at, *details)
                self._compare(status, sessions, time.time())
                if saved != self._saved:
                    self._saved = saved
                    text = f"a snapshot of version {saved} was written"
                    self._add_event(time.time(), "snapshot", text=text)

    def view(self) -> dict[str, Any]:
        """Return the whole history as JSON values; nonfinite numbers become None.

        Returns:
          The object that `docs/page.md` describes. Workers choose their own names and
          the names of the numbers that they report, so these may be any text.
        """
        with self._lock:
            return self._view()

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL):
            self.update()

    def _look(self) -> tuple[_Status, dict[str, str]]:
        """Return the status of the service, and the session ids of its workers."""
        core = self._servicer.core
        status = as_dict(self._servicer.status(pb.StatusRequest(), EVERYBODY))
        with core.atomically():
            members = core.ledger.registered().items()
            return status, {name: member.session_id for name, member in members}

    # Events that calls report, each handled by the method with its kind in the name.

    def _on_exchange(
        self, at: float, name: str, session_id: str, answer: Answer
    ) -> None:
        exchange = session_id, answer.sequence
        if self._last.get(name) == exchange:
            return  # a repeated exchange, answered again
        self._last[name] = exchange
        if answer.applied:
            self._staleness_sum += answer.staleness
            self._bins[_bin(answer.staleness)] += 1
        if answer.rejected:
            text = f"sent a message that was rejected: {answer.rejected}"
            self._add_event(at, "message rejected", name, text)

    def _on_rejected(self, at: float, name: str, error: Exception, host: str) -> None:
        # Once the center is closed, every call ends with this error.
        if not isinstance(error, errors.CenterClosedError):
            caller = "" if name else f"a caller at {host} "
            self._add_event(at, "call rejected", name, f"{caller}was rejected: {error}")

    # Changes between two statuses.

    def _compare(self, status: _Status, sessions: dict[str, str], at: float) -> None:
        """Record what has changed since the last status."""
        now = time.monotonic()
        for name, worker in list(self._workers.items()):
            if name not in sessions and not worker.end_reason:
                self._end(worker, at)
        for worker_status in status["workers"]:
            session_id = sessions.get(worker_status["name"])
            if session_id is not None:
                self._compare_worker(worker_status, session_id, at)
        ended = [name for name, worker in self._workers.items() if worker.end_reason]
        for name in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._workers[name]
        self._last = {name: x for name, x in self._last.items() if name in sessions}
        before, self._status = self._status, status
        if status["version"] is not None and before["version"] is None:
            numbers = status["parameters"]
            text = f"the center has its first parameters, {numbers:,} numbers"
            self._add_event(at, "initialized", text=text)
        old, new = ({_key(x): x for x in s["notices"]} for s in (before, status))
        for key, notice in new.items():
            if key not in old:
                self._add_event(at, "warning", notice["worker"], notice["text"])
        for key, notice in old.items():
            if key not in new:
                text = f"no longer: {notice['text']}"
                self._add_event(at, "recovered", notice["worker"], text)
        exchanges, traffic = self._recent.totals
        added = (
            self._bins.total() - exchanges,
            status["bytes_received"] + status["bytes_sent"] - traffic,
        )
        if any(added):
            self._recent.add(now, *added)
        rates = self._recent.rates(now) or (0.0, 0.0)
        self._rates.add(now - self._started_monotonic, *rates)

    def _compare_worker(self, status: _Status, session_id: str, at: float) -> None:
        name, now = status["name"], time.monotonic()
        worker = self._workers.get(name)
        is_new = worker is None
        if worker is None:
            worker = self._workers[name] = _WorkerHistory(status, session_id)
        before, worker.status, worker.looked = worker.status, status, now
        by = f", by {status['transport']}" if status["transport"] else ""
        if worker.end_reason or (is_new and status["connected"]):
            self._add_event(at, "joined", name, f"joined{by}")
        elif worker.session_id != session_id:
            text = f"joined again, with a new session{by}"
            self._add_event(at, "joined", name, text)
        elif status["connected"] and not before["connected"]:
            self._add_event(at, "back", name, "is back")
        elif before["connected"] and not status["connected"]:
            text = f"lost its connection; it has {self._lease:g} s to return"
            self._add_event(at, "lost", name, text)
        worker.session_id, worker.end_reason = session_id, ""
        counts = ("exchanges", "reported")
        if is_new or any(status[field] != before[field] for field in counts):
            for label, value in status["reported"].items():
                if (series := self._curve(worker, label)) is not None:
                    series.add(now - self._started_monotonic, value)

    @property
    def _lease(self) -> float:
        return self._servicer.limits.lease

    def _end(self, worker: _WorkerHistory, at: float) -> None:
        """Mark a worker as ended, and move it behind all other workers."""
        status, now = worker.status, time.monotonic()
        name = status["name"]
        if status["seen"] + now - worker.looked < self._lease:
            worker.end_reason, text = "left", "left"
        else:
            worker.end_reason = "lease expired"
            text = f"did not return within {self._lease:g} s: its lease expired"
        self._add_event(at, worker.end_reason, name, text)
        rates = ("exchanges_per_second", "steps_per_second", "stalled")
        worker.status = {**status, **dict.fromkeys(rates)}
        worker.status.update(connected=False, waits=False)
        for series in worker.curves.values():  # NaN shows as a gap
            series.add(now - self._started_monotonic, math.nan)
        self._workers[name] = self._workers.pop(name)

    def _curve(self, worker: _WorkerHistory, label: str) -> Series | None:
        """Return the series of a reported number; None if there are too many series."""
        if (series := worker.curves.get(label)) is not None:
            return series
        workers = self._workers.values()
        if sum(len(other.curves) for other in workers) >= MAX_CURVES:
            ended = next((w for w in workers if w.end_reason and w.curves), None)
            if ended is None:
                return None
            ended.curves.clear()
        return worker.curves.setdefault(label, Series())

    def _add_event(
        self, at: float, kind: str, worker: str = "", text: str = ""
    ) -> None:
        """Record an event; a rejection repeated within a minute increases a count.

        Each kind has its own events, so a flood of one kind, such as failed
        authentications, does not displace the others.
        """
        self._kinds[kind] += 1
        events, text = self._events[kind], text[:_MAX_TEXT]
        last = events[-1] if events and kind in _REPEATED else None
        if last and last["worker"] == worker and at - last["time"] <= _REPEAT_WINDOW:
            last.update(time=at, text=text, count=last["count"] + 1)
            return
        self._number += 1
        event = {"number": self._number, "time": at, "kind": kind, "worker": worker}
        events.append({**event, "text": text, "count": 1})

    # The view.

    def _view(self) -> dict[str, Any]:
        now = time.monotonic()
        times, exchanges, traffic = self._rates.columns()
        rates = self._recent.rates(now) or (None, None)
        workers = sorted(self._workers.items())
        events = [dict(event) for kind in self._events.values() for event in kind]
        return {
            **_as_json(self._status),
            "release": __version__,
            "time": time.time(),
            "started": self._started_at,
            "uptime": now - self._started_monotonic,
            "draining": self._draining,
            "exchanges": self._bins.total(),
            "exchanges_per_second": _as_json(rates[0]),
            "bytes_per_second": _as_json(rates[1]),
            "series": {
                "time": times,
                "exchanges_per_second": exchanges,
                "bytes_per_second": traffic,
            },
            "staleness": {
                "count": self._bins.total(),
                "sum": self._staleness_sum,
                "bins": [
                    {"from": first, "to": _bin_end(first), "count": count}
                    for first, count in sorted(self._bins.items())
                ],
            },
            "workers": [
                {**_as_json(worker.status), "end_reason": worker.end_reason}
                for _, worker in workers
            ],
            "curves": [
                {"name": label, "worker": name, "time": times, "value": values}
                for name, worker in workers
                for label, series in sorted(worker.curves.items())
                for times, values in [series.columns()]
            ],
            "events": sorted(events, key=lambda event: event["number"]),
            "event_counts": dict(self._kinds),
        }


def _key(notice: dict[str, Any]) -> tuple[str, str]:
    return notice["check"], notice["worker"]


@dataclasses.dataclass
class _WorkerHistory:
    """A worker that is or was registered."""

    status: _Status  # its last status before its session ended
    session_id: str
    looked: float = 0.0  # monotonic time of the status
    end_reason: str = ""  # "left" or "lease expired"; "" while it is registered
    curves: dict[str, Series] = dataclasses.field(default_factory=dict)


class Series:
    """A time series with a bounded number of points.

    When the series is full, every second point is dropped, and points are added half as
    often from then on. The points always cover the whole run evenly, up to the newest.

    Args:
      width: number of values of a point.
      max_points: maximum number of points.
    """

    def __init__(self, width: int = 1, max_points: int = MAX_POINTS) -> None:
        self._width = width
        self._max_points = max_points
        self._points: list[tuple[float, ...]] = []
        self._interval = 0.0  # minimum seconds between two points, but for the newest

    def add(self, now: float, *values: float) -> None:
        """Add the values at a time, in seconds."""
        points = self._points
        least = self._interval - _INTERVAL / 2  # updates are not quite regular
        if len(points) > 1 and points[-1][0] - points[-2][0] < least:
            points.pop()
        points.append((now, *values))
        if len(points) > self._max_points:
            del points[1::2]
            self._interval = 2 * max(self._interval, _INTERVAL)

    def columns(self) -> list[list[float | None]]:
        """Return the times and each of the values, as JSON values."""
        if not self._points:
            return [[] for _ in range(1 + self._width)]
        return [_as_json(column) for column in zip(*self._points, strict=True)]


def _bin(staleness: int) -> int:
    """Return the least staleness that shares a bin with this one."""
    bits = max(0, staleness.bit_length() - _BITS)
    return staleness >> bits << bits


def _bin_end(first: int) -> int:
    return first + (1 << max(0, first.bit_length() - _BITS)) - 1


def _as_json(value: Any) -> Any:
    """Return a value with floats of six digits, and None for nonfinite floats."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_as_json(item) for item in value]
    return value
