"""Frames as both sides use them: a control part that protobuf reads, and a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from google.protobuf.message import DecodeError

from agn_optax import errors
from agn_optax.service import _wire
from agn_optax.service import center_pb2 as pb


def parse(frame: bytes) -> tuple[pb.Frame, int, memoryview]:
    """A frame's control part, and the offset and the bytes of its chunk.

    Raises:
      ProtocolError: not a frame.
    """
    control, offset, chunk = _wire.decode(frame)
    try:
        return pb.Frame.FromString(control), offset, chunk
    except DecodeError as error:
        raise errors.ProtocolError(f"not a frame of this protocol: {error}") from None


def split(
    schema: _wire.Schema, arrays: Sequence[np.ndarray], control: pb.Frame
) -> Iterator[bytes]:
    """The frames in which arrays travel; the first one has the control part."""
    head = control.SerializeToString()
    for offset, pieces in schema.chunks(arrays):
        yield _wire.encode(head, offset, pieces)
        head = b""
    if head:  # a tree without elements
        yield head


def feed(assembler: _wire.Assembler, frame: bytes, what: str) -> None:
    """The next frame of what an assembler waits for.

    Raises:
      ProtocolError: it is something else.
    """
    control, offset, chunk = _wire.decode(frame)
    if control or not chunk:
        raise errors.ProtocolError(
            f"{what} ends after {assembler.received} of {assembler.schema.size} bytes"
        )
    assembler.feed(offset, chunk)
