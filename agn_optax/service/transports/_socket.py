"""Direct sockets: frames over TCP or a Unix socket, with or without TLS.

A connection begins with a handshake: the worker sends a greeting and its caller's key,
which it has received over gRPC, and the center answers with a line.
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
from agn_optax.service.wire import _status
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import Parcel, Reader

GREETING = b"agn_optax direct 2\n"
_GREETING_SIZE = len(GREETING) + KEY_SIZE
_LONGEST_LINE = 256  # maximum size of the center's line, bytes
_DIALLING = 1.0  # s, for connecting; gRPC is used after that
_BACKLOG = (
    128  # connections waiting to be accepted: as many as arrive in under a second
)
_SILENT = 5  # s, for which the system holds a connection without data
_PATIENCE = 5.0  # s, timeout of the handshake, and of sending a rejection
_MOST_PIECES = 512  # per call of sendmsg; systems accept 1,024
_ENOUGH = 1 << 20  # bytes per call of sendmsg
_RECORD = 1 << 14  # size of a TLS record, bytes
_BUFFER = 4 << 20  # bytes; a larger buffer does not speed up copies by the kernel
_SILENCE = 15  # s without a response after which a host is gone, as with gRPC
_PEER = struct.Struct("iII")  # ids of process, user and group, from the kernel

_log = logging.getLogger("agn_optax")


# The worker's end.


def dialled(target: _transport.Target, tls: Tls | None = None) -> socket.socket:
    """Return a socket connected to the address of an offer, after the handshake.

    Raises:
      OSError: the address does not answer, the center rejects the caller, or another
        program answers.
    """
    if target.offer is None:
        raise OSError("the center does not offer it")
    where, center = target.offer.address, target.connection.address
    if where.startswith("unix:"):
        there = f"unix:\0{where.removeprefix('unix:')}"
    else:  # the host name under which this worker knows the center
        there = f"{_address.host(center)}:{where.rpartition(':')[2]}"
    with contextlib.ExitStack() as closing:
        end = closing.enter_context(_handshake.connected(there, _DIALLING))
        tune(end)
        if tls is not None:
            try:
                context = tls.context(serves=False)
            except errors.InvalidArgumentError as error:  # files have changed meanwhile
                raise OSError(str(error)) from None
            host = _handshake.host_named(center)
            end = context.wrap_socket(end, server_hostname=host)
            closing.enter_context(end)
        end.sendall(GREETING + target.offer.key)
        with end.makefile("rb", buffering=0) as lines:
            line = lines.readline(_LONGEST_LINE)
        if line != GREETING:
            said = line.decode("ascii", "replace").strip()
            raise ConnectionError(
                f"the other end is no center, or rejects the handshake: {said}"
            )
        end.settimeout(None)  # the watchdog has the timeouts from now on
        closing.pop_all()
        return end


class SocketLink(_transport.Link):
    """A direct connection.

    Args:
      end: the socket, after the handshake.
      buffers: buffers to receive in.
    """

    ended = (OSError, EOFError)

    def __init__(self, end: socket.socket, buffers: Buffers) -> None:
        super().__init__(end.recv_into, buffers)
        self._end = end
        self._done = False
        # `cancel` only shuts the socket down, so that a waiting thread finds it ended.
        # A closed descriptor's number might already be that of another file.
        weakref.finalize(self, end.close)

    def send(self, parcel: Parcel) -> None:
        with parcel, self.pace(parcel.nbytes):
            send(self._end, parcel.pieces(), self.sent)

    def why_it_ended(self) -> errors.AgnOptaxError:
        return errors.CenterUnreachableError("the direct connection broke")

    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        self._done = True
        shut(self._end)


# The service's end.


def listening_at(address: str) -> socket.socket:
    """Return a socket that listens at "host:port".

    Raises:
      InvalidArgumentError: the address cannot be used.
    """
    try:
        return bound_to(address)
    except OSError as error:
        raise errors.InvalidArgumentError(
            f"cannot listen at {address}: {error}. Perhaps another process does; port "
            "0 takes a free port"
        ) from None


def bound_to(address: str) -> socket.socket:
    """Return a socket that listens at "host:port".

    Raises:
      OSError: the address cannot be used.
    """
    host, port = _address.host(address), int(address.rpartition(":")[2])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    made = socket.create_server(
        (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
    )
    if hasattr(socket, "TCP_DEFER_ACCEPT"):
        # The client sends first, and a silent connection costs this process nothing.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT)
    return made


def connections(
    listening: socket.socket, is_closed: Callable[[], bool], servicer: Servicer
) -> Iterator[tuple[socket.socket, Hashable]]:
    """Yield accepted connections and their origins, until the listener is closed.

    They are accepted no faster than the servicer's rate limiter permits; further
    connections wait in the system at no cost.
    """
    fails, where = False, listening.getsockname()
    while not is_closed():
        servicer.pace(where)
        try:
            end, _ = listening.accept()
        except OSError as error:
            if not is_closed():
                if not fails:
                    _log.warning("connections cannot be accepted for now: %s", error)
                fails = True
                time.sleep(0.1)  # too many open files, perhaps only for a short time
            continue
        fails = False
        try:
            whence = _whence(end)
        except OSError:  # disconnected already
            end.close()
        else:
            yield end, whence


# Linux has names of Unix sockets that are no files, and end with the socket.
HAS_NAMES = sys.platform == "linux"


def listening_by_name() -> socket.socket:
    """Return a listening Unix socket in Linux's abstract namespace."""
    name = f"\0agn-optax-{secrets.token_hex(8)}"
    return socket.create_server(name, family=socket.AF_UNIX, backlog=socket.SOMAXCONN)


