"""Row-sparse arrays, `jax.experimental.sparse.BCOO`: gradients and batches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax.round import collectives


def is_rows(value: Any) -> bool:
    # A BCOO exists only if its module was imported; do not import the slow module here.
    module = sys.modules.get("jax.experimental.sparse")
    return module is not None and isinstance(value, module.BCOO)


def map_rows(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to every row-sparse leaf; keep all other leaves."""
    return jax.tree.map(
        lambda leaf: function(leaf) if is_rows(leaf) else leaf, tree, is_leaf=is_rows
    )


def check(rows: Any, what: str) -> None:
    """Raise unless ``rows`` is a row-sparse gradient: indices and whole rows."""
    if rows.n_batch or rows.n_sparse != 1:
        raise errors.TreeMismatchError(
            f"{what} is a BCOO with n_batch={rows.n_batch}, n_sparse={rows.n_sparse}; "
            "a row-sparse gradient has n_batch=0, n_sparse=1: "
            "BCOO((values, rows[:, None]), shape=table.shape)"
        )


def all_gather(rows: Any, axes: collectives.Axes, scale: float) -> Any:
    """Return the sum of all towers' rows as one array, with each row once."""
    values = rows.data * jnp.asarray(scale, rows.data.dtype)
    values = collectives.gather(values, axes, same=True)
    indices = collectives.gather(rows.indices, axes, same=True)
    return unique(type(rows)((values, indices), shape=rows.shape))


def unique(rows: Any) -> Any:
    """Sum duplicate rows; entries that become free get indices out of bounds."""
    return rows.sum_duplicates(nse=min(rows.data.shape[0], rows.shape[0]))


def split(rows: Any, towers: int, per_tower: int, stored: int) -> Any:
    """Split rows 0 to towers * per_tower into a batch dimension of blocks.

    Args:
      rows: BCOO with ``n_batch=0``, on the host.
      towers: number of blocks.
      per_tower: rows of a block; blocks beyond the end are empty.
      stored: number of elements to store for a block, at least `max_stored`.
    """
    data, indices = np.asarray(rows.data), np.asarray(rows.indices)
    width = rows.shape[1:]
    inside = np.flatnonzero(indices[:, 0] < min(rows.shape[0], towers * per_tower))
    block = indices[inside, 0] // per_tower
    inside = inside[np.argsort(block, kind="stable")]
    block.sort()
    # Unused entries have an index out of the block's bounds, which BCOO ignores.
    outside = np.array((per_tower, *width[: indices.shape[1] - 1]), indices.dtype)
    new_data = np.zeros((towers, stored, *data.shape[1:]), data.dtype)
    new_indices = np.broadcast_to(outside, (towers, stored, indices.shape[1])).copy()
    position = np.arange(block.size) - np.searchsorted(block, block)  # in its block
    new_data[block, position] = data[inside]
    new_indices[block, position] = indices[inside]
    new_indices[block, position, 0] -= block * per_tower
    return type(rows)((new_data, new_indices), shape=(towers, per_tower, *width))


def max_stored(rows: Any, towers: int, per_tower: int) -> int:
    """Return the largest number of elements that a block of rows stores."""
    index = np.asarray(rows.indices)[:, 0]
    index = index[index < min(rows.shape[0], towers * per_tower)]
    counts = np.bincount(index // per_tower, minlength=towers)
    return max(int(counts.max(initial=0)), 1)


def take_own_rows(batch: Any) -> Any:
    """Replace each BCOO from `split` by the matrix of this tower."""

    def take_first(stacked: Any) -> Any:
        first = (stacked.data[0], stacked.indices[0])
        return type(stacked)(first, shape=stacked.shape[1:])

    return map_rows(take_first, batch)
