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
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from agn_optax import errors
from agn_optax._internal import keep_running
from agn_optax._version import __version__
from agn_optax.center import Answer, Recent
from agn_optax.service import EVERYBODY, Servicer
from agn_optax.service import messages as pb

MOST_POINTS = 600  # points of a series
MOST_CURVES = 256  # series of reported numbers, for all workers together
MOST_EVENTS = 200
MOST_GONE = 32  # workers that have gone most recently, which are still shown
_MOST_INBOX = 1 << 16  # entries of the inbox
_LOOK = 1.0  # seconds between two updates
_SAME = 60.0  # seconds within which a repeated event only increases a count
_LONGEST = 500  # characters of an event's text
# Fields of the status that the view has as they are, of the center and of a worker.
_TRAFFIC = ("bytes_received", "bytes_sent")
_OF_CENTER = (
    *("rule", "mode", "parameters", "parameter_bytes", "parent", "direct_address"),
    *("degraded", *_TRAFFIC),
)
_OF_WORKER = (
    *("name", "connected", "waits", "seen", "dropped", "rejected", "period"),
    *("transport", *_TRAFFIC),
)
_BITS = 5  # leading bits of a staleness that select its bin: 16 bins from 32 to 63, ...


class Series:
    """A time series with a bounded number of points.

    When the series is full, every second point is dropped, and points are added half as
    often from then on. The points always cover the whole run evenly.

    Args:
      width: number of values of a point.
      most: maximum number of points.
    """

    def __init__(self, width: int = 1, most: int = MOST_POINTS) -> None:
        self._most = most
        self._columns = [array("d") for _ in range(1 + width)]
        self._interval = 0.0  # minimum number of seconds between two points
        self._newest: tuple[float, ...] | None = None  # if it came too soon for a point

    def add(self, now: float, *values: float) -> None:
        """Add the values at a time, in seconds."""
        times = self._columns[0]
        if times and now - times[-1] < self._interval - _LOOK / 2:
            self._newest = now, *values
            return
        if len(times) >= self._most:
            self._columns = [column[::2] for column in self._columns]
            self._interval = 2 * max(self._interval, _LOOK)
        for column, value in zip(self._columns, (now, *values), strict=True):
            column.append(value)
        self._newest = None

    def columns(self) -> list[list[float]]:
        """Return the times and each of the values, always including the newest ones."""
        if self._newest is None:
            return [list(column) for column in self._columns]
        ends = zip(self._columns, self._newest, strict=True)
        return [[*column, newest] for column, newest in ends]


@dataclasses.dataclass
class _Known:
    """A worker that is joined or was."""

    status: pb.WorkerStatus  # its last status while it was joined
    joined: float  # seconds since the epoch
    session_id: str = ""  # session id; "" if unknown
    is_new: bool = True  # whether it joined since the last update
    gone: str = ""  # "left" or "given up"; "" while it is joined
    sequence: int = 0  # sequence number of its last exchange
    exchanges: int = 0  # applied exchanges of all its sessions at this service
    steps: int = 0  # local steps of these
    has_exchanged: bool = False  # since the last update
    why: str = ""  # why its last rejected message was rejected
    curves: dict[str, Series] = dataclasses.field(default_factory=dict)


