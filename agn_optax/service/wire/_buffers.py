"""Memory that trees are received in and copied to."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from agn_optax._internal import in_background
from agn_optax.service.wire._schema import Schema, allocate, assign

_LEAST_FOR_TWO = 8 << 20  # bytes that two threads copy

_Place = tuple[np.ndarray, np.ndarray]  # and what is to be there


class Buffers:
    """Buffers that are used again once nobody looks at them any more.

    Touching fresh memory for the first time takes longer than filling it. One of them,
    the largest, is kept for its next use, by whatever fits into it: some workers may
    send half as many bytes as others.
    """

    def __init__(self) -> None:
        self._spare: deque[np.ndarray] = deque(maxlen=1)  # which threads share

    def take(self, size: int) -> np.ndarray:
        """An aligned buffer of ``size`` bytes; free when the last view of it is."""
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
    """The first bytes of ``raw``; ``back(raw)`` when their last view is gone."""
    # Of a memoryview, or numpy would take `raw` itself for the base of all views.
    array = np.frombuffer(raw.data[:size], np.uint8)
    weakref.finalize(array, back, raw).atexit = False
    return array


def write(schema: Schema, arrays: Sequence[np.ndarray], buffer: np.ndarray) -> None:
    """Copies arrays to their places in a buffer, in its dtypes; gaps stay as they are.

    Raises:
      ValueError: the arrays are not those of the schema.
    """
    copy(list(schema.places(arrays, buffer)), schema.size)


def copy(places: list[_Place], size: int) -> None:
    """Copies each second array to the first one; ``size`` bytes in all."""
    if size < _LEAST_FOR_TWO:
        assign(places)
        return
    # One core alone does not reach what memory can do; the other side waits meanwhile.
    first, second = _halves(places, size)
    try:
        other = in_background(functools.partial(assign, second), "agn-optax copy")
    except RuntimeError:  # no more threads
        assign(places)
        return
    assign(first)
    other.result()


def _halves(places: list[_Place], size: int) -> tuple[list[_Place], list[_Place]]:
    """Places of ``size`` bytes together, in two lists of about as many bytes."""
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
