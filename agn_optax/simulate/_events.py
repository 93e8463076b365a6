"""The events of a simulation: the real ledger and exchange machines, a virtual clock.

Times are whole nanoseconds. Events happen in the order of (time, kind, worker, number),
so that the result depends on nothing else:

    worker   JOIN -> STARTED -> STEPS -> (sends) ... ANSWERED -> STEPS ...
    center   ARRIVED -> SERVED -> (the ledger decides) -> (answers)
    links    MOVED: the next transfer through the center's link has ended
    others   DUE: a grace period or a lease has ended; FAILED, LEFT

Modes, leases, staleness and paces are those of `agn_optax.center`, and rounds those of
`agn_optax.worker`. This module only says when they are asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import heapq
import itertools
import math
import operator
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from agn_optax import errors
from agn_optax.center import Batch, Ledger, Mode, Submission
from agn_optax.round import DynamicPeriod
from agn_optax.simulate._cluster import LAST, Cluster, Link, nanoseconds
from agn_optax.simulate._shared_link import SharedLink
from agn_optax.worker import Counts, ExchangeMachine, State, due_fragments

# Kinds of events; those with lower numbers come first at the same time.
_JOIN, _STARTED, _MOVED, _ARRIVED, _SERVED = range(5)
_DUE, _ANSWERED, _STEPS, _LEFT, _FAILED = range(5, 10)
_PROGRESS = 1 << 14  # events between two reports of progress
_PROGRESS_WITH_NUMBERS = 1 << 9  # the same if messages are computed
# Failures of a worker without an exchange of any worker after which there is no hope.
_HOPELESS = 1000


class TargetReached(Exception):  # noqa: N818 no error
    """The center has reached its target, at which the simulation ends."""


class Outcome(enum.IntEnum):
    """The ends of a message."""

    APPLIED = 0
    DROPPED = 1  # too old
    REJECTED = 2  # by the center's message limits
    LOST = 3  # its worker failed or left
    OPEN = 4  # the simulation ended before


class SessionEvent(enum.IntEnum):
    """The events of a worker's session."""

    STARTED = 0  # the worker has the center
    FAILED = 1
    LEFT = 2
    JOINED = 3  # the center knows the worker


# Attributes of an enum are slow to read in Python 3.11.
_APPLIED, _DROPPED, _REJECTED = Outcome.APPLIED, Outcome.DROPPED, Outcome.REJECTED
_LOST, _OPEN = Outcome.LOST, Outcome.OPEN
_PENDING, _IN_FLIGHT = State.PENDING, State.IN_FLIGHT

# The table of messages has a row of whole numbers for each, and its weight.
COLUMNS = (
    *("number", "worker", "fragment", "session", "sequence", "steps", "step_time"),
    *("began", "sent", "anchor_version", "arrived", "settled", "received", "adopted"),
    *("version", "answer_version", "staleness", "order", "workers", "steps_since"),
    *("in_background", "outcome", "index", "weight"),
)
SESSION_COLUMNS = ("time", "worker", "session", "event")
ROW_BYTES = 8 * len(COLUMNS)
_as_row = operator.attrgetter(*COLUMNS)
_pack_row = struct.Struct(f"={len(COLUMNS) - 1}qd").pack


