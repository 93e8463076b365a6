"""The ledger: decides which workers are registered and which messages come next.

The ledger holds no arrays, no lock, no socket and no clock: the time ``now``, in
seconds, is an argument. Its owner reports events, and asks for decisions:

    join, leave                 register a worker, or remove it
    disconnect, heartbeat       record the loss of its connection, or a heartbeat
    submit                      take a worker's message
    due -> Batch | None         return the messages to apply or drop next, as a batch
    judge -> Batch              decide which of them are rejected
    settle, fail                record that they were applied, or that applying failed
    acknowledge                 record that the worker has its answer
    shift                       record a change of the center by no message
    memory, recall              save and restore the state

A worker is identified by its name. Each time it starts, it starts a new session, which
is identified by its session id, the ``session_id``. The exchanges of a session are
numbered 1, 2, 3, ... The table `NEXT` has the allowed events for each state of a
session; other events are rejected, or have no effect.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center._limits import Limits
from agn_optax.center._message_limits import MessageLimits, Rejection, Rejections, Size
from agn_optax.center._modes import Asynchronous, Entry, Mode
from agn_optax.center._recent import Recent
from agn_optax.center._submission import Submission


class State(enum.Enum):
    """The states of a worker's session."""

    IDLE = "no exchange is under way"
    WAITING = "its message waits to be applied"
    ANSWERED = "its message was applied, dropped or rejected, and the answer is kept"
    GONE = "it left, or was given up"


# The state of a session after an event, by its state before and the event.
NEXT = {
    (State.IDLE, "join"): State.IDLE,
    (State.IDLE, "submit"): State.WAITING,
    (State.IDLE, "repeat"): State.IDLE,  # answered with the current center
    (State.IDLE, "acknowledge"): State.IDLE,
    (State.IDLE, "disconnect"): State.IDLE,
    (State.IDLE, "leave"): State.GONE,
    (State.WAITING, "join"): State.WAITING,
    (State.WAITING, "repeat"): State.WAITING,
    (State.WAITING, "settle"): State.ANSWERED,
    (State.WAITING, "fail"): State.IDLE,  # as if the message had not been sent
    (State.WAITING, "acknowledge"): State.WAITING,
    (State.WAITING, "disconnect"): State.WAITING,
    (State.WAITING, "leave"): State.GONE,
    (State.ANSWERED, "join"): State.ANSWERED,
    (State.ANSWERED, "submit"): State.WAITING,  # the next message acknowledges, too
    (State.ANSWERED, "repeat"): State.ANSWERED,
    (State.ANSWERED, "acknowledge"): State.IDLE,
    (State.ANSWERED, "disconnect"): State.ANSWERED,
    (State.ANSWERED, "leave"): State.GONE,
    (State.GONE, "join"): State.IDLE,
}


@dataclasses.dataclass
class Member:
    """The ledger's record of a worker."""

    session_id: str
    turn: int  # version at which its current round began
    clock: int  # number of rounds; a new worker starts with those of the slowest one
    joined: float  # time, s
    seen: float  # time of its last message or heartbeat, s
    recent: Recent  # its recent exchanges: applied messages and local steps
    state: State = State.IDLE
    connection: int = 0  # number of its newest connection: 1, 2, 3, ...
    connected: bool = True
    # Seconds without a heartbeat after which its session ends; None: it sends none.
    silence: float | None = None
    expires: float = math.inf  # time at which the session ends without a heartbeat
    sequence: int = 0  # of its last completed exchange
    exchanges: int = 0
    dropped: int = 0
    staleness: int | None = None
    applied: bool = True  # whether its last message was applied
    why: str = ""  # reason if its last message was rejected
    rejected: int = 0
    in_a_row: int = 0  # number of its last messages that were rejected in a row
    began: float | None = None  # time at which its round began; None if unknown
    speeds: Sequence[float] = ()  # local steps per second, in its last rounds
    speed: float = 0.0  # median of `speeds`; 0 if empty
    # Id and last exchange of the last earlier session that completed an exchange; if
    # there is none, the id of the first session that the center knew, and 0.
    before: tuple[Any, ...] | None = None

    @property
    def gone(self) -> bool:
        """True if the session has ended; its last exchange is still remembered."""
        return self.state is State.GONE


