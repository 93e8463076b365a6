"""Collectives over one mesh axis, several axes, or none.

An axis of one member needs no communication, but XLA still compiles a collective for
it, with a copy. These functions leave such axes out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from agn_optax import errors
from agn_optax._internal import combinations

PyTree = Any
Axes = tuple[str, ...]


def names(axis_name: Any) -> Axes:
    """Return ``axis_name`` (one name, several or None) as a tuple."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def size(axes: Axes) -> int:
    return math.prod(jax.lax.axis_size(name) for name in axes)


def index(axes: Axes) -> Any:
    """Return this member's index along ``axes``, the first axis being the major one."""
    return jax.lax.axis_index(axes) if axes else 0


def varying(x: jax.Array) -> frozenset[str]:
    """Return the axes that ``x`` varies over; none if shard_map does not check them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def is_checked(axes: Axes) -> bool:
    """Return whether ``axes`` belong to a shard_map that checks varying axes."""
    return any(name in varying(jax.lax.axis_index(name)) for name in axes)


def _axes_to_reduce(axes: Axes, x: jax.Array) -> Axes:
    # A reduction over an axis of one member is the identity except for the type: the
    # result no longer varies over that axis.
    return tuple(n for n in axes if jax.lax.axis_size(n) > 1 or n in varying(x))


_workers: ContextVar[Axes] = ContextVar("axes of workers", default=())


@contextlib.contextmanager
def declare_workers(axes: Axes) -> Iterator[None]:
    """Declare, while tracing, that the workers are the members of ``axes``."""
    token = _workers.set(axes)
    try:
        yield
    finally:
        _workers.reset(token)


def declared_workers_outside(axes: Axes) -> Axes:
    """Return the axes that `declare_workers` declared and ``axes`` does not have.

    Axes of one member are left out.
    """
    return tuple(n for n in _workers.get() if n not in axes and size((n,)) > 1)


def psum(x: jax.Array, axes: Axes) -> jax.Array:
    axes = _axes_to_reduce(axes, x)
    return jax.lax.psum(x, axes) if axes else x


def scatter(x: jax.Array, axes: Axes) -> jax.Array:
    """Sum a 1-D array over ``axes``; return this member's piece of the sum."""
    axes = _axes_to_reduce(axes, x)
    if not axes:
        return x
    return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def gather(x: jax.Array, axes: Axes, *, same: bool = False) -> jax.Array:
    """Concatenate every member's piece ``x``, in order along the first dimension.

    With ``same``, a shard_map that checks varying axes sees an invarying result.
    """
    axes = _axes_to_reduce(axes, x)
    if not axes:
        return x
    if not len(x):  # XLA gathers no empty dimension
        return jnp.zeros_like(x) if same else x
    to = "invarying" if same and is_checked(axes) else "varying"
    gathered = jax.lax.all_gather(_narrow(x), axes, axis=0, tiled=True, to=to)
    return _as(gathered, x.dtype)


def all_to_all(x: jax.Array, axes: Axes) -> jax.Array:
    """Send row i of ``x`` to member i; return the received rows: [senders, ...]."""
    axes = _axes_to_reduce(axes, x)
    if not axes:
        return x
    rows = _narrow(x)
    # Under vmap a constant is not batched, and all_to_all needs a batched array.
    rows = jnp.where(index(axes) < 0, jnp.zeros_like(rows), rows)
    moved = jax.lax.all_to_all(rows, axes, split_axis=0, concat_axis=0, tiled=True)
    return _as(moved, x.dtype)


def pieces(x: jax.Array, axes: Axes) -> jax.Array:
    """Gather this member's piece of every member's ``x``: [members, elements]."""
    return all_to_all(cut(x, size(axes)), axes)


def from_partner(tree: PyTree, axes: Axes, exchanges: jax.Array) -> PyTree:
    """Return the tree of this member's partner in exchange ``exchanges`` (from 0)."""
    axes = tuple(name for name in axes if jax.lax.axis_size(name) > 1)
    if len(axes) > 1 and not set(axes) <= set(_manual_axes()):
        combinations.reject(
            "gossip", "workers of several axes under vmap", f"axis_name={axes}"
        )

    def send(x: jax.Array, partners: list[int]) -> jax.Array:
        moved = jax.lax.ppermute(_narrow(x), axes, list(enumerate(partners)))
        return _as(moved, x.dtype)

    def branch(partners: list[int]) -> Callable[[PyTree], PyTree]:
        return lambda tree: jax.tree.map(lambda x: send(x, partners), tree)

    branches = list(map(branch, pairings(size(axes))))
    return jax.lax.switch(exchanges % len(branches), branches, tree)


