"""Conversion between JAX trees and schemas with arrays."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from google.protobuf import proto
from google.protobuf.message import DecodeError
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import Leaf, description
from agn_optax.rules import Rule
from agn_optax.service import center_pb2 as pb
from agn_optax.service.wire._schema import Schema

PyTree = Any

# Limits of a schema: more than any known model needs, even if layers and experts are
# leaves of their own, and little enough that reading a malicious schema takes no time.
MOST_LEAVES = 1 << 17
MOST_SCHEMA = 256 * MOST_LEAVES  # bytes: path, dtype and shape take about a hundred
MOST_NODES = 16 * MOST_LEAVES  # brackets and commas of a structure in JSON
MOST_DIMENSIONS = 64  # of a leaf: the limit of NumPy
_SMALL = 64 << 10  # bytes; larger arrays are passed to JAX faster than they are copied


def schema_of(tree: PyTree) -> Schema:
    """Return the schema of a tree.

    Containers other than dicts, lists and tuples count as dicts by the names of their
    children, as which a receiver that does not know their types builds them.
    """
    plan = plan_of(jax.tree.structure(tree))
    leaves = [
        Leaf(path, jnp.result_type(leaf).name, jnp.shape(leaf))
        for path, leaf in zip(plan.paths, wire_leaves(tree), strict=True)
    ]
    return Schema(leaves, plan.structure)


class Travelling(NamedTuple):
    """The schemas of the trees that are sent between a center and its workers."""

    center: Schema  # the center, as it is pulled
    message: Schema  # the contribution of a worker
    answer: Schema  # the center in the answer to a worker
    # Abstract delta between broadcast parameters, and the schema of a number of deltas.
    difference: PyTree = None
    differences: Callable[[int], Schema] | None = None


def travelling(rule: Rule, like: PyTree) -> Travelling:
    """Return the schemas of a center with parameters like these, and its workers."""
    center, answers = schema_of(like), rule.codec.answer_dtype
    message = schema_of(rounds.contribution_like(rule, like))
    answer = center.cast(answers.name if answers else "")
    if (one := rounds.delta_like(rule, like)) is None:
        return Travelling(center, message, answer)
    differences = functools.lru_cache(64)(lambda count: schema_of([one] * count))
    return Travelling(center, message, answer, one, differences)


def in_order(tree: PyTree) -> bool:
    """Return whether the schema of a tree has the leaves in the tree's order."""
    places = plan_of(jax.tree.structure(tree)).places
    return places == tuple(range(len(places)))


def wire_leaves(tree: PyTree) -> list[Any]:
    """Return the leaves of a tree, in the order of its schema."""
    leaves, treedef = jax.tree.flatten(tree)
    return [leaves[place] for place in plan_of(treedef).places]


def host_arrays(tree: PyTree, schema: Schema | None = None) -> list[np.ndarray]:
    """Return the leaves in host memory, in the order of their schema.

    This waits for the leaves, and copies those on other devices. On an accelerator they
    are first cast to the dtypes of ``schema``, so that fewer bytes are transferred. In
    host memory they are cast on sending, which needs no further memory.
    """
    if schema is not None and jax.default_backend() != "cpu":
        tree = cast(tree, schema)
    return [
        np.asarray(leaf, None if isinstance(leaf, jax.Array) else jnp.result_type(leaf))
        for leaf in wire_leaves(tree)
    ]


def build(schema: Schema, leaves: Sequence[Any], like: PyTree = None) -> PyTree:
    """Build a tree of leaves in the containers of ``like``, if its paths are the same.

    Otherwise the containers are those of the schema: dicts, lists, tuples and None are
    restored, and other containers become dicts by the names of their children.

    Raises:
      ProtocolError: the schema's structure is malformed, or has other leaves.
    """
    treedef = jax.tree.structure(like)
    plan = plan_of(treedef)
    if like is None or plan.paths != schema.paths:
        treedef = _treedef(schema.structure, schema.paths)
        plan = plan_of(treedef)
    placed = [None] * len(plan.places)
    for place, leaf in zip(plan.places, leaves, strict=True):
        placed[place] = leaf
    return jax.tree.unflatten(treedef, placed)


class Plan(NamedTuple):
    """The order of the leaves of trees with one structure in their schema."""

    paths: tuple[str, ...]
    places: tuple[int, ...]  # index in the tree of each leaf of the schema
    structure: str  # the containers as JSON