class SocketListener(_transport.Listener):
    """Accepts direct connections, and serves each on its own thread.

    Args:
      servicer: the servicer.
      listening: a listening socket.
      context: makes the TLS context of a connection; None for plain text.
      name: name of the transport.
      accepted: makes the service's end of a connection.
    """

    def __init__(
        self,
        servicer: Servicer,
        listening: socket.socket,
        context: Callable[[], ssl.SSLContext] | None = None,
        name: str = "socket",
        accepted: type[Accepted] | None = None,
    ) -> None:
        super().__init__()
        self._servicer = servicer
        self._listening = listening
        self._context = context
        self._kind = accepted or Accepted
        self._accepted: dict[int, Accepted] = {}  # by file descriptor
        self._lock = threading.Lock()
        self._closed = False
        bound = listening.getsockname()
        if listening.family == getattr(socket, "AF_UNIX", None):
            where = "unix:" + bytes(bound)[1:].decode()
        else:
            where = f":{bound[1]}"
            host = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
            self.address = f"{host}:{bound[1]}"
        self._transport = name
        self.offer = pb.Offer(transport=name, address=where)
        self._threads.keep_running(self._accept, f"agn-optax {name}")
        # Detects a disconnected worker even while its thread waits for the center.
        self._watch = select.epoll() if hasattr(select, "epoll") else None
        if self._watch is not None:
            self._watch.register(listening, select.EPOLLHUP)  # when it is shut down
            self._threads.keep_running(self._look, f"agn-optax {name} watch")

    def close(self, timeout: float) -> None:
        with self._lock:
            self._closed = True
            accepted = list(self._accepted.values())
        shut(self._listening)
        for each in accepted:
            each.cancel()
        self._threads.wait(timeout)  # a running thread still refers to the center
        self._listening.close()

    def why_not(self, end: socket.socket) -> str:
        """Return why a connection is rejected; "" if it is accepted.

        All users of the machine can connect to a Unix socket by its name.
        """
        if end.family != getattr(socket, "AF_UNIX", None):
            return ""
        user, own = _user(end), os.geteuid()
        if user in (own, 0):
            return ""
        return f"it is for processes of user {own}, got one of user {user}"

    def _accept(self) -> None:
        ends = connections(self._listening, lambda: self._closed, self._servicer)
        for end, whence in ends:
            lets_in = self._servicer.lets_in(whence)
            if not (lets_in or self._shows_key(end)):
                end.close()
                continue
            try:
                self._threads.submit(self._serve, end, whence if lets_in else None)
            except Exception as error:  # for example, no thread can be started
                _log.warning("a direct connection is rejected: %s", error)
                end.close()

    def _shows_key(self, end: socket.socket) -> bool:
        """Return whether a connection has already sent a known key.

        This lets workers connect while other processes of their host make too many
        connections. With TLS the key cannot be read here; such workers fall back to
        gRPC.
        """
        try:
            seen = end.recv(_GREETING_SIZE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return self._servicer.door.knows(_key_in(seen))
        except (AttributeError, OSError):  # no data, or not supported by the system
            return False

    def _serve(self, end: socket.socket, whence: Hashable) -> None:
        with contextlib.ExitStack() as stack:
            # Disconnected or unknown clients are not errors.
            stack.enter_context(contextlib.suppress(OSError, EOFError))
            stack.callback(lambda: end.close())
            end.settimeout(_PATIENCE)
            tune(end)
            if self._context is not None:
                end = self._context().wrap_socket(
                    end, server_side=True, do_handshake_on_connect=False
                )
            with self._servicer.introduced(lambda: shut(end)):
                if isinstance(end, ssl.SSLSocket):
                    end.do_handshake()
                caller = self._greeted(end)
            if caller is None:
                return
            if whence is not None:
                self._servicer.came_in(whence)
            end.settimeout(None)
            accepted, number = self._kind(end, self._servicer), end.fileno()
            with self._lock:
                if self._closed:
                    return
                self._accepted[number] = accepted
            stack.callback(self._forget, number)
            stack.callback(accepted.finish)
            if self._watch is not None:
                events = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLONESHOT
                self._watch.register(number, events)
            self._talk(accepted, caller)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._accepted.pop(number, None)

    def _greeted(self, end: socket.socket) -> Caller | None:
        """Return the caller by its key, after the handshake; None to reject it."""
        greeting = bytearray(_GREETING_SIZE)
        Reader(end.recv_into, self._servicer.buffers).fill(memoryview(greeting))
        if (key := _key_in(bytes(greeting))) is None:
            return None
        certificate = None
        if isinstance(end, ssl.SSLSocket):
            certificate = end.getpeercert(binary_form=True) or b""
        try:
            caller = self._servicer.door.holder(key, certificate, _host(end))
        except errors.NotAllowedError:  # gRPC reports the reason
            return None
        if reason := self.why_not(end):
            _log.warning("a worker is rejected: %s", reason)
            end.sendall(reason.encode("ascii", "replace")[: _LONGEST_LINE - 1] + b"\n")
            return None
        end.sendall(GREETING)
        return caller

    def _talk(self, accepted: Accepted, caller: Caller) -> None:
        try:
            for parcel in self._servicer.exchange(
                accepted, accepted, caller, self._transport
            ):
                accepted.send(parcel)
            return
        except (errors.AgnOptaxError, MemoryError) as error:
            failure = _status.failure_of(error)
        except (OSError, EOFError):
            raise
        except Exception as error:
            _log.exception("a worker's call failed")
            failure = _status.failure_of(error)
        with self._servicer.introduced(accepted.cancel):
            accepted.send_failure(failure)

    def _look(self) -> None:
        assert self._watch is not None
        while not self._closed:
            for number, _ in self._watch.poll():
                self._finish(number)

    def _finish(self, number: int) -> None:
        """Mark a connection as ended; in a function, to keep no reference to it."""
        with self._lock:  # another connection may already have the same number
            accepted = self._accepted.get(number)
            if accepted is None or not accepted.is_cut():
                return
        accepted.finish()


class Accepted(Reader):
    """The service's end of one direct connection.

    It also replaces the context of a gRPC call.

    Args:
      end: the socket.
      servicer: the servicer, with buffers to receive in, and timeouts of transfers.
    """

    def __init__(self, end: socket.socket, servicer: Servicer) -> None:
        super().__init__(end.recv_into, servicer.buffers)
        self._end = end
        self._sending = servicer.sending
        self._gone: Future[None] = Future()  # canceled when the worker disconnects

    # The interface of a gRPC call's context.

    def is_active(self) -> bool:
        """Return whether the worker is connected."""
        return not self._gone.done()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call ``callback`` when the worker is gone; return False if it already is."""
        self._gone.add_done_callback(lambda _: callback())
        return self.is_active()

    # For the listener.

    def is_cut(self) -> bool:
        """Return whether the worker's end is closed."""
        poll = select.poll()
        poll.register(self._end, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, parcel: Parcel) -> None:
        """Send a frame."""
        with parcel, self._sending(self.cancel, parcel) as moved:
            pieces = self.pieces(parcel)
            try:
                send(self._end, pieces, moved)
            except errors.AgnOptaxError as error:  # raised by `parcel.until`
                # No rejection fits into an open frame; the next connection reports it.
                raise ConnectionAbortedError from error

    def pieces(self, parcel: Parcel) -> Iterator[memoryview]:
        """Yield the pieces of a frame for the socket."""
        return parcel.pieces()

    def send_failure(self, failure: pb.Failure) -> None:
        """Send the reason for ending the connection, and end it."""
        self.send(Parcel(pb.Frame(failure=failure)))
        socket.socket.shutdown(self._end, socket.SHUT_WR)
        # Read on: a worker that is still sending would lose the reason otherwise.
        self._end.settimeout(_PATIENCE)
        while self._end.recv(1 << 20):
            pass

    def cancel(self) -> None:
        """End the connection, from any thread."""
        shut(self._end)

    def finish(self) -> None:
        """Mark the connection as ended; may be called by several threads."""
        self._gone.cancel()


def _key_in(greeting: bytes) -> bytes | None:
    """Return the key of a greeting; None if it is malformed."""
    if len(greeting) < _GREETING_SIZE or not greeting.startswith(GREETING):
        return None
    return bytes(greeting[len(GREETING) :])


def _user(end: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    said = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(said)[1])


def _whence(end: socket.socket) -> Hashable:
    """Return the key of the handshake limit: a host, or a user of this machine."""
    if end.family == getattr(socket, "AF_UNIX", None):
        return _user(end)
    return _host(end)


def _host(end: socket.socket) -> str:
    """Return the host from which a connection comes."""
    if end.family == getattr(socket, "AF_UNIX", None):
        return _address.network("")
    return _address.network(end.getpeername()[0])


# Both ends.


def tune(end: socket.socket) -> None:
    """Set the options of a socket, at either end."""
    if end.family == getattr(socket, "AF_UNIX", None):
        # Unlike these, the buffers of TCP grow automatically.
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        return
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPALIVE", 5),  # the name of TCP_KEEPIDLE on macOS
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE),
    ):
        with contextlib.suppress(OSError):
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    with contextlib.suppress(OSError):  # disconnected, or reno is not allowed
        within = end.getsockname()[0] == end.getpeername()[0]
        if within and hasattr(socket, "TCP_CONGESTION"):
            # A connection within a host needs no congestion control. BBR would pace it,
            # and stop for a fifth of a second every ten seconds to measure round trips.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def shut(end: socket.socket) -> None:
    """Shut a socket down, so that all threads that use it find it ended.

    `SSLSocket.shutdown` would turn it into a plain socket for its other thread.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(end, socket.SHUT_RDWR)


def send(
    end: socket.socket, pieces: Iterator[memoryview], sent: Callable[[], None]
) -> None:
    """Send the pieces of a frame; call ``sent`` whenever some bytes were sent."""
    if isinstance(end, ssl.SSLSocket):
        for record in _records(pieces):
            while record:
                record = record[end.send(record) :]
                sent()
        return
    for batch in _batches(pieces):
        while batch:
            batch = _after(_send_some(end, batch), batch)
            sent()


def _records(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield ``pieces`` with small ones joined, because TLS sends one at a time."""
    small: list[memoryview] = []
    for piece in pieces:
        if len(piece) < _RECORD:
            small.append(piece)
        if small and (len(piece) >= _RECORD or sum(map(len, small)) >= _RECORD):
            yield memoryview(b"".join(small))
            small = []
        if len(piece) >= _RECORD:
            yield piece
    if small:
        yield memoryview(b"".join(small))


