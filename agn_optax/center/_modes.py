"""Modes: which of the waiting messages are applied next, and how they count.

Like the ledger, which asks them, modes hold no arrays, no lock and no clock: the time
``now``, in seconds, is an argument.

Three numbers say how late a message is, or how early:

    staleness          versions since the message's anchor. Rules discount by it, and
                       answers report it.
    round_staleness    versions since the worker's round began: with its last answer, or
                       with the message's anchor if that is newer. Modes use it, because
                       under some rules a worker adopts the center as it was before its
                       own message, so that the staleness is 1 even if no other worker
                       exists.
    rounds_ahead       rounds by which the worker is ahead of the slowest worker, which
                       ``BoundedStaleness(rounds=)`` bounds.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center._submission import Submission


class Entry(NamedTuple):
    """A message that waits to be applied."""

    worker: str
    submission: Submission  # without its arrays
    arrived: float  # time, s
    norm: float | None = None  # of the message; None if it was not measured


class Waiting(Protocol):
    """The waiting messages as a mode sees them; `Ledger` is an implementation."""

    @property
    def pending(self) -> Mapping[str, Entry]:
        """The waiting messages, by worker, in the order of arrival."""

    @property
    def is_complete(self) -> bool:
        """True if a message of every registered worker waits."""

    def round_staleness(self, entry: Entry) -> int:
        """Return the number of versions since the round of a message began."""

    def rounds_ahead(self, entry: Entry) -> int:
        """Return the rounds by which a message's worker is ahead of the slowest."""

    def to_look_at(self, *, versions: bool) -> Iterable[Entry]:
        """Return the messages that may have become due, in the order of arrival.

        These are all that wait; or only those that have arrived since `Mode.due` last
        returned None, if no message from before can be due.

        Args:
          versions: whether a message that waits may become due by a new version, and
            not only by a round of the slowest worker.
        """

    @property
    def round_began(self) -> float:
        """The arrival, in s, of the first message that is on time, or of the first.

        There must be a message.
        """

    @property
    def step_time(self) -> float | None:
        """Seconds of a local step of the fastest worker; None before it is known."""


class Due(NamedTuple):
    """Messages to be applied together, or to be dropped."""

    entries: list[Entry]
    applies: bool = True  # False if they are to be dropped


class Mode(abc.ABC):
    """The decision when messages are applied.

    Attributes:
      combines: whether messages are applied in rounds, in each of which the rule
        combines the messages into one.
    """

    combines: ClassVar[bool] = False

    @abc.abstractmethod
    def due(self, waiting: Waiting, now: float) -> Due | None:
        """Return the messages to apply or drop next; None if all must wait."""

    def weights(self, round_staleness: Sequence[int]) -> tuple[float, ...] | None:
        """Return the factors of a round's messages; None if there are no rounds.

        Args:
          round_staleness: round staleness of each message. It is the number of rounds
            that the message has missed, because each round makes one version.
        """
        return None

    def deadline(self, waiting: Waiting) -> float:
        """Return the time at which messages become due if none arrives; or inf."""
        return math.inf


@dataclasses.dataclass(frozen=True)
class Asynchronous(Mode):
    """Every message is applied on arrival; no worker waits for another."""

    def due(self, waiting: Waiting, now: float) -> Due | None:
        """Return the message that arrived first: see `Mode.due`."""
        for first in waiting.pending.values():
            return Due([first])
        return None


