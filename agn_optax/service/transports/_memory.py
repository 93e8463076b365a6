"""Memory that a worker and a center on one machine share, and buffers used again.

A segment has no name: its file descriptor travels over a Unix socket, and it is gone
when both processes are, however they end. Linux only.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from agn_optax import errors
from agn_optax._internal import in_background
from agn_optax.service.wire import _schema

_COPY = "agn-optax copy"  # name of a thread
_LEAST_FOR_TWO = 8 << 20  # bytes that two threads copy

_Place = tuple[np.ndarray, np.ndarray]  # and what is to be there

try:
    import fcntl

    # Nobody can take pages away from under the other side, or add the right to.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    IS_SUPPORTED = hasattr(os, "memfd_create")
except (ImportError, AttributeError):  # not on Linux
    IS_SUPPORTED = False


def create(size: int) -> tuple[int, np.ndarray]:
    """A segment of ``size`` bytes: its file descriptor, and its bytes.

    Raises:
      OSError: the system has none.
    """
    descriptor = os.memfd_create("agn_optax", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, _mapped(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def attach(descriptor: int, size: int) -> np.ndarray:
    """The bytes of a segment that somebody else has created.

    Raises:
      ProtocolError: it is none, or smaller.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        there = os.fstat(descriptor).st_size
        if seals & _SEALS == _SEALS and there >= size > 0:
            return _mapped(descriptor, size)
    except OSError as error:
        raise errors.ProtocolError(f"no segment of memory: {error}") from None
    raise errors.ProtocolError(
        f"a sealed segment of {size} bytes was expected, got one of {there}"
    )


def _mapped(descriptor: int, size: int) -> np.ndarray:
    if sys.version_info >= (3, 13):  # before, it kept a descriptor of its own
        mapping = mmap.mmap(descriptor, size, trackfd=False)
    else:
        mapping = mmap.mmap(descriptor, size)
    with contextlib.suppress(OSError):  # a hint only
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def write(
    schema: _schema.Schema, arrays: Sequence[np.ndarray], buffer: np.ndarray
) -> None:
    """Copies arrays to their places in a buffer, in its dtypes; gaps stay as they are.

    Raises:
      ValueError: the arrays are not those of the schema.
    """
    places = list(schema.places(arrays, buffer))
    if schema.size < _LEAST_FOR_TWO:
        _schema.assign(places)
        return
    # One core alone does not reach what memory can do; the other side waits meanwhile.
    first, second = _halves(places, schema.size)
    try:
        other = in_background(functools.partial(_schema.assign, second), _COPY)
    except RuntimeError:  # no more threads
        _schema.assign(places)
        return
    _schema.assign(first)
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


def close(descriptor: int) -> None:
    """The segment stays as long as somebody has it mapped."""
    os.close(descriptor)


class Buffers:
    """Buffers that are used again once nobody looks at them any more.

    Touching fresh memory for the first time takes longer than filling it. One of them,
    the largest, is kept for its next use, by whatever fits into it: some workers may
    send half as many bytes as others.

    Args:
      keeps: False for what is received once: none is kept then.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._spare: deque[np.ndarray] = deque(maxlen=keeps)  # which threads share

    def take(self, size: int) -> np.ndarray:
        """An aligned buffer of ``size`` bytes; free when the last view of it is."""
        raw = self._pop()
        if raw is None or raw.size < size:
            raw = _schema.allocate(size)
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


class Segments:
    """Segments of one connection, each used again once nobody looks at it any more.

    Args:
      most: segments at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = 0
        self._free: deque[tuple[int, np.ndarray]] = deque()

    def take(self, size: int) -> tuple[int, int | None, np.ndarray]:
        """A segment of ``size`` bytes: its number and its bytes.

        Between them its file descriptor, to be sent and closed, if it is a new one.

        Raises:
          OSError: the system has none.
        """
        number, descriptor, raw = 0, None, None
        with contextlib.suppress(IndexError):
            number, raw = self._free.popleft()
        if not number:
            if self._made == self._most:
                raise OSError("all segments are in use")
            number = self._made + 1
        if raw is None or raw.size != size:
            try:
                descriptor, made = create(size)
            except BaseException:
                if raw is not None:
                    self._give_back(number, raw)
                raise
            raw = made
        self._made = max(self._made, number)
        back = functools.partial(self._give_back, number)
        return number, descriptor, lent(raw, size, back)

    def _give_back(self, number: int, raw: np.ndarray) -> None:
        self._free.append((number, raw))
