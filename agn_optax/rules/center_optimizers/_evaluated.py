"""The point to evaluate for center optimizers whose center is another point."""

from __future__ import annotations

from typing import Any

import jax
import optax

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.rules.center_optimizers._lookahead import LookaheadState

PyTree = Any
_KINDS = (LookaheadState, optax.contrib.ScheduleFreeState)


def evaluated(center_state: PyTree, center: PyTree) -> PyTree:
    r"""Return the parameters to evaluate if these are not the center.

    With most center optimizers, the center is evaluated. With some, the center is the
    point where workers start, and another point is evaluated: for `momentum_lookahead`
    and `heloco` this function returns the base point :math:`c + \eta \mu m`, for
    ``optax.contrib.schedule_free`` the average.

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
      >>> outer = agn_optax.center_optimizers.momentum_lookahead(0.5, 0.5)
      >>> tx = agn_optax.diloco(optax.sgd(1.0), period=1, center=outer)
      >>> params = jnp.zeros(1)
      >>> updates, state = tx.update(jnp.ones(1), tx.init(params), params)
      >>> print(state.center)
      [-0.75]
      >>> x = agn_optax.center_optimizers.evaluated(state.center_state, state.center)
      >>> print(x)
      [-0.625]

    References:
      Aaron Defazio et al., *The Road Less Scheduled*, 2024.
    """
    found = [node for _, node in trees.nodes(center_state, _KINDS)]
    if len(found) != 1:
        names = ", ".join(type(node).__name__ for node in found) or "none"
        raise errors.InvalidArgumentError(
            "center_state must have one state of momentum_lookahead, heloco or "
            f"schedule_free, got {names}; with other center optimizers evaluate the "
            "center"
        )
    (state,) = found
    if isinstance(state, optax.contrib.ScheduleFreeState):
        return optax.contrib.schedule_free_eval_params(state, center)

    def base_point(c: jax.Array, momentum: jax.Array) -> jax.Array:
        wide = trees.wide(c)
        base = c.astype(wide) + state.reach.astype(wide) * momentum.astype(wide)
        return base.astype(c.dtype)

    return jax.tree.map(base_point, center, state.momentum)
