"""Batches for towers: rows counted, filled up or cut off, and laid on the mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.towers import _programs, _replicas, _rows

PyTree = Any


def rows_of(batch: PyTree) -> int:
    """The rows that all leaves of ``batch`` have."""
    leaves = tree_flatten_with_path(batch, is_leaf=_rows.is_rows)[0]
    if not leaves:
        raise errors.InvalidArgumentError(f"batch has no arrays: {batch!r}")
    counts: dict[str, int] = {}
    for path, leaf in leaves:
        name = f"batch{keystr(path)}"
        if dataclasses.is_dataclass(leaf) and not hasattr(leaf, "shape"):
            raise errors.InvalidTypeError(
                f"{name} is a dataclass that JAX does not know: decorate "
                f"{type(leaf).__name__} with jax.tree_util.register_dataclass"
            )
        if _rows.is_rows(leaf) and leaf.n_batch:
            raise errors.InvalidTypeError(
                f"{name} is a BCOO with n_batch={leaf.n_batch}; give it with n_batch=0 "
                "(jax.experimental.sparse.bcoo_update_layout)"
            )
        shape = np.shape(leaf)
        if not shape:
            raise errors.InvalidArgumentError(
                f"{name} is a scalar, and rows along dimension 0 are expected"
            )
        counts[name] = shape[0]
        first = next(iter(counts))
        if shape[0] != counts[first]:
            raise errors.InvalidArgumentError(
                f"{name} has {shape[0]} rows, but {first} has {counts[first]}"
            )
    return shape[0]


def check_divisible(batch: PyTree, towers: int) -> None:
    rows = rows_of(batch)
    if rows % towers:
        path, leaf = tree_flatten_with_path(batch, is_leaf=_rows.is_rows)[0][0]
        raise errors.InvalidArgumentError(
            f"batch{keystr(path)} of shape {list(np.shape(leaf))} has {rows} rows, "
            f"which must be divisible by the number of towers, {towers}: pad them "
            "(shard_padded) or drop the rest (shard(batch, remainder='drop'))"
        )


def cut(batch: PyTree, rows: int) -> PyTree:
    """The first ``rows`` rows."""

    def first(leaf: Any) -> Any:
        if not _rows.is_rows(leaf):
            return leaf[:rows]
        kept = np.asarray(leaf.indices)[:, 0] < rows
        data, indices = np.asarray(leaf.data)[kept], np.asarray(leaf.indices)[kept]
        return type(leaf)((data, indices), shape=(rows, *leaf.shape[1:]))

    return jax.tree.map(first, batch, is_leaf=_rows.is_rows)


def fill(batch: PyTree, rows: int) -> PyTree:
    """``batch`` with copies of its last row up to ``rows`` rows; sparse rows are empty.

    Copies rather than zeros: a model may well divide by the norm of a row.
    """

    def filled(leaf: Any) -> Any:
        missing = rows - np.shape(leaf)[0]
        if not missing:
            return leaf
        if _rows.is_rows(leaf):
            return type(leaf)((leaf.data, leaf.indices), shape=(rows, *leaf.shape[1:]))
        leaf = _host(leaf)
        return joined([leaf, *[leaf[-1:]] * missing])

    return jax.tree.map(filled, batch, is_leaf=_rows.is_rows)


def lay(batch: PyTree, mesh: Mesh, *, dimension: int = 0) -> PyTree:
    """``batch`` on the mesh, each tower its rows (along ``dimension``).

    Where a mesh spans processes, each gives the rows of its own towers.
    """
    sharding = NamedSharding(mesh, _programs.rows(mesh, dimension))
    return jax.tree.map(lambda leaf: put(leaf, sharding), batch)


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """This process's part of an array, as a global one."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if sharding.is_fully_addressable:
        if isinstance(leaf, np.ndarray):
            # A CPU's array may be the caller's memory, which loaders fill again.
            leaf = leaf.copy()
        return jax.device_put(leaf, sharding)
    if trees.is_key(leaf):
        return _replicas.of_key_data(lambda data: put(data, sharding), leaf)
    return jax.make_array_from_process_local_data(sharding, _host(leaf))


def of_first_process(tree: PyTree) -> PyTree:
    """``tree`` as process 0 has it; arrays that span processes stay as they are."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        if trees.is_key(leaf):
            return _replicas.of_key_data(multihost_utils.broadcast_one_to_all, leaf)
        return multihost_utils.broadcast_one_to_all(_host(leaf))

    return jax.tree.map(own, tree)


def split_sparse(batches: list[PyTree], mesh: Mesh) -> list[PyTree]:
    """Sparse rows as one matrix for each tower of this process.

    All batches store alike many elements for a tower, so that they can be stacked.
    """
    towers = len(mesh.local_devices)

    def split(*leaves: Any) -> list[Any]:
        if not _rows.is_rows(leaves[0]):
            return list(leaves)
        fullest = [_rows.fullest(x, towers, x.shape[0] // towers) for x in leaves]
        stored = max(in_processes(mesh, max(fullest)))
        return [_rows.split(x, towers, x.shape[0] // towers, stored) for x in leaves]

    structure = _structure(batches[0])
    leaves = [structure.flatten_up_to(batch) for batch in batches]
    columns = [split(*column) for column in zip(*leaves, strict=True)]
    return [structure.unflatten(row) for row in zip(*columns, strict=True)]


def _structure(batch: PyTree) -> Any:
    return jax.tree.structure(batch, is_leaf=_rows.is_rows)


def check_alike(batches: list[PyTree]) -> None:
    """The batches of a round have one structure and one number of rows."""
    if not batches:
        raise errors.InvalidArgumentError("a round needs at least one batch, got none")
    structures = [_structure(batch) for batch in batches]
    rows = [rows_of(batch) for batch in batches]
    dense = [_rows.map_rows(lambda _: None, batch) for batch in batches]
    for i, (structure, count) in enumerate(zip(structures, rows, strict=True)):
        if structure != structures[0]:
            raise errors.TreeMismatchError(
                f"batches[{i}] is another tree than batches[0]: {structure} and "
                f"{structures[0]}"
            )
        if count != rows[0]:
            raise errors.InvalidArgumentError(
                f"batches[{i}] has {count} rows, but batches[0] has {rows[0]}"
            )
        check.same_tree(dense[i], dense[0], f"batches[{i}]", "batches[0]")


def stack(batches: list[PyTree]) -> PyTree:
    """Batches as one, along a new first dimension."""
    return jax.tree.map(
        lambda *leaves: joined([_host(x)[None] for x in leaves]), *batches
    )


def in_processes(mesh: Mesh, value: int) -> list[int]:
    """``value`` in every process of the mesh, in order; a collective if it has many."""
    if not mesh.is_multi_process:
        return [value]
    values = multihost_utils.process_allgather(np.asarray(value))
    return [int(v) for v in np.ravel(values)]


def joined(parts: list[Any]) -> Any:
    """Along the first dimension, on the host; random keys stay what they are."""
    if trees.is_key(parts[0]):
        return _replicas.of_key_data(lambda *data: joined(list(data)), *parts)
    return np.concatenate([np.asarray(part) for part in parts])


def _host(leaf: Any) -> Any:
    return leaf if trees.is_key(leaf) else np.asarray(leaf)
