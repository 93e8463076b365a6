"""What rare communication costs, before it is paid: time and memory of every rule.

Sizes are read off the rules by abstract evaluation, so a rule of yours is planned as
those of the library are. With `n` workers, step time `t`, period `p`, a message of `m`
bytes and an answer of `b` bytes, links of `B` bytes a second (the center's has `C`, for
all workers), and `u` bytes that the center's arithmetic reads and writes:

    an exchange          e = overhead + latency + (m + b) / min(B, C)
                             + (m + b) / endpoint_rate + u / apply_rate
    the center, of it    s = max(m / C,  b / C,  u / apply_rate
                                 + (overhead + (m + b) / endpoint_rate) / 2)
    a round              R = max(p t + e, n s)           where the worker waits
                         R = max(p t, e, n s)            where exchanges overlap
    utilization          p t / R
    hidden               where max(e, n s) <= p t

Links carry both directions at once, so the center may receive one message while it
sends the answer to another; half of what the two ends do is taken to be done by the
center. Parts of an exchange follow each other in the model; where they are under way at
once (chunks on the link while others are copied), `e` is an upper bound. Workers are
taken to be evenly spread in time: near the center's limit they meet, and wait longer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors, rules
from agn_optax import round as rounds
from agn_optax._internal import check, trees
from agn_optax.rules import Rule, check_rule

PyTree = Any

__all__ = [
    "CenterMemory",
    "Cluster",
    "Cost",
    "Machine",
    "WorkerMemory",
    "abstract",
    "all_reduce",
    "built_in_rules",
    "plan",
]

_LARGEST_LEAF = 1 << 30  # elements; sizes of single arrays are int32 here and there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What an exchange takes beside the links: constants, as ``--measure`` finds them.

    The defaults are round numbers of a machine with two cores.

    Args:
      overhead: seconds of an exchange of nothing, over no distance.
      endpoint_rate: bytes a second, message and answer, through worker and center:
        copies, frames and gRPC at both ends.
      apply_rate: bytes a second that the center's arithmetic reads and writes.

    Raises:
      InvalidArgumentError: a constant is not a positive number (``overhead`` may be 0).

    Example:
      >>> from agn_optax import planning
      >>> planning.Machine(overhead=0.001).apply_rate
      5000000000.0
    """

    overhead: float = 0.002
    endpoint_rate: float = 1e9
    apply_rate: float = 5e9

    def __post_init__(self) -> None:
        check.rate(self.overhead, "overhead", low=0.0, high=math.inf)
        _positive(self, "endpoint_rate", "apply_rate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers, what a step takes them, and what lies between them and the center.

    Args:
      step_time: seconds of a local step.
      bandwidth: of each worker's link, bytes a second in either direction.
      workers: how many.
      latency: seconds of a round trip between a worker and the center.
      center_bandwidth: of the center's link, bytes a second in either direction, for
        all workers together; None is as much as one worker's.
      machine: what the two ends take.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import planning
      >>> planning.Cluster(step_time=0.8, bandwidth=125e6, workers=8).latency
      0.0
    """

    step_time: float
    bandwidth: float
    workers: int = 1
    latency: float = 0.0
    center_bandwidth: float | None = None
    machine: Machine = dataclasses.field(default_factory=Machine)

    def __post_init__(self) -> None:
        _positive(self, "step_time", "bandwidth")
        if self.center_bandwidth is not None:
            _positive(self, "center_bandwidth")
        check.rate(self.latency, "latency", low=0.0, high=math.inf)
        check.positive_int(self.workers, "workers")

    @property
    def shared(self) -> float:
        """Bytes a second of the center's link."""
        given = self.center_bandwidth
        return self.bandwidth if given is None else given


class WorkerMemory(NamedTuple):
    """Bytes that a worker keeps, beside what its train step takes (gradients, ...)."""

    params: int
    inner_state: int  # the inner optimizer's
    record: int = 0
    codec_state: int = 0  # what the rule's codec keeps from one exchange to the next
    anchor: int = 0  # the center as last adopted, where the rule reads it
    staged: int = 0  # during an exchange: the message, and the answer
    overlap: int = 0  # the parameters as sent, where local steps go on meanwhile

    @property
    def waiting(self) -> int:
        """All of it, in a worker that waits for its answers."""
        return sum(self) - self.overlap

    @property
    def overlapping(self) -> int:
        """All of it, in a worker with ``overlap=True``."""
        return sum(self)


class CenterMemory(NamedTuple):
    """Bytes that the center keeps."""

    center: int = 0
    center_state: int = 0  # the center optimizer's
    version: int = 0  # the next one, while somebody reads the current one
    messages: int = 0  # one for every worker, if all exchange at once

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Cost(NamedTuple):
    """What a rule costs on a `Cluster`."""

    rule: str
    message: int  # bytes of one exchange, from the worker
    answer: int  # bytes of one exchange, to the worker
    exchange: float  # seconds, where nobody else is served meanwhile
    service: float  # seconds for which it occupies the center
    applied: int  # bytes that the center's arithmetic reads and writes for it
    hidden_period: int | None  # local steps; None if there is none
    period: int  # local steps, of the following two
    utilization: float  # part of the time in local steps, where workers wait
    utilization_overlapping: float  # ... where exchanges overlap with local steps
    worker: WorkerMemory
    center: CenterMemory


def plan(
    rule: Rule,
    params: PyTree,
    cluster: Cluster,
    *,
    inner: optax.GradientTransformation,
    period: int | None = None,
    center_dtype: Any = None,
) -> Cost:
    r"""What a rule costs with asynchronous workers around a center service.

    .. math::
        e = \text{overhead} + \text{latency} + \frac{m + b}{\min(B, C)}
            + \frac{m + b}{\text{endpoint rate}} + \frac{u}{\text{apply rate}}; \qquad
        \text{hidden where } \max(e, n s) \le \lambda t

    The module's docstring has all equations, and what they leave out.

    Args:
      rule: a record of `agn_optax.rules`, or one of your own, whose codec says what
        travels. Nothing of it is run.
      params: the parameters, or a tree with their shapes and dtypes, such as `abstract`
        makes.
      cluster: the workers and their links.
      inner: the inner optimizer.
      period: local steps between exchanges; None for the shortest that hides them.
      center_dtype: floating dtype of the center; None for the parameters'.

    Returns:
      The cost: bytes, seconds, and parts of 1.

    Raises:
      InvalidTypeError: ``rule`` or ``inner`` is not one.
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
    # Where a penalty reads the anchor it is in the state, else the worker holds on to
    # the snapshot: one copy either way.
    anchored = rule.needs_anchor or rule.penalty is not None
    center = _cast(params, center_dtype)
    center_state = jax.eval_shape(rule.center.init, center)
    message = trees.nbytes(rounds.contribution_like(rule, center, params))
    answer = trees.nbytes(center, rule.codec.answers)

    machine, workers = cluster.machine, cluster.workers
    ends = machine.overhead + (message + answer) / machine.endpoint_rate
    # The message is read twice (its norm is taken first), and the center and its
    # optimizer's state go there and back.
    applied = 2 * (message + trees.nbytes(center) + trees.nbytes(center_state))
    apply = applied / machine.apply_rate
    link = (message + answer) / min(cluster.bandwidth, cluster.shared)
    exchange = cluster.latency + link + ends + apply
    service = max(max(message, answer) / cluster.shared, ends / 2 + apply)

    longest = max(exchange, workers * service)
    hidden = max(1, math.ceil(longest / cluster.step_time))
    period = hidden if period is None else period
    steps = period * cluster.step_time
    return Cost(
        rule=rule.name,
        message=message,
        answer=answer,
        exchange=exchange,
        service=service,
        applied=applied,
        hidden_period=hidden,
        period=period,
        utilization=steps / max(steps + exchange, workers * service),
        utilization_overlapping=steps / max(steps, longest),
        worker=WorkerMemory(
            params=trees.nbytes(params),
            inner_state=trees.nbytes(state.inner_state),
            record=trees.nbytes(state.record),
            codec_state=trees.nbytes(state.codec_state),
            anchor=trees.nbytes(center) if anchored else 0,
            staged=message + trees.nbytes(center),
            overlap=trees.nbytes(params),
        ),
        center=CenterMemory(
            center=trees.nbytes(center),
            center_state=trees.nbytes(center_state),
            version=trees.nbytes(center),
            messages=workers * message,
        ),
    )


def all_reduce(
    params: PyTree,
    cluster: Cluster,
    *,
    inner: optax.GradientTransformation,
    wire_dtype: Any = None,
) -> Cost:
    r"""Plain data parallelism to compare with: all gradients are reduced at every step.

    .. math::
        m = b = 2 \frac{n - 1}{n} \text{ of the gradients}; \qquad
        e = (n - 1) \text{ latency} + m / B

    That is the bound of a ring, whose 2 (n - 1) hops take half a round trip each and
    whose members send and receive at once, with ends that take no time.

    Args:
      params: as for `plan`.
      cluster: the workers and their links; there is no center.
      inner: the optimizer.
      wire_dtype: floating dtype of the gradients on their way; None for their own.

    Returns:
      The cost, with a period of 1; ``hidden_period`` is None if a step is shorter than
      its communication. What overlaps is communication with the step itself, at best.

    Raises:
      InvalidTypeError: ``inner`` is not an optimizer.
      InvalidArgumentError: ``wire_dtype`` is not floating.
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
    wire_dtype = check.float_dtype(wire_dtype, "wire_dtype")
    gradients = trees.nbytes(params, wire_dtype)
    others = cluster.workers - 1
    sent = 2 * others * gradients // cluster.workers
    exchange = others * cluster.latency + sent / cluster.bandwidth
    step = cluster.step_time
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
        ),
        center=CenterMemory(),
    )


