"""The tape of a simulated run, written by a real center under the virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.center import (
    CenterSettings,
    Core,
    Due,
    Journal,
    Limits,
    LocalSession,
    Mode,
    Runtime,
    Store,
    Submission,
    Thresholds,
)
from agn_optax.rules import Rule
from agn_optax.simulate._cluster import nanoseconds
from agn_optax.simulate._events import Outcome, SessionEvent
from agn_optax.tape import check_new

PyTree = Any

_MOST_QUEUED = 64 << 20  # bytes of contributions that may wait for the disk
# Nobody reads notices about simulated workers.
_NO_NOTICES = Thresholds(
    **dict.fromkeys(
        ("lost_messages", "missed_periods", "still_center", "other_norm", "apart")
    ),
    one_by_one=None,
)


class _Decided(Mode):
    """A mode whose decisions were made before, and are given one at a time.

    Args:
      combines: see `Mode`.
    """

    def __init__(self, combines: bool) -> None:
        self.combines = combines  # type: ignore[misc]  # it differs between instances
        self._due: tuple[list[str], bool] | None = None  # workers, and `Due.applies`
        self._weights: tuple[float, ...] | None = None

    def decide(
        self, workers: list[str], weights: tuple[float, ...] | None, *, applies: bool
    ) -> None:
        """Make the messages of these workers due."""
        self._due, self._weights = (workers, applies), weights

    def due(self, waiting: Any, now: float) -> Due | None:
        """Return the messages that were decided upon: see `Mode.due`."""
        if self._due is None:
            return None
        (workers, applies), self._due = self._due, None
        return Due([waiting.pending[worker] for worker in workers], applies)

    def weights(self, round_staleness: Sequence[int]) -> tuple[float, ...] | None:
        """Return the factors of the messages: see `Mode.weights`."""
        return self._weights


class _Change(NamedTuple):
    """A change of the registered workers."""

    at: int  # time, ns
    number: int  # of changes, for the order of those at the same time
    worker: str
    session: int
    event: SessionEvent | None  # None when the lease of one that failed ends


class Recording:
    """A real center that does what a simulation says, and writes it to a journal.

    Joins, messages, leaves and ends of leases reach the center at their simulated
    times. Its ledger counts them, and its mode decides as the simulation has decided.

    Args:
      journal: the journal, whose directory must be new or empty.
      rule: the rule.
      params: the first parameters.
      names: names of the workers.
      limits: the limits of the center.
      combines: whether it applies messages in rounds.

    Attributes:
      store: the store of the center.

    Raises:
      InvalidTypeError: ``journal`` is not a `Journal`.
      InvalidArgumentError: the directory has files.
      DurabilityError: the directory cannot be written.
    """

    def __init__(
        self,
        journal: Journal,
        rule: Rule,
        params: PyTree,
        names: Sequence[str],
        limits: Limits,
        *,
        combines: bool,
    ) -> None:
        check.instance(journal, Journal, "durability must be Journal(...) or None")
        check_new(journal.directory)
        self._names, self._combines = names, combines
        self._now = 0.0  # s, of the virtual clock
        self._mode = _Decided(combines)
        settings = CenterSettings(
            rule,
            params,
            mode=self._mode,
            durability=journal,
            limits=limits,
            thresholds=_NO_NOTICES,
        )
        self._core = Core(settings, runtime=Runtime(clock=lambda: self._now))
        self.store: Store = self._core.store
        self._changes: list[_Change] = []  # a heap of those to come
        self._numbers = itertools.count()
        self._sessions: dict[str, LocalSession] = {}
        # Sessions that failed, by the number of the change that ends them.
        self._failed: dict[int, LocalSession] = {}
        self._last: dict[int, Any] = {}  # last message of each worker
        self._settled = 0  # time of the last decision, ns
        self._queued = 0  # bytes of contributions since all were on disk

    def note(self, at: int, index: int, session: int, event: SessionEvent) -> None:
        """Take a change of a session, at a time that is not over.

        Args:
          at: time of the change, ns.
          index: the worker.
          session: number of the session.
          event: the change.
        """
        self._push(at, self._names[index], session, event)

    def _push(
        self, at: int, name: str, session: int, event: SessionEvent | None
    ) -> int:
        """Plan a change, and return its number."""
        change = _Change(at, next(self._numbers), name, session, event)
        heapq.heappush(self._changes, change)
        return change.number

    def settle(
        self, messages: Sequence[Any], submissions: Sequence[Submission]
    ) -> None:
        """Settle messages together as the simulation does.

        Args:
          messages: the messages, in the order of the center.
          submissions: their submissions.
        """
        first = messages[0]
        self._settled = at = first.settled
        self._change(at, first.workers)
        if (registered := len(self._core.ledger.registered())) != first.workers:
            raise errors.SimulationError(
                f"after {at / 1e9:g} s the schedule has {first.workers} registered "
                f"workers, and the center {registered}"
            )
        names = [self._names[message.worker] for message in messages]
        for message, name, submission in zip(messages, names, submissions, strict=True):
            # Programs may overwrite the arrays before they are on disk.
            contribution = jax.tree.map(np.array, submission.contribution)
            self._queued += trees.nbytes(contribution)
            self._now = message.arrived / 1e9
            self._sessions[name].submit(
                submission._replace(
                    contribution=contribution, late_steps=self._late_steps(message)
                )
            )
        self._now = at / 1e9
        weights = None
        if self._combines:
            by_name = {self._names[m.worker]: float(m.weight) for m in messages}
            weights = tuple(by_name[name] for name in sorted(names))
        applies = first.outcome != Outcome.DROPPED
        self._mode.decide(names, weights, applies=applies)
        self._core.heartbeat(())  # of nobody: it settles what is due
        made = max(message.version for message in messages)
        if made >= 0 and self.store.current.number != made:
            raise errors.SimulationError(
                f"the center does not make version {made} of the schedule, but is at "
                f"version {self.store.current.number}: its limits are others"
            )
        for name, submission in zip(names, submissions, strict=True):
            try:
                self._sessions[name].answer(submission.sequence, timeout=0.0)
            except errors.MessageRejectedError:
                continue  # the last one of its session
            self._sessions[name].acknowledge(submission.sequence)
        if self._queued > _MOST_QUEUED:
            with self._core.reading(kept=True):
                self._queued = 0

    def _late_steps(self, message: Any) -> int:
        """Return the steps of a message that were made before the last answer."""
        last, self._last[message.worker] = self._last.get(message.worker), message
        if last is None or last.session != message.session:
            return 0
        if last.outcome == Outcome.REJECTED:  # its worker was reset
            return 0
        return int(last.steps_since)

    def finish(self, at: int | None = None) -> None:
        """End the run: all workers that are registered leave.

        Args:
          at: time of the end, ns; None for that of the last decision.
        """
        at = self._settled if at is None else at
        self._change(at, None)
        self._now = at / 1e9
        for session in self._sessions.values():
            session.leave()

    def close(self) -> None:
        """Write what is left to disk, and release the directory."""
        self._core.close("the simulation has ended")

    def _change(self, until: int, workers: int | None) -> None:
        """Let workers join, leave and expire.

        Args:
          until: time, ns.
          workers: number of registered workers after which changes of the same time
            come later; None if there is no more to come.
        """
        registered = self._core.ledger.registered()
        while self._changes:
            at = self._changes[0].at
            # A lease is over a nanosecond later than a message may already find it.
            if at > until + 1 or (at >= until and len(registered) == workers):
                break
            self._make_change(heapq.heappop(self._changes))

    def _make_change(self, change: _Change) -> None:
        name, core = change.worker, self._core
        self._now = change.at / 1e9
        if change.event is SessionEvent.JOINED:
            session_id = str(change.session)
            self._sessions[name] = core.join(name, session_id, replace=True)
        elif change.event is SessionEvent.LEFT:
            self._sessions.pop(name).leave()
        elif change.event is SessionEvent.FAILED:
            self._sessions[name].disconnect()
            lease = nanoseconds(core.ledger.limits.lease)
            end = self._push(change.at + lease + 1, name, change.session, None)
            self._failed[end] = self._sessions[name]
        elif change.event is None:
            session = self._failed.pop(change.number)
            if self._sessions.get(name) is session:  # it has not joined again
                del self._sessions[name]
                core.heartbeat(())
