"""State with one replica per tower, stacked along a new first dimension.

Most leaves are equal on all towers; some differ on purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.round import (
    CenterShards,
    ExchangeState,
    OnHost,
    as_stored,
    collectives,
    piece_length,
)
from agn_optax.towers._all_reduce import AllReduceState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The result of a comparison of replicas; true if they are identical."""

    differs: str | None = None  # path of the first leaf that differs between towers

    def __bool__(self) -> bool:
        """Return True if no leaf differs."""
        return self.differs is None

    def __str__(self) -> str:
        if self:
            return "all towers agree"
        return f"towers differ, first in state{self.differs}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerTower:
    """A part of the state that differs along ``axes`` on purpose.

    In stacked state, ``rows`` have a first dimension of all towers; in state from
    `unreplicate`, one dimension for each of ``axes``.
    """

    rows: PyTree
    axes: collectives.Axes = dataclasses.field(metadata={"static": True})

    def sharding(self, sharding: NamedSharding) -> NamedSharding:
        """Return the sharding of pieces from `unreplicate`, one for each tower.

        Raises:
          TreeMismatchError: the pieces do not fit the mesh's axes and sizes.
        """
        sizes = sharding.mesh.shape
        if any(name not in sizes for name in self.axes):
            raise errors.TreeMismatchError(
                f"state has pieces of a center in shards over axes {self.axes}, but "
                f"these towers have only the axes {tuple(sizes)}: make towers with the "
                "same axis names as those that made the state"
            )
        expected = tuple(sizes[name] for name in self.axes)
        for leaf in jax.tree.leaves(self.rows):
            found = tuple(leaf.shape[: len(self.axes)])
            if found != expected:
                raise errors.TreeMismatchError(
                    f"state has pieces of axes {self.axes} and sizes {found} (of a "
                    f"center in shards); these towers have {expected}. Read the center "
                    "with center_params where the state was made, and start anew from "
                    "it"
                )
        return sharding.update(spec=PartitionSpec(*self.axes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A part of the state that differs on purpose, and is saved as its mean.

    Gradients that wait for their reduction differ between the towers of one worker. If
    each worker has its own center, these centers differ between workers.
    """

    rows: PyTree
    # True: the mean is over all workers. False: over the first worker's towers.
    of_workers: bool = dataclasses.field(metadata={"static": True})


def map_key_data(function: Callable[..., Any], *keys: Any) -> Any:
    """Apply ``function`` to the data of random keys, and return keys again."""
    data = function(*map(jax.random.key_data, keys))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys[0]))


def fold_keys(tree: PyTree, index: Any) -> PyTree:
    """Fold ``index``, that of the tower, into random keys; tower 0 keeps its keys."""

    def fold(leaf: Any) -> Any:
        if not trees.is_key(leaf):
            return leaf
        flat = jax.vmap(lambda key: jax.random.fold_in(key, index))(leaf.reshape(-1))
        return jnp.where(index == 0, leaf, flat.reshape(leaf.shape))

    return jax.tree.map(fold, tree)


def mark_differing(state: PyTree, *, of_workers: bool = True) -> PyTree:
    """Wrap all parts of ``state`` that differ between towers in `PerTower` or `Mean`.

    Args:
      state: stacked state.
      of_workers: whether to wrap also parts that differ only between workers, and are
        equal on the towers of each worker.
    """
    own = functools.partial(Mean, of_workers=True) if of_workers else lambda tree: tree

    def mark(node: Any) -> Any:
        if isinstance(node, AllReduceState):
            return AllReduceState(Mean(node.in_flight, of_workers=False))
        return as_stored(node.center).mark_differing(node, PerTower, own)

    return trees.map_nodes(mark, state, (ExchangeState, AllReduceState))


def is_marked(node: Any) -> bool:
    return isinstance(node, PerTower | Mean)


def is_per_tower(node: Any) -> bool:
    return isinstance(node, PerTower)


def one_tower(state: PyTree) -> PyTree:
    """Return one tower's state, with the tower's own rows in place of `PerTower`."""

    def of_tower(node: PerTower) -> PyTree:
        dimensions = len(node.axes)
        return jax.tree.map(lambda x: x.reshape(x.shape[dimensions:]), node.rows)

    return trees.map_nodes(of_tower, state, PerTower)


def agreement(state: PyTree, workers: int) -> Agreement:
    """Compare the bits of the towers of each worker.

    Parts that differ on purpose are left out: random keys, pieces of a center, and
    gradients in flight.
    """
    leaves = {
        path: leaf
        for path, leaf in common_leaves(state).items()
        if not trees.is_key(leaf)
    }
    same = jax.device_get(_same_rows(list(leaves.values()), workers))
    differing = (p for p, is_same in zip(leaves, same, strict=True) if not is_same)
    return Agreement(next(differing, None))


def common_leaves(state: PyTree) -> dict[str, Any]:
    """Return, by path, the leaves that are not marked as differing on purpose.

    Random keys are included, although they differ; skip them to compare values.
    """
    marked = mark_differing(state, of_workers=False)
    common = trees.map_nodes(lambda _: None, marked, (PerTower, Mean))
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(common)[0]}


@functools.partial(jax.jit, static_argnums=1)
def _same_rows(leaves: list[jax.Array], workers: int) -> list[jax.Array]:
    return [_same(leaf, workers) for leaf in leaves]


def _same(leaf: jax.Array, workers: int) -> jax.Array:
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = leaf.view(f"uint{8 * leaf.dtype.itemsize}")
    bits = leaf.reshape(workers, leaf.shape[0] // workers, *leaf.shape[1:])
    return (bits == bits[:, :1]).all()


def check_centers(state: PyTree) -> None:
    """Check that all towers have the same center, or pieces of one center.

    Raises:
      InvalidArgumentError: towers have different centers, and would keep them.
    """
    marked = mark_differing(state, of_workers=False)
    for path, node in trees.nodes(marked, ExchangeState):
        center = trees.map_nodes(lambda _: None, node.center, (PerTower, OnHost))
        found = agreement(center, 1)
        if not found:
            raise errors.InvalidArgumentError(
                "towers begin with different centers, first in "
                f"state{keystr(path)}.center{found.differs}, and must begin with the "
                "same center: make it from the same parameters on each tower"
            )


def unstack_rows(
    rows: PyTree, axes: collectives.Axes, sizes: Mapping[str, int]
) -> PyTree:
    """Return the rows that differ along ``axes``, with a dimension for each axis.

    Args:
      rows: rows of all towers, along the first dimension.
      axes: the axes.
      sizes: the sizes of the mesh's axes, by name and in order.
    """
    index = tuple(slice(None) if name in axes else 0 for name in sizes)
    order = [[name for name in sizes if name in axes].index(name) for name in axes]

    def cut(leaf: Any) -> Any:
        leaf = leaf.reshape(*sizes.values(), *leaf.shape[1:])[index]
        return leaf.transpose(*order, *range(len(order), leaf.ndim))

    return jax.tree.map(cut, rows)


def cut_again(state: PyTree, sizes: Mapping[str, int]) -> PyTree:
    """Cut the sharded centers of a state from `unreplicate` for a mesh of these sizes.

    The elements stay the same, bit for bit, in other pieces. The padding of the last
    piece has no meaning.
    """

    def cut(node: ExchangeState) -> ExchangeState:
        shards = [center for _, center in trees.nodes(node.center, CenterShards)]
        if not (shards and is_per_tower(shards[0].pieces)):
            return node
        (center,) = shards
        leaves, names = jax.tree.leaves(center.pieces.rows), center.pieces.axes
        is_local = all(getattr(x, "is_fully_addressable", True) for x in leaves)
        cuts = {jnp.shape(leaf)[: len(names)] for leaf in leaves}
        new_cut = tuple(sizes.get(name, 0) for name in names)
        if len(cuts) != 1 or cuts == {new_cut} or 0 in new_cut or not is_local:
            return node  # if the pieces do not fit, `PerTower.sharding` raises
        paths = [path for path, _ in tree_flatten_with_path(center.pieces.rows)[0]]
        (old_cut,) = cuts
        cut_node = functools.partial(
            _cut_node,
            shapes=dict(zip(paths, center.shapes, strict=True)),
            pieces=(math.prod(old_cut), math.prod(new_cut)),
            sizes=sizes,
        )
        leading = as_stored(node.center).leading
        within, across = (math.prod(sizes[n] for n in axes) for axes in center.axes)
        center = dataclasses.replace(
            center,
            pieces=cut_node(center.pieces, leading=leading),
            cut=(within, across),
        )
        return node._replace(
            center=trees.map_nodes(lambda _: center, node.center, CenterShards),
            center_state=cut_node(node.center_state, mode="edge", leading=leading),
            local=node.local._replace(
                record=cut_node(node.local.record),
                codec_state=cut_node(node.local.codec_state),
            ),
        )

    return trees.map_nodes(cut, state, ExchangeState)


def _cut_node(
    node: PerTower,
    *,
    shapes: Mapping[Any, tuple[int, ...]],
    pieces: tuple[int, int],
    sizes: Mapping[str, int],
    mode: Literal["constant", "edge"] = "constant",
    leading: tuple[int, ...] = (),
) -> PerTower:
    """Cut the leaves of ``node`` again, for other sizes of its axes.

    Args:
      node: the rows along some axes.
      shapes: the shapes of the parameters, by their paths.
      pieces: the number of pieces of the center so far, and the new one.
      sizes: the sizes of the axes, by name.
      mode: how `numpy.pad` fills the last piece.
      leading: dimensions of size 1 that each leaf has before its own.
    """
    counts = tuple(sizes[name] for name in node.axes)
    old_pieces, new_pieces = pieces

    def cut_leaf(path: Any, leaf: Any) -> Any:
        rows = np.asarray(leaf)
        rows = rows.reshape(-1, *rows.shape[len(counts) + len(leading) :])
        # An optimizer's state contains trees like the parameters, so the end of a path
        # is the path of a parameter.
        ends = (path[n:] for n in range(len(path) + 1))
        shape = next((shapes[end] for end in ends if end in shapes), None)
        old = None if shape is None else _row_shape(shape, len(rows), old_pieces)
        if shape is None or rows.shape[1:] != old:
            # It belongs to no parameter, such as a counter.
            shape = new = rows.shape[1:]
            whole = rows[0]
        else:
            new = _row_shape(shape, math.prod(counts), new_pieces)
            whole = rows[0] if old == shape else rows
        flat = whole.reshape(-1)[: math.prod(shape)]
        cut_shape = (*counts, *leading, *new)
        if new == shape:
            return np.broadcast_to(flat.reshape((*leading, *new)), cut_shape)
        missing = math.prod(cut_shape) - flat.size
        return np.pad(flat, (0, missing), mode=mode).reshape(cut_shape)

    return PerTower(tree_map_with_path(cut_leaf, node.rows), node.axes)


def _row_shape(shape: tuple[int, ...], rows: int, pieces: int) -> tuple[int, ...]:
    """Return the shape of each of ``rows`` rows of a leaf that is cut into pieces."""
    length = piece_length(shape, pieces)
    if length is None or rows == 1:  # the leaf stays whole
        return shape
    return (*(1,) * (len(shape) - 1), length * pieces // rows)


def mean_of_rows(tree: PyTree) -> PyTree:
    """Return the mean along the first dimension; for integers, the first row."""

    def mean(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf[0]
        return trees.widened(leaf).mean(axis=0).astype(leaf.dtype)

    return jax.tree.map(mean, tree)


def check_stacked(state: PyTree, towers: int) -> None:
    """Raise unless every leaf has a row for each tower."""
    for path, leaf in tree_flatten_with_path(state)[0]:
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] != towers:
            raise errors.TreeMismatchError(
                f"state{keystr(path)} has shape {list(shape)}; a first dimension of "
                f"{towers}, one row for each tower, is expected: make it with "
                "towers.replicate(state)"
            )