def abstract(parameters: float, dtype: Any = "float32") -> PyTree:
    """A tree with so many parameters, without their memory.

    Args:
      parameters: how many; 1.3e9, say.
      dtype: their floating dtype.

    Returns:
      Shapes and dtypes, as `plan` takes them.

    Raises:
      InvalidArgumentError: not a positive whole number, or a dtype that is not
        floating.

    Example:
      >>> from agn_optax import planning
      >>> planning.abstract(10, "bfloat16")
      [ShapeDtypeStruct(shape=(10,), dtype=bfloat16)]
    """
    check.rate(parameters, "parameters", low=0.0, high=math.inf, low_open=True)
    count = int(parameters)
    if count != parameters:
        raise errors.InvalidArgumentError(
            f"parameters must be a whole number, got {parameters!r}"
        )
    dtype = check.float_dtype(dtype, "dtype")
    whole, rest = divmod(count, _LARGEST_LEAF)
    sizes = [_LARGEST_LEAF] * whole + [rest] * (rest > 0)
    return [jax.ShapeDtypeStruct((size,), dtype or jnp.float32) for size in sizes]


def built_in_rules(inner: optax.GradientTransformation, workers: int) -> list[Rule]:
    """Every rule of `agn_optax.rules`, with settings where it wants any.

    Args:
      inner: the inner optimizer, which is also the center's where a rule asks for one.
      workers: how many, which say how far elastic averaging moves.

    Returns:
      The rules, in the order of their names.

    Raises:
      InvalidArgumentError: ``workers`` is not a positive int.

    Example:
      >>> import optax
      >>> from agn_optax import planning
      >>> [rule.name for rule in planning.built_in_rules(optax.sgd(0.1), 4)][:2]
      ['agn', 'agn_window']
    """
    workers = check.positive_int(workers, "workers")
    wanted = {"agn": [inner], "easgd": [0.9 / workers]}
    names = sorted(set(rules.__all__) - {"Rule"})
    return [getattr(rules, name)(*wanted.get(name, ())) for name in names]


def _shapes(params: PyTree) -> PyTree:
    check.float_leaves(params, "params")
    return _cast(params, None)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.eval_shape(lambda tree: optax.tree.cast(tree, dtype), tree)


def _positive(record: Any, *fields: str) -> None:
    for field in fields:
        check.rate(getattr(record, field), field, low=0.0, high=math.inf, low_open=True)