class Message:
    """A message and what became of it; times are in ns, and -1 before they are known.

    `Schedule` describes the attributes.
    """

    __slots__ = (*COLUMNS, "pace")
    claimed_weight: ClassVar[None] = None  # simulated workers claim none

    def __init__(self, number: int, worker: _Worker, fragment: int, now: int) -> None:
        machine = worker.machines[fragment]
        self.number = number
        self.worker = worker.index
        self.fragment = fragment
        self.session = worker.session
        self.sequence = machine.number
        self.steps = machine.message.steps
        self.step_time = worker.step
        self.began = worker.began[fragment]
        self.sent = now
        self.anchor_version = worker.anchors[fragment]
        self.in_background = machine.sends_in_background
        self.arrived = self.settled = self.received = self.adopted = -1
        self.version = self.answer_version = self.staleness = -1
        self.order = self.workers = self.index = -1
        self.steps_since = 0
        self.outcome = _OPEN
        self.weight = 1.0
        self.pace: float | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Worker:
    """A worker, its link and its current session."""

    index: int
    name: str
    draws: Iterator[int]  # ns of a local step in each round
    latency: int  # ns in one direction
    bandwidth: float  # bytes per second
    session: int = 0  # number of its session: 1, 2, 3, ...
    is_registered: bool = False
    is_gone: bool = False  # and does not come back
    connections: list[int] = dataclasses.field(default_factory=list)  # by fragment
    machines: list[ExchangeMachine] = dataclasses.field(default_factory=list)
    anchors: list[int] = dataclasses.field(default_factory=list)  # versions
    messages: list[Message | None] = dataclasses.field(default_factory=list)  # last
    answers: dict[int, Message] = dataclasses.field(default_factory=dict)
    todo: list[int] = dataclasses.field(default_factory=list)  # see `_continue`
    turn: int = 0  # fragment that comes first if several are due
    pace: float | None = None
    step: int = 0  # ns of a local step in this round
    at: int = 0  # ns, time up to which local steps are counted
    next_call: int = 0  # ns, time of the next call that may do anything
    began: list[int] = dataclasses.field(default_factory=list)  # of rounds, ns
    token: int = 0  # number of the only valid STEPS event
    since: int = 0  # ns, start of its session
    present: int = 0  # ns in sessions
    busy: int = 0  # ns in local steps


class Numbers(Protocol):
    """The numbers of messages, computed while the simulation goes on: `Execution`."""

    @property
    def has_ended(self) -> bool:
        """True if the simulation ends here."""

    def start(self, index: int, session: int) -> None:
        """Give the center to a worker whose session begins."""

    def send(
        self, index: int, fragment: int, sequence: int, steps: int, *, background: bool
    ) -> None:
        """Let a worker send a message after some local steps."""

    def adopt(
        self, index: int, fragment: int, steps_since: int, *, late: bool, resets: bool
    ) -> None:
        """Let a worker adopt the answer to its last message."""

    def note(self, at: int, index: int, session: int, event: SessionEvent) -> None:
        """Take a change of a session."""

    def norm(self, message: Message) -> float | None:
        """Return the norm of a message that has arrived."""

    def settle(self, messages: Sequence[Message]) -> None:
        """Apply, drop or reject messages."""


@dataclasses.dataclass(eq=False)
class Settings:
    """The arguments of a simulation, checked."""

    cluster: Cluster
    ledgers: Sequence[Ledger]  # one for each fragment
    sizes: Sequence[tuple[int, int]]  # bytes of message and answer, of each fragment
    lengths: Sequence[Callable[[int], int]]  # exchanges made -> local steps
    dynamic: DynamicPeriod | None
    adopts_before: bool  # see `Rule.adopts`
    overlap: bool
    delay: int
    patience: int | None
    seed: int
    exchanges: int | None
    steps: int | None
    seconds: float | None
    most_rows: int
    progress: Callable[[float], object] | None
    numbers: Numbers | None = None  # computes the messages, too


