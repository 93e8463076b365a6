"""Pytrees as nested dictionaries of arrays, with the names in the paths of the leaves.

A checkpoint therefore depends on no container type, and Orbax alone can read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax._internal import Leaf, trees

PyTree = Any
Nested = dict[str, Any]


def describe(tree: PyTree) -> list[Leaf]:
    """Return a description of the leaves of a tree, in the form that is saved."""
    return list(trees.describe(_plain(tree)).leaves)


def nested(tree: PyTree) -> Nested:
    """Return a tree of one or more nodes in the form that Orbax saves.

    Leaves without elements are left out, because Orbax rejects them.
    """
    return _nest(tree_flatten_with_path(_plain(tree))[0])


def abstract(like: PyTree, leaves: Sequence[Leaf]) -> Nested:
    """Return the tree to load from Orbax, with ``leaves`` as NumPy arrays."""
    paths = [path for path, _ in tree_flatten_with_path(like)[0]]
    empty = [np.empty(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]
    return _nest(list(zip(paths, empty, strict=True)))


def filled(like: PyTree, leaves: Sequence[Leaf], kept: Nested) -> PyTree:
    """Return a loaded tree in the containers of ``like``."""
    paths, treedef = tree_flatten_with_path(like)
    made = []
    for (path, other), leaf in zip(paths, leaves, strict=True):
        found: Any = np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
        if found.size:
            found = kept
            for name in _names(path):
                found = found[name]
        if trees.is_key(other):
            found = jax.random.wrap_key_data(found, impl=jax.random.key_impl(other))
        made.append(found)
    return jax.tree.unflatten(treedef, made)


def _nest(leaves: Sequence[tuple[Any, Any]]) -> Nested:
    made: Nested = {}
    for path, leaf in leaves:
        if not math.prod(leaf.shape):
            continue
        *names, last = _names(path)
        node = made
        for name in names:
            node = node.setdefault(name, {})
        node[last] = leaf
    return made


def _names(path: Any) -> list[str]:
    return [keystr((key,), simple=True) for key in path]


def _plain(tree: PyTree) -> PyTree:
    """Return a tree with random keys as their data, and with numbers as arrays."""

    def plain(leaf: Any) -> Any:
        if trees.is_key(leaf):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.eval_shape(jax.random.key_data, leaf)
            return jax.random.key_data(leaf)
        is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
        return leaf if is_array else np.asarray(leaf)

    return jax.tree.map(plain, tree)
