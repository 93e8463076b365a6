"""The gradients of a worker's towers as one: TowerOptimizer's place in a chain.

Gradients are laid out in *buckets* (one leaf, or several small ones, or a piece of a
large one), and each bucket is one collective of the chosen algorithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.round import collectives
from agn_optax.towers import _rows

PyTree = Any

_Algorithm = Literal["all_reduce", "reduce_scatter", "hierarchical"]


class AllReduceState(NamedTuple):
    """State of `all_reduce`."""

    in_flight: PyTree  # with delay=1 this tower's gradients, not reduced yet; or None


def all_reduce(
    axis_name: Any,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    algorithm: _Algorithm = "all_reduce",
    bucket_bytes: int | None = None,
    bucket_leaves: int | None = None,
    wire_dtype: Any = None,
    sum_dtype: Any = None,
    delay: Literal[0, 1] = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Reduces the gradients of all towers of an axis: put it first in a chain.

    .. math:: g \leftarrow \frac1n \sum_{i=1}^n g_i
        \quad\text{or}\quad g \leftarrow \sum_{i=1}^n g_i

    The towers are then one data-parallel worker. On an axis of one tower nothing is
    compiled at all (unless a shard_map checks varying axes, which only a collective can
    satisfy).

    Row-sparse gradients (`jax.experimental.sparse.BCOO` with ``n_sparse=1``: values and
    row indices) are reduced by gathering the rows of all towers and summing duplicates.
    They leave the chain as BCOO; `densify` makes dense ones of them for optimizers that
    want those.

    Args:
      axis_name: the axis of the towers, or a tuple of axes, bound by shard_map, pmap or
        vmap around ``update``. (Over a tuple of axes, nested vmaps know neither
        "reduce_scatter" nor ``sum_dtype`` nor row-sparse gradients.)
      reduction: ``"mean"`` of the towers' gradients, for losses that are means over a
        tower's examples (and for `reduce_loss`); ``"sum"`` for losses that are sums.
      algorithm: ``"all_reduce"`` leaves the way to XLA. ``"reduce_scatter"`` sums a
        piece on every tower and gathers the pieces. ``"hierarchical"`` takes two or
        more axes, the last the fast one (towers in a host): reduce-scatter over the
        last, all-reduce of the pieces over the others, all-gather over the last, so
        that a slow link carries each element once.
      bucket_bytes: bytes of a bucket. Smaller gradients of one dtype are merged up to
        it, larger ones cut into equal pieces of at most it; the buckets then go one
        after the other. None: every gradient by itself, for XLA to merge as it likes.
      bucket_leaves: most gradients merged into one bucket; None for no bound.
      wire_dtype: floating dtype in which gradients travel, bfloat16 or float16 say;
        they come out in their own. None leaves them as they are. A mean is divided
        before the cast, so that float16 does not overflow in the sum. Some backends
        (XLA's CPU) widen 16-bit sums on the wire; with ``sum_dtype`` they cannot.
      sum_dtype: floating dtype of the sum, float32 say, while ``wire_dtype`` travels:
        the towers exchange pieces and add them themselves. None sums in the dtype of
        the wire.
      delay: 1 applies the gradients of the step before (zeros in the first step), so
        that their reduction runs while this step computes. Gradients wait in the dtypes
        of the parameters. Not for row-sparse ones.

    Returns:
      A transformation with `AllReduceState`, which keeps the dtypes of its updates.

    Raises:
      InvalidArgumentError: an option is not one of the above, or "hierarchical" came
        with one axis.
      UnboundAxisError: ``axis_name`` is not bound around ``update``.
      TreeMismatchError: a gradient is no real floating array; or, in a shard_map that
        checks varying axes, it is the same on every tower already, since JAX has summed
        the gradients of replicated parameters itself.

    Example:
      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> tx = optax.chain(agn_optax.all_reduce("towers"), optax.sgd(1.0))
      >>> step = lambda g: tx.update(g, tx.init(g))[0]
      >>> print(jax.vmap(step, axis_name="towers")(jnp.array([1.0, 2.0, 6.0])))
      [-3. -3. -3.]

    References:
      Rajeev Thakur, Rolf Rabenseifner, William Gropp, *Optimization of Collective
      Communication Operations in MPICH*, 2005.
    """
    axes = collectives.names(axis_name)
    check.one_of(reduction, "reduction", ("mean", "sum"))
    check.one_of(algorithm, "algorithm", get_args(_Algorithm))
    check.one_of(delay, "delay", (0, 1))
    if not axes:
        raise errors.InvalidArgumentError(
            f"axis_name must name the axis of the towers, got {axis_name!r}"
        )
    if algorithm == "hierarchical" and len(axes) < 2:
        raise errors.InvalidArgumentError(
            "algorithm='hierarchical' needs two axes, such as ('hosts', 'towers'), got "
            f"{axis_name!r}"
        )
    if bucket_bytes is not None:
        check.positive_int(bucket_bytes, "bucket_bytes")
    if bucket_leaves is not None:
        check.positive_int(bucket_leaves, "bucket_leaves")
    if bucket_leaves is not None and bucket_bytes is None:
        raise errors.InvalidArgumentError(
            f"bucket_leaves={bucket_leaves} bounds what bucket_bytes merges: give both"
        )
    wire = _Wire(
        axes,
        algorithm,
        check.float_dtype(wire_dtype, "wire_dtype"),
        check.float_dtype(sum_dtype, "sum_dtype"),
    )
    if sum_dtype is not None and wire_dtype is None:
        raise errors.InvalidArgumentError(
            f"sum_dtype={jnp.dtype(sum_dtype)} says how what travels as wire_dtype is "
            "summed: give both"
        )

    def init_fn(params: PyTree) -> AllReduceState:
        return AllReduceState(optax.tree.zeros_like(params) if delay else None)

    def update_fn(
        updates: PyTree, state: AllReduceState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, AllReduceState]:
        del params, extra_args
        check.axis_bound(axis_name)
        _check_gradients(updates, axes)
        if delay:
            updates, state = _delayed(updates, state)
        if collectives.size(axes) == 1 and not collectives.checked(axes):
            return _rows.map_rows(_rows.unique, updates), state
        scale = 1 / collectives.size(axes) if reduction == "mean" else 1.0

        def reduced(leaf: Any) -> Any:
            if _rows.is_rows(leaf):
                return _rows.all_gather(leaf, axes, scale, wire.dtype)
            leaf = jnp.asarray(leaf)
            return wire.reduce(leaf, scale) if bucket_bytes is None else leaf

        updates = jax.tree.map(reduced, updates, is_leaf=_rows.is_rows)
        if bucket_bytes is None:
            return updates, state
        leaves, structure = jax.tree.flatten(updates, is_leaf=_rows.is_rows)
        reduce = _after_one_another(lambda bucket: wire.reduce(bucket, scale))
        for group in _groups(leaves, bucket_bytes, bucket_leaves or len(leaves)):
            flat = jnp.concatenate([leaves[i].reshape(-1) for i in group])
            if flat.size:
                pieces = -(-flat.nbytes // bucket_bytes)
                length = -(-flat.size // pieces)
                starts = range(0, flat.size, length)
                flat = jnp.concatenate(
                    [reduce(flat[start : start + length]) for start in starts]
                )
            ends = np.cumsum([leaves[i].size for i in group])
            for i, line in zip(group, jnp.split(flat, ends[:-1]), strict=True):
                leaves[i] = line.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, leaves), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def densify() -> optax.GradientTransformationExtraArgs:
    """Turns row-sparse gradients into dense ones; others pass as they are.

    `all_reduce` moves only the rows that a step touched. After it in the chain this
    writes them into zeros, on each tower for itself, for optimizers that want arrays.

    Returns:
      A stateless transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.experimental import sparse
      >>> rows, values = jnp.array([[2], [0]]), jnp.array([[1.0, 1.0], [5.0, 5.0]])
      >>> tx = densify()
      >>> gradient = sparse.BCOO((values, rows), shape=(3, 2))
      >>> print(tx.update(gradient, tx.init(jnp.zeros((3, 2))))[0])
      [[5. 5.]
       [0. 0.]
       [1. 1.]]
    """

    def dense(updates: PyTree, _: PyTree) -> PyTree:
        return _rows.map_rows(lambda rows: rows.todense(), updates)

    return optax.with_extra_args_support(optax.stateless(dense))


@dataclasses.dataclass(frozen=True)
class _Wire:
    """How one array is reduced."""

    axes: collectives.Axes
    algorithm: str
    dtype: Any  # on the wire; None is the array's own
    sum_dtype: Any  # of the sum; None is the wire's

    def reduce(self, x: jax.Array, scale: float) -> jax.Array:
        if not x.size:
            return collectives.psum(x, self.axes)
        wire, factor = self.dtype or x.dtype, jnp.asarray(scale, x.dtype)
        if jnp.finfo(wire).bits > 16:
            return self._reduce(x.astype(wire)).astype(x.dtype) * factor
        # Divided first, or a sum in float16 would overflow.
        return self._reduce((x * factor).astype(wire)).astype(x.dtype)

    def _reduce(self, x: jax.Array) -> jax.Array:
        if self.algorithm == "hierarchical":
            return self._by_pieces(x, self.axes[-1:], self.axes[:-1])
        if self.algorithm == "reduce_scatter" or self.sum_dtype is not None:
            return self._by_pieces(x, self.axes)
        return collectives.psum(x, self.axes)

    def _by_pieces(
        self, x: jax.Array, axes: collectives.Axes, others: collectives.Axes = ()
    ) -> jax.Array:
        """Summed by pieces over ``axes``, and these over ``others``."""
        flat = x.reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % collectives.size(axes)))
        piece = self._scatter(flat, axes)
        if others and self.sum_dtype is not None:
            piece = self._by_pieces(piece, others)
        else:
            piece = collectives.psum(piece, others)
        return self._gather(piece, axes)[: x.size].reshape(x.shape)

    def _scatter(self, flat: jax.Array, axes: collectives.Axes) -> jax.Array:
        if self.sum_dtype is None:
            return collectives.scatter(flat, axes)
        # As integers of the same width: some backends widen 16-bit floats on the wire.
        n = collectives.size(axes)
        # Under vmap a constant gradient is not mapped, and all_to_all wants it so.
        rows = _bits(flat.reshape(n, -1))
        rows = jnp.where(collectives.index(axes) < 0, jnp.zeros_like(rows), rows)
        pieces = collectives.all_to_all(rows, axes)
        wide = pieces.view(flat.dtype).astype(self.sum_dtype)
        return wide.sum(axis=0).astype(flat.dtype)

    def _gather(self, piece: jax.Array, axes: collectives.Axes) -> jax.Array:
        if self.dtype is None:
            return collectives.gather(piece, axes, same=True)
        return collectives.gather(_bits(piece), axes, same=True).view(piece.dtype)


