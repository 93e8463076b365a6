"""Memory that a worker and a center on one machine share.

A segment has no name: its file descriptor travels over a Unix socket, and it is gone
when both processes are, however they end. Packets go over that socket, and what is
large lies in segments. The worker may write there at any time, so the center copies a
message once, to where nobody else can write, and looks at nothing but that. Linux only.
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
from agn_optax.service._servicer import Servicer
from agn_optax.service.transports import _socket, _transport
from agn_optax.service.wire import _buffers
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import Parcel
from agn_optax.service.wire._schema import Schema

# What is smaller goes through the socket faster than through shared memory.
LEAST_SHARED = 64 << 10  # bytes
MOST_SEGMENTS = 16  # of one connection
_DESCRIPTOR = struct.Struct("i")

try:
    import fcntl

    # Nobody can take pages away from under the other side, or add the right to.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    IS_SUPPORTED = hasattr(os, "memfd_create")
except (ImportError, AttributeError):  # not on Linux
    IS_SUPPORTED = False


# The worker's end.


class MemoryLink(_socket.SocketLink):
    """A connection whose large buffers lie in segments, which the worker makes.

    Args:
      end: the socket, connected and greeted.
      buffers: to receive in what comes over the socket nevertheless.
    """

    def __init__(self, end: socket.socket, buffers: Buffers) -> None:
        super().__init__(end, buffers)
        self._made = 0  # segments
        self._free: deque[tuple[int, np.ndarray]] = deque()  # those nobody looks at
        # The segment of all messages, and that of the answer to come.
        self._message: tuple[int, np.ndarray] | None = None
        self._answer: np.ndarray | None = None
        self._lies_there = False  # whether the last packet's buffer does

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
            raise errors.ProtocolError(f"{what} lies in a segment of its own")
        return answer[: schema.size]

    def _share(self, parcel: Parcel) -> bool:
        """Sends a parcel through segments; False if there are none to be had."""
        assert parcel.schema is not None
        if self._message is None or self._message[1].size != parcel.nbytes:
            self._message = None  # its segment may be taken again
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
        """The number and the bytes of a segment, or None if there is none.

        It is used again once nobody looks at it any more.
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
        free = self._free  # and not this link, which may be gone by then
        return number, _buffers.lent(raw, size, lambda raw: free.append((number, raw)))

    def _attached(self, number: int, size: int) -> np.ndarray | None:
        """A new segment; None if one end cannot have it: the socket carries as much."""
        try:
            descriptor, raw = create(size)
        except (OSError, ValueError):  # too many files, or no memory
            return None
        try:
            attach = pb.Frame(attach=pb.Segment(number=number, size=size))
            (packet,) = Parcel(attach).pieces()
            # Short, and at the beginning of a packet: the socket takes it whole.
            socket.send_fds(self._end, [packet], [descriptor])
        finally:
            os.close(descriptor)
        said = super().control()
        if not said.HasField("attached"):
            raise errors.ProtocolError("an answer to a segment was expected")
        return None if said.attached.refused else raw


# The service's end.


class MemoryListener(_socket.SocketListener):
    """Takes connections with segments."""

    def accepted(self, end: socket.socket) -> _socket.Accepted:
        return MemoryAccepted(end, self._servicer)


