"""The ledger: decides which workers are registered and which messages come next.

The ledger holds no arrays, no lock, no socket and no clock: the time ``now``, in
seconds, is an argument. Its owner reports events, and asks for decisions:

    join, leave                 register a worker, or remove it
    disconnect, heartbeat       record that a worker lost its connection, or is alive
    submit                      accept a worker's message
    due -> Batch | None         return the messages to apply, drop or reject next
    settle, fail                record that a batch was applied or dropped, or failed
    acknowledge                 record that the worker has received its answer
    state_to_save, restore      save and restore the state

A worker is identified by its name. Each time it starts, it starts a new session, which
is identified by its session id. The exchanges of a session are numbered 1, 2, 3, ...
The table `NEXT` has the allowed events for each state of a session; other events are
rejected, or have no effect. `agn_optax.center._modes` defines how late a message is.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax.center._limits import Limits
from agn_optax.center._message_limits import MessageLimits, Rejection, Rejections
from agn_optax.center._modes import Entry, Mode
from agn_optax.center._recent import Recent
from agn_optax.center._submission import Submission


class Stage(enum.Enum):
    """The states of a worker's session."""

    __hash__ = object.__hash__  # `NEXT` is read several times in each exchange

    IDLE = "no exchange is under way"
    WAITING = "its message waits to be applied"
    ANSWERED = "its message was applied, dropped or rejected, and the answer is kept"
    ENDED = "the worker left, or its lease ended"


# The state of a session after an event, by its state before and the event.
NEXT = {
    (Stage.IDLE, "join"): Stage.IDLE,
    (Stage.IDLE, "submit"): Stage.WAITING,
    (Stage.IDLE, "repeat"): Stage.IDLE,  # the current center is the answer
    (Stage.IDLE, "acknowledge"): Stage.IDLE,
    (Stage.IDLE, "disconnect"): Stage.IDLE,
    (Stage.IDLE, "leave"): Stage.ENDED,
    (Stage.WAITING, "join"): Stage.WAITING,
    (Stage.WAITING, "repeat"): Stage.WAITING,
    (Stage.WAITING, "settle"): Stage.ANSWERED,
    (Stage.WAITING, "fail"): Stage.IDLE,  # as if the message had not been sent
    (Stage.WAITING, "acknowledge"): Stage.WAITING,
    (Stage.WAITING, "disconnect"): Stage.WAITING,
    (Stage.WAITING, "leave"): Stage.ENDED,
    (Stage.ANSWERED, "join"): Stage.ANSWERED,
    (Stage.ANSWERED, "submit"): Stage.WAITING,  # acknowledges the answer, too
    (Stage.ANSWERED, "repeat"): Stage.ANSWERED,
    (Stage.ANSWERED, "acknowledge"): Stage.IDLE,
    (Stage.ANSWERED, "disconnect"): Stage.ANSWERED,
    (Stage.ANSWERED, "leave"): Stage.ENDED,
    (Stage.ENDED, "join"): Stage.IDLE,
}
# The same by event, for the events of each exchange: a lookup without a new tuple.
_AFTER: dict[str, dict[Stage, Stage]] = {event: {} for _, event in NEXT}
for (_before, _event), _after in NEXT.items():
    _AFTER[_event][_before] = _after
_AFTER_SUBMIT, _AFTER_SETTLE = _AFTER["submit"], _AFTER["settle"]
_WAITING = Stage.WAITING  # an attribute of an enum is slow to read in Python 3.11


