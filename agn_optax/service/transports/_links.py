"""The worker's end of a call: a gRPC call, or a direct connection in place of one.

Both carry parcels. One thread at a time uses a link; any other may cancel it.
"""

from __future__ import annotations

import abc
import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np

from agn_optax import errors
from agn_optax.service import _address, _status
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import _memory, _packets
from agn_optax.service.wire import _frames, _schema
from agn_optax.service.wire._frames import Parcel

_PATIENCE = 1.0  # seconds to wait for a direct connection, which gRPC replaces


def _nothing() -> None:
    pass


class Link(abc.ABC):
    """What goes over a call, each way.

    Attributes:
      ended: what its methods raise when the call has ended; `why_it_ended` has more.
      sent: called when something went out.
      heard: called when something came.
    """

    ended: tuple[type[Exception], ...]

    def __init__(self) -> None:
        self.watched_by()

    def watched_by(
        self, sent: Callable[[], None] = _nothing, heard: Callable[[], None] = _nothing
    ) -> None:
        """Calls these two from now on."""
        self.sent, self.heard = sent, heard

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Around a use of it, during which its resources stay."""
        yield

    def expect(self, schema: _schema.Schema) -> None:  # noqa: B027 most need not know
        """The next parcel asks for a buffer of ``schema`` in return."""

    @abc.abstractmethod
    def send(self, parcel: Parcel) -> None:
        """Sends a parcel; its arrays are read until the answer is there."""

    @abc.abstractmethod
    def control(self) -> pb.Frame:
        """The next control part."""

    @abc.abstractmethod
    def buffer(self, schema: _schema.Schema, what: str) -> np.ndarray:
        """The buffer that follows it."""

    @abc.abstractmethod
    def why_it_ended(self) -> errors.AgnOptaxError:
        """The exception that the call ended with."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it is known to have ended."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends it, from any thread."""


class GrpcLink(Link):
    """A call of gRPC.

    Args:
      begin: begins it, with an iterator of the frames to be sent.
      address: of the center.
      buffers: to receive in.
    """

    ended = (grpc.RpcError, grpc.FutureCancelledError, EOFError)

    def __init__(
        self,
        begin: Callable[[Iterator[bytes]], Any],
        address: str,
        buffers: _memory.Buffers,
    ) -> None:
        super().__init__()
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._call = begin(self._outgoing())
        self._call.add_done_callback(lambda _: self.no_more())
        self._address = address
        self._reader = _frames.Reader(self._incoming(), buffers)

    def send(self, parcel: Parcel) -> None:
        self._parcels.put(parcel)

    def no_more(self) -> None:
        """Nothing will be sent any more."""
        self._parcels.put(None)

    def control(self) -> pb.Frame:
        control = self._reader.control()
        assert control is not None  # `_incoming` has no end
        return control

    def buffer(self, schema: _schema.Schema, what: str) -> np.ndarray:
        return self._reader.buffer(schema, what)

    def result(self) -> Any:
        """The reply to a call whose answer is no stream."""
        return self._call.result()

    def why_it_ended(self) -> errors.AgnOptaxError:
        self._call.cancel()  # does nothing to a call that has ended
        return _status.exception_of(self._call, self._address)

    def done(self) -> bool:
        return bool(self._call.done())

    def cancel(self) -> None:
        self._call.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        """On a thread of gRPC's."""
        while (parcel := self._parcels.get()) is not None:
            for frame in _frames.split(parcel):
                yield frame
                self.sent()
                del frame
            del parcel  # whose arrays may be written over, once there is an answer

    def _incoming(self) -> Iterator[bytes]:
        for frame in self._call:
            self.heard()
            yield frame
        raise EOFError("the call has ended")


