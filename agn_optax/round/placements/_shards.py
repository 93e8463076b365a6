"""A center in shards: each tower of some axes has a piece of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round import _collectives
from agn_optax.round.placements._layout import CombineMessages, Layout, shaped
from agn_optax.round.placements._placement import Placement
from agn_optax.round.placements._stored import StoredCenter
from agn_optax.rules import robust

PyTree = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pieces"],
    meta_fields=["shapes", "axes", "cut"],
)
@dataclasses.dataclass(frozen=True)
class CenterShards(StoredCenter):
    """One tower's pieces of a center."""

    pieces: PyTree  # like the parameters; leaves [1, ..., 1, elements of a piece]
    shapes: tuple[tuple[int, ...], ...]  # shapes of the whole leaves
    # The axes of the shards within a worker, and those across workers.
    axes: tuple[_collectives.Axes, _collectives.Axes]
    cut: tuple[int, int]  # number of pieces within a worker, and across workers

    kind: ClassVar[str] = "in shards"

    def whole(self) -> PyTree:
        """Return the whole center, whose axes must be bound here."""
        within, across = self.axes
        axes = (*within, *across)
        hint = (
            "the center is in shards over this axis; use "
            "towers.center_params(opt_state)"
        )
        check.axis_bound(axes, hint)
        layout = Sharded(across, Placement(shard_axis=axes))
        like = layout._whole_shapes(self)
        return layout.join_parts(layout.join_pieces(self.pieces, like), like)

    def mark_differing(self, state: Any, pieces: Any, own: Any) -> Any:
        within, across = self.axes
        axes = (*within, *across)
        return state._replace(
            center=dataclasses.replace(self, pieces=pieces(self.pieces, axes)),
            center_state=pieces(state.center_state, axes),
            local=state.local._replace(
                record=pieces(state.local.record, within),
                codec_state=pieces(state.local.codec_state, within),
            ),
        )


