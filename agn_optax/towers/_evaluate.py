"""Programs for metrics and predictions over batches of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.round import collectives
from agn_optax.towers import _programs, _rows

PyTree = Any


def sums(mesh: Mesh, metric_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``(arguments, batch, real) -> (sums over rows, number of rows)``.

    The results are the same on all towers.
    """

    def total(values: PyTree, real: jax.Array) -> Any:
        def total_of_leaf(v: jax.Array) -> jax.Array:
            wide = trees.widened(v)
            mask = real.reshape(-1, *(1,) * (wide.ndim - 1))
            rows = jnp.where(mask, wide, 0)
            return collectives.psum(rows.sum(axis=0), mesh.axis_names)

        rows = collectives.psum(real.sum(), mesh.axis_names)
        return jax.tree.map(total_of_leaf, values), rows

    return _by_rows(mesh, metric_fn, "metric_fn", total, PartitionSpec())


def outputs(mesh: Mesh, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``(arguments, batch, real) -> outputs``, with an output for each row."""
    return _by_rows(mesh, fn, "fn", lambda values, _: values, _programs.rows(mesh))


def _by_rows(
    mesh: Mesh,
    function: Callable[..., PyTree],
    what: str,
    act: Callable[[PyTree, jax.Array], Any],
    out_specs: PartitionSpec,
) -> Callable[..., Any]:
    """Compile a program that calls ``act(values, real)`` on each tower.

    ``values`` are the function's values for the tower's rows. ``real`` is a boolean
    mask of the rows that are not padding.
    """

    def on_tower(arguments: Any, batch: PyTree, real: jax.Array) -> Any:
        values = function(*arguments, _rows.take_own_rows(batch))
        _check_rows(values, real.shape[0], what)
        return act(values, real)

    rows = _programs.rows(mesh)
    in_specs = (PartitionSpec(), rows, rows)
    return jax.jit(_programs.per_tower(mesh, on_tower, in_specs, out_specs))


def _check_rows(values: PyTree, rows: int, what: str) -> None:
    for path, leaf in tree_flatten_with_path(values)[0]:
        shape = jnp.shape(leaf)
        if not shape or shape[0] != rows:
            raise errors.InvalidArgumentError(
                f"{what} gave {keystr(path) or 'an array'} of shape {list(shape)}; one "
                f"value for each of the {rows} rows is expected, not reduced over them"
            )


def combine(parts: list[tuple[PyTree, Any]]) -> PyTree:
    """Return the metrics of all batches from their sums and row counts, on the host."""
    # This is the first wait for the devices, so batches run without gaps.
    counts = sum(int(count) for _, count in parts)

    def mean(*leaves: Any) -> Any:
        value = sum(map(_widest, leaves)) / counts
        return value.item() if np.ndim(value) == 0 else value

    return jax.tree.map(mean, *(sums for sums, _ in parts))


def _widest(leaf: Any) -> Any:
    leaf = np.asarray(leaf)
    return leaf.astype(np.result_type(leaf.dtype, np.float64))
