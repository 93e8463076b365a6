"""`all_reduce` of a worker's gradients over towers, like TensorFlow's TowerOptimizer.

Gradients are reduced in *buckets* (one leaf, several small leaves, or a piece of a
large leaf), each by one run of the chosen algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import check, combinations
from agn_optax.round import collectives
from agn_optax.towers import _rows

PyTree = Any
Algorithm = Literal["all_reduce", "reduce_scatter", "hierarchical"]


class AllReduceState(NamedTuple):
    """State of `all_reduce`."""

    in_flight: PyTree  # with delay=1, this tower's unreduced gradients; else None


def all_reduce(
    axis_name: Any,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    algorithm: Algorithm = "all_reduce",
    bucket_bytes: int | None = None,
    bucket_leaves: int | None = None,
    delay: Literal[0, 1] = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Reduce the gradients of all towers of an axis; put it first in a chain.

    .. math:: g \leftarrow \frac1n \sum_{i=1}^n g_i
        \quad\text{or}\quad g \leftarrow \sum_{i=1}^n g_i

    It makes the towers one data-parallel worker. On an axis of one tower, nothing is
    compiled (unless a shard_map checks varying axes, which needs a collective).

    Row-sparse gradients (`jax.experimental.sparse.BCOO` with ``n_sparse=1``: values and
    row indices) are reduced by gathering the rows of all towers and summing duplicates.
    They remain BCOO; use `densify` for optimizers that need dense gradients.

    Gradients are sent in their own dtype. Means of 16-bit gradients are scaled before
    the sum, which could overflow. To send others in 16 bits, cast them before.

    Args:
      axis_name: the axis of the towers, or a tuple of axes, bound by shard_map, pmap or
        vmap around ``update``. (Nested vmaps over a tuple of axes support neither
        "reduce_scatter" nor row-sparse gradients.)
      reduction: ``"mean"`` of the towers' gradients, for losses that are means over a
        tower's examples (and for `reduce_loss`); ``"sum"`` for losses that are sums.
      algorithm: ``"all_reduce"`` leaves the algorithm to XLA. ``"reduce_scatter"`` sums
        a piece on every tower and gathers the pieces. ``"hierarchical"`` needs two or
        more axes, the last of them the fast one (towers in a host): reduce-scatter over
        the last, all-reduce of the pieces over the others, and all-gather over the
        last, so that a slow link carries each element once.
      bucket_bytes: maximum bytes of a bucket. Smaller gradients of one dtype are merged
        up to this size, and larger ones are cut into equal pieces of at most this size;
        the buckets are reduced one after the other. None reduces every gradient
        separately, and XLA may merge them.
      bucket_leaves: maximum number of gradients merged into one bucket; None for no
        limit.
      delay: 1 applies the gradients of the previous step (zeros in the first step), so
        that their reduction runs while this step computes. Waiting gradients have the
        dtypes of the parameters. Not for row-sparse gradients.

    Returns:
      A transformation with `AllReduceState`, which keeps the dtypes of its updates.

    Raises:
      InvalidArgumentError: an option is not one of the above, or "hierarchical" has
        only one axis, or ``bucket_leaves`` came without ``bucket_bytes``.
      UnboundAxisError: ``axis_name`` is not bound around ``update``.
      TreeMismatchError: a gradient is not a real floating array; or, in a shard_map
        that checks varying axes, it is equal on all towers already, because JAX itself
        sums the gradients of replicated parameters.

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
    check.one_of(delay, "delay", (0, 1))
    check.one_of(algorithm, "algorithm", get_args(Algorithm))
    if not axes:
        raise errors.InvalidArgumentError(
            f"axis_name must name the axis of the towers, got {axis_name!r}"
        )
    if algorithm == "hierarchical" and len(axes) < 2:
        raise errors.InvalidArgumentError(
            "algorithm='hierarchical' needs two axes, such as ('hosts', 'towers'), got "
            f"{axes[0]!r}"
        )
    if bucket_bytes is not None:
        check.positive_int(bucket_bytes, "bucket_bytes")
    if bucket_leaves is not None:
        check.positive_int(bucket_leaves, "bucket_leaves")
    if bucket_leaves is not None and bucket_bytes is None:
        raise errors.InvalidArgumentError(
            f"bucket_leaves={bucket_leaves} bounds what bucket_bytes merges: give both"
        )

    def init_fn(params: PyTree) -> AllReduceState:
        return AllReduceState(optax.tree.zeros_like(params) if delay else None)

    def update_fn(
        updates: PyTree, state: AllReduceState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, AllReduceState]:
        check.axis_bound(axis_name)
        _check_gradients(updates, axes)
        if delay:
            updates, state = _delayed(updates, state)
        if collectives.size(axes) == 1 and not collectives.is_checked(axes):
            return _rows.map_rows(_rows.unique, updates), state
        scale = 1 / collectives.size(axes) if reduction == "mean" else 1.0

        def reduce(x: Any) -> Any:
            if _rows.is_rows(x):
                return _rows.all_gather(x, axes, scale)
            return _reduced(jnp.asarray(x), axes, algorithm, scale)

        if bucket_bytes is None:
            return jax.tree.map(reduce, updates, is_leaf=_rows.is_rows), state
        leaves, structure = jax.tree.flatten(updates, is_leaf=_rows.is_rows)
        most_leaves = bucket_leaves or len(leaves)
        reduced = _in_buckets(reduce, leaves, bucket_bytes, most_leaves)
        return jax.tree.unflatten(structure, reduced), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _reduced(
    x: jax.Array, axes: collectives.Axes, algorithm: Algorithm, scale: float
) -> jax.Array:
    """Return the sum over all towers times ``scale``.

    In 16 bits, ``x`` is scaled before the sum, which could overflow in float16.
    """
    if not x.size:
        return collectives.psum(x, axes)
    factor = jnp.asarray(scale, x.dtype)
    if jnp.finfo(x.dtype).bits > 16:
        return _summed(x, axes, algorithm) * factor
    return _summed(x * factor, axes, algorithm)


def _summed(x: jax.Array, axes: collectives.Axes, algorithm: Algorithm) -> jax.Array:
    if algorithm == "all_reduce":
        return collectives.psum(x, axes)
    first = len(axes) - 1 if algorithm == "hierarchical" else 0
    slow, fast = axes[:first], axes[first:]
    pieces = collectives.cut(x, collectives.size(fast))
    piece = collectives.psum(collectives.scatter(pieces.reshape(-1), fast), slow)
    whole = collectives.gather(piece, fast, same=True)
    return whole[: x.size].reshape(x.shape)


def densify() -> optax.GradientTransformationExtraArgs:
    """Make row-sparse gradients dense; other gradients are not changed.

    `all_reduce` sends only the rows that a step touched. After it in the chain,
    `densify` writes these rows into zeros, on each tower separately, for optimizers
    that need dense arrays.

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


