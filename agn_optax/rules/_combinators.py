"""The optax transformations that rules are built of; each also works in a chain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees

PyTree = Any


class AccumulateState(NamedTuple):
    """State of `accumulate`."""

    sum: PyTree  # shapes of the updates, dtype of the accumulator
    steps: jax.Array  # int32 scalar: number of updates in the sum


def accumulate(*, dtype: Any = None) -> optax.GradientTransformationExtraArgs:
    r"""Replace the updates by their running sum.

    .. math:: s_t = s_{t-1} + u_t, \qquad s_0 = 0

    The transformation never resets the sum. The owner of the state starts a new sum
    with a fresh ``init``, as an exchange does.

    Args:
      dtype: floating dtype of the sum; None keeps the dtype of the parameters. A
        float32 sum of bfloat16 gradients does not lose small gradients.

    Returns:
      A transformation whose updates are the sums so far and whose state has ``.sum``
      and ``.steps``.

    Raises:
      InvalidArgumentError: ``dtype`` is not a floating dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = accumulate()
      >>> state = tx.init(jnp.zeros(2))
      >>> for _ in range(3):
      ...     total, state = tx.update(jnp.array([1.0, 2.0]), state)
      >>> print(total, state.steps)
      [3. 6.] 3

    References:
      Joeri Hermans, Gerasimos Spanakis, Rico Möckel, *Accumulated Gradient
      Normalization*, 2017.
    """
    dtype = check.float_dtype(dtype, "dtype")

    def zeros(leaf: Any) -> jax.Array:
        return jnp.zeros_like(leaf, dtype=dtype or jnp.result_type(leaf))

    def init_fn(params: PyTree) -> AccumulateState:
        return AccumulateState(jax.tree.map(zeros, params), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree,
        state: AccumulateState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, AccumulateState]:
        check.same_tree(updates, state.sum, "updates", "the accumulated sum")
        total = jax.tree.map(
            lambda s, u: s + jnp.asarray(u, s.dtype), state.sum, updates
        )
        return total, AccumulateState(total, optax.safe_increment(state.steps))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class NormalizeState(NamedTuple):
    """State of `normalize`."""

    updates_seen: jax.Array  # int32 scalar: number of updates since init


def normalize() -> optax.GradientTransformationExtraArgs:
    r"""Divide the updates by the number of steps that they are the sum of.

    .. math:: u \leftarrow u / \max(\text{steps}, 1)

    ``steps`` is an extra argument of ``update``. Without it, the transformation counts
    its own updates since ``init``. That number equals the steps of an `accumulate`
    before it in the chain: ``optax.chain(accumulate(), normalize())`` is the running
    mean.

    Returns:
      A transformation that keeps the dtypes of its updates.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(accumulate(), normalize())
      >>> state = tx.init(jnp.zeros(()))
      >>> for gradient in (1.0, 2.0, 6.0):
      ...     mean, state = tx.update(jnp.asarray(gradient), state)
      >>> print(mean)
      3.0
      >>> tx = normalize()
      >>> print(tx.update(jnp.asarray(6.0), tx.init(jnp.zeros(())), steps=4)[0])
      1.5

    References:
      Joeri Hermans, Gerasimos Spanakis, Rico Möckel, *Accumulated Gradient
      Normalization*, 2017.
    """

    def init_fn(params: PyTree) -> NormalizeState:
        return NormalizeState(updates_seen=jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree,
        state: NormalizeState,
        params: PyTree = None,
        *,
        steps: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, NormalizeState]:
        seen = optax.safe_increment(state.updates_seen)
        return per_step(updates, seen if steps is None else steps), NormalizeState(seen)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def elastic_pull(rate: Any) -> optax.GradientTransformationExtraArgs:
    r"""Add the gradient of an elastic spring between the parameters and a center.

    .. math:: u \leftarrow u + \text{rate} \cdot (x - c)

    The added term is the gradient of
    :math:`\tfrac{\text{rate}}{2} \lVert x - c \rVert^2`. ``center`` is an extra
    argument of ``update`` with the structure and shapes of the parameters.

    Args:
      rate: stiffness of the spring, a non-negative scalar (may be a traced array).

    Returns:
      A stateless transformation that keeps the dtypes of its updates. The difference is
      computed in the widest of the dtypes of updates, parameters and center.

    Raises:
      InvalidArgumentError: ``rate`` is negative, infinite or not a number.
      MissingArgumentError: ``update`` is called without ``params`` or ``center``.
      TreeMismatchError: updates, parameters and center are different trees.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = elastic_pull(0.5)
      >>> x, c = jnp.array([1.0, 3.0]), jnp.array([1.0, 1.0])
      >>> print(tx.update(jnp.zeros(2), tx.init(x), x, center=c)[0])
      [0. 1.]

    References:
      Sixin Zhang, Anna Choromanska, Yann LeCun, *Deep learning with Elastic Averaging
      SGD*, 2015.
    """
    check.rate(rate, "rate", low=0.0, high=float("inf"))

    def pulled(
        updates: PyTree, params: PyTree, *, center: PyTree = None, **extra_args: Any
    ) -> PyTree:
        check.params_given(params, "elastic_pull")
        check.extra_argument_given(center, "center=center", "elastic_pull")
        check.same_tree(updates, params, "updates", "params")
        check.same_tree(center, params, "center", "params")

        def pull(u: Any, x: Any, c: Any) -> jax.Array:
            u, x, c = jnp.asarray(u), jnp.asarray(x), jnp.asarray(c)
            wide = trees.wider(u.dtype, x.dtype, c.dtype)
            spring = jnp.asarray(rate, wide) * (x.astype(wide) - c.astype(wide))
            return (u.astype(wide) + spring).astype(u.dtype)

        return jax.tree.map(pull, updates, params, center)

    return stateless(pulled)


def scale_by_staleness(
    *, exponent: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    r"""Divide the updates by their staleness plus one, or by a power of it.

    .. math:: u \leftarrow (\tau + 1)^{-a} u

    ``staleness`` (:math:`\tau`), the number of center updates since the message's
    anchor was read, is an extra argument of ``update``: a non-negative integer scalar.
    The transformation makes late messages move the center less. Use it as the
    ``discount`` of a rule, which scales every message before the messages of a round
    are combined; or as the first part of a center optimizer, for messages that come one
    by one.

    Args:
      exponent: :math:`a`, at least 0.

    Returns:
      A stateless transformation that keeps the dtypes of its updates.

    Raises:
      MissingArgumentError: ``update`` is called without ``staleness``.
      InvalidArgumentError: ``exponent`` is out of range, or ``staleness`` is negative
        (checked only if it is not traced).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(scale_by_staleness(), optax.sgd(1.0))
      >>> print(tx.update(jnp.array([8.0]), tx.init(jnp.zeros(1)), staleness=3)[0])
      [-2.]

    References:
      Jiawei Jiang, Bin Cui, Ce Zhang, Lele Yu, *Heterogeneity-aware Distributed
      Parameter Servers*, 2017.
      Cong Xie, Sanmi Koyejo, Indranil Gupta, *Asynchronous Federated Optimization*,
      2019, for other powers.
    """
    check.rate(exponent, "exponent", low=0.0, high=math.inf)

    def discounted(
        updates: PyTree, params: PyTree, *, staleness: Any = None, **extra_args: Any
    ) -> PyTree:
        check.extra_argument_given(staleness, "staleness=0", "scale_by_staleness")
        if not check.is_traced(staleness) and staleness < 0:
            raise errors.InvalidArgumentError(
                f"staleness must not be negative, got {staleness}"
            )
        staleness = jnp.asarray(staleness)
        if exponent == 1.0:
            return _divide(updates, staleness + 1)
        return _divide(updates, (staleness.astype(float) + 1) ** exponent)

    return stateless(discounted)


def stateless(update: Callable[..., PyTree]) -> optax.GradientTransformationExtraArgs:
    """Return a transformation without state, like `optax.stateless`.

    Args:
      update: ``(updates, params, **extra_args) -> updates``.
    """

    def update_fn(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, optax.EmptyState]:
        return update(updates, params, **extra_args), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def per_step(tree: PyTree, steps: Any) -> PyTree:
    """Return a sum over several steps, divided by their number."""
    return _divide(tree, jnp.maximum(steps, 1))


def _divide(updates: PyTree, divisor: jax.Array) -> PyTree:
    """Return ``updates / divisor``, computed in float32 or wider.

    bfloat16 cannot represent every integer: 257 is the first one that it lacks.
    """

    def divide(u: Any) -> jax.Array:
        wide = trees.widened(u)
        return (wide / divisor.astype(wide.dtype)).astype(jnp.result_type(u))

    return jax.tree.map(divide, updates)
