"""How far a message can carry a center, told without looking at either.

A center that is checked before every move costs another pass over all that the move
reads. Where the center optimizer is a plain multiple of the message, the norm of the
message, which is there anyway, is bound enough.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax.rules import Rule

PyTree = Any

_MULTIPLIES = ("mul", "neg", "convert_element_type", "copy")


@functools.lru_cache(maxsize=32)
def factor(rule: Rule, treedef: Any, leaves: tuple[Any, ...]) -> float | None:
    """By how much ``rule`` multiplies a contribution; None if it does anything else.

    Args:
      rule: whose center optimizer is asked.
      treedef: of the center.
      leaves: of the center, abstract.
    """
    center = jax.tree.unflatten(treedef, leaves)
    fresh = np.int32(0)  # a discount makes no message larger

    def move(message: PyTree) -> PyTree:
        state = rule.center.init(message)
        updates, after = rule.center.update(message, state, None, staleness=fresh)
        return updates, jax.tree.leaves((state, after))

    try:
        program, (_, state) = jax.make_jaxpr(move, return_shape=True)(center)
    except Exception:  # it needs the center, or a tree of its own
        return None
    if rule.message is not None or state:
        return None
    made = dict.fromkeys(program.jaxpr.invars, 1.0)
    for equation in program.jaxpr.eqns:
        numbers = [abs(float(v.val)) for v in equation.invars if hasattr(v, "val")]
        arrays = [v for v in equation.invars if not hasattr(v, "val")]
        if equation.primitive.name not in _MULTIPLIES or len(arrays) != 1:
            return None
        (result,) = equation.outvars
        made[result] = made.get(arrays[0], math.inf) * math.prod(numbers)
    largest = max((made.get(v, math.inf) for v in program.jaxpr.outvars), default=0.0)
    return largest if math.isfinite(largest) else None


def most(rule: Rule, center: PyTree) -> float:
    """Half of the largest number that every leaf holds, also as workers adopt it."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(center)]
    if rule.codec.answers is not None:
        dtypes.append(rule.codec.answers)
    return min((float(jnp.finfo(dtype).max) / 2 for dtype in dtypes), default=0.0)
