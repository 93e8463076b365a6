"""The tape of a simulated run, written by a real center under the virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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
    LocalSession,
    Mode,
    Runtime,
    Store,
    Submission,
    Thresholds,
)
from agn_optax.simulate._cluster import nanoseconds
from agn_optax.simulate._events import SESSION_COLUMNS, Outcome, SessionEvent
from agn_optax.simulate._schedule import Schedule
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
    worker: str
    session: int
    event: SessionEvent | None  # None when the lease of one that failed ends


class Recording:
    """A real center that does what a schedule says, and writes it to a journal.

    Joins, messages, leaves and ends of leases reach the center at their times of the
    schedule. Its ledger counts them, and its mode decides as the schedule does.

    Args:
      planned: the schedule.
      params: the first parameters.
      journal: the journal, whose directory must be new or empty.

    Attributes:
      store: the store of the center.

    Raises:
      InvalidTypeError: ``journal`` is not a `Journal`.
      InvalidArgumentError: the directory has files.
      DurabilityError: the directory cannot be written.
    """

    def __init__(self, planned: Schedule, params: PyTree, journal: Journal) -> None:
        check.instance(journal, Journal, "durability must be Journal(...) or None")
        check_new(journal.directory)
        assert planned.rule is not None
        self._planned = planned
        self._now = 0.0  # s, of the virtual clock
        self._mode = _Decided(planned.combines)
        settings = CenterSettings(
            planned.rule,
            params,
            mode=self._mode,
            durability=journal,
            limits=planned.limits,
            thresholds=_NO_NOTICES,
        )
        self._core = Core(settings, runtime=Runtime(clock=lambda: self._now))
        self.store: Store = self._core.store
        self._changes = deque(_changes(planned))
        self._sessions: dict[str, LocalSession] = {}
        self._queued = 0  # bytes of contributions since all were on disk

    def settle(self, rows: Sequence[int], submissions: Sequence[Submission]) -> None:
        """Settle messages as the schedule does.

        Args:
          rows: their rows in the schedule, in the order of the center.
          submissions: the messages.
        """
        given = dict(zip(rows, submissions, strict=True))
        for batch in _batches(self._planned, rows):
            self._settle(batch, [given[row] for row in batch])

    def _settle(self, rows: list[int], submissions: list[Submission]) -> None:
        """Settle messages that are applied, dropped or rejected together."""
        planned, first = self._planned, rows[0]
        workers = int(planned.workers[first])
        self._change(int(planned.settled[first]), workers)
        if (registered := len(self._core.ledger.registered())) != workers:
            raise errors.SimulationError(
                f"after {planned.settled[first] / 1e9:g} s the schedule has {workers} "
                f"registered workers, and the center {registered}"
            )
        names = [planned.names[planned.worker[row]] for row in rows]
        for row, name, submission in zip(rows, names, submissions, strict=True):
            # Programs may overwrite the arrays before they are on disk.
            contribution = jax.tree.map(np.array, submission.contribution)
            self._queued += trees.nbytes(contribution)
            self._now = planned.arrived[row] / 1e9
            self._sessions[name].submit(submission._replace(contribution=contribution))
        self._now = planned.settled[first] / 1e9
        by_name = dict(zip(names, planned.weight[rows].tolist(), strict=True))
        weights = tuple(by_name[name] for name in sorted(names))
        applies = bool(planned.outcome[first] != Outcome.DROPPED)
        self._mode.decide(names, weights if planned.combines else None, applies=applies)
        self._core.heartbeat(())  # of nobody: it settles what is due
        made = int(planned.version[rows].max())
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

    def finish(self, at: int) -> None:
        """End the run: all workers that are registered leave.

        Args:
          at: time of the end, ns.
        """
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
            self._make_change(self._changes.popleft())

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
        else:
            self._sessions.pop(name)
            core.heartbeat(())


def _changes(planned: Schedule) -> list[_Change]:
    """Return all changes of the registered workers, by time.

    The center gives up a worker that failed when its lease ends, unless it joins again
    before.
    """
    lease = nanoseconds(planned.limits.lease) + 1
    rows = zip(
        *[planned.sessions[name].tolist() for name in SESSION_COLUMNS], strict=True
    )
    found: list[_Change] = []
    failed: dict[str, _Change] = {}  # and has not joined again
    for at, worker, session, event in rows:
        change = _Change(at, planned.names[worker], session, SessionEvent(event))
        if change.event is SessionEvent.STARTED:
            continue
        found.append(change)
        end = failed.pop(change.worker, None)
        if end is not None and end.at < at:
            found.append(end)
        if change.event is SessionEvent.FAILED:
            failed[change.worker] = change._replace(at=at + lease, event=None)
    return sorted([*found, *failed.values()], key=lambda change: change.at)


def _batches(planned: Schedule, rows: Sequence[int]) -> Iterator[list[int]]:
    """Yield the messages that the center settles at once."""
    batch: list[int] = []
    for row in rows:
        is_same = (
            bool(batch)
            and planned.combines
            and planned.settled[row] == planned.settled[batch[0]]
            and Outcome.DROPPED not in planned.outcome[[row, batch[0]]]
        )
        if batch and not is_same:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
