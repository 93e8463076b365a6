"""Numbers that a worker reports about an exchange."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agn_optax._internal import trees

PyTree = Any


def norm(tree: PyTree) -> jax.Array:
    """Return the global norm of a tree, in float32 or wider."""
    wide = [trees.widened(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum((jnp.vdot(leaf, leaf) for leaf in wide), start=jnp.zeros(())))


def distance(params: PyTree, center: PyTree) -> jax.Array:
    r"""Return :math:`\|x - c\|`, in the wider of their dtypes and float32."""

    def difference(x: jax.Array, c: jax.Array) -> jax.Array:
        wide = trees.wider(x.dtype, c.dtype, jnp.float32)
        return x.astype(wide) - c.astype(wide)

    return norm(jax.tree.map(difference, params, center))
