"""Transformations that scale a message by its weight or its worker's speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check, trees
from agn_optax.rules._combinators import stateless

PyTree = Any


class WeightState(NamedTuple):
    """State of `scale_by_weight` without a reference."""

    mean: jax.Array  # float scalar: mean of all weights so far
    updates_seen: jax.Array  # int32 scalar: number of weights in the mean


def scale_by_weight(
    measure: Callable[[Any, Any], Any] | None = None, *, reference: float | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Multiply the updates by their weight, relative to the mean weight.

    .. math:: u \leftarrow \frac{w}{\bar w} u

    ``weight`` is an extra argument of ``update``: the amount of work behind a message,
    such as the number of tokens that its worker saw. :math:`\bar w` is the weight that
    counts as one: the mean of all weights so far, including this one. Messages that
    come one by one, or through `center_optimizers.buffered`, then move the center as
    their weighted mean would.

    Args:
      measure: ``(weight, steps) -> weight``, the weight to use instead; ``steps`` is
        the extra argument of ``update``. None uses the weight unchanged. Decoupled
        DiLoCo has ``lambda tokens, steps: tokens**2 / steps``. With a reference of 1,
        ``lambda weight, steps: 10 / steps`` counts each displacement by its mean step,
        as FedNova does.
      reference: :math:`\bar w`, positive; None is the mean.

    Returns:
      A transformation that keeps the dtypes of its updates. Its state is `WeightState`,
      or empty with a reference.

    Raises:
      InvalidArgumentError: ``reference`` is not a positive number.
      MissingArgumentError: ``update`` is called without ``weight``, or without
        ``steps`` although there is a measure.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(scale_by_weight(reference=512.0), optax.sgd(1.0))
      >>> print(tx.update(jnp.ones(1), tx.init(jnp.zeros(1)), weight=128.0)[0])
      [-0.25]

    References:
      Arthur Douillard et al., *Decoupled DiLoCo for Resilient Distributed
      Pre-training*, 2026, for weights by tokens and steps. The formula follows
      implementations, because the paper was not read.
    """
    if reference is not None:
        check.rate(reference, "reference", low=0.0, high=math.inf, low_open=True)

    def init_fn(params: PyTree) -> Any:
        if reference is not None:
            return optax.EmptyState()
        return WeightState(jnp.zeros((), float), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        weight: Any = None,
        steps: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        weight = _extra_argument(weight, "weight", "scale_by_weight")
        if measure is not None:
            weight = measure(weight, _extra_argument(steps, "steps", "scale_by_weight"))
            weight = jnp.asarray(weight, float)
        if reference is not None:
            return trees.scaled(updates, weight / reference), state
        seen = optax.safe_increment(state.updates_seen)
        # A running mean, because a float32 sum would stop growing after 2^24 messages,
        # and the mean would fall.
        mean = state.mean + (weight - state.mean) / seen.astype(weight.dtype)
        return trees.scaled(updates, weight / mean), WeightState(mean, seen)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_by_turnaround(
    workers: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiply the updates by their worker's turnaround, relative to a full round.

    .. math:: u \leftarrow \frac{\tau + 1}{n} u

    ``staleness`` (:math:`\tau`) is an extra argument of ``update``. If messages come
    one by one, a worker that is k times as fast sends k times as many messages, and the
    center moves closer to the minimum of that worker's data than of others' data. A
    worker that sends one of :math:`\tau + 1` messages has an anchor that is
    :math:`\tau` versions old. With its messages multiplied by :math:`\tau + 1`, each
    worker moves the center equally far in the same time. (`scale_by_staleness` does the
    opposite, for another problem: if all workers have similar data, fast workers need
    no correction, and late messages are the worse ones.)

    Args:
      workers: :math:`n`; None uses the extra argument ``workers`` of ``update``, the
        current number of workers. Among workers of equal speed, the factor is 1.

    Returns:
      A stateless transformation that keeps the dtypes of its updates.

    Raises:
      InvalidArgumentError: ``workers`` is not a positive whole number.
      MissingArgumentError: ``update`` is called without ``staleness``, or the number of
        workers is neither an argument here nor one of ``update``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(scale_by_turnaround(4), optax.sgd(1.0))
      >>> print(tx.update(jnp.ones(1), tx.init(jnp.zeros(1)), staleness=7)[0])
      [-2.]

    References:
      Ammar Mahran, Artavazd Maranjyan, Peter Richtárik, *Rescaled Asynchronous SGD:
      Optimal Distributed Optimization under Data and System Heterogeneity*, 2026. In
      the paper, rates are proportional to computation times; here staleness takes their
      place.
    """
    fixed = None if workers is None else check.positive_int(workers, "workers")

    def scaled(
        updates: PyTree,
        params: PyTree,
        *,
        staleness: Any = None,
        workers: Any = None,
        **extra_args: Any,
    ) -> PyTree:
        count = workers if fixed is None else fixed
        count = _extra_argument(count, "workers", "scale_by_turnaround")
        staleness = _extra_argument(staleness, "staleness", "scale_by_turnaround")
        return trees.scaled(updates, (staleness + 1) / count)

    return stateless(scaled)


def _extra_argument(value: Any, name: str, caller: str) -> jax.Array:
    check.extra_argument_given(value, f"{name}=1", caller)
    return jnp.asarray(value, float)
