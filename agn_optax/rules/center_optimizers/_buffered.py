"""The center optimizer `buffered`: one step for several messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check

PyTree = Any


class BufferedState(NamedTuple):
    """State of `buffered`."""

    inner_state: PyTree  # state of the wrapped optimizer
    buffer: PyTree  # like the center: the sum of messages
    buffered: jax.Array  # int32 scalar: number of messages in the buffer


def buffered(
    optimizer: optax.GradientTransformation, size: int
) -> optax.GradientTransformationExtraArgs:
    r"""Update the center once for several messages (buffered aggregation).

    .. math::
        D \leftarrow D + g; \qquad \text{each } k\text{-th time:} \quad
            c \leftarrow c + \text{optimizer}(D / k), \quad D \leftarrow 0

    Workers exchange one by one, without a barrier, and the center moves with every k-th
    message. Each message still makes a new version, so staleness counts messages and
    not steps of the center. A `scale_by_staleness` before it in the chain scales each
    message.

    ``optax.MultiSteps`` also has the mean, as a running one, and takes as long. Here
    messages are summed and divided once, like those of a round, so k workers that start
    at one version get the same numbers as in a round.

    Args:
      optimizer: the center optimizer. It also runs at the messages in between, but its
        results are discarded.
      size: :math:`k`, messages of a step.

    Returns:
      A center optimizer with `BufferedState`. Its inner optimizer gets the extra
      arguments of the last message.

    Raises:
      InvalidArgumentError: ``size`` is not a positive int.
      InvalidTypeError: ``optimizer`` is not an optax optimizer.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> from agn_optax.center import Submission
      >>> outer = agn_optax.center_optimizers.buffered(optax.sgd(1.0), 2)
      >>> center = agn_optax.LocalCenter(agn_optax.rules.diloco(outer), jnp.zeros(1))
      >>> session = center.join("worker-0")
      >>> for sequence, message in [(1, 1.0), (2, 3.0)]:
      ...     sent = Submission(sequence, jnp.full(1, message), sequence - 1)
      ...     print(session.exchange(sent).params)
      [0.]
      [-2.]

    References:
      John Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation*,
      2022.
    """
    optimizer = check.optimizer(optimizer, "optimizer")
    size = check.positive_int(size, "size")

    def init_fn(params: PyTree) -> BufferedState:
        return BufferedState(
            optimizer.init(params),
            optax.tree.zeros_like(params),
            jnp.zeros((), jnp.int32),
        )

    def update_fn(
        updates: PyTree, state: BufferedState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, BufferedState]:
        is_full = state.buffered + 1 == size
        total = jax.tree.map(jnp.add, state.buffer, updates)
        message = jax.tree.map(lambda d: d / size, total)
        new_updates, inner_state = optimizer.update(
            message, state.inner_state, params, **extra_args
        )

        zeros = optax.tree.zeros_like
        return optax.tree.where(
            is_full, new_updates, zeros(new_updates)
        ), BufferedState(
            optax.tree.where(is_full, inner_state, state.inner_state),
            optax.tree.where(is_full, zeros(total), total),
            jnp.where(is_full, 0, state.buffered + 1),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
