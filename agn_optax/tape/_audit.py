"""A check of a tape, and the share of each worker in what happened."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import trees
from agn_optax.rules import Rule
from agn_optax.tape._events import Event, FailedJoin
from agn_optax.tape._tape import Checked, Tape

PyTree = Any


class WorkerAudit(NamedTuple):
    """The exchanges of a worker on a tape."""

    worker: str
    sessions: int
    exchanges: int  # applied messages
    dropped: int
    rejected: int
    steps: int  # local steps of the applied messages
    weight: float  # claimed weight of the applied messages
    norm: float | None  # median norm of its messages; None if not measured
    moved: float | None  # sum of the norms of its moves of the center, see `audit`
    staleness: float | None  # median of its messages; None if it sent none
    max_staleness: int | None
    interval: float | None  # median time between its messages, s; None below two
    max_interval: float | None  # s
    reasons: tuple[str, ...]  # of its rejected messages, each once


class Audit(NamedTuple):
    """The result of `audit`."""

    checked: Checked
    version: int  # newest version
    seconds: float  # time of the last event, s
    kinds: dict[str, int]  # number of events by kind
    workers: list[WorkerAudit]
    failed_joins: list[FailedJoin]
    more_failed_joins: int  # number of those that are only counted


def audit(
    tape: Tape,
    rule: Rule | None = None,
    *,
    params: PyTree = None,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Check a tape, and return what each worker did.

    Args:
      tape: the tape.
      rule: the center's rule, with which the center is computed from its first
        snapshot, compared with all later ones, and how far each message moved it is
        measured: the norm of the change. Messages of a round share it equally. None
        leaves that out.
      params: parameters with the containers to use, see `Tape.replay`.
      progress: called with the number of each record, again for each way through them.

    Raises:
      DurabilityError: the tape is damaged, or with a rule: a snapshot is not what the
        records lead to.
      RuleMismatchError: the center has another rule.
    """
    checked = tape.check(progress)
    events = list(tape.events(progress=progress))
    moves = {} if rule is None else _moves(tape, rule, params, progress)
    kinds: dict[str, int] = {}
    by_worker: dict[str, list[Event]] = {}
    for event in events:
        kinds[event.kind] = kinds.get(event.kind, 0) + 1
        for name in event.workers:
            by_worker.setdefault(name, []).append(event)
    return Audit(
        checked,
        events[-1].version if events else tape.snapshots[-1].version,
        events[-1].time if events else 0.0,
        kinds,
        [_of_worker(name, its, moves) for name, its in sorted(by_worker.items())],
        [failed for event in events if (failed := event.failed_join)],
        sum(event.more_failed_joins for event in events),
    )


@jax.jit
def _distance(before: PyTree, after: PyTree) -> jax.Array:
    wide = [trees.wider(jnp.float32, leaf.dtype) for leaf in jax.tree.leaves(before)]
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), wide, strict=True)
    return optax.tree.norm([b.astype(w) - a.astype(w) for a, b, w in pairs])


def _moves(
    tape: Tape, rule: Rule, params: PyTree, progress: Callable[[int], None] | None
) -> dict[int, float]:
    """Return how far each record with applied messages moved the center."""
    moves: dict[int, jax.Array] = {}  # read at the end: nothing waits for the device
    before: PyTree = None
    for event, store in tape.run(rule, None, params, progress):
        if event is None:
            before = store.current_params()
        elif event.applied:
            after = store.current_params()
            moves[event.number] = _distance(before, after)
            before = after
    return {number: float(moved) for number, moved in moves.items()}


def _of_worker(name: str, events: list[Event], moves: dict[int, float]) -> WorkerAudit:
    mine = [
        (event, message)
        for event in events
        for message in event.messages
        if message.worker == name
    ]
    messages = [message for _, message in mine]
    applied = [each for each in messages if each.outcome == "applied"]
    outcomes = [each.outcome for each in messages]
    arrived = [each.arrived for each in messages]
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(arrived))]
    norms = [each.norm for each in messages if each.norm is not None]
    stale = [each.staleness for each in messages]
    parts = [
        moves[event.number] / len(event.applied)
        for event, message in mine
        if message.outcome == "applied" and event.number in moves
    ]
    sessions = {event.session_ids[name] for event in events}
    return WorkerAudit(
        name,
        len(sessions),
        len(applied),
        outcomes.count("dropped"),
        outcomes.count("rejected"),
        sum(each.steps for each in applied),
        sum(each.weight or 0.0 for each in applied),
        statistics.median(norms) if norms else None,
        sum(parts) if moves else None,
        statistics.median(stale) if stale else None,
        max(stale, default=None),
        statistics.median(gaps) if gaps else None,
        max(gaps, default=None),
        tuple(dict.fromkeys(each.reason for each in messages if each.reason)),
    )