# Fields without a meaning in the next process, which has other connections.
_LOST = {"joined", "seen", "state", "connection", "connected", "silence", "expires"}
_LOST |= {"recent", "began", "speed"}
_KEPT = [each.name for each in dataclasses.fields(Member) if each.name not in _LOST]
_ROUNDS = 3  # rounds over which a worker's speed is measured
# Number of ended sessions to remember, the last ones. A remembered session can be
# resumed with the exchange that was in flight; older ones must start again.
_MOST_GONE = 1024


@dataclasses.dataclass(frozen=True)
class Batch:
    """Messages to be applied together as one exchange, or to be dropped."""

    entries: tuple[Entry, ...]  # sorted by worker
    staleness: tuple[int, ...]
    weights: tuple[float, ...] | None  # of the messages of a round; else None
    applies: bool  # False if the messages are to be dropped
    # Rejections by worker; these messages are not applied with the others.
    rejected: Mapping[str, Rejection] = dataclasses.field(default_factory=dict)
    norms: tuple[float, ...] = ()  # of the messages; empty if they were not measured
    workers: int = 1  # number of registered workers

    @property
    def taken(self) -> list[int]:
        """Indices of the messages to be applied."""
        entries = enumerate(self.entries) if self.applies else ()
        return [i for i, entry in entries if entry.worker not in self.rejected]


