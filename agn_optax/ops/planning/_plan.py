"""Plans of rules around a center, and of plain data parallelism to compare with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.ops.planning._cluster import Cluster
from agn_optax.ops.planning._cost import CenterMemory, Cost, WorkerMemory
from agn_optax.ops.planning._times import Work, exchange_times
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule, check_rule, codecs

PyTree = Any

_LARGEST_LEAF = 1 << 30  # elements: some code holds the size of an array in int32
_MOST_PARAMETERS = 1e14  # a tree with more leaves would take long


def plan(
    rule: Rule,
    params: PyTree,
    cluster: Cluster,
    *,
    inner: optax.GradientTransformation,
    period: int | None = None,
    center_dtype: Any = None,
) -> Cost:
    r"""Return the cost of a rule with asynchronous workers around a center service.

    .. math::
        e = \text{overhead} + \text{latency} + \frac{m + b}{\min(B, C)}
            + \frac{m + b}{\text{endpoint rate}} + \frac{u}{\text{apply rate}}; \qquad
        \text{hidden where } \max(e, n s) \le \lambda t

    where :math:`m` and :math:`b` are the bytes of message and answer, :math:`B` and
    :math:`C` the bytes per second of a worker's and of the center's link, :math:`u` the
    bytes that the center's arithmetic reads and writes, :math:`n` the workers,
    :math:`s` the seconds for which an exchange occupies the center, :math:`\lambda` the
    period and :math:`t` the seconds of a local step. The module's docstring has all
    equations, and their assumptions.

    Args:
      rule: a rule of `agn_optax.rules`, or one of your own, with its codec. It is
        evaluated abstractly, and nothing is run.
      params: the parameters, or a tree of their shapes and dtypes, such as `abstract`
        makes.
      cluster: the workers and their links.
      inner: the inner optimizer.
      period: local steps between exchanges; None for the shortest that hides them.
      center_dtype: floating dtype of the center; None for the parameters' dtypes.

    Returns:
      The cost: bytes, seconds and fractions.

    Raises:
      InvalidTypeError: ``rule`` is not a rule, or ``inner`` is not an optimizer.
      InvalidArgumentError: ``period`` is not a positive int, or a dtype not floating.
      TreeMismatchError: ``params`` has leaves that are not real floating arrays.

    Example:
      >>> import optax
      >>> from agn_optax import planning, rules
      >>> cluster = planning.Cluster(step_time=0.8, bandwidth=125e6, workers=8)
      >>> params = planning.abstract(1.3e9)
      >>> cost = planning.plan(rules.diloco(), params, cluster, inner=optax.adam(1e-3))
      >>> cost.message, cost.hidden_period, cost.utilization_overlapping
      (5200000000, 416, 1.0)
    """
    check_rule(rule)
    params = _shapes(params)
    inner = check.optimizer(inner, "inner")
    center_dtype = check.float_dtype(center_dtype, "center_dtype")
    if period is not None:
        period = int(check.positive_int(period, "period"))

    state = jax.eval_shape(
        lambda params: rounds.init_local(rule, inner, params, None), params
    )
    # The state has the anchor of a rule with a penalty. For other rules that need the
    # anchor, the worker keeps the adopted snapshot.
    has_anchor = rule.needs_anchor or rule.penalty is not None
    center = _cast(params, center_dtype)
    center_state = rounds.center_state_like(rule, center)
    work = _work(rule, center, center_state, params)
    times = exchange_times(work, cluster)
    hidden = times.hidden_period(cluster.step_time)
    is_hidden = hidden == 1 if period is None else period >= hidden
    period = hidden if period is None else period
    steps = period * cluster.step_time
    return Cost(
        rule=rule.name,
        message=work.message,
        answer=work.answer,
        exchange=times.alone,
        service=times.occupied,
        applied=work.applied,
        hidden_period=hidden,
        period=period,
        utilization=steps / max(steps + times.alone, cluster.workers * times.occupied),
        utilization_overlapping=steps / max(steps, times.longest),
        worker=WorkerMemory(
            params=trees.nbytes(params),
            inner_state=trees.nbytes(state.inner_state),
            record=trees.nbytes(state.record),
            codec_state=trees.nbytes(state.codec_state),
            anchor=has_anchor * trees.nbytes(center),
            staged=work.message + trees.nbytes(center),
            overlap=trees.nbytes(params),
        ),
        center=CenterMemory(
            center=trees.nbytes(center),
            center_state=trees.nbytes(center_state),
            version=trees.nbytes(center),
            messages=cluster.workers * work.message,
        ),
        bottleneck="nothing" if is_hidden else times.bottleneck,
    )


def _work(rule: Rule, center: PyTree, center_state: PyTree, params: PyTree) -> Work:
    """Return the bytes of an exchange."""
    plain = dataclasses.replace(rule, codec=codecs.identity())
    sent = rounds.contribution_like(rule, center, params)
    contribution = rounds.contribution_like(plain, center, params)
    is_rounded = _leaf_shapes(sent) == _leaf_shapes(contribution)
    message, answer = rounds.exchange_bytes(rule, center, params)
    return Work(
        message,
        answer=answer,
        # The message is read twice (first for its norm); the center and its optimizer's
        # state are read and written.
        applied=2 * (message + trees.nbytes(center) + trees.nbytes(center_state)),
        # Rounding is a part of writing the numbers, and takes no time of its own.
        coded=0 if is_rounded else trees.nbytes(contribution),
    )


def _leaf_shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(tree)]


def all_reduce(
    params: PyTree,
    cluster: Cluster,
    *,
    inner: optax.GradientTransformation,
    codec: codecs.Codec | None = None,
) -> Cost:
    r"""Return the cost of plain data parallelism: an all-reduce at every step.

    .. math::
        m = b = 2 \frac{n - 1}{n} \text{ of the gradients}; \qquad
        e = (n - 1) \text{ latency} + m / B

    for :math:`n` workers with links of :math:`B` bytes per second. This is the bound of
    a ring: 2 (n - 1) hops take half a round trip each, members send and receive at
    once, and the ends take no time.

    Args:
      params: as for `plan`.
      cluster: the workers and their links; there is no center.
      inner: the optimizer.
      codec: a cast of the gradients before they are reduced. With any other codec, or
        None, gradients are sent as they are.

    Returns:
      The cost, with a period of 1; ``hidden_period`` is None if a step is shorter than
      its communication. ``utilization_overlapping`` is for communication that overlaps
      with the step itself, at best.

    Raises:
      InvalidTypeError: ``inner`` is not an optimizer.
      InvalidTypeError: ``codec`` is not a codec.
      TreeMismatchError: ``params`` has leaves that are not real floating arrays.

    Example:
      >>> import optax
      >>> from agn_optax import planning
      >>> cluster = planning.Cluster(step_time=0.8, bandwidth=125e6, workers=8)
      >>> cost = planning.all_reduce(
      ...     planning.abstract(1.3e9), cluster, inner=optax.adam(1e-3)
      ... )
      >>> cost.hidden_period, round(cost.utilization_overlapping, 3)
      (None, 0.011)
    """
    params = _shapes(params)
    inner = check.optimizer(inner, "inner")
    codec = codecs.identity() if codec is None else codec
    codecs.check_codec(codec, "codec")
    others = cluster.workers - 1
    gradients = trees.nbytes(params, codecs.cast_dtype(codec))
    sent = 2 * others * gradients // cluster.workers
    waiting, moving = others * cluster.latency, sent / cluster.bandwidth
    exchange, step = waiting + moving, cluster.step_time
    limit = "latency" if waiting > moving else "worker link"
    return Cost(
        rule="all_reduce",
        message=sent,
        answer=sent,
        exchange=exchange,
        service=0.0,
        applied=0,
        hidden_period=1 if exchange <= step else None,
        period=1,
        utilization=step / (step + exchange),
        utilization_overlapping=step / max(step, exchange),
        worker=WorkerMemory(
            params=trees.nbytes(params),
            inner_state=trees.nbytes(jax.eval_shape(inner.init, params)),
            codec_state=0,
        ),
        center=CenterMemory(),
        bottleneck="nothing" if exchange <= step else limit,
    )


def abstract(parameters: float, dtype: Any = "float32") -> PyTree:
    """Return a tree with a number of parameters, without their memory.

    Args:
      parameters: number of parameters, such as 1.3e9.
      dtype: floating dtype of the parameters.

    Returns:
      Shapes and dtypes, as `plan` takes them.

    Raises:
      InvalidArgumentError: ``parameters`` is not a positive whole number up to 1e14,
        or ``dtype`` is not floating.

    Example:
      >>> from agn_optax import planning
      >>> planning.abstract(10, "bfloat16")
      [ShapeDtypeStruct(shape=(10,), dtype=bfloat16)]
    """
    most = _MOST_PARAMETERS
    check.rate(parameters, "parameters", low=0.0, high=most, low_open=True)
    count = int(parameters)
    if count != parameters:
        raise errors.InvalidArgumentError(
            f"parameters must be a whole number, got {parameters!r}"
        )
    dtype = check.float_dtype(dtype, "dtype")
    whole, rest = divmod(count, _LARGEST_LEAF)
    sizes = [_LARGEST_LEAF] * whole + [rest] * (rest > 0)
    return [jax.ShapeDtypeStruct((size,), dtype or jnp.float32) for size in sizes]


def _shapes(params: PyTree) -> PyTree:
    check.float_leaves(params, "params")
    return _cast(params, None)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.eval_shape(lambda tree: optax.tree.cast(tree, dtype), tree)
