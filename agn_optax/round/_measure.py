"""Numbers about an exchange that a worker reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax._internal import trees
from agn_optax.round._round import LocalState, contribute, decode, encode
from agn_optax.rules import Rule, codecs

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


def codec_error(
    rule: Rule, state: LocalState, params: PyTree, center: PyTree
) -> jax.Array:
    r"""Return the codec's relative error, :math:`\|\hat k - k\| / \|k\|`.

    :math:`k` is the contribution and :math:`\hat k` the decoded one. ``center`` is the
    anchor if the state keeps none.
    """
    if rule.codec.is_identity:
        return jnp.zeros(())
    plain = dataclasses.replace(rule, codec=codecs.identity())
    whole, _ = contribute(plain, state, params, center)
    sent, _ = encode(rule, whole, state.codec_state)
    lost = distance(decode(rule, sent, whole), whole)
    size = norm(whole)
    return jnp.where(size > 0, lost / jnp.where(size > 0, size, 1), 0)