def _batches(pieces: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """Yield lists of ``pieces`` that are sent in one call each."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if len(batch) == _MOST_PIECES or size >= _ENOUGH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _send_some(end: socket.socket, batch: list[memoryview]) -> int:
    # A blocking call wakes up for a little space in the socket's buffer. A poll waits
    # for more space, and takes three quarters of the time.
    while hasattr(select, "poll"):
        try:
            return end.sendmsg(batch, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            room = select.poll()
            room.register(end, select.POLLOUT)
            room.poll()
    return end.sendmsg(batch)  # on systems without poll


def _after(sent: int, of: list[memoryview]) -> list[memoryview]:
    """Return what is left of pieces whose first ``sent`` bytes were sent."""
    for i, piece in enumerate(of):
        if sent < len(piece):
            return [piece[sent:], *of[i + 1 :]]
        sent -= len(piece)
    return []


# At a port, or at a Unix socket if gRPC uses one.


def _listen(
    servicer: Servicer, place: _transport.ListenSettings
) -> _transport.Listener | None:
    """Listen at the requested port, or at a free one."""
    context = None if place.tls is None else place.tls.serving_context()
    if not place.address.startswith("unix:"):
        if place.direct_address is None:
            listening = bound_to(f"{place.address.rpartition(':')[0]}:0")
        else:
            listening = listening_at(place.direct_address)
        return SocketListener(servicer, listening, context)
    if place.direct_address is not None:
        raise errors.InvalidArgumentError(
            "direct_address is for a center at a port, and this one is at "
            f"{place.address}"
        )
    if not HAS_NAMES:
        return None
    return SocketListener(servicer, listening_by_name(), context)


def _dial(target: _transport.Target) -> _transport.Link:
    """Connect to the center, with a handshake."""
    return SocketLink(dialled(target, target.connection.tls), target.buffers)


SOCKET = _transport.Transport("socket", _listen, _dial)