def _manual_axes() -> Axes:
    """Return the manual axes of all enclosing shard_maps."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def has_no_partner(axes: Axes, exchanges: jax.Array) -> jax.Array:
    """Return whether this member has no partner in exchange ``exchanges`` (from 0).

    With an odd number of members, one of them has no partner.
    """
    if size(axes) % 2 == 0:
        return jnp.zeros((), bool)
    all_pairings = jnp.asarray(pairings(size(axes)), jnp.int32)
    return all_pairings[exchanges % len(all_pairings), index(axes)] == index(axes)


def pairings(members: int) -> list[list[int]]:
    """Return about log2(members) pairings, each a list of every member's partner.

    With 2, 4, 8, ... members, partners are a power of two apart, so that information
    from each member has reached all others after all pairings. With other numbers,
    partners are mirror images on a ring, around a point that moves by powers of two,
    and information reaches most members. With an even number of members, all have a
    partner; with an odd number, one has none, and is its own partner in the list.
    """
    powers = [1 << k for k in range((members - 1).bit_length())]
    if members & (members - 1) == 0:
        return [[i ^ power for i in range(members)] for power in powers]
    mirrors = dict.fromkeys(
        (2 * power + 1 - members % 2) % members for power in (0, *powers)
    )
    return [[(mirror - i) % members for i in range(members)] for mirror in mirrors]


def mark_varying(tree: PyTree, axes: Axes) -> PyTree:
    """Mark a tree as varying over ``axes``, in a shard_map that checks this."""
    return jax.tree.map(lambda x: _vary(x, axes), tree) if is_checked(axes) else tree


def cut(x: jax.Array, count: int) -> jax.Array:
    """Cut ``x`` into ``count`` equal pieces, padded with zeros: [count, elements]."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _narrow(x: jax.Array) -> jax.Array:
    """View floats of 8 or 16 bits as integers: some backends would send them wide."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits > 16:
        return x
    return x.view(f"uint{8 * x.dtype.itemsize}")


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else x.view(dtype)


def when(due: jax.Array, act: Callable[[Any], Any], carry: Any) -> Any:
    """Return ``act(carry)`` if ``due``; else run no collective, and return ``carry``.

    This is a loop of zero or one iterations and not a cond, because a cond copies
    everything that passes through it, and a loop updates its carry in place.
    """

    def body(_: Any, carry: Any) -> Any:
        return jax.tree.map(_vary_like, act(carry), carry)

    return jax.lax.fori_loop(0, due.astype(jnp.int32), body, carry)


def _vary_like(new: jax.Array, old: jax.Array) -> jax.Array:
    """Mark ``new`` as varying over the axes of ``old``, as a loop's carry must."""
    return _vary(new, varying(old))


def _vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    missing = tuple(name for name in axes if name not in varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def check_same_params(tree: PyTree, axis_name: Any) -> None:
    """Check that all workers of a vmapped ``init`` begin with the same parameters.

    Only concrete arrays under a vmap can be compared: nothing is checked inside a
    compiled program.

    Raises:
      InvalidArgumentError: the workers' parameters differ.
    """

    @jax.custom_batching.custom_vmap
    def identity(tree: PyTree) -> PyTree:
        return tree

    @identity.def_vmap
    def compare(size: int, batched: Any, tree: PyTree) -> Any:
        del size
        leaves = zip(*map(tree_leaves_with_path, (tree, batched[0])), strict=True)
        for (path, rows), (_, is_batched) in leaves:
            if not is_batched or isinstance(rows, jax.core.Tracer):
                continue
            if not np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape)):
                raise errors.InvalidArgumentError(
                    f"the workers of {axis_name!r} begin with different parameters, "
                    f"first in params{keystr(path)}, so that each would keep a "
                    "different center. Begin with the same parameters, and give the "
                    "workers different data"
                )
        return tree, batched[0]

    identity(tree)
