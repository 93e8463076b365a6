"""Memory that a worker and a center on one machine share.

A segment has no name: its file descriptor travels over a Unix socket, and it is gone
when both processes are, however they end. Packets go over that socket, and what is
large lies in segments. The worker may write there at any time, so the center copies a
message once, to where nobody else can write, and looks at nothing but that. Linux only.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports._socket import (
    Accepted,
    SocketLink,
    SocketListener,
    dialled,
    greeted,
    listening_by_name,
    send,
)
from agn_optax.service.transports._transport import (
    Link,
    Listener,
    Place,
    Sending,
    Target,
    Transport,
)
from agn_optax.service.wire import _buffers, _schema
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import Parcel, Reader

if TYPE_CHECKING:
    from agn_optax.service._servicer import Servicer

# What is smaller goes through the socket faster than through shared memory.
LEAST_SHARED = 64 << 10  # bytes
MOST_SEGMENTS = 16  # of one connection
_PEER = struct.Struct("iII")  # process, user and group, as the kernel says
_DESCRIPTOR = struct.Struct("i")

try:
    import fcntl

    # Nobody can take pages away from under the other side, or add the right to.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    IS_SUPPORTED = hasattr(os, "memfd_create")
except (ImportError, AttributeError):  # not on Linux
    IS_SUPPORTED = False


class Memory(Transport):
    """Through memory that both sides share; for processes of one user."""

    name = "memory"

    def listen(self, servicer: Servicer, place: Place) -> Listener | None:
        """At a Unix socket; nothing leaves this machine, so nothing is encrypted."""
        del place
        if not IS_SUPPORTED:
            return None
        return MemoryListener(servicer, listening_by_name(), name=self.name)

    def dial(self, target: Target) -> Link:
        """Connected, and greeted."""
        if not IS_SUPPORTED:
            raise OSError("this system cannot share memory")
        return MemoryLink(greeted(dialled(target), target), target.buffers)


# The worker's end.


class MemoryLink(SocketLink):
    """A connection whose large buffers lie in segments, which the worker makes.

    Args:
      end: the socket, connected and greeted.
      buffers: to receive in what comes over the socket nevertheless.
    """

    def __init__(self, end: socket.socket, buffers: Buffers) -> None:
        super().__init__(end, buffers)
        self._segments = Segments(MOST_SEGMENTS)
        # The segment of all messages, and that of the answer to come.
        self._message: tuple[int, np.ndarray] | None = None
        self._answer: np.ndarray | None = None
        self._wanted = 0  # bytes of that
        self._lies_there = False  # whether the last packet's buffer does

    def expect(self, schema: _schema.Schema) -> None:
        self._wanted = schema.size

    def send(self, parcel: Parcel) -> None:
        if parcel.nbytes < LEAST_SHARED or not self._share(parcel):
            super().send(parcel)

    def control(self) -> pb.Frame:
        frame = super().control()
        self._lies_there = bool(frame.segment)
        return frame

    def buffer(self, schema: _schema.Schema, what: str) -> np.ndarray:
        if not self._lies_there:
            return super().buffer(schema, what)
        answer, self._answer = self._answer, None
        if answer is None or answer.size < schema.size:
            raise errors.ProtocolError(f"{what} lies in a segment of its own")
        return answer[: schema.size]

    def _share(self, parcel: Parcel) -> bool:
        """Sends a parcel through segments; False if there are none to be had."""
        assert parcel.schema is not None
        try:
            if self._message is None or self._message[1].size != parcel.nbytes:
                self._message = None
                self._message = self._segments.take(parcel.nbytes, self._attach)
            wanted, self._answer = self._segments.take(self._wanted, self._attach)
        except NoSegmentError:
            return False
        parcel.control.segment, buffer = self._message
        parcel.control.answer_segment = wanted
        with parcel:
            _buffers.write(parcel.schema, parcel.arrays, buffer)
            self.sent()
            send(self._end, parcel.pieces(in_memory=True), self.sent)
        return True

    def _attach(self, number: int, size: int, descriptor: int) -> None:
        """Hands a segment over to the center.

        Raises:
          NoSegmentError: the center cannot take it.
        """
        attach = pb.Frame(attach=pb.Segment(number=number, size=size))
        (packet,) = Parcel(attach).pieces()
        # Short, and at the beginning of a packet: the socket takes it whole.
        socket.send_fds(self._end, [packet], [descriptor])
        said = super().control()
        if not said.HasField("attached"):
            raise errors.ProtocolError("an answer to a segment was expected")
        if said.attached.refused:
            raise NoSegmentError(said.attached.refused)


class NoSegmentError(Exception):
    """One end cannot have one more segment; the socket carries as much."""


class Segments:
    """Segments of one connection, each used again once nobody looks at it any more.

    Args:
      most: segments at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = 0
        self._free: deque[tuple[int, np.ndarray]] = deque()

    def take(
        self, size: int, attach: Callable[[int, int, int], None]
    ) -> tuple[int, np.ndarray]:
        """The number and the bytes of a segment.

        Args:
          size: in bytes.
          attach: hands a new one over: its number, its bytes, its file descriptor.

        Raises:
          NoSegmentError: there is none.
        """
        number, raw = self._made + 1, None
        with contextlib.suppress(IndexError):
            number, raw = self._free.popleft()
        if number > self._most:
            raise NoSegmentError("all segments are in use")
        if raw is None or raw.size != size:
            try:
                raw = _attached(number, size, attach)
            except BaseException:
                if raw is not None:
                    self._give_back(number, raw)
                raise
        self._made = max(self._made, number)
        back = functools.partial(self._give_back, number)
        return number, _buffers.lent(raw, size, back)

    def _give_back(self, number: int, raw: np.ndarray) -> None:
        self._free.append((number, raw))


