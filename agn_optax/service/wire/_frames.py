"""Frames as both sides use them: a control part that protobuf reads, and a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from google.protobuf.message import DecodeError

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import _memory
from agn_optax.service.wire import _casting, _schema


class Parcel(NamedTuple):
    """What one side says at a time: a control part, and the arrays that follow it."""

    control: pb.Frame
    schema: _schema.Schema | None = None  # None: no arrays follow
    arrays: Sequence[np.ndarray] = ()
    # Called before the last of it is sent: without that, nobody has it.
    until: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return 0 if self.schema is None else self.schema.size


class Incoming(Protocol):
    """What comes from a worker, over whatever it travels.

    Attributes:
      lends: whether the buffer that came lies where the worker may write again, once it
        has its answer.
    """

    lends: bool

    def control(self) -> pb.Frame | None:
        """The next control part; None when the worker is gone."""
        ...

    def buffer(self, schema: _schema.Schema, what: str) -> np.ndarray:
        """The buffer that follows it."""
        ...


class Reader:
    """What comes over a gRPC call: `Incoming`.

    Args:
      frames: of the call.
      buffers: to receive in.
    """

    lends = False

    def __init__(self, frames: Iterator[bytes], buffers: _memory.Buffers) -> None:
        self._frames = frames
        self._buffers = buffers
        self._offset = 0
        self._chunk: memoryview | bytes = b""

    def control(self) -> pb.Frame | None:
        """The next control part; None at the end of the call."""
        frame = next(self._frames, None)
        if frame is None:
            return None
        control, self._offset, self._chunk = parse(frame)
        return control

    def buffer(self, schema: _schema.Schema, what: str) -> np.ndarray:
        """The buffer that follows it."""
        assembler = _schema.Assembler(schema, self._buffers.take(schema.size))
        assembler.feed(self._offset, self._chunk)
        while not assembler.complete:
            feed(assembler, next(self._frames, b""), what)
        return assembler.buffer


def parse(frame: bytes) -> tuple[pb.Frame, int, memoryview]:
    """A frame's control part, and the offset and the bytes of its chunk.

    Raises:
      ProtocolError: not a frame.
    """
    control, offset, chunk = _schema.decode(frame)
    return parse_control(control), offset, chunk


def parse_control(control: bytes) -> pb.Frame:
    """A control part as it came.

    Raises:
      ProtocolError: it is none.
    """
    try:
        return pb.Frame.FromString(control)
    except DecodeError as error:
        raise errors.ProtocolError(f"not a frame of this protocol: {error}") from None


def split(parcel: Parcel) -> Iterator[bytes]:
    """The frames in which a parcel travels; the first one has the control part."""
    last = None
    for frame in _frames_of(parcel):
        if last is not None:
            yield last
        last = frame
    if parcel.until is not None:
        parcel.until()
    if last is not None:
        yield last


def _frames_of(parcel: Parcel) -> Iterator[bytes]:
    head = parcel.control.SerializeToString()
    if parcel.schema is not None:
        chunks = parcel.schema.chunks(parcel.arrays, cast=_casting.pieces)
        for offset, pieces in chunks:
            yield _schema.encode(head, offset, pieces)
            head = b""
    if head:  # no arrays, or without elements
        yield head


def feed(assembler: _schema.Assembler, frame: bytes, what: str) -> None:
    """The next frame of what an assembler waits for.

    Raises:
      ProtocolError: it is something else.
    """
    control, offset, chunk = _schema.decode(frame)
    if control or not chunk:
        raise errors.ProtocolError(
            f"{what} ends after {assembler.received} of {assembler.schema.size} bytes"
        )
    assembler.feed(offset, chunk)
