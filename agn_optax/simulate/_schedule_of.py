"""The schedule of a recorded run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center import Limits
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule, check_rule
from agn_optax.simulate._cluster import nanoseconds
from agn_optax.simulate._events import SESSION_COLUMNS, Outcome, SessionEvent
from agn_optax.simulate._schedule import Schedule, digest_of
from agn_optax.simulate._tape_events import Change, Sent, by_number, events_of
from agn_optax.tape import Tape

PyTree = Any

_OUTCOMES = {
    "applied": Outcome.APPLIED,
    "dropped": Outcome.DROPPED,
    "rejected": Outcome.REJECTED,
}


def schedule_of(
    tape: Tape,
    rule: Rule,
    *,
    workers: Sequence[str] | None = None,
    limits: Limits | None = None,
    params: PyTree = None,
    progress: Callable[[int], None] | None = None,
) -> Schedule:
    """Return the recorded order of a run as a schedule, for `execute`.

    With ``exact=True``, `execute` then computes the recorded run again: each message
    and each version of the center has the bits of the tape, if inner optimizer, loss,
    data and first parameters (``tape.replay(rule, 0).params``) are those of the
    workers, and batches depend on worker and step alone. Give it ``durability=``, and
    ``agn-optax diff`` compares both.

    Args:
      tape: the tape, from version 0 on; contributions are not needed.
      rule: the center's rule.
      workers: names of the workers, in the order of their numbers for ``data``; None
        for the order of their names, in which numbers are compared as numbers.
      limits: limits of the center. They must be given if it rejected messages, or has
        another lease than the default.
      params: parameters with the containers to use, see `Tape.replay`.
      progress: called with the number of each record.

    Returns:
      The schedule. Transfers take no time: a message was sent when it arrived, and its
      answer was adopted when it was settled, or after the local steps that were made
      before.

    Raises:
      InvalidArgumentError: the tape does not have the whole run, or something that
        `execute` would need.
      RuleMismatchError: the center has another rule.
      DurabilityError: the tape is damaged.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax, agn_optax
      >>> from agn_optax import simulate
      >>> rule, inner = agn_optax.rules.downpour(), optax.sgd(0.1)
      >>> def loss(params, batch):
      ...     return jnp.mean((params - batch) ** 2)
      >>> def data(worker, step):
      ...     return jnp.full(2, worker + step, jnp.float32)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     durability = agn_optax.center.Journal(folder, keep="hashes")
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=durability)
      ...     worker = agn_optax.Worker(center, inner, period=2, name="worker-0")
      ...     params, state = worker.start()
      ...     step = jax.jit(worker.tx.update)
      ...     for i in range(6):
      ...         grads = jax.grad(loss)(params, data(0, i))
      ...         updates, state = step(grads, state, params)
      ...         params = optax.apply_updates(params, updates)
      ...         params, state = worker.exchange(params, state)
      ...     center.close()
      ...     planned = simulate.schedule_of(agn_optax.tape.read(folder), rule)
      >>> again = simulate.execute(planned, inner, loss, data, jnp.ones(2), exact=True)
      >>> len(planned), bool(jnp.all(again.center.params == params))
      (3, True)
    """
    check.instance(tape, Tape, "tape must be the result of agn_optax.tape.read(...)")
    check_rule(rule)
    _check_whole(tape)
    center = tape.replay(rule, tape.snapshots[0].version, params=params).params
    sizes = rounds.exchange_bytes(rule, jax.eval_shape(lambda: center))
    has_limits, limits = limits is not None, limits or Limits(max_workers=None)
    found = [*events_of(tape, limits.lease, progress)]
    sent = [each for each in found if isinstance(each, Sent)]
    _check_sent(tape, sent, rule, has_limits=has_limits)
    _check_registered(tape, found)
    names = _names(sent, found, workers)
    index = {name: i for i, name in enumerate(names)}
    rows = _columns(sent, index, rule)
    changes = [each for each in found if isinstance(each, Change)]
    sessions = _session_columns(changes, index, limits.lease)
    duration = max(each.event.time for each in sent)
    duration = max([duration, *(change.at for change in changes)])
    return Schedule(
        names=names,
        seed=0,
        digest=digest_of((0, names, sizes, duration), rows, sessions),
        duration=duration,
        events=len(found),
        combines=sent[0].message.factor is not None,
        rule=rule,
        limits=limits,
        message_bytes=sizes[:1],
        answer_bytes=sizes[1:],
        sessions=sessions,
        present=_presence(changes, index, duration),
        busy=np.bincount(
            rows["worker"], rows["arrived"] - rows["began"], minlength=len(names)
        ).astype(np.int64),
        claimed_weight=_claimed(sent, rows["order"]),
        **rows,
    )


def _check_whole(tape: Tape) -> None:
    """Raise if the tape does not begin with version 0."""
    version = tape.snapshots[0].version
    if tape.snapshots[0].number:  # earlier ones were not kept
        event = next(tape.events(tape.begin))
        version = event.version - bool(event.applied)
    if tape.begin or version:
        raise errors.InvalidArgumentError(
            f"a schedule needs a whole run, from version 0 on; {tape.path} begins with "
            f"version {version}, after {tape.begin} records"
        )


def _check_sent(
    tape: Tape, sent: Sequence[Sent], rule: Rule, *, has_limits: bool
) -> None:
    """Raise if the messages cannot be made again."""
    before: dict[tuple[str, int], Sent] = {}  # by worker and session
    overlaps = {(s.message.worker, s.session) for s in sent if s.message.late_steps}
    for each in sent:
        message, key = each.message, (each.message.worker, each.session)
        who = f"{tape.path}: message {message.sequence} of worker {message.worker!r}"
        last = before.get(key)
        expected = 1 if last is None else last.message.sequence + 1
        before[key] = each
        if message.sequence != expected:
            raise errors.InvalidArgumentError(
                f"{who} follows message {expected - 1} of its session, so that a "
                "message is not on the tape"
            )
        if not message.steps:
            raise errors.InvalidArgumentError(
                f"{who} does not say how many local steps it has"
            )
        if message.outcome == "rejected" and not has_limits:
            raise errors.InvalidArgumentError(
                f"{who} was rejected ({message.reason}): give limits=, those of the "
                "recorded center, which a tape does not have"
            )
        if last is None and message.anchor_version < each.joined_version:
            raise errors.InvalidArgumentError(
                f"{who} was made from version {message.anchor_version}, and its worker "
                f"joined at version {each.joined_version}: it went on from a saved "
                "state, which a tape does not have"
            )
        if last is not None and last.message.outcome == "rejected" and key in overlaps:
            raise errors.InvalidArgumentError(
                f"{who} follows one that was rejected while local steps went on: these "
                "were discarded, and a tape does not tell how many there were"
            )
        if last is not None and message.anchor_version != _adopted(last, rule):
            raise errors.InvalidArgumentError(
                f"{who} was made from version {message.anchor_version}, and the answer "
                f"to the message before had version {_adopted(last, rule)}: its worker "
                "lost that answer and got a later one, which execute cannot repeat"
            )
    if not before:
        raise errors.InvalidArgumentError(f"{tape.path} has no messages")


def _check_registered(tape: Tape, found: Sequence[Sent | Change]) -> None:
    """Raise if joins and leaves do not explain the numbers of registered workers."""
    registered: set[str] = set()
    for each in found:
        if isinstance(each, Change):
            is_joined = each.event is SessionEvent.JOINED
            change = registered.add if is_joined else registered.discard
            change(each.worker)
        elif len(registered) != each.event.registered:
            raise errors.InvalidArgumentError(
                f"{tape.path}: at record {each.event.number} there were "
                f"{each.event.registered} registered workers, and the joins and leaves "
                f"before it give {len(registered)}; its center has restarted without "
                "them"
            )


def _names(
    sent: Sequence[Sent], found: Sequence[Sent | Change], workers: Sequence[str] | None
) -> tuple[str, ...]:
    """Return the names of the workers, in the order of their numbers."""
    known = {each.message.worker for each in sent}
    known |= {each.worker for each in found if isinstance(each, Change)}
    if workers is None:
        return tuple(sorted(known, key=by_number))
    missing = known.difference(workers)
    if isinstance(workers, str) or missing or len(set(workers)) < len(workers):
        raise errors.InvalidArgumentError(
            f"workers must have each of the names {sorted(known, key=by_number)} once, "
            f"got {workers!r}"
        )
    return tuple(workers)


def _adopted(each: Sent, rule: Rule) -> int:
    """Return the version that a worker adopts with the answer to its message."""
    is_before = rule.adopts == "before" and each.message.outcome == "applied"
    return each.event.version - is_before


def _columns(
    sent: Sequence[Sent], index: dict[str, int], rule: Rule
) -> dict[str, np.ndarray]:
    """Return the arrays of a schedule, with its messages in order of arrival."""
    rows: list[dict[str, int]] = []
    at = {(s.message.worker, s.session, s.message.sequence): s for s in sent}
    for order, each in enumerate(sent):
        message, event = each.message, each.event
        began, arrived = nanoseconds(each.began), nanoseconds(message.arrived)
        settled = nanoseconds(event.time)
        is_applied = message.outcome == "applied"
        following = at.get((message.worker, each.session, message.sequence + 1))
        steps_since = 0 if following is None else following.message.late_steps
        rows.append(
            {
                "worker": index[message.worker],
                "fragment": 0,
                "session": each.session,
                "sequence": message.sequence,
                "steps": message.steps,
                "step_time": (arrived - began) // message.steps,
                "began": began,
                "sent": arrived,
                "anchor_version": message.anchor_version,
                "arrived": arrived,
                "settled": settled,
                "received": settled,
                "adopted": settled,
                "version": event.version if is_applied else -1,
                "answer_version": _adopted(each, rule),
                "staleness": message.staleness,
                "outcome": _OUTCOMES[message.outcome],
                "order": order,
                "workers": event.registered,
                "steps_since": steps_since,
                "in_background": int(steps_since > 0),
                "index": message.worker_index,
            }
        )
    rows.sort(key=lambda row: row["arrived"])
    columns = {name: np.array([r[name] for r in rows], np.int64) for name in rows[0]}
    factors = [1.0 if s.message.factor is None else s.message.factor for s in sent]
    return {**columns, "weight": np.array(factors)[columns["order"]]}


def _claimed(sent: Sequence[Sent], order: np.ndarray) -> np.ndarray | None:
    """Return the weights that workers claim, NaN for none; None if no worker does."""
    claimed = np.array([each.message.weight for each in sent], np.float64)[order]
    return None if np.all(np.isnan(claimed)) else claimed


def _session_columns(
    changes: Sequence[Change], index: dict[str, int], lease: float
) -> dict[str, np.ndarray]:
    """Return the begins and ends of sessions as arrays."""
    rows: list[tuple[int, int, int, int]] = []
    joined: dict[str, int] = {}  # ns
    for change in changes:
        at, about = nanoseconds(change.at), (index[change.worker], change.session)
        if change.event is SessionEvent.FAILED:
            # Its lease ends at the very nanosecond of the tape.
            at = nanoseconds(change.at + lease) - nanoseconds(lease) - 1
            if at < joined[change.worker]:
                raise errors.InvalidArgumentError(
                    f"worker {change.worker!r} was given up less than {lease:g} s "
                    "after it joined: give limits= with the recorded center's lease"
                )
        rows.append((at, *about, change.event))
        if change.event is SessionEvent.JOINED:
            joined[change.worker] = at
            rows.append((at, *about, SessionEvent.STARTED))
    return dict(zip(SESSION_COLUMNS, np.array(rows, np.int64).T, strict=True))


def _presence(
    changes: Sequence[Change], index: dict[str, int], duration: float
) -> np.ndarray:
    """Return the nanoseconds of each worker in sessions."""
    present, joined = np.zeros(len(index), np.int64), dict[str, float]()
    for change in changes:
        if change.event is SessionEvent.JOINED:
            joined[change.worker] = change.at
        else:
            since = joined.pop(change.worker)
            present[index[change.worker]] += nanoseconds(max(change.at - since, 0.0))
    for name, since in joined.items():
        present[index[name]] += nanoseconds(duration - since)
    return present
