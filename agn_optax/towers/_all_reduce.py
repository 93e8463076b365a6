"""The gradients of a worker's towers as one: TowerOptimizer's place in a chain.

Gradients are laid out in *buckets* (one leaf, or several small ones, or a piece of a
large one), and each bucket is one collective of the chosen algorithm. `_way` has the
algorithms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import check, combinations
from agn_optax.round import collectives
from agn_optax.rules import codecs
from agn_optax.towers import _rows
from agn_optax.towers._way import Algorithm, OnTheWay, Way, check_way

PyTree = Any


class AllReduceState(NamedTuple):
    """State of `all_reduce`."""

    in_flight: PyTree  # with delay=1 this tower's gradients, not reduced yet; or None
    codec_state: PyTree = None  # what the codec keeps on this tower; None if nothing


def all_reduce(
    axis_name: Any,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    algorithm: Algorithm = "all_reduce",
    bucket_bytes: int | None = None,
    bucket_leaves: int | None = None,
    codec: codecs.Codec | None = None,
    sum_dtype: Any = None,
    delay: Literal[0, 1] = 0,
    wire_dtype: Any = None,
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
      codec: how gradients travel, one of `agn_optax.codecs`; they come out in their
        own dtypes. None leaves them as they are.

        ``cast(dtype)`` makes the collectives those of that dtype. A mean is divided
        before a cast to 16 bits, so that float16 does not overflow in the sum. Some
        backends (XLA's CPU) widen 16-bit sums on the wire; with ``sum_dtype`` they
        cannot.

        What any other codec sends cannot be summed on its way. Each bucket, or
        gradient, is cut into as many pieces as there are towers, and each piece is
        encoded by itself (blocks do not span pieces). Encoded pieces travel all to all;
        every tower decodes those of its piece and adds them up. On the way back it
        encodes that sum, or mean, and all towers get all of them and decode the same
        numbers. So both ways are encoded, and both lose something: with
        `error_feedback` every tower keeps a residual of all that it sends, and one of
        the piece that it answers for, which is fed back into its next sum. With
        "hierarchical", pieces are encoded between groups only, on the slow axes.

        A codec with state, such as `error_feedback`, has another one on every tower:
        make it inside the mesh, with ``towers.create(tx.init, params)``.
      sum_dtype: floating dtype in which towers add up what travels by the codec, pieces
        of which they exchange. None is float32 or wider; for a cast it is the dtype
        that travels, and the sum is the collective's.
      delay: 1 applies the gradients of the step before (zeros in the first step), so
        that their reduction runs while this step computes. Gradients wait in the dtypes
        of the parameters. Not for row-sparse ones.
      wire_dtype: deprecated, goes in 0.2: say ``codec=codecs.cast(dtype)``, which is
        the same.

    Returns:
      A transformation with `AllReduceState`, which keeps the dtypes of its updates.

    Raises:
      InvalidArgumentError: an option is not one of the above, or "hierarchical" came
        with one axis; or the codec makes matrices smaller and vectors not
        (`low_rank`), as pieces are vectors.
      InvalidTypeError: ``codec`` is not a codec.
      UnboundAxisError: ``axis_name`` is not bound around ``update``, or around ``init``
        of a codec with state.
      TreeMismatchError: a gradient is no real floating array, or is row-sparse where
        the codec is no cast; or, in a shard_map that checks varying axes, it is the
        same on every tower already, since JAX has summed the gradients of replicated
        parameters itself.

    Example:
      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> tx = optax.chain(agn_optax.all_reduce("towers"), optax.sgd(1.0))
      >>> step = lambda g: tx.update(g, tx.init(g))[0]
      >>> print(jax.vmap(step, axis_name="towers")(jnp.array([1.0, 2.0, 6.0])))
      [-3. -3. -3.]

      In 8 bits, with what is lost in the state:

      >>> codec = agn_optax.codecs.error_feedback(agn_optax.codecs.quantize(8))
      >>> tx = agn_optax.all_reduce("towers", codec=codec)
      >>> towers = agn_optax.Towers(4)
      >>> state = towers.create(tx.init, jnp.zeros(10))
      >>> sender, owner = state.codec_state.states[0]
      >>> sender.residual.shape, owner.residual.shape  # of every tower
      ((4, 4, 3), (4, 3))

    References:
      Rajeev Thakur, Rolf Rabenseifner, William Gropp, *Optimization of Collective
      Communication Operations in MPICH*, 2005.
      Hanlin Tang et al., *1-bit Adam: Communication Efficient Large-Scale Training with
      Adam's Convergence Speed*, 2021, for error feedback on both ways.
    """
    axes = collectives.names(axis_name)
    check.one_of(reduction, "reduction", ("mean", "sum"))
    check.one_of(delay, "delay", (0, 1))
    if not axes:
        raise errors.InvalidArgumentError(
            f"axis_name must name the axis of the towers, got {axis_name!r}"
        )
    if wire_dtype is not None:
        codec = _cast(wire_dtype, codec)
    way = check_way(axes, algorithm, codec, sum_dtype)
    if bucket_bytes is not None:
        check.positive_int(bucket_bytes, "bucket_bytes")
    if bucket_leaves is not None:
        check.positive_int(bucket_leaves, "bucket_leaves")
    if bucket_leaves is not None and bucket_bytes is None:
        raise errors.InvalidArgumentError(
            f"bucket_leaves={bucket_leaves} bounds what bucket_bytes merges: give both"
        )

    def through(updates: PyTree, reduce: Callable[[jax.Array], jax.Array]) -> PyTree:
        """What is reduced at a time goes through ``reduce``; row-sparse ones do not."""
        if bucket_bytes is None:
            return jax.tree.map(
                lambda leaf: leaf if _rows.is_rows(leaf) else reduce(leaf),
                updates,
                is_leaf=_rows.is_rows,
            )
        leaves, structure = jax.tree.flatten(updates, is_leaf=_rows.is_rows)
        reduce = _after_one_another(reduce)
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
        return jax.tree.unflatten(structure, leaves)

    def first_states(params: PyTree) -> OnTheWay:
        states: list[PyTree] = []

        def begin(x: jax.Array) -> jax.Array:
            states.append(way.init(x))
            return x

        through(jax.tree.map(jnp.zeros_like, params), begin)
        return OnTheWay(states, axes)

    def init_fn(params: PyTree) -> AllReduceState:
        codec_state = None
        if way.has_state:
            check.axis_bound(
                axis_name,
                f"{codec} keeps something else on every tower, so its state is made "
                "inside the mesh: towers.create(tx.init, params)",
            )
            codec_state = first_states(params)
        in_flight = optax.tree.zeros_like(params) if delay else None
        return AllReduceState(in_flight, codec_state)

    def update_fn(
        updates: PyTree, state: AllReduceState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, AllReduceState]:
        del params, extra_args
        check.axis_bound(axis_name)
        _check_gradients(updates, axes, way)
        if delay:
            updates, state = _delayed(updates, state)
        if collectives.size(axes) == 1 and not collectives.checked(axes):
            return _rows.map_rows(_rows.unique, updates), state
        scale = 1 / collectives.size(axes) if reduction == "mean" else 1.0
        updates = jax.tree.map(
            lambda leaf: (
                _rows.all_gather(leaf, axes, scale, way.dtype)
                if _rows.is_rows(leaf)
                else jnp.asarray(leaf)
            ),
            updates,
            is_leaf=_rows.is_rows,
        )
        old = iter(())
        if way.has_state:
            expected = jax.eval_shape(first_states, updates)
            what = "state.codec_state", "what is kept of these gradients"
            check.same_tree(state.codec_state, expected, *what)
            old = iter(state.codec_state.states)
        states: list[PyTree] = []

        def reduce(x: jax.Array) -> jax.Array:
            reduced, kept = way.reduce(x, scale, next(old, None))
            states.append(kept)
            return reduced

        updates = through(updates, reduce)
        if way.has_state:
            state = state._replace(codec_state=OnTheWay(states, axes))
        return updates, state

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