def _attached(
    number: int, size: int, attach: Callable[[int, int, int], None]
) -> np.ndarray:
    try:
        descriptor, raw = create(size)
    except (OSError, ValueError) as error:  # too many files, or no memory
        raise NoSegmentError(str(error)) from None
    try:
        attach(number, size, descriptor)
    finally:
        os.close(descriptor)
    return raw


# The service's end.


class MemoryListener(SocketListener):
    """Takes connections of processes of the same user, or of root."""

    def accepted(self, end: socket.socket) -> Accepted:
        return MemoryAccepted(end, self._servicer.buffers, self.sending)

    def why_not(self, end: socket.socket) -> str:
        said = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, user, _ = _PEER.unpack(said)
        own = os.geteuid()
        if user in (own, 0):
            return ""
        return f"memory is shared with processes of user {own}, and this is of {user}"


class MemoryAccepted(Accepted):
    """The service's end of a connection with segments.

    Args:
      end: the socket.
      buffers: that messages are received in.
      sending: where it says that it sends.
    """

    def __init__(self, end: socket.socket, buffers: Buffers, sending: Sending) -> None:
        self._receive = _Receiver(end)
        super().__init__(end, Reader(self._receive, buffers), sending)
        self._buffers = buffers
        self._segments: dict[int, np.ndarray] = {}
        self._segment = 0  # where the buffer of the last packet lies
        self._answer_segment = 0  # where the worker wants its next answer

    def control(self) -> pb.Frame | None:
        """The control part of the next packet; None when the worker is gone."""
        while (frame := self._next()) is not None and frame.HasField("attach"):
            pass
        if frame is None:
            return None
        for number in (frame.segment, frame.answer_segment):
            if number and number not in self._segments:
                raise errors.ProtocolError(f"segment {number} was never attached")
        if frame.segment and frame.segment == frame.answer_segment:
            raise errors.ProtocolError("an answer needs another segment than a message")
        self._segment, self._answer_segment = frame.segment, frame.answer_segment
        return frame

    def buffer(self, schema: _schema.Schema, what: str) -> np.ndarray:
        """The buffer of that packet, where the worker can write no more."""
        if not self._segment:
            with self._receive.descriptors():  # which nobody sends there
                return super().buffer(schema, what)
        there = self._segments[self._segment]
        if there.size < schema.size:
            raise errors.ProtocolError(
                f"{what} has {schema.size} bytes, and its segment {there.size}"
            )
        buffer = self._buffers.take(schema.size)
        _buffers.copy([(buffer, there[: schema.size])], schema.size)
        return buffer

    def _next(self) -> pb.Frame | None:
        """The control part of the next packet, which may hand over a segment."""
        with self._receive.descriptors() as descriptors:
            frame = super().control()
            if frame is not None and frame.HasField("attach"):
                refused = self._attach(frame.attach, descriptors)
                self.send(Parcel(pb.Frame(attached=pb.Attached(refused=refused))))
            return frame

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

    def _send(
        self, parcel: Parcel, moved: Callable[[], None], *, in_memory: bool = False
    ) -> None:
        if parcel.schema is not None and self._answer_segment:
            there = self._segments[self._answer_segment]
            if there.size < parcel.nbytes:
                raise errors.ProtocolError(
                    f"an answer has {parcel.nbytes} bytes, and its segment {there.size}"
                )
            _buffers.write(parcel.schema, parcel.arrays, there)
            parcel.control.segment = self._answer_segment
            in_memory = True
        super()._send(parcel, moved, in_memory=in_memory)


class _Receiver:
    """What comes over a Unix socket, and file descriptors with it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._came: list[int] = []

    @contextlib.contextmanager
    def descriptors(self) -> Iterator[list[int]]:
        """Those that come within; they are closed then."""
        try:
            yield self._came
        finally:
            while self._came:
                os.close(self._came.pop())

    def __call__(self, view: memoryview) -> int:
        space = socket.CMSG_SPACE(_DESCRIPTOR.size)
        got, said, _, _ = self._end.recvmsg_into([view], space)
        for level, kind, data in said:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _DESCRIPTOR.size
                for (descriptor,) in _DESCRIPTOR.iter_unpack(data[:whole]):
                    if self._came:  # nobody sends more than one
                        os.close(descriptor)
                    else:
                        self._came.append(descriptor)
        return got


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
