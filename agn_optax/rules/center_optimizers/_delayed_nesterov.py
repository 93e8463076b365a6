"""The center optimizer `delayed_nesterov`: momentum changes once per N messages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check

PyTree = Any


class DelayedNesterovState(NamedTuple):
    """State of `delayed_nesterov`."""

    momentum: PyTree  # shapes and dtypes of the center
    buffer: PyTree  # like the center: the sum of messages since momentum changed
    buffered: jax.Array  # int32 scalar: number of these messages


def delayed_nesterov(
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    *,
    delay: int,
    spread: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Nesterov momentum that is updated by a whole buffer of messages at a time.

    .. math::
        D &\leftarrow D + g \\
        \text{each } N\text{-th time:} \quad
            m &\leftarrow \beta m + D / N, \quad D \leftarrow 0, \quad
            c \leftarrow c - \eta \left((1 - kN + k) \beta m + g / N\right) \\
        \text{else:} \quad
            c &\leftarrow c - \eta \left(k \beta m + g / N\right)

    If the messages of n asynchronous workers come one by one, ordinary momentum gives
    each message n times the effect that it has in a round of all workers, and training
    gets worse or diverges. Here gradients act at once, and momentum at every N-th
    message, when as many messages have come as in a round. Over N messages, both act as
    much as Nesterov momentum does in one step with the mean of the messages. With
    :math:`N = 1` and :math:`k = 0` it is
    ``optax.sgd(learning_rate, momentum, nesterov=True)``.

    Args:
      learning_rate: :math:`\eta`, for a round of N messages.
      momentum: :math:`\beta`, in [0, 1).
      delay: :math:`N`, messages between two changes of the momentum: the number of
        workers, or a multiple of it.
      spread: :math:`k`, in [0, 1 / N]: the part of the momentum that acts at each of
        the other messages instead of at every N-th one.

    Returns:
      A center optimizer with `DelayedNesterovState`.

    Raises:
      InvalidArgumentError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> center = agn_optax.delayed_nesterov(0.7, 0.9, delay=4)
      >>> rule = agn_optax.rules.diloco(center)
      >>> server = agn_optax.LocalCenter(rule, jnp.zeros(2))

    References:
      Bo Liu, Rachita Chhaparia, Arthur Douillard, Satyen Kale, Andrei A. Rusu, Jiajun
      Shen, Arthur Szlam, Marc'Aurelio Ranzato, *Asynchronous Local-SGD Training for
      Language Modeling*, 2024.
    """
    check.rate(learning_rate, "learning_rate", low=0.0, high=math.inf)
    check.rate(momentum, "momentum", low=0.0, high=1.0, high_open=True)
    delay = check.positive_int(delay, "delay")
    check.rate(spread, "spread", low=0.0, high=1.0 / delay)

    def init(params: PyTree) -> DelayedNesterovState:
        return DelayedNesterovState(
            optax.tree.zeros_like(params),
            optax.tree.zeros_like(params),
            jnp.zeros((), jnp.int32),
        )

    def update(
        updates: PyTree,
        state: DelayedNesterovState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, DelayedNesterovState]:
        is_full = state.buffered + 1 == delay
        buffer = jax.tree.map(jnp.add, state.buffer, updates)
        new_momentum = jax.tree.map(
            lambda m, d: jnp.where(is_full, momentum * m + d / delay, m),
            *(state.momentum, buffer),
        )
        share = jnp.where(is_full, 1 - spread * delay + spread, spread)

        def move(m: jax.Array, g: jax.Array) -> jax.Array:
            return -learning_rate * (share.astype(m.dtype) * momentum * m + g / delay)

        new_updates = jax.tree.map(move, new_momentum, updates)
        buffer = optax.tree.where(is_full, optax.tree.zeros_like(buffer), buffer)
        buffered = jnp.where(is_full, 0, state.buffered + 1)
        return new_updates, DelayedNesterovState(new_momentum, buffer, buffered)

    return optax.GradientTransformationExtraArgs(init, update)