class Simulation:
    """One simulation.

    Attributes:
      rows: the rows of messages, one after another.
      sessions: the rows of sessions' events.
      now: the time, ns.
      settled: number of messages that the center has settled.
      local_steps: number of local steps in these messages.
      events: number of events.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledgers, self._lengths = settings.ledgers, settings.lengths
        self._dynamic, self._numbers = settings.dynamic, settings.numbers
        self.rows = bytearray()
        self.sessions = array("q")
        self.now = self.settled = self.local_steps = self.events = 0
        self._sent = 0  # number of messages
        self._failures = 0  # since the last exchange
        self._heap: list[tuple[int, int, int, int, Any]] = []
        self._next_number = itertools.count().__next__
        self._free = 0  # ns, time at which the center's host is free
        cluster = settings.cluster
        host = cluster.center
        self._host_time = nanoseconds(host.seconds)
        self._host_rate = host.rate or math.inf
        self._host_takes_time = bool(host.seconds or host.rate)
        self._inward = self._outward = None
        if host.bandwidth is not None:
            self._inward = SharedLink(host.bandwidth)
            self._outward = SharedLink(host.bandwidth)
        modes = [ledger.mode for ledger in self._ledgers]
        self._has_deadline = any(type(m).deadline is not Mode.deadline for m in modes)
        self._deadlines = [math.inf] * len(modes)
        links: Sequence[Link] = cluster.links
        self.workers = [
            _Worker(
                i,
                name,
                speed.draws(settings.seed, name),
                nanoseconds(link.latency / 2),
                link.bandwidth or math.inf,
            )
            for i, (name, speed, link) in enumerate(
                zip(cluster.names, cluster.speeds, links, strict=True)
            )
        ]
        self._named = {worker.name: worker for worker in self.workers}
        self._before_barrier: list[_Worker] = []
        self._plan()

    def _plan(self) -> None:
        """Plan joins, leaves and failures."""
        cluster, seed = self._settings.cluster, self._settings.seed
        for worker in self.workers:
            at = nanoseconds(cluster.joins.get(worker.name, 0.0))
            self._push(at, _JOIN, worker.index)
            if worker.name in cluster.leaves:
                at = nanoseconds(cluster.leaves[worker.name])
                self._push(at, _LEFT, worker.index)
        failures = cluster.failures
        for failure in failures.recorded:
            failing = [self._named[name] for name in failure.workers]
            at = nanoseconds(failure.at)
            self._push(at, _FAILED, failing[0].index, (failing, failure.down, None))
        if failures.every is not None:
            for first in range(0, len(self.workers), failures.together):
                group = self.workers[first : first + failures.together]
                waits = failures.waits(seed, group[0].name)
                data = group, failures.down, waits
                self._push(next(waits), _FAILED, first, data)

    def run(self) -> None:
        """Let all events happen until the end.

        Raises:
          SimulationError: the end cannot be reached.
        """
        with contextlib.suppress(TargetReached):
            self._run()
        for worker in self.workers:
            self._count_presence(worker)
            for message in filter(None, worker.messages):
                self._keep(message)

    def _run(self) -> None:
        settings = self._settings
        handlers: list[Callable[..., None]] = [
            *(self._join, self._started, self._moved, self._arrived, self._served),
            *(self._due, self._answered, self._steps, self._left, self._failed),
        ]
        seconds = settings.seconds
        end = LAST - 1 if seconds is None else nanoseconds(seconds)
        most = math.inf if settings.exchanges is None else settings.exchanges
        most_steps = math.inf if settings.steps is None else settings.steps
        most_steps *= len(self._ledgers)
        heap, pop = self._heap, heapq.heappop
        progress = _PROGRESS_WITH_NUMBERS if self._numbers else _PROGRESS
        while heap and self.settled < most and self.local_steps < most_steps:
            now, kind, index, number, data = pop(heap)
            if now > end:
                self.now = end
                break
            self.now = now
            handlers[kind](now, index, number, data)
            self.events += 1
            if not self.events % progress:
                done = self.settled / most, self.local_steps / most_steps
                self._report(now / end, *done)
        if self.settled >= most or self.local_steps >= most_steps:
            return
        if seconds is None:
            raise errors.SimulationError(
                f"the simulation cannot end: after {self.now / 1e9:g} s, with "
                f"{self.settled} exchanges{_of(settings.exchanges)} and "
                f"{self.local_steps} local steps{_of(settings.steps)}, nothing more "
                f"can happen. {self._why()}"
            )
        self.now = end

    def _why(self) -> str:
        waiting = sum(len(ledger.pending) for ledger in self._ledgers)
        left = sum(worker.is_gone for worker in self.workers)
        return (
            f"{left} of {len(self.workers)} workers have left, and {waiting} messages "
            f"wait in mode {self._ledgers[0].mode}"
        )

    def _report(self, *fractions: float) -> None:
        if self._sent > self._settings.most_rows:
            raise errors.SimulationError(
                f"the simulation has {self._sent} messages after "
                f"{self.now / 1e9:g} s, and more do not fit into memory: simulate "
                "fewer seconds"
            )
        if self._settings.progress is not None:
            self._settings.progress(max(fractions))

    def _push(self, at: int, kind: int, worker: int, data: Any = None) -> None:
        heapq.heappush(self._heap, (at, kind, worker, self._next_number(), data))

    # Sessions.

    def _join(self, now: int, index: int, number: int, data: Any) -> None:
        worker = self.workers[index]
        if worker.is_gone:
            return
        worker.session += 1
        worker.is_registered = True
        self._lose_waiting(worker)  # its last session's message
        session = str(worker.session)
        worker.connections = [
            ledger.join(worker.name, session, now / 1e9) for ledger in self._ledgers
        ]
        self._note(now, worker, SessionEvent.JOINED)
        self._before_barrier.append(worker)
        if all(ledger.is_open for ledger in self._ledgers):
            joined, self._before_barrier = self._before_barrier, []
            for each in joined:
                self._pull(now, each)
        self._decide_all(now)

    def _pull(self, now: int, worker: _Worker) -> None:
        """Send the center to a worker that starts."""
        worker.anchors = [ledger.version for ledger in self._ledgers]
        if self._numbers is not None:
            self._numbers.start(worker.index, worker.session)
        size = sum(answer for _, answer in self._settings.sizes)
        self._transfer(self._outward, now, worker, size, _STARTED, worker.session)

    def _started(self, now: int, index: int, number: int, session: int) -> None:
        worker = self.workers[index]
        if session != worker.session or not worker.is_registered:
            return
        settings = self._settings
        worker.machines = [
            ExchangeMachine(
                overlap=settings.overlap,
                delay=settings.delay,
                patience=settings.patience,
            )
            for _ in self._ledgers
        ]
        for machine in worker.machines:
            machine.start(counts=Counts())
        worker.messages = worker.messages or [None] * len(self._ledgers)
        worker.answers, worker.todo, worker.turn = {}, [], 0
        worker.pace = None
        worker.since = now
        worker.began = [now] * len(worker.machines)
        self._draw(worker)
        self._note(now, worker, SessionEvent.STARTED)
        self._advance(now, worker)

    def _note(self, now: int, worker: _Worker, event: SessionEvent) -> None:
        self.sessions.extend((now, worker.index, worker.session, event))
        if self._numbers is not None:
            self._numbers.note(now, worker.index, worker.session, event)

    def _left(self, now: int, index: int, number: int, data: Any) -> None:
        worker = self.workers[index]
        worker.is_gone = True
        if worker.is_registered:
            self._end_session(now, worker, SessionEvent.LEFT)
            self._decide_all(now)

    def _failed(self, now: int, index: int, number: int, data: Any) -> None:
        failing, down, waits = data
        announced = self._settings.cluster.failures.announced
        event = SessionEvent.LEFT if announced else SessionEvent.FAILED
        for worker in failing:
            if worker.is_registered:
                self._end_session(now, worker, event)
                self._failures += 1
                if down is not None:
                    self._push(now + nanoseconds(down), _JOIN, worker.index)
                worker.is_gone = worker.is_gone or down is None
        is_endless = self._settings.seconds is None
        if is_endless and self._failures > _HOPELESS * len(self.workers):
            raise errors.SimulationError(
                f"the simulation cannot end: {self._failures} failures since the last "
                "exchange, because workers fail before they complete an exchange"
            )
        if waits is not None and not all(worker.is_gone for worker in failing):
            self._push(now + next(waits), _FAILED, index, data)
        self._decide_all(now)

    def _end_session(self, now: int, worker: _Worker, event: SessionEvent) -> None:
        """End a worker's session: its local steps and its open transfers are lost."""
        worker.is_registered = False
        self._note(now, worker, event)
        self._count_presence(worker)
        worker.token += 1
        session, seconds = str(worker.session), now / 1e9
        if worker in self._before_barrier:
            self._before_barrier.remove(worker)
        for f, ledger in enumerate(self._ledgers):
            message = worker.messages[f] if worker.messages else None
            is_lost = message is not None and message.arrived < 0
            if event is SessionEvent.LEFT:
                ledger.leave(worker.name, session)
                is_lost = message is not None
            else:
                connection = worker.connections[f]
                ledger.disconnect(worker.name, session, connection, seconds)
                lease = nanoseconds(ledger.limits.lease)
                self._push(now + lease + 1, _DUE, worker.index, f)
            if is_lost:
                _lose(message)

    def _count_presence(self, worker: _Worker) -> None:
        if worker.machines:
            worker.present += self.now - worker.since
            if not worker.todo:  # in local steps
                worker.busy += self.now - worker.at
            worker.machines = []

    def _lose_waiting(self, worker: _Worker) -> None:
        """Record that messages of a worker's ended session are not applied any more."""
        for message in worker.messages:
            _lose(message)

    def _keep(self, message: Message) -> None:
        """Add a message to the table, after all that happens to it."""
        self.rows += _pack_row(*_as_row(message))

    # Workers: the actions of `Worker.exchange`.

    def _length(self, worker: _Worker, f: int) -> int:
        if self._dynamic is not None:
            return self._dynamic(worker.pace)
        return self._lengths[f](worker.machines[f].finished_rounds)

    def _advance(self, now: int, worker: _Worker) -> None:
        """Make local steps until the next call that may do anything."""
        first, answers = sys.maxsize, worker.answers
        for f, machine in enumerate(worker.machines):
            length = self._length(worker, f)
            left = machine.steps_left(length, is_answered=f in answers)
            first = left if left < first else first
        worker.at = now
        first = first if first > 1 else 1
        self._call_at(now + first * worker.step, worker)
        if self._numbers is not None:
            self._foresee(worker, first)

    def _foresee(self, worker: _Worker, left: int) -> None:
        """Report the message of the next call, if no answer can change it.

        All messages that are foreseen can be computed together.
        """
        due = None
        count = len(worker.machines)
        for f in (*range(worker.turn, count), *range(worker.turn)):
            machine, length = worker.machines[f], self._length(worker, f)
            steps = machine.steps_left(length, is_answered=machine.in_flight)
            if steps <= left:
                if machine.in_flight:
                    return
                due = f if due is None else due
        if due is not None:
            self._report_send(worker, due, worker.machines[due].current.steps + left)

    def _report_send(self, worker: _Worker, f: int, steps: int) -> None:
        assert self._numbers is not None
        machine = worker.machines[f]
        self._numbers.send(
            worker.index,
            f,
            machine.number,
            steps,
            background=machine.sends_in_background,
        )

    def _call_at(self, at: int, worker: _Worker) -> None:
        worker.token = token = self._next_number()
        worker.next_call = at
        heapq.heappush(self._heap, (at, _STEPS, worker.index, token, None))

    def _steps(self, now: int, index: int, number: int, data: Any) -> None:
        worker = self.workers[index]
        if number != worker.token:
            return  # an answer has arrived meanwhile, or the session has ended
        passed = now - worker.at
        steps = passed // worker.step
        worker.busy += passed
        worker.at = now
        for machine in worker.machines:
            machine.begin_call("exchange", steps)
        worker.todo = self._due_fragments(worker)
        if worker.todo:
            worker.turn = (worker.todo[-1] + 1) % len(worker.machines)
        self._continue(now, worker)

    def _due_fragments(self, worker: _Worker) -> list[int]:
        if len(worker.machines) == 1:
            return [0]

        def must_act_now(f: int) -> bool:
            machine, length = worker.machines[f], self._length(worker, f)
            is_answered = f in worker.answers
            return machine.must_act(length) or (
                is_answered and machine.may_receive(length)
            )

        def is_full(f: int) -> bool:
            return worker.machines[f].is_full(self._length(worker, f))

        return due_fragments(worker.machines, worker.turn, must_act_now, is_full)

    def _continue(self, now: int, worker: _Worker) -> None:
        """Go on with a call, until it returns or must wait for an answer."""
        todo = worker.todo
        while todo:
            f = todo[0]
            machine = worker.machines[f]
            state = machine.state
            waits = state is _PENDING
            if waits or state is _IN_FLIGHT:
                if f not in worker.answers:
                    return
                if waits:
                    machine.answer()
                self._adopt(now, worker, f)
            if not waits and machine.must_act(self._length(worker, f)):
                machine.prepare()
                message = self._send(now, worker, f)
                if not message.in_background:
                    return
                machine.send()
            todo.pop(0)
        for machine in worker.machines:
            machine.end_call(returned=True)
        self._advance(now, worker)

    def _send(self, now: int, worker: _Worker, f: int) -> Message:
        last = worker.messages[f]
        if last is not None:  # its worker has failed before it adopted the answer
            self._keep(last)
        message = worker.messages[f] = Message(self._sent, worker, f, now)
        self._sent += 1
        if self._numbers is not None:
            self._report_send(worker, f, message.steps)
        worker.began[f] = now
        self._draw(worker)
        size = self._settings.sizes[f][0]
        self._transfer(self._inward, now, worker, size, _ARRIVED, message)
        return message

    def _draw(self, worker: _Worker) -> None:
        """Draw the time of the local steps of a worker's next round."""
        step = next(worker.draws, None)
        if not isinstance(step, int) or step < 1:
            raise errors.InvalidArgumentError(
                f"the speed of worker {worker.name!r} must yield a positive int for "
                f"each round, without an end, got {step!r}"
            )
        worker.step = step

    def _adopt(self, now: int, worker: _Worker, f: int) -> None:
        message, machine = worker.answers.pop(f), worker.machines[f]
        if machine.state is _IN_FLIGHT:
            message.steps_since = machine.current.steps
        else:
            worker.began[f] = now
        message.adopted = now
        if message.pace is not None:
            worker.pace = message.pace
        worker.anchors[f] = message.answer_version
        if self._numbers is not None:
            self._numbers.adopt(
                worker.index,
                f,
                message.steps_since,
                late=machine.in_flight,
                resets=message.outcome is _REJECTED,
            )
        machine.adopt(resets=message.outcome is _REJECTED)
        worker.messages[f] = None
        self._keep(message)

    def _answered(self, now: int, index: int, number: int, message: Message) -> None:
        worker, f = self.workers[index], message.fragment
        if message.session != worker.session or not worker.is_registered:
            return
        message.received = now
        worker.answers[f] = message
        if worker.todo:
            if worker.todo[0] == f:
                self._continue(now, worker)
            return
        # Local steps go on. The answer can be adopted in a call after one of them.
        left = worker.machines[f].steps_left(self._length(worker, f), is_answered=True)
        made = -(-(now - worker.at) // worker.step)
        at = worker.at + max(1, left, made) * worker.step
        if at < worker.next_call:
            self._call_at(at, worker)

    # Links.

    def _transfer(
        self,
        link: SharedLink | None,
        now: int,
        worker: _Worker,
        size: int,
        kind: int,
        data: Any,
    ) -> None:
        """Plan the event at the end of a transfer."""
        if link is None or not size:
            at = now + worker.latency
            if size:
                at += math.ceil(1e9 * size / worker.bandwidth)
            self._push(at, kind, worker.index, data)
            return
        link.start(now, size, worker.bandwidth, (worker, kind, data))
        self._watch(link)

    def _watch(self, link: SharedLink) -> None:
        """Plan the event at the next end of a transfer."""
        at = link.next_end
        if at is not None:
            self._push(at, _MOVED, -1, (link, link.changes))

    def _moved(self, now: int, index: int, number: int, data: Any) -> None:
        link, changes = data
        if changes != link.changes:
            return  # the rates have changed since this event was planned
        for worker, kind, what in link.end(now):
            self._push(now + worker.latency, kind, worker.index, what)
        self._watch(link)

    # The center.

    def _arrived(self, now: int, index: int, number: int, message: Message) -> None:
        if message.outcome is _LOST:
            return  # its worker has failed meanwhile
        message.arrived = now
        if not self._host_takes_time:
            self._served(now, index, number, message)
            return
        size = sum(self._settings.sizes[message.fragment])
        self._free = max(now, self._free) + self._host_time
        self._free += math.ceil(1e9 * size / self._host_rate)
        self._push(self._free, _SERVED, index, message)

    def _served(self, now: int, index: int, number: int, message: Message) -> None:
        worker, f = self.workers[index], message.fragment
        submission = Submission(
            message.sequence, None, message.anchor_version, message.steps
        )
        session = str(message.session)
        norm = None
        if self._numbers is not None and self._ledgers[f].rejections.limits.measures:
            norm = self._numbers.norm(message)
        try:
            self._ledgers[f].submit(worker.name, session, submission, now / 1e9, norm)
        except errors.WorkerStateError:  # its session has ended meanwhile
            _lose(message)
        self._decide(now, f)

    def _due(self, now: int, index: int, number: int, f: int) -> None:
        self._deadlines[f] = math.inf
        ledger = self._ledgers[f]
        ledger.expire(now / 1e9)
        for name in ledger.take_ended():
            worker = self._named[name]
            if not worker.is_registered:
                self._lose_waiting(worker)
        self._decide(now, f)

    def _decide_all(self, now: int) -> None:
        for f in range(len(self._ledgers)):
            self._decide(now, f)

    def _decide(self, now: int, f: int) -> None:
        """Settle the messages that are due, and send the answers."""
        ledger = self._ledgers[f]
        if not ledger.pending:
            return
        seconds = now / 1e9
        while ledger.pending and (batch := ledger.due(seconds)) is not None:
            before = ledger.version
            ledger.settle(batch, seconds)
            self._settle(now, f, ledger, batch, before)
        if self._has_deadline and ledger.pending:
            deadline = ledger.mode.deadline(ledger)
            if deadline < self._deadlines[f]:
                self._deadlines[f] = deadline
                at = max(now + 1, math.ceil(1e9 * deadline))
                self._push(at, _DUE, -1, f)

    def _settle(
        self, now: int, f: int, ledger: Ledger, batch: Batch, before: int
    ) -> None:
        """Record what became of the messages of a batch, and answer them."""
        settings = self._settings
        answer_bytes = settings.sizes[f][1]
        version = ledger.version
        self._failures = 0
        settled = []
        for i, entry in enumerate(batch.entries):
            worker = self._named[entry.worker]
            message, rejection = worker.messages[f], batch.rejected.get(entry.worker)
            assert message is not None
            settled.append(message)
            message.settled = now
            message.staleness = batch.staleness[i]
            message.workers, message.index = batch.workers, batch.indices[i]
            message.order = self.settled
            self.settled += 1
            self.local_steps += message.steps
            message.answer_version = version
            if rejection is not None:
                message.outcome = _REJECTED
            elif batch.applies:
                message.outcome = _APPLIED
                message.version = version
                if batch.weights is not None:
                    message.weight = batch.weights[i]
                if settings.adopts_before:
                    message.answer_version = before
            else:
                message.outcome = _DROPPED
            if not worker.is_registered:
                continue
            if rejection is not None and rejection.is_last:
                # Its worker gets an error instead of an answer, and leaves.
                self._push(now, _LEFT, worker.index)
                continue
            if settings.dynamic is not None:
                message.pace = ledger.pace(entry.worker)
            self._transfer(self._outward, now, worker, answer_bytes, _ANSWERED, message)
        if self._numbers is not None:
            self._numbers.settle(settled)
            if self._numbers.has_ended:
                raise TargetReached


def _of(most: int | None) -> str:
    return "" if most is None else f" of {most}"


def _lose(message: Message | None) -> None:
    """Record that an open message will not be applied."""
    if message is not None and message.outcome is _OPEN:
        message.outcome = _LOST