@dataclasses.dataclass(frozen=True)
class Sharded(Layout):
    """One center, of which each tower of ``placement.shard_axis`` has a piece.

    Leaves with fewer elements than towers stay whole.
    """

    kind: ClassVar[str] = CenterShards.kind

    @property
    def within_axes(self) -> _collectives.Axes:
        """Axes over which the towers of one worker have different shards."""
        shards = _collectives.names(self.placement.shard_axis)
        return tuple(name for name in shards if name not in self.workers)

    @property
    def across_axes(self) -> _collectives.Axes:
        """Axes over which different workers have different shards."""
        shards = _collectives.names(self.placement.shard_axis)
        return tuple(name for name in shards if name in self.workers)

    @property
    def shard_axes(self) -> _collectives.Axes:
        """Axes of the shards, in the order of the pieces."""
        return (*self.within_axes, *self.across_axes)

    @property
    def replica_axes(self) -> _collectives.Axes:
        """Axes over which workers have the same shards."""
        return tuple(name for name in self.workers if name not in self.across_axes)

    @property
    def is_readable_in_step(self) -> bool:
        return False

    def check_bound(self) -> None:
        hint = (
            "a center in shards lives inside the mesh; its state is made by "
            "towers.create(tx.init, params), and updated in Towers' programs"
        )
        check.axis_bound(self.axis_name, hint)
        check.axis_bound(self.placement.shard_axis, hint)

    def check_bound_for_steps(self) -> None:
        self.check_bound()

    def piece_shapes(self, params: PyTree) -> list[PyTree]:
        return [jax.eval_shape(self.cut_piece, params)]

    def cut_part(self, tree: PyTree) -> PyTree:
        return self._cut(tree, self.within_axes, _collectives.size(self.across_axes))

    def cut_piece(self, tree: PyTree) -> PyTree:
        return self._cut(tree, self.shard_axes, 1)

    def _cut(self, tree: PyTree, axes: _collectives.Axes, pieces: int) -> PyTree:
        """Cut every sharded leaf, and return this tower's ``pieces`` pieces."""

        def cut(leaf: Any) -> jax.Array:
            leaf, length = jnp.asarray(leaf), self._piece_length(leaf)
            if length is None or _collectives.size(axes) == 1:
                return leaf
            return _slice(leaf, _collectives.index(axes), pieces * length, leaf.ndim)

        return jax.tree.map(cut, tree)

    def join_pieces(self, pieces: PyTree, like: PyTree) -> PyTree:
        def unite(piece: jax.Array, whole: Any) -> jax.Array:
            if self._piece_length(whole) is None:
                return piece
            flat = _collectives.gather(piece.reshape(-1), self.across_axes)
            if _collectives.size(self.within_axes) == 1:
                return shaped(flat, whole)
            return _with_ndim(flat, whole.ndim)

        return jax.tree.map(unite, pieces, like)

    def join_parts(self, parts: PyTree, like: PyTree) -> PyTree:
        def unite(part: jax.Array, whole: Any) -> jax.Array:
            if self._piece_length(whole) is None:
                return part
            flat = _collectives.gather(part.reshape(-1), self.within_axes, same=True)
            return shaped(flat, whole)

        return jax.tree.map(unite, parts, like)

    @property
    def _gather_axes(self) -> _collectives.Axes:
        return (*self.replica_axes, *self.across_axes)

    def _piece_length(self, leaf: Any) -> int | None:
        """Return the number of elements of a piece; None if the leaf stays whole."""
        pieces = _collectives.size(self.shard_axes)
        return piece_length(jnp.shape(leaf), pieces)

    def _sum_leaf(self, m: jax.Array, whole: jax.Array) -> jax.Array:
        length = self._piece_length(whole)
        if length is None:
            return _collectives.psum(m, (*self.across_axes, *self.replica_axes))
        flat = _padded(m, length * _collectives.size(self.across_axes))
        m = _with_ndim(_collectives.scatter(flat, self.across_axes), whole.ndim)
        return _collectives.psum(m, self.replica_axes)

    def _gather_messages(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        length = self._piece_length(whole)
        if length is None:
            return self.gather(part)
        count = _collectives.size(self.across_axes)
        flat = _padded(part, length * count).reshape(count, length)
        pieces = _collectives.all_to_all(flat, self.across_axes)
        pieces = pieces.reshape(count, *(1,) * (whole.ndim - 1), length)
        return _collectives.gather(pieces, self.replica_axes)

    def _combine_gathered(
        self, pieces: PyTree, method: CombineMessages, like: PyTree
    ) -> PyTree:
        def total(parts: PyTree) -> jax.Array:
            def total_of(is_whole: bool) -> jax.Array:
                def choose(leaf: Any, part: Any) -> Any:
                    is_here = (self._piece_length(leaf) is None) == is_whole
                    return part if is_here else None

                return robust.total_of_leaves(jax.tree.map(choose, like, parts))

            return _collectives.psum(total_of(False), self.shard_axes) + total_of(True)

        return method(pieces, total)

    def _wrap(self, center: PyTree, like: PyTree) -> PyTree:
        stored = [shards.shapes for _, shards in trees.nodes(like, CenterShards)]
        shapes = stored[0] if stored else tuple(map(jnp.shape, jax.tree.leaves(like)))
        return CenterShards(center, shapes, *self._current_cut)

    @property
    def _current_cut(self) -> tuple[Any, Any]:
        """The shards' axes and their sizes, each as (within, across workers)."""
        axes = (self.within_axes, self.across_axes)
        return axes, tuple(map(_collectives.size, axes))

    def _whole_shapes(self, center: CenterShards) -> PyTree:
        axes, sizes = self._current_cut
        if (center.axes, center.cut) != (axes, sizes):
            raise errors.TreeMismatchError(
                f"the state's center is in shards over the axes {center.axes} of sizes "
                f"{center.cut}, but here over {axes} of sizes {sizes}. Read it "
                "with center_params on the mesh where it was made, and start anew from "
                "the result"
            )
        return jax.tree.unflatten(
            jax.tree.structure(center.pieces),
            [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in center.shapes],
        )


def piece_length(shape: tuple[int, ...], pieces: int) -> int | None:
    """Return the elements of each piece of a leaf; None if the leaf stays whole."""
    elements = math.prod(shape)
    if pieces == 1 or not shape or elements < pieces:
        return None
    return -(-elements // pieces)


def _slice(leaf: jax.Array, index: Any, length: int, ndim: int) -> jax.Array:
    """Return the ``index``-th piece of ``length`` elements, padded with zeros."""
    pieces = -(-leaf.size // length)
    flat = _padded(leaf, pieces * length)
    # A slice beyond the last piece would be clamped into the array.
    piece = jax.lax.dynamic_slice_in_dim(flat, index * length, length)
    return _with_ndim(jnp.where(index < pieces, piece, 0), ndim)


def _padded(x: jax.Array, length: int) -> jax.Array:
    flat = x.reshape(-1)
    return flat if flat.size == length else jnp.pad(flat, (0, length - flat.size))


def _with_ndim(flat: jax.Array, ndim: int) -> jax.Array:
    """Give a flat array as many dimensions as its leaf has.

    Optimizers may read the number of dimensions, such as for a weight decay of matrices
    only.
    """
    return flat.reshape((1,) * (ndim - 1) + (-1,))
