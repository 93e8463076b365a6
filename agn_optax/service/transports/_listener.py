"""The service's end of direct connections: sockets, and a thread for each of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import numpy as np

from agn_optax import errors
from agn_optax._internal import in_background
from agn_optax.service import _address, _status
from agn_optax.service import center_pb2 as pb
from agn_optax.service._servicer import Servicer
from agn_optax.service.transports import _memory, _packets
from agn_optax.service.wire import _frames, _schema
from agn_optax.service.wire._frames import Parcel

_log = logging.getLogger("agn_optax")
_PATIENCE = 5.0  # seconds that a greeting, or whoever is refused, may take


class Listener:
    """Takes direct connections, and answers with a servicer.

    Args:
      servicer: of the service.
      address: where that listens; None of these sockets is reached from farther away.

    Attributes:
      direct: what workers must know to connect.
    """

    def __init__(self, servicer: Servicer, address: str) -> None:
        self._servicer = servicer
        self._buffers = servicer.buffers
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._closed = False
        self.direct = pb.Direct(key=secrets.token_bytes(_packets.KEY_SIZE))
        self._listening: list[socket.socket] = []
        if not address.startswith("unix:"):
            host = _address.host(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            both = host == "::" and socket.has_dualstack_ipv6()
            end = socket.create_server(
                (host, 0), family=family, backlog=128, dualstack_ipv6=both
            )
            self.direct.port = end.getsockname()[1]
            self._listening.append(end)
        if _memory.IS_SUPPORTED:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.direct.socket = f"agn-optax-{secrets.token_hex(8)}"
            end.bind("\0" + self.direct.socket)
            end.listen(128)
            self._listening.append(end)
        # Each holds the center as long as it runs, and so `close` waits for them all.
        self._threads: set[Future[None]] = set()
        for end in self._listening:
            self._start(functools.partial(self._accept, end), "agn-optax direct")
        # Whether a worker is gone is seen while its thread waits for the center, too.
        self._watch = select.epoll() if hasattr(select, "epoll") else None
        if self._watch is not None:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._watch.register(self._wake, select.EPOLLIN)
            self._start(self._look, "agn-optax direct watch")

    def close(self, timeout: float) -> None:
        """Takes no more connections, and ends those that there are."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections.values())
        for end in self._listening:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for connection in connections:
            connection.cancel()
        if self._watch is not None:
            os.eventfd_write(self._wake, 1)
        if not wait(tuple(self._threads), timeout).not_done and self._watch is not None:
            os.close(self._wake)

    def _start(self, call: Callable[[], None], name: str) -> None:
        thread = in_background(call, name, lasting=True)
        self._threads.add(thread)
        thread.add_done_callback(self._threads.discard)

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                end, _ = listening.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.1)  # too many open files, perhaps not for long
                continue
            try:
                self._start(functools.partial(self._serve, end), "agn-optax direct")
            except RuntimeError as error:  # no more threads
                _log.warning("a direct connection is refused: %s", error)
                end.close()

    def _serve(self, end: socket.socket) -> None:
        connection = Connection(end, self._buffers)
        number = end.fileno()
        try:
            _packets.tune(end)
            if not connection.greets(self.direct.key):
                return
            with self._lock:
                if self._closed:
                    return
                self._connections[number] = connection
            if self._watch is not None:
                events = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLONESHOT
                self._watch.register(number, events)
            self._talk(connection)
        except (OSError, EOFError):
            pass  # the worker is gone, or there is no such thing as a worker
        finally:
            try:
                connection.finish()
            finally:
                with self._lock:
                    self._connections.pop(number, None)
                    if self._watch is not None:
                        with contextlib.suppress(OSError, ValueError):
                            self._watch.unregister(number)
                    end.close()

    def _talk(self, connection: Connection) -> None:
        try:
            for parcel in self._servicer.exchange(connection, connection):
                connection.send(parcel)
                # What was sent is a version of the center, which is moved in place only
                # while nobody holds it.
                del parcel
            return
        except (errors.AgnOptaxError, MemoryError) as error:
            refused = _status.refused(error)
        except (OSError, EOFError):
            raise
        except Exception as error:
            _log.exception("a worker's call failed")
            refused = pb.Refused(kind="CenterError", details=f"it failed: {error!r}")
        connection.refuse(refused)

    def _look(self) -> None:
        assert self._watch is not None
        while not self._closed:
            for number, _ in self._watch.poll():
                self._finish(number)

    def _finish(self, number: int) -> None:
        """A call of its own, for no connection may stay where the thread waits."""
        with self._lock:  # or another one may have its number already
            connection = self._connections.get(number)
            if connection is None or not connection.is_cut():
                return
        try:
            connection.finish()
        except RuntimeError as error:  # no more threads
            _log.warning("a worker is gone, which nobody hears: %s", error)


