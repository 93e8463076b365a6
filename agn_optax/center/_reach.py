"""Bounds on the center's movement, so that most messages need no finiteness check.

The norm of a message bounds its elements. Some transformations (`rules` has a table)
have their largest updates and states at corners: where message, state and center each
have their largest or smallest value, or are zero. Therefore the optimizer is run on the
corners alone, with assumed bounds on state and center. If the results are within these
bounds, no message of at most that norm moves the center further than the corners do.

With other optimizers there are no bounds, and the device checks every message.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax import round as rounds
from agn_optax.rules import Rule, at_corners, extra_arguments

PyTree = Any

_SLACK = 3.0  # factor for rounding errors, including those of a center with few bits


def is_bounded(rule: Rule) -> bool:
    """Return whether all parts of a rule that move its center are in the table."""
    parts = [rule.center, *([rule.discount] if rule.discount else [])]
    return rule.message is None and all(map(at_corners, parts))


def bound(
    rule: Rule,
    params: PyTree,
    state: PyTree,
    message: float,
    messages: int,
    largest: tuple[float, float],
) -> float:
    """Return a bound on the center's absolute values after some messages.

    Args:
      rule: a rule that `is_bounded`.
      params: the center's parameters, as the store keeps them.
      state: the state of the center optimizer.
      message: maximum norm of a message.
      messages: number of messages.
      largest: the largest absolute values in the center and in the state.

    Returns:
      The bound; inf if there is none.
    """
    program = _growth(rule)
    # One leaf of each dtype stands for all leaves of that dtype.
    chosen = {leaf.dtype: i for i, leaf in enumerate(jax.tree.leaves(params))}.values()

    def corners(tree: PyTree, numbers: np.ndarray) -> PyTree:
        leaves = jax.tree.leaves(tree)
        return [numbers.astype(leaves[i].dtype) for i in chosen]

    def states(moments: Callable[[PyTree], PyTree], others: Any = None) -> PyTree:
        return optax.tree.map_params(
            rule.center,
            moments,
            state,
            transform_non_params=others,
            is_leaf=lambda _: True,
        )

    num_moments = itertools.count()
    states(lambda _: next(num_moments))  # counts the moments
    signs = [(-1.0, 0.0, 1.0)] * 2 + [(0.0, 1.0)] * next(num_moments)
    grid = np.meshgrid(np.arange(messages), *signs)
    earlier, message_signs, center_signs, *moment_signs = (g.reshape(-1) for g in grid)

    def others(leaf: Any) -> Any:
        """Return a count after the earlier messages, or a number that is constant."""
        is_count = jnp.issubdtype(leaf.dtype, jnp.integer)
        return (np.asarray(leaf) + is_count * earlier).astype(leaf.dtype)

    def state_within(largest: float) -> PyTree:
        columns = iter(moment_signs)
        return states(lambda tree: corners(tree, largest * next(columns)), others)

    center, within = largest
    while math.isfinite(center + within):
        with np.errstate(over="ignore"):
            both = (
                corners(params, message * message_signs),
                corners(params, center * center_signs),
            )
            growth, after = map(float, program(*both, state_within(within)))
        reached = largest[0] + messages * _SLACK * growth
        if reached <= center and after <= within:
            return reached
        center, within = max(center, 8 * reached), max(within, 8 * after)
    return math.inf


@functools.lru_cache(maxsize=32)
def _growth(rule: Rule) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return a compiled program that takes corners: messages, centers and states.

    It returns the largest growth of an absolute value in the center, and the largest
    absolute value in the next state.
    """

    def move(message: PyTree, center: PyTree, state: PyTree) -> PyTree:
        about = {**extra_arguments({}), "outside": True}
        moved = rounds.weigh_and_apply(rule, message, center, state, None, about)
        growth = jax.tree.map(
            lambda a, c: jnp.maximum(jnp.abs(a) - jnp.abs(c), 0), moved.center, center
        )
        return growth, moved.center_state

    def program(*corners: PyTree) -> tuple[jax.Array, jax.Array]:
        growth, state = jax.vmap(move)(*corners)
        return _largest(growth), _largest(state)

    return jax.jit(program)


@jax.jit
def largest_of(*trees: PyTree) -> list[jax.Array]:
    """Return the largest absolute value of each tree; inf if a value is not finite."""
    return [_largest(tree) for tree in trees]


def _largest(tree: PyTree) -> jax.Array:
    sizes = [
        _largest_in(leaf)
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return functools.reduce(jnp.maximum, sizes, jnp.zeros(()))


def _largest_in(leaf: jax.Array) -> jax.Array:
    # XLA for CPUs would write `where(isfinite(leaf), abs(leaf), inf)` to memory. It
    # also ignores NaN in min and max, but not in sums.
    largest = jnp.maximum(-leaf.min(initial=0), leaf.max(initial=0))
    return jnp.where(jnp.isnan(leaf.sum()), jnp.inf, largest)
