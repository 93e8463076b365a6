"""Automatic loss scaling, which keeps half-precision gradients in range."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round import axes_of_collectives, collectives

PyTree = Any


class LossScaleState(NamedTuple):
    """State of `loss_scaling`."""

    scale: jax.Array  # float32 scalar: factor for the loss
    good_steps: jax.Array  # int32 scalar: steps since the scale last changed
    skipped: jax.Array  # int32 scalar: number of skipped steps so far
    inner_state: PyTree  # state of the wrapped optimizer


def loss_scaling(
    inner: optax.GradientTransformation,
    *,
    initial_scale: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scale the loss automatically, and skip steps with non-finite gradients.

    The loss is multiplied by :math:`S` (`loss_scale`) before it is differentiated, and
    this optimizer divides the gradients by it:

    .. math::
        \text{all finite:}\quad & u = \text{inner}(g / S); \qquad
            S \leftarrow \min(f S, S_{max}) \text{ after } N \text{ such steps} \\
        \text{else:}\quad & u = 0; \qquad S \leftarrow \max(S / f, S_{min})

    A skipped step does not change the state of ``inner``, bit for bit: a rule of this
    package inside neither records nor counts the step. The lower bound of the scale
    prevents its permanent collapse after a series of bad gradients.

    After an `all_reduce`, one non-finite gradient makes the reduced gradient non-finite
    on every tower, so all towers of a worker skip together. All other axes over which
    ``inner`` communicates must be named in ``axis_name``, because otherwise workers
    would disagree on when to exchange, and would wait for each other forever; a missing
    axis is an error. An ``all_reduce(delay=1)`` belongs inside ``inner`` (with
    ``axis_name`` given), because gradients must be divided by the scale that they were
    computed with.

    The inner optimizer gets gradients in float32 or wider, because unscaled values may
    be out of the range of float16. Updates have the dtypes of the parameters.

    Args:
      inner: the optimizer to wrap, such as ``agn(...)``.
      initial_scale: S at the start.
      growth_interval: N, number of finite steps between two increases, a positive int.
      factor: f, greater than 1.
      min_scale: lower bound of S, positive.
      max_scale: upper bound of S.
      axis_name: axis, or tuple of axes, whose members skip together; None if the
        gradients are already reduced and ``inner`` does not exchange.

    Returns:
      An optimizer with `LossScaleState`.

    Raises:
      InvalidArgumentError: an option is out of its range.
      InvalidTypeError: ``inner`` is not an optimizer.
      InvalidArgumentError: (at ``update``) ``inner`` communicates over an axis that is
        not in ``axis_name``.
      UnboundAxisError: ``axis_name`` is not bound around ``update``.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> tx = agn_optax.loss_scaling(optax.sgd(1.0), initial_scale=4.0)
      >>> state = tx.init(jnp.zeros(()))
      >>> updates, state = tx.update(jnp.asarray(8.0), state)
      >>> print(updates, agn_optax.loss_scale(state))
      -2.0 4.0
      >>> updates, state = tx.update(jnp.asarray(jnp.inf), state)
      >>> print(updates, agn_optax.loss_scale(state))
      0.0 2.0

    References:
      Paulius Micikevicius et al., *Mixed Precision Training*, 2018.
    """
    inner = check.optimizer(inner, "inner")
    infinite = float("inf")
    check.rate(min_scale, "min_scale", low=0.0, high=infinite, low_open=True)
    check.rate(factor, "factor", low=1.0, high=infinite, low_open=True)
    check.rate(max_scale, "max_scale", low=min_scale, high=infinite)
    check.rate(initial_scale, "initial_scale", low=min_scale, high=max_scale)
    check.positive_int(growth_interval, "growth_interval")
    axes = collectives.names(axis_name)

    def init_fn(params: PyTree) -> LossScaleState:
        return LossScaleState(
            scale=jnp.asarray(initial_scale, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            inner_state=inner.init(params),
        )

    def update_fn(
        updates: PyTree, state: LossScaleState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LossScaleState]:
        check.axis_bound(axis_name)
        check.float_leaves(updates, "updates")
        leaves = jax.tree.leaves(updates)
        bad = sum((~jnp.isfinite(g).all()).astype(jnp.int32) for g in leaves)
        finite = collectives.psum(jnp.asarray(bad, jnp.int32), axes) == 0

        def unscale(g: Any) -> jax.Array:
            wide = trees.widened(g)
            return wide / state.scale.astype(wide.dtype)

        unscaled = jax.tree.map(unscale, updates)
        like = unscaled if params is None else params

        def step(carry: Any) -> Any:
            _, old_state = carry
            updates, new_state = inner.update(unscaled, old_state, params, **extra_args)
            # Wide gradients make some optimizers widen their state; keep its dtypes.
            new_state = jax.tree.map(
                lambda new, old: jnp.asarray(new, jnp.result_type(old)),
                *(new_state, old_state),
            )
            return optax.tree.cast_like(updates, like), new_state

        _check_axes(step, (unscaled, state.inner_state), axes)
        # The updates reuse the memory of the gradients.
        carry = (optax.tree.cast_like(unscaled, like), state.inner_state)
        stepped, inner_state = collectives.when(finite, step, carry)
        stepped = jax.tree.map(lambda u: jnp.where(finite, u, 0), stepped)
        good_steps = jnp.where(finite, optax.safe_increment(state.good_steps), 0)
        grows = good_steps >= growth_interval
        raised = jnp.minimum(state.scale * factor, max_scale)
        lowered = jnp.maximum(state.scale / factor, min_scale)
        scale = jnp.where(grows, raised, state.scale)
        one_more = optax.safe_increment(state.skipped)
        return stepped, LossScaleState(
            scale=jnp.where(finite, scale, lowered).astype(jnp.float32),
            good_steps=jnp.where(grows, 0, good_steps),
            skipped=jnp.where(finite, state.skipped, one_more),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_axes(step: Any, carry: Any, axes: collectives.Axes) -> None:
    """Raise if ``step`` communicates over axes whose members do not skip together."""
    jaxpr = jax.make_jaxpr(step)(carry).jaxpr
    others = axes_of_collectives(jaxpr) - set(axes)
    if others:
        raise errors.InvalidArgumentError(
            f"inner communicates over {', '.join(map(repr, sorted(others)))}, and if "
            "only some members of that axis skipped a step, the others would wait "
            "forever: name that axis in loss_scaling(..., axis_name=...), got "
            f"{axes or None}"
        )


def loss_scale(opt_state: PyTree) -> jax.Array:
    """Return the factor for the loss, to apply before it is differentiated.

    Args:
      opt_state: state of `loss_scaling`, or a state that contains one at any depth.

    Returns:
      A float32 scalar.

    Raises:
      InvalidArgumentError: ``opt_state`` has no such state, or several.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> tx = optax.chain(optax.clip(1.0), agn_optax.loss_scaling(optax.sgd(0.1)))
      >>> print(agn_optax.loss_scale(tx.init(jnp.zeros(3))))
      32768.0
    """
    found = trees.nodes(opt_state, LossScaleState)
    if len(found) != 1:
        raise errors.InvalidArgumentError(
            f"opt_state must hold the state of one loss_scaling(...), found "
            f"{len(found)} in {type(opt_state).__name__}"
        )
    return found[0][1].scale
