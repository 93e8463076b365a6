"""Numbers of one floating dtype as those of another, in host memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

_AT_A_TIME = 1 << 19  # numbers: what a cache holds, and is worth calling a program for
_BY_PROGRAM = {"float32", "float16", "bfloat16"}


def assign(places: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies each second array to the first one, in the dtype of that.

    It rounds to the nearest even number; what is too large becomes infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        for place, array in places:
            place[...] = array


def pieces(flat: np.ndarray, dtype: Any) -> Iterator[np.ndarray]:
    """A flat array in another dtype, in pieces that are made as they are asked for.

    XLA casts with all cores, and each of them in a third of the time that numpy takes.
    """
    by_program = (
        {flat.dtype.name, dtype.name} <= _BY_PROGRAM
        and flat.dtype.isnative
        and jax.default_backend() == "cpu"
    )
    for begin in range(0, flat.size, _AT_A_TIME):
        part = flat[begin : begin + _AT_A_TIME]
        if by_program and part.size == _AT_A_TIME:  # one program for all
            with jax.transfer_guard_host_to_device("allow"):
                made = _cast(part, dtype)
            yield np.asarray(made)
        else:
            assign([(cast := np.empty(part.shape, dtype), part)])
            yield cast


@functools.partial(jax.jit, static_argnums=1)
def _cast(part: Any, dtype: Any) -> jax.Array:
    return part.astype(dtype)
