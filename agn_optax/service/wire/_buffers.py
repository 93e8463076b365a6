"""Buffers in which trees are received, and copies to them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from agn_optax._internal import in_background
from agn_optax.service.wire._schema import Schema, allocate, assign

_LEAST_FOR_TWO = 8 << 20  # bytes from which two threads copy

_Place = tuple[np.ndarray, np.ndarray]  # destination and source of a copy


class Buffers:
    """Buffers that are reused once no view of them is left.

    The first write to new memory takes longer than writing it again. Only the largest
    free buffer is kept. It also serves smaller requests, because some workers may send
    half as many bytes as others.
    """

    def __init__(self) -> None:
        self._spare: deque[np.ndarray] = deque(maxlen=1)  # shared between threads

    def take(self, size: int) -> np.ndarray:
        """Return an aligned buffer of ``size`` bytes, free when its last view is."""
        raw = self._pop()
        if raw is None or raw.size < size:
            raw = allocate(size)
        return lent(raw, size, self._give_back)

    def _give_back(self, raw: np.ndarray) -> None:
        other = self._pop()
        self._spare.append(raw if other is None or other.size < raw.size else other)

    def _pop(self) -> np.ndarray | None:
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        return None


def lent(
    raw: np.ndarray, size: int, back: Callable[[np.ndarray], object]
) -> np.ndarray:
    """Return the first bytes of ``raw``; ``back(raw)`` is called with no view left."""
    # The memoryview keeps NumPy from using `raw` itself as the base of all views.
    array = np.frombuffer(raw.data[:size], np.uint8)
    weakref.finalize(array, back, raw).atexit = False
    return array


def write(schema: Schema, arrays: Sequence[np.ndarray], buffer: np.ndarray) -> None:
    """Copy arrays to their places in a buffer, cast to its dtypes; gaps stay unchanged.

    Raises:
      ValueError: the arrays do not match the schema.
    """
    copy(list(schema.places(arrays, buffer)), schema.size)


def copy(places: list[_Place], size: int) -> None:
    """Copy each second array to the first one; ``size`` bytes in total."""
    if size < _LEAST_FOR_TWO:
        assign(places)
        return
    # One core alone does not use the memory's bandwidth, and the receiver waits.
    first, second = _halves(places, size)
    try:
        other = in_background(functools.partial(assign, second), "agn-optax copy")
    except RuntimeError:  # no thread can be started
        assign(places)
        return
    assign(first)
    other.result()


def _halves(places: list[_Place], size: int) -> tuple[list[_Place], list[_Place]]:
    """Divide places of ``size`` bytes into two lists of about equal size."""
    end = 0
    for i, (place, array) in enumerate(places):
        begin, end = end, end + place.nbytes
        if 2 * end >= size:
            to, of = place.reshape(-1), np.ascontiguousarray(array).reshape(-1)
            cut = to.size * (size - 2 * begin) // (2 * max(1, end - begin))
            return (
                [*places[:i], (to[:cut], of[:cut])],
                [(to[cut:], of[cut:]), *places[i + 1 :]],
            )
    return places, []
