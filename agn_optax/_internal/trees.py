"""What optax.tree lacks and more than one module here needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax._internal import description
from agn_optax._internal.description import Description, Leaf

PyTree = Any


def copy(tree: PyTree, dtype: Any = None) -> PyTree:
    """``tree`` in buffers of its own, which outlive a donation of the original."""
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, dtype=dtype or jnp.result_type(leaf), copy=True),
        tree,
    )


def kinds(tree: PyTree) -> Any:
    """Structure, shapes and dtypes: what two trees have alike that are of one kind."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def nodes(tree: PyTree, kind: Any) -> list[tuple[Any, Any]]:
    """The nodes of a type, with their paths, wherever wrappers have put them."""
    leaves = tree_flatten_with_path(tree, is_leaf=lambda n: isinstance(n, kind))[0]
    return [(path, node) for path, node in leaves if isinstance(node, kind)]


def map_nodes(function: Callable[[Any], Any], tree: PyTree, kind: Any) -> PyTree:
    """``function`` of every node of a type; the leaves beside them stay."""

    def is_found(node: Any) -> bool:
        return isinstance(node, kind)

    return jax.tree.map(
        lambda node: function(node) if is_found(node) else node, tree, is_leaf=is_found
    )


def wider(*dtypes: Any) -> Any:
    """The dtype that holds all of ``dtypes``, also where JAX promotes strictly."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def wide(leaf: Any) -> Any:
    """The dtype to compute with a leaf in: float32, or the leaf's own if wider."""
    return wider(jnp.result_type(leaf), jnp.float32)


def widened(leaf: Any) -> jax.Array:
    """A leaf in the dtype to compute with it in."""
    return jnp.asarray(leaf).astype(wide(leaf))


def scaled(tree: PyTree, factor: jax.Array) -> PyTree:
    """``factor * tree`` in the dtypes of the tree, computed in float32 at least."""

    def scale(leaf: Any) -> jax.Array:
        return (widened(leaf) * factor.astype(wide(leaf))).astype(jnp.result_type(leaf))

    return jax.tree.map(scale, tree)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` as ``dtype`` would hold it, in its own dtype.

    A cast there and back says the same, but XLA may leave both out where that keeps
    more precision, and then two programs disagree about what was adopted.
    """
    own, other = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if other.bits >= own.bits:
        return x
    if other.nexp == own.nexp:
        return jax.lax.reduce_precision(x, int(other.nexp), int(other.nmant))
    return x.astype(dtype).astype(x.dtype)


def place_like(tree: PyTree, like: PyTree) -> PyTree:
    """``tree`` on the devices of ``like``; arrays already there stay what they are.

    In place of a leaf of ``like``, ``tree`` may have a tree of arrays.
    """

    def place(leaf: Any, other: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if not isinstance(other, jax.Array) or leaf.sharding == other.sharding:
            return leaf
        if not other.sharding.is_fully_addressable:  # each process has the same leaf
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(
                whole.shape, other.sharding, lambda index: whole[index]
            )
        return jax.device_put(leaf, other.sharding)

    return jax.tree.map(
        lambda other, part: jax.tree.map(lambda leaf: place(leaf, other), part),
        like,
        tree,
    )


def is_key(leaf: Any) -> bool:
    """Whether it is an array of random keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def nbytes(tree: PyTree, dtype: Any = None) -> int:
    """Of all leaves, as they are or in one dtype."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in leaves)


def describe(tree: PyTree, dtype: Any = None) -> Description:
    """Which leaves a tree has, and in which containers.

    Args:
      tree: of arrays, or of what says their shapes and dtypes.
      dtype: in place of that of each leaf; None keeps it.
    """
    leaves = [
        Leaf(keystr(path), _dtype_name(leaf, dtype), jnp.shape(leaf))
        for path, leaf in tree_flatten_with_path(tree)[0]
    ]
    return Description(leaves, _structure(tree))


def _dtype_name(leaf: Any, dtype: Any) -> str:
    try:
        return jnp.dtype(dtype or jnp.result_type(leaf)).name
    except TypeError:  # no array, or one of random keys
        return str(getattr(leaf, "dtype", type(leaf).__name__))


def _structure(tree: PyTree) -> Any:
    """The containers of a tree; None if they are not all dicts, lists and tuples."""
    treedef: Any = jax.tree.structure(tree)
    try:
        made = description.structure(tree)
        again = description.rebuild(made, iter(range(treedef.num_leaves)))
    except (KeyError, StopIteration, TypeError, ValueError):
        return None
    return made if str(jax.tree.structure(again)) == str(treedef) else None
