"""What a served center remembers for whoever watches it: never more than so much.

Calls tell a `Monitor` what happens by appending to its inbox, under no lock. A thread
of its own looks once a second: at the inbox, and at what the service says of itself.
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
from agn_optax.center import Recent
from agn_optax.service import center_pb2 as pb
from agn_optax.service._access import EVERYBODY
from agn_optax.service._servicer import Servicer

MOST_POINTS = 600  # of a series
MOST_CURVES = 256  # series of reported numbers, of all workers together
MOST_EVENTS = 200
MOST_GONE = 32  # workers that are gone and still shown, the last ones
_MOST_TOLD = 1 << 16  # between two looks
_LOOK = 1.0  # seconds between two looks
_SAME = 60.0  # seconds within which the same event is counted, and not said again
_LONGEST = 500  # characters of an event
_BITS = 5  # of a staleness by which its bin is known: 16 bins from 32 to 63, and so on


class Series:
    """Numbers over time, of which there are never too many.

    When it is full every second point goes, and from then on half as many come. So it
    covers the whole run, evenly.

    Args:
      width: numbers of a point.
      most: points.
    """

    def __init__(self, width: int = 1, most: int = MOST_POINTS) -> None:
        self._most = most
        self._columns = [array("d") for _ in range(1 + width)]
        self._interval = 0.0  # seconds between two points, at least
        self._newest: tuple[float, ...] | None = None  # if it is no point

    def add(self, now: float, *values: float) -> None:
        """What is so at a time, in seconds."""
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
        """The times, and each of the numbers at them; the newest in any case."""
        if self._newest is None:
            return [list(column) for column in self._columns]
        ends = zip(self._columns, self._newest, strict=True)
        return [[*column, newest] for column, newest in ends]


@dataclasses.dataclass
class _Known:
    """A worker that is there, or was."""

    status: pb.WorkerStatus  # the last one in which it was there
    joined: float  # seconds since the epoch
    incarnation: str = ""
    is_new: bool = True  # it joined since the last look
    gone: str = ""  # how it went
    sequence: int = 0  # of its last exchange
    exchanges: int = 0  # of all its lives, at this service
    steps: int = 0  # local ones, that were in them
    has_exchanged: bool = False  # since the last look
    why: str = ""  # its last message was refused
    curves: dict[str, Series] = dataclasses.field(default_factory=dict)


class Monitor:
    """What a service remembers for whoever watches.

    Args:
      servicer: of the center.

    Everything is bounded: series by their points, curves, events and workers that are
    gone by their number.
    """

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._looking = threading.Lock()  # one after the other, or times go backwards
        self._lock = threading.Lock()
        self._told: deque[tuple[Any, ...]] = deque(maxlen=_MOST_TOLD)
        self._started, self._began = time.time(), time.monotonic()
        self._workers: dict[str, _Known] = {}
        self._events: list[dict[str, Any]] = []
        self._kinds: Counter[str] = Counter()  # of all events that ever were
        self._bins: Counter[int] = Counter()  # of staleness, by their beginnings
        self._staleness = 0  # the sum of all
        self._exchanges = 0
        self._totals, self._recent = Series(2), Recent(self._began, 2)
        self._totals.add(0.0, 0, 0)
        self._left_out = 0  # curves for which there is no room
        self._draining = False
        self._said = servicer.status(pb.StatusRequest(), EVERYBODY)
        self._saved = servicer.core.saved_version
        self._end = threading.Event()
        self._thread: Future[None] | None = None
        found = servicer.core.found
        self._happened(
            self._started,
            "restarted" if found else "started",
            text=found or "the center is there",
        )
        servicer.tell = self.tell

    def start(self) -> None:
        """Looks now, and once a second until `close`."""
        self.look()
        self._thread = keep_running(self._run, "agn-optax monitor")

    def close(self, timeout: float) -> None:
        """Looks no more."""
        self._end.set()
        if self._thread is not None:
            wait([self._thread], timeout)

    def tell(self, *said: Any) -> None:
        """Something has happened: its kind, and what there is to say of it."""
        self._told.append((time.time(), *said))

    def drain(self) -> None:
        """The service is about to end."""
        with self._lock:
            self._draining = True
            self._happened(time.time(), "draining", text="the center is going down")

    def look(self) -> None:
        """Takes in what has happened."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        # Others may hold the center for a while, and views must not wait for them.
        said = self._servicer.status(pb.StatusRequest(), EVERYBODY)
        core = self._servicer.core
        saved = core.saved_version
        takes: dict[str, Callable[..., None]] = {
            "joined": self._joined,
            "left": self._left,
            "exchange": self._exchanged,
            "refused": self._refused,
        }
        with self._lock:
            while self._told:
                at, kind, *what = self._told.popleft()
                takes[kind](at, *what)
            self._compare(said, time.time())
            if saved != self._saved:
                self._saved = saved
                text = f"a snapshot of version {saved} was written"
                self._happened(time.time(), "snapshot", text=text)

    def view(self) -> dict[str, Any]:
        """All of it, in terms of JSON: numbers that are not finite are None.

        Times are seconds: ``time``, ``started`` and those of events and of
        ``joined`` since the epoch, those of series since ``started``.

        Returns:
          What `docs/page.md` describes. Names of workers and of what they report are
          theirs, and may be any text.
        """
        with self._lock:
            return self._view()

    def _run(self) -> None:
        while not self._end.wait(_LOOK):
            self.look()

    # What calls tell.

    def _joined(
        self, at: float, name: str, incarnation: str, is_back: bool, transport: str
    ) -> None:
        known = self._workers.get(name)
        if known is None:
            known = self._workers[name] = _Known(pb.WorkerStatus(name=name), at)
        elif not (known.gone or known.incarnation):
            # It was seen before this was heard; if it was connected, that was said.
            known.incarnation = incarnation
            if known.status.connected:
                return
        is_other = known.incarnation != incarnation
        if is_other:
            known.sequence, known.joined = 0, at
        text = "is back" if is_back and not known.gone else "joined"
        if is_other and known.incarnation and not known.gone:
            text = "joined again, in another life"
        if transport:
            text += f", by {transport}"
        known.incarnation, known.gone, known.is_new = incarnation, "", True
        known.status.connected = True
        kind = "back" if text.startswith("is back") else "joined"
        self._happened(at, kind, name, text)

    def _left(self, at: float, name: str, incarnation: str) -> None:
        known = self._workers.get(name)
        if known is None or known.gone or known.incarnation not in ("", incarnation):
            return
        self._went(known, "left")
        self._happened(at, "left", name, "left")

    def _exchanged(
        self,
        at: float,
        name: str,
        incarnation: str,
        sequence: int,
        steps: int,
        staleness: int,
        applied: bool,
        refused: str,
    ) -> None:
        known = self._workers.get(name)
        if known is not None:
            if incarnation == known.incarnation:
                if sequence <= known.sequence:
                    return  # it is answered again
                known.sequence = sequence
            known.has_exchanged = True
            known.steps += steps
            known.exchanges += applied
            known.why = refused or known.why
        if applied:
            self._exchanges += 1
            self._staleness += staleness
            self._bins[_bin(staleness)] += 1

    def _refused(self, at: float, name: str, error: Exception, host: str) -> None:
        if isinstance(error, errors.CenterClosedError):
            return  # that is no news
        who = "" if name else f"somebody at {host} "
        self._happened(at, "refused", name, f"{who}was refused: {error}"[:_LONGEST])

    # What is seen.

    def _compare(self, said: pb.StatusReply, at: float) -> None:
        now = time.monotonic()
        there = {worker.name: worker for worker in said.workers}
        for name, status in there.items():
            known = self._workers.get(name)
            if known is None:  # within this process, or its life before
                joined = at - status.joined
                known = self._workers[name] = _Known(status, joined, is_new=False)
                if status.connected:
                    self._happened(at, "joined", name, "joined")
            elif known.gone and not known.is_new:
                known.gone, known.incarnation, known.joined = "", "", at
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
            text = f"the first parameters are there, {said.parameters:,} numbers"
            self._happened(at, "initialized", text=text)
        if said.degraded and said.degraded != self._said.degraded:
            self._happened(at, "degraded", text=said.degraded[:_LONGEST])
        elif self._said.degraded and not said.degraded:
            self._happened(at, "well", text="what was degraded is well again")
        self._said = said
        sent = said.bytes_received + said.bytes_sent
        self._totals.add(now - self._began, self._exchanges, sent)
        before = self._recent.totals
        grown = self._exchanges - before[0], sent - before[1]
        if any(grown):
            self._recent.add(now, *grown)

    def _see(self, known: _Known, status: pb.WorkerStatus, at: float) -> None:
        """A worker that is there."""
        name, now = status.name, time.monotonic()
        if known.is_new:  # it may have joined since that was said
            status.connected = True
        if known.status.connected and not status.connected:
            text = f"lost its connection; it has {self._lease:g} s to be back"
            self._happened(at, "lost", name, text)
        if (more := status.refused - known.status.refused) > 0:
            why = f": {known.why}" if known.why else ""
            text = f"sent a message that was refused{why}"[:_LONGEST]
            self._happened(at, "message", name, text, more)
        reported = dict(status.reported)
        if known.has_exchanged or reported != dict(known.status.reported):
            for label, value in reported.items():
                if (series := self._curve(known, label)) is not None:
                    series.add(now - self._began, value)
        known.status, known.has_exchanged = status, False

    @property
    def _lease(self) -> float:
        return self._servicer.core.ledger.lease

    def _went(self, known: _Known, how: str) -> None:
        """Is the last one of those that are gone."""
        known.gone = how
        known.status.connected = known.status.waits = False
        for each in ("exchanges_per_second", "steps_per_second", "stalled"):
            known.status.ClearField(each)
        for series in known.curves.values():  # a gap
            series.add(time.monotonic() - self._began, math.nan)
        name = known.status.name
        self._workers[name] = self._workers.pop(name)

    def _curve(self, known: _Known, label: str) -> Series | None:
        """Of a number that a worker reports; None if there is no room for it."""
        if (series := known.curves.get(label)) is not None:
            return series
        everybody = self._workers.values()
        if sum(len(each.curves) for each in everybody) >= MOST_CURVES:
            gone = next((each for each in everybody if each.gone and each.curves), None)
            if gone is None:
                self._left_out += 1
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
        """One more event; the same one within a minute only counts.

        Where there are too many, one goes of the kind of which there are most: nobody
        drives out what others did by knocking at the door.
        """
        self._kinds[kind] += count
        for event in reversed(self._events):
            if at - event["time"] > _SAME:
                break
            if (event["kind"], event["worker"]) == (kind, worker) and (
                kind == "refused" or event["text"] == text
            ):
                if kind in ("joined", "back", "lost", "left", "given up"):
                    break  # each of them is told
                event["count"] += count
                event["time"], event["text"] = at, text
                return
        number = self._events[-1]["number"] + 1 if self._events else 1
        self._events.append(
            {
                "number": number,
                "time": at,
                "kind": kind,
                "worker": worker,
                "text": text,
                "count": count,
            }
        )
        if len(self._events) > MOST_EVENTS:
            ((most, _),) = Counter(each["kind"] for each in self._events).most_common(1)
            oldest = next(each for each in self._events if each["kind"] == most)
            self._events.remove(oldest)

    # What is shown.

    def _view(self) -> dict[str, Any]:
        now, said = time.monotonic(), self._said
        times, exchanges, sent = self._totals.columns()
        rates = self._recent.rates(now) or (None, None)
        return {
            "release": __version__,
            "time": time.time(),
            "started": self._started,
            "uptime": now - self._began,
            "draining": self._draining,
            "center": self._servicer.core.life,
            "rule": said.rule,
            "mode": said.mode,
            "version": said.version if said.HasField("version") else None,
            "parameters": said.parameters,
            "parameter_bytes": said.parameter_bytes,
            "parent": said.parent,
            "address": said.listens_at,
            "direct_address": said.direct_address,
            "degraded": said.degraded,
            "refused": dict(said.refused),
            "exchanges": self._exchanges,
            "bytes_received": said.bytes_received,
            "bytes_sent": said.bytes_sent,
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
            "workers": [
                _shown(known)
                for _, known in sorted(self._workers.items(), key=lambda item: item[0])
            ],
            "curves": [
                {
                    "name": label,
                    "worker": name,
                    "time": _plains(columns[0]),
                    "value": _plains(columns[1]),
                }
                for name, known in sorted(self._workers.items())
                for label, series in sorted(known.curves.items())
                for columns in [series.columns()]
            ],
            "curves_left_out": self._left_out > 0,
            "events": [dict(event) for event in self._events],
            "event_counts": dict(self._kinds),
        }


