"""The runs of simulated workers: schedules whose messages are computed.

`run` lets the clock and the numbers go on together, because a message may be rejected
for its norm. `execute` follows a schedule that exists.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center import Journal, Limits, MessageLimits, Rejections, Submission
from agn_optax.round import DynamicPeriod, Fragments, steps
from agn_optax.rules import Rule, check_rule
from agn_optax.simulate._cluster import Cluster
from agn_optax.simulate._events import (
    SESSION_COLUMNS,
    Outcome,
    SessionEvent,
    Settings,
)
from agn_optax.simulate._execution import Evaluation, Execution, check_memory
from agn_optax.simulate._recording import Recording
from agn_optax.simulate._rounds import Rounds, is_traceable, rounds_of
from agn_optax.simulate._schedule import Schedule, simulate
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
    durability: Journal | None = None,
    progress: Callable[[float], object] | None = None,
    **settings: Any,
) -> Traces:
    """Simulate an asynchronous run with its numbers.

    Events and numbers go on together: the center gets the norm of each message when it
    arrives, and rejects it as a real center would. Without rejections, the schedule is
    that of `schedule`, and the results are those of its execution.

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
      durability: see `execute`; without ``fragments``.
      progress: function that is called from time to time with the fraction done.
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
    check_rule(rule)
    check.float_leaves(params, "params")
    fragments: Fragments | None = settings.get("fragments")
    if durability is not None and fragments is not None:
        raise errors.InvalidArgumentError(
            "durability= needs workers without fragments, each of which would have a "
            f"center and a journal of its own, got {fragments}"
        )
    evaluation = _evaluation(evaluate, every, target, params)
    found: list[tuple[Execution, Recording | None, int]] = []
    stack = contextlib.ExitStack()

    def execution_of(settings: Settings) -> Execution:
        in_background = bool(settings.overlap or settings.delay)
        is_constant = not callable(period) and not isinstance(period, DynamicPeriod)
        ledger, names = settings.ledgers[0], cluster.names
        combines = ledger.mode.combines
        rounds, samples = _rounds(
            rule, inner, loss, data, params, fragments, in_background, len(names)
        )
        recording = stack.enter_context(
            _recording(durability, rule, params, names, ledger.limits, combines)
        )
        execution = Execution(
            rounds,
            params,
            len(names),
            fragments=fragments,
            combines=combines,
            evaluation=evaluation,
            exact=exact,
            is_uniform=is_constant and fragments is None and not in_background,
            recording=recording,
        )
        for ledger, store in zip(settings.ledgers, execution.stores, strict=True):
            ledger.rejections.max_norm = store.max_norm
        found.append((execution, recording, samples))
        return execution

    with stack:
        planned = simulate(
            execution_of,
            cluster,
            period=period,
            rule=rule,
            params=params,
            seed=seed,
            progress=progress,
            **settings,
        )
        execution, recording, samples = found[0]
        if recording is not None:
            recording.finish(round(planned.duration * 1e9))
    return execution.traces(planned, samples)


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
    durability: Journal | None = None,
    progress: Callable[[float], object] | None = None,
) -> Traces:
    """Execute a schedule: make its messages, and apply them to a center in its order.

    The center is the store of a real center, which moves message by message. All
    messages that can be made when the center needs one are made together, by one
    program for a fixed number of workers; with ``exact``, one after another.

    The programs are kept for later executions with the same rule, optimizer, loss and
    data, so that a sweep of many runs compiles them once. Another seed or number of
    exchanges changes no program, nor does another number of workers with the same
    width, nor other arrays of a `jax.tree_util.Partial` as data.

    A schedule without numbers has no message that was rejected for its norm. If one
    would be, as by default one that is not finite, the execution ends with an error:
    `run` simulates what follows. With a ``target`` the execution ends at a loss.

    Args:
      planned: the schedule, made with a ``rule`` and without fragments.
      inner: the inner optimizer of the workers.
      loss: parameters and a batch -> the loss, a scalar.
      data: number of a worker, and number of its local step in the messages that the
        center has settled -> the batch, which must depend on nothing else. JAX code,
        which then runs inside the programs; or any other code, which is called for
        each local step, and whose batches must all have the same shapes unless
        ``exact``.
      params: the first parameters of the center, and of the workers.
      exact: whether each worker makes its messages by itself, in the programs of
        `Worker`, called as a real worker calls them. The results are then, bit for
        bit, those of real workers at a `LocalCenter` with these exchanges. They agree
        with those of ``exact=False`` to rounding.
      evaluate: parameters -> a number, such as the loss on other data; called with
        versions of the center. Compiled if JAX can trace it.
      every: number of versions between two evaluations.
      target: value of ``evaluate`` at or below which the execution ends.
      width: number of workers whose messages are made together; None for a number that
        suits their size. Results depend on it, to rounding.
      durability: `agn_optax.center.Journal` with a new directory, to which the run is
        written as a real center would have written it, with the times of the virtual
        clock; each message reports its ``loss``. At the end all workers leave. The
        directory has a tape, and a real center that goes on from it. None writes
        nothing.
      progress: function that is called from time to time with the fraction done.

    Returns:
      The traces.

    Raises:
      InvalidTypeError: ``inner`` is not an optimizer.
      InvalidArgumentError: the schedule cannot be executed, another argument is out of
        range, or there is not enough memory.
      TreeMismatchError: ``params`` are not real floating arrays, or a batch has other
        shapes than the first.
      SimulationError: a message would be rejected.
      DurabilityError, CenterClosedError: the directory cannot be written.
    """
    check.instance(planned, Schedule, "planned must be the result of schedule(...)")
    rule = planned.rule
    if rule is None or len(planned.message_bytes) > 1:
        found = "fragments" if rule else "rule=None"
        raise errors.InvalidArgumentError(
            "only schedules with a rule and without fragments can be executed; this "
            f"one was made with {found}. Workers with fragments are simulated by run()"
        )
    check.float_leaves(params, "params")
    check.whole_number(width, "width", least=1)
    nbytes = steps.exchange_bytes(rule, jax.eval_shape(lambda: params))
    if planned.message_bytes[0] not in (0, nbytes[0]):
        raise errors.InvalidArgumentError(
            "params must be those of the schedule, with messages of "
            f"{planned.message_bytes[0]} bytes; these have {nbytes[0]} bytes"
        )
    evaluation = _evaluation(evaluate, every, target, params)
    in_background = bool(np.any(planned.in_background))
    names, combines = planned.names, planned.combines
    rounds, samples = _rounds(
        rule, inner, loss, data, params, None, in_background, len(names)
    )
    settled = planned.steps[planned.order >= 0]
    with _recording(
        durability, rule, params, names, planned.limits, combines
    ) as recording:
        execution = Execution(
            rounds,
            params,
            len(names),
            combines=combines,
            evaluation=evaluation,
            exact=exact,
            is_uniform=not in_background and len(np.unique(settled)) <= 1,
            width=width,
            recording=recording,
        )
        _follow(planned, execution, progress)
        if recording is not None:
            at_target = execution.has_ended
            recording.finish(None if at_target else round(planned.duration * 1e9))
    return execution.traces(planned, samples)


