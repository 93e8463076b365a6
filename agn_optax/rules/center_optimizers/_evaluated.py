"""The point to evaluate for center optimizers whose center is another point."""

from __future__ import annotations

from typing import Any

import jax
import optax

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.rules.center_optimizers._lookahead import LookaheadState
from agn_optax.rules.center_optimizers._primal_averaging import PrimalAveragingState

PyTree = Any
_KINDS = (LookaheadState, PrimalAveragingState, optax.contrib.ScheduleFreeState)


def evaluated(center_state: PyTree, center: PyTree) -> PyTree:
    r"""Return the parameters to evaluate if these are not the center.

    With most center optimizers, the center is evaluated. With some, the center is the
    point where workers start, and another point is evaluated: for `momentum_lookahead`
    and `heloco` this function returns the base point :math:`c + \eta \mu m`, for
    `primal_averaging` and ``optax.contrib.schedule_free`` the average.

    Args:
      center_state: the center optimizer's state, such as ``state.center_state`` of a
        drop-in, or the ``center_state`` of ``LocalCenter.save()``.
      center: the center that belongs to this state.

    Returns:
      Parameters with the structure, shapes and dtypes of the center.

    Raises:
      InvalidArgumentError: the state has none of these optimizers, or several.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> outer = agn_optax.center_optimizers.primal_averaging(optax.sgd(1.0))
      >>> tx = agn_optax.diloco(optax.sgd(0.1), period=1, center=outer)
      >>> params = jnp.ones(1)
      >>> updates, state = tx.update(jnp.ones(1), tx.init(params), params)
      >>> print(state.center)
      [0.963]
      >>> x = agn_optax.center_optimizers.evaluated(state.center_state, state.center)
      >>> print(x)
      [0.99]

    References:
      Aaron Defazio et al., *The Road Less Scheduled*, 2024.
    """
    found = [node for _, node in trees.nodes(center_state, _KINDS)]
    if len(found) != 1:
        names = ", ".join(type(node).__name__ for node in found) or "none"
        raise errors.InvalidArgumentError(
            "center_state must have one state of momentum_lookahead, heloco, "
            f"primal_averaging or schedule_free, got {names}; with other center "
            "optimizers evaluate the center"
        )
    (state,) = found
    if isinstance(state, optax.contrib.ScheduleFreeState):
        return optax.contrib.schedule_free_eval_params(state, center)

    is_ahead = isinstance(state, LookaheadState)

    def point(c: jax.Array, other: jax.Array) -> jax.Array:
        wide = trees.wide(c)
        center, other = c.astype(wide), other.astype(wide)
        if is_ahead:  # the center is ahead of the base point by reach * momentum
            result = center + state.reach.astype(wide) * other
        else:  # the center is between z and the average
            result = other + (center - other) / state.interpolation.astype(wide)
        return result.astype(c.dtype)

    return jax.tree.map(point, center, state.momentum if is_ahead else state.z)
