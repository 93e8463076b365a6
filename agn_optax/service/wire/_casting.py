"""Casts between floating dtypes by XLA, for sending and receiving."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from agn_optax.service.wire import _schema

# Numbers that one call of a program casts: few enough for a cache, and so many that the
# call itself takes little of the time.
_CAST_NUMBERS = 1 << 19
_DTYPES = {"float32", "float16", "bfloat16"}


def pieces(flat: np.ndarray, dtype: Any) -> Iterator[np.ndarray]:
    """Cast as `_schema.in_dtype` does, in a third of NumPy's time and on all cores."""
    end = 0
    if (
        {flat.dtype.name, dtype.name} <= _DTYPES
        and flat.dtype.isnative
        and jax.default_backend() == "cpu"
    ):
        end = flat.size - flat.size % _CAST_NUMBERS
    for begin in range(0, end, _CAST_NUMBERS):
        part = flat[begin : begin + _CAST_NUMBERS]
        with jax.transfer_guard_host_to_device("allow"):
            cast = _cast(part, dtype)
        yield np.asarray(cast)
    # XLA would compile a program for each length of the rest.
    yield from _schema.in_dtype(flat[end:], dtype)


@functools.partial(jax.jit, static_argnums=1)
def _cast(part: Any, dtype: Any) -> jax.Array:
    return part.astype(dtype)
