"""Centers as optimizer states store them: wrapped, unless whole on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax.round import _collectives

PyTree = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pieces"],
    meta_fields=["shapes", "axes", "cut"],
)
@dataclasses.dataclass(frozen=True)
class CenterShards:
    """One tower's pieces of a center."""

    pieces: PyTree  # like the parameters; leaves [1, ..., 1, elements of a piece]
    shapes: tuple[tuple[int, ...], ...]  # shapes of the whole leaves
    # The axes of the shards within a worker, and those across workers.
    axes: tuple[_collectives.Axes, _collectives.Axes]
    cut: tuple[int, int]  # number of pieces within a worker, and across workers


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["center"], meta_fields=["axes"]
)
@dataclasses.dataclass(frozen=True)
class OwnCenter:
    """One worker's own center, with gossip."""

    center: PyTree  # like the parameters
    axes: _collectives.Axes  # axes of the workers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnHost:
    """A tree in the host's memory: a center or its shards, or its optimizer's state."""

    tree: PyTree  # leaves [1, 1, 1, 1, 1, 1, ...], see `for_host`


# JAX gives the buffer of a donated argument to the first output with the same shape and
# dtype, even in another memory. If a buffer on the host becomes an output on the
# device, the process aborts (JAX 0.10). Therefore arrays on the host have shapes that
# no array on the device has: their shapes begin with these dimensions.
HOST_SHAPE = (1,) * 6


def for_host(tree: PyTree) -> PyTree:
    """Reshape the arrays of a tree to the shapes that they have on the host."""
    return jax.tree.map(
        lambda leaf: jnp.reshape(leaf, (*HOST_SHAPE, *jnp.shape(leaf))), tree
    )


def from_host(tree: PyTree) -> PyTree:
    """Undo `for_host`, also for rows of such trees; arrays stay in their memory."""

    def shaped(leaf: Any) -> jax.Array:
        shape, count = jnp.shape(leaf), len(HOST_SHAPE)
        found = (i for i in range(len(shape)) if shape[i : i + count] == HOST_SHAPE)
        if (first := next(found, None)) is None:  # after the dimensions of the rows
            raise errors.TreeMismatchError(
                f"a leaf of shape {list(shape)} cannot be from the host, where all "
                f"shapes begin with {list(HOST_SHAPE)}"
            )
        return jnp.reshape(leaf, shape[:first] + shape[first + count :])

    return jax.tree.map(shaped, tree)


def unwrapped(stored: PyTree) -> PyTree:
    """Return a stored center or state without `OnHost`; arrays stay in their memory."""
    return from_host(stored.tree) if isinstance(stored, OnHost) else stored


def rewrapped(tree: PyTree, like: PyTree) -> PyTree:
    """Wrap a tree in `OnHost` if ``like`` is wrapped; arrays stay in their memory."""
    return OnHost(tree) if isinstance(like, OnHost) else tree


def center_arrays(stored: PyTree) -> PyTree:
    """Return the arrays of a stored center, as a tree like the parameters.

    For a sharded center, these are this tower's pieces.
    """
    center = unwrapped(stored)
    if isinstance(center, OwnCenter):
        return center.center
    return center.pieces if isinstance(center, CenterShards) else center


def describe_place(stored: PyTree) -> str:
    """Describe where a stored center is, as `Layout.place` does."""
    center = stored.tree if isinstance(stored, OnHost) else stored
    kinds = {CenterShards: "in shards", OwnCenter: "each worker's own"}
    memory = "host" if isinstance(stored, OnHost) else "device"
    return f"{kinds.get(type(center), 'whole')}, on the {memory}"
