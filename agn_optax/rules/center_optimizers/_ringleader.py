"""The center optimizer `ringleader`: every step has messages of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees

PyTree = Any


class RingleaderState(NamedTuple):
    """State of `ringleader`."""

    inner_state: PyTree  # state of the wrapped optimizer
    table: PyTree  # like the center, [workers, ...]: mean message of each worker
    counts: jax.Array  # int32 [workers]: number of messages in each mean
    has_stepped: jax.Array  # bool [workers]: whose message of this round made a step
    total: PyTree  # like the center: sum over all workers' means of this round
    next_total: PyTree  # the same of the next round


def ringleader(
    optimizer: optax.GradientTransformation, workers: int
) -> optax.GradientTransformationExtraArgs:
    r"""Step along the mean of all workers' mean messages (Ringleader ASGD).

    .. math::
        G_i \leftarrow G_i + g, \; b_i \leftarrow b_i + 1
            \text{ with each message of worker } i; \qquad
        c \leftarrow c + \text{optimizer}\Bigl(
            \frac1n \sum_{i=1}^n \frac{G_i}{b_i} \Bigr)

    in rounds of n steps. In the first phase of a round, messages are collected until
    the table has one of every worker, and the message that completes it makes the first
    step. In the second phase, each other worker's next message enters the table and
    makes a step. Further messages of workers that have made theirs are collected for
    the next round. Each worker's data then counts alike at every step, however fast the
    worker is: with unlike data, messages applied one by one move the center closer to
    the minimum of the fast workers' data. No message is ignored, and none is applied
    more than :math:`2n - 2` steps after its anchor.

    All n workers must take part: without one of them the center stops. A worker is
    known by its index (the extra argument ``worker``), which it gets when it joins, and
    keeps while it is registered, and when it returns or the center restarts, unless
    another worker has got it meanwhile. A combined message (of a round or of a mesh,
    with the index -1) makes a step at once, without the table.

    The state has the memory of n + 2 models, so a sharded center rejects it. Instead of
    :math:`G_i`, which are no longer needed once worker i has made its step, the table
    has running means, and collects those of the next round in the same place.

    Args:
      optimizer: the center optimizer. It also runs at the messages in between, but its
        results are discarded.
      workers: :math:`n`, the number of workers.

    Returns:
      A center optimizer with `RingleaderState`, which needs the extra argument
      ``worker``. Its inner optimizer gets the extra arguments of the last message. A
      center raises `CenterFullError` for messages of further workers, and does not
      move.

    Raises:
      InvalidArgumentError: ``workers`` is not a positive int; or, raised by its
        ``update``, the worker's index is out of range (checked only if not traced).
      InvalidTypeError: ``optimizer`` is not an optax optimizer.
      MissingArgumentError: ``update`` is called without ``worker``.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> from agn_optax.center import Submission
      >>> outer = agn_optax.center_optimizers.ringleader(optax.sgd(1.0), workers=2)
      >>> center = agn_optax.LocalCenter(agn_optax.rules.diloco(outer), jnp.zeros(1))
      >>> fast, slow = center.join("fast"), center.join("slow")
      >>> for sequence in (1, 2, 3):
      ...     answer = fast.exchange(Submission(sequence, jnp.full(1, 2.0), 0))
      >>> print(answer.params, slow.exchange(Submission(1, jnp.full(1, 4.0), 0)).params)
      [0.] [-3.]

    References:
      Artavazd Maranjyan, Peter Richtárik, *Ringleader ASGD: The First Asynchronous SGD
      with Optimal Time Complexity under Data Heterogeneity*, 2025. Its abstract was
      read, and a summary of the method with both phases and the equation above; the
      listing of the algorithm was not.
    """
    optimizer = check.optimizer(optimizer, "optimizer")
    workers = check.positive_int(workers, "workers")

    def init_fn(params: PyTree) -> RingleaderState:
        def empty_table(c: Any) -> jax.Array:
            return jnp.zeros((workers, *jnp.shape(c)), jnp.result_type(c))

        return RingleaderState(
            optimizer.init(params),
            jax.tree.map(empty_table, params),
            jnp.zeros(workers, jnp.int32),
            jnp.zeros(workers, bool),
            optax.tree.zeros_like(params),
            optax.tree.zeros_like(params),
        )

    def update_fn(
        updates: PyTree,
        state: RingleaderState,
        params: PyTree = None,
        *,
        worker: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, RingleaderState]:
        check.extra_argument_given(worker, "worker=0", "ringleader")
        if not check.is_traced(worker) and not -1 <= worker < workers:
            raise errors.InvalidArgumentError(
                f"worker must be in [-1, {workers}), as ringleader has workers="
                f"{workers}, got {worker}"
            )
        worker = jnp.asarray(worker, jnp.int32)
        is_combined = worker < 0
        i = jnp.maximum(worker, 0)

        counts = state.counts.at[i].add(1)
        is_early = state.has_stepped[i]  # for the next round
        is_second_phase = state.has_stepped.any()
        steps = ~is_early & (is_second_phase | (counts > 0).all())
        has_stepped = state.has_stepped.at[i].set(is_early | steps)
        is_last = steps & has_stepped.all()

        def entry(at: jax.Array | int) -> Callable[[PyTree], PyTree]:
            return lambda table: jax.tree.map(lambda means: means[at], table)

        # A cond is computed once, before the table is written. XLA would repeat another
        # expression for each of its uses, and would have to copy the table.
        mean_before = jax.lax.cond(is_combined, entry(0), entry(i), state.table)

        # The mean with a message g is m + (g - m) / b; a sum of means moves as far.
        def move_of(g: jax.Array, m: jax.Array) -> jax.Array:
            wide = trees.wide(g)
            change = g.astype(wide) - m.astype(wide)
            return change / counts[i].astype(wide)

        def added(to: PyTree, where: jax.Array) -> PyTree:
            return jax.tree.map(
                lambda t, move: jnp.where(where, t + move.astype(t.dtype), t), to, moves
            )

        def write(means: jax.Array, m: jax.Array, move: jax.Array) -> jax.Array:
            new = jnp.where(steps, 0, m + move.astype(m.dtype))
            return means.at[i].set(jnp.where(is_combined, m, new))

        moves = jax.tree.map(move_of, updates, mean_before)
        total = added(state.total, ~is_early)
        next_total = added(state.next_total, is_early)
        mean = jax.tree.map(
            lambda g, t: jnp.where(is_combined, g, (t / workers).astype(g.dtype)),
            *(updates, total),
        )
        new_updates, inner_state = optimizer.update(
            mean, state.inner_state, params, worker=worker, **extra_args
        )

        zeros, where = optax.tree.zeros_like, optax.tree.where
        counts = counts.at[i].set(jnp.where(steps, 0, counts[i]))
        has_stepped = has_stepped & ~is_last
        total = where(is_last, next_total, total)
        next_total = where(is_last, zeros(next_total), next_total)
        after = counts, has_stepped, total, next_total
        before = state.counts, state.has_stepped, state.total, state.next_total
        counts, has_stepped, total, next_total = where(is_combined, before, after)
        moves_center = is_combined | steps
        return where(moves_center, new_updates, zeros(new_updates)), RingleaderState(
            where(moves_center, inner_state, state.inner_state),
            jax.tree.map(write, state.table, mean_before, moves),
            *(counts, has_stepped, total, next_total),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def max_workers(center_state: PyTree) -> int | None:
    """Return for how many workers a state has room; None for any number."""
    found = trees.nodes(center_state, RingleaderState)
    return min((len(state.counts) for _, state in found), default=None)
