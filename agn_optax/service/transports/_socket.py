"""Direct sockets: frames over TCP or a Unix socket, with or without TLS.

A connection begins with a handshake: the worker sends a greeting and its caller's key,
which it has received over gRPC. The center answers with the greeting. To reject the
worker, it closes the connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import ssl
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future

from agn_optax import errors
from agn_optax.service import _address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.security import _handshake
from agn_optax.service.security._access import KEY_SIZE, Caller
from agn_optax.service.security._tls import Tls
from agn_optax.service.server._servicer import Servicer
from agn_optax.service.transports import _transport
from agn_optax.service.transports._link import Link
from agn_optax.service.wire import _errors
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import Frame, FrameReader, join_pieces

GREETING = b"agn_optax direct 2\n"
_GREETING_SIZE = len(GREETING) + KEY_SIZE
_MAX_LINE = 256  # bytes of the center's answer to a greeting
_CONNECT_TIMEOUT = 1.0  # s; then the worker tries another transport
_BACKLOG = 128  # connections waiting to be accepted, for less than a second
_ACCEPT_PAUSE = 0.005  # s after each accepted connection; accepting takes 0.1 ms
_DEFER_ACCEPT = 5  # s for which the system holds a connection without data
_HANDSHAKE_TIMEOUT = 5.0  # s, also for a worker to close after an error
_SENDMSG_PIECES = 512  # per call of sendmsg; systems accept 1,024
_SENDMSG_BYTES = 1 << 20  # bytes per call of sendmsg, or to encrypt at once
_SOCKET_BUFFER = 4 << 20  # bytes; a larger one does not speed up the kernel's copies
_PEER_TIMEOUT = 15  # s without any response; then a peer is disconnected, as by gRPC
_CREDENTIALS = struct.Struct("iII")  # ids of process, user and group, from the kernel
_ENDED: Future[None] = Future()  # of all connections that have ended
_ENDED.cancel()

_log = logging.getLogger("agn_optax")


# The worker's end.


def dial_socket(target: _transport.Target, tls: Tls | None = None) -> socket.socket:
    """Return a socket connected to the address of an offer, after the handshake.

    Raises:
      OSError: the address does not answer, the center rejects the caller, or another
        program answers.
    """
    if target.offer is None:
        raise OSError("the center does not offer direct connections")
    offered, center = target.offer.address, target.connection.address
    if offered.startswith("unix:"):
        address = f"unix:\0{offered.removeprefix('unix:')}"
    else:  # the host name under which this worker knows the center
        address = f"{_address.host(center)}:{offered.rpartition(':')[2]}"
    with contextlib.ExitStack() as on_error:
        sock = on_error.enter_context(_handshake.connect(address, _CONNECT_TIMEOUT))
        tune(sock)
        if tls is not None:
            try:
                context = tls.context(serves=False)
            except errors.InvalidArgumentError as error:  # files have changed meanwhile
                raise OSError(str(error)) from None
            host = _handshake.host_name(center)
            sock = context.wrap_socket(sock, server_hostname=host)
            on_error.enter_context(sock)
        sock.sendall(GREETING + target.offer.key)
        with sock.makefile("rb", buffering=0) as lines:
            line = lines.readline(_MAX_LINE)
        if line != GREETING:
            raise ConnectionError(
                "the other end is not a center, or it rejected the handshake"
            )
        sock.settimeout(None)  # from now on the watchdog enforces the timeouts
        on_error.pop_all()
        return sock


class SocketLink(Link):
    """A direct connection.

    Args:
      sock: the socket, after the handshake.
      buffers: buffers to receive in.
    """

    end_errors = (OSError, EOFError)

    def __init__(self, sock: socket.socket, buffers: Buffers) -> None:
        super().__init__(sock.recv_into, buffers)
        self._sock = sock
        self._is_done = False
        # `cancel` only shuts the socket down, so that a waiting thread finds it ended.
        # A closed descriptor's number might already be that of another file.
        weakref.finalize(self, sock.close)

    def send(self, frame: Frame) -> None:
        with frame, self.timed(frame.nbytes):
            send(self._sock, frame.pieces(), self.on_sent)

    def local_address(self) -> str:
        return local_address(self._sock)

    def end_reason(self) -> errors.AgnOptaxError:
        return errors.CenterUnreachableError("the direct connection broke")

    def is_done(self) -> bool:
        return self._is_done

    def cancel(self) -> None:
        self._is_done = True
        shut(self._sock)


# The service's end.


def listen_at(address: str) -> socket.socket:
    """Return a socket that listens at "host:port".

    Raises:
      InvalidArgumentError: the address cannot be used.
    """
    host, port = _address.host(address), int(address.rpartition(":")[2])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listening = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise errors.InvalidArgumentError(
            f"cannot listen at {address}: {error}. Another process may use that port; "
            "port 0 picks a free one"
        ) from None
    if hasattr(socket, "TCP_DEFER_ACCEPT"):
        # The client sends first, and a silent connection costs this process nothing.
        level, option = socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT
        listening.setsockopt(level, option, _DEFER_ACCEPT)
    return listening


def accept_connections(
    listening: socket.socket, is_closed: Callable[[], bool]
) -> Iterator[tuple[socket.socket, Hashable]]:
    """Yield accepted connections and their origins, until the listener is closed.

    They are accepted no faster than one per `_ACCEPT_PAUSE`; further connections wait
    in the system at no cost.
    """
    is_failing = False
    while not is_closed():
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if not is_closed():
                if not is_failing:
                    _log.warning("connections cannot be accepted for now: %s", error)
                is_failing = True
                time.sleep(0.1)  # too many open files, perhaps only for a short time
            continue
        is_failing = False
        try:
            origin = _rate_limit_key(sock)
        except OSError:  # disconnected already
            sock.close()
        else:
            yield sock, origin
        time.sleep(_ACCEPT_PAUSE)


# Linux has abstract Unix sockets: their names are not files, and end with the socket.
HAS_ABSTRACT_SOCKETS = sys.platform == "linux"


def listen_abstract() -> socket.socket:
    """Return a listening Unix socket in Linux's abstract namespace."""
    name = f"\0agn-optax-{secrets.token_hex(8)}"
    return socket.create_server(name, family=socket.AF_UNIX, backlog=socket.SOMAXCONN)