class DirectLink(Link):
    """A direct connection; made by `open_direct`.

    Args:
      end: the socket, connected and greeted.
      buffers: to receive in, where that is not shared memory.
      shares: whether buffers go through memory that both sides share.
    """

    ended = (OSError, EOFError)

    def __init__(
        self, end: socket.socket, buffers: _memory.Buffers, *, shares: bool
    ) -> None:
        super().__init__()
        self._end = end
        self._buffers = buffers
        self._segments = _memory.Segments(_packets.MOST_SEGMENTS) if shares else None
        # The segment of all messages, and that of the answer to come.
        self._message: tuple[int, np.ndarray] | None = None
        self._answer: np.ndarray | None = None
        self._wanted = 0  # bytes of that
        self._frame = pb.Frame()  # that came last
        self._length = 0  # of the buffer that follows it
        self._lock = threading.Lock()
        self._holders = 0
        self._done = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._done and not self._holders:
                    self._end.close()

    def expect(self, schema: _schema.Schema) -> None:
        self._wanted = schema.size

    def send(self, parcel: Parcel) -> None:
        shared = False
        if self._segments is not None and parcel.nbytes >= _packets.LEAST_SHARED:
            shared = self._share(self._segments, parcel)
        _packets.send(self._end, parcel, shared, self.sent)

    def control(self) -> pb.Frame:
        head = _packets.read(self._end, _packets.HEAD.size)
        length, self._length = _packets.lengths(head)
        self._frame = _frames.parse_control(_packets.read(self._end, length))
        self.heard()
        if self._frame.HasField("refused"):
            raise _status.exception_in(self._frame.refused)
        return self._frame

    def buffer(self, schema: _schema.Schema, what: str) -> np.ndarray:
        if self._frame.segment:
            answer, self._answer = self._answer, None
            if answer is None or answer.size < schema.size:
                raise errors.ProtocolError(f"{what} lies in a segment of its own")
            return answer[: schema.size]
        _packets.check_buffer(self._length, schema.size, what)
        buffer = self._buffers.take(schema.size)
        _packets.fill(self._end, buffer.data, self.heard)
        return buffer

    def why_it_ended(self) -> errors.AgnOptaxError:
        return errors.CenterUnreachableError("the direct connection broke")

    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
            # Whoever waits for it finds it shut; closed, its number might be that of
            # another file by then.
            if self._holders:
                with contextlib.suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)
            else:
                self._end.close()

    def _share(self, segments: _memory.Segments, parcel: Parcel) -> bool:
        """Puts the buffer into shared memory; False if there is none."""
        assert parcel.schema is not None
        try:
            if self._message is None or self._message[1].size != parcel.nbytes:
                self._message = None
                self._message = self._attached(segments, parcel.nbytes)
            wanted, self._answer = self._attached(segments, self._wanted)
        except OSError:
            return False
        parcel.control.segment, buffer = self._message
        parcel.control.answer_segment = wanted
        _memory.write(parcel.schema, parcel.arrays, buffer)
        self.sent()
        return True

    def _attached(
        self, segments: _memory.Segments, size: int
    ) -> tuple[int, np.ndarray]:
        """A free segment, which the center knows."""
        number, descriptor, array = segments.take(size)
        if descriptor is not None:
            frame = pb.Frame(attach=pb.Segment(number=number, size=size))
            ((head,),) = _packets.batches(Parcel(frame), shared=True)
            try:
                # Short, and at the beginning of a message: the socket takes it whole.
                socket.send_fds(self._end, [head], [descriptor])
            finally:
                _memory.close(descriptor)
        return number, array


def open_direct(
    direct: pb.Direct, address: str, buffers: _memory.Buffers, *, shares: bool
) -> DirectLink:
    """A direct connection to a center.

    Args:
      direct: what the center says of itself.
      address: its own, of gRPC.
      buffers: to receive in.
      shares: whether over shared memory, which only this machine has.

    Raises:
      OSError: there is no way, or somebody else answers.
    """
    if shares or address.startswith("unix:"):
        if not (direct.socket and _memory.IS_SUPPORTED):
            raise OSError("the center has no Unix socket")
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _closed_if_it_fails(end):
            end.settimeout(_PATIENCE)
            end.connect("\0" + direct.socket)
    else:
        if not direct.port:
            raise OSError("the center has no port for direct connections")
        where = _address.host(address), direct.port
        end = socket.create_connection(where, timeout=_PATIENCE)
    with _closed_if_it_fails(end):
        _packets.tune(end)
        end.sendall(_packets.GREETING + direct.key)
        try:
            heard = _packets.read(end, len(_packets.GREETING))
        except EOFError:
            raise ConnectionError("the greeting was refused") from None
        if heard != _packets.GREETING:
            raise ConnectionError("something else than a center answers")
        end.settimeout(None)  # from now on, the watchdog looks after it
        return DirectLink(end, buffers, shares=shares)


@contextlib.contextmanager
def _closed_if_it_fails(end: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        end.close()
        raise
