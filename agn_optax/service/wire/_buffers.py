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

_MIN_FOR_TWO_THREADS = 8 << 20  # bytes from which two threads copy

_Copy = tuple[np.ndarray, np.ndarray]  # destination and source of a copy


class Buffers:
    """Buffers that are reused once no view of them is left.

    The first write to new memory takes longer than writing it again. Only the largest
    free buffer is kept. It also serves smaller requests, because some workers may send
    half as many bytes as others.
    """

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=1)  # shared between threads

    def take(self, size: int) -> np.ndarray:
        """Return an aligned buffer of ``size`` bytes, reused once no view is left."""
        raw = self._pop()
        if raw is None or raw.size < size:
            raw = allocate(size)
        return lend(raw, size, self._give_back)

    def _give_back(self, raw: np.ndarray) -> None:
        other = self._pop()
        self._free.append(raw if other is None or other.size < raw.size else other)

    def _pop(self) -> np.ndarray | None:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return None


def lend(
    raw: np.ndarray, size: int, give_back: Callable[[np.ndarray], object]
) -> np.ndarray:
    """Return ``raw[:size]``; call ``give_back(raw)`` once no view of it is left."""
    # The memoryview keeps NumPy from using `raw` itself as the base of all views.
    array = np.frombuffer(raw.data[:size], np.uint8)
    weakref.finalize(array, give_back, raw).atexit = False
    return array


def write(schema: Schema, arrays: Sequence[np.ndarray], buffer: np.ndarray) -> None:
    """Copy arrays to a buffer, cast to the schema's dtypes; gaps stay unchanged.

    Raises:
      ValueError: the arrays do not match the schema.
    """
    copy(list(schema.copies(arrays, buffer)), schema.size)


def copy(copies: list[_Copy], size: int) -> None:
    """Copy each source to its destination; ``size`` bytes in total."""
    if size < _MIN_FOR_TWO_THREADS:
        assign(copies)
        return
    # One core alone does not use the memory's bandwidth, and the receiver waits.
    first, second = _halves(copies, size)
    try:
        other = in_background(functools.partial(assign, second), "agn-optax copy")
    except RuntimeError:  # no thread can be started
        assign(copies)
        return
    assign(first)
    other.result()


def _halves(copies: list[_Copy], size: int) -> tuple[list[_Copy], list[_Copy]]:
    """Divide copies of ``size`` bytes into two lists of about equal size."""
    end = 0
    for i, (destination, array) in enumerate(copies):
        begin, end = end, end + destination.nbytes
        if 2 * end >= size:
            source = array
            if destination.flags.c_contiguous and source.flags.c_contiguous:
                # Flat arrays of others would be copies; those are divided by rows.
                destination, source = destination.reshape(-1), source.reshape(-1)
            cut = len(destination) * (size - 2 * begin) // (2 * max(1, end - begin))
            return (
                [*copies[:i], (destination[:cut], source[:cut])],
                [(destination[cut:], source[cut:]), *copies[i + 1 :]],
            )
    return copies, []
