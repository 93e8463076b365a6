"""Combination of messages that an all-reduce cannot sum.

Encoded messages must be decoded before they are summed, and a robust ``combine`` must
compare all messages. So every message is sent separately, and the receivers combine
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax._internal import trees

PyTree = Any


def summed(message: Callable[[Any], PyTree], count: int) -> PyTree:
    """Return ``message(0) + ... + message(count - 1)``, in float32 or wider.

    The sum is taken in the order of the indices, so every device that adds the same
    messages gets the same bits.
    """
    total = jax.tree.map(trees.widened, message(0))
    if count == 1:
        return total
    return jax.lax.fori_loop(
        1,
        count,
        lambda i, total: jax.tree.map(
            lambda t, m: t + trees.widened(m), total, message(i)
        ),
        total,
    )


def stacked(message: Callable[[Any], PyTree], count: int) -> PyTree:
    """Stack messages 0 to ``count - 1`` as [count, ...], in float32 or wider."""
    return jax.lax.map(
        lambda i: jax.tree.map(trees.widened, message(i)), jnp.arange(count)
    )
