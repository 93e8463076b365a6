"""How much a message counts: by weight, by steps, by how often its worker comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check, trees

PyTree = Any


class WeightState(NamedTuple):
    """State of `scale_by_weight` without a reference."""

    mean: jax.Array  # float scalar: of all weights so far
    updates_seen: jax.Array  # int32 scalar


def scale_by_weight(
    measure: Callable[[Any, Any], Any] | None = None, *, reference: float | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies the updates by their weight, relative to others'.

    .. math:: u \leftarrow \frac{w}{\bar w} u

    ``weight`` is an extra argument of ``update``: what a message stands for, such as
    the tokens that were seen. :math:`\bar w` is the weight that counts as one: the mean
    of all so far, this one among them. So messages one by one, or in a
    `center_optimizers.buffered`, move the center as their weighted mean would.

    Args:
      measure: ``(weight, steps) -> weight``, what to make of it, with the extra
        argument ``steps``; None takes it as it is. Decoupled DiLoCo has
        ``lambda tokens, steps: tokens**2 / steps``.
      reference: :math:`\bar w`, positive; None is the mean.

    Returns:
      A transformation that keeps the dtypes of its updates; its state is `WeightState`,
      or empty with a reference.

    Raises:
      InvalidArgumentError: ``reference`` is not a positive number.
      MissingArgumentError: ``update`` came without ``weight``, or without ``steps``
        though there is a measure.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(scale_by_weight(reference=512.0), optax.sgd(1.0))
      >>> print(tx.update(jnp.ones(1), tx.init(jnp.zeros(1)), weight=128.0)[0])
      [-0.25]

    References:
      Arthur Douillard et al., *Decoupled DiLoCo for Resilient Distributed
      Pre-training*, 2026, for weights by tokens and steps; as implementations have it,
      for the paper was not read.
    """
    if reference is not None:
        check.rate(reference, "reference", low=0.0, high=math.inf, low_open=True)

    def init_fn(params: PyTree) -> Any:
        del params
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
        del params, extra_args
        weight = _given(weight, "weight", "scale_by_weight")
        if measure is not None:
            weight = measure(weight, _given(steps, "steps", "scale_by_weight"))
            weight = jnp.asarray(weight, float)
        if reference is not None:
            return trees.scaled(updates, weight / reference), state
        seen = optax.safe_increment(state.updates_seen)
        # A running mean: a sum would stop growing after 2^24 messages, and the mean
        # would fall.
        mean = state.mean + (weight - state.mean) / seen.astype(weight.dtype)
        return trees.scaled(updates, weight / mean), WeightState(mean, seen)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_by_steps(
    reference: float, *, exponent: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies the updates by a power of the local steps that they stand for.

    .. math:: u \leftarrow (\text{steps} / H)^a \, u

    ``steps`` is an extra argument of ``update``. Where workers make different numbers
    of steps, the displacement of one that makes more is longer as well. With
    :math:`a = -1` each counts by its mean step, as FedNova normalizes; with 1/2, as
    signal and noise together grow. (`normalize` divides by the steps.)

    Args:
      reference: :math:`H`, steps that count as one, positive.
      exponent: :math:`a`.

    Returns:
      A stateless transformation that keeps the dtypes of its updates.

    Raises:
      InvalidArgumentError: ``reference`` is not a positive number.
      MissingArgumentError: ``update`` came without ``steps``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(scale_by_steps(10, exponent=-1), optax.sgd(1.0))
      >>> print(tx.update(jnp.ones(1), tx.init(jnp.zeros(1)), steps=40)[0])
      [-0.25]

    References:
      Jianyu Wang, Qinghua Liu, Hao Liang, Gauri Joshi, H. Vincent Poor, *Tackling the
      Objective Inconsistency Problem in Heterogeneous Federated Optimization*, 2020.
    """
    check.rate(reference, "reference", low=0.0, high=math.inf, low_open=True)
    check.rate(exponent, "exponent", low=-math.inf, high=math.inf)

    def update_fn(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        steps: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, optax.EmptyState]:
        del params, extra_args
        made = jnp.maximum(_given(steps, "steps", "scale_by_steps"), 1)
        return trees.scaled(updates, (made / reference) ** exponent), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def scale_by_turnaround(
    workers: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies the updates by the share of all messages in which their worker comes.

    .. math:: u \leftarrow \frac{\tau + 1}{n} u

    ``staleness`` (:math:`\tau`) is an extra argument of ``update``. Where messages come
    one by one, a worker that is k times as fast sends k times as many, and the center
    goes to a minimum of its data more than of others'. A worker that makes one of
    :math:`\tau + 1` messages finds its anchor :math:`\tau` versions old; multiplied by
    that, all workers move the center by as much in the same time. (It is the opposite
    of `scale_by_staleness`, for another trouble: where data are alike, fast workers
    need no such correction, and late messages are the worse ones.)

    Args:
      workers: :math:`n`; None takes the extra argument ``workers`` of ``update``, how
        many there are now. Among workers of one speed a message counts as it is.

    Returns:
      A stateless transformation that keeps the dtypes of its updates.

    Raises:
      InvalidArgumentError: ``workers`` is not a positive whole number.
      MissingArgumentError: ``update`` came without ``staleness``, or nobody said how
        many workers there are.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(scale_by_turnaround(4), optax.sgd(1.0))
      >>> print(tx.update(jnp.ones(1), tx.init(jnp.zeros(1)), staleness=7)[0])
      [-2.]

    References:
      Ammar Mahran, Artavazd Maranjyan, Peter Richtárik, *Rescaled Asynchronous SGD:
      Optimal Distributed Optimization under Data and System Heterogeneity*, 2026. There
      rates are in proportion to times of computation, which staleness stands for here.
    """
    fixed = None if workers is None else check.positive_int(workers, "workers")

    def update_fn(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        staleness: Any = None,
        workers: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, optax.EmptyState]:
        del params, extra_args
        there = _given(
            workers if fixed is None else fixed, "workers", "scale_by_turnaround"
        )
        late = _given(staleness, "staleness", "scale_by_turnaround")
        return trees.scaled(updates, (late + 1) / there), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def _given(value: Any, name: str, who: str) -> jax.Array:
    check.extra_argument_given(value, f"{name}=1", who)
    return jnp.asarray(value, float)
