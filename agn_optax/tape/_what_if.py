"""Recorded contributions through another center."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.center import (
    Asynchronous,
    Batch,
    CenterState,
    Ledger,
    Limits,
    Mode,
    Store,
    Submission,
)
from agn_optax.rules import Rule, difference, workers_difference
from agn_optax.tape._evaluate import Measured, Measurements
from agn_optax.tape._events import Event, Message
from agn_optax.tape._tape import Tape

PyTree = Any
_BLOCK = 64  # adoptions that are compared at a time
_BLOCK_BYTES = 16 << 20  # bytes of versions whose digests are computed at a time


class Parted(NamedTuple):
    """The first time at which a worker would have adopted something else."""

    time: float  # s, since the recorded center began
    worker: str
    recorded_version: int  # version that the worker adopted
    version: int  # version that it would have adopted


class Share(NamedTuple):
    """The ends of a worker's messages."""

    applied: int = 0
    dropped: int = 0
    rejected: int = 0
    waiting: int = 0  # messages that still waited at the end of the tape


class WhatIf(NamedTuple):
    """The recorded contributions through another center."""

    parted: Parted | None  # None if all workers would have adopted what they did
    recorded_version: int  # newest version of the recorded center
    workers: Mapping[str, Share]  # by name
    recorded: list[Measured]  # numbers of the recorded center
    measured: list[Measured]  # numbers of the other center
    state: CenterState  # the other center at the end

    @property
    def version(self) -> int:
        """The newest version of the other center."""
        return int(self.state.version)


def what_if(
    tape: Tape,
    recorded_rule: Rule,
    rule: Rule | None = None,
    mode: Mode | None = None,
    *,
    limits: Limits | None = None,
    function: Callable[[PyTree], Any] | None = None,
    every: int = 1,
    begin: int | None = None,
    params: PyTree = None,
    progress: Callable[[int], None] | None = None,
) -> WhatIf:
    """Send recorded contributions through another center.

    Each message arrives at its recorded time, or when its worker has the answer to the
    message before, if that is later. Up to the first time when a worker would have
    adopted something else than it did (`WhatIf.parted`), the result is what the other
    center would have done. From then on the workers would have sent other
    contributions, and only the schedule is real.

    Args:
      tape: the tape, with all contributions.
      recorded_rule: the rule of the recorded center.
      rule: the rule of the other center, which differs only in the center's part: its
        center optimizer, its combination, its discount. None for the recorded rule.
      mode: when messages are applied; None for `Asynchronous`.
      limits: limits on messages; None for ``Limits()``.
      function: function from parameters to a number, or to a dict of numbers.
      every: versions from one call of the function to the next; the newest version is
        measured, too.
      begin: the first version; None for the first one on the tape.
      params: parameters with the containers to use, see `Tape.replay`.
      progress: called with the number of each record: while all are read, while the
        recorded center is computed, and for the other one.

    Raises:
      RuleMismatchError: the rules differ in what workers do.
      DurabilityError: the tape is damaged, or some contributions are not on it.
      InvalidArgumentError: the tape does not begin at a snapshot of ``begin``.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, agn_optax
      >>> rule = agn_optax.rules.diloco(optax.sgd(1.0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     journal = agn_optax.center.Journal(folder, keep="contributions")
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=journal)
      ...     session = center.join("worker-0")
      ...     for i in range(3):
      ...         sent = agn_optax.center.Submission(i + 1, jnp.ones(2), i)
      ...         _ = session.exchange(sent)
      ...     center.close()
      ...     other = agn_optax.rules.diloco(optax.sgd(0.5))
      ...     tape = agn_optax.tape.read(folder)
      ...     result = agn_optax.tape.what_if(tape, rule, other)
      >>> print(result.state.params, result.parted.recorded_version)
      [-0.5 -0.5] 1
    """
    rule = rule or recorded_rule
    check_rules(tape, rule)
    number = tape.start_of(begin)
    events = list(tape.events(number, progress=progress))
    _check_kept(tape, events)
    recorded = _Recorded(
        tape.run(recorded_rule, number, params, progress),
        Measurements(function, every),
    )
    run = _Run(tape, recorded_rule, rule, mode, limits, recorded, events)
    store, measured = run.store, Measurements(function, every)
    measured.add(store.current.number, 0.0, store.current_params)
    for time in run.versions(progress):
        measured.add(store.current.number, time, store.current_params)
    return WhatIf(
        run.parted,
        events[-1].version if events else int(recorded.first.version),
        {name: Share(**counts) for name, counts in sorted(run.counts().items())},
        [] if function is None else recorded.finish(),
        measured.finished(),
        store.save(),
    )


