"""The layout of a tree's leaves in one buffer.

This module depends on NumPy, and not on JAX, gRPC or protobuf. If the buffer's dtypes
are narrower than the arrays', the copy to the buffer rounds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 registers bfloat16 with numpy
import numpy as np

from agn_optax import errors
from agn_optax._internal import Description, Leaf, layout

_ALIGNMENT = 64  # bytes, of a buffer: XLA's CPU backend needs no copy then
_CAST_NUMBERS = 1 << 16  # numbers to cast at a time, which fit into a cache
MAX_GAP = layout.ALIGNMENT * 8  # bytes between two leaves of a buffer
_GAP = bytes(MAX_GAP)

_FLOATS = dict.fromkeys(("float64", "float32", "float16", "bfloat16")).keys()
_INTEGERS = tuple(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = {*_FLOATS, *_INTEGERS, "bool"}


# Casts a flat array to another dtype, piece by piece.
Cast = Callable[[np.ndarray, Any], Iterator[np.ndarray]]


def assign(copies: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy each second array to the first one, cast to the dtype of the first.

    The cast rounds to nearest, ties to even; numbers that overflow become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        for destination, array in copies:
            destination[...] = array


def in_dtype(flat: np.ndarray, dtype: Any) -> Iterator[np.ndarray]:
    """Yield a flat array in another dtype, in pieces that are cast on demand."""
    for begin in range(0, flat.size, _CAST_NUMBERS):
        part = flat[begin : begin + _CAST_NUMBERS]
        assign([(cast := np.empty(part.shape, dtype), part)])
        yield cast


class Schema(Description):
    """The leaves of a tree, and their offsets in a buffer.

    Args:
      leaves: the leaves, in the order of the buffer.
      structure: the containers of the tree as JSON, which are not checked here.

    Raises:
      ProtocolError: a leaf has a dtype that cannot be sent, or a shape that no array
        has, or two leaves have the same path.
    """

    def __init__(self, leaves: Sequence[Leaf], structure: str = "") -> None:
        super().__init__(leaves, structure)
        paths = set()
        self._views: list[tuple[tuple[int, ...], Any, int]] = []
        self.size = 0  # of the buffer, bytes
        for leaf in self.leaves:
            if leaf.dtype not in _DTYPES:
                raise errors.ProtocolError(
                    f"leaf {leaf.path} has dtype {leaf.dtype!r}, which cannot be sent"
                )
            try:  # checks the shape without allocating an array
                np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
            except ValueError as error:
                raise errors.ProtocolError(
                    f"leaf {leaf.path} has shape {list(leaf.shape)}: {error}"
                ) from None
            if leaf.path in paths:
                raise errors.ProtocolError(f"leaf {leaf.path} occurs twice")
            paths.add(leaf.path)
            # The layout of a flattened center, so that the buffer can be its array.
            dtype = np.dtype(leaf.dtype)
            unit = layout.ALIGNMENT * dtype.itemsize
            begin = -(-self.size // unit) * unit
            self._views.append((leaf.shape, dtype, begin))
            self.size = begin + leaf.nbytes
        if self.size > sys.maxsize - _ALIGNMENT:
            raise errors.ProtocolError(f"no buffer has {self.size} bytes")
        self.offsets = tuple(offset for _, _, offset in self._views)
        self.paths = tuple(leaf.path for leaf in self.leaves)
        self.numpy_dtypes = tuple(dtype for _, dtype, _ in self._views)
        self.dtypes = frozenset(leaf.dtype for leaf in self.leaves)
        self._casts: dict[str, Schema] = {"": self}

    def cast(self, dtype: str) -> Schema:
        """Return the schema with floating leaves as ``dtype``; "" keeps their dtypes.

        Raises:
          ProtocolError: ``dtype`` is not a floating dtype that can be sent.
        """
        if dtype not in self._casts:
            if dtype not in _FLOATS:
                raise errors.ProtocolError(
                    f"floats must be sent as one of {', '.join(_FLOATS)}, got {dtype!r}"
                )
            self._casts[dtype] = Schema(
                [
                    leaf._replace(dtype=dtype) if leaf.dtype in _FLOATS else leaf
                    for leaf in self.leaves
                ],
                self.structure,
            )
        return self._casts[dtype]

    def views(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Return the leaves as views of a buffer."""
        return [
            np.ndarray(shape, dtype, buffer, offset)
            for shape, dtype, offset in self._views
        ]

    def clear_gaps(self, buffer: np.ndarray) -> None:
        """Set the bytes of a buffer between its leaves to zero."""
        end = 0
        for leaf, offset in zip(self.leaves, self.offsets, strict=True):
            buffer[end:offset] = 0
            end = offset + leaf.nbytes

    @functools.cached_property
    def packed(self) -> Schema:
        """The schema of the same buffer as the two leaves of a flattened center."""
        (dtype,) = self.dtypes
        size = np.dtype(dtype).itemsize
        begins, end = [offset // size for offset in self.offsets], self.size // size
        middle = layout.middle(begins, end)
        sizes = {"first": middle, "second": end - middle}
        return Schema([Leaf(f"['{k}']", dtype, (n,)) for k, n in sizes.items()])

    def pieces(
        self, arrays: Sequence[np.ndarray], cast: Cast = in_dtype
    ) -> Iterator[memoryview]:
        """Yield the buffer in pieces that are views of ``arrays``, or gaps.

        Floating arrays of another dtype are cast by ``cast``, a piece at a time.

        Raises:
          ValueError: the arrays do not match this schema.
        """
        end = 0
        for array, (shape, dtype, offset) in zip(arrays, self._views, strict=True):
            self._check(array, shape, dtype)
            if offset > end:
                yield memoryview(_GAP)[: offset - end]
            flat = np.ascontiguousarray(array).reshape(-1)
            if flat.dtype == dtype:
                yield flat.view(np.uint8).data
            else:
                for part in cast(flat, dtype):
                    yield part.view(np.uint8).data
            end = offset + flat.size * dtype.itemsize

    def copies(
        self, arrays: Sequence[np.ndarray], buffer: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield a view of the place of each array in a buffer, and the array.

        Raises:
          ValueError: the arrays do not match this schema.
        """
        for array, view in zip(arrays, self.views(buffer), strict=True):
            self._check(array, view.shape, view.dtype)
            yield view, array

    def _check(self, array: np.ndarray, shape: tuple[int, ...], dtype: Any) -> None:
        fits = array.dtype == dtype or {array.dtype.name, dtype.name} <= _FLOATS
        if not fits or array.shape != shape:
            raise ValueError(
                f"{dtype}{list(shape)} expected, got {array.dtype}{list(array.shape)}"
            )


def allocate(size: int) -> np.ndarray:
    """Return a buffer of bytes, aligned so that JAX needs no copy of it."""
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + size]
