"""Frames, which all transports carry: two sizes, a header, and a buffer.

The sizes are those of the header, a protobuf `Header`, and of the buffer, which holds
the leaves of a tree. See center.proto.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from agn_optax import errors
from agn_optax._internal import Leaf
from agn_optax.service import center_pb2 as pb
from agn_optax.service.wire import _casting
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._schema import MAX_GAP, Schema, assign

SIZES = struct.Struct("<IQ")  # start of a frame: sizes of its header and its buffer
MAX_HEADER = 64 << 10  # bytes; most headers have a hundred
_MAX_COPIED = 1 << 20  # bytes that are received in another buffer at a time


@dataclasses.dataclass(eq=False)
class Frame:
    """A frame to be sent.

    It is a context manager that releases its arrays at the end of the block, even if
    the frame itself is still referenced.

    Args:
      header: the header.
      schema: schema of the arrays; None if the frame has no buffer.
      arrays: the leaves, in the order of the schema, read while the frame is sent.
      before_last_byte: called before the last byte is sent. Without that byte the
        receiver cannot use the frame.
      answer_size: size in bytes of the buffer expected in the answer.
    """

    header: pb.Header
    schema: Schema | None = None
    arrays: Sequence[np.ndarray] = ()
    before_last_byte: Callable[[], None] | None = None
    answer_size: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return 0 if self.schema is None else self.schema.size

    def __enter__(self) -> Frame:
        return self

    def __exit__(self, *exception: object) -> None:
        self.arrays = ()

    def copy(self) -> Frame:
        """Return a copy of the frame to send, which a transport may change."""
        header = pb.Header()
        header.CopyFrom(self.header)
        return dataclasses.replace(self, header=header)

    def pieces(self, *, in_memory: bool = False) -> Iterator[memoryview]:
        """Yield the frame in nonempty pieces, most of which are views of the arrays.

        Args:
          in_memory: whether to leave the buffer out, because it is in shared memory.
        """
        header = self.header.SerializeToString()
        sizes = SIZES.pack(len(header), 0 if in_memory else self.nbytes)
        last = memoryview(sizes + header)
        if self.schema is not None and not in_memory:
            for piece in self.schema.pieces(self.arrays, _casting.pieces):
                if len(piece):
                    yield last
                    last = piece
        if self.before_last_byte is not None:
            if len(last) > 1:
                yield last[:-1]
            self.before_last_byte()
            last = last[-1:]
        yield last


def bytes_schema(size: int) -> Schema:
    """Return the schema of ``size`` plain bytes."""
    return Schema([Leaf("", "uint8", (size,))])


def join_pieces(pieces: Iterator[memoryview], size: int) -> Iterator[bytes]:
    """Join ``pieces`` to as few objects as possible, each of at most ``size`` bytes."""
    joined: list[memoryview] = []
    free = size
    for piece in pieces:
        while len(piece) > free:
            yield b"".join([*joined, piece[:free]])
            joined, free, piece = [], size, piece[free:]
        joined.append(piece)
        free -= len(piece)
    if free < size:
        yield b"".join(joined)


class FrameReader:
    """Reads frames one after another.

    Args:
      receive: writes the next received bytes to a view, and returns their number; 0 at
        the end.
      buffers: buffers to receive in.

    Attributes:
      on_received: called when bytes were received.
      timed: ``timed(size)`` returns a context that limits the time for receiving
        ``size`` bytes; a link also uses it for sending.
    """

    def __init__(self, receive: Callable[[memoryview], int], buffers: Buffers) -> None:
        self.on_received = do_nothing
        self.timed: Callable[[int], contextlib.AbstractContextManager[Any]]
        self.timed = contextlib.nullcontext
        self._receive = receive
        self._buffers = buffers
        self._unread = 0  # size of a frame's buffer that is not read yet

    def read_header(self) -> pb.Header | None:
        """Read the header of the next frame; None if there is no more frame.

        Raises:
          ProtocolError: the received bytes are not a header, or it is too large.
          EOFError: the connection ended within a frame.
        """
        if self._unread:
            raise errors.ProtocolError(
                f"a buffer of {self._unread} bytes came with a frame that needs none"
            )
        sizes = bytearray(SIZES.size)
        received = self._receive_some(memoryview(sizes))
        if not received:
            return None
        with self.timed(MAX_HEADER):
            self.fill(memoryview(sizes)[received:])
            header_size, buffer_size = SIZES.unpack(sizes)
            if header_size > MAX_HEADER:  # checked before memory is allocated
                raise errors.ProtocolError(
                    f"a header must have at most {MAX_HEADER} bytes, got {header_size}"
                )
            header_bytes = bytearray(header_size)
            self.fill(memoryview(header_bytes))
        try:
            header = pb.Header.FromString(bytes(header_bytes))
        except DecodeError as error:
            raise errors.ProtocolError(f"not a header: {error}") from None
        self._unread = buffer_size
        return header

    def read_buffer(self, schema: Schema, what: str) -> np.ndarray:
        """Read the buffer of the last header's frame, into memory that is not shared.

        Raises:
          ProtocolError: the buffer's size is not that of the schema.
          EOFError: the connection ended within the buffer.
        """
        self._check_size(schema, what)
        buffer = self._buffers.take(schema.size)
        with self.timed(schema.size):
            self.fill(buffer.data)
        self._unread = 0
        return buffer

    def read_into(
        self, schema: Schema, arrays: Sequence[np.ndarray], what: str
    ) -> None:
        """Read the leaves of the last header's frame into arrays of their shapes.

        The arrays may be regions of larger ones, and may have other dtypes.

        Raises:
          ProtocolError: the buffer's size is not that of the schema.
          EOFError: the connection ended within the buffer; some arrays have changed.
        """
        self._check_size(schema, what)
        end, gap = 0, memoryview(bytearray(MAX_GAP))
        with self.timed(schema.size):
            for leaf, offset, array in zip(
                schema.leaves, schema.offsets, arrays, strict=True
            ):
                self.fill(gap[: offset - end])
                end = offset + leaf.nbytes
                for part in _parts(array, leaf.dtype):
                    same = part.dtype.name == leaf.dtype and part.flags.c_contiguous
                    received = part if same else np.empty(part.shape, leaf.dtype)
                    self.fill(received.reshape(-1).view(np.uint8).data)
                    if received is not part:
                        assign([(part, received)])
        self._unread = 0

    def _check_size(self, schema: Schema, what: str) -> None:
        if self._unread != schema.size:
            raise errors.ProtocolError(
                f"{what} of {schema.size} bytes was expected, got {self._unread} bytes"
            )

    def fill(self, view: memoryview) -> None:
        """Read bytes into all of a view.

        Raises:
          EOFError: the connection ended before the view was full.
        """
        while view:
            received = self._receive_some(view)
            if not received:
                raise EOFError("the stream ends within a frame")
            view = view[received:]

    def _receive_some(self, view: memoryview) -> int:
        received = self._receive(view)
        if received:
            self.on_received()
        return received


def _parts(array: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    """Yield an array in views, in its order, of which each may be received at once.

    Those that need another buffer, to be copied from, have few bytes.
    """
    same = array.dtype.name == dtype and array.flags.c_contiguous
    if same or array.nbytes <= _MAX_COPIED or not array.ndim:
        yield array
        return
    rows = max(1, _MAX_COPIED * len(array) // array.nbytes)
    for begin in range(0, len(array), rows):
        part = array[begin : begin + rows]
        yield from _parts(part[0], dtype) if len(part) == 1 else [part]


def do_nothing() -> None:
    """Do nothing; the default of callbacks."""
