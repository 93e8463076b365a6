"""JAX trees as schemas of the wire, and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service._wire import Leaf, Schema

PyTree = Any


def schema_of(tree: PyTree, dtype: Any = None) -> Schema:
    """The schema of a tree, its leaves as ``dtype`` (None: as they are)."""
    leaves = [
        Leaf(
            keystr(path),
            jnp.dtype(dtype or jnp.result_type(leaf)).name,
            tuple(jnp.shape(leaf)),
        )
        for path, leaf in tree_flatten_with_path(tree)[0]
    ]
    return Schema(leaves, json.dumps(_structure(tree)))


def host_arrays(tree: PyTree) -> list[np.ndarray]:
    """The leaves in host memory; waits for them, and copies what is elsewhere."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def build(schema: Schema, leaves: Sequence[Any], like: PyTree = None) -> PyTree:
    """A tree of leaves: with the containers of ``like`` if that has the same paths.

    Otherwise with those of the schema: dicts, lists, tuples and None are what they
    were, and containers of other types become dicts of their children's names.

    Raises:
      ProtocolError: the structure of the schema is not one, or not that of its leaves.
    """
    if like is not None:
        paths, treedef = tree_flatten_with_path(like)
        if [keystr(path) for path, _ in paths] == [leaf.path for leaf in schema.leaves]:
            return jax.tree.unflatten(treedef, leaves)
    rest = iter(leaves)
    try:
        tree = _rebuild(json.loads(schema.structure), rest)
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError):
        tree = None
    if len(jax.tree.leaves(tree)) != len(schema.leaves):
        raise errors.ProtocolError("the structure of a tree is not that of its leaves")
    return tree


def _structure(tree: PyTree) -> Any:
    """Containers in terms of JSON; a leaf is 0."""
    if tree is None:
        return None
    kind = type(tree)
    if kind is dict and all(type(key) in (str, int) for key in tree):
        return {"dict": [[key, _structure(tree[key])] for key in sorted(tree)]}
    if kind in (list, tuple):
        return {kind.__name__: [_structure(child) for child in tree]}
    # One level: everything but the root itself is a leaf.
    children = tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if len(children) == 1 and not children[0][0]:
        return 0
    return {"dict": [[_name(path[-1]), _structure(node)] for path, node in children]}


def _name(key: Any) -> str | int:
    for attribute in ("key", "name", "idx"):
        value = getattr(key, attribute, None)
        if isinstance(value, str | int):
            return value
    return str(key)


def _rebuild(structure: Any, leaves: Any) -> PyTree:
    if structure is None:
        return None
    if structure == 0:
        return next(leaves)
    ((kind, children),) = structure.items()
    if kind == "dict":
        return {key: _rebuild(child, leaves) for key, child in children}
    made = [_rebuild(child, leaves) for child in children]
    return {"list": list, "tuple": tuple}[kind](made)


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
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = tuple(leaf.dtype for leaf in schema.leaves)
    if all(jnp.result_type(x).name == d for x, d in zip(leaves, dtypes, strict=True)):
        return tree
    return jax.tree.unflatten(treedef, _cast(leaves, dtypes))


@functools.partial(jax.jit, static_argnums=1)
def _cast(leaves: list[Any], dtypes: tuple[str, ...]) -> list[jax.Array]:
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