@contextlib.contextmanager
def _recording(
    durability: Journal | None,
    rule: Rule,
    params: PyTree,
    names: Sequence[str],
    limits: Limits,
    combines: bool,
) -> Iterator[Recording | None]:
    """Write a run to a journal within the context; None writes nothing."""
    if durability is None:
        yield None
        return
    recording = Recording(durability, rule, params, names, limits, combines=combines)
    try:
        yield recording
    finally:
        recording.close()


def _evaluation(
    evaluate: Callable[[PyTree], Any] | None,
    every: int,
    target: float | None,
    params: PyTree,
) -> Evaluation:
    check.positive_int(every, "every")
    if target is not None:
        if evaluate is None:
            raise errors.InvalidArgumentError("target needs evaluate=, got None")
        check.rate(target, "target", low=-math.inf, high=math.inf)
    if evaluate is None:
        return Evaluation(None, every, target)
    function = _hashable(evaluate, "evaluate")
    if is_traceable(function, params):
        _check_scalar(jax.eval_shape(function, params), "evaluate")
        function = jax.jit(function)

    def value(params: PyTree) -> Any:
        found = function(params)
        _check_scalar(found, "evaluate")
        return found

    return Evaluation(value, every, target)


def _check_scalar(found: Any, argument: str) -> None:
    """Raise unless the result of a function is a real number."""
    is_number = isinstance(found, float | int)
    shape = () if is_number else getattr(found, "shape", None)
    if shape == () and (is_number or check.is_real(found.dtype) or found.dtype == bool):
        return
    shown = type(found).__name__ if found is not None else "None"
    if shape:
        shown = f"an array of shape {shape}"
    elif shape == ():
        shown = f"one of dtype {found.dtype}"
    raise errors.InvalidArgumentError(f"{argument} must return a scalar, got {shown}")


