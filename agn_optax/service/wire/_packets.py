"""Packets, which all transports carry: a head, a control part, and a buffer.

The head has the lengths of the other two, the control part is a message of protobuf,
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

HEAD = struct.Struct("<IQ")  # bytes of the control part, and of the buffer
MOST_CONTROL = 64 << 10  # bytes; most have a hundred
MOST_PROBED = 4 << 20  # bytes of a probe, each way
_BLOCK = 1 << 16  # bytes, which are repeated: more than what compresses looks back


@dataclasses.dataclass(eq=False)
class Parcel:
    """What one side says at a time; it travels as a packet.

    As a context manager it lets go of its arrays once they are sent, whoever still
    holds the parcel itself.

    Args:
      control: the control part.
      schema: of the arrays; None if none follow.
      arrays: the leaves, in the order of the schema. They are sent as they are then.
      until: called before the last of it is sent: without that, nobody has it.
      wanted: bytes of the buffer that it asks for in return.
    """

    control: pb.Frame
    schema: Schema | None = None
    arrays: Sequence[np.ndarray] = ()
    until: Callable[[], None] | None = None
    wanted: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self.schema is None else self.schema.size

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.arrays = ()

    def pieces(self, *, in_memory: bool = False) -> Iterator[memoryview]:
        """The packet in pieces, none empty, most of which lie in the arrays.

        Args:
          in_memory: whether the buffer lies in shared memory, and does not follow.
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
    """Of a buffer of which nobody keeps anything."""
    return Schema([Leaf("", "uint8", (size,))])


def in_bytes(control: pb.Frame, size: int, wanted: int = 0) -> Parcel:
    """So many bytes that no link on the way can make fewer, to see how fast they are.

    Args:
      control: the control part.
      size: bytes; 0 for none.
      wanted: as of `Parcel`.
    """
    if not size:
        return Parcel(control, wanted=wanted)
    block = np.frombuffer(os.urandom(_BLOCK), np.uint8)
    return Parcel(control, of_bytes(size), [np.resize(block, size)], wanted=wanted)


def joined(pieces: Iterator[memoryview], size: int) -> Iterator[bytes]:
    """The bytes of ``pieces`` in as few objects of at most ``size`` bytes as may be."""
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
    """Packets as they come, one after the other.

    Args:
      receive: puts the bytes that come next into a view, and returns how many these
        are; 0 at the end.
      buffers: to receive in.

    Attributes:
      heard: called when something came.
      pace: ``pace(size)`` is around bytes that are to come without a pause; of a
        link, also around those that go.
    """

    def __init__(self, receive: Callable[[memoryview], int], buffers: Buffers) -> None:
        self.heard = nothing
        self.pace: Callable[[int], contextlib.AbstractContextManager[Any]]
        self.pace = contextlib.nullcontext
        self._receive = receive
        self._buffers = buffers
        self._follows = 0  # bytes of the buffer that has been announced, and not read

    def control(self) -> pb.Frame | None:
        """The control part of the next packet; None where there is no further one.

        Raises:
          ProtocolError: what came is none, or longer.
          EOFError: it ends within a packet.
        """
        if self._follows:
            raise errors.ProtocolError(
                f"a buffer of {self._follows} bytes came with what has none"
            )
        head = bytearray(HEAD.size)
        first = self._some(memoryview(head))
        if not first:
            return None
        with self.pace(MOST_CONTROL):
            self._fill(memoryview(head)[first:])
            length, follows = HEAD.unpack(head)
            if length > MOST_CONTROL:  # memory is taken for it before it is looked at
                raise errors.ProtocolError(
                    f"a control part has at most {MOST_CONTROL} bytes, got {length}"
                )
            control = bytearray(length)
            self._fill(memoryview(control))
        try:
            frame = pb.Frame.FromString(bytes(control))
        except DecodeError as error:
            raise errors.ProtocolError(f"not a control part: {error}") from None
        self._follows = follows
        return frame

    def buffer(self, schema: Schema, what: str) -> np.ndarray:
        """The buffer of that packet, which must be as long as its schema says.

        Nobody else writes there.

        Raises:
          ProtocolError: it is not.
          EOFError: it ends within it.
        """
        if self._follows != schema.size:
            raise errors.ProtocolError(
                f"{what} of {schema.size} bytes was expected, got {self._follows} bytes"
            )
        buffer = self._buffers.take(schema.size)
        with self.pace(schema.size):
            self._fill(buffer.data)
        self._follows = 0
        return buffer

    def _fill(self, view: memoryview) -> None:
        while view:
            got = self._some(view)
            if not got:
                raise EOFError("it ends within a packet")
            view = view[got:]

    def _some(self, view: memoryview) -> int:
        if got := self._receive(view):
            self.heard()
        return got


def nothing() -> None:
    """What is called where nobody wants to know."""
