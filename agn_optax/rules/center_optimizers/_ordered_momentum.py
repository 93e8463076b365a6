"""The center optimizer `ordered_momentum`: late messages act as if in time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check

PyTree = Any


class OrderedMomentumState(NamedTuple):
    """State of `ordered_momentum`."""

    momentum: PyTree  # shapes and dtypes of the center
    applied: jax.Array  # int32 scalar: number of applied messages


def ordered_momentum(
    learning_rate: float = 0.7, momentum: float = 0.9, *, messages: int
) -> optax.GradientTransformationExtraArgs:
    r"""Momentum that orders messages by the versions at which they were begun.

    Consecutive rounds of n messages would give
    :math:`u_b = \beta u_{b-1} + \bar g_b` and :math:`c \leftarrow c - \eta u_b`. If a
    message of round b that arrives in round B had been in time, it would have moved the
    center in each round from b to B, with a weight that fades by :math:`\beta`. The
    update makes up for all these moves at once, and adds to the momentum what would be
    left of the message:

    .. math::
        u &\leftarrow u + \beta^{B - b} g / n \\
        c &\leftarrow c - \eta \, (1 + \beta + \dots + \beta^{B - b}) \, g / n

    and when a round begins, :math:`u \leftarrow \beta u` and
    :math:`c \leftarrow c - \eta u`. The round of a message follows from ``staleness``,
    which gives the version at which its worker began: version t belongs to round
    :math:`\lceil t / n \rceil`, because n workers begin at version 0, and one at each
    later version.

    Once all messages of a round have arrived, the center does not depend on the order
    in which they arrived. With plain momentum, a late message would act like a new one.
    With one worker it is ``optax.sgd(learning_rate, momentum)``.

    Args:
      learning_rate: :math:`\eta`, for a round of n messages.
      momentum: :math:`\beta`, in [0, 1).
      messages: n, messages of a round, which is the number of workers.

    Returns:
      A center optimizer with `OrderedMomentumState`, which needs the extra argument
      ``staleness``.

    Raises:
      InvalidArgumentError: an argument is out of range.
      MissingArgumentError: raised by its ``update`` without ``staleness``.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> outer = agn_optax.center_optimizers.ordered_momentum(0.7, 0.9, messages=4)
      >>> center = agn_optax.LocalCenter(agn_optax.rules.diloco(outer), jnp.zeros(2))

    References:
      Chang-Wei Shi, Yi-Rui Yang, Wu-Jun Li, *Ordered Momentum for Asynchronous SGD*,
      2024. The equations are derived here from the idea of the paper (gradients ordered
      by the iteration at which they were begun). Tests check that the order of arrival
      has no effect.
      Chang-Wei Shi, Shi-Shang Wang, Wu-Jun Li, *Ordered Local Momentum for Asynchronous
      Distributed Learning under Arbitrary Delays*, 2026 (OrLoMo): workers make local
      steps with momentum, as an inner ``optax.sgd(rate, momentum)`` does. The exact
      messages of its workers were not read: here they are displacements.
    """
    check.rate(learning_rate, "learning_rate", low=0.0, high=math.inf)
    check.rate(momentum, "momentum", low=0.0, high=1.0, high_open=True)
    messages = check.positive_int(messages, "messages")

    # A Python float is used if possible: float32 has few digits of 1 - momentum near 1.
    log_momentum: Any
    if check.is_traced(momentum):
        log_momentum = jnp.log(momentum)
    else:
        log_momentum = math.log(momentum) if momentum else -math.inf

    def round_of(version: jax.Array) -> jax.Array:
        return (version + messages - 1) // messages

    def init_fn(params: PyTree) -> OrderedMomentumState:
        return OrderedMomentumState(
            optax.tree.zeros_like(params), jnp.zeros((), jnp.int32)
        )

    def update_fn(
        updates: PyTree,
        state: OrderedMomentumState,
        params: PyTree = None,
        *,
        staleness: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OrderedMomentumState]:
        check.extra_argument_given(staleness, "staleness=0", "ordered_momentum")
        now = state.applied
        begun = jnp.maximum(now - jnp.asarray(staleness, jnp.int32), 0)
        is_new_round = round_of(now) > round_of(jnp.maximum(now - 1, 0))
        late = (round_of(now) - round_of(begun)).astype(float)
        exponent = jnp.where(late > 0, late * log_momentum, 0.0)
        decay_factor = jnp.exp(exponent)  # β^late
        # 1 + β + ... + β^late, and exactly 1 for a message that is not late.
        geometric_sum = 1 - momentum * jnp.expm1(exponent) / (1 - momentum)

        def decay(u: jax.Array) -> jax.Array:
            return jnp.where(is_new_round, momentum * u, u).astype(u.dtype)

        def move(u: jax.Array, g: jax.Array) -> jax.Array:
            momentum_part = jnp.where(is_new_round, u, jnp.zeros_like(u))
            return -learning_rate * (
                momentum_part + geometric_sum.astype(g.dtype) * (g / messages)
            )

        decayed = jax.tree.map(decay, state.momentum)
        new_updates = optax.tree.cast_like(
            jax.tree.map(move, decayed, updates), updates
        )
        new_momentum = jax.tree.map(
            lambda u, g: (u + decay_factor.astype(u.dtype) * (g / messages)).astype(
                u.dtype
            ),
            *(decayed, updates),
        )
        return new_updates, OrderedMomentumState(
            new_momentum, optax.safe_increment(now)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
