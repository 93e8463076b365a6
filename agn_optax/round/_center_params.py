"""Finding the center in an optimizer state, wherever wrappers have put it."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.tree_util import keystr

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.round._exchange import ExchangeState
from agn_optax.round._placement import whole_center

PyTree = Any


def center_params(opt_state: PyTree, params: PyTree = None) -> PyTree:
    """The center variable held by an optimizer state.

    Looks through ``chain``, ``masked``, ``multi_transform``, ``inject_hyperparams``,
    ``MultiSteps`` and any other wrapper whose state is a pytree.

    Args:
      opt_state: state of one of this package's optimizers, or a state that contains it.
      params: current parameters, which fill in for leaves that a mask keeps away from
        the center. None leaves them as ``optax.MaskedNode()``.

    Returns:
      The center, with the structure and shapes of the parameters and the center's
      dtypes. These are the arrays of the state itself: copy them if you donate it.

    Raises:
      CenterNotFoundError: there is none.
      TreeMismatchError: ``params`` is another tree than the center.
      AmbiguousCenterError: there is more than one; pass the part of the state that you
        mean.
      UnboundAxisError: the center is in shards, and the axis of their towers is not
        bound here; `Towers.center_params` reads it from outside.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> tx = optax.chain(optax.clip(1.0), agn_optax.agn(optax.sgd(0.1), period=4))
      >>> print(agn_optax.center_params(tx.init(jnp.array([1.0, 2.0]))))
      [1. 2.]
    """
    center = whole_center(find_state(opt_state).center)
    if params is None:
        return center

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    try:
        return jax.tree.map(
            lambda c, p: p if is_masked(c) else c, center, params, is_leaf=is_masked
        )
    except ValueError as error:
        raise errors.TreeMismatchError(
            f"params and center are different trees: {error}"
        ) from error


def find_state(opt_state: PyTree) -> ExchangeState:
    """The one `ExchangeState` in an optimizer state, wherever wrappers have put it."""
    found = trees.nodes(opt_state, ExchangeState)
    if not found:
        raise errors.CenterNotFoundError(
            f"no center in this {type(opt_state).__name__}: expected the state of one "
            "of agn_optax's optimizers, or of a chain, mask or other wrapper around "
            "it. The center of a Worker is center.pull().params"
        )
    if len(found) > 1:
        places = ", ".join(f"opt_state{keystr(path)}" for path, _ in found)
        raise errors.AmbiguousCenterError(
            f"expected one center, found {len(found)}: at {places}; pass one of them"
        )
    return found[0][1]