class Totals(NamedTuple):
    """Local steps and weight of all messages, and of those that were applied.

    The weight is what workers claim, such as samples or tokens; 0 for messages without.
    """

    steps_made: int = 0
    steps_delivered: int = 0
    weight_made: float = 0.0
    weight_delivered: float = 0.0

    def plus(self, message: Submission, *, delivered: bool) -> Totals:
        """Return the totals with another message."""
        made, arrived, weight_made, weight_arrived = self
        steps, weight = message.steps, message.weight
        if weight is not None:
            weight_made += weight
            weight_arrived += delivered * weight
        numbers = made + steps, arrived + delivered * steps, weight_made, weight_arrived
        return tuple.__new__(Totals, numbers)  # half of the time of `Totals(...)`

    def __str__(self) -> str:
        text = f"{self.steps_delivered} of {self.steps_made} local steps"
        if self.weight_made:
            weights = f"{self.weight_delivered:.17g} of {self.weight_made:.17g}"
            text += f" and weight {weights}"
        return f"{text} were delivered"


_NO_TOTALS = Totals()


@dataclasses.dataclass(slots=True)
class Member:
    """The ledger's record of a worker."""

    session_id: str
    round_version: int  # version at which its round began; at least the anchor's
    rounds: int  # number of rounds; a new worker starts with that of the slowest worker
    joined: float  # time, s
    seen: float  # time of its last message or heartbeat, s
    recent: Recent  # its recent exchanges: applied messages and local steps
    state: Stage = Stage.IDLE
    connection: int = 0  # number of its newest connection: 1, 2, 3, ...
    connected: bool = True
    # Seconds without a heartbeat after which its session ends; None if it sends none.
    heartbeat_timeout: float | None = None
    expires: float = math.inf  # time at which the session ends without a heartbeat
    sequence: int = 0  # number of its last completed exchange
    exchanges: int = 0  # number of applied messages
    dropped: int = 0  # number of dropped messages
    staleness: int | None = None  # of its last message
    applied: bool = True  # whether its last message was applied
    rejection_reason: str = ""  # "" if its last message was not rejected
    rejected: int = 0  # number of rejected messages
    consecutive_rejections: int = 0  # number since its last applied message
    began: float | None = None  # time at which its round began; None if unknown
    speeds: Sequence[float] = ()  # local steps per second, in its last rounds
    speed: float = 0.0  # median of `speeds`; 0 if empty
    totals: Totals = _NO_TOTALS  # of its name, also in earlier sessions
    index: int = -1  # for center optimizers; see `Ledger._index`

    @property
    def has_ended(self) -> bool:
        """True if the session has ended; its last exchange is still remembered."""
        return self.state is Stage.ENDED


# Fields without a meaning in the next process, which has other connections.
_NOT_SAVED = {"joined", "seen", "state", "connection", "connected", "expires"}
_NOT_SAVED |= {"heartbeat_timeout", "recent", "began", "speed"}
_SAVED = [f.name for f in dataclasses.fields(Member) if f.name not in _NOT_SAVED]
_SPEED_ROUNDS = 3  # rounds over which a worker's speed is measured
# Number of ended sessions to remember, the newest ones. A remembered session can be
# resumed with the exchange that was in flight; workers of older ones must start again.
_MAX_ENDED_SESSIONS = 1024


class Batch(NamedTuple):
    """Messages to be applied together as one update, or to be dropped."""

    entries: tuple[Entry, ...]  # sorted by worker
    staleness: tuple[int, ...]
    weights: tuple[float, ...] | None  # of the messages of a round; else None
    applies: bool  # False if the messages are to be dropped
    # Rejections by worker; these messages are not applied with the others.
    rejected: Mapping[str, Rejection]
    workers: int  # number of registered workers
    round_staleness: tuple[int, ...]  # of each message
    indices: tuple[int, ...]  # index of each message's worker

    def is_applied(self, index: int) -> bool:
        """Return whether a message is to be applied."""
        return self.applies and self.entries[index].worker not in self.rejected

    @property
    def indices_to_apply(self) -> list[int]:
        """Indices of the messages to be applied."""
        return [*filter(self.is_applied, range(len(self.entries)))]


