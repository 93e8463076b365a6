"""Batches for towers: check, pad and split rows, and put them on the mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.towers import _programs, _replicas, _rows

PyTree = Any


def rows_of(batch: PyTree) -> int:
    """Return the number of rows of ``batch``; raise if its leaves differ."""
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
            "(shard_padded) or leave out the rest"
        )


def pad(batch: PyTree, rows: int) -> PyTree:
    """Pad a batch to ``rows`` rows with copies of the last; sparse padding is empty.

    Copies are used instead of zeros: a model may divide by the norm of a row.
    """

    def pad_leaf(leaf: Any) -> Any:
        missing = rows - np.shape(leaf)[0]
        if not missing:
            return leaf
        if _rows.is_rows(leaf):
            return type(leaf)((leaf.data, leaf.indices), shape=(rows, *leaf.shape[1:]))
        leaf = _host(leaf)
        return concatenate([leaf, *[leaf[-1:]] * missing])

    return jax.tree.map(pad_leaf, batch, is_leaf=_rows.is_rows)


def put_rows(batch: PyTree, mesh: Mesh) -> PyTree:
    """Put ``batch`` on the mesh, with rows for each tower.

    If the mesh spans processes, each process gives the rows of its own towers.
    """
    sharding = NamedSharding(mesh, _programs.rows(mesh))
    return jax.tree.map(lambda leaf: put(leaf, sharding), batch)


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Return the global array of which this process has the part ``leaf``."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if sharding.is_fully_addressable:
        if isinstance(leaf, np.ndarray):
            # Copy it: on CPUs, JAX may share the caller's memory, which data loaders
            # overwrite later.
            leaf = leaf.copy()
        return jax.device_put(leaf, sharding)
    if trees.is_key(leaf):
        return _replicas.map_key_data(lambda data: put(data, sharding), leaf)
    return jax.make_array_from_process_local_data(sharding, _host(leaf))


def broadcast_from_first_process(tree: PyTree) -> PyTree:
    """Return ``tree`` with the values of process 0; keep arrays that span processes."""

    def broadcast(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        if trees.is_key(leaf):
            return _replicas.map_key_data(multihost_utils.broadcast_one_to_all, leaf)
        return multihost_utils.broadcast_one_to_all(_host(leaf))

    return jax.tree.map(broadcast, tree)


def split_sparse(batch: PyTree, mesh: Mesh) -> PyTree:
    """Split sparse rows into one matrix for each tower of this process.

    All towers store the same number of elements.
    """
    towers = len(mesh.local_devices)

    def split(rows: Any) -> Any:
        per_tower = rows.shape[0] // towers
        most = _rows.max_stored(rows, towers, per_tower)
        stored = max(gather_from_processes(mesh, most))
        return _rows.split(rows, towers, per_tower, stored)

    return _rows.map_rows(split, batch)


def gather_from_processes(mesh: Mesh, value: int) -> list[int]:
    """Return the ``value`` of every process of the mesh, in order.

    It is a collective call if the mesh spans processes.
    """
    if not mesh.is_multi_process:
        return [value]
    values = multihost_utils.process_allgather(np.asarray(value))
    return [int(v) for v in np.ravel(values)]


def concatenate(parts: list[Any]) -> Any:
    """Concatenate along the first dimension, on the host; keys stay random keys."""
    if trees.is_key(parts[0]):
        return _replicas.map_key_data(lambda *data: concatenate(list(data)), *parts)
    return np.concatenate([np.asarray(part) for part in parts])


def _host(leaf: Any) -> Any:
    return leaf if trees.is_key(leaf) else np.asarray(leaf)