@dataclasses.dataclass(frozen=True)
class BoundedStaleness(Mode):
    """Messages are applied on arrival, within bounds on staleness or on rounds ahead.

    A worker's round begins with the last answer to the worker, or with its message's
    anchor if that is newer.

    With both bounds, a message that waits for slower workers ages meanwhile, and is
    dropped as soon as it is older than ``versions``. No older message is ever applied.
    A dropped message does not count as a round of its worker. The other workers
    therefore wait for that worker when they are ``rounds`` ahead of it, and one of its
    messages is then in time.

    Args:
      versions: maximum number of versions between the beginning of a worker's round
        and the time when its message is applied. Older messages are dropped, and their
        workers continue from the current center. None for no bound.
      rounds: maximum number of rounds by which a worker may be ahead of the slowest
        one; beyond that it waits. None for no bound.

    Raises:
      InvalidArgumentError: a bound is negative, or no bound is given.

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

    def due(self, waiting: Waiting, now: float) -> Due | None:
        """Return the first message to drop or to apply: see `Mode.due`."""
        versions = self.versions
        for entry in waiting.to_look_at(versions=versions is not None):
            if versions is not None and waiting.round_staleness(entry) > versions:
                return Due([entry], applies=False)
            if self.rounds is None or waiting.rounds_ahead(entry) <= self.rounds:
                return Due([entry])
        return None


@dataclasses.dataclass(frozen=True)
class Synchronous(Mode):
    r"""Rounds: the rule combines the messages of all workers into one, as on a mesh.

    A round ends when every registered worker has sent its message, or when a quorum has
    sent theirs and the grace period is over. A worker that died delays a round only
    until its lease ends.

    With ``slack_steps``, the grace period follows the speed of the workers. A worker
    that goes on with local steps needs its answer only some steps after its message.
    The round may wait for slow workers so long without delaying any:

    .. math:: \text{grace} = \text{share} \cdot
        \max(0, \text{slack steps} \cdot \text{step time} - \text{sync time})

    The step time is that of the fastest registered worker, the median of its last three
    rounds.

    Args:
      quorum: number of messages that end a round once the grace period is over; None
        waits for all registered workers.
      grace: grace period in seconds, from the first message of a round. With
        ``slack_steps``, the grace period until a step time is known.
      late: use of a message that missed its round: ``"next"`` applies it in the next
        round; ``"weighted"`` also divides it by the number of missed rounds + 1 (unless
        the rule itself discounts messages by their staleness); ``"drop"`` drops it, and
        its worker continues from the current center.
      slack_steps: local steps that workers make before they need an answer, such as the
        ``delay`` of their fragments; None for a grace period that does not change.
      slack_share: fraction of the slack that the grace period takes, in [0, 1].
      sync_time: seconds of the slack that the answer needs to reach the workers.

    Raises:
      InvalidArgumentError: a value is out of range, or slack steps are given without a
        quorum.

    Example:
      >>> from agn_optax.center import Synchronous
      >>> Synchronous(quorum=3, grace=5.0).late
      'next'

    References:
      Arthur Douillard et al., *Decoupled DiLoCo for Resilient Distributed
      Pre-training*, 2026, for a grace period that adapts to the slack. Its abstract and
      summaries were read; the formula is ours.
    """

    combines: ClassVar[bool] = True

    quorum: int | None = None
    grace: float = 0.0
    late: Literal["next", "weighted", "drop"] = "next"
    slack_steps: int | None = None
    slack_share: float = 1.0
    sync_time: float = 0.0

    def __post_init__(self) -> None:
        check.whole_number(self.quorum, "quorum", least=1)
        check.seconds(self.grace, "grace")
        check.whole_number(self.slack_steps, "slack_steps", least=0)
        check.rate(self.slack_share, "slack_share", low=0.0, high=1.0)
        check.seconds(self.sync_time, "sync_time")
        if self.slack_steps is not None and self.quorum is None:
            raise errors.InvalidArgumentError(
                "slack_steps needs a quorum, which ends a round once the grace period "
                f"is over, got slack_steps={self.slack_steps} without one"
            )
        if self.late not in ("next", "weighted", "drop"):
            raise errors.InvalidArgumentError(
                f"late must be 'next', 'weighted' or 'drop', got {self.late!r}"
            )

    def due(self, waiting: Waiting, now: float) -> Due | None:
        """Return the messages of a round that has ended: see `Mode.due`."""
        if self.late == "drop":
            for entry in waiting.to_look_at(versions=True):
                if waiting.round_staleness(entry):
                    return Due([entry], applies=False)
        pending = waiting.pending
        if pending and (waiting.is_complete or now >= self.deadline(waiting)):
            return Due([*pending.values()])
        return None

    def weights(self, round_staleness: Sequence[int]) -> tuple[float, ...] | None:
        """Return the factors of a round's messages: see `Mode.weights`."""
        weighted = self.late == "weighted"
        return tuple(1 / (1 + weighted * missed) for missed in round_staleness)

    def deadline(self, waiting: Waiting) -> float:
        """Return when a round ends with the messages so far; inf without a quorum."""
        if self.quorum is None or len(waiting.pending) < self.quorum:
            return math.inf
        # A late message must not use up the grace period of the next round.
        return waiting.round_began + self._grace(waiting)

    def _grace(self, waiting: Waiting) -> float:
        if self.slack_steps is None or (step_time := waiting.step_time) is None:
            return self.grace
        slack = self.slack_steps * step_time - self.sync_time
        return self.slack_share * max(0.0, slack)