class Ledger:
    """The decisions of a center on workers and their messages.

    Args:
      mode: when messages are applied.
      limits: limits on workers and their messages.
      barrier: number of workers that must have joined before any worker may start.

    Attributes:
      rejections: the decisions on rejections.
      version: number of updates of the center.
      pending: the waiting messages, by worker.
      totals: the totals of all workers since the center's first version.
      is_open: whether the barrier is open.
    """

    def __init__(self, mode: Mode, *, limits: Limits, barrier: int) -> None:
        self.mode = mode
        self.limits = limits
        self.barrier = barrier
        self.rejections = Rejections(limits.messages or MessageLimits())
        self.version = 0
        self.pending: dict[str, Entry] = {}  # by worker, in order of arrival
        self.totals = _NO_TOTALS
        # True once as many workers were registered at a time as the barrier needs.
        self.is_open = barrier == 0
        self._registered: dict[str, Member] = {}
        self._ended: dict[str, Member] = {}  # remembered, in order of their ends
        self._newly_ended: dict[str, None] = {}  # names; see `take_ended`
        self._taken: set[int] = set()  # indices of registered workers
        self._free = 0  # no smaller index is free
        # So that no decision on a message looks at all workers or all messages:
        self._at_round: dict[int, int] = {}  # registered workers by number of rounds
        self._slowest = 0  # the smallest of these numbers; 0 without workers
        self._highest_speed: float | None = 0.0  # of registered workers; None: unknown
        self._first_on_time: Entry | None = None  # see `round_began`
        # Version and rounds of the slowest worker when `due` returned None, and whose
        # messages have arrived since and wait.
        self._looked_at: tuple[int, int] | None = None
        self._arrived: dict[str, None] = {}  # by worker
        self._first_expiry = math.inf  # time before which no session expires
        self._last_expire = -math.inf  # time of the last call of `expire`
        # Seconds between two calls of `expire` that show a suspension of the process.
        self._suspension = math.inf

    def registered(self) -> Mapping[str, Member]:
        """Return the registered workers, including those that may reconnect."""
        return self._registered

    def known(self) -> dict[str, Member]:
        """Return the workers that are registered or remembered."""
        return {**self._ended, **self._registered}

    def take_ended(self) -> list[str]:
        """Return the workers whose sessions have ended since the last call."""
        ended, self._newly_ended = [*self._newly_ended], {}
        return ended

    def find(self, worker: str) -> Member | None:
        """Return a worker that is registered or remembered; else None."""
        return self._registered.get(worker) or self._ended.get(worker)

    def member(self, worker: str, session_id: str) -> Member:
        """Return a registered worker by its name and session id.

        Raises:
          WorkerStateError: the worker is not registered, or has another session.
        """
        member = self._registered.get(worker)
        if member is None:
            raise errors.WorkerStateError(
                f"worker {worker!r} is not registered at this center: it never joined, "
                "left, or its session expired; join again"
            )
        if member.session_id != session_id:
            raise _replaced_error(worker)
        return member

    def join(
        self,
        worker: str,
        session_id: str,
        now: float,
        *,
        replace: bool = False,
        resume: bool = False,
        heartbeat_timeout: float | None = None,
    ) -> int:
        """Register a new or returning worker; return the number of its connection.

        Args:
          worker: the worker's name.
          session_id: the session id.
          now: time in seconds.
          replace: take the name from a worker that still seems to be connected.
          resume: resume a session; an unknown session is rejected.
          heartbeat_timeout: seconds without a heartbeat after which the session ends;
            None for a worker that sends no heartbeats.

        Raises:
          NameTakenError: a connected worker has that name.
          CenterFullError: the number of registered workers has reached ``max_workers``.
          WorkerStateError: the session was replaced by another one, or is forgotten.
        """
        self.expire(now)
        old, count = self.find(worker), len(self._registered)
        is_same = old is not None and old.session_id == session_id
        if resume and not is_same:
            raise _replaced_error(worker)
        if old is None or old.has_ended:
            max_workers = self.limits.max_workers
            if max_workers is not None and count >= max_workers:
                raise errors.CenterFullError(
                    f"no room for worker {worker!r}: this center takes at most "
                    f"{max_workers} workers, and {count} are registered"
                )
        elif old.connected and not (is_same or replace):
            raise errors.NameTakenError(
                f"there is a worker {worker!r} already, which joined "
                f"{now - old.joined:.0f} s ago; give each worker a name of its own"
            )
        if old is not None and not old.has_ended:
            self._forget(old)
        if old is not None and is_same:
            member = old
            if member.has_ended:
                member.rounds = self._slowest if self._at_round else member.rounds
        else:
            self._remove_message(worker)
            rounds, recent = self._slowest, Recent(now)
            member = Member(session_id, self.version, rounds, now, now, recent)
            if old is not None:  # a worker of that name is likely on the same machine
                self._set_speeds(member, old.speeds)
                member.totals, member.index = old.totals, old.index
        member.state = NEXT[member.state, "join"]
        self._ended.pop(worker, None)
        self._newly_ended.pop(worker, None)
        self._register(worker, member)
        member.connected, member.heartbeat_timeout = True, heartbeat_timeout
        member.connection += 1
        self._extend_lease(member, now)
        if not self.is_open and len(self._registered) >= self.barrier:
            self.is_open = True
            self.begin(now)
        return member.connection

    def begin(self, now: float) -> None:
        """Count the times of workers from now on, when all of them may start."""
        for member in self._registered.values():
            member.recent = Recent(now)

    def leave(self, worker: str, session_id: str) -> bool:
        """Remove a worker; return False if the session is not registered."""
        member = self._session(worker, session_id)
        if member is not None:
            self._end_session(worker, member)
        return member is not None

    def disconnect(
        self, worker: str, session_id: str, connection: int, now: float
    ) -> bool:
        """Record a broken connection; the worker has until its lease ends to return.

        Returns:
          False if it is not the worker's newest connection, which is ignored.
        """
        member = self._session(worker, session_id)
        if member is None or member.connection != connection:
            return False
        member.state = NEXT[member.state, "disconnect"]
        member.connected = False
        self._expire_at(member, now + self.limits.lease)
        return True

    def heartbeat(self, worker: str, session_id: str, now: float) -> bool:
        """Record a heartbeat; return False if the session is not registered."""
        self.expire(now)
        member = self._session(worker, session_id)
        if member is not None and member.connected:
            self._extend_lease(member, now)
        return member is not None

    def expire(self, now: float) -> None:
        """Remove the workers whose leases have ended."""
        pause, self._last_expire = now - self._last_expire, now
        if now < self._first_expiry and pause <= self._suspension:
            return
        self._first_expiry = self._suspension = math.inf
        for worker, member in list(self._registered.items()):
            timeout = member.heartbeat_timeout
            if member.connected and timeout is not None:
                # If this process was suspended, it got no heartbeats: extend the lease.
                if pause > timeout / 2:
                    member.expires = max(member.expires, now + timeout)
                self._suspension = min(self._suspension, timeout / 2)
            if member.expires <= now:
                self._end_session(worker, member)
            self._first_expiry = min(self._first_expiry, member.expires)

    def submit(
        self,
        worker: str,
        session_id: str,
        submission: Submission,
        now: float,
        norm: float | None = None,
    ) -> bool:
        """Accept a worker's message after `Submission.checked`.

        Args:
          worker: the worker's name.
          session_id: the session id.
          submission: the message.
          now: time in seconds.
          norm: norm of the message; None if the message limits do not need it.

        Returns:
          True if the message is still to be applied, False if it was already settled.

        Raises:
          WorkerStateError: the worker is not registered or has another session, or the
            sequence number is neither the last one nor the next.
          InvalidArgumentError: the center never had the version of the anchor.
        """
        self.expire(now)
        member = self.member(worker, session_id)
        if member.connected:
            self._extend_lease(member, now)
        sequence, anchor = submission.sequence, submission.anchor_version
        if not 0 <= anchor <= self.version:
            raise errors.InvalidArgumentError(
                f"anchor_version must be in [0, {self.version}], the versions that "
                f"this center has had, got {anchor!r}"
            )
        if sequence not in (member.sequence, member.sequence + 1) or sequence < 1:
            raise errors.WorkerStateError(
                f"worker {worker!r} sent exchange {sequence}, but its last one was "
                f"{member.sequence}"
            )
        is_last = sequence == member.sequence
        if is_last or member.state is _WAITING:
            member.state = NEXT[member.state, "repeat"]
        else:
            member.state = _AFTER_SUBMIT[member.state]
            steps, began = submission.steps, member.began
            if began is not None and steps and now > began:
                speed = float(f"{steps / (now - began):.4g}")
                self._set_speeds(member, (*member.speeds, speed)[-_SPEED_ROUNDS:])
            if anchor > member.round_version:
                member.round_version = anchor
            # `tuple.__new__` takes half of the time of `Entry(...)`.
            fields = worker, submission.without_arrays(), now, norm
            self.pending[worker] = tuple.__new__(Entry, fields)
            self._arrived[worker] = None
        return not is_last

    def due(self, now: float) -> Batch | None:
        """Return the messages to apply, drop or reject next; None if all must wait.

        The messages of the batch keep waiting until `settle` or `fail` is called.
        """
        self.expire(now)
        due = self.mode.due(self, now)
        if due is None:
            self._looked_at = self.version, self._slowest
            self._arrived.clear()
            return None
        entries = due.entries
        if len(entries) > 1:
            entries = sorted(entries, key=lambda entry: entry.worker)
        staleness, late, rejected = [], [], {}
        for entry in entries:
            member, message = self._registered[entry.worker], entry.submission
            staleness.append(self.version - message.anchor_version)
            late.append(self.version - member.round_version)
            rejection = self.rejections.decide(message, entry.norm)
            if rejection is not None and due.applies:
                count = member.consecutive_rejections + 1
                is_last = count >= self.rejections.limits.in_a_row
                rejected[entry.worker] = rejection._replace(is_last=is_last)
        return Batch(
            tuple(entries),
            tuple(staleness),
            self.mode.weights(late),
            due.applies,
            rejected,
            len(self._registered),
            tuple(late),
            tuple([self._registered[entry.worker].index for entry in entries]),
        )

    @property
    def is_complete(self) -> bool:
        """True if a message of every registered worker waits: see `Waiting`."""
        return self._registered.keys() <= self.pending.keys()

    def round_staleness(self, entry: Entry) -> int:
        """Return the number of versions since the round of a message began."""
        return self.version - self._registered[entry.worker].round_version

    def rounds_ahead(self, entry: Entry) -> int:
        """Return the rounds by which a message's worker is ahead of the slowest."""
        return self._registered[entry.worker].rounds - self._slowest

    def to_look_at(self, *, versions: bool) -> Iterable[Entry]:
        """Return the messages that may have become due: see `Waiting`."""
        if self._looked_at is not None:
            version, slowest = self._looked_at
            is_same = version == self.version or not versions
            if is_same and slowest == self._slowest:
                return map(self.pending.__getitem__, self._arrived)
        return self.pending.values()

    @property
    def round_began(self) -> float:
        """The arrival of the first message that is on time: see `Waiting`."""
        first = self._first_on_time
        if (
            first is None
            or self.pending.get(first.worker) is not first
            or self.round_staleness(first)
        ):
            on_time = (e for e in self.pending.values() if not self.round_staleness(e))
            first = self._first_on_time = next(on_time, None)
        return (first or next(iter(self.pending.values()))).arrived

    def pace(self, worker: str) -> float | None:
        """Return a worker's speed divided by the highest one; None if unknown.

        Registered workers count, including those that may reconnect.
        """
        member = self._registered.get(worker)
        if member is None or not member.speed:
            return None
        return member.speed / self._highest()

    @property
    def step_time(self) -> float | None:
        """Seconds of a local step of the fastest worker: see `Waiting`."""
        return 1 / highest if (highest := self._highest()) else None

    def _highest(self) -> float:
        """Return the highest speed of registered workers; 0 if none is known."""
        if self._highest_speed is None:
            speeds = (member.speed for member in self._registered.values())
            self._highest_speed = max(speeds, default=0.0)
        return self._highest_speed

    def settle(self, batch: Batch, now: float) -> None:
        """Record that the messages of a batch were applied, dropped or rejected."""
        rejected, norms = batch.rejected, []
        self.version += batch.applies and len(rejected) < len(batch.entries)
        for i, entry in enumerate(batch.entries):
            worker, message = entry.worker, entry.submission
            self._remove_message(worker)
            member = self._registered[worker]
            rejection = rejected.get(worker)
            delivered = batch.applies and rejection is None
            member.began = now
            member.recent.add(now, delivered, message.steps)
            member.totals = member.totals.plus(message, delivered=delivered)
            self.totals = self.totals.plus(message, delivered=delivered)
            if rejection is not None:
                self.rejections.count(rejection)
                member.rejected += 1
                member.consecutive_rejections += 1
                if rejection.is_last:  # the worker gets an error instead of an answer
                    member.state = NEXT[member.state, "fail"]
                    continue
            member.state = _AFTER_SETTLE[member.state]
            member.sequence = message.sequence
            member.staleness = batch.staleness[i]
            member.round_version = self.version
            member.applied = delivered
            member.rejection_reason = "" if rejection is None else rejection.reason
            if batch.applies:  # a rejected message counts as a round
                self._count(member.rounds + 1, 1)
                self._count(member.rounds, -1)
                member.rounds += 1
            if delivered:
                member.exchanges += 1
                member.consecutive_rejections = 0
                norms.append(entry.norm)
            elif rejection is None:
                member.dropped += 1
        self.rejections.add_norms(norms)

    def fail(self, batch: Batch) -> None:
        """Record that a batch failed, as if its messages had not been sent."""
        for entry in batch.entries:
            self._remove_message(entry.worker)
            member = self._registered[entry.worker]
            member.state = NEXT[member.state, "fail"]

    def acknowledge(self, worker: str, session_id: str, sequence: int) -> None:
        """Record that a worker has received the answer to an exchange."""
        member = self._session(worker, session_id)
        if member is not None and member.sequence == sequence:
            member.state = NEXT[member.state, "acknowledge"]

    def state_to_save(self, workers: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the state to save as JSON, with some workers or all (None)."""
        names = (*self._ended, *self._registered) if workers is None else workers
        members = {
            name: {field: getattr(member, field) for field in (*_SAVED, "has_ended")}
            for name in names
            if (member := self.find(name)) is not None
        }
        return {"members": members, "open": self.is_open, "totals": self.totals}

    def restore(
        self, state: dict[str, Any], now: float, *, is_new_id: bool = False
    ) -> None:
        """Restore the state of an earlier process, with no worker connected.

        Args:
          state: result of `state_to_save`.
          now: time in seconds.
          is_new_id: whether the center has a new id, so that its workers must join
            again. Then all sessions end, and only their last exchanges are remembered.
        """
        for name, saved in state["members"].items():
            # Missing fields keep their defaults.
            fields = {field: saved[field] for field in _SAVED if field in saved}
            member = Member(**fields, joined=now, seen=now, recent=Recent(now))
            self._set_speeds(member, tuple(member.speeds))
            member.totals = Totals(*member.totals)
            self._ended.pop(name, None)
            if (before := self._registered.get(name)) is not None:
                self._forget(before)  # a state of several has each worker again
            self._register(name, member)
            self.disconnect(name, member.session_id, member.connection, now)
            if saved["has_ended"] or is_new_id:
                self._end_session(name, member)
        self.totals = Totals(*state.get("totals", ()))
        if not is_new_id:
            enough = len(self._registered) >= self.barrier
            self.is_open = self.is_open or state["open"] or enough

    def deadline(self) -> float | None:
        """Return the time to call `due` again if no event comes; None for never."""
        times = [self.mode.deadline(self)]
        may_expire = min(self._first_expiry, self._suspension) < math.inf
        for member in self._registered.values() if may_expire else ():
            times.append(member.expires)
            if member.connected and member.heartbeat_timeout is not None:
                # Often enough to show that the process is running: see `expire`.
                times.append(self._last_expire + member.heartbeat_timeout / 4)
        first = min(times)
        return first if first < math.inf else None

    def _session(self, worker: str, session_id: str) -> Member | None:
        """Return a worker's session; None if it is not registered."""
        member = self._registered.get(worker)
        is_same = member is not None and member.session_id == session_id
        return member if is_same else None

    def _set_speeds(self, member: Member, speeds: Sequence[float]) -> None:
        """Set a worker's speeds in its last rounds."""
        member.speeds = speeds
        # The median, because in one round the process may have been suspended, or the
        # local steps may have been made before the round began.
        before = member.speed
        member.speed = sorted(speeds)[len(speeds) // 2] if speeds else 0.0
        self._compare_speed(before, member.speed)

    def _compare_speed(self, before: float, after: float) -> None:
        """Follow the highest speed when that of a worker changes; 0 is no speed."""
        highest = self._highest_speed
        if highest is not None and after >= highest:
            self._highest_speed = after
        elif before == highest:
            self._highest_speed = None

    def _count(self, rounds: int, change: int) -> None:
        """Change the number of registered workers with a number of rounds."""
        count = self._at_round.get(rounds, 0) + change
        if count:
            self._at_round[rounds] = count
            if rounds < self._slowest or len(self._at_round) == 1:
                self._slowest = rounds
        else:
            del self._at_round[rounds]
            if rounds == self._slowest:
                self._slowest = min(self._at_round, default=0)

    def _register(self, worker: str, member: Member) -> None:
        """Add a worker to the registered ones, and to what is known of all."""
        self._registered[worker] = member
        member.index = self._index(member.index)
        self._taken.add(member.index)
        self._count(member.rounds, 1)
        self._compare_speed(0.0, member.speed)

    def _forget(self, member: Member) -> None:
        """Remove a registered worker from what is known of all."""
        self._count(member.rounds, -1)
        self._compare_speed(member.speed, 0.0)
        self._taken.remove(member.index)
        self._free = min(self._free, member.index)

    def _index(self, last: int) -> int:
        """Return the index of a worker that registers.

        It is the last index of that name unless another worker has it, and else the
        smallest free one, so that indices stay small while workers come and go.
        """
        if last >= 0 and last not in self._taken:
            return last
        while self._free in self._taken:
            self._free += 1
        return self._free

    def _extend_lease(self, member: Member, now: float) -> None:
        member.seen = now
        member.expires = math.inf
        if member.heartbeat_timeout is not None:
            self._suspension = min(self._suspension, member.heartbeat_timeout / 2)
            self._expire_at(member, now + member.heartbeat_timeout)

    def _expire_at(self, member: Member, until: float) -> None:
        member.expires = until
        self._first_expiry = min(self._first_expiry, until)

    def _remove_message(self, worker: str) -> None:
        """Remove a worker's message from those that wait, if one does."""
        self.pending.pop(worker, None)
        self._arrived.pop(worker, None)

    def _end_session(self, worker: str, member: Member) -> None:
        member.state = NEXT[member.state, "leave"]
        member.connected, member.expires = False, math.inf
        self._remove_message(worker)
        self._forget(member)
        self._ended[worker] = self._registered.pop(worker)
        self._newly_ended[worker] = None
        if len(self._ended) > _MAX_ENDED_SESSIONS:
            del self._ended[next(iter(self._ended))]


def _replaced_error(worker: str) -> errors.WorkerStateError:
    return errors.WorkerStateError(
        f"worker {worker!r} was replaced by another one of that name, or its session "
        "ended too long ago to be resumed; start() again"
    )
