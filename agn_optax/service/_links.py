"""The worker's end of a call: a gRPC call, or a direct connection in place of one.

Both carry parcels. They live on the thread of the connection's loop.
"""

from __future__ import annotations

import abc
import asyncio
import socket
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np

from agn_optax import errors
from agn_optax.service import _address, _frames, _memory, _packets, _status, _wire
from agn_optax.service import center_pb2 as pb
from agn_optax.service._frames import Parcel

_PATIENCE = 1.0  # seconds to wait for a direct connection, which gRPC replaces
_LEAST_APART = 8 << 20  # bytes that are copied on another thread than the loop's


class Link(abc.ABC):
    """What goes over a call, each way.

    Attributes:
      ended: what its methods raise when the call has ended; `why_it_ended` has more.
      sent: called when something went out.
      heard: called when something came.
    """

    ended: tuple[type[BaseException], ...]
    sent: Callable[[], None]
    heard: Callable[[], None]

    def expect(self, schema: _wire.Schema) -> None:  # noqa: B027 most need not know
        """The next parcel asks for a buffer of ``schema`` in return."""

    @abc.abstractmethod
    async def send(self, parcel: Parcel) -> None:
        """Sends a parcel, or waits until it can be sent."""

    @abc.abstractmethod
    async def control(self) -> pb.Frame:
        """The next control part."""

    @abc.abstractmethod
    async def buffer(self, schema: _wire.Schema, what: str) -> np.ndarray:
        """The buffer that follows it."""

    @abc.abstractmethod
    async def why_it_ended(self) -> errors.AgnOptaxError:
        """The exception that the call ended with."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it is known to have ended."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends it."""


class GrpcLink(Link):
    """A call of grpc.aio.

    Args:
      call: one that sends frames, or receives frames, or both.
      address: of the center.
      buffers: to receive in.
    """

    # What grpc.aio raises at a call that has ended.
    ended = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)

    def __init__(self, call: Any, address: str, buffers: _memory.Buffers) -> None:
        self._call = call
        self._address = address
        self._buffers = buffers
        self._offset = 0
        self._chunk: memoryview | bytes = b""

    async def send(self, parcel: Parcel) -> None:
        for frame in _frames.split(parcel):
            await self._call.write(frame)
            self.sent()

    async def control(self) -> pb.Frame:
        control, self._offset, self._chunk = _frames.parse(await self._read())
        return control

    async def buffer(self, schema: _wire.Schema, what: str) -> np.ndarray:
        assembler = _wire.Assembler(schema, self._buffers.take(schema.size))
        assembler.feed(self._offset, self._chunk)
        while not assembler.complete:
            _frames.feed(assembler, await self._read(), what)
        return assembler.buffer

    async def why_it_ended(self) -> errors.AgnOptaxError:
        self._call.cancel()  # does nothing to a call that has ended
        error = grpc.aio.AioRpcError(
            await self._call.code(),
            await self._call.initial_metadata(),
            await self._call.trailing_metadata(),
            await self._call.details(),
        )
        return _status.exception_of(error, self._address)

    def done(self) -> bool:
        return bool(self._call.done())

    def cancel(self) -> None:
        self._call.cancel()

    async def _read(self) -> bytes:
        frame = await self._call.read()
        if frame is grpc.aio.EOF:
            raise asyncio.InvalidStateError("the call has ended")
        self.heard()
        return frame


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
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._buffers = buffers
        self._segments = _memory.Segments(_packets.MOST_SEGMENTS) if shares else None
        # The segment of all messages, and that of the answer to come.
        self._message: tuple[int, np.ndarray] | None = None
        self._answer: np.ndarray | None = None
        self._wanted = 0  # bytes of that
        self._frame = pb.Frame()  # that came last
        self._length = 0  # of the buffer that follows it
        self._waits = asyncio.Event()
        self._done = False

    def expect(self, schema: _wire.Schema) -> None:
        self._wanted = schema.size

    async def send(self, parcel: Parcel) -> None:
        shared = False
        size = parcel.nbytes
        if self._segments is not None and size >= _packets.LEAST_SHARED:
            shared = await self._share(self._segments, parcel)
        for left in _packets.batches(parcel, shared):
            while left:
                try:
                    sent = self._end.sendmsg(left)
                except BlockingIOError:
                    await self._ready(self._loop.add_writer, self._loop.remove_writer)
                    continue
                left = _packets.after(sent, left)
                self.sent()

    async def control(self) -> pb.Frame:
        head = bytearray(_packets.HEAD.size)
        await self._fill(memoryview(head))
        length, self._length = _packets.lengths(head)
        control = bytearray(length)
        await self._fill(memoryview(control))
        self._frame = _frames.parse_control(bytes(control))
        if self._frame.HasField("refused"):
            self.cancel()
            raise _status.exception_in(self._frame.refused)
        return self._frame

    async def buffer(self, schema: _wire.Schema, what: str) -> np.ndarray:
        if self._frame.segment:
            answer, self._answer = self._answer, None
            if answer is None or answer.size < schema.size:
                raise errors.ProtocolError(f"{what} lies in a segment of its own")
            return answer[: schema.size]
        _packets.check_buffer(self._length, schema.size, what)
        buffer = self._buffers.take(schema.size)
        await self._fill(buffer.data)
        return buffer

    async def why_it_ended(self) -> errors.AgnOptaxError:
        self.cancel()
        return errors.CenterUnreachableError("the direct connection broke")

    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        if not self._done:
            self._done = True
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
            self._waits.set()  # whoever waits finds it closed

    async def _share(self, segments: _memory.Segments, parcel: Parcel) -> bool:
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
        if parcel.nbytes < _LEAST_APART:
            _memory.write(parcel.schema, parcel.arrays, buffer)
        else:
            await asyncio.to_thread(_memory.write, parcel.schema, parcel.arrays, buffer)
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

    async def _fill(self, view: memoryview) -> None:
        while view:
            try:
                got = self._end.recv_into(view)
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            if not got:
                raise EOFError
            view = view[got:]
            self.heard()

    async def _ready(self, add: Any, remove: Any) -> None:
        """Until the socket can be read, or written to."""
        self._waits.clear()
        add(self._end, self._waits.set)
        try:
            await self._waits.wait()
        finally:
            if not self._done:
                remove(self._end)


async def open_direct(
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
        family: int = socket.AF_UNIX
        where: Any = "\0" + direct.socket
    else:
        if not direct.port:
            raise OSError("the center has no port for direct connections")
        host = _address.host(address)
        async with asyncio.timeout(_PATIENCE):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, direct.port, type=socket.SOCK_STREAM
            )
        error: OSError | None = None
        for family, _, _, _, where in found:
            try:
                return await _greeted(family, where, direct, buffers, shares=False)
            except OSError as failed:
                error = error or failed
        raise error or OSError(f"{host} has no address")
    return await _greeted(family, where, direct, buffers, shares=shares)


async def _greeted(
    family: int,
    where: Any,
    direct: pb.Direct,
    buffers: _memory.Buffers,
    *,
    shares: bool,
) -> DirectLink:
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        _packets.tune(end)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_PATIENCE):
            await loop.sock_connect(end, where)
            await loop.sock_sendall(end, _packets.GREETING + direct.key)
            heard = b""
            while len(heard) < len(_packets.GREETING):
                more = await loop.sock_recv(end, len(_packets.GREETING) - len(heard))
                if not more:
                    raise ConnectionError("the greeting was refused")
                heard += more
        if heard != _packets.GREETING:
            raise ConnectionError("something else than a center answers")
        return DirectLink(end, buffers, shares=shares)
    except BaseException:
        end.close()
        raise