class SocketListener(_transport.Listener):
    """Accepts direct connections, and serves each on its own thread.

    Args:
      servicer: the servicer.
      listening: a listening socket.
      context: TLS context of connections; None for plain text.
      name: name of the transport.
      connection_type: makes the service's end of a connection.
    """

    def __init__(
        self,
        servicer: Servicer,
        listening: socket.socket,
        context: ssl.SSLContext | None = None,
        name: str = "socket",
        connection_type: type[SocketConnection] | None = None,
    ) -> None:
        super().__init__()
        self._servicer = servicer
        self._listening = listening
        self._context = context
        self._connection_type = connection_type or SocketConnection
        self._connections: dict[int, SocketConnection] = {}  # by file descriptor
        self._lock = threading.Lock()
        self._closed = False
        name_or_host = listening.getsockname()
        if _is_unix(listening):
            address = "unix:" + bytes(name_or_host)[1:].decode()
        else:
            host, port = name_or_host[:2]
            address = f":{port}"
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._transport = name
        self.offer = pb.Offer(transport=name, address=address)
        self._threads.keep_running(self._accept, f"agn-optax {name}")
        # Detects a disconnected worker even while its thread waits for the center.
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            self._epoll.register(listening, select.EPOLLHUP)  # when it is shut down
            self._threads.keep_running(
                self._watch_disconnects, f"agn-optax {name} watch"
            )

    def close(self, timeout: float) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        shut(self._listening)
        for connection in connections:
            connection.cancel()
        self._threads.wait(timeout)  # until then the threads keep the center alive
        self._listening.close()

    def _accept(self) -> None:
        limits = self._servicer.call_limits
        for sock, origin in accept_connections(self._listening, lambda: self._closed):
            if not limits.accepts_connection(origin):
                sock.close()
                continue
            try:
                self._threads.submit(self._serve, sock)
            except Exception as error:  # for example, no thread can be started
                _log.warning("a direct connection is rejected: %s", error)
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            # Disconnects and rejected clients are expected, and not logged.
            stack.enter_context(contextlib.suppress(OSError, EOFError))
            stack.callback(lambda: sock.close())
            sock.settimeout(_HANDSHAKE_TIMEOUT)
            tune(sock)
            if self._context is not None:
                sock = self._context.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
            limits = self._servicer.call_limits
            with limits.time_handshake(lambda: shut(sock)):
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()
                caller = self._authenticate(sock)
            if caller is None:
                return
            sock.settimeout(None)
            connection = self._connection_type(sock, self._servicer)
            descriptor = sock.fileno()
            with self._lock:
                if self._closed:
                    return
                self._connections[descriptor] = connection
            stack.callback(self._forget, descriptor)
            stack.callback(connection.mark_ended)
            if self._epoll is not None:
                events = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLONESHOT
                self._epoll.register(descriptor, events)
            self._serve_session(connection, caller)

    def _forget(self, descriptor: int) -> None:
        with self._lock:
            self._connections.pop(descriptor, None)

    def _authenticate(self, sock: socket.socket) -> Caller | None:
        """Return the caller by its key, after the handshake; None to reject it."""
        greeting = bytearray(_GREETING_SIZE)
        FrameReader(sock.recv_into, self._servicer.buffers).fill(memoryview(greeting))
        if not greeting.startswith(GREETING):
            return None
        key = bytes(greeting[len(GREETING) :])
        try:
            caller = self._servicer.authenticator.caller_of_key(key, _host(sock))
        except errors.NotAllowedError:  # gRPC reports the reason
            return None
        # All users of the machine can connect to a Unix socket by its name.
        if _is_unix(sock) and (user := _user(sock)) not in (os.geteuid(), 0):
            _log.warning("a worker is rejected: it is of another user, %d", user)
            return None
        sock.sendall(GREETING)
        return caller

    def _serve_session(self, connection: SocketConnection, caller: Caller) -> None:
        try:
            frames = self._servicer.exchange(
                connection, connection, caller, self._transport
            )
            for frame in frames:
                connection.send(frame)
            return
        except (errors.AgnOptaxError, MemoryError) as error:
            failure = _errors.failure_of(error)
        except (OSError, EOFError):
            raise
        except Exception as error:
            _log.exception("a worker's call failed")
            failure = _errors.failure_of(error)
        with self._servicer.call_limits.time_handshake(connection.cancel):
            connection.send_failure(failure)

    def _watch_disconnects(self) -> None:
        assert self._epoll is not None
        while not self._closed:
            for descriptor, _ in self._epoll.poll():
                self._mark_ended(descriptor)

    def _mark_ended(self, descriptor: int) -> None:
        """Mark a connection as ended.

        This is a method of its own, because a local variable of the loop would keep the
        connection alive.
        """
        with self._lock:  # another connection may already have the same number
            connection = self._connections.get(descriptor)
            if connection is None or not connection.is_disconnected():
                return
        connection.mark_ended()


