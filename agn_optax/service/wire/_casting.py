"""Numbers of one floating dtype as those of another, by XLA."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from agn_optax.service.wire import _schema

_AT_A_TIME = 1 << 19  # numbers: what a cache holds, and is worth calling a program for
_DTYPES = {"float32", "float16", "bfloat16"}


def pieces(flat: np.ndarray, dtype: Any) -> Iterator[np.ndarray]:
    """As `_schema.in_dtype`, by all cores, in a third of numpy's time each."""
    end = 0
    if (
        {flat.dtype.name, dtype.name} <= _DTYPES
        and flat.dtype.isnative
        and jax.default_backend() == "cpu"
    ):
        end = flat.size - flat.size % _AT_A_TIME
    for begin in range(0, end, _AT_A_TIME):
        part = flat[begin : begin + _AT_A_TIME]
        with jax.transfer_guard_host_to_device("allow"):
            made = _cast(part, dtype)
        yield np.asarray(made)
    yield from _schema.in_dtype(flat[end:], dtype)  # no program for each number of them


@functools.partial(jax.jit, static_argnums=1)
def _cast(part: Any, dtype: Any) -> jax.Array:
    return part.astype(dtype)