def _hashable(function: Any, argument: str) -> Callable[..., Any]:
    """Return a function that can be the key of its programs.

    An object that compares by its values, such as one of a dataclass, may have no hash;
    its bound method has that of the object's identity.
    """
    if not callable(function):
        raise errors.InvalidTypeError(
            f"{argument} must be a function, got {check.show(function)}"
        )
    try:
        hash(function)
    except TypeError:
        return function.__call__
    return function


def _rounds(
    rule: Rule,
    inner: optax.GradientTransformation,
    loss: Callable[[PyTree, PyTree], jax.Array],
    data: Callable[[Any, Any], PyTree],
    params: PyTree,
    fragments: Fragments | None,
    in_background: bool,
    workers: int,
) -> tuple[Rounds, int]:
    """Return the rounds of the workers, and the number of samples of a batch."""
    check.optimizer(inner, "inner")
    loss, data = _hashable(loss, "loss"), _hashable(data, "data")
    rounds = rounds_of(
        rule, inner, loss, data, fragments=fragments, in_background=in_background
    )
    batch = rounds.batch_like
    _check_scalar(jax.eval_shape(loss, params, batch), "loss")
    check_memory(rounds, params, fragments, workers)
    sizes = [leaf.shape[:1] for leaf in jax.tree.leaves(batch)]
    return rounds, sizes[0][0] if sizes and sizes[0] else 1


def _follow(
    planned: Schedule, execution: Execution, progress: Callable[[float], object] | None
) -> None:
    """Let all happen that a schedule says."""
    rows = _settled_rows(planned)
    sessions = _Sessions(planned, rows)
    limits = planned.limits.messages or MessageLimits()
    rejections = Rejections(limits)
    (store,) = execution.stores
    rejections.max_norm = store.max_norm
    done = 0
    changes = [planned.sessions[name].tolist() for name in SESSION_COLUMNS]
    for at, worker, session, event in zip(*changes, strict=True):
        execution.note(at, worker, session, SessionEvent(event))
    sessions.start(execution, done)
    for batch in _batches(rows, combines=planned.combines):
        for message in batch if limits.measures else ():
            if message.outcome is Outcome.APPLIED:
                _check(planned, rejections, message, execution.norm(message))
        rejections.add_norms([m.norm for m in batch if m.outcome is Outcome.APPLIED])
        execution.settle(batch)
        if execution.has_ended:
            return
        done += len(batch)
        sessions.start(execution, done)
        if done % _PROGRESS < len(batch) and progress is not None:
            progress(done / len(rows))