class Connection:
    """One direct connection: a `Reader`, and what a gRPC call's context is otherwise.

    Args:
      end: the socket.
      buffers: that messages are received in.
    """

    def __init__(self, end: socket.socket, buffers: _memory.Buffers) -> None:
        self._end = end
        self._buffers = buffers
        self._segments: dict[int, np.ndarray] = {}
        self._answer_segment = 0  # where the worker wants its next answer
        self._segment = 0  # where the buffer of the last packet lies
        self._length = 0  # of the buffer that follows
        self._lock = threading.Lock()
        self._finished = False
        self._callbacks: list[Callable[[], None]] = []
        self.lends = False

    def greets(self, key: bytes) -> bool:
        """Whether it is a worker's that knows the key."""
        self._end.settimeout(_PATIENCE)
        expected = _packets.GREETING + key
        if not secrets.compare_digest(self._read(len(expected)), expected):
            return False
        self._end.sendall(_packets.GREETING)
        self._end.settimeout(None)
        return True

    # As `_frames.Reader`.

    def control(self) -> pb.Frame | None:
        """The next control part; None when the worker is gone."""
        while True:
            try:
                head, descriptors = self._head()
            except (EOFError, ConnectionError):
                return None
            try:
                length, self._length = _packets.lengths(head)
                frame = _frames.parse_control(self._read(length))
                if not frame.HasField("attach"):
                    break
                self._attach(frame.attach, descriptors)
            finally:
                for descriptor in descriptors:
                    _memory.close(descriptor)
        self._segment = frame.segment
        self.lends = bool(frame.segment)
        self._answer_segment = frame.answer_segment
        for number in (frame.segment, frame.answer_segment):
            if number and number not in self._segments:
                raise errors.ProtocolError(f"segment {number} was never attached")
        return frame

    def buffer(self, schema: _schema.Schema, what: str) -> np.ndarray:
        """The buffer that follows it, or lies in shared memory."""
        if self._segment:
            there = self._segments[self._segment]
            if there.size < schema.size:
                raise errors.ProtocolError(
                    f"{what} has {schema.size} bytes, and its segment {there.size}"
                )
            return there[: schema.size]
        _packets.check_buffer(self._length, schema.size, what)
        buffer = self._buffers.take(schema.size)
        _packets.fill(self._end, buffer.data)
        return buffer

    # As the context of a gRPC call.

    def is_active(self) -> bool:
        """Whether the worker is there."""
        return not self._finished

    def is_cut(self) -> bool:
        """Whether the worker's end is closed."""
        poll = select.poll()
        poll.register(self._end, select.POLLRDHUP)
        return bool(poll.poll(0))

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Has ``callback`` called when it is gone; False if that is so already."""
        with self._lock:
            if not self._finished:
                self._callbacks.append(callback)
            return not self._finished

    # For the listener.

    def send(self, parcel: Parcel) -> None:
        """Sends a parcel; its arrays into shared memory if the worker wants it so."""
        number = 0 if parcel.schema is None else self._answer_segment
        if number:
            schema = parcel.schema
            assert schema is not None
            there = self._segments[number]
            if there.size < schema.size:
                raise errors.ProtocolError(
                    f"an answer has {schema.size} bytes, and its segment {there.size}"
                )
            _memory.write(schema, parcel.arrays, there)
            parcel.control.segment = number
        try:
            _packets.send(self._end, parcel, bool(number), lambda: None)
        except errors.AgnOptaxError as error:  # of parcel.until
            # Nothing can be said within a packet; the next connection will hear it.
            raise ConnectionAbortedError from error

    def refuse(self, refused: pb.Refused) -> None:
        """Says why the connection ends, and ends it."""
        self.send(Parcel(pb.Frame(refused=refused)))
        self._end.shutdown(socket.SHUT_WR)
        # A worker that is still sending would not read it, were it cut off now.
        self._end.settimeout(_PATIENCE)
        while self._end.recv(1 << 20):
            pass

    def cancel(self) -> None:
        """Ends it, from any thread."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """The worker is gone, or about to."""
        with self._lock:
            self._finished = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _head(self) -> tuple[bytes, list[int]]:
        if self._end.family != socket.AF_UNIX:
            return self._read(_packets.HEAD.size), []
        head, descriptors, _, _ = socket.recv_fds(self._end, _packets.HEAD.size, 1)
        if not head:
            raise EOFError
        return head + self._read(_packets.HEAD.size - len(head)), descriptors

    def _attach(self, segment: pb.Segment, descriptors: list[int]) -> None:
        if len(descriptors) != 1:
            raise errors.ProtocolError("a segment comes with one file descriptor")
        if not 0 < segment.number <= _packets.MOST_SEGMENTS:
            raise errors.ProtocolError(f"no segment has number {segment.number}")
        there = _memory.attach(descriptors[0], segment.size)
        self._segments[segment.number] = there

    def _read(self, size: int) -> bytes:
        return _packets.read(self._end, size)
