"""Messages of several members that cannot be added up on their way.

What is encoded must be decoded first, and what is not trusted must be seen beside the
others, so each of them travels, and whoever has all of them makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax._internal import trees

PyTree = Any


def summed(message: Callable[[Any], PyTree], count: int) -> PyTree:
    """``message(0) + ... + message(count - 1)``, in float32 or wider.

    One after the other, in their order: whoever adds up the same gets the same.
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
    """``message(0), ..., message(count - 1)`` as [count, ...], float32 or wider."""
    return jax.lax.map(
        lambda i: jax.tree.map(trees.widened, message(i)), jnp.arange(count)
    )