def check_rules(tape: Tape, rule: Rule) -> None:
    """Check that workers of a tape could have sent the same to a center of a rule.

    Raises:
      RuleMismatchError: the rule differs in what workers do.
    """
    if other := workers_difference(tape.fingerprint, rule):
        raise errors.RuleMismatchError(
            f"the workers of {tape.path} had a rule that differs from {rule.name!r} in "
            f"what workers do: {other}. A what-if may change only the center: its "
            "optimizer, its combination of messages, its mode and limits"
        )


def _check_kept(tape: Tape, events: list[Event]) -> None:
    missing = [e.number for e in events if any(not m.is_kept for m in e.messages)]
    if missing:
        raise errors.DurabilityError(
            f"{tape.path} has {len(missing)} records without all contributions, the "
            f"last one is record {missing[-1]}. A what-if needs also those of dropped "
            "and rejected messages: record with Journal(..., keep='contributions'), or "
            "begin at a later version"
        )


class _Digests:
    """Digests of versions, computed many at a time, as each waits for the device."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}
        self._waiting: dict[int, PyTree] = {}

    def add(self, version: int, params: PyTree) -> None:
        """Add a version, whose arrays do not change."""
        self._waiting[version] = params
        if len(self._waiting) * trees.nbytes(params) >= _BLOCK_BYTES:
            self._compute()

    def find(self, version: int) -> str | None:
        """Return the digest of a version; None if it was not added."""
        if version in self._waiting:
            self._compute()
        return self._found.get(version)

    def _compute(self) -> None:
        for version, params in self._waiting.items():
            self._found[version] = trees.digest(params)
        self._waiting.clear()


class _Recorded:
    """The versions of the recorded center, computed as far as they are needed.

    Args:
      run: the recorded center, see `Tape.run`.
      numbers: the numbers of its versions so far.

    Attributes:
      first: the state of its first version.
    """

    def __init__(
        self, run: Iterator[tuple[Event | None, Store]], numbers: Measurements
    ) -> None:
        self._run, self._numbers = run, numbers
        self._digests: _Digests | None = _Digests()  # None when no more are needed
        _, store = next(run)  # that of a snapshot
        self.first = store.save()
        self._add(store, 0.0)

    def digest(self, version: int) -> str | None:
        """Return the digest of a version; None if there is no such version."""
        assert self._digests is not None
        while self._newest < version and self._advance():
            pass
        return self._digests.find(version)

    def finish(self) -> list[Measured]:
        """Compute all versions, and return their numbers."""
        self._digests = None
        while self._advance():
            pass
        return self._numbers.finished()

    def _advance(self) -> bool:
        """Go on by an event; return False at the end."""
        event, store = next(self._run, (None, None))
        if event is None or store is None:
            return False
        if event.applied:
            self._add(store, event.time)
        return True

    def _add(self, store: Store, time: float) -> None:
        self._newest = store.current.number
        if self._digests is not None:
            self._digests.add(self._newest, store.current_params())
        self._numbers.add(self._newest, time, store.current_params)


class _Sent(NamedTuple):
    """A recorded message, on its way through the other center."""

    message: Message
    adopted: int  # version that the worker adopted afterwards
    contribution: PyTree


_Action = tuple[float, tuple[int, int, int], str, Event, int]


class _Run:
    """The other center, and the actions of workers that wait for their time.

    Attributes:
      store: the other center's store.
      parted: see `WhatIf`.
    """

    def __init__(
        self,
        tape: Tape,
        recorded_rule: Rule,
        rule: Rule,
        mode: Mode | None,
        limits: Limits | None,
        recorded: _Recorded,
        events: list[Event],
    ) -> None:
        self.parted: Parted | None = None
        self._rule, self._recorded_rule, self._recorded = rule, recorded_rule, recorded
        first = recorded.first
        begin = int(first.version)
        if difference(tape.fingerprint, rule) is None:
            self.store = Store.restore(rule, first)
        else:  # another center optimizer begins with a state of its own
            self.store = Store(rule, first.params, version=begin)
        limits = dataclasses.replace(limits or Limits(), max_workers=None)
        self._ledger = Ledger(mode or Asynchronous(), limits=limits, barrier=0)
        self._ledger.version = begin
        self._ledger.rejections.max_norm = self.store.max_norm
        self._digests = _Digests()  # of the other center
        self._digests.add(begin, self.store.current_params())
        # Versions that a worker adopted and would have adopted, not yet compared.
        self._adoptions: list[tuple[Parted, bool]] = []
        self._reached = {begin: begin}  # version by recorded version, at the same time
        self._adopted: dict[str, dict[int, int]] = {}  # the same, of workers' answers
        self._sent: dict[str, _Sent] = {}  # messages that wait at the center
        self._counts: dict[str, dict[str, int]] = {}
        # Actions of each worker in their order; "" has the recorded versions.
        self._actions: dict[str, deque[_Action]] = {}
        # The next action of each worker whose last message was answered.
        self._next: list[tuple[float, tuple[int, int, int], str]] = []
        for event in events:
            self._add(event)
        for worker in self._actions:
            self._schedule(worker, -math.inf)

    def versions(self, progress: Callable[[int], None] | None) -> Iterator[float]:
        """Run to the end of the tape; yield the time of each new version."""
        ledger = self._ledger
        while self._next or self._deadline() < math.inf:
            now = self._deadline()
            if self._next and self._next[0][0] <= now:
                now, _, worker = heapq.heappop(self._next)
                event = self._act(worker, now)
                if progress is not None:
                    progress(event.number)
            while (batch := ledger.due(now)) is not None:
                before = self.store.current.number
                self._settle(batch, now)
                if self.store.current.number > before:
                    yield now
        self._compare_all()

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the fields of each worker's `Share`."""
        for worker, actions in self._actions.items():
            left = sum(action[2] == "send" for action in actions)
            if worker and (waiting := left + (worker in self._sent)):
                self._counts.setdefault(worker, {})["waiting"] = waiting
        return self._counts

    def _deadline(self) -> float:
        return self._ledger.mode.deadline(self._ledger)

    def _add(self, event: Event) -> None:
        """Add the actions of a recorded event."""
        for i, message in enumerate(event.messages):
            action = message.arrived, (event.number, 0, i), "send", event, i
            self._actions.setdefault(message.worker, deque()).append(action)
        if event.applied:
            action = event.time, (event.number, 1, 0), "reached", event, 0
            self._actions.setdefault("", deque()).append(action)
        elif event.kind in ("join", "leave", "expired"):
            for i, worker in enumerate(event.workers):
                action = event.time, (event.number, 0, i), event.kind, event, i
                self._actions.setdefault(worker, deque()).append(action)

    def _schedule(self, worker: str, now: float) -> None:
        if actions := self._actions[worker]:
            time, order, *_ = actions[0]
            heapq.heappush(self._next, (max(time, now), order, worker))

    def _act(self, worker: str, now: float) -> Event:
        """Do the next action of a worker."""
        _, _, kind, event, index = self._actions[worker].popleft()
        if kind == "reached":
            self._reached[event.version] = self._ledger.version
        elif kind == "send":
            self._send(event, index, now)
            return event  # the next action follows the answer
        elif kind == "join":
            self._join(worker, event, now)
        else:
            self._ledger.leave(worker, self._session_id(worker))
        self._schedule(worker, now)
        return event

    def _join(self, worker: str, event: Event, now: float) -> None:
        self._ledger.join(worker, event.session_ids[worker], now, replace=True)

    def _session_id(self, worker: str) -> str:
        member = self._ledger.registered().get(worker)
        return "" if member is None else member.session_id

    def _send(self, event: Event, index: int, now: float) -> None:
        message = event.messages[index]
        worker, ledger = message.worker, self._ledger
        if worker not in ledger.registered():  # it joined before the tape begins
            self._join(worker, event, now)
        member = ledger.registered()[worker]
        recorded = message.anchor_version
        anchor = self._adopted.get(worker, self._reached).get(recorded)
        if anchor is None:
            anchor = min(self._reached.get(recorded, recorded), ledger.version)
        self._compare(now, worker, recorded, anchor)
        contribution = event.contribution(index, self.store)
        norm = None
        if ledger.rejections.limits.measures:
            norm = message.norm  # of a contribution that does not depend on the center
            if norm is None or self._rule.message is not None:
                center = self.store.current.params
                norm = float(self.store.measure(contribution, center, samples=False)[0])
        adopted = event.version
        if self._recorded_rule.adopts == "before" and message.outcome == "applied":
            adopted -= 1
        self._sent[worker] = _Sent(message, adopted, contribution)
        submission = Submission(
            member.sequence + 1, None, anchor, message.steps, message.weight
        )
        ledger.submit(worker, member.session_id, submission, now, norm)

    def _settle(self, batch: Batch, now: float) -> None:
        """Apply, drop or reject messages, and let their workers go on."""
        store, indices = self.store, batch.indices_to_apply
        sent = [self._sent.pop(entry.worker) for entry in batch.entries]
        before = store.current.number
        if indices:
            submissions = [
                batch.entries[i].submission._replace(contribution=sent[i].contribution)
                for i in indices
            ]
            staleness = [batch.staleness[i] for i in indices]
            weights = batch.weights and [batch.weights[i] for i in indices]
            its_indices = [batch.indices[i] for i in indices]
            store.apply(submissions, staleness, weights, batch.workers, its_indices)
            if self.parted is None:
                self._digests.add(store.current.number, store.current_params())
        self._ledger.settle(batch, now)
        for i, entry in enumerate(batch.entries):
            worker, (message, recorded, _) = entry.worker, sent[i]
            applied = i in indices
            is_before = self._rule.adopts == "before" and applied
            version = before if is_before else store.current.number
            self._adopted.setdefault(worker, {})[recorded] = version
            same = applied == (message.outcome == "applied")
            self._compare(now, worker, recorded, version, same=same)
            rejected = entry.worker in batch.rejected
            kind = "applied" if applied else "rejected" if rejected else "dropped"
            counts = self._counts.setdefault(worker, {})
            counts[kind] = counts.get(kind, 0) + 1
            self._schedule(worker, now)

    def _compare(
        self, now: float, worker: str, recorded: int, version: int, *, same: bool = True
    ) -> None:
        """Note a version that a worker adopted, and that it would have adopted."""
        if self.parted is None:
            self._adoptions.append((Parted(now, worker, recorded, version), same))
            if len(self._adoptions) >= _BLOCK:
                self._compare_all()

    def _compare_all(self) -> None:
        """Find the first worker that would have adopted something else."""
        for adoption, same in self._adoptions:
            recorded = self._recorded.digest(adoption.recorded_version)
            if not same or recorded != self._digests.find(adoption.version):
                self.parted = adoption
                break
        self._adoptions.clear()
