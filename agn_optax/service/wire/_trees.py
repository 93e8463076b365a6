"""Conversion between JAX trees and schemas with arrays."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from google.protobuf import proto
from google.protobuf.message import DecodeError
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import Leaf, description, trees
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule
from agn_optax.service import center_pb2 as pb
from agn_optax.service.wire._schema import Schema

PyTree = Any

# Limits of a schema: more than any known model needs, even if layers and experts are
# leaves of their own, and small enough that a malicious schema is read quickly.
MAX_LEAVES = 1 << 17
MAX_SCHEMA = 256 * MAX_LEAVES  # bytes: path, dtype and shape take about a hundred
MAX_NODES = 16 * MAX_LEAVES  # brackets and commas of a structure in JSON
MAX_DIMENSIONS = 64  # of a leaf: the limit of NumPy
# Bytes; smaller arrays are copied together, larger ones are passed to JAX.
_MAX_COPIED = 64 << 10


def schema_of(tree: PyTree) -> Schema:
    """Return the schema of a tree.

    Containers other than dicts, lists and tuples count as dicts with the names of their
    children: a receiver that does not know their types builds dicts.
    """
    order = leaf_order(jax.tree.structure(tree))
    leaves = [
        Leaf(path, jnp.result_type(leaf).name, jnp.shape(leaf))
        for path, leaf in zip(order.paths, wire_leaves(tree), strict=True)
    ]
    return Schema(leaves, order.structure)


class WireSchemas(NamedTuple):
    """The schemas of the trees that are sent between a center and its workers."""

    center: Schema  # the center, as it is pulled
    message: Schema  # the contribution of a worker
    answer: Schema  # the center in the answer to a worker


def wire_schemas(rule: Rule, like: PyTree) -> WireSchemas:
    """Return the schemas of a center with parameters like ``like``."""
    center, answer_dtype = schema_of(like), rule.codec.answers
    message = schema_of(rounds.contribution_like(rule, like))
    answer = center.cast(answer_dtype.name if answer_dtype else "")
    return WireSchemas(center, message, answer)


def has_schema_order(tree: PyTree) -> bool:
    """Return whether the schema of a tree has the leaves in the tree's order."""
    indices = leaf_order(jax.tree.structure(tree)).indices
    return indices == tuple(range(len(indices)))


def wire_leaves(tree: PyTree) -> list[Any]:
    """Return the leaves of a tree, in the order of its schema."""
    leaves, treedef = jax.tree.flatten(tree)
    return [leaves[index] for index in leaf_order(treedef).indices]


def host_arrays(tree: PyTree, schema: Schema | None = None) -> list[np.ndarray]:
    """Return the leaves in host memory, in the order of their schema.

    This waits for the leaves, and copies those in device memory. On an accelerator they
    are first cast to the dtypes of ``schema``, so that fewer bytes are transferred. On
    a CPU they are cast while they are sent, which needs no extra memory.
    """
    if schema is not None and jax.default_backend() != "cpu":
        tree = cast(tree, schema)
    leaves = wire_leaves(tree)
    return [
        np.asarray(host, None if isinstance(leaf, jax.Array) else jnp.result_type(leaf))
        for leaf, host in zip(leaves, trees.on_host(leaves), strict=True)
    ]


def build(schema: Schema, leaves: Sequence[Any], like: PyTree = None) -> PyTree:
    """Build a tree from leaves, in the containers of ``like`` if it has the same paths.

    Otherwise the containers are those of the schema: dicts, lists, tuples and None are
    restored, and other containers become dicts with the names of their children.

    Raises:
      ProtocolError: the schema's structure is malformed, or does not match its leaves.
    """
    treedef = jax.tree.structure(like)
    order = leaf_order(treedef)
    if like is None or order.paths != schema.paths:
        treedef = _treedef(schema.structure, schema.paths)
        order = leaf_order(treedef)
    ordered = [None] * len(order.indices)
    for index, leaf in zip(order.indices, leaves, strict=True):
        ordered[index] = leaf
    return jax.tree.unflatten(treedef, ordered)


class LeafOrder(NamedTuple):
    """The schema of a tree structure: the paths of its leaves, and its containers."""

    paths: tuple[str, ...]
    indices: tuple[int, ...]  # index in the tree of each leaf of the schema
    structure: str  # the containers as JSON


@functools.lru_cache(maxsize=128)
def leaf_order(treedef: Any) -> LeafOrder:
    """Return the order of the leaves of a tree structure in its schema."""
    plain = _as_builtin_containers(
        jax.tree.unflatten(treedef, range(treedef.num_leaves))
    )
    leaves = tree_flatten_with_path(plain)[0]
    return LeafOrder(
        tuple(keystr(path) for path, _ in leaves),
        tuple(index for _, index in leaves),
        json.dumps(description.structure(plain)),
    )


@functools.lru_cache(maxsize=32)
def _treedef(structure: str, paths: tuple[str, ...]) -> Any:
    """Return the tree structure that a schema describes, with leaves at these paths."""
    with contextlib.suppress(Exception):  # a malformed structure may raise anything
        tree = description.rebuild(json.loads(structure), iter(range(len(paths))))
        treedef = jax.tree.structure(tree)
        if leaf_order(treedef).paths == paths:
            return treedef
    raise errors.ProtocolError("the structure of a tree does not match its leaves")


