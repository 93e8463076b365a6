"""Memory shared by a worker and a center on one machine.

A segment has no name: its file descriptor is sent over a Unix socket, and the system
releases it when both processes have ended, however they end. Frames are sent over that
socket, except for large buffers, which are in segments. The worker can write to a
segment at any time. The center therefore copies a message once, to memory of its own,
and reads only the copy. Linux only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.server._servicer import Servicer
from agn_optax.service.transports import _socket, _transport
from agn_optax.service.transports._link import Link
from agn_optax.service.wire import _buffers
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import Frame
from agn_optax.service.wire._schema import Schema

# Smaller buffers are faster through the socket than through shared memory.
MIN_SHARED = 64 << 10  # bytes
MAX_SEGMENTS = 16  # of one connection
_DESCRIPTOR = struct.Struct("i")

try:
    import fcntl

    # Neither end can shrink or grow a segment, or change these seals.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    IS_SUPPORTED = hasattr(os, "memfd_create")
except (ImportError, AttributeError):  # not on Linux
    IS_SUPPORTED = False


# The worker's end.


class MemoryLink(_socket.SocketLink):
    """A connection whose large buffers are in segments, which the worker creates.

    Args:
      sock: the socket, after the handshake.
      buffers: buffers for frames that are received over the socket.
    """

    def __init__(self, sock: socket.socket, buffers: Buffers) -> None:
        super().__init__(sock, buffers)
        self._created = 0  # number of created segments
        self._free: deque[tuple[int, np.ndarray]] = deque()  # segments without views
        # The segment of all messages, and that of the next answer.
        self._message: tuple[int, np.ndarray] | None = None
        self._answer: np.ndarray | None = None
        self._is_shared = False  # whether the last frame's buffer is in a segment

    def send(self, frame: Frame) -> None:
        if frame.nbytes < MIN_SHARED or not self._share(frame):
            super().send(frame)

    def read_header(self) -> pb.Header:
        header = super().read_header()
        self._is_shared = bool(header.segment)
        return header

    def read_buffer(self, schema: Schema, what: str) -> np.ndarray:
        if not self._is_shared:
            return super().read_buffer(schema, what)
        answer, self._answer = self._answer, None
        if answer is None or answer.size < schema.size:
            raise errors.ProtocolError(
                f"{what} must be in the segment that was offered for it"
            )
        return answer[: schema.size]

    def _share(self, frame: Frame) -> bool:
        """Send a frame through segments; return False if none are available."""
        assert frame.schema is not None
        if self._message is None or self._message[1].size != frame.nbytes:
            self._message = None  # first, so that its segment may be reused
            self._message = self._take(frame.nbytes)
        if self._message is None:
            return False
        answer = self._take(frame.answer_size)
        if answer is None:
            return False
        frame.header.segment, buffer = self._message
        frame.header.answer_segment, self._answer = answer
        with frame:
            _buffers.write(frame.schema, frame.arrays, buffer)
            self.on_sent()
            with self.timed(0):
                _socket.send(self._sock, frame.pieces(in_memory=True), self.on_sent)
        return True

    def _take(self, size: int) -> tuple[int, np.ndarray] | None:
        """Return the number and the bytes of a segment; None if there is none.

        The segment is reused once no view of its bytes is left.
        """
        number, raw = self._free[0] if self._free else (self._created + 1, None)
        if number > MAX_SEGMENTS:
            return None
        if raw is None or raw.size != size:
            raw = self._create_segment(number, size)
        if raw is None:
            return None
        if number > self._created:
            self._created = number
        else:
            self._free.popleft()
        free = self._free  # not `self`, which the segment may outlive
        return number, _buffers.lend(raw, size, lambda raw: free.append((number, raw)))

    def _create_segment(self, number: int, size: int) -> np.ndarray | None:
        """Create a segment; None if an end cannot map it: then use the socket."""
        try:
            descriptor, raw = create(size)
        except (OSError, ValueError):  # too many files, or too little memory
            return None
        try:
            attach = pb.Header(attach=pb.Segment(number=number, size=size))
            (frame_bytes,) = Frame(attach).pieces()
            # The socket sends it whole, because it is short and begins a frame.
            socket.send_fds(self._sock, [frame_bytes], [descriptor])
        finally:
            os.close(descriptor)
        header = super().read_header()
        if not header.HasField("attached"):
            raise errors.ProtocolError("expected `attached`, got another frame")
        return None if header.attached.error else raw


# The service's end.


class MemoryConnection(_socket.SocketConnection):
    """The service's end of a connection with segments.

    Args:
      sock: the socket.
      servicer: the servicer, with buffers to receive messages in.
    """

    def __init__(self, sock: socket.socket, servicer: Servicer) -> None:
        super().__init__(sock, servicer)
        self._descriptors: list[int] = []  # received and still open
        self._segments: dict[int, np.ndarray] = {}
        self._segment = 0  # number of the segment with the last frame's buffer
        self._answer_segment = 0  # number of the segment for the next answer

    def read_header(self) -> pb.Header | None:
        """Read the header of the next frame; None if the worker has left."""
        while True:
            with self._closing_descriptors():
                header = super().read_header()
                if header is None or not header.HasField("attach"):
                    break
                error = self._attach(header.attach)
            self.send(Frame(pb.Header(attached=pb.Attached(error=error))))
        if header is None:
            return None
        for number in (header.segment, header.answer_segment):
            if number and number not in self._segments:
                raise errors.ProtocolError(f"segment {number} was never attached")
        if header.segment and header.segment == header.answer_segment:
            raise errors.ProtocolError(
                "an answer must have another segment than its message"
            )
        self._segment, self._answer_segment = header.segment, header.answer_segment
        return header

    def read_buffer(self, schema: Schema, what: str) -> np.ndarray:
        """Read the last header's buffer, into memory that the worker cannot write."""
        if not self._segment:
            with self._closing_descriptors():  # a worker may send some here, too
                return super().read_buffer(schema, what)
        buffer = self._buffers.take(schema.size)
        _buffers.copy([(buffer, self._received(schema, what))], schema.size)
        return buffer

    def read_into(
        self, schema: Schema, arrays: Sequence[np.ndarray], what: str
    ) -> None:
        """Read the leaves of the last header's frame into arrays of their shapes."""
        if not self._segment:
            with self._closing_descriptors():
                super().read_into(schema, arrays, what)
        else:
            leaves = schema.views(self._received(schema, what))
            _buffers.copy(list(zip(arrays, leaves, strict=True)), schema.size)

    def _received(self, schema: Schema, what: str) -> np.ndarray:
        """Return the last header's buffer, in its segment."""
        segment_bytes = self._segments[self._segment]
        if segment_bytes.size < schema.size:
            raise errors.ProtocolError(
                f"{what} has {schema.size} bytes, but its segment {segment_bytes.size}"
            )
        return segment_bytes[: schema.size]

    def _attach(self, segment: pb.Segment) -> str:
        """Map a segment; return why it cannot be mapped, or ""."""
        if not 0 < segment.number <= MAX_SEGMENTS:
            raise errors.ProtocolError(f"no segment has number {segment.number}")
        if not self._descriptors:
            return "its file descriptor did not arrive: too many open files, perhaps"
        try:
            self._segments[segment.number] = attach(self._descriptors[0], segment.size)
        except (OSError, ValueError) as error:  # too many files, or too little memory
            return str(error)
        return ""

    def pieces(self, frame: Frame) -> Iterator[memoryview]:
        """Yield the pieces for the socket, after writing the buffer to its segment."""
        if frame.schema is None or not self._answer_segment:
            return super().pieces(frame)
        segment_bytes = self._segments[self._answer_segment]
        if segment_bytes.size < frame.nbytes:
            raise errors.ProtocolError(
                f"an answer has {frame.nbytes} bytes, but its segment "
                f"{segment_bytes.size}"
            )
        _buffers.write(frame.schema, frame.arrays, segment_bytes)
        frame.header.segment = self._answer_segment
        return frame.pieces(in_memory=True)

    @contextlib.contextmanager
    def _closing_descriptors(self) -> Iterator[None]:
        """Close a file descriptor received within the block when the block ends."""
        try:
            yield
        finally:
            self._close_all()

    def _receive_some(self, view: memoryview) -> int:
        size_of_one = socket.CMSG_LEN(_DESCRIPTOR.size)
        received, controls, _, _ = self._sock.recvmsg_into([view], size_of_one)
        for _, _, data in controls:
            self._close_all()  # a worker sends one at a time
            self._descriptors += _DESCRIPTOR.unpack(data)
        if received:
            self.on_received()
        return received

    def _close_all(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


# Both ends.


def create(size: int) -> tuple[int, np.ndarray]:
    """Create a segment of ``size`` bytes; return its file descriptor and its bytes.

    Raises:
      OSError: the system cannot create one.
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
    """Return the bytes of a segment that another process has created.

    Raises:
      ProtocolError: the file is not a sealed segment, or is too small.
      OSError: the segment cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise errors.ProtocolError(f"not a memory segment: {error}") from None
    file_size = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or not file_size >= size > 0:
        raise errors.ProtocolError(
            f"a sealed segment of {size} bytes was expected, got one of {file_size}"
        )
    return _mapped(descriptor, size)


def _mapped(descriptor: int, size: int) -> np.ndarray:
    if sys.version_info >= (3, 13):  # earlier versions keep a duplicated descriptor
        mapping = mmap.mmap(descriptor, size, trackfd=False)
    else:
        mapping = mmap.mmap(descriptor, size)
    with contextlib.suppress(OSError):  # only a hint
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


# The Unix socket. Its data stays on this machine and is not encrypted.


def _listen(
    servicer: Servicer, settings: _transport.ListenSettings
) -> _transport.Listener | None:
    """Listen for processes of the same user."""
    del settings
    if not IS_SUPPORTED:
        return None
    return _socket.SocketListener(
        servicer,
        _socket.listen_abstract(),
        name="memory",
        connection_type=MemoryConnection,
    )


def _dial(target: _transport.Target) -> Link:
    """Connect to the center, with a handshake."""
    if not IS_SUPPORTED:
        raise OSError("this system cannot share memory")
    return MemoryLink(_socket.dial_socket(target), target.buffers)


MEMORY = _transport.Transport("memory", _listen, _dial)
