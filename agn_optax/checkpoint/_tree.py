"""Conversion of pytrees to the form that Orbax saves, and back.

Orbax itself stores containers as dictionaries and lists, with the names in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax._internal import Leaf, trees

PyTree = Any


def describe(tree: PyTree) -> list[Leaf]:
    """Return a description of the leaves of a tree, in the form that is saved."""
    return list(trees.describe(jax.eval_shape(_plain, tree)).leaves)


def saved(tree: PyTree) -> PyTree:
    """Return a tree in the form that Orbax saves."""
    return _without_empty(_plain(tree))


def check_is_of_all_processes(tree: PyTree, name: str) -> None:
    """Raise if a tree has arrays that only one of several processes has.

    Raises:
      InvalidTypeError: it has some.
    """
    if jax.process_count() == 1:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            raise errors.InvalidTypeError(
                f"{name}{jax.tree_util.keystr(path)} is an array of this process "
                "alone: give a NumPy array, for which the first process's is saved, or "
                "an array on a mesh of all processes"
            )


def abstract(like: PyTree, leaves: Sequence[Leaf]) -> PyTree:
    """Return the tree to load from Orbax, with ``leaves`` as NumPy arrays.

    Leaves for which ``like`` has an abstract array with a sharding are loaded onto its
    devices.
    """

    def placed(wanted: Any, array: Any) -> Any:
        if not isinstance(wanted, jax.ShapeDtypeStruct) or wanted.sharding is None:
            return array
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=wanted.sharding)

    return _without_empty(jax.tree.map(placed, like, _arrays(like, leaves)))


def filled(like: PyTree, leaves: Sequence[Leaf], loaded: PyTree) -> PyTree:
    """Return a loaded tree in the form of ``like``."""

    def fill(empty: Any, array: Any) -> Any:
        return empty if array is None else array

    return trees.with_keys(jax.tree.map(fill, _arrays(like, leaves), loaded), like)


def _arrays(like: PyTree, leaves: Sequence[Leaf]) -> PyTree:
    arrays = [np.empty(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _plain(tree: PyTree) -> PyTree:
    """Replace random keys by their data, and numbers by arrays."""

    def plain(leaf: Any) -> Any:
        return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)

    return jax.tree.map(plain, trees.without_keys(tree))


def _without_empty(tree: PyTree) -> PyTree:
    """Replace arrays without elements, which Orbax rejects, by None."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)