def _cast(wire_dtype: Any, codec: codecs.Codec | None) -> codecs.Codec:
    """What the deprecated argument stands for."""
    dtype = check.float_dtype(wire_dtype, "wire_dtype")
    if codec is not None:
        raise errors.InvalidArgumentError(
            f"wire_dtype={dtype} is deprecated for codec=codecs.cast({dtype.name!r}), "
            f"and there is codec={codec} already: leave wire_dtype out"
        )
    warnings.warn(
        "all_reduce(wire_dtype=...) is deprecated and goes in agn_optax 0.2: say "
        f"codec=agn_optax.codecs.cast({dtype.name!r}), which is the same",
        DeprecationWarning,
        stacklevel=3,
    )
    return codecs.cast(dtype)


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
    return before, state._replace(in_flight=waiting)


def _check_gradients(updates: PyTree, axes: collectives.Axes, way: Way) -> None:
    leaves = tree_flatten_with_path(updates, is_leaf=_rows.is_rows)[0]
    if not leaves:
        raise errors.TreeMismatchError("there are no gradients: updates has no leaves")
    checked = collectives.checked(axes)
    for path, leaf in leaves:
        if _rows.is_rows(leaf):
            _rows.check(leaf, f"updates{keystr(path)}")
            if way.codec is not None and way.dtype is None:
                combinations.refuse(
                    "row-sparse gradients",
                    "all_reduce with a codec",
                    f"updates{keystr(path)}, codec {way.codec}",
                )
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
