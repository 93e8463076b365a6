"""JAX trees as schemas of the wire, and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax.rules._trees import rebuild, structure
from agn_optax.service import center_pb2 as pb
from agn_optax.service._wire import Leaf, Schema

PyTree = Any


def schema_of(tree: PyTree, dtype: Any = None) -> Schema:
    """The schema of a tree, its leaves as ``dtype`` (None: as they are).

    Containers of other types than dict, list and tuple count as dicts of their
    children's names: that is what those build who do not know the types.
    """
    plain = _plain(tree)
    leaves = [
        Leaf(
            keystr(path),
            jnp.dtype(dtype or jnp.result_type(leaf)).name,
            tuple(jnp.shape(leaf)),
        )
        for path, leaf in tree_flatten_with_path(plain)[0]
    ]
    return Schema(leaves, json.dumps(structure(plain)))


def host_arrays(tree: PyTree) -> list[np.ndarray]:
    """The leaves in host memory, in the order and the dtypes of their schema.

    Waits for them, and copies what is elsewhere or of another dtype.
    """
    return [
        np.asarray(leaf, None if isinstance(leaf, jax.Array) else jnp.result_type(leaf))
        for leaf in jax.tree.leaves(_plain(tree))
    ]


def build(schema: Schema, leaves: Sequence[Any], like: PyTree = None) -> PyTree:
    """A tree of leaves: with the containers of ``like`` if that has the same schema.

    Otherwise with those of the schema: dicts, lists, tuples and None are what they
    were, and containers of other types become dicts of their children's names.

    Raises:
      ProtocolError: the structure of the schema is not one, or not that of its leaves.
    """
    if like is not None:
        old, treedef = jax.tree.flatten(like)
        places = _plain(jax.tree.unflatten(treedef, range(len(old))))
        if _fits(places, schema):
            by_place = dict(zip(jax.tree.leaves(places), leaves, strict=True))
            return jax.tree.unflatten(treedef, [by_place[i] for i in sorted(by_place)])
    try:
        tree = rebuild(json.loads(schema.structure), iter(leaves))
        fits = _fits(tree, schema)
    except (
        AttributeError,
        KeyError,
        RecursionError,
        StopIteration,
        TypeError,
        ValueError,
    ):
        fits = False
    if not fits:
        raise errors.ProtocolError("the structure of a tree is not that of its leaves")
    return tree


def _fits(tree: PyTree, schema: Schema) -> bool:
    paths = [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]
    return paths == [leaf.path for leaf in schema.leaves]


def _plain(tree: PyTree) -> PyTree:
    """``tree`` in dicts, lists and tuples."""
    if tree is None or all_leaves([tree]):
        return tree
    kind = type(tree)
    if kind is dict and all(type(key) in (str, int) for key in tree):
        return {key: _plain(child) for key, child in tree.items()}
    if kind in (list, tuple):
        return kind([_plain(child) for child in tree])
    # One level: everything but the root itself is a leaf.
    children = tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    names: Sequence[str | int] = [_name(path[-1]) for path, _ in children]
    if len(set(names)) < len(names) or len({type(name) for name in names}) > 1:
        names = range(len(children))  # what no dict can have for keys
    return {
        name: _plain(child) for name, (_, child) in zip(names, children, strict=True)
    }


def _name(key: Any) -> str | int:
    for attribute in ("key", "name", "idx"):
        value = getattr(key, attribute, None)
        if isinstance(value, str | int):
            return value
    return str(key)


def to_proto(schema: Schema) -> pb.Schema:
    """A schema as it is sent."""
    return pb.Schema(
        leaves=[
            pb.Leaf(path=leaf.path, dtype=leaf.dtype, shape=leaf.shape)
            for leaf in schema.leaves
        ],
        structure=schema.structure,
    )


def from_proto(schema: pb.Schema) -> Schema:
    """A schema as it came.

    Raises:
      ProtocolError: it makes no sense.
    """
    leaves = [
        Leaf(leaf.path, leaf.dtype, tuple(int(size) for size in leaf.shape))
        for leaf in schema.leaves
    ]
    return Schema(leaves, schema.structure)


def cast(tree: PyTree, schema: Schema) -> PyTree:
    """``tree`` in the dtypes of ``schema``; itself if it has them."""
    leaves = jax.tree.leaves(_plain(tree))
    dtypes = tuple(leaf.dtype for leaf in schema.leaves)
    if all(jnp.result_type(x).name == d for x, d in zip(leaves, dtypes, strict=True)):
        return tree
    return build(schema, _cast(leaves, dtypes), tree)


@functools.partial(jax.jit, static_argnums=1)
def _cast(leaves: list[Any], dtypes: tuple[str, ...]) -> list[jax.Array]:
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
