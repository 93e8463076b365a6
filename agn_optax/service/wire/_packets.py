"""Frames, which all transports carry: a header, a control message, and a buffer.

The header has the sizes of the other two, the control message is a protobuf `Frame`,
and the buffer holds the leaves of a tree. See center.proto.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
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
from agn_optax.service.wire._schema import Schema

HEAD = struct.Struct("<IQ")  # sizes of the control message and of the buffer
MOST_CONTROL = 64 << 10  # maximum size of a control message, bytes; most have a hundred
MOST_PROBED = 4 << 20  # maximum size of a probe in each direction, bytes
_BLOCK = 1 << 16  # bytes to repeat in a probe: longer than the window of compression


@dataclasses.dataclass(eq=False)
class Parcel:
    """A frame to be sent.

    At its end as a context manager it releases its arrays, even if the frame itself is
    still referred to.

    Args:
      control: the control message.
      schema: schema of the arrays; None if the frame has no buffer.
      arrays: the leaves, in the order of the schema, read while the frame is sent.
      until: called before the last byte is sent, without which the frame is not
        received.
      wanted: size in bytes of the buffer expected in the answer.
    """

    control: pb.Frame
    schema: Schema | None = None
    arrays: Sequence[np.ndarray] = ()
    until: Callable[[], None] | None = None
    wanted: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return 0 if self.schema is None else self.schema.size

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.arrays = ()

    def copy(self) -> Parcel:
        """Return a copy of the frame to send, which a transport may change."""
        control = pb.Frame()
        control.CopyFrom(self.control)
        return dataclasses.replace(self, control=control)

    def pieces(self, *, in_memory: bool = False) -> Iterator[memoryview]:
        """Yield the frame in nonempty pieces, most of which are views of the arrays.

        Args:
          in_memory: whether the buffer is in shared memory, and is left out here.
        """
        control = self.control.SerializeToString()
        head = HEAD.pack(len(control), 0 if in_memory else self.nbytes)
        last = memoryview(head + control)
        if self.schema is not None and not in_memory:
            for piece in self.schema.pieces(self.arrays, _casting.pieces):
                if len(piece):
                    yield last
                    last = piece
        if self.until is not None:
            if len(last) > 1:
                yield last[:-1]
            self.until()
            last = last[-1:]
        yield last


def of_bytes(size: int) -> Schema:
    """Return the schema of ``size`` plain bytes."""
    return Schema([Leaf("", "uint8", (size,))])


def in_bytes(control: pb.Frame, size: int, wanted: int = 0) -> Parcel:
    """Return a frame of incompressible bytes, to measure the speed of a connection.

    Args:
      control: the control message.
      size: number of bytes; 0 for no buffer.
      wanted: see `Parcel`.
    """
    if not size:
        return Parcel(control, wanted=wanted)
    block = np.frombuffer(os.urandom(_BLOCK), np.uint8)
    return Parcel(control, of_bytes(size), [np.resize(block, size)], wanted=wanted)


def joined(pieces: Iterator[memoryview], size: int) -> Iterator[bytes]:
    """Join ``pieces`` to as few objects as possible, each of at most ``size`` bytes."""
    parts: list[memoryview] = []
    filled = 0
    for piece in pieces:
        while len(piece) > size - filled:
            cut = size - filled
            yield b"".join([*parts, piece[:cut]])
            parts, filled, piece = [], 0, piece[cut:]
        parts.append(piece)
        filled += len(piece)
    if filled:
        yield b"".join(parts)


class Reader:
    """Reads frames one after another.

    Args:
      receive: writes the next received bytes to a view, and returns their number; 0 at
        the end.
      buffers: buffers to receive in.

    Attributes:
      received: called when bytes were received.
      pace: ``pace(size)`` is a context around receiving bytes that are to come without
        a pause; for a link, also around sending.
    """

    def __init__(self, receive: Callable[[memoryview], int], buffers: Buffers) -> None:
        self.received = nothing
        self.pace: Callable[[int], contextlib.AbstractContextManager[Any]]
        self.pace = contextlib.nullcontext
        self._receive = receive
        self._buffers = buffers
        self._follows = 0  # size of the announced buffer that is not read yet

    def control(self) -> pb.Frame | None:
        """Read the control message of the next frame; None if there is no more frame.

        Raises:
          ProtocolError: the received bytes are no control message, or one too large.
          EOFError: the connection ended within a frame.
        """
        if self._follows:
            raise errors.ProtocolError(
                f"a buffer of {self._follows} bytes came with a frame that has none"
            )
        head = bytearray(HEAD.size)
        first = self._some(memoryview(head))
        if not first:
            return None
        with self.pace(MOST_CONTROL):
            self.fill(memoryview(head)[first:])
            length, follows = HEAD.unpack(head)
            if length > MOST_CONTROL:  # checked before memory is allocated
                raise errors.ProtocolError(
                    f"a control message must have at most {MOST_CONTROL} bytes, got "
                    f"{length}"
                )
            control = bytearray(length)
            self.fill(memoryview(control))
        try:
            frame = pb.Frame.FromString(bytes(control))
        except DecodeError as error:
            raise errors.ProtocolError(f"not a control message: {error}") from None
        self._follows = follows
        return frame

    def buffer(self, schema: Schema, what: str) -> np.ndarray:
        """Read the buffer of that frame, into memory that is not shared.

        Raises:
          ProtocolError: the buffer's size is not that of the schema.
          EOFError: the connection ended within the buffer.
        """
        if self._follows != schema.size:
            raise errors.ProtocolError(
                f"{what} of {schema.size} bytes was expected, got {self._follows} bytes"
            )
        buffer = self._buffers.take(schema.size)
        with self.pace(schema.size):
            self.fill(buffer.data)
        self._follows = 0
        return buffer

    def fill(self, view: memoryview) -> None:
        """Read bytes into all of a view.

        Raises:
          EOFError: the connection ended before that.
        """
        while view:
            got = self._some(view)
            if not got:
                raise EOFError("the stream ends within a frame")
            view = view[got:]

    def _some(self, view: memoryview) -> int:
        if got := self._receive(view):
            self.received()
        return got


def nothing() -> None:
    """Do nothing; the default of callbacks."""
