"""Who takes part, what was applied, and who waits: decisions, and nothing else.

The ledger holds no arrays, no lock, no socket and no clock: `now`, in seconds, is an
argument. Its owner tells it what happened, and asks it what to do:

    join, leave                 a worker comes or goes
    connect, disconnect, hear   its connection does; a sign of life came
    submit                      its message is there
    due -> Batch | None         the messages to apply (or to drop) next, as one exchange
    judge -> Batch              ... and which of them are refused for what they are
    settle, refuse              they have been; they could not be. They wait no longer
    acknowledge                 the worker has its answer
    shift                       the center moved, and no message moved it
    memory, recall              what outlives the process

A worker is known by its name. Each time that it starts, it begins a new life, which is
known by its incarnation. The exchanges of a life are numbered 1, 2, 3, ... The table
`NEXT` says what may happen in which state of a life; anything else is refused, or has
no effect.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center._recent import Recent
from agn_optax.center._refusals import (
    FADES,
    UNSAID,
    Claim,
    Refusal,
    Refusals,
    Refuse,
    Size,
)


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """Every message is applied when it comes; nobody waits for anybody."""


@dataclasses.dataclass(frozen=True)
class BoundedStaleness:
    """Messages are applied when they come, unless their worker is too far off.

    With both bounds, a message that waits for slower workers grows old meanwhile, and
    is dropped as soon as it is too old: nothing older than ``versions`` is ever
    applied. A message that is dropped is no round of its worker's, so the others wait
    for that worker at ``rounds`` ahead, and one of its messages is in time.

    Args:
      versions: a message whose anchor is more than so many versions old when it would
        be applied is dropped, and its worker goes on from the center as it is. None for
        no bound.
      rounds: a worker that is more than so many rounds ahead of the slowest one waits
        for it. None for no bound.

    Raises:
      InvalidArgumentError: a bound is negative, or there is none.

    Example:
      >>> from agn_optax.center import BoundedStaleness
      >>> BoundedStaleness(rounds=3).versions is None
      True

    References:
      Qirong Ho et al., *More Effective Distributed ML via a Stale Synchronous Parallel
      Parameter Server*, 2013 (the bound on rounds).
    """

    versions: int | None = None
    rounds: int | None = None

    def __post_init__(self) -> None:
        if self.versions is None and self.rounds is None:
            raise errors.InvalidArgumentError(
                "BoundedStaleness needs versions=, rounds= or both, got neither"
            )
        for name in ("versions", "rounds"):
            check.whole_number(getattr(self, name), name, least=0)


@dataclasses.dataclass(frozen=True)
class Synchronous:
    """Rounds: the messages of all workers become one, as on a mesh, by the rule.

    A round ends when every worker that is there has sent its message. It also ends when
    a quorum has, and the grace period is over. Nobody waits for a worker that died.

    Args:
      quorum: messages that are enough once the grace period is over; None waits for
        all workers that are there.
      grace: seconds from the first message of a round after which a quorum is enough.
      late: what becomes of a message that missed its round: ``"next"`` uses it in the
        next one, ``"weighted"`` too, divided by the rounds that it missed + 1 (unless
        the rule itself discounts messages by their staleness), and ``"drop"`` leaves it
        out, and its worker goes on from the center as it is.

    Raises:
      InvalidArgumentError: a value is out of range.

    Example:
      >>> from agn_optax.center import Synchronous
      >>> Synchronous(quorum=3, grace=5.0).late
      'next'
    """

    quorum: int | None = None
    grace: float = 0.0
    late: Literal["next", "weighted", "drop"] = "next"

    def __post_init__(self) -> None:
        check.whole_number(self.quorum, "quorum", least=1)
        check.seconds(self.grace, "grace")
        if self.late not in ("next", "weighted", "drop"):
            raise errors.InvalidArgumentError(
                f"late must be 'next', 'weighted' or 'drop', got {self.late!r}"
            )


Mode = Asynchronous | BoundedStaleness | Synchronous

MOST_STEPS = 2**31 - 1  # local steps of a message: programs count in int32


class State(enum.Enum):
    """Of one life of a worker."""

    IDLE = "no exchange is under way"
    WAITING = "its message waits to be applied"
    ANSWERED = "its message was applied, dropped or refused, and the answer is kept"
    GONE = "it left, or was given up"


# The state of a life after an event, by its state before and the event.
NEXT = {
    (State.IDLE, "join"): State.IDLE,
    (State.IDLE, "submit"): State.WAITING,
    (State.IDLE, "repeat"): State.IDLE,  # answered with the center as it is
    (State.IDLE, "acknowledge"): State.IDLE,
    (State.IDLE, "disconnect"): State.IDLE,
    (State.IDLE, "leave"): State.GONE,
    (State.WAITING, "join"): State.WAITING,
    (State.WAITING, "repeat"): State.WAITING,
    (State.WAITING, "settle"): State.ANSWERED,
    (State.WAITING, "refuse"): State.IDLE,  # as if the message had never come
    (State.WAITING, "acknowledge"): State.WAITING,
    (State.WAITING, "disconnect"): State.WAITING,
    (State.WAITING, "leave"): State.GONE,
    (State.ANSWERED, "join"): State.ANSWERED,
    (State.ANSWERED, "submit"): State.WAITING,  # the next: so it has the answer
    (State.ANSWERED, "repeat"): State.ANSWERED,
    (State.ANSWERED, "acknowledge"): State.IDLE,
    (State.ANSWERED, "disconnect"): State.ANSWERED,
    (State.ANSWERED, "leave"): State.GONE,
    (State.GONE, "join"): State.IDLE,
}


@dataclasses.dataclass
class Member:
    """What the ledger knows of one worker."""

    incarnation: str
    turn: int  # version of the center with which its current round began
    clock: int  # rounds made; a newcomer begins with those of the slowest worker
    joined: float  # when
    seen: float  # when it was last heard of
    recent: Recent  # of its settled exchanges: those applied, and local steps
    state: State = State.IDLE
    connection: int = 0  # number of its newest connection: 1, 2, 3, ...
    connected: bool = True
    # Seconds without a sign of life after which it is given up; None: it gives none.
    silence: float | None = None
    expires: float = math.inf  # when it is given up, if it is not heard of before
    sequence: int = 0  # of its last settled exchange
    exchanges: int = 0
    dropped: int = 0
    staleness: int | None = None
    applied: bool = True  # its last exchange was; else it was dropped, or refused
    why: str = ""  # its last exchange was refused
    refused: int = 0
    in_a_row: int = 0  # refused, the last ones
    moved: float = 0.0  # the norms of its messages that were applied, and have faded
    began: float | None = None  # its round; None if that is not known
    speeds: Sequence[float] = ()  # local steps a second, in its last rounds
    speed: float = 0.0  # their median; 0 as long as there are none
    # Of the last life before this one that has settled an exchange: its incarnation,
    # and that exchange. Where none has, of the first that the center knew, and 0.
    before: tuple[Any, ...] | None = None

    @property
    def gone(self) -> bool:
        """It left, or was given up; it is remembered for its last exchange."""
        return self.state is State.GONE


# Fields of a member that say nothing in the next process, which has other connections.
_LOST = {"joined", "seen", "state", "connection", "connected", "silence", "expires"}
_LOST |= {"recent", "began", "speed"}
_KEPT = [each.name for each in dataclasses.fields(Member) if each.name not in _LOST]
_ROUNDS = 3  # by which a worker's speed is known
# How many lives that are gone are remembered, the last ones. They may come back with
# the exchange that they were in; any other one must start again.
_MOST_GONE = 1024


@dataclasses.dataclass(frozen=True)
class Entry:
    """A message that waits to be applied."""

    worker: str
    sequence: int
    anchor_version: int
    arrived: float
    ahead: int  # versions by which its anchor is newer than its worker's round
    claim: Claim = UNSAID


@dataclasses.dataclass(frozen=True)
class Batch:
    """Messages to apply together as one exchange, or to drop."""

    entries: tuple[Entry, ...]  # in the order of their workers' names
    staleness: tuple[int, ...]
    weights: tuple[float, ...] | None  # of the messages of a round; else None
    applies: bool  # False: they are to be dropped
    # Those that are not to be applied with the others, by worker.
    refused: Mapping[str, Refusal] = dataclasses.field(default_factory=dict)
    norms: tuple[float, ...] = ()  # of the messages; empty if they were not measured
    workers: int = 1  # that are there

    @property
    def taken(self) -> list[int]:
        """Which of the messages are to be applied."""
        entries = enumerate(self.entries) if self.applies else ()
        return [i for i, entry in entries if entry.worker not in self.refused]


class Ledger:
    """The decisions of a center.

    Args:
      mode: when messages are applied.
      lease: seconds after which a worker that lost its connection is given up.
      max_workers: workers that may be there at a time; None for any number.
      barrier: workers that must have joined before any may start.
      refuse: which messages are refused.
      version: exchanges applied in an earlier process.

    Attributes:
      refusals: decides that.
      version: exchanges applied.
      pending: the messages that wait, by worker.
      is_open: whether the barrier is open.
    """

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        lease: float = 10.0,
        max_workers: int | None = None,
        barrier: int = 0,
        refuse: Refuse | None = None,
        version: int = 0,
    ) -> None:
        if refuse is None:
            refuse = Refuse()
        if not isinstance(refuse, Refuse):
            raise errors.InvalidTypeError(f"refuse must be Refuse(...), got {refuse!r}")
        if mode is None:
            mode = Asynchronous()
        if not isinstance(mode, Asynchronous | BoundedStaleness | Synchronous):
            raise errors.InvalidTypeError(
                "mode must be Asynchronous(), BoundedStaleness(...) or "
                f"Synchronous(...), got {mode!r}"
            )
        check.seconds(lease, "lease")
        check.whole_number(max_workers, "max_workers", least=1)
        check.whole_number(barrier, "barrier", least=0, optional=False)
        if max_workers is not None and barrier > max_workers:
            raise errors.InvalidArgumentError(
                f"barrier must be at most max_workers, {max_workers}, or nobody ever "
                f"starts; got {barrier}"
            )
        self.mode = mode
        self.lease = lease
        self.max_workers = max_workers
        self.barrier = barrier
        self.refusals = Refusals(refuse)
        self.version = version
        self.pending: dict[str, Entry] = {}  # by worker, in order of arrival
        # Whether as many workers as the barrier wants have been there at a time.
        self.is_open = barrier == 0
        self._present: dict[str, Member] = {}
        self._gone: dict[str, Member] = {}  # in the order in which they went
        self._departed: dict[str, None] = {}  # names, in the order of departures
        self._earliest = math.inf  # time before which nobody expires
        self._looked = -math.inf  # time of the last call of `expire`
        # Seconds: if `expire` is not called for longer, the center was not running.
        self._nap = math.inf
        self._fastest: float | None = None  # speed; None where it must be looked for

    @property
    def round_grace(self) -> float | None:
        """Seconds in which the others may follow a quorum; None without one."""
        mode = self.mode
        if not isinstance(mode, Synchronous) or mode.quorum is None:
            return None
        return mode.grace

    def present(self) -> Mapping[str, Member]:
        """The workers that are there, or may still come back within their leases."""
        return self._present

    def departed(self) -> list[str]:
        """Who has left, or was given up, since this was last asked, and is not back."""
        departed, self._departed = [*self._departed], {}
        return departed

    def find(self, worker: str) -> Member | None:
        """A worker that is there, or is remembered."""
        return self._present.get(worker) or self._gone.get(worker)

    def member(self, worker: str, incarnation: str) -> Member:
        """A life of a worker that is there.

        Raises:
          WorkerStateError: it is not, or another life of it is.
        """
        member = self._present.get(worker)
        if member is None:
            raise errors.WorkerStateError(
                f"worker {worker!r} is not one of this center's: it never joined, "
                "left, or was given up; join again"
            )
        if member.incarnation != incarnation:
            raise _was_replaced(worker)
        return member

    def join(
        self,
        worker: str,
        incarnation: str,
        now: float,
        *,
        replace: bool = False,
        back: bool = False,
        silence: float | None = None,
        room: int | None = None,
    ) -> int:
        """A worker is there: new, or back. Returns the number of its connection.

        Args:
          worker: its name.
          incarnation: of this life.
          now: seconds.
          replace: takes the name from a worker that seems to be there.
          back: this life has been there before; if it is not known, it is refused.
          silence: seconds without a sign of life after which it is given up; None for a
            worker that gives none.
          room: workers for whom there is memory; None for any number.

        Raises:
          NameTakenError: a connected worker has that name.
          CenterFullError: there are ``max_workers`` already, or as many as there is
            room for.
          WorkerStateError: this life was replaced by another one, or is forgotten.
        """
        self.expire(now)
        old, there = self.find(worker), len(self._present)
        is_same = old is not None and old.incarnation == incarnation
        if back and not is_same:
            raise _was_replaced(worker)
        if old is None or old.gone:
            for most, why in (
                (self.max_workers, "this center takes"),
                (room, "the memory that this center may use is for"),
            ):
                if most is not None and there >= most:
                    raise errors.CenterFullError(
                        f"no room for worker {worker!r}: {why} {most} workers, and "
                        f"{there} are there"
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
            member = Member(incarnation, self.version, clock, now, now, Recent(now, 2))
            if old is not None:  # by the same name most likely on the same machine
                self._measured(member, old.speeds)
                # Of a life that has settled nothing, the one before it says more: a
                # worker whose attempts to join fail halfway still finds its last one.
                member.before = old.incarnation, old.sequence
                if old.sequence == 0 and old.before is not None:
                    member.before = old.before
            moved = [self._moved(m) for n, m in self._present.items() if n != worker]
            member.moved = sum(moved) / max(len(moved), 1)  # it has its share
        member.state = NEXT[member.state, "join"]
        self._gone.pop(worker, None)
        self._departed.pop(worker, None)
        self._present[worker] = member
        self._fastest = None
        member.connected, member.silence = True, silence
        member.connection += 1
        self._hear(member, now)
        self.is_open = self.is_open or len(self._present) >= self.barrier
        return member.connection

    def leave(self, worker: str, incarnation: str) -> bool:
        """A worker goes for good; False if that life is not there."""
        member = self._life(worker, incarnation)
        if member is not None:
            self._give_up(worker, member)
        return member is not None

    def disconnect(
        self, worker: str, incarnation: str, connection: int, now: float
    ) -> None:
        """A connection of a worker broke; it has until its lease ends to be back.

        Unless it is back already: then this is not its newest connection.
        """
        member = self._life(worker, incarnation)
        if member is not None and member.connection == connection:
            member.state = NEXT[member.state, "disconnect"]
            member.connected = False
            self._expect(member, now + self.lease)

    def hear(self, worker: str, incarnation: str, now: float) -> bool:
        """A sign of life came; False if that life is not there."""
        self.expire(now)
        member = self._life(worker, incarnation)
        if member is not None and member.connected:
            self._hear(member, now)
        return member is not None

    def expire(self, now: float) -> None:
        """Gives up the workers whose leases are over."""
        pause, self._looked = now - self._looked, now
        if now < self._earliest and pause <= self._nap:
            return
        self._earliest = self._nap = math.inf
        for worker, member in list(self._present.items()):
            if member.connected and member.silence is not None:
                # This was not called for so long that this process cannot have been
                # running. So it could not hear anybody, and nobody was silent.
                if pause > member.silence / 2:
                    member.expires = max(member.expires, now + member.silence)
                self._nap = min(self._nap, member.silence / 2)
            if member.expires <= now:
                self._give_up(worker, member)
            self._earliest = min(self._earliest, member.expires)

    def submit(
        self,
        worker: str,
        incarnation: str,
        sequence: int,
        anchor: int,
        now: float,
        claim: Claim = UNSAID,
    ) -> bool:
        """A worker's message is there; it was made from version ``anchor``.

        Returns:
          True if it is still to be applied; False if it was settled before.

        Raises:
          WorkerStateError: the worker is not there, or another life of it is, or its
            sequence number is neither the last one nor the next.
          InvalidArgumentError: its anchor is not a version that the center has had, or
            what it claims is out of range.
        """
        self.hear(worker, incarnation, now)
        member = self.member(worker, incarnation)
        if not 0 <= anchor <= self.version:
            raise errors.InvalidArgumentError(
                f"anchor_version must be in [0, {self.version}], the versions that "
                f"this center has had, got {anchor!r}"
            )
        check.whole_number(claim.steps, "steps", least=0, most=MOST_STEPS)
        claim = claim._replace(weight=check.weight(claim.weight))
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
            if member.began is not None and claim.steps and now > member.began:
                speed = float(f"{claim.steps / (now - member.began):.4g}")
                self._measured(member, (*member.speeds, speed)[-_ROUNDS:])
            ahead = max(0, anchor - member.turn)
            entry = Entry(worker, sequence, anchor, now, ahead, claim)
            self.pending[worker] = entry
        return not is_last

    def is_waiting(self, batch: Batch) -> bool:
        """Return whether all messages of a batch still wait: no worker has gone."""
        return all(self.pending.get(each.worker) is each for each in batch.entries)

    def due(self, now: float) -> Batch | None:
        """The messages to deal with next; None if all must wait. They wait until then.

        What was due may be dealt with later, as long as it `is_waiting`: messages that
        come meanwhile are for the next batch.
        """
        self.expire(now)
        mode = self.mode
        if isinstance(mode, Synchronous):
            return self._due_round(mode, now)
        for entry in self.pending.values():
            if isinstance(mode, Asynchronous):
                return self._batch([entry])
            if mode.versions is not None and self._missed(entry) > mode.versions:
                return self._batch([entry], applies=False)
            clocks = [member.clock for member in self._present.values()]
            ahead = self._present[entry.worker].clock - min(clocks)
            if mode.rounds is None or ahead <= mode.rounds:
                return self._batch([entry])
        return None

    def judge(self, batch: Batch, sizes: Sequence[Size | None]) -> Batch:
        """A batch, and which of its messages are refused.

        Args:
          batch: that `due` has returned.
          sizes: of its messages; None where they were not measured.
        """
        if not batch.applies:
            return batch
        refused = {}
        own, everybody, exchanges = {}, 0.0, 0
        share = self.refusals.refuse.share
        # As many as 1 / share or fewer, alike, cannot keep below it.
        if share is not None and share * len(self._present) > 1:
            own = {name: self._moved(m) for name, m in self._present.items()}
            everybody = sum(own.values())
            exchanges = sum(member.exchanges for member in self._present.values())
        for entry, size in zip(batch.entries, sizes, strict=True):
            moved = own.get(entry.worker, 0.0)
            others = everybody - moved
            refusal = self.refusals.judge(
                size, self._missed(entry), moved, others, exchanges, entry.claim
            )
            if refusal is not None:
                refused[entry.worker] = refusal
        norms = tuple(size.norm for size in sizes if size is not None)
        return self.refusing(dataclasses.replace(batch, norms=norms), refused)

    def refusing(self, batch: Batch, refused: Mapping[str, Refusal]) -> Batch:
        """A batch of which these messages are refused, beside those that were."""
        most = self.refusals.refuse.in_a_row
        more = {
            worker: refusal._replace(is_last=self._present[worker].in_a_row + 1 >= most)
            for worker, refusal in refused.items()
        }
        return dataclasses.replace(batch, refused={**batch.refused, **more})

    def pace(self, worker: str) -> float | None:
        """A worker's speed as a share of the fastest one's; None if it is not known.

        Of those that are there, or may still be back.
        """
        member = self._present.get(worker)
        if member is None or not member.speed:
            return None
        if self._fastest is None:
            self._fastest = max(each.speed for each in self._present.values())
        return member.speed / self._fastest

    def settle(self, batch: Batch, now: float) -> None:
        """The messages of a batch have been applied, dropped or refused."""
        taken = batch.taken
        self.version += bool(taken)
        for i, entry in enumerate(batch.entries):
            del self.pending[entry.worker]
            member, refusal = (
                self._present[entry.worker],
                batch.refused.get(entry.worker),
            )
            member.began = now
            member.recent.add(now, i in taken, entry.claim.steps)
            if refusal is not None:
                self.refusals.count(refusal)
                member.refused += 1
                member.in_a_row += 1
                if refusal.is_last:  # as if it had never come
                    member.state = NEXT[member.state, "refuse"]
                    continue
            member.state = NEXT[member.state, "settle"]
            member.sequence = entry.sequence
            member.staleness = batch.staleness[i]
            member.moved, member.turn = self._moved(member), self.version
            member.applied = i in taken
            member.why = "" if refusal is None else refusal.why
            member.clock += batch.applies  # nobody waits for one that was refused
            if member.applied:
                member.exchanges += 1
                member.in_a_row = 0
                if batch.norms and math.isfinite(batch.norms[i]):
                    member.moved += batch.norms[i]
            elif refusal is None:
                member.dropped += 1
        self.refusals.took([batch.norms[i] for i in taken if batch.norms])

    def refuse(self, batch: Batch) -> None:
        """The messages of a batch could not be applied: as if they had never come."""
        for entry in batch.entries:
            del self.pending[entry.worker]
            member = self._present[entry.worker]
            member.state = NEXT[member.state, "refuse"]

    def shift(self) -> None:
        """The center moved, and no message moved it; this makes no message late."""
        self.version += 1
        for member in (*self._present.values(), *self._gone.values()):
            member.turn += 1

    def acknowledge(self, worker: str, incarnation: str, sequence: int) -> None:
        """A worker has the answer to an exchange, and will not ask for it again."""
        member = self._life(worker, incarnation)
        if member is not None and member.sequence == sequence:
            member.state = NEXT[member.state, "acknowledge"]

    def memory(self, workers: Iterable[str] | None = None) -> dict[str, Any]:
        """What of some workers (None: of all) outlives a process, as JSON has it."""
        named = (*self._gone, *self._present) if workers is None else workers
        members = {
            name: {field: getattr(member, field) for field in (*_KEPT, "gone")}
            for name in named
            if (member := self.find(name)) is not None
        }
        norms = self.refusals.memory(whole=workers is None)
        return {"members": members, "open": self.is_open, "norms": norms}

    def recall(self, memory: dict[str, Any], now: float, *, gone: bool = False) -> None:
        """Knows what it knew in an earlier process; nobody is connected, though.

        Args:
          memory: what `memory` returned.
          now: seconds.
          gone: whether the center is another one, which its workers join anew: then it
            is only known which of their exchanges it has.
        """
        for name, told in memory["members"].items():
            # An earlier release has had no speeds.
            fields = {field: told[field] for field in _KEPT if field in told}
            recent = Recent(now, 2)
            if fields.get("before") is not None:
                fields["before"] = tuple(fields["before"])  # JSON has lists
            member = Member(**fields, joined=now, seen=now, recent=recent)
            self._measured(member, tuple(member.speeds))
            self._gone.pop(name, None)
            self._present[name], self._fastest = member, None
            self.disconnect(name, member.incarnation, member.connection, now)
            if told["gone"] or gone:
                self._give_up(name, member)
        if gone:
            return
        enough = len(self._present) >= self.barrier
        self.is_open = self.is_open or memory["open"] or enough
        self.refusals.recall(memory["norms"])

    def deadline(self, *, is_held: bool = False) -> float | None:
        """When to call `due` again if nothing happens before; None: need not.

        Args:
          is_held: whether nothing is dealt with for now, so that only leases end.
        """
        times = [math.inf if is_held else self._round_ends()]
        for member in self._present.values():
            times.append(member.expires)
            if member.connected and member.silence is not None:
                # Often enough to show that the center runs: see `expire`.
                times.append(self._looked + member.silence / 4)
        first = min(times)
        return first if first < math.inf else None

    def _life(self, worker: str, incarnation: str) -> Member | None:
        """A life of a worker; None if it is not there."""
        member = self._present.get(worker)
        is_there = member is not None and member.incarnation == incarnation
        return member if is_there else None

    def _measured(self, member: Member, speeds: Sequence[float]) -> None:
        """How fast a worker was in its last rounds."""
        before, member.speeds = member.speed, speeds
        # One of three may have been suspended, or have had its steps made before.
        member.speed = sorted(speeds)[len(speeds) // 2] if speeds else 0.0
        if self._fastest is not None and max(before, member.speed) >= self._fastest:
            self._fastest = None

    def _moved(self, member: Member) -> float:
        """The norms of what a worker was applied, as much as they still count."""
        return member.moved * FADES ** (self.version - member.turn)

    def _due_round(self, mode: Synchronous, now: float) -> Batch | None:
        if mode.late == "drop":
            for entry in self.pending.values():
                if self._missed(entry):
                    return self._batch([entry], applies=False)
        everybody = self._present.keys() <= self.pending.keys()
        if not self.pending or not (everybody or now >= self._round_ends()):
            return None
        return self._batch(list(self.pending.values()))

    def _batch(self, entries: list[Entry], *, applies: bool = True) -> Batch:
        """These messages, as one exchange."""
        entries = sorted(entries, key=lambda entry: entry.worker)
        staleness = tuple(self.version - entry.anchor_version for entry in entries)
        weights = None
        if isinstance(self.mode, Synchronous):
            weighted = self.mode.late == "weighted"
            weights = tuple(1 / (1 + weighted * self._missed(each)) for each in entries)
        workers = len(self._present)
        return Batch(tuple(entries), staleness, weights, applies, workers=workers)

    def _missed(self, entry: Entry) -> int:
        """Versions since the round of a worker began whose message waits.

        Not since its anchor, which may be older: some rules adopt the center as it was
        before their own message.
        """
        return self.version - self._present[entry.worker].turn - entry.ahead

    def _round_ends(self) -> float:
        """When a round ends with the messages that are there; inf if they are few."""
        mode, entries = self.mode, self.pending.values()
        if not isinstance(mode, Synchronous) or mode.quorum is None:
            return math.inf
        if len(entries) < mode.quorum:
            return math.inf
        # A message that missed its round must not use up the grace of the next one.
        on_time = [entry.arrived for entry in entries if not self._missed(entry)]
        return min(on_time or [entry.arrived for entry in entries]) + mode.grace

    def _hear(self, member: Member, now: float) -> None:
        member.seen = now
        member.expires = math.inf
        if member.silence is not None:
            self._nap = min(self._nap, member.silence / 2)
            self._expect(member, now + member.silence)

    def _expect(self, member: Member, until: float) -> None:
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
        f"worker {worker!r} was replaced by another one of that name, or has been away "
        "for so long that it is forgotten; start() again"
    )
