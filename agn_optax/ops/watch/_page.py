"""An HTTP server with a page about a center, and metrics for Prometheus.

It is a listener of the service, as the transports are, and shares the service's
authentication, certificates and rate limits. A `Monitor` supplies the content.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import math
import pathlib
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.ops.watch import _http, _metrics
from agn_optax.ops.watch._monitor import Monitor
from agn_optax.service import Caller, Listener, Servicer, Tls, sockets, timed
from agn_optax.service import address as addresses

_log = logging.getLogger("agn_optax")

# Limits of the resources that clients of the page can use.
_MAX_CONNECTIONS = 32  # at a time; one more closes the oldest
_TIMEOUT = 10.0  # timeout in s of a request, and of stalled sending
_CACHED_FOR = 0.5  # s for which all clients get the same content, at least
_MAX_CPU_SHARE = 0.05  # maximum share of the time that is spent on making the content
_LINGER = 1.0  # s in which a client that is still sending can receive the response
_MAX_UNREAD = 1 << 20  # bytes that are received and discarded meanwhile

_TEXT, _HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
_HEADERS = {
    "Server": "agn_optax",
    "Connection": "close",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_EMPTY_POLICY = "default-src 'none'; frame-ancestors 'none'"


class Page(Listener):
    """The HTTP server for browsers and scrapers, with one thread per connection.

    Args:
      servicer: the servicer of the center.
      address: "host:port" to listen at.
      tls: TLS settings of the center; None for plain text.

    Attributes:
      monitor: the source of the content.

    Raises:
      InvalidArgumentError: the page cannot listen at that address.
    """

    def __init__(self, servicer: Servicer, address: str, tls: Tls | None) -> None:
        super().__init__()
        self.monitor = Monitor(servicer)
        self.servicer = servicer
        self.is_local = addresses.is_local(address)
        html = pathlib.Path(__file__).with_name("page.html").read_bytes()
        self._html, self._policy = html, _policy(html.decode())
        as_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
        self._state = _Cached(lambda: as_json(self.monitor.view()).encode())
        self._metrics = _Cached(lambda: _metrics.exposition(self.monitor.view()))
        self._context = None if tls is None else tls.context(serves=True)
        self._socket = sockets.listen_at(address)
        port = self._socket.getsockname()[1]
        self.address = f"{address.rpartition(':')[0]}:{port}"
        scheme = "http" if tls is None else "https"
        servicer.page_address = f"{scheme}://{self.address}/"
        self._slots = threading.Semaphore(_MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}  # by id, the oldest first
        self._closed = False

    def start(self) -> None:
        self.monitor.start()
        self._threads.keep_running(self._accept, "agn-optax page")

    def drain(self) -> None:
        self.monitor.drain()

    def close(self, timeout: float) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
        for connection in (self._socket, *connections):
            sockets.shut(connection)
        self.monitor.close(timeout)
        self._threads.wait(timeout)
        self._socket.close()

    def _response(self, request: _http.Request, client: _Client) -> _Response:
        if request.path not in ("/state.json", "/metrics"):  # no authentication needed
            if request.path != "/":
                problem = "try /, /state.json, /metrics"
                raise _http.RejectedRequestError(problem, HTTPStatus.NOT_FOUND)
            return _Response(HTTPStatus.OK, _HTML, self._html, self._policy)
        caller = self._caller(request.fields.get("authorization", ""), client)
        self.servicer.call_limits.admit(caller.key)
        caller.check("Status")
        if request.path == "/state.json":
            return _Response(HTTPStatus.OK, "application/json", self._state())
        extras.require("metrics", "prometheus_client")
        return _Response(HTTPStatus.OK, _metrics.CONTENT_TYPE, self._metrics())

    def _caller(self, authorization: str, client: _Client) -> Caller:
        """Return the caller of a request.

        Raises:
          NotAllowedError: the caller is unknown.
        """
        needs_token = self.servicer.authenticator.access is not None
        if needs_token and not authorization:
            error = errors.NotAllowedError("this needs a token of this center")
            error.is_known = False
            raise error
        return self.servicer.authenticate(authorization, client.host)

    def _respond(self, client: _Client) -> None:
        """Read the request of a connection, and send the response."""
        with self._under_way(client.connection, 0):
            received = _http.receive(client.connection.recv)
        if not received:
            return
        has_body = True
        try:
            request = _http.parse(received, is_local=self.is_local)
            has_body = request.method != "HEAD"
            response = self._response(request, client)
        except Exception as error:
            response = _failure(error)
        headers = {
            **_HEADERS,
            **_ERROR_HEADERS.get(response.status, {}),
            "Content-Security-Policy": response.policy,
            "Date": formatdate(usegmt=True),
            "Content-Type": response.kind,
            "Content-Length": str(len(response.body)),
        }
        lines = [f"HTTP/1.1 {response.status.value} {response.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join((*lines, "", "")).encode("ascii")
        with self._under_way(client.connection, len(response.body)):
            client.connection.sendall(head + response.body * has_body)
        # Closing a socket with unread bytes resets the connection, and the client may
        # then never see the response.
        with self._under_way(client.connection, 0, _LINGER):
            client.connection.shutdown(socket.SHUT_WR)
            left = _MAX_UNREAD
            while left > 0 and (unread := client.connection.recv(1 << 16)):
                left -= len(unread)

    def _under_way(
        self, connection: socket.socket, size: int, timeout: float | None = None
    ) -> AbstractContextManager[object]:
        """End the connection if the block takes too long."""
        timeout = _TIMEOUT if timeout is None else timeout
        return timed(lambda: sockets.shut(connection), size, timeout)

    # Connections.

    def _accept(self) -> None:
        limits = self.servicer.call_limits
        connections = sockets.accept_connections(self._socket, lambda: self._closed)
        for connection, origin in connections:
            if not limits.accepts_connection(origin):
                connection.close()
                continue
            is_free = self._slots.acquire(blocking=False)
            while not is_free:
                self._close_oldest()
                is_free = self._slots.acquire(timeout=0.1)  # the oldest may be busy
            with self._lock:
                self._connections[id(connection)] = connection
                if self._closed:
                    sockets.shut(connection)
            try:
                self._threads.submit(self._serve, connection)
            except Exception as error:  # e.g. no further thread can be started
                _log.warning("a connection to the page is rejected: %s", error)
                self._close(id(connection), connection)

    def _close_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._connections.values()), None)
        if oldest is not None:
            sockets.shut(oldest)

    def _close(self, key: int, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(key, None)
        connection.close()
        self._slots.release()

    def _serve(self, connection: socket.socket) -> None:
        key, plain = id(connection), connection
        try:
            # A client that disconnects or does not speak HTTP is not an error.
            with contextlib.suppress(OSError, EOFError, errors.CenterUnreachableError):
                host = addresses.network(connection.getpeername()[0])
                if self._context is not None:
                    connection = self._context.wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    )
                    with self._lock:
                        self._connections[key] = connection
                    with self._under_way(connection, 0):
                        connection.do_handshake()
                self._respond(_Client(connection, host))
        finally:
            self._close(key, connection if connection.fileno() >= 0 else plain)


class _Client(NamedTuple):
    """The client of a connection: its socket, and its network address."""

    connection: socket.socket
    host: str


class _Response(NamedTuple):
    """The response to a request."""

    status: HTTPStatus
    kind: str
    body: bytes
    policy: str = _EMPTY_POLICY


def _failure(error: Exception) -> _Response:
    """Return the response to a request that failed."""
    problem = str(error)
    match error:
        case _http.RejectedRequestError():
            status = error.status
        case errors.NotAllowedError():
            is_known = error.is_known
            status = HTTPStatus.FORBIDDEN if is_known else HTTPStatus.UNAUTHORIZED
        case errors.CenterUnreachableError():
            status = HTTPStatus.SERVICE_UNAVAILABLE
        case errors.MissingExtraError():
            status = HTTPStatus.NOT_IMPLEMENTED
        case _:
            _log.error("a request for the page failed", exc_info=error)
            status, problem = HTTPStatus.INTERNAL_SERVER_ERROR, repr(error)
    text = f"{status.value} {status.phrase}: {problem}\n"
    return _Response(status, _TEXT, text.encode("utf-8", "replace"))


# Additional header fields of error responses.
_ERROR_HEADERS: dict[HTTPStatus, dict[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": 'Bearer realm="agn_optax"'},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "1"},
    HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET, HEAD"},
}


class _Cached:
    """Cached content, kept longer the more CPU time it takes to make."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._next = -math.inf
        self._content = b""

    def __call__(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._next:
                began = time.thread_time()
                self._content = self._make()
                cost = time.thread_time() - began
                self._next = time.monotonic() + max(_CACHED_FOR, cost / _MAX_CPU_SHARE)
            return self._content


def _policy(html: str) -> str:
    """Return a content security policy that allows only the page's own scripts."""

    def hashes(tag: str) -> str:
        sources = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = [hashlib.sha256(source.encode()).digest() for source in sources]
        return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; "
        f"style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
