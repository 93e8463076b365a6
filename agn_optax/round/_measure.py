"""Diagnostics of an exchange, computed before it is made by pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import trees
from agn_optax.round._round import (
    LocalState,
    contribute,
    decode,
    encode,
    message_of,
)
from agn_optax.rules import Rule, codecs

PyTree = Any

# State fields in which optax optimizers keep their momentum.
_MOMENTA = ("trace", "mu")


def measure(
    rule: Rule,
    state: LocalState,
    params: PyTree,
    center: PyTree,
    center_state: PyTree,
    anchor: PyTree,
) -> dict[str, jax.Array]:
    """Return diagnostics of the exchange that a worker would make now.

    `Phases.measure` describes them. ``anchor`` is used if the state keeps no anchor.
    """
    sent, _ = contribute(rule, state, params, anchor)
    message = message_of(rule, sent, center)
    measured = {
        "message_norm": norm(message),
        "distance": distance(params, center),
        "codec_error": codec_error(rule, state, params, anchor),
    }
    momentum = _momentum(center_state, center)
    if momentum is not None:
        measured["momentum_cosine"] = _cosine(message, momentum)
    return measured


def norm(tree: PyTree) -> jax.Array:
    """Return the global norm of a tree, in float32 or wider."""
    return jnp.sqrt(_dot(tree, tree))


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


def _dot(a: PyTree, b: PyTree) -> jax.Array:
    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        wide = trees.wider(x.dtype, y.dtype, jnp.float32)
        return jnp.vdot(x.astype(wide), y.astype(wide))

    dots = jax.tree.leaves(jax.tree.map(dot, a, b))
    return sum(dots, start=jnp.zeros(()))


def _momentum(center_state: PyTree, center: PyTree) -> PyTree:
    """Return the center optimizer's momentum, or None.

    None if the optimizer does not keep one for every parameter.
    """
    for name in _MOMENTA:
        for _, kept in optax.tree.get_all_with_path(center_state, name):
            structure: Any = jax.tree.structure(kept)
            if structure == jax.tree.structure(center):
                return kept
    return None


def _cosine(a: PyTree, b: PyTree) -> jax.Array:
    sizes = norm(a) * norm(b)
    return jnp.where(sizes > 0, _dot(a, b) / jnp.where(sizes > 0, sizes, 1), 0)