def _in_buckets(
    reduce: Callable[[Any], Any], leaves: list[Any], most_bytes: int, most_leaves: int
) -> list[Any]:
    """Return the reduced leaves; dense ones are reduced in buckets."""
    leaves = [reduce(x) if _rows.is_rows(x) else jnp.asarray(x) for x in leaves]
    reduce_next = _after_one_another(reduce)
    for group in _groups(leaves, most_bytes, most_leaves):
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in group])
        if flat.size:
            pieces = -(-flat.nbytes // most_bytes)
            length = -(-flat.size // pieces)
            starts = range(0, flat.size, length)
            flat = jnp.concatenate(
                [reduce_next(flat[start : start + length]) for start in starts]
            )
        ends = np.cumsum([leaves[i].size for i in group])
        for i, line in zip(group, jnp.split(flat, ends[:-1]), strict=True):
            leaves[i] = line.reshape(leaves[i].shape)
    return leaves


def _groups(
    leaves: list[Any], most_bytes: int, most_leaves: int
) -> Iterator[list[int]]:
    """Yield groups of dense leaves of one dtype that fit into a bucket, as indices."""
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
    """Return ``reduce`` with a formal dependency of each bucket on the one before.

    XLA would merge independent collectives, whatever the size of the buckets. Buckets
    must not be empty.
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
    """Return the previous step's gradients, and a state with the current ones."""
    if any(map(_rows.is_rows, jax.tree.leaves(updates, is_leaf=_rows.is_rows))):
        combinations.reject(
            "row-sparse gradients",
            "all_reduce with a delay",
            "updates, delay=1",
            errors.TreeMismatchError,
        )
    check.same_tree(updates, state.in_flight, "updates", "state.in_flight")
    before = optax.tree.cast_like(state.in_flight, updates)
    waiting = optax.tree.cast_like(updates, state.in_flight)
    return before, state._replace(in_flight=waiting)


def _check_gradients(updates: PyTree, axes: collectives.Axes) -> None:
    leaves = tree_flatten_with_path(updates, is_leaf=_rows.is_rows)[0]
    if not leaves:
        raise errors.TreeMismatchError("there are no gradients: updates has no leaves")
    checked = collectives.is_checked(axes)
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