def _settled_rows(planned: Schedule) -> list[Any]:
    """Return the settled messages with their columns, in the order of the center."""
    (rows,) = np.nonzero(planned.order >= 0)
    rows = rows[np.argsort(planned.order[rows])]
    names = [
        *("worker", "fragment", "session", "sequence", "steps", "anchor_version"),
        *("version", "answer_version", "staleness", "workers", "steps_since"),
        *("in_background", "outcome", "index", "weight", "arrived", "settled"),
    ]
    columns = [getattr(planned, name)[rows].tolist() for name in names]
    messages = []
    for number, *values in zip(rows.tolist(), *columns, strict=True):
        message = SimpleNamespace(**dict(zip(names, values, strict=True)))
        message.number, message.norm = number, None
        message.outcome = Outcome(message.outcome)
        message.claimed_weight = None
        if planned.claimed_weight is not None:
            weight = float(planned.claimed_weight[message.number])
            message.claimed_weight = None if math.isnan(weight) else weight
        messages.append(message)
    return messages


def _batches(messages: list[Any], *, combines: bool) -> Iterator[list[Any]]:
    """Yield the messages that the center settles at once: one, or those of a round."""

    def round_of(message: Any) -> Any:
        made = message.version
        return message.settled, made if made >= 0 else message.answer_version

    batch: list[Any] = []
    for message in messages:
        is_same = (
            bool(batch)
            and combines
            and Outcome.DROPPED not in (message.outcome, batch[0].outcome)
            and round_of(message) == round_of(batch[0])
        )
        if batch and not is_same:
            yield batch
            batch = []
        batch.append(message)
    if batch:
        yield batch


class _Sessions:
    """The sessions of a schedule, each of which starts when the center is ready for it.

    Args:
      planned: the schedule.
      messages: its settled messages.
    """

    def __init__(self, planned: Schedule, messages: list[Any]) -> None:
        by_session: dict[tuple[int, int], list[Any]] = defaultdict(list)
        ends: dict[int, int] = {}  # worker -> messages settled with its last one
        # By first version: the messages of a session, and the number of messages that
        # are settled before it starts.
        self._waiting: dict[int, list[tuple[int, list[Any]]]] = defaultdict(list)
        for count, message in enumerate(messages, 1):
            session = by_session[message.worker, message.session]
            if not session:
                after = ends.get(message.worker, 0)
                self._waiting[message.anchor_version].append((after, session))
            session.append(message)
            ends[message.worker] = count

    def start(self, execution: Execution, done: int) -> None:
        """Start the sessions that begin now, after so many settled messages."""
        version = execution.stores[0].current.number
        later = []
        for after, session in self._waiting.pop(version, ()):
            if after > done:  # an earlier session of the worker has not ended
                later.append((after, session))
                continue
            execution.start(session[0].worker, session[0].session)
            self._report(execution, session)
        if later:
            self._waiting[version] = later

    @staticmethod
    def _report(execution: Execution, session: list[Any]) -> None:
        """Report all that the worker does."""
        for i, message in enumerate(session):
            index, late = message.worker, bool(message.in_background)
            execution.send(index, 0, message.sequence, message.steps, background=late)
            if i + 1 < len(session):
                resets, since = message.outcome is Outcome.REJECTED, message.steps_since
                execution.adopt(index, 0, since, late=late, resets=resets)


def _check(
    planned: Schedule, rejections: Rejections, message: Any, norm: float | None
) -> None:
    """Raise if a center would reject a message that the schedule applies."""
    message.norm = norm
    submission = Submission(
        message.sequence, None, message.anchor_version, message.steps
    )
    rejection = rejections.decide(submission, norm)
    if rejection is not None:
        raise errors.SimulationError(
            f"after {planned.settled[message.number] / 1e9:g} s the center rejects "
            f"message {message.sequence} of worker {planned.names[message.worker]!r}: "
            f"{rejection.reason}. A schedule made without numbers does not know it: "
            "call run(), which simulates rejections"
        )
