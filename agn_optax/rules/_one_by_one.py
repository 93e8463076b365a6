"""Rules for rounds at a center that applies messages one by one.

SGD with the rate 1 / n converges with any number n of asynchronous workers of one speed
(docs/autoscaling.md has the bound). Momentum multiplies the rate, and is less stable
than SGD with the multiplied rate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import attempt
from agn_optax.rules._rule import Rule, discounted, extra_arguments, sends_displacements
from agn_optax.rules.center_optimizers import (
    BufferedState,
    DelayedNesterovState,
    LookaheadState,
    OrderedMomentumState,
    RingleaderState,
)

# States of the center optimizers that are made for messages that come one by one.
_MADE_FOR_IT = (
    BufferedState,
    DelayedNesterovState,
    LookaheadState,
    OrderedMomentumState,
    RingleaderState,
)
_MESSAGE = 1e-3  # small, so that optimizers which normalize messages have a high rate
_ROUNDING = 1e-3  # of measured rates
_MESSAGES = 100  # equal messages, after which momentum is at its limit


def instead_one_by_one(rule: Rule, workers: int) -> str:
    """Return what to use instead of a rule if messages are applied one by one.

    Args:
      rule: the rule.
      workers: number of workers; less than 2 stands for an unknown number n.

    Returns:
      The change, or "" if the rule may stay: it makes no means, or its center optimizer
      is made for such messages or has a small enough rate.
    """
    count, n = max(workers, 2), str(workers) if workers > 1 else "n"
    if rule.combine != "mean" or (rate := _rate(rule, count)) == 0.0:
        return ""
    is_whole = sends_displacements(rule)
    limit = 1.0 if is_whole else _rate(rule, 1)
    if math.isfinite(rate) and rate * count <= limit * (1.0 + _ROUNDING):
        return ""
    if is_whole:
        return f"rules.diloco(optax.sgd(1/{n}))"
    return f"1/{n} of the learning rate of its center optimizer"


@functools.lru_cache(maxsize=64)
def _rate(rule: Rule, workers: int) -> float:
    """Return how far the center moves along many equal messages, for each of them.

    0 for a center optimizer that is made for messages that come one by one. Infinite if
    the optimizer cannot be run on a scalar, because it is for the tree of one model.
    """
    what = f"measurement of the center's rate of rule {rule.name!r}"
    rate = attempt(what, lambda: float(_program(rule)(workers)))
    return math.inf if rate is None else rate


@functools.lru_cache(maxsize=32)
def _program(rule: Rule) -> Callable[[int], jax.Array]:
    return jax.jit(functools.partial(_measured_rate, rule))


def _measured_rate(rule: Rule, workers: jax.Array) -> jax.Array:
    center = jnp.zeros(())
    state = rule.center.init(center)

    def is_made_for_it(part: object) -> bool:
        return isinstance(part, _MADE_FOR_IT)

    if any(map(is_made_for_it, jax.tree.leaves(state, is_leaf=is_made_for_it))):
        return jnp.zeros(())
    extra_args = extra_arguments({"staleness": workers - 1, "workers": workers})
    message = discounted(rule, jnp.full((), _MESSAGE), **extra_args)

    def step(state: optax.OptState, _: None) -> tuple[optax.OptState, jax.Array]:
        updates, state = rule.center.update(message, state, center, **extra_args)
        return state, -updates

    _, moves = jax.lax.scan(step, state, length=_MESSAGES)
    return moves.max() / _MESSAGE