class Monitor:
    """The recent history of a service, as its page and its metrics show it.

    Everything is bounded: the points of a series, and the numbers of curves, events and
    workers that have gone.

    Args:
      servicer: the servicer of the center.
    """

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._looking = threading.Lock()  # serializes updates: times must not decrease
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Any, ...]] = deque(maxlen=_MOST_INBOX)
        self._started, self._began = time.time(), time.monotonic()
        self._workers: dict[str, _Known] = {}
        self._events: list[dict[str, Any]] = []
        self._kinds: Counter[str] = Counter()  # events by kind since the start
        self._bins: Counter[int] = Counter()  # exchanges by first staleness of the bin
        self._staleness = 0  # sum of the staleness of all exchanges
        self._exchanges = 0
        self._totals, self._recent = Series(2), Recent(self._began, 2)
        self._totals.add(0.0, 0, 0)
        self._left_out = False  # whether MOST_CURVES was ever reached
        self._draining = False
        self._said = servicer.status(pb.StatusRequest(), EVERYBODY)
        self._saved = servicer.core.saved_version
        self._end = threading.Event()
        self._thread: Future[None] | None = None
        found = servicer.core.found
        self._happened(
            self._started,
            "restarted" if found else "started",
            text=found or "the center has started",
        )
        servicer.on_event = self.tell

    def start(self) -> None:
        """Update now, and once a second until `close`."""
        self.look()
        self._thread = keep_running(self._run, "agn-optax monitor")

    def close(self, timeout: float) -> None:
        """Stop updating."""
        self._end.set()
        if self._thread is not None:
            wait([self._thread], timeout)

    def tell(self, *said: Any) -> None:
        """Record an event in the inbox: its kind and its details."""
        self._inbox.append((time.time(), *said))

    def drain(self) -> None:
        """Record that the service is about to end."""
        with self._lock:
            self._draining = True
            self._happened(time.time(), "draining", text="the center is going down")

    def look(self) -> None:
        """Process the inbox and the current status of the service."""
        takes: dict[str, Callable[..., None]] = {
            "joined": self._joined,
            "left": self._left,
            "exchange": self._exchanged,
            "rejected": self._rejected,
        }
        with self._looking:
            # The status may wait for the center's lock; views must not wait for that.
            said = self._servicer.status(pb.StatusRequest(), EVERYBODY)
            saved = self._servicer.core.saved_version
            with self._lock:
                while self._inbox:
                    at, kind, *details = self._inbox.popleft()
                    takes[kind](at, *details)
                self._compare(said, time.time())
                if saved != self._saved:
                    self._saved = saved
                    text = f"a snapshot of version {saved} was written"
                    self._happened(time.time(), "snapshot", text=text)

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
        while not self._end.wait(_LOOK):
            self.look()

    # Events that calls report.

    def _joined(
        self, at: float, name: str, session_id: str, is_back: bool, transport: str
    ) -> None:
        known = self._workers.get(name)
        if known is None:
            known = self._workers[name] = _Known(pb.WorkerStatus(name=name), at)
        elif not (known.gone or known.session_id):
            # A status showed the worker before this event was processed. If it was
            # connected then, its join has already been recorded.
            known.session_id = session_id
            if known.status.connected:
                return
        is_other = known.session_id != session_id
        if is_other:
            known.sequence, known.joined = 0, at
        text = "is back" if is_back and not known.gone else "joined"
        if is_other and known.session_id and not known.gone:
            text = "joined again, with a new session"
        if transport:
            text += f", by {transport}"
        known.session_id, known.gone, known.is_new = session_id, "", True
        known.status.connected = True
        kind = "back" if text.startswith("is back") else "joined"
        self._happened(at, kind, name, text)

    def _left(self, at: float, name: str, session_id: str) -> None:
        known = self._workers.get(name)
        if known is None or known.gone or known.session_id not in ("", session_id):
            return
        self._went(known, "left")
        self._happened(at, "left", name, "left")

    def _exchanged(
        self, at: float, name: str, session_id: str, steps: int, answer: Answer
    ) -> None:
        known = self._workers.get(name)
        if known is not None:
            if session_id == known.session_id:
                if answer.sequence <= known.sequence:
                    return  # a repeated exchange, answered again
                known.sequence = answer.sequence
            known.has_exchanged = True
            known.steps += steps
            known.exchanges += answer.applied
            known.why = answer.rejected or known.why
        if answer.applied:
            self._exchanges += 1
            self._staleness += answer.staleness
            self._bins[_bin(answer.staleness)] += 1

    def _rejected(self, at: float, name: str, error: Exception, host: str) -> None:
        if isinstance(error, errors.CenterClosedError):
            return  # every call ends so once the center is closed
        who = "" if name else f"a caller at {host} "
        self._happened(at, "rejected", name, f"{who}was rejected: {error}"[:_LONGEST])

    # Changes between two statuses.

    def _compare(self, said: pb.StatusReply, at: float) -> None:
        now = time.monotonic()
        there = {worker.name: worker for worker in said.workers}
        for name, status in there.items():
            known = self._workers.get(name)
            if known is None:  # joined in this process, or before a restart
                joined = at - status.joined
                known = self._workers[name] = _Known(status, joined, is_new=False)
                if status.connected:
                    self._happened(at, "joined", name, "joined")
            elif known.gone and not known.is_new:
                known.gone, known.session_id, known.joined = "", "", at
                self._happened(at, "joined", name, "joined")
            if not known.gone:
                self._see(known, status, at)
        for name, known in list(self._workers.items()):
            if name not in there and not (known.gone or known.is_new):
                self._went(known, "given up")
                self._happened(
                    at,
                    "given up",
                    name,
                    f"was given up: it was not back within {self._lease:g} s",
                )
            known.is_new = False
        self._forget()
        if said.HasField("version") and not self._said.HasField("version"):
            text = f"the center has its first parameters, {said.parameters:,} numbers"
            self._happened(at, "initialized", text=text)
        if said.degraded and said.degraded != self._said.degraded:
            self._happened(at, "degraded", text=said.degraded[:_LONGEST])
        elif self._said.degraded and not said.degraded:
            self._happened(at, "well", text="no longer degraded")
        self._said = said
        sent = said.bytes_received + said.bytes_sent
        self._totals.add(now - self._began, self._exchanges, sent)
        before = self._recent.totals
        grown = self._exchanges - before[0], sent - before[1]
        if any(grown):
            self._recent.add(now, *grown)

    def _see(self, known: _Known, status: pb.WorkerStatus, at: float) -> None:
        """Update a joined worker from its status."""
        name, now = status.name, time.monotonic()
        if known.is_new:  # it may have joined after the status was made
            status.connected = True
        if known.status.connected and not status.connected:
            text = f"lost its connection; it has {self._lease:g} s to return"
            self._happened(at, "lost", name, text)
        if (more := status.rejected - known.status.rejected) > 0:
            why = f": {known.why}" if known.why else ""
            text = f"sent a message that was rejected{why}"[:_LONGEST]
            self._happened(at, "message", name, text, more)
        reported = dict(status.reported)
        if known.has_exchanged or reported != dict(known.status.reported):
            for label, value in reported.items():
                if (series := self._curve(known, label)) is not None:
                    series.add(now - self._began, value)
        known.status, known.has_exchanged = status, False

    @property
    def _lease(self) -> float:
        return self._servicer.limits.lease

    def _went(self, known: _Known, how: str) -> None:
        """Mark a worker as gone, and make it the most recent of the gone ones."""
        known.gone = how
        known.status.connected = known.status.waits = False
        for each in ("exchanges_per_second", "steps_per_second", "stalled"):
            known.status.ClearField(each)
        for series in known.curves.values():  # NaN shows as a gap
            series.add(time.monotonic() - self._began, math.nan)
        name = known.status.name
        self._workers[name] = self._workers.pop(name)

    def _curve(self, known: _Known, label: str) -> Series | None:
        """Return the series of a number that a worker reports; None if out of room."""
        if (series := known.curves.get(label)) is not None:
            return series
        everybody = self._workers.values()
        if sum(len(each.curves) for each in everybody) >= MOST_CURVES:
            gone = next((each for each in everybody if each.gone and each.curves), None)
            if gone is None:
                self._left_out = True
                return None
            gone.curves.clear()
        return known.curves.setdefault(label, Series())

    def _forget(self) -> None:
        gone = [name for name, known in self._workers.items() if known.gone]
        for name in gone[: max(0, len(gone) - MOST_GONE)]:
            del self._workers[name]

    def _happened(
        self, at: float, kind: str, worker: str = "", text: str = "", count: int = 1
    ) -> None:
        """Record an event; the same one within a minute only increases a count.

        If there are too many events, the oldest one of the most frequent kind is
        dropped. A flood of one kind, such as failed authentications, therefore does not
        displace the events of other kinds.
        """
        self._kinds[kind] += count
        is_single = kind in ("joined", "back", "lost", "left", "given up")
        for event in [] if is_single else reversed(self._events):
            if at - event["time"] > _SAME:
                break
            is_same = kind == "rejected" or event["text"] == text
            if is_same and (event["kind"], event["worker"]) == (kind, worker):
                event["count"] += count
                event["time"], event["text"] = at, text
                return
        number = self._events[-1]["number"] + 1 if self._events else 1
        event = {"number": number, "time": at, "kind": kind, "worker": worker}
        self._events.append({**event, "text": text, "count": count})
        if len(self._events) > MOST_EVENTS:
            ((most, _),) = Counter(each["kind"] for each in self._events).most_common(1)
            oldest = next(each for each in self._events if each["kind"] == most)
            self._events.remove(oldest)

    # The view.

    def _view(self) -> dict[str, Any]:
        now, said = time.monotonic(), self._said
        times, exchanges, sent = self._totals.columns()
        rates = self._recent.rates(now) or (None, None)
        workers = sorted(self._workers.items())
        return {
            "release": __version__,
            "time": time.time(),
            "started": self._started,
            "uptime": now - self._began,
            "draining": self._draining,
            "center": said.center,
            "version": said.version if said.HasField("version") else None,
            "address": said.listens_at,
            "rejected": dict(said.rejected),
            **{name: getattr(said, name) for name in _OF_CENTER},
            "exchanges": self._exchanges,
            "exchanges_per_second": _plain(rates[0]),
            "bytes_per_second": _plain(rates[1]),
            "series": {
                "time": _plains(times[1:]),
                "exchanges_per_second": _growth(times, exchanges),
                "bytes_per_second": _growth(times, sent),
            },
            "staleness": {
                "count": self._exchanges,
                "sum": self._staleness,
                "bins": [
                    {"from": first, "to": _bin_end(first), "count": count}
                    for first, count in sorted(self._bins.items())
                ],
            },
            "workers": [_shown(known) for _, known in workers],
            "curves": [
                {
                    "name": label,
                    "worker": name,
                    "time": _plains(series.columns()[0]),
                    "value": _plains(series.columns()[1]),
                }
                for name, known in workers
                for label, series in sorted(known.curves.items())
            ],
            "curves_left_out": self._left_out,
            "events": [dict(event) for event in self._events],
            "event_counts": dict(self._kinds),
        }


