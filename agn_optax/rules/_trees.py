"""What optax.tree lacks and more than one module here needs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def copy(tree: PyTree, dtype: Any = None) -> PyTree:
    """``tree`` in buffers of its own, which outlive a donation of the original."""
    return jax.tree.map(
        lambda leaf: jnp.array(leaf, dtype=dtype or jnp.result_type(leaf), copy=True),
        tree,
    )


def wider(*dtypes: Any) -> Any:
    """The dtype that holds all of ``dtypes``, also where JAX promotes strictly."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)