def _as_builtin_containers(tree: PyTree) -> PyTree:
    """Return ``tree`` in dicts, lists and tuples."""
    if tree is None or all_leaves([tree]):
        return tree
    kind = type(tree)
    if kind is dict and all(type(key) in (str, int) for key in tree):
        return {key: _as_builtin_containers(child) for key, child in tree.items()}
    if kind in (list, tuple):
        return kind([_as_builtin_containers(child) for child in tree])
    # Flatten one level: every node below the root is a leaf.
    children = tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    names: Sequence[str | int] = [_name(path[-1]) for path, _ in children]
    if len(set(names)) < len(names) or len({type(name) for name in names}) > 1:
        names = range(len(children))  # the names cannot be keys of one dict
    return {
        name: _as_builtin_containers(child)
        for name, (_, child) in zip(names, children, strict=True)
    }


def _name(key: Any) -> str | int:
    for attribute in ("key", "name", "idx"):
        value = getattr(key, attribute, None)
        if isinstance(value, bool):  # True and 1 are the same key of a dict
            return int(value)
        if isinstance(value, str | int):
            return value
    return str(key)


def is_representable(dtype: str) -> bool:
    """Return whether JAX keeps a dtype; wide dtypes need ``jax_enable_x64``."""
    return bool(jax.dtypes.canonicalize_dtype(dtype).name == dtype)


def to_bytes(schema: Schema) -> bytes:
    """Return a schema as it is sent, an encoded `center_pb2.Schema`.

    Raises:
      InvalidArgumentError: the schema is larger than the receiver accepts.
    """
    leaves = io.BytesIO()
    for leaf in schema.leaves:
        proto.serialize_length_prefixed(pb.Leaf(**leaf._asdict()), leaves)
    message = pb.Schema(leaves=leaves.getvalue(), structure=schema.structure)
    data = message.SerializeToString()
    if problem := exceeded_limit(len(schema.leaves), len(data), schema.structure):
        raise errors.InvalidArgumentError(
            f"{problem}: stack leaves that are alike, such as those of equal layers"
        )
    return data


def from_bytes(data: bytes) -> Schema:
    """Decode a received schema, with bounded memory.

    Raises:
      ProtocolError: the schema is malformed or too large.
    """
    if problem := exceeded_limit(0, len(data), ""):
        raise errors.ProtocolError(problem)
    leaves: list[Leaf] = []
    try:
        message = pb.Schema.FromString(data)
        stream = io.BytesIO(message.leaves)
        while (leaf := proto.parse_length_prefixed(pb.Leaf, stream)) is not None:
            if len(leaf.shape) > MAX_DIMENSIONS:
                raise errors.ProtocolError(
                    f"leaf {leaf.path} has {len(leaf.shape)} dimensions, and at most "
                    f"{MAX_DIMENSIONS} can be sent"
                )
            leaves.append(Leaf(leaf.path, leaf.dtype, tuple(leaf.shape)))
            if len(leaves) > MAX_LEAVES:
                break
    except (DecodeError, ValueError) as error:
        raise errors.ProtocolError(f"not a schema: {error}") from None
    if problem := exceeded_limit(len(leaves), len(data), message.structure):
        raise errors.ProtocolError(problem)
    return Schema(leaves, message.structure)


def exceeded_limit(leaves: int, size: int, structure: str) -> str:
    """Return which limit a schema exceeds; "" if none."""
    if leaves > MAX_LEAVES:
        return f"a served tree has at most {MAX_LEAVES} leaves, got {leaves} or more"
    if size > MAX_SCHEMA:
        return f"the schema of a tree has at most {MAX_SCHEMA} bytes, got {size}"
    nodes = sum(map(structure.count, "[{,"))
    if nodes > MAX_NODES:
        return (
            f"the structure of a tree has at most {MAX_NODES} brackets and commas, "
            f"got {nodes}"
        )
    return ""


def cast(tree: PyTree, schema: Schema) -> PyTree:
    """Return ``tree`` in the dtypes of ``schema``, or itself if it has them."""
    leaves, dtypes = wire_leaves(tree), schema.numpy_dtypes
    if [getattr(leaf, "dtype", None) for leaf in leaves] == list(dtypes):
        return tree
    return build(schema, _cast(leaves, dtypes), tree)


@functools.partial(jax.jit, static_argnums=1)
def _cast(leaves: list[Any], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def to_device(arrays: Sequence[np.ndarray]) -> list[jax.Array]:
    """Return JAX arrays that may share the memory of ``arrays``; do not change these.

    Small arrays are copied by one program, because passing each to JAX takes longer.
    """
    small = [array for array in arrays if array.nbytes < _MAX_COPIED]
    large = [array for array in arrays if array.nbytes >= _MAX_COPIED]
    with jax.transfer_guard_host_to_device("allow"):  # an intended transfer
        copied = iter(_copied(small) if small else [])
    # device_put takes long even for an empty list.
    transferred = iter(jax.device_put(large) if large else [])
    return [
        next(copied if array.nbytes < _MAX_COPIED else transferred) for array in arrays
    ]


@jax.jit
def _copied(arrays: list[Any]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]
