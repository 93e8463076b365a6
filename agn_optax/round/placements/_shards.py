"""A center in shards: each tower of some axes has a piece of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.round import _collectives
from agn_optax.round.placements._layout import Layout, shaped
from agn_optax.round.placements._placement import Placement
from agn_optax.round.placements._stored import CenterShards, unwrapped
from agn_optax.rules import robust

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Sharded(Layout):
    """One center, of which each tower of ``placement.shard_axis`` has a piece.

    Leaves with fewer elements than towers stay whole.
    """

    kind: ClassVar[str] = "in shards"

    @property
    def within(self) -> _collectives.Axes:
        """Axes of the shards whose towers belong to one worker."""
        shards = _collectives.names(self.placement.shard_axis)
        return tuple(name for name in shards if name not in self.workers)

    @property
    def across(self) -> _collectives.Axes:
        """Axes of the shards whose towers are different workers."""
        shards = _collectives.names(self.placement.shard_axis)
        return tuple(name for name in shards if name in self.workers)

    @property
    def shards(self) -> _collectives.Axes:
        """Axes of the shards, in the order of the pieces."""
        return (*self.within, *self.across)

    @property
    def beside(self) -> _collectives.Axes:
        """Axes of the workers that keep the same shards."""
        return tuple(name for name in self.workers if name not in self.across)

    @property
    def is_at_hand(self) -> bool:
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

    def cuts(self, params: PyTree) -> list[PyTree]:
        return [jax.eval_shape(self.piece, params)]

    def part(self, tree: PyTree) -> PyTree:
        return self._cut(tree, self.within, _collectives.size(self.across))

    def piece(self, tree: PyTree) -> PyTree:
        return self._cut(tree, self.shards, 1)

    def _cut(self, tree: PyTree, axes: _collectives.Axes, pieces: int) -> PyTree:
        """Cut every leaf that is sharded to this tower's ``pieces`` of it."""

        def cut(leaf: Any) -> jax.Array:
            leaf, length = jnp.asarray(leaf), self._length(leaf)
            if length is None or _collectives.size(axes) == 1:
                return leaf
            return _slice(leaf, _collectives.index(axes), pieces * length, leaf.ndim)

        return jax.tree.map(cut, tree)

    def unite(self, pieces: PyTree, like: PyTree) -> PyTree:
        def unite(piece: jax.Array, whole: Any) -> jax.Array:
            if self._length(whole) is None:
                return piece
            flat = _collectives.gather(piece.reshape(-1), self.across)
            if _collectives.size(self.within) == 1:
                return shaped(flat, whole)
            return _line(flat, whole.ndim)

        return jax.tree.map(unite, pieces, like)

    def whole(self, parts: PyTree, like: PyTree) -> PyTree:
        def whole(part: jax.Array, whole: Any) -> jax.Array:
            if self._length(whole) is None:
                return part
            flat = _collectives.gather(part.reshape(-1), self.within, same=True)
            return shaped(flat, whole)

        return jax.tree.map(whole, parts, like)

    @property
    def _in_order(self) -> _collectives.Axes:
        return (*self.beside, *self.across)

    def _length(self, leaf: Any) -> int | None:
        """Return the number of elements of a piece; None if the leaf stays whole."""
        pieces = _collectives.size(self.shards)
        return piece_length(jnp.shape(leaf), pieces)

    def _sum(self, m: jax.Array, whole: jax.Array) -> jax.Array:
        length = self._length(whole)
        if length is None:
            return _collectives.psum(m, (*self.across, *self.beside))
        flat = _padded(m, length * _collectives.size(self.across))
        m = _line(_collectives.scatter(flat, self.across), whole.ndim)
        return _collectives.psum(m, self.beside)

    def _collect(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        length = self._length(whole)
        if length is None:
            return self._gather(part)
        count = _collectives.size(self.across)
        flat = _padded(part, length * count).reshape(count, length)
        pieces = _collectives.all_to_all(flat, self.across)
        pieces = pieces.reshape(count, *(1,) * (whole.ndim - 1), length)
        return _collectives.gather(pieces, self.beside)

    def _together(self, pieces: PyTree, how: robust.Combine, like: PyTree) -> PyTree:
        def total(parts: PyTree) -> jax.Array:
            def chosen(is_whole: bool) -> PyTree:
                def choose(leaf: Any, part: Any) -> Any:
                    return part if (self._length(leaf) is None) == is_whole else None

                return jax.tree.map(choose, like, parts)

            summed = _collectives.psum(robust.whole_total(chosen(False)), self.shards)
            return summed + robust.whole_total(chosen(True))

        return how.of(pieces, total)

    def _wrap(self, center: PyTree, like: PyTree) -> PyTree:
        like = unwrapped(like)
        if isinstance(like, CenterShards):
            return dataclasses.replace(like, pieces=center)
        shapes = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(like))
        return CenterShards(center, shapes, *self._cut_here)

    @property
    def _cut_here(self) -> tuple[Any, Any]:
        """Axes of the pieces (within, across), and the number of pieces over each."""
        axes = (self.within, self.across)
        return axes, tuple(map(_collectives.size, axes))

    def _like_whole(self, center: PyTree) -> PyTree:
        here = self._cut_here
        if (center.axes, center.cut) != here:
            raise errors.TreeMismatchError(
                f"the state's center is in shards over the axes {center.axes} of sizes "
                f"{center.cut}, but here over {here[0]} of sizes {here[1]}. Read it "
                "with center_params on the mesh where it was made, and start anew from "
                "the result"
            )
        return jax.tree.unflatten(
            jax.tree.structure(center.pieces),
            [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in center.shapes],
        )


def gathered(center: CenterShards) -> PyTree:
    """Return the whole center, whose axes must be bound here."""
    within, across = center.axes
    axes = (*within, *across)
    hint = "the center is in shards over this axis; use towers.center_params(opt_state)"
    check.axis_bound(axes, hint)
    layout = Sharded(across, Placement(shard_axis=axes))
    like = layout._like_whole(center)
    return layout.whole(layout.unite(center.pieces, like), like)


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
    return _line(jnp.where(index < pieces, piece, 0), ndim)


def _padded(x: jax.Array, length: int) -> jax.Array:
    flat = x.reshape(-1)
    return flat if flat.size == length else jnp.pad(flat, (0, length - flat.size))


def _line(flat: jax.Array, ndim: int) -> jax.Array:
    """Give a flat array as many dimensions as its leaf has.

    Optimizers may read the number of dimensions, such as for a weight decay of matrices
    only.
    """
    return flat.reshape((1,) * (ndim - 1) + (-1,))