def _bits(x: jax.Array) -> jax.Array:
    return x.view(f"uint{8 * x.dtype.itemsize}")


def _groups(
    leaves: list[Any], most_bytes: int, most_leaves: int
) -> Iterator[list[int]]:
    """Numbers of dense leaves of one dtype, in order, as long as they fit together."""
    by_dtype: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if not _rows.is_rows(leaf):
            by_dtype.setdefault(leaf.dtype, []).append(i)
    for same in by_dtype.values():
        group: list[int] = []
        for i in same:
            full = sum(leaves[j].nbytes for j in (*group, i)) > most_bytes
            if group and (full or len(group) == most_leaves):
                yield group
                group = []
            group.append(i)
        yield group


def _after_one_another(
    reduce: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], jax.Array]:
    """``reduce`` of lines that are not empty, each depending in name on the one before.

    XLA merges collectives that are independent, whatever the size of the buckets.
    """
    before: list[jax.Array] = []

    def reduce_next(bucket: jax.Array) -> jax.Array:
        if before:
            never = before[0][0] > jnp.inf
            bucket = bucket.at[0].set(jnp.where(never, 0, bucket[0]))
        before[:] = [reduce(bucket)]
        return before[0]

    return reduce_next


def _delayed(updates: PyTree, state: AllReduceState) -> tuple[PyTree, AllReduceState]:
    """The gradients of the step before, and the state in which these wait."""
    if any(map(_rows.is_rows, jax.tree.leaves(updates, is_leaf=_rows.is_rows))):
        raise errors.TreeMismatchError(
            "updates has row-sparse gradients, which cannot wait: their rows change "
            "from step to step. Leave delay out, or put densify() first"
        )
    check.same_tree(updates, state.in_flight, "updates", "state.in_flight")
    before = optax.tree.cast_like(state.in_flight, updates)
    waiting = optax.tree.cast_like(updates, state.in_flight)
    return before, AllReduceState(waiting)


def _check_gradients(updates: PyTree, axes: collectives.Axes) -> None:
    leaves = tree_flatten_with_path(updates, is_leaf=_rows.is_rows)[0]
    if not leaves:
        raise errors.TreeMismatchError("there are no gradients: updates has no leaves")
    checked = collectives.checked(axes)
    for path, leaf in leaves:
        if _rows.is_rows(leaf):
            _rows.check(leaf, f"updates{keystr(path)}")
            leaf = leaf.data
        check.float_leaves(leaf, f"updates{keystr(path)}")
        if checked and (alike := set(axes) - collectives.varying(jnp.asarray(leaf))):
            raise errors.TreeMismatchError(
                f"updates{keystr(path)} is the same on every tower of "
                f"{', '.join(sorted(alike))} already: "
                "JAX sums the gradients of parameters that are replicated. Make them "
                "vary before you differentiate (jax.lax.pcast(params, axes, "
                "to='varying')), or leave all_reduce out"
            )
