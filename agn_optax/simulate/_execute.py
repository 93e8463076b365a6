"""The numbers of a schedule: its messages computed, and applied to a center in order.

The schedule says what every message is made of: the version that its worker has adopted
before, its local steps, and how it counts. So a message is made only when the center
needs it, and together with all others that could be made then.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.center import (
    MessageLimits,
    Rejections,
    Store,
    Submission,
    Version,
)
from agn_optax.round import steps
from agn_optax.simulate._cluster import Cluster
from agn_optax.simulate._events import Outcome
from agn_optax.simulate._rounds import (
    Batches,
    Begin,
    Kind,
    Made,
    OneByOne,
    Plan,
    Rounds,
)
from agn_optax.simulate._schedule import Schedule, schedule
from agn_optax.simulate._traces import Traces

PyTree = Any
_PROGRESS = 256  # messages between two reports of progress


def run(
    rule: Any,
    inner: optax.GradientTransformation,
    loss: Callable[[PyTree, PyTree], jax.Array],
    data: Callable[[Any, Any], PyTree],
    params: PyTree,
    *,
    cluster: Cluster,
    period: Any,
    seed: int = 0,
    exact: bool = False,
    evaluate: Callable[[PyTree], Any] | None = None,
    every: int = 100,
    target: float | None = None,
    progress: Callable[[float], object] | None = None,
    **settings: Any,
) -> Traces:
    """Simulate an asynchronous run: `schedule`, then `execute`.

    Args:
      rule: the rule.
      inner: the inner optimizer of the workers.
      loss: parameters and a batch -> the loss, a scalar.
      data: number of a worker and number of its local step -> the batch; see `execute`.
      params: the first parameters of the center.
      cluster: the workers, their links and the center's host.
      period: the period of a `Worker`.
      seed: seed of the schedule; the seed of the data is a matter of ``data``.
      exact: see `execute`.
      evaluate: see `execute`.
      every: see `execute`.
      target: see `execute`.
      progress: function that is called from time to time with the fraction done, first
        of the schedule, then of its execution.
      **settings: the other arguments of `schedule`.

    Returns:
      The traces.

    Raises:
      InvalidArgumentError, SimulationError: see `schedule` and `execute`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> from agn_optax import simulate
      >>> def loss(params, batch):
      ...     return jnp.mean((params - batch) ** 2)
      >>> def data(worker, step):
      ...     key = jax.random.fold_in(jax.random.key(worker), step)
      ...     return 1.0 + 0.1 * jax.random.normal(key, (8,))
      >>> found = simulate.run(
      ...     agn_optax.rules.agn(optax.sgd(0.5)),
      ...     optax.sgd(0.1),
      ...     loss,
      ...     data,
      ...     jnp.zeros(8),
      ...     cluster=simulate.Cluster(workers=4, speed=simulate.LogNormal(0.1, 0.3)),
      ...     period=5,
      ...     exchanges=100,
      ... )
      >>> len(found), bool(found.loss[-10:].mean() < found.loss[:10].mean())
      (100, True)
    """
    planned = schedule(
        cluster,
        period=period,
        rule=rule,
        params=params,
        seed=seed,
        progress=progress,
        **settings,
    )
    return execute(
        planned,
        inner,
        loss,
        data,
        params,
        exact=exact,
        evaluate=evaluate,
        every=every,
        target=target,
        progress=progress,
    )


def execute(
    planned: Schedule,
    inner: optax.GradientTransformation,
    loss: Callable[[PyTree, PyTree], jax.Array],
    data: Callable[[Any, Any], PyTree],
    params: PyTree,
    *,
    exact: bool = False,
    evaluate: Callable[[PyTree], Any] | None = None,
    every: int = 100,
    target: float | None = None,
    width: int | None = None,
    progress: Callable[[float], object] | None = None,
) -> Traces:
    """Execute a schedule: make its messages, and apply them to a center in its order.

    The center is the store of a real center, which moves message by message. All
    messages that can be made when the center needs one are made together, by one
    program for a fixed number of workers; with ``exact``, one after another.

    A schedule does not know the numbers. If a message would be rejected for its norm,
    as by default one that is not finite, the execution ends with an error: what follows
    a rejection is not simulated. With a ``target`` the execution ends at a loss.

    Args:
      planned: the schedule, made with a ``rule`` and without fragments.
      inner: the inner optimizer of the workers.
      loss: parameters and a batch -> the loss, a scalar.
      data: number of a worker, and number of its local step in the messages that the
        center has settled -> the batch, which must depend on nothing else. JAX code,
        which then runs inside the programs; or any other code, which is called for
        each local step.
      params: the first parameters of the center, and of the workers.
      exact: whether each worker makes its messages by itself, in the programs of
        `Worker`, called as a real worker calls them. The results are then, bit for
        bit, those of real workers at a `LocalCenter` with these exchanges. They agree
        with those of ``exact=False`` to rounding.
      evaluate: parameters -> a number, such as the loss on other data; called with
        versions of the center.
      every: number of versions between two evaluations.
      target: value of ``evaluate`` at or below which the execution ends.
      width: number of workers whose messages are made together; None for a number that
        suits their size. Results depend on it, to rounding.
      progress: function that is called from time to time with the fraction done.

    Returns:
      The traces.

    Raises:
      InvalidTypeError: ``inner`` is not an optimizer.
      InvalidArgumentError: the schedule cannot be executed, another argument is out of
        range, or there is not enough memory.
      TreeMismatchError: ``params`` are not real floating arrays.
      SimulationError: a message would be rejected.
    """
    check.instance(planned, Schedule, "planned must be the result of schedule(...)")
    if planned.rule is None or len(planned.message_bytes) > 1:
        found = "fragments" if planned.rule else "rule=None"
        raise errors.InvalidArgumentError(
            "only schedules with a rule and without fragments can be executed; this "
            f"one was made with {found}"
        )
    inner = check.optimizer(inner, "inner")
    check.float_leaves(params, "params")
    check.positive_int(every, "every")
    check.whole_number(width, "width", least=1)
    nbytes = steps.exchange_bytes(planned.rule, jax.eval_shape(lambda: params))
    if planned.message_bytes[0] not in (0, nbytes[0]):
        raise errors.InvalidArgumentError(
            "params must be those of the schedule, with messages of "
            f"{planned.message_bytes[0]} bytes; these have {nbytes[0]} bytes"
        )
    if target is not None and evaluate is None:
        raise errors.InvalidArgumentError("target needs evaluate=, got None")
    params = trees.copy(params)
    rounds = Rounds(
        planned.rule,
        inner,
        loss,
        data,
        params,
        overlap=bool(np.any(planned.in_background)),
        keeps_contribution=bool(np.any(planned.outcome == Outcome.REJECTED)),
    )
    batch = rounds.batch_like()
    shape = jax.eval_shape(loss, params, batch).shape
    if shape:
        raise errors.InvalidArgumentError(
            f"loss must return a scalar, got an array of shape {shape}"
        )
    sizes = [leaf.shape[:1] for leaf in jax.tree.leaves(batch)]
    execution = _Execution(planned, rounds, params)
    execution.makes(exact=exact, width=width)
    execution.run(evaluate, every, target, progress)
    return execution.traces(samples=sizes[0][0] if sizes and sizes[0] else 1)


class _Execution:
    """One execution of a schedule.

    Args:
      planned: the schedule.
      rounds: the rounds of its workers.
      params: the first parameters.
    """

    def __init__(self, planned: Schedule, rounds: Rounds, params: PyTree) -> None:
        assert planned.rule is not None
        self._planned, self._rounds, self._params = planned, rounds, params
        self._store = Store(planned.rule, params)
        self._rejections = Rejections(planned.limits.messages or MessageLimits())
        self._rejections.max_norm = self._store.max_norm
        (settled,) = np.nonzero(planned.order >= 0)
        self._rows = settled[np.argsort(planned.order[settled])]  # of messages
        self._loss = np.zeros(len(planned), np.float32)
        self._evaluations: list[tuple[int, int, Any]] = []  # row, version and value
        self._centers: dict[int, PyTree] = {}  # that a row's worker adopts
        self._made: dict[int, Made] = {}
        self._done = 0
        self._plan()

    def _plan(self) -> None:
        """Plan the rounds of all messages that are settled."""
        planned = self._planned
        self._next: dict[int, int] = {}  # row -> its worker's next one in the session
        self._starts: dict[int, list[int]] = defaultdict(list)  # by first version
        self._kinds: dict[int, Kind] = {}
        self._plans: dict[int, Plan] = {}
        last: dict[int, int] = {}  # worker -> its last row
        firsts = [0] * len(planned.names)
        for row in np.flatnonzero(planned.order >= 0).tolist():
            worker, steps = int(planned.worker[row]), int(planned.steps[row])
            begin, is_late, late = Begin.STARTED, False, 0
            if planned.sequence[row] > 1:
                before = last[worker]
                self._next[before] = row
                begin = self._begin_after(before)
                is_late = bool(planned.in_background[before])
                late = int(planned.steps_since[before])
            else:
                self._starts[int(planned.anchor_version[row])].append(row)
            # Steps before a reset are not in the message.
            later = steps if begin.resets else steps - late
            self._kinds[row] = Kind(begin, is_late, bool(planned.in_background[row]))
            self._plans[row] = Plan(worker, firsts[worker], late, later)
            firsts[worker] += late + later
            last[worker] = row

    def _begin_after(self, row: int) -> Begin:
        """Return how the round after a message begins."""
        outcome = Outcome(self._planned.outcome[row])
        if outcome is Outcome.REJECTED:
            is_second = self._kinds[row].begin.resets
            return Begin.REJECTED_AGAIN if is_second else Begin.REJECTED
        return Begin.DROPPED if outcome is Outcome.DROPPED else Begin.APPLIED

    def makes(self, *, exact: bool, width: int | None) -> None:
        """Choose how messages are made, if there is memory for it."""
        workers = len(self._planned.names)
        loop = jax.eval_shape(self._rounds.start)
        row, params = trees.nbytes(loop), trees.nbytes(self._params)
        # A row, its anchor, and a message that waits.
        needed = workers * (row + 2 * params)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise errors.InvalidArgumentError(
                f"{workers} workers need {needed / 1e9:.3g} GB, with "
                f"{(row + 2 * params) / 1e6:.3g} MB each, and this machine has "
                f"{memory / 1e9:.3g} GB"
            )
        self._maker: Any = OneByOne(self._rounds)
        self._makes_all = not exact
        if not exact:
            plans = {(p.late, p.steps) for p in self._plans.values()}
            self._maker = Batches(
                self._rounds,
                workers,
                is_uniform=len(plans) <= 1,
                most_steps=max((sum(plan) for plan in plans), default=0),
                width=width,
            )

    def run(
        self,
        evaluate: Callable[[PyTree], Any] | None,
        every: int,
        target: float | None,
        progress: Callable[[float], object] | None,
    ) -> None:
        """Apply all messages in order."""
        value = None if evaluate is None else jax.jit(evaluate)
        store = self._store
        self._start()
        for rows in self._groups():
            before = store.current
            self._apply(rows)
            self._answer(rows, before)
            self._done += len(rows)
            if self._done % _PROGRESS < len(rows) and progress is not None:
                progress(self._done / len(self._rows))
            number = store.current.number
            if value is None or number == before.number or number % every:
                continue
            found = value(store.tree(store.current))
            self._evaluations.append((rows[-1], number, found))
            if target is not None and float(found) <= target:
                return

    def _groups(self) -> Iterator[list[int]]:
        """Yield the rows that are settled by one version, or while it is current."""
        planned, group, workers, last = self._planned, list[int](), set[int](), -1
        for row in self._rows.tolist():
            made, worker = int(planned.version[row]), int(planned.worker[row])
            version = made if made >= 0 else int(planned.answer_version[row])
            if version != last or worker in workers:
                if group:
                    yield group
                group, workers, last = [], set(), version
            group.append(row)
            workers.add(worker)
        if group:
            yield group

    def _make(self, row: int) -> None:
        """Make a message, and perhaps all others that can be made."""
        if row in self._made:
            return
        by_kind: dict[Kind, list[int]] = defaultdict(list)
        for each in [*self._centers] if self._makes_all else [row]:
            by_kind[self._kinds[each]].append(each)
        for kind, rows in by_kind.items():
            centers = [self._centers.pop(each) for each in rows]
            plans = [self._plans[each] for each in rows]
            made = self._maker.make(kind, centers, plans)
            self._made.update(zip(rows, made, strict=True))

    def _apply(self, rows: list[int]) -> None:
        """Make the messages of these rows, and apply those that are to be applied."""
        planned, store = self._planned, self._store
        submissions, norms = [], []
        applied = [r for r in rows if planned.outcome[r] == Outcome.APPLIED]
        for row in rows:
            self._make(row)
            made = self._made.pop(row)
            self._loss[row] = made.loss
            if planned.outcome[row] != Outcome.APPLIED:
                continue
            submission = Submission(
                int(planned.sequence[row]),
                store.place(made.contribution),
                int(planned.anchor_version[row]),
                int(planned.steps[row]),
            )
            norm = made.norm
            if norm is None and self._rejections.limits.measures:
                norm, _ = store.measure(
                    submission.contribution, store.current.params, samples=False
                )
            norms.append(None if norm is None else float(norm))
            self._check(row, submission, norms[-1])
            submissions.append(submission)
        if not applied:
            return
        self._rejections.add_norms(norms)
        store.apply(
            submissions,
            [int(planned.staleness[row]) for row in applied],
            [float(planned.weight[row]) for row in applied]
            if planned.combines
            else None,
            int(planned.workers[applied[0]]),
            [int(planned.index[row]) for row in applied],
        )

    def _check(self, row: int, submission: Submission, norm: float | None) -> None:
        """Raise if a center would reject a message that the schedule applies."""
        rejection = self._rejections.decide(submission, norm)
        if rejection is not None:
            planned = self._planned
            raise errors.SimulationError(
                f"after {planned.settled[row] / 1e9:g} s the center rejects message "
                f"{submission.sequence} of worker "
                f"{planned.names[planned.worker[row]]!r}: {rejection.reason}. "
                "A schedule does not know the norms of messages, and what follows a "
                "rejection for a norm is not simulated: take a smaller learning rate, "
                "clip gradients, or raise the limit"
            )

    def _answer(self, rows: list[int], before: Version) -> None:
        """Give the center to the workers that adopt it."""
        for row in rows:
            following = self._next.get(row)
            if following is None:
                continue
            version = self._store.current
            if self._planned.answer_version[row] == before.number:
                version = before
            version.escaped = True
            self._centers[following] = self._store.answer(version)
        if self._store.current is not before:
            self._start()

    def _start(self) -> None:
        """Give the center to the workers that start with this version."""
        version = self._store.current
        for row in self._starts.pop(version.number, ()):
            version.escaped = True
            self._centers[row] = self._store.tree(version)

    def traces(self, samples: int) -> Traces:
        """Return the traces; ``samples`` is the number of samples of a batch."""
        planned, rows = self._planned, self._rows[: self._done]
        center = self._store.save()
        last, versions, values = (
            zip(*self._evaluations, strict=True) if self._evaluations else ((), (), ())
        )
        steps = np.cumsum(planned.steps[rows])
        moved = planned.message_bytes[0] + planned.answer_bytes[0]
        evaluations = np.array(jax.device_get([*values]), np.float64)
        digest = hashlib.blake2b(digest_size=8)
        digest.update(f"{planned.digest}/{trees.digest(center)}".encode())
        digest.update(self._loss[rows].tobytes())
        digest.update(evaluations.tobytes())
        return Traces(
            schedule=planned,
            digest=digest.hexdigest(),
            center=center,
            rows=rows,
            seconds=planned.settled[rows] / 1e9,
            steps=steps,
            samples=steps * samples,
            bytes=moved * np.arange(1, len(rows) + 1),
            loss=self._loss[rows],
            evaluation_seconds=planned.settled[[*last]] / 1e9 if last else np.zeros(0),
            evaluation_versions=np.array(versions, np.int64),
            evaluations=evaluations,
        )
