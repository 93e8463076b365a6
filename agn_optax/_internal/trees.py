"""Functions on trees that several modules need and `optax.tree` lacks."""

from __future__ import annotations

import functools
import hashlib
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
    """Return a copy of ``tree`` whose buffers survive a donation of the original."""
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, dtype=dtype or jnp.result_type(leaf), copy=True),
        tree,
    )


def on_host(tree: PyTree) -> PyTree:
    """Return the arrays of a tree in host memory; this waits for them.

    From an accelerator this is an explicit transfer, and all copies run at once: 1,000
    leaves of 400 KB take a quarter of the time of copies one after the other. Arrays on
    a CPU are not copied. For them `jax.device_get` would take seven times as long, and
    with jaxlib 0.11 it would keep later programs from updating them in place.
    """
    if all(map(_is_on_cpu, jax.tree.leaves(tree))):
        return jax.tree.map(np.asarray, tree)
    return jax.device_get(tree)


def _is_on_cpu(leaf: Any) -> bool:
    if jax.default_backend() == "cpu" or not isinstance(leaf, jax.Array):
        return True
    return all(device.platform == "cpu" for device in leaf.devices())


def abstract(tree: PyTree, dtype: Any = None) -> PyTree:
    """Return the shapes and dtypes of `copy`'s result."""
    dtype = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            jnp.shape(leaf), dtype or jnp.result_type(leaf)
        ),
        tree,
    )


def kinds(tree: PyTree) -> Any:
    """Return the structure, shapes and dtypes of a tree, to compare it with others."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def nodes(tree: PyTree, kind: Any) -> list[tuple[Any, Any]]:
    """Return all nodes of a type, at any depth, with their paths."""
    leaves = tree_flatten_with_path(tree, is_leaf=lambda n: isinstance(n, kind))[0]
    return [(path, node) for path, node in leaves if isinstance(node, kind)]


def map_nodes(function: Callable[[Any], Any], tree: PyTree, kind: Any) -> PyTree:
    """Replace every node of a type by ``function(node)``; keep all other leaves."""

    def is_found(node: Any) -> bool:
        return isinstance(node, kind)

    return jax.tree.map(
        lambda node: function(node) if is_found(node) else node, tree, is_leaf=is_found
    )


def wider(*dtypes: Any) -> Any:
    """Return the promoted dtype of ``dtypes``, even under strict dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def wide(leaf: Any) -> Any:
    """Return the dtype for computing with a leaf: float32, or its own if wider."""
    return wider(jnp.result_type(leaf), jnp.float32)


def widened(leaf: Any) -> jax.Array:
    """Return a leaf as an array of the dtype `wide` returns for it."""
    return jnp.asarray(leaf).astype(wide(leaf))


def scaled(tree: PyTree, factor: jax.Array) -> PyTree:
    """Return ``factor * tree`` in the tree's dtypes, computed in float32 or wider."""

    def scale(leaf: Any) -> jax.Array:
        return (widened(leaf) * factor.astype(wide(leaf))).astype(jnp.result_type(leaf))

    return jax.tree.map(scale, tree)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round ``x`` to the precision of ``dtype``; the result keeps the dtype of ``x``.

    A cast to ``dtype`` and back has the same result, but XLA may remove both casts to
    keep more precision, and then two programs would disagree about the adopted center.
    """
    wide, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if narrow.bits >= wide.bits:
        return x
    if narrow.nexp == wide.nexp:
        return jax.lax.reduce_precision(x, int(narrow.nexp), int(narrow.nmant))
    return x.astype(dtype).astype(x.dtype)


def place_like(tree: PyTree, like: PyTree) -> PyTree:
    """Put ``tree`` on the devices of ``like``; keep arrays that are already there.

    In place of a leaf of ``like``, ``tree`` may have a tree of arrays.
    """

    def place(leaf: Any, other: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array):  # a check is faster than the function
            leaf = jnp.asarray(leaf)
        if not isinstance(other, jax.Array) or leaf.sharding == other.sharding:
            return leaf
        if not leaf.is_fully_addressable:  # programs give it the sharding of `other`
            return leaf
        return jax.device_put(leaf, other.sharding)

    return jax.tree.map(
        lambda other, part: jax.tree.map(lambda leaf: place(leaf, other), part),
        like,
        tree,
    )


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of random keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def without_keys(tree: PyTree) -> PyTree:
    """Replace arrays of random keys by their data."""
    return jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree
    )


def with_keys(tree: PyTree, like: PyTree) -> PyTree:
    """Undo `without_keys`, where ``like``, which may be abstract, has random keys."""

    def wrap(wanted: Any, leaf: Any) -> Any:
        if not is_key(wanted):
            return leaf
        # The name of the algorithm is read from an array, not from its dtype.
        impl = jax.random.key_impl(jnp.empty((), wanted.dtype))
        return jax.random.wrap_key_data(leaf, impl=impl)

    return jax.tree.map(wrap, like, tree)


def nbytes(tree: PyTree, dtype: Any = None) -> int:
    """Return the size of all leaves in bytes, in their dtypes or all in one dtype."""
    leaves = jax.tree.leaves(tree)
    if dtype is not None:
        return sum(leaf.size for leaf in leaves) * jnp.dtype(dtype).itemsize
    # Random keys have a size, too, but no dtype of NumPy.
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def digest(tree: PyTree) -> str:
    """Return a hash of all paths, dtypes, shapes and values of a tree of arrays."""
    hashed = hashlib.blake2b(describe(tree).hash, digest_size=16)
    for leaf in jax.tree.leaves(without_keys(tree)):
        hashed.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()


def describe(tree: PyTree, dtype: Any = None) -> Description:
    """Return the description of a tree: its leaves and containers.

    Args:
      tree: a tree of arrays, or of objects with a shape and a dtype.
      dtype: replaces the dtype of each leaf; None keeps it.
    """
    leaves = [
        Leaf(keystr(path), _dtype_name(leaf, dtype), jnp.shape(leaf))
        for path, leaf in tree_flatten_with_path(tree)[0]
    ]
    return Description(leaves, _structure(tree))


def _dtype_name(leaf: Any, dtype: Any) -> str:
    try:
        return jnp.dtype(dtype or jnp.result_type(leaf)).name
    except TypeError:  # not an array, or an array of random keys
        return str(getattr(leaf, "dtype", type(leaf).__name__))


def _structure(tree: PyTree) -> Any:
    """Return the `description.structure` of a tree.

    Return None if the tree has other containers than dicts, lists, tuples and None.
    """
    treedef: Any = jax.tree.structure(tree)
    try:
        structure = description.structure(tree)
        rebuilt = description.rebuild(structure, iter(range(treedef.num_leaves)))
    except (KeyError, StopIteration, TypeError, ValueError):
        return None
    return structure if str(jax.tree.structure(rebuilt)) == str(treedef) else None
