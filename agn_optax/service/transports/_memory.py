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
from collections.abc import Iterator

import numpy as np

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.server._servicer import Servicer
from agn_optax.service.transports import _socket, _transport
from agn_optax.service.wire import _buffers
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import Parcel
from agn_optax.service.wire._schema import Schema

# Smaller buffers are faster through the socket than through shared memory.
LEAST_SHARED = 64 << 10  # bytes
MOST_SEGMENTS = 16  # of one connection
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
      end: the socket, after the handshake.
      buffers: buffers for frames that are received over the socket.
    """

    def __init__(self, end: socket.socket, buffers: Buffers) -> None:
        super().__init__(end, buffers)
        self._made = 0  # number of segments
        self._free: deque[tuple[int, np.ndarray]] = deque()  # segments without views
        # The segment of all messages, and that of the next answer.
        self._message: tuple[int, np.ndarray] | None = None
        self._answer: np.ndarray | None = None
        self._lies_there = False  # whether the last frame's buffer is in a segment

    def send(self, parcel: Parcel) -> None:
        if parcel.nbytes < LEAST_SHARED or not self._share(parcel):
            super().send(parcel)

    def control(self) -> pb.Frame:
        frame = super().control()
        self._lies_there = bool(frame.segment)
        return frame

    def buffer(self, schema: Schema, what: str) -> np.ndarray:
        if not self._lies_there:
            return super().buffer(schema, what)
        answer, self._answer = self._answer, None
        if answer is None or answer.size < schema.size:
            raise errors.ProtocolError(
                f"{what} must be in the segment that was offered for it"
            )
        return answer[: schema.size]

    def _share(self, parcel: Parcel) -> bool:
        """Send a frame through segments; return False if none are available."""
        assert parcel.schema is not None
        if self._message is None or self._message[1].size != parcel.nbytes:
            self._message = None  # first, so that its segment may be reused
            self._message = self._take(parcel.nbytes)
        wanted = self._take(parcel.wanted) if self._message is not None else None
        if self._message is None or wanted is None:
            return False
        parcel.control.segment, buffer = self._message
        parcel.control.answer_segment, self._answer = wanted
        with parcel:
            _buffers.write(parcel.schema, parcel.arrays, buffer)
            self.sent()
            with self.pace(0):
                _socket.send(self._end, parcel.pieces(in_memory=True), self.sent)
        return True

    def _take(self, size: int) -> tuple[int, np.ndarray] | None:
        """Return the number and the bytes of a segment; None if there is none.

        The segment is reused once no view of its bytes is left.
        """
        number, raw = self._free[0] if self._free else (self._made + 1, None)
        if number > MOST_SEGMENTS:
            return None
        if raw is None or raw.size != size:
            raw = self._attached(number, size)
        if raw is None:
            return None
        if number > self._made:
            self._made = number
        else:
            self._free.popleft()
        free = self._free  # not `self`, which the segment may outlive
        return number, _buffers.lent(raw, size, lambda raw: free.append((number, raw)))

    def _attached(self, number: int, size: int) -> np.ndarray | None:
        """Create a segment; None if an end cannot map it, to use the socket instead."""
        try:
            descriptor, raw = create(size)
        except (OSError, ValueError):  # too many files, or too little memory
            return None
        try:
            attach = pb.Frame(attach=pb.Segment(number=number, size=size))
            (packet,) = Parcel(attach).pieces()
            # The socket sends it whole, because it is short and begins a frame.
            socket.send_fds(self._end, [packet], [descriptor])
        finally:
            os.close(descriptor)
        said = super().control()
        if not said.HasField("attached"):
            raise errors.ProtocolError("an answer to a segment was expected")
        return None if said.attached.error else raw


# The service's end.


class MemoryAccepted(_socket.Accepted):
    """The service's end of a connection with segments.

    Args:
      end: the socket.
      servicer: the servicer, with buffers to receive messages in.
    """

    def __init__(self, end: socket.socket, servicer: Servicer) -> None:
        super().__init__(end, servicer)
        self._came: list[int] = []  # received file descriptors
        self._segments: dict[int, np.ndarray] = {}
        self._segment = 0  # number of the segment with the last frame's buffer
        self._answer_segment = 0  # number of the segment for the next answer

    def control(self) -> pb.Frame | None:
        """Read the control message of the next frame; None if the worker has left."""
        while True:
            with self._descriptors() as descriptors:
                frame = super().control()
                if frame is None or not frame.HasField("attach"):
                    break
                error = self._attach(frame.attach, descriptors)
            self.send(Parcel(pb.Frame(attached=pb.Attached(error=error))))
        if frame is None:
            return None
        for number in (frame.segment, frame.answer_segment):
            if number and number not in self._segments:
                raise errors.ProtocolError(f"segment {number} was never attached")
        if frame.segment and frame.segment == frame.answer_segment:
            raise errors.ProtocolError(
                "an answer must have another segment than its message"
            )
        self._segment, self._answer_segment = frame.segment, frame.answer_segment
        return frame

    def buffer(self, schema: Schema, what: str) -> np.ndarray:
        """Read the buffer of that frame, into memory that the worker cannot write."""
        if not self._segment:
            with self._descriptors():  # closes those that a worker sends here
                return super().buffer(schema, what)
        there = self._segments[self._segment]
        if there.size < schema.size:
            raise errors.ProtocolError(
                f"{what} has {schema.size} bytes, but its segment {there.size}"
            )
        buffer = self._buffers.take(schema.size)
        _buffers.copy([(buffer, there[: schema.size])], schema.size)
        return buffer

    def _attach(self, segment: pb.Segment, descriptors: list[int]) -> str:
        """Map a segment; return why it cannot be mapped, or ""."""
        if not 0 < segment.number <= MOST_SEGMENTS:
            raise errors.ProtocolError(f"no segment has number {segment.number}")
        if not descriptors:
            return "its file descriptor did not arrive: too many open files, perhaps"
        try:
            there = attach(descriptors[0], segment.size)
        except (OSError, ValueError) as error:  # too many files, or too little memory
            return str(error)
        self._segments[segment.number] = there
        return ""

    def pieces(self, parcel: Parcel) -> Iterator[memoryview]:
        """Yield the pieces for the socket, after writing the buffer to its segment."""
        if parcel.schema is None or not self._answer_segment:
            return super().pieces(parcel)
        there = self._segments[self._answer_segment]
        if there.size < parcel.nbytes:
            raise errors.ProtocolError(
                f"an answer has {parcel.nbytes} bytes, but its segment {there.size}"
            )
        _buffers.write(parcel.schema, parcel.arrays, there)
        parcel.control.segment = self._answer_segment
        return parcel.pieces(in_memory=True)

    @contextlib.contextmanager
    def _descriptors(self) -> Iterator[list[int]]:
        """Yield the file descriptor received within the context, then close it."""
        try:
            yield self._came
        finally:
            self._forget()

    def _some(self, view: memoryview) -> int:
        room_for_one = socket.CMSG_LEN(_DESCRIPTOR.size)
        got, said, _, _ = self._end.recvmsg_into([view], room_for_one)
        for _, _, data in said:
            self._forget()  # a worker sends one at a time
            self._came += _DESCRIPTOR.unpack(data)
        return got

    def _forget(self) -> None:
        while self._came:
            os.close(self._came.pop())


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
      ProtocolError: the file is no sealed segment, or is too small.
      OSError: the segment cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise errors.ProtocolError(f"not a memory segment: {error}") from None
    there = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or not there >= size > 0:
        raise errors.ProtocolError(
            f"a sealed segment of {size} bytes was expected, got one of {there}"
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
    servicer: Servicer, place: _transport.ListenSettings
) -> _transport.Listener | None:
    """Listen for processes of the same user."""
    del place
    if not IS_SUPPORTED:
        return None
    return _socket.SocketListener(
        servicer, _socket.listening_by_name(), name="memory", accepted=MemoryAccepted
    )


def _dial(target: _transport.Target) -> _transport.Link:
    """Connect to the center, with a handshake."""
    if not IS_SUPPORTED:
        raise OSError("this system cannot share memory")
    return MemoryLink(_socket.dialled(target), target.buffers)


MEMORY = _transport.Transport("memory", _listen, _dial)
