"""Trees as bytes: the layout of leaves in one buffer.

Knows numpy, and neither JAX nor gRPC nor protobuf. Where the wire is narrower than the
arrays, the copy onto it rounds.
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

_ALIGNMENT = 64  # bytes, of a buffer; what XLA's CPU backend takes without a copy
_CAST_SIZE = 1 << 16  # numbers that are cast at a time: what a cache holds
_GAP = bytes(layout.ALIGNMENT * 8)

_FLOATS = dict.fromkeys(("float64", "float32", "float16", "bfloat16")).keys()
_INTEGERS = tuple(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = {*_FLOATS, *_INTEGERS, "bool"}


# Makes flat arrays of another dtype, piece by piece.
Cast = Callable[[np.ndarray, Any], Iterator[np.ndarray]]


def assign(places: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies each second array to the first one, in the dtype of that.

    It rounds to the nearest even number; what is too large becomes infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        for place, array in places:
            place[...] = array


def in_dtype(flat: np.ndarray, dtype: Any) -> Iterator[np.ndarray]:
    """A flat array in another dtype, in pieces that are made as they are asked for."""
    for begin in range(0, flat.size, _CAST_SIZE):
        part = flat[begin : begin + _CAST_SIZE]
        assign([(made := np.empty(part.shape, dtype), part)])
        yield made


class Schema(Description):
    """Which leaves there are, and where in the buffer each begins.

    Args:
      leaves: in the order of the buffer.
      structure: the containers around them, as JSON; not looked at here.

    Raises:
      ProtocolError: a dtype that does not travel, a shape that no array has, or a path
        twice.
    """

    def __init__(self, leaves: Sequence[Leaf], structure: str = "") -> None:
        super().__init__(leaves, structure)
        paths = set()
        self._views: list[tuple[tuple[int, ...], Any, int]] = []
        self.size = 0  # bytes of the buffer
        for leaf in self.leaves:
            if leaf.dtype not in _DTYPES:
                raise errors.ProtocolError(
                    f"leaf {leaf.path} has dtype {leaf.dtype!r}, which does not travel"
                )
            try:  # without its memory
                np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
            except ValueError as error:
                raise errors.ProtocolError(
                    f"leaf {leaf.path} has shape {list(leaf.shape)}: {error}"
                ) from None
            if leaf.path in paths:
                raise errors.ProtocolError(f"leaf {leaf.path} comes twice")
            paths.add(leaf.path)
            # As a packed center has them, so that its array is this buffer.
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
        """The schema in which floating leaves travel as ``dtype``; "" for as they are.

        Raises:
          ProtocolError: not a floating dtype that travels.
        """
        if dtype not in self._casts:
            if dtype not in _FLOATS:
                raise errors.ProtocolError(
                    f"floats travel as one of {', '.join(_FLOATS)}, got {dtype!r}"
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
        """The leaves as arrays that lie in a buffer."""
        return [
            np.ndarray(shape, dtype, buffer, offset)
            for shape, dtype, offset in self._views
        ]

    @functools.cached_property
    def packed(self) -> Schema:
        """The two leaves of a packed center in the same buffer; all of one dtype."""
        (dtype,) = self.dtypes
        size = np.dtype(dtype).itemsize
        begins, end = [offset // size for offset in self.offsets], self.size // size
        middle = layout.middle(begins, end)
        sizes = {"first": middle, "second": end - middle}
        return Schema([Leaf(f"['{k}']", dtype, (n,)) for k, n in sizes.items()])

    def pieces(
        self, arrays: Sequence[np.ndarray], cast: Cast = in_dtype
    ) -> Iterator[memoryview]:
        """The buffer in pieces that lie in ``arrays``, and gaps.

        Floating numbers of another dtype are ``cast``, a piece at a time.

        Raises:
          ValueError: the arrays are not those of this schema.
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

    def places(
        self, arrays: Sequence[np.ndarray], buffer: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each array's place in a buffer, and the array, which is to be cast to it.

        Raises:
          ValueError: the arrays are not those of this schema.
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
    """A buffer of bytes, aligned so that JAX may take it without a copy."""
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + size]