class SocketConnection(FrameReader):
    """The service's end of one direct connection.

    It has the methods of a gRPC call's context that the servicer uses.

    Args:
      sock: the socket.
      servicer: the servicer, with buffers to receive in, and timeouts of transfers.
    """

    def __init__(self, sock: socket.socket, servicer: Servicer) -> None:
        super().__init__(sock.recv_into, servicer.buffers)
        self._sock = sock
        self._limits = servicer.call_limits
        # Canceled when the worker disconnects.
        self._disconnected: Future[None] = Future()

    # The interface of a gRPC call's context.

    def is_active(self) -> bool:
        """Return whether the worker is connected."""
        return not self._disconnected.done()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call ``callback`` when the worker is gone; return False if it already is."""
        self._disconnected.add_done_callback(lambda _: callback())
        return self.is_active()

    # For the listener.

    def is_disconnected(self) -> bool:
        """Return whether the worker's end is closed."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, frame: Frame) -> None:
        """Send a frame."""
        limits = self._limits
        with frame, limits.time_sending(self.cancel, frame.nbytes) as transfer:
            pieces = self.pieces(frame)
            try:
                send(self._sock, pieces, transfer.progress)
            except errors.AgnOptaxError as error:  # raised by `frame.before_last_byte`
                # The frame is only partly sent, so the error cannot follow on this
                # connection; the next connection reports it.
                raise ConnectionAbortedError from error

    def pieces(self, frame: Frame) -> Iterator[memoryview]:
        """Yield the pieces of a frame for the socket."""
        return frame.pieces()

    def send_failure(self, failure: pb.Failure) -> None:
        """Send the reason for ending the connection, and end it."""
        self.send(Frame(pb.Header(failure=failure)))
        socket.socket.shutdown(self._sock, socket.SHUT_WR)
        # Closing with unread data would reset the connection before the worker has
        # read the reason.
        self._sock.settimeout(_HANDSHAKE_TIMEOUT)
        while self._sock.recv(1 << 20):
            pass

    def cancel(self) -> None:
        """End the connection, from any thread."""
        shut(self._sock)

    def mark_ended(self) -> None:
        """Mark the connection as ended; may be called by several threads."""
        self._disconnected.cancel()
        # The callbacks, which a future keeps, may refer to this connection, whose
        # segments would then be in memory until a garbage collection.
        self._disconnected = _ENDED


