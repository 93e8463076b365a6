"""JAX trees as schemas of the wire, and back."""

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

# What describes a tree at most: more than any known model has, whose layers and experts
# are leaves of their own, and little enough to read for whoever sends it to waste time.
MOST_LEAVES = 1 << 17
MOST_SCHEMA = 256 * MOST_LEAVES  # bytes: a path, a dtype and a shape have some hundred
MOST_NODES = 16 * MOST_LEAVES  # brackets and commas of a structure in JSON
MOST_DIMENSIONS = 64  # of a leaf, as numpy has it
_SMALL = 64 << 10  # bytes; copying more takes longer than handing it over


def schema_of(tree: PyTree) -> Schema:
    """The schema of a tree.

    Containers of other types than dict, list and tuple count as dicts of their
    children's names: that is what those build who do not know the types.
    """
    plan = plan_of(jax.tree.structure(tree))
    leaves = [
        Leaf(path, jnp.result_type(leaf).name, jnp.shape(leaf))
        for path, leaf in zip(plan.paths, wire_leaves(tree), strict=True)
    ]
    return Schema(leaves, plan.structure)


class Travelling(NamedTuple):
    """In which form trees of one center travel."""

    center: Schema  # as it is pulled
    message: Schema  # what workers send
    answer: Schema  # the center as they get it back
    # One of so many differences between public centers, abstract, and their schema.
    difference: PyTree = None
    differences: Callable[[int], Schema] | None = None


def travelling(rule: Rule, like: PyTree) -> Travelling:
    """What travels between a center like this and its workers."""
    center, answers = schema_of(like), rule.codec.answer_dtype
    message = schema_of(rounds.contribution_like(rule, like))
    answer = center.cast(answers.name if answers else "")
    if (one := rounds.difference_like(rule, like)) is None:
        return Travelling(center, message, answer)
    differences = functools.lru_cache(64)(lambda count: schema_of([one] * count))
    return Travelling(center, message, answer, one, differences)


def in_order(tree: PyTree) -> bool:
    """Whether the leaves of a tree lie on the wire as they do in the tree."""
    places = plan_of(jax.tree.structure(tree)).places
    return places == tuple(range(len(places)))


def wire_leaves(tree: PyTree) -> list[Any]:
    """The leaves of a tree, in the order of its schema."""
    leaves, treedef = jax.tree.flatten(tree)
    return [leaves[place] for place in plan_of(treedef).places]


def host_arrays(tree: PyTree, schema: Schema | None = None) -> list[np.ndarray]:
    """The leaves in host memory, in the order of their schema.

    Waits for them, and copies what is elsewhere: from an accelerator in the dtypes of
    ``schema``, so that fewer bytes leave it. In host memory the copy onto the wire
    casts, which takes no memory besides.
    """
    if schema is not None and jax.default_backend() != "cpu":
        tree = cast(tree, schema)
    return [
        np.asarray(leaf, None if isinstance(leaf, jax.Array) else jnp.result_type(leaf))
        for leaf in wire_leaves(tree)
    ]


def build(schema: Schema, leaves: Sequence[Any], like: PyTree = None) -> PyTree:
    """A tree of leaves: with the containers of ``like`` if that has the same schema.

    Otherwise with those of the schema: dicts, lists, tuples and None are what they
    were, and containers of other types become dicts of their children's names.

    Raises:
      ProtocolError: the structure of the schema is not one, or not that of its leaves.
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
    """How the leaves of a kind of tree lie on the wire."""

    paths: tuple[str, ...]
    places: tuple[int, ...]  # of the wire's leaves, among those of the tree
    structure: str  # the containers, as JSON


@functools.lru_cache(maxsize=128)
def plan_of(treedef: Any) -> Plan:
    """The plan of all trees of one structure."""
    plain = _plain(jax.tree.unflatten(treedef, range(treedef.num_leaves)))
    leaves = tree_flatten_with_path(plain)[0]
    return Plan(
        tuple(keystr(path) for path, _ in leaves),
        tuple(place for _, place in leaves),
        json.dumps(description.structure(plain)),
    )


@functools.lru_cache(maxsize=32)
def _treedef(structure: str, paths: tuple[str, ...]) -> Any:
    """The containers that a schema describes, whose leaves have these paths."""
    with contextlib.suppress(Exception):  # what comes of it if that is none
        tree = description.rebuild(json.loads(structure), iter(range(len(paths))))
        treedef = jax.tree.structure(tree)
        if plan_of(treedef).paths == paths:
            return treedef
    raise errors.ProtocolError("the structure of a tree is not that of its leaves")


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
        if isinstance(value, bool):  # equal to a number, and trees with it are
            return int(value)
        if isinstance(value, str | int):
            return value
    return str(key)


def is_representable(dtype: str) -> bool:
    """Whether JAX can keep it as it is; wide ones it can only if it is told so."""
    return bool(jax.dtypes.canonicalize_dtype(dtype).name == dtype)


def to_bytes(schema: Schema) -> bytes:
    """Return a schema as it travels, a `center_pb2.Schema`.

    Raises:
      InvalidArgumentError: it is larger than what the other end takes.
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
    """Return the schema that came, and take no more memory than its bounds say.

    Raises:
      ProtocolError: it makes no sense, or is larger than its bounds.
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
                    f"{MOST_DIMENSIONS} travel"
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
    """Return which bound of a schema is exceeded; "" if none is."""
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
    """``tree`` in the dtypes of ``schema``; itself if it has them."""
    leaves, dtypes = wire_leaves(tree), schema.numpy_dtypes
    if [getattr(leaf, "dtype", None) for leaf in leaves] == list(dtypes):
        return tree
    return build(schema, _cast(leaves, dtypes), tree)


@functools.partial(jax.jit, static_argnums=1)
def _cast(leaves: list[Any], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def to_device(arrays: Sequence[np.ndarray]) -> list[jax.Array]:
    """Arrays of JAX that may lie where ``arrays`` do; nobody may change those then.

    Small ones are copied, all by one program: handing each over takes longer.
    """
    small = [array for array in arrays if array.nbytes < _SMALL]
    large = [array for array in arrays if array.nbytes >= _SMALL]
    with jax.transfer_guard_host_to_device("allow"):  # it is what this is for
        copied = iter(_copied(small) if small else [])
    placed = iter(jax.device_put(large) if large else [])  # slow even of nothing
    return [next(copied if array.nbytes < _SMALL else placed) for array in arrays]


@jax.jit
def _copied(arrays: list[Any]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]
