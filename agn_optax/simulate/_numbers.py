"""The numbers of a schedule: its exchanges, made in the programs of real workers.

Messages are computed when the center needs them, in the center's order. A message is
determined by the version that its worker adopted before, and by the worker's local
steps, so that the schedule says all that is needed:

    its anchor's version -> start, adopt or receive -> local steps -> contribute or send
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.center import CenterState, Store, Submission, Version
from agn_optax.rules import Rule, check_rule
from agn_optax.simulate._cluster import Cluster
from agn_optax.simulate._events import Outcome
from agn_optax.simulate._schedule import Schedule, schedule
from agn_optax.worker import programs

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """The result of a simulated run.

    Attributes:
      schedule: who exchanged when.
      center: the state of the center at the end.
      losses: mean loss of the local steps of each message; NaN if the center did not
        need the message.
      evaluated: rows of seconds, version and result of ``evaluate``.
    """

    schedule: Schedule
    center: CenterState
    losses: np.ndarray
    evaluated: np.ndarray


def run(
    rule: Rule,
    inner: optax.GradientTransformation,
    loss: Callable[[PyTree, Any], Any],
    data: Callable[[int, int], Any],
    params: PyTree,
    *,
    cluster: Cluster,
    seed: int = 0,
    evaluate: Callable[[PyTree], Any] | None = None,
    every: int = 100,
    progress: Callable[[float], object] | None = None,
    **arguments: Any,
) -> Trained:
    """Train on a virtual clock: `schedule`, with the numbers of its messages.

    All steps and exchanges are computed in the programs of a real `Worker` and of a
    real center, worker by worker, so that they give the bits that real workers give
    which exchange in this order.

    Args:
      rule: the rule.
      inner: the inner optimizer of the workers.
      loss: the loss of parameters and a batch, a scalar.
      data: the batch of a worker, by its index, for its local step 0, 1, 2, ... The
        steps that a worker loses when it fails are not counted.
      params: the first parameters of the center.
      cluster: see `schedule`.
      seed: see `schedule`.
      evaluate: function of the center's parameters that returns a number.
      every: number of versions after which it is called.
      progress: function that is called from time to time with the fraction done.
      **arguments: other arguments of `schedule`, but ``fragments``.

    Returns:
      The trained center, and the losses.

    Raises:
      InvalidArgumentError: an argument is out of range.
      SimulationError: see `schedule`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from agn_optax import rules, simulate
      >>> cluster = simulate.Cluster(workers=4, speed=simulate.LogNormal(0.1, 0.3))
      >>> trained = simulate.run(
      ...     rules.dynsgd(),
      ...     optax.sgd(0.1),
      ...     lambda x, batch: jnp.sum((x - batch) ** 2),
      ...     lambda worker, step: jnp.ones(2),
      ...     jnp.zeros(2),
      ...     cluster=cluster,
      ...     period=5,
      ...     seconds=10.0,
      ... )
      >>> print(trained.center.params.round(2))
      [1. 1.]
    """
    check_rule(rule)
    check.float_leaves(params, "params")
    check.positive_int(every, "every")
    if arguments.get("fragments") is not None:
        raise errors.InvalidArgumentError(
            "run takes no fragments: `schedule` simulates them without numbers"
        )
    made = schedule(
        cluster, rule=rule, params=params, seed=seed, progress=progress, **arguments
    )
    execution = _Execution(made, rule, inner, loss, data, params)
    evaluated = execution.run(evaluate, every, progress or (lambda done: None))
    losses = np.full(len(made), np.nan, np.float32)
    rows = [*execution.losses]
    losses[rows] = jax.device_get([execution.losses[row] for row in rows])
    center = execution.store.save()
    return Trained(made, center, losses, np.array(evaluated, float).reshape(-1, 3))


class _Sent(NamedTuple):
    """A message as its worker has made it."""

    row: int
    contribution: PyTree
    codec_state: PyTree  # if the worker waits for the answer
    sent: Any  # if local steps go on meanwhile; see `rounds.Sent`


class _State(NamedTuple):
    """A worker after its last message."""

    params: PyTree
    state: Any
    anchor: PyTree
    message: _Sent
    was_rejected: bool  # whether the message before was


class _Execution:
    """The messages of a schedule, computed in the order of the center."""

    def __init__(
        self,
        made: Schedule,
        rule: Rule,
        inner: optax.GradientTransformation,
        loss: Callable[[PyTree, Any], Any],
        data: Callable[[int, int], Any],
        params: PyTree,
    ) -> None:
        self._schedule, self._data, self._like = made, data, params
        self._programs = programs(rule, inner)
        self.store = Store(rule, params, None, None)
        self.losses: dict[int, jax.Array] = {}  # by row
        self._workers: dict[int, _State] = {}
        self._steps = Counter[int]()  # local steps of each worker
        # Messages that are still to be computed from each version.
        self._uses = Counter(made.anchor_version[made.order >= 0].tolist())
        self._versions: dict[int, Version] = {}
        self._contributions: dict[int, PyTree] = {}  # of messages not applied yet
        self._keep_version()
        tx = self._programs.tx

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: PyTree, state: Any, batch: Any) -> tuple[PyTree, Any, Any]:
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self._step = step

    def run(
        self,
        evaluate: Callable[[PyTree], Any] | None,
        every: int,
        progress: Callable[[float], object],
    ) -> list[tuple[float, int, float]]:
        """Apply all messages; return the results of ``evaluate``."""
        made, evaluated = self._schedule, []
        (settled,) = np.nonzero(made.order >= 0)
        settled = settled[np.argsort(made.order[settled])]
        batches = itertools.groupby(settled.tolist(), self._batch_of)
        for count, (_, rows) in enumerate(batches):
            batch = [*rows]
            for row in batch:
                self._compute(row)
            applied = [r for r in batch if made.outcome[r] == Outcome.APPLIED]
            if applied:
                self._apply(applied)
            version = self.store.current
            if evaluate is not None and applied and version.number % every == 0:
                seconds = made.settled[batch[0]] / 1e9
                result = float(evaluate(self.store.tree(version)))
                evaluated.append((seconds, version.number, result))
            if not count % 1000:
                progress(int(made.order[batch[-1]]) / len(settled))
        return evaluated

    def _batch_of(self, row: int) -> tuple[bool, int]:
        """Return a key that messages have in common which are applied together."""
        version = int(self._schedule.version[row])
        return (True, version) if version >= 0 else (False, row)

    def _apply(self, rows: list[int]) -> None:
        made = self._schedule
        submissions = [
            Submission(
                int(made.sequence[row]),
                self._contributions.pop(row),
                int(made.anchor_version[row]),
                int(made.steps[row]),
            )
            for row in rows
        ]
        weights = made.weight[rows].tolist() if made.combines else None
        staleness = made.staleness[rows].tolist()
        workers = int(made.workers[rows[0]])
        self.store.apply(submissions, staleness, weights, workers)
        self._keep_version()

    def _keep_version(self) -> None:
        """Keep the current version if messages are still to be computed from it."""
        version = self.store.current
        if self._uses[version.number]:
            version.readers += 1
            self._versions[version.number] = version

    def _adopted(self, number: int) -> PyTree:
        """Return a version for a message that is computed now."""
        version = self._versions[number]
        params = self.store.answer(version)
        self._uses[number] -= 1
        if not self._uses[number]:
            # Workers may hold the arrays as anchors: they are never reused.
            version.escaped = True
            version.readers -= 1
            del self._versions[number]
        return params

    def _compute(self, row: int) -> None:
        """Compute the message of a row, from the worker's last one."""
        made, of = self._schedule, self._programs
        worker, count = int(made.worker[row]), int(made.steps[row])
        center = self._adopted(int(made.anchor_version[row]))
        values: list[Any] = []
        last = self._workers.pop(worker, None)
        was_rejected = False
        if last is None or made.session[last.message.row] != made.session[row]:
            loop = of.start(center, self._like)
        else:
            since = int(made.steps_since[last.message.row])
            loop = self._make_steps(worker, since, last.params, last.state, values)
            was_rejected = made.outcome[last.message.row] == Outcome.REJECTED
            loop = self._adopt(last, loop, center)
            count -= 0 if was_rejected else since
        anchor = center if of.holds_anchor else None
        params, state = loop
        params, state = self._make_steps(worker, count, params, state, values)
        if made.in_background[row]:
            contribution, *_ = of.contribute(state, params, anchor)
            spare = trees.copy((contribution, params if of.keeps_sent else None))
            contribution, sent, state, _ = of.send(spare, params, state, anchor)
            message = _Sent(row, contribution, None, sent)
        else:
            contribution, codec_state, _ = of.contribute(state, params, anchor)
            message = _Sent(row, contribution, codec_state, None)
        self.losses[row] = jnp.stack(values).mean()
        if made.outcome[row] == Outcome.APPLIED:
            self._contributions[row] = self.store.check_and_place(contribution)
        self._workers[worker] = _State(params, state, anchor, message, was_rejected)

    def _make_steps(
        self, worker: int, count: int, params: PyTree, state: Any, values: list[Any]
    ) -> tuple[PyTree, Any]:
        for _ in range(count):
            batch = self._data(worker, self._steps[worker])
            params, state, value = self._step(params, state, batch)
            self._steps[worker] += 1
            values.append(value)
        return params, state

    def _adopt(
        self, last: _State, loop: tuple[PyTree, Any], center: PyTree
    ) -> tuple[PyTree, Any]:
        """Adopt the answer to a worker's last message, as `FragmentWorker` does."""
        of, message = self._programs, last.message
        params, state = loop
        if message.sent is None:
            state = state._replace(codec_state=message.codec_state)
        outcome = self._schedule.outcome[message.row]
        if outcome == Outcome.REJECTED:
            residual = "discarded" if last.was_rejected else "restored"
            return of.reset(
                params, state, message.contribution, center, residual=residual
            )
        if outcome == Outcome.DROPPED and of.restore_residual is not None:
            state = of.restore_residual(state, message.contribution)
        if message.sent is None:
            loop = of.adopt(params, state, center)
        else:
            loop = of.receive(
                *(params, state, message.contribution, message.sent),
                *(last.anchor, center),
            )
        return loop