def _shown(known: _Known) -> dict[str, Any]:
    """Return a worker as JSON values."""
    status = known.status
    numbers = {
        name: _plain(getattr(status, name)) if status.HasField(name) else None
        for name in ("norm", "exchanges_per_second", "steps_per_second", "stalled")
    }
    return {
        **{name: getattr(status, name) for name in _OF_WORKER},
        **numbers,
        "staleness": status.staleness if status.HasField("staleness") else None,
        "gone": known.gone,
        "joined": known.joined,
        "exchanges": known.exchanges,
        "steps": known.steps,
        "reported": {n: _plain(value) for n, value in sorted(status.reported.items())},
    }


def _bin(staleness: int) -> int:
    """Return the least staleness that shares a bin with this one."""
    bits = max(0, staleness.bit_length() - _BITS)
    return staleness >> bits << bits


def _bin_end(first: int) -> int:
    return first + (1 << max(0, first.bit_length() - _BITS)) - 1


def _plain(value: float | None) -> float | None:
    """Return a number rounded to six digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _plains(values: list[float]) -> list[float | None]:
    return [_plain(value) for value in values]


def _growth(times: list[float], totals: list[float]) -> list[float | None]:
    """Return the growth per second of a total, up to each time except the first."""
    spans = zip(times, times[1:], totals, totals[1:], strict=False)
    return [_plain((b - a) / max(t - s, 1e-9)) for s, t, a, b in spans]