class MemoryAccepted(_socket.Accepted):
    """The service's end of a connection with segments.

    Args:
      end: the socket.
      servicer: whose buffers messages are received in.
    """

    def __init__(self, end: socket.socket, servicer: Servicer) -> None:
        super().__init__(end, servicer)
        self._came: list[int] = []  # file descriptors
        self._segments: dict[int, np.ndarray] = {}
        self._segment = 0  # where the buffer of the last packet lies
        self._answer_segment = 0  # where the worker wants its next answer

    def control(self) -> pb.Frame | None:
        """The control part of the next packet; None when the worker is gone."""
        while True:
            with self._descriptors() as descriptors:
                frame = super().control()
                if frame is None or not frame.HasField("attach"):
                    break
                refused = self._attach(frame.attach, descriptors)
            self.send(Parcel(pb.Frame(attached=pb.Attached(refused=refused))))
        if frame is None:
            return None
        for number in (frame.segment, frame.answer_segment):
            if number and number not in self._segments:
                raise errors.ProtocolError(f"segment {number} was never attached")
        if frame.segment and frame.segment == frame.answer_segment:
            raise errors.ProtocolError("an answer needs another segment than a message")
        self._segment, self._answer_segment = frame.segment, frame.answer_segment
        return frame

    def buffer(self, schema: Schema, what: str) -> np.ndarray:
        """The buffer of that packet, where the worker can write no more."""
        if not self._segment:
            with self._descriptors():  # which nobody sends there
                return super().buffer(schema, what)
        there = self._segments[self._segment]
        if there.size < schema.size:
            raise errors.ProtocolError(
                f"{what} has {schema.size} bytes, and its segment {there.size}"
            )
        buffer = self._buffers.take(schema.size)
        _buffers.copy([(buffer, there[: schema.size])], schema.size)
        return buffer

    def _attach(self, segment: pb.Segment, descriptors: list[int]) -> str:
        """Why a segment cannot be taken; "" if it has been."""
        if not 0 < segment.number <= MOST_SEGMENTS:
            raise errors.ProtocolError(f"no segment has number {segment.number}")
        if not descriptors:
            return "its file descriptor did not arrive: too many open files, perhaps"
        try:
            there = attach(descriptors[0], segment.size)
        except (OSError, ValueError) as error:  # too many files, or no memory
            return str(error)
        self._segments[segment.number] = there
        return ""

    def pieces(self, parcel: Parcel) -> Iterator[memoryview]:
        """What goes over the socket of a parcel, whose buffer lies in memory by now."""
        if parcel.schema is None or not self._answer_segment:
            return super().pieces(parcel)
        there = self._segments[self._answer_segment]
        if there.size < parcel.nbytes:
            raise errors.ProtocolError(
                f"an answer has {parcel.nbytes} bytes, and its segment {there.size}"
            )
        _buffers.write(parcel.schema, parcel.arrays, there)
        parcel.control.segment = self._answer_segment
        return parcel.pieces(in_memory=True)

    @contextlib.contextmanager
    def _descriptors(self) -> Iterator[list[int]]:
        """The last one that comes within, if any; it is closed then."""
        try:
            yield self._came
        finally:
            self._forget()

    def _some(self, view: memoryview) -> int:
        room_for_one = socket.CMSG_LEN(_DESCRIPTOR.size)
        got, said, _, _ = self._end.recvmsg_into([view], room_for_one)
        for _, _, data in said:
            self._forget()  # nobody sends more than one
            self._came += _DESCRIPTOR.unpack(data)
        return got

    def _forget(self) -> None:
        while self._came:
            os.close(self._came.pop())


# Both ends.


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
      OSError: it cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise errors.ProtocolError(f"no segment of memory: {error}") from None
    there = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or not there >= size > 0:
        raise errors.ProtocolError(
            f"a sealed segment of {size} bytes was expected, got one of {there}"
        )
    return _mapped(descriptor, size)


def _mapped(descriptor: int, size: int) -> np.ndarray:
    if sys.version_info >= (3, 13):  # before, it kept a descriptor of its own
        mapping = mmap.mmap(descriptor, size, trackfd=False)
    else:
        mapping = mmap.mmap(descriptor, size)
    with contextlib.suppress(OSError):  # a hint only
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


# At a Unix socket; nothing leaves this machine, so nothing is encrypted.


def _listen(servicer: Servicer, place: _transport.Place) -> _transport.Listener | None:
    """For processes of one user."""
    del place
    if not IS_SUPPORTED:
        return None
    return MemoryListener(servicer, _socket.listening_by_name(), name="memory")


def _dial(target: _transport.Target) -> _transport.Link:
    """Connected, and greeted."""
    if not IS_SUPPORTED:
        raise OSError("this system cannot share memory")
    return MemoryLink(_socket.dialled(target), target.buffers)


MEMORY = _transport.Transport("memory", _listen, _dial)
