"""Messages that count less where the center has moved since the worker read it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check, trees

PyTree = Any


class DriftState(NamedTuple):
    """State of `scale_by_drift`."""

    centers: PyTree  # like the center, [history, ...]: version t at t modulo history
    applied: jax.Array  # int32 scalar: number of applied messages


def scale_by_drift(
    gamma: float = 1e-4, *, history: int
) -> optax.GradientTransformationExtraArgs:
    r"""Divide each element of a message by how far the center's element has moved.

    .. math:: m \leftarrow \frac{m}{\gamma^{-1} (c_t - c_{t - \tau})^2 + 1}

    where :math:`c_{t - \tau}` is the center that the worker read. A late message counts
    in full for elements that no other worker has changed since, and counts little for
    elements that others have moved. This measures the effect of staleness for each
    element instead of counting versions. It is Hermans' adaptive rule, ADAG (not the
    ADAG of dist-keras, which is `rules.agn_window`). Use it as the first part of AGN's
    center optimizer, where it prevents divergence with many workers and short periods.

    The center keeps its last versions, so that no anchor has to be sent: messages are
    those of the rule, with any codec. This takes ``history`` times the memory of the
    center. For a message with an older anchor, the oldest version kept is used.
    Messages with staleness 0, as in rounds or on a mesh, are not changed.

    Its state has several versions of the center, so a sharded center rejects it.

    Args:
      gamma: :math:`\gamma`, positive: the square of the distance at which an element
        counts half. The source has the learning rate, or 1e-4.
      history: number of versions kept, including the current one. The number of workers
        is enough if the workers have equal speeds.

    Returns:
      A transformation with `DriftState`, which needs the parameters and the extra
      argument ``staleness``, and keeps the dtypes of its updates.

    Raises:
      InvalidArgumentError: an argument is out of range.
      MissingArgumentError: raised by its ``update`` without parameters or without
        ``staleness``.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> from agn_optax.center import Submission
      >>> scale = agn_optax.center_optimizers.scale_by_drift(0.25, history=8)
      >>> rule = agn_optax.rules.agn(optax.chain(scale, optax.sgd(1.0)))
      >>> center = agn_optax.LocalCenter(rule, jnp.zeros(1))
      >>> session = center.join("worker-0")
      >>> for sequence in (1, 2):  # the second has not seen what the first did
      ...     sent = Submission(sequence, jnp.ones(1), anchor_version=0)
      ...     answer = session.exchange(sent)
      >>> print(answer.params)
      [-1.2]

    References:
      Joeri Hermans, *On Scalable Deep Learning and Parallelizing Gradient Descent*,
      Master's thesis, Maastricht University, 2017.
    """
    check.rate(gamma, "gamma", low=0.0, high=math.inf, low_open=True)
    history = check.positive_int(history, "history")

    def init_fn(params: PyTree) -> DriftState:
        def empty_history(c: Any) -> jax.Array:
            return jnp.zeros((history, *jnp.shape(c)), jnp.result_type(c))

        return DriftState(jax.tree.map(empty_history, params), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree,
        state: DriftState,
        params: PyTree = None,
        *,
        staleness: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, DriftState]:
        check.params_given(params, "scale_by_drift")
        check.extra_argument_given(staleness, "staleness=0", "scale_by_drift")
        now = state.applied
        oldest = jnp.minimum(now, history - 1)  # staleness of the oldest version kept
        late = jnp.clip(jnp.asarray(staleness, jnp.int32), 0, oldest)
        centers = jax.tree.map(
            lambda versions, c: jax.lax.dynamic_update_index_in_dim(
                versions, jnp.asarray(c, versions.dtype), now % history, 0
            ),
            *(state.centers, params),
        )

        def scale(m: jax.Array, c: jax.Array, versions: jax.Array) -> jax.Array:
            wide = trees.wide(m)
            read = jax.lax.dynamic_index_in_dim(
                versions, (now - late) % history, keepdims=False
            )
            drift = jnp.asarray(c).astype(wide) - read.astype(wide)
            return (m.astype(wide) / (drift * drift / gamma + 1)).astype(m.dtype)

        scaled = jax.tree.map(scale, updates, params, centers)
        return scaled, DriftState(centers, optax.safe_increment(now))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