@functools.lru_cache(maxsize=128)
def plan_of(treedef: Any) -> Plan:
    """Return the plan of trees with one structure."""
    plain = _plain(jax.tree.unflatten(treedef, range(treedef.num_leaves)))
    leaves = tree_flatten_with_path(plain)[0]
    return Plan(
        tuple(keystr(path) for path, _ in leaves),
        tuple(place for _, place in leaves),
        json.dumps(description.structure(plain)),
    )


@functools.lru_cache(maxsize=32)
def _treedef(structure: str, paths: tuple[str, ...]) -> Any:
    """Return the tree structure that a schema describes, with leaves at these paths."""
    with contextlib.suppress(Exception):  # a malformed structure may raise anything
        tree = description.rebuild(json.loads(structure), iter(range(len(paths))))
        treedef = jax.tree.structure(tree)
        if plan_of(treedef).paths == paths:
            return treedef
    raise errors.ProtocolError("the structure of a tree does not match its leaves")


def _plain(tree: PyTree) -> PyTree:
    """Return ``tree`` in dicts, lists and tuples."""
    if tree is None or all_leaves([tree]):
        return tree
    kind = type(tree)
    if kind is dict and all(type(key) in (str, int) for key in tree):
        return {key: _plain(child) for key, child in tree.items()}
    if kind in (list, tuple):
        return kind([_plain(child) for child in tree])
    # Flatten one level: every node below the root is a leaf.
    children = tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    names: Sequence[str | int] = [_name(path[-1]) for path, _ in children]
    if len(set(names)) < len(names) or len({type(name) for name in names}) > 1:
        names = range(len(children))  # the names cannot be keys of one dict
    return {
        name: _plain(child) for name, (_, child) in zip(names, children, strict=True)
    }


def _name(key: Any) -> str | int:
    for attribute in ("key", "name", "idx"):
        value = getattr(key, attribute, None)
        if isinstance(value, bool):  # True equals 1 as a key, and so do trees with them
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
    said = pb.Schema(leaves=leaves.getvalue(), structure=schema.structure)
    data = said.SerializeToString()
    if problem := why_too_large(len(schema.leaves), len(data), schema.structure):
        raise errors.InvalidArgumentError(
            f"{problem}: stack leaves that are alike, such as those of equal layers"
        )
    return data


def from_bytes(data: bytes) -> Schema:
    """Decode a received schema, with bounded memory.

    Raises:
      ProtocolError: the schema is malformed or too large.
    """
    if problem := why_too_large(0, len(data), ""):
        raise errors.ProtocolError(problem)
    leaves: list[Leaf] = []
    try:
        said = pb.Schema.FromString(data)
        coming = io.BytesIO(said.leaves)
        while (leaf := proto.parse_length_prefixed(pb.Leaf, coming)) is not None:
            if len(leaf.shape) > MOST_DIMENSIONS:
                raise errors.ProtocolError(
                    f"leaf {leaf.path} has {len(leaf.shape)} dimensions, and at most "
                    f"{MOST_DIMENSIONS} can be sent"
                )
            leaves.append(Leaf(leaf.path, leaf.dtype, tuple(leaf.shape)))
            if len(leaves) > MOST_LEAVES:
                break
    except (DecodeError, ValueError) as error:
        raise errors.ProtocolError(f"not a schema: {error}") from None
    if problem := why_too_large(len(leaves), len(data), said.structure):
        raise errors.ProtocolError(problem)
    return Schema(leaves, said.structure)


def why_too_large(leaves: int, size: int, structure: str) -> str:
    """Return which limit a schema exceeds; "" if none."""
    if leaves > MOST_LEAVES:
        return f"a served tree has at most {MOST_LEAVES} leaves, got {leaves} or more"
    if size > MOST_SCHEMA:
        return f"the schema of a tree has at most {MOST_SCHEMA} bytes, got {size}"
    nodes = sum(map(structure.count, "[{,"))
    if nodes > MOST_NODES:
        return (
            f"the structure of a tree has at most {MOST_NODES} brackets and commas, "
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
    small = [array for array in arrays if array.nbytes < _SMALL]
    large = [array for array in arrays if array.nbytes >= _SMALL]
    with jax.transfer_guard_host_to_device("allow"):  # an intended transfer
        copied = iter(_copied(small) if small else [])
    placed = iter(jax.device_put(large) if large else [])  # slow even for no arrays
    return [next(copied if array.nbytes < _SMALL else placed) for array in arrays]


@jax.jit
def _copied(arrays: list[Any]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]