def _user(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    option, size = socket.SO_PEERCRED, _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, option, size))
    return int(user)


def _rate_limit_key(sock: socket.socket) -> Hashable:
    """Return the key of the handshake limit: a host, or a user of this machine."""
    return _user(sock) if _is_unix(sock) else _host(sock)


def _host(sock: socket.socket) -> str:
    """Return the host from which a connection comes."""
    return _address.network("" if _is_unix(sock) else sock.getpeername()[0])


# Both ends.


def _is_unix(sock: socket.socket) -> bool:
    return sock.family == getattr(socket, "AF_UNIX", None)


def local_address(sock: socket.socket) -> str:
    """Return the IP address of this end of a connection; "" at a Unix socket."""
    return "" if _is_unix(sock) else str(sock.getsockname()[0])


def tune(sock: socket.socket) -> None:
    """Set the options of a socket, at either end."""
    if _is_unix(sock):
        # A Unix socket's buffers have a fixed size; those of TCP grow automatically.
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPALIVE", 5),  # the name of TCP_KEEPIDLE on macOS
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", 1000 * _PEER_TIMEOUT),
    ):
        with contextlib.suppress(OSError):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    with contextlib.suppress(OSError):  # disconnected, or reno is not allowed
        is_same_host = sock.getsockname()[0] == sock.getpeername()[0]
        if is_same_host and hasattr(socket, "TCP_CONGESTION"):
            # A connection within a host needs no congestion control. BBR would pace it,
            # and stop for a fifth of a second every ten seconds to measure round trips.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def shut(sock: socket.socket) -> None:
    """Shut a socket down, which ends the reads and writes of all threads.

    `SSLSocket.shutdown` would drop the TLS layer while another thread uses it.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def send(
    sock: socket.socket, pieces: Iterator[memoryview], on_sent: Callable[[], None]
) -> None:
    """Send the pieces of a frame; call ``on_sent`` whenever some bytes were sent."""
    if isinstance(sock, ssl.SSLSocket):
        for joined in join_pieces(pieces, _SENDMSG_BYTES):
            part = memoryview(joined)
            while part:
                part = part[sock.send(part) :]
                on_sent()
        return
    for batch in _batches(pieces):
        while batch:
            batch = _unsent(batch, _send_some(sock, batch))
            on_sent()


def _batches(pieces: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """Yield lists of ``pieces`` that are sent in one call each."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if len(batch) == _SENDMSG_PIECES or size >= _SENDMSG_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _send_some(sock: socket.socket, batch: list[memoryview]) -> int:
    # A blocking sendmsg wakes up for a little free space. A poll waits for more, and a
    # transfer then takes three quarters of the time.
    while hasattr(select, "poll"):
        try:
            return sock.sendmsg(batch, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            poller.poll()
    return sock.sendmsg(batch)  # on systems without poll


def _unsent(pieces: list[memoryview], sent: int) -> list[memoryview]:
    """Return the rest of pieces whose first ``sent`` bytes were sent."""
    for i, piece in enumerate(pieces):
        if sent < len(piece):
            return [piece[sent:], *pieces[i + 1 :]]
        sent -= len(piece)
    return []


# At a port, or at a Unix socket if gRPC uses one.


def _listen(
    servicer: Servicer, settings: _transport.ListenSettings
) -> _transport.Listener | None:
    """Listen at the requested port, or at a free one."""
    context = None if settings.tls is None else settings.tls.context(serves=True)
    if not settings.address.startswith("unix:"):
        free = f"{settings.address.rpartition(':')[0]}:0"
        listening = listen_at(settings.direct_address or free)
        return SocketListener(servicer, listening, context)
    if not HAS_ABSTRACT_SOCKETS:
        return None
    return SocketListener(servicer, listen_abstract(), context)


def _dial(target: _transport.Target) -> Link:
    """Connect to the center, with a handshake."""
    return SocketLink(dial_socket(target, target.connection.tls), target.buffers)


SOCKET = _transport.Transport("socket", _listen, _dial)