def _shown(known: _Known) -> dict[str, Any]:
    """A worker, in terms of JSON."""
    status = known.status

    def said(name: Any) -> float | None:
        return _plain(getattr(status, name)) if status.HasField(name) else None

    return {
        "name": status.name,
        "connected": status.connected,
        "gone": known.gone,
        "waits": status.waits,
        "joined": known.joined,
        "seen": status.seen,
        "exchanges": known.exchanges,
        "steps": known.steps,
        "dropped": status.dropped,
        "refused": status.refused,
        "staleness": status.staleness if status.HasField("staleness") else None,
        "norm": said("norm"),
        "period": status.period,
        "transport": status.transport,
        "bytes_received": status.bytes_received,
        "bytes_sent": status.bytes_sent,
        "exchanges_per_second": said("exchanges_per_second"),
        "steps_per_second": said("steps_per_second"),
        "stalled": said("stalled"),
        "reported": {n: _plain(value) for n, value in sorted(status.reported.items())},
    }


def _bin(staleness: int) -> int:
    """Return the least staleness that shares a bin with this one."""
    bits = max(0, staleness.bit_length() - _BITS)
    return staleness >> bits << bits


def _bin_end(first: int) -> int:
    return first + (1 << max(0, first.bit_length() - _BITS)) - 1


def _plain(value: float | None) -> float | None:
    """A number that JSON has, in six digits."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _plains(values: list[float]) -> list[float | None]:
    return [_plain(value) for value in values]


def _growth(times: list[float], totals: list[float]) -> list[float | None]:
    """By how much a number grew a second, up to each time but the first."""
    spans = zip(times, times[1:], totals, totals[1:], strict=False)
    return [_plain((b - a) / max(t - s, 1e-9)) for s, t, a, b in spans]