class Ledger:
    """The decisions of a center on workers and their messages.

    Args:
      mode: when messages are applied.
      limits: limits on workers and their messages.
      barrier: number of workers that must have joined before any may start.
      version: number of exchanges applied in an earlier process.

    Attributes:
      rejections: the decisions on rejections.
      version: number of exchanges applied.
      pending: the waiting messages, by worker.
      is_open: whether the barrier is open.
    """

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        limits: Limits | None = None,
        barrier: int = 0,
        version: int = 0,
    ) -> None:
        if limits is None:
            limits = Limits()
        if type(limits) is not Limits:  # a subclass has limits that would be ignored
            raise errors.InvalidTypeError(
                "limits must be agn_optax.center.Limits(...), without the calls of "
                f"a served center, got {limits!r}"
            )
        if mode is None:
            mode = Asynchronous()
        if not isinstance(mode, Mode):
            raise errors.InvalidTypeError(
                "mode must be Asynchronous(), BoundedStaleness(...) or "
                f"Synchronous(...), got {mode!r}"
            )
        check.whole_number(barrier, "barrier", least=0, optional=False)
        most = limits.max_workers
        if most is not None and barrier > most:
            raise errors.InvalidArgumentError(
                f"barrier must be at most max_workers, {most}, or no worker ever "
                f"starts; got {barrier}"
            )
        self.mode = mode
        self.limits = limits
        self.barrier = barrier
        self.rejections = Rejections(limits.messages or MessageLimits())
        self.version = version
        self.pending: dict[str, Entry] = {}  # by worker, in order of arrival
        # True once as many workers were registered at a time as the barrier needs.
        self.is_open = barrier == 0
        self._present: dict[str, Member] = {}
        self._gone: dict[str, Member] = {}  # in the order in which they left
        self._departed: dict[str, None] = {}  # names, in the order of departures
        self._earliest = math.inf  # time before which no session expires
        self._looked = -math.inf  # time of the last call of `expire`
        # Seconds without a call of `expire` after which the process was not running.
        self._nap = math.inf
        self._fastest: float | None = None  # highest speed; None if to be computed

    def present(self) -> Mapping[str, Member]:
        """Return the registered workers, including those that may reconnect."""
        return self._present

    def departed(self) -> list[str]:
        """Return the workers that have left since the last call and are not back."""
        departed, self._departed = [*self._departed], {}
        return departed

    def find(self, worker: str) -> Member | None:
        """Return a worker that is registered or remembered; else None."""
        return self._present.get(worker) or self._gone.get(worker)

    def member(self, worker: str, session_id: str) -> Member:
        """Return a registered worker by its name and session id.

        Raises:
          WorkerStateError: the worker is not registered, or has another session.
        """
        member = self._present.get(worker)
        if member is None:
            raise errors.WorkerStateError(
                f"worker {worker!r} is not registered at this center: it never joined, "
                "left, or its session expired; join again"
            )
        if member.session_id != session_id:
            raise _was_replaced(worker)
        return member

    def join(
        self,
        worker: str,
        session_id: str,
        now: float,
        *,
        replace: bool = False,
        back: bool = False,
        silence: float | None = None,
    ) -> int:
        """Register a new or returning worker; return the number of its connection.

        Args:
          worker: the worker's name.
          session_id: the session id.
          now: time in seconds.
          replace: take the name from a worker that still seems to be connected.
          back: resume a session; an unknown session is rejected.
          silence: seconds without a heartbeat after which the session ends; None for a
            worker that sends no heartbeats.

        Raises:
          NameTakenError: a connected worker has that name.
          CenterFullError: the number of registered workers has reached ``max_workers``.
          WorkerStateError: the session was replaced by another one, or is forgotten.
        """
        self.expire(now)
        old, there = self.find(worker), len(self._present)
        is_same = old is not None and old.session_id == session_id
        if back and not is_same:
            raise _was_replaced(worker)
        if old is None or old.gone:
            most = self.limits.max_workers
            if most is not None and there >= most:
                raise errors.CenterFullError(
                    f"no room for worker {worker!r}: this center takes at most {most} "
                    f"workers, and {there} are registered"
                )
        elif old.connected and not (is_same or replace):
            raise errors.NameTakenError(
                f"there is a worker {worker!r} already, which joined "
                f"{now - old.joined:.0f} s ago; give each worker a name of its own"
            )
        others = [m.clock for n, m in self._present.items() if n != worker]
        if old is not None and is_same:
            member = old
            if member.gone:
                member.clock = min(others, default=member.clock)
        else:
            self.pending.pop(worker, None)
            clock = min(others, default=0)
            member = Member(session_id, self.version, clock, now, now, Recent(now, 2))
            if old is not None:  # a worker of that name is likely on the same machine
                self._measured(member, old.speeds)
                # If the old session completed no exchange, keep the one before it, so
                # that a worker that fails while joining still finds its last session.
                member.before = old.session_id, old.sequence
                if old.sequence == 0 and old.before is not None:
                    member.before = old.before
        member.state = NEXT[member.state, "join"]
        self._gone.pop(worker, None)
        self._departed.pop(worker, None)
        self._present[worker] = member
        self._fastest = None
        member.connected, member.silence = True, silence
        member.connection += 1
        self._extend_lease(member, now)
        self.is_open = self.is_open or len(self._present) >= self.barrier
        return member.connection

    def leave(self, worker: str, session_id: str) -> bool:
        """Remove a worker; return False if the session is not registered."""
        member = self._session(worker, session_id)
        if member is not None:
            self._give_up(worker, member)
        return member is not None

    def disconnect(
        self, worker: str, session_id: str, connection: int, now: float
    ) -> None:
        """Record a broken connection; the worker has until its lease ends to return.

        A connection that is not the worker's newest one is ignored.
        """
        member = self._session(worker, session_id)
        if member is not None and member.connection == connection:
            member.state = NEXT[member.state, "disconnect"]
            member.connected = False
            self._expire_at(member, now + self.limits.lease)

    def heartbeat(self, worker: str, session_id: str, now: float) -> bool:
        """Record a heartbeat; return False if the session is not registered."""
        self.expire(now)
        member = self._session(worker, session_id)
        if member is not None and member.connected:
            self._extend_lease(member, now)
        return member is not None

    def expire(self, now: float) -> None:
        """Remove the workers whose leases have ended."""
        pause, self._looked = now - self._looked, now
        if now < self._earliest and pause <= self._nap:
            return
        self._earliest = self._nap = math.inf
        for worker, member in list(self._present.items()):
            if member.connected and member.silence is not None:
                # After so long without a call this process cannot have been running.
                # It could receive no heartbeats, so that none counts as missing.
                if pause > member.silence / 2:
                    member.expires = max(member.expires, now + member.silence)
                self._nap = min(self._nap, member.silence / 2)
            if member.expires <= now:
                self._give_up(worker, member)
            self._earliest = min(self._earliest, member.expires)

    def submit(
        self,
        worker: str,
        session_id: str,
        submission: Submission,
        now: float,
    ) -> bool:
        """Take a worker's message, whose numbers are `Submission.checked`.

        Returns:
          True if the message is still to be applied, False if it was already settled.

        Raises:
          WorkerStateError: the worker is not registered or has another session, or the
            sequence number is neither the last one nor the next.
          InvalidArgumentError: the center never had the version of the anchor.
        """
        self.heartbeat(worker, session_id, now)
        member = self.member(worker, session_id)
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
        if is_last or member.state is State.WAITING:
            member.state = NEXT[member.state, "repeat"]
        else:
            member.state = NEXT[member.state, "submit"]
            steps, began = submission.steps, member.began
            if began is not None and steps and now > began:
                speed = float(f"{steps / (now - began):.4g}")
                self._measured(member, (*member.speeds, speed)[-_ROUNDS:])
            ahead = max(0, anchor - member.turn)
            entry = Entry(worker, submission.without_arrays(), now, ahead)
            self.pending[worker] = entry
        return not is_last

    def is_waiting(self, batch: Batch) -> bool:
        """Return whether all messages of a batch still wait: no worker has left."""
        return all(self.pending.get(each.worker) is each for each in batch.entries)

    def due(self, now: float) -> Batch | None:
        """Return the messages to apply or drop next; None if all must wait.

        They wait until `settle` or `fail` is called, which may be later, as long as
        `is_waiting` is true. Messages that arrive meanwhile are for the next batch.
        """
        self.expire(now)
        due = self.mode.due(self, now)
        if due is None:
            return None
        entries = sorted(due.entries, key=lambda entry: entry.worker)
        anchors = [entry.submission.anchor_version for entry in entries]
        return Batch(
            tuple(entries),
            tuple(self.version - anchor for anchor in anchors),
            self.mode.weights([self.missed(entry) for entry in entries]),
            due.applies,
            workers=len(self._present),
        )

    @property
    def is_complete(self) -> bool:
        """True if a message of every registered worker waits: see `Waiting`."""
        return self._present.keys() <= self.pending.keys()

    def missed(self, entry: Entry) -> int:
        """Return the number of versions since the round of a message began.

        The anchor may be older than that: under some rules a worker adopts the center
        as it was before the worker's own message.
        """
        return self.version - self._present[entry.worker].turn - entry.ahead

    def lead(self, entry: Entry) -> int:
        """Return the rounds by which a message's worker is ahead of the slowest."""
        slowest = min(member.clock for member in self._present.values())
        return self._present[entry.worker].clock - slowest

    def judge(self, batch: Batch, sizes: Sequence[Size | None]) -> Batch:
        """Return a batch with the rejections of its messages.

        Args:
          batch: result of `due`.
          sizes: sizes of its messages; None for those that were not measured.
        """
        if not batch.applies:
            return batch
        rejected = {}
        for entry, size in zip(batch.entries, sizes, strict=True):
            rejection = self.rejections.judge(
                entry.submission, size, self.missed(entry)
            )
            if rejection is not None:
                rejected[entry.worker] = rejection
        norms = tuple(size.norm for size in sizes if size is not None)
        return self.rejecting(dataclasses.replace(batch, norms=norms), rejected)

    def rejecting(self, batch: Batch, rejected: Mapping[str, Rejection]) -> Batch:
        """Return a batch with further rejections."""
        most = self.rejections.limits.in_a_row
        more = {
            worker: rejection._replace(
                is_last=self._present[worker].in_a_row + 1 >= most
            )
            for worker, rejection in rejected.items()
        }
        return dataclasses.replace(batch, rejected={**batch.rejected, **more})

    def pace(self, worker: str) -> float | None:
        """Return a worker's speed divided by the highest one; None if unknown.

        Registered workers count, including those that may reconnect.
        """
        member = self._present.get(worker)
        if member is None or not member.speed:
            return None
        if self._fastest is None:
            self._fastest = max(each.speed for each in self._present.values())
        return member.speed / self._fastest

    def settle(self, batch: Batch, now: float) -> None:
        """Record that the messages of a batch were applied, dropped or rejected."""
        taken = batch.taken
        self.version += bool(taken)
        for i, entry in enumerate(batch.entries):
            del self.pending[entry.worker]
            member, rejection = (
                self._present[entry.worker],
                batch.rejected.get(entry.worker),
            )
            member.began = now
            member.recent.add(now, i in taken, entry.submission.steps)
            if rejection is not None:
                self.rejections.count(rejection)
                member.rejected += 1
                member.in_a_row += 1
                if rejection.is_last:  # as if the message had not been sent
                    member.state = NEXT[member.state, "fail"]
                    continue
            member.state = NEXT[member.state, "settle"]
            member.sequence = entry.submission.sequence
            member.staleness = batch.staleness[i]
            member.turn = self.version
            member.applied = i in taken
            member.why = "" if rejection is None else rejection.why
            member.clock += batch.applies  # a rejected message counts as a round
            if member.applied:
                member.exchanges += 1
                member.in_a_row = 0
            elif rejection is None:
                member.dropped += 1
        self.rejections.took([batch.norms[i] for i in taken if batch.norms])

    def fail(self, batch: Batch) -> None:
        """Record that a batch failed, as if its messages had not been sent."""
        for entry in batch.entries:
            del self.pending[entry.worker]
            member = self._present[entry.worker]
            member.state = NEXT[member.state, "fail"]

    def shift(self) -> None:
        """Record a rebase of the center: a version that does not make messages late."""
        self.version += 1
        for member in (*self._present.values(), *self._gone.values()):
            member.turn += 1

    def acknowledge(self, worker: str, session_id: str, sequence: int) -> None:
        """Record that a worker has received the answer to an exchange."""
        member = self._session(worker, session_id)
        if member is not None and member.sequence == sequence:
            member.state = NEXT[member.state, "acknowledge"]

    def memory(self, workers: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the state of some workers (None: all) to save, for JSON."""
        named = (*self._gone, *self._present) if workers is None else workers
        members = {
            name: {field: getattr(member, field) for field in (*_KEPT, "gone")}
            for name in named
            if (member := self.find(name)) is not None
        }
        norms = self.rejections.memory(whole=workers is None)
        return {"members": members, "open": self.is_open, "norms": norms}

    def recall(self, memory: dict[str, Any], now: float, *, gone: bool = False) -> None:
        """Restore state of an earlier process, with no worker connected.

        Args:
          memory: result of `memory`.
          now: time in seconds.
          gone: whether the center has a new id, so that its workers join again. Then
            the ledger only remembers which of their exchanges the center has.
        """
        for name, saved in memory["members"].items():
            # Missing fields keep their defaults.
            fields = {field: saved[field] for field in _KEPT if field in saved}
            recent = Recent(now, 2)
            if fields.get("before") is not None:
                fields["before"] = tuple(fields["before"])  # a list in JSON
            member = Member(**fields, joined=now, seen=now, recent=recent)
            self._measured(member, tuple(member.speeds))
            self._gone.pop(name, None)
            self._present[name], self._fastest = member, None
            self.disconnect(name, member.session_id, member.connection, now)
            if saved["gone"] or gone:
                self._give_up(name, member)
        if gone:
            return
        enough = len(self._present) >= self.barrier
        self.is_open = self.is_open or memory["open"] or enough
        self.rejections.recall(memory["norms"])

    def deadline(self, *, is_held: bool = False) -> float | None:
        """Return when to call `due` again without an event; None if not needed.

        Args:
          is_held: whether no messages can be applied for now, so that only leases end.
        """
        times = [math.inf if is_held else self.mode.deadline(self)]
        for member in self._present.values():
            times.append(member.expires)
            if member.connected and member.silence is not None:
                # Often enough to show that the process is running: see `expire`.
                times.append(self._looked + member.silence / 4)
        first = min(times)
        return first if first < math.inf else None

    def _session(self, worker: str, session_id: str) -> Member | None:
        """Return a worker's session; None if it is not registered."""
        member = self._present.get(worker)
        is_there = member is not None and member.session_id == session_id
        return member if is_there else None

    def _measured(self, member: Member, speeds: Sequence[float]) -> None:
        """Set a worker's speeds in its last rounds."""
        before, member.speeds = member.speed, speeds
        # The median, because in one round the process may have been suspended, or the
        # local steps may have been made before the round began.
        member.speed = sorted(speeds)[len(speeds) // 2] if speeds else 0.0
        if self._fastest is not None and max(before, member.speed) >= self._fastest:
            self._fastest = None

    def _extend_lease(self, member: Member, now: float) -> None:
        member.seen = now
        member.expires = math.inf
        if member.silence is not None:
            self._nap = min(self._nap, member.silence / 2)
            self._expire_at(member, now + member.silence)

    def _expire_at(self, member: Member, until: float) -> None:
        member.expires = until
        self._earliest = min(self._earliest, until)

    def _give_up(self, worker: str, member: Member) -> None:
        member.state = NEXT[member.state, "leave"]
        member.connected, member.expires = False, math.inf
        self.pending.pop(worker, None)
        self._gone[worker] = self._present.pop(worker)
        self._departed[worker] = self._fastest = None
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]


def _was_replaced(worker: str) -> errors.WorkerStateError:
    return errors.WorkerStateError(
        f"worker {worker!r} was replaced by another one of that name, or its session "
        "ended too long ago to be resumed; start() again"
    )
