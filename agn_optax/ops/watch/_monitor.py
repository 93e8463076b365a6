"""The bounded history of a served center, for its page and its metrics.

Calls report events to a `Monitor` by appending to its inbox, without a lock. Once a
second, the monitor's thread reads the inbox and the status of the service.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from array import array
from collections import Counter, deque
from concurrent.futures import Future, wait
from typing import Any

from agn_optax import errors
from agn_optax._internal import keep_running
from agn_optax._version import __version__
from agn_optax.center import Answer, Recent
from agn_optax.service import EVERYBODY, Servicer
from agn_optax.service import messages as pb

MAX_POINTS = 600  # points of a series
MAX_CURVES = 256  # reported numbers of all workers together, a `Series` each
MAX_EVENTS = 200
MAX_ENDED = 32  # workers whose sessions ended last, which are still shown
_MAX_INBOX = 1 << 16  # entries of the inbox
_INTERVAL = 1.0  # seconds between two updates
_REPEAT_WINDOW = 60.0  # seconds within which a repeated event only increases its count
_MAX_TEXT = 500  # characters of an event's text
# Fields of the status that the view copies, of the center and of a worker.
_TRAFFIC = ("bytes_received", "bytes_sent")
_CENTER_FIELDS = (
    *("rule", "mode", "parameters", "parameter_bytes", "direct_address"),
    *("degraded", *_TRAFFIC),
)
_WORKER_FIELDS = (
    *("name", "connected", "waits", "seen", "dropped", "rejected", "period"),
    *("transport", *_TRAFFIC),
)
_BITS = 5  # leading bits of a staleness that select its bin: 16 bins from 32 to 63, ...


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
        self._events: list[dict[str, Any]] = []
        self._kinds: Counter[str] = Counter()  # events by kind since the start
        self._bins: Counter[int] = Counter()  # exchanges by first staleness of the bin
        self._staleness_sum = 0  # of all exchanges
        self._exchanges = 0
        self._totals, self._recent = Series(2), Recent(self._started_monotonic, 2)
        self._totals.add(0.0, 0, 0)
        self._has_more_curves = False  # whether a curve was dropped
        self._draining = False
        self._status = servicer.status(pb.StatusRequest(), EVERYBODY)
        self._saved = servicer.core.saved_version
        self._closed = threading.Event()
        self._thread: Future[None] | None = None
        found = servicer.core.restore_message
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
            status = self._servicer.status(pb.StatusRequest(), EVERYBODY)
            saved = self._servicer.core.saved_version
            with self._lock:
                while self._inbox:
                    at, kind, *details = self._inbox.popleft()
                    getattr(self, f"_on_{kind}")(at, *details)
                self._compare(status, time.time())
                if saved != self._saved:
                    self._saved = saved
                    text = f"a snapshot of version {saved} was written"
                    self._add_event(time.time(), "snapshot", text=text)

    def view(self) -> dict[str, Any]:
        """Return the whole history as JSON values; nonfinite numbers become None.

        Times are in seconds: ``time``, ``started``, ``joined`` and the times of events
        since the epoch, the times of series since ``started``.

        Returns:
          The object that `docs/page.md` describes. Workers choose their own names and
          the names of the numbers that they report, so these may be any text.
        """
        with self._lock:
            return self._view()

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL):
            self.update()

    # Events that calls report, each handled by the method with its kind in the name.

    def _on_joined(
        self, at: float, name: str, session_id: str, is_back: bool, transport: str
    ) -> None:
        worker = self._workers.get(name)
        if worker is None:
            worker = _WorkerHistory(pb.WorkerStatus(name=name), at)
            self._workers[name] = worker
        elif not (worker.end_reason or worker.session_id):
            # A status has already shown this worker. If it was connected, its join is
            # already an event.
            worker.session_id = session_id
            if worker.status.connected:
                return
        is_other_session = worker.session_id != session_id
        if is_other_session:
            worker.sequence, worker.joined = 0, at
        kind, text = "joined", "joined"
        if is_other_session and worker.session_id and not worker.end_reason:
            text = "joined again, with a new session"
        elif is_back and not worker.end_reason:
            kind, text = "back", "is back"
        if transport:
            text += f", by {transport}"
        worker.session_id, worker.end_reason, worker.is_new = session_id, "", True
        worker.status.connected = True
        self._add_event(at, kind, name, text)

    def _on_left(self, at: float, name: str, session_id: str) -> None:
        worker = self._workers.get(name)
        if (
            worker is None
            or worker.end_reason
            or worker.session_id not in ("", session_id)
        ):
            return
        self._end(worker, "left")
        self._add_event(at, "left", name, "left")

    def _on_exchange(
        self, at: float, name: str, session_id: str, steps: int, answer: Answer
    ) -> None:
        worker = self._workers.get(name)
        if worker is not None:
            if session_id == worker.session_id:
                if answer.sequence <= worker.sequence:
                    return  # a repeated exchange, answered again
                worker.sequence = answer.sequence
            worker.has_exchanged = True
            worker.steps += steps
            worker.exchanges += answer.applied
            worker.rejection = answer.rejected or worker.rejection
        if answer.applied:
            self._exchanges += 1
            self._staleness_sum += answer.staleness
            self._bins[_bin(answer.staleness)] += 1

    def _on_rejected(self, at: float, name: str, error: Exception, host: str) -> None:
        # Once the center is closed, every call ends with this error.
        if not isinstance(error, errors.CenterClosedError):
            caller = "" if name else f"a caller at {host} "
            text = f"{caller}was rejected: {error}"[:_MAX_TEXT]
            self._add_event(at, "call rejected", name, text)

    # Changes between two statuses.

    def _compare(self, status: pb.StatusReply, at: float) -> None:
        """Record what has changed since the last status."""
        for worker_status in status.workers:
            self._compare_worker(worker_status, at)
        registered = {worker_status.name for worker_status in status.workers}
        for name, worker in list(self._workers.items()):
            if name not in registered and not (worker.end_reason or worker.is_new):
                self._end(worker, "lease expired")
                text = f"did not return within {self._lease:g} s: its lease expired"
                self._add_event(at, "lease expired", name, text)
            worker.is_new = False
        ended = [name for name, worker in self._workers.items() if worker.end_reason]
        for name in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._workers[name]
        before, self._status = self._status, status
        if status.HasField("version") and not before.HasField("version"):
            text = f"the center has its first parameters, {status.parameters:,} numbers"
            self._add_event(at, "initialized", text=text)
        if status.degraded and status.degraded != before.degraded:
            self._add_event(at, "degraded", text=status.degraded[:_MAX_TEXT])
        elif before.degraded and not status.degraded:
            self._add_event(at, "recovered", text="no longer degraded")
        now, traffic = time.monotonic(), status.bytes_received + status.bytes_sent
        self._totals.add(now - self._started_monotonic, self._exchanges, traffic)
        exchanges_before, traffic_before = self._recent.totals
        added = self._exchanges - exchanges_before, traffic - traffic_before
        if any(added):
            self._recent.add(now, *added)

    def _compare_worker(self, status: pb.WorkerStatus, at: float) -> None:
        name, now = status.name, time.monotonic()
        worker = self._workers.get(name)
        if worker is None:  # e.g. it joined in this process, or before a restart
            worker = _WorkerHistory(status, at - status.joined, is_new=False)
            self._workers[name] = worker
            if status.connected:
                self._add_event(at, "joined", name, "joined")
        elif worker.end_reason and worker.is_new:
            return  # it joined and left since the last update
        elif worker.end_reason:
            worker.end_reason, worker.session_id, worker.joined = "", "", at
            self._add_event(at, "joined", name, "joined")
        if worker.is_new:  # it may have joined after the status was made
            status.connected = True
        if worker.status.connected and not status.connected:
            text = f"lost its connection; it has {self._lease:g} s to return"
            self._add_event(at, "lost", name, text)
        if (count := status.rejected - worker.status.rejected) > 0:
            reason = f": {worker.rejection}" if worker.rejection else ""
            text = f"sent a message that was rejected{reason}"[:_MAX_TEXT]
            self._add_event(at, "message rejected", name, text, count)
        reported = dict(status.reported)
        if worker.has_exchanged or reported != dict(worker.status.reported):
            for label, value in reported.items():
                if (series := self._curve(worker, label)) is not None:
                    series.add(now - self._started_monotonic, value)
        worker.status, worker.has_exchanged = status, False

    @property
    def _lease(self) -> float:
        return self._servicer.limits.lease

    def _end(self, worker: _WorkerHistory, reason: str) -> None:
        """Mark a worker as ended, and move it behind all other workers."""
        worker.end_reason = reason
        worker.status.connected = worker.status.waits = False
        for field in ("exchanges_per_second", "steps_per_second", "stalled"):
            worker.status.ClearField(field)
        for series in worker.curves.values():  # NaN shows as a gap
            series.add(time.monotonic() - self._started_monotonic, math.nan)
        name = worker.status.name
        self._workers[name] = self._workers.pop(name)

    def _curve(self, worker: _WorkerHistory, label: str) -> Series | None:
        """Return the series of a reported number; None if there are too many series."""
        if (series := worker.curves.get(label)) is not None:
            return series
        workers = self._workers.values()
        if sum(len(other.curves) for other in workers) >= MAX_CURVES:
            ended = next((w for w in workers if w.end_reason and w.curves), None)
            if ended is None:
                self._has_more_curves = True
                return None
            ended.curves.clear()
        return worker.curves.setdefault(label, Series())

    def _add_event(
        self, at: float, kind: str, worker: str = "", text: str = "", count: int = 1
    ) -> None:
        """Record an event; the same event within a minute only increases a count.

        If there are too many events, the oldest one of the most frequent kind is
        dropped. A flood of one kind, such as failed authentications, therefore does not
        displace the events of other kinds.
        """
        self._kinds[kind] += count
        is_single = kind in ("joined", "back", "lost", "left", "lease expired")
        for event in [] if is_single else reversed(self._events):
            if at - event["time"] > _REPEAT_WINDOW:
                break
            is_same = kind == "call rejected" or event["text"] == text
            if is_same and (event["kind"], event["worker"]) == (kind, worker):
                event["count"] += count
                event["time"], event["text"] = at, text
                return
        number = self._events[-1]["number"] + 1 if self._events else 1
        event = {"number": number, "time": at, "kind": kind, "worker": worker}
        self._events.append({**event, "text": text, "count": count})
        if len(self._events) > MAX_EVENTS:
            kinds = Counter(event["kind"] for event in self._events)
            ((frequent, _),) = kinds.most_common(1)
            oldest = next(e for e in self._events if e["kind"] == frequent)
            self._events.remove(oldest)

    # The view.

    def _view(self) -> dict[str, Any]:
        now, status = time.monotonic(), self._status
        times, exchanges, sent = self._totals.columns()
        rates = self._recent.rates(now) or (None, None)
        workers = sorted(self._workers.items())
        return {
            "release": __version__,
            "time": time.time(),
            "started": self._started_at,
            "uptime": now - self._started_monotonic,
            "draining": self._draining,
            "center": status.center,
            "version": status.version if status.HasField("version") else None,
            "address": status.listens_at,
            "rejected": dict(status.rejected),
            **{name: getattr(status, name) for name in _CENTER_FIELDS},
            "exchanges": self._exchanges,
            "exchanges_per_second": _rounded(rates[0]),
            "bytes_per_second": _rounded(rates[1]),
            "series": {
                "time": _all_rounded(times[1:]),
                "exchanges_per_second": _rates(times, exchanges),
                "bytes_per_second": _rates(times, sent),
            },
            "staleness": {
                "count": self._exchanges,
                "sum": self._staleness_sum,
                "bins": [
                    {"from": first, "to": _bin_end(first), "count": count}
                    for first, count in sorted(self._bins.items())
                ],
            },
            "workers": [_worker_view(worker) for _, worker in workers],
            "curves": [
                {
                    "name": label,
                    "worker": name,
                    "time": _all_rounded(series.columns()[0]),
                    "value": _all_rounded(series.columns()[1]),
                }
                for name, worker in workers
                for label, series in sorted(worker.curves.items())
            ],
            "has_more_curves": self._has_more_curves,
            "events": [dict(event) for event in self._events],
            "event_counts": dict(self._kinds),
        }


@dataclasses.dataclass
class _WorkerHistory:
    """A worker that is or was registered."""

    status: pb.WorkerStatus  # its last status before its session ended
    joined: float  # seconds since the epoch
    session_id: str = ""  # "" if unknown
    is_new: bool = True  # whether it joined since the last update
    end_reason: str = ""  # "left" or "lease expired"; "" while it is registered
    sequence: int = 0  # sequence number of its last exchange
    exchanges: int = 0  # applied exchanges of all its sessions at this service
    steps: int = 0  # local steps of all its messages, even dropped and rejected ones
    has_exchanged: bool = False  # since the last update
    rejection: str = ""  # reason for the rejection of its last rejected message
    curves: dict[str, Series] = dataclasses.field(default_factory=dict)


class Series:
    """A time series with a bounded number of points.

    When the series is full, every second point is dropped, and points are added half as
    often from then on. The points always cover the whole run evenly.

    Args:
      width: number of values of a point.
      max_points: maximum number of points.
    """

    def __init__(self, width: int = 1, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._columns = [array("d") for _ in range(1 + width)]
        self._interval = 0.0  # minimum number of seconds between two points
        self._newest: tuple[float, ...] | None = None  # until the next point is due

    def add(self, now: float, *values: float) -> None:
        """Add the values at a time, in seconds."""
        times = self._columns[0]
        if times and now - times[-1] < self._interval - _INTERVAL / 2:
            self._newest = now, *values
            return
        if len(times) >= self._max_points:
            self._columns = [column[::2] for column in self._columns]
            self._interval = 2 * max(self._interval, _INTERVAL)
        for column, value in zip(self._columns, (now, *values), strict=True):
            column.append(value)
        self._newest = None

    def columns(self) -> list[list[float]]:
        """Return the times and each of the values, always including the newest ones."""
        if self._newest is None:
            return [list(column) for column in self._columns]
        pairs = zip(self._columns, self._newest, strict=True)
        return [[*column, newest] for column, newest in pairs]


def _worker_view(worker: _WorkerHistory) -> dict[str, Any]:
    """Return a worker as JSON values."""
    status = worker.status
    numbers = {
        name: _rounded(getattr(status, name)) if status.HasField(name) else None
        for name in ("norm", "exchanges_per_second", "steps_per_second", "stalled")
    }
    return {
        **{name: getattr(status, name) for name in _WORKER_FIELDS},
        **numbers,
        "staleness": status.staleness if status.HasField("staleness") else None,
        "end_reason": worker.end_reason,
        "joined": worker.joined,
        "exchanges": worker.exchanges,
        "steps": worker.steps,
        "reported": {
            n: _rounded(value) for n, value in sorted(status.reported.items())
        },
    }


def _bin(staleness: int) -> int:
    """Return the least staleness that shares a bin with this one."""
    bits = max(0, staleness.bit_length() - _BITS)
    return staleness >> bits << bits


def _bin_end(first: int) -> int:
    return first + (1 << max(0, first.bit_length() - _BITS)) - 1


def _rounded(value: float | None) -> float | None:
    """Return a number rounded to six digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _all_rounded(values: list[float]) -> list[float | None]:
    return [_rounded(value) for value in values]


def _rates(times: list[float], totals: list[float]) -> list[float | None]:
    """Return the growth of a total per second, from each time to the next."""
    spans = zip(times, times[1:], totals, totals[1:], strict=False)
    return [_rounded((b - a) / max(t - s, 1e-9)) for s, t, a, b in spans]
