"""An HTTP server with a page about a center, and metrics for Prometheus.

It is a listener of the service, as the transports are, and shares the service's
authentication, certificates and rate limits. A `Monitor` supplies the content.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import json
import logging
import math
import pathlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.ops.watch import _metrics
from agn_optax.ops.watch._monitor import Monitor
from agn_optax.service import Listener, Servicer, Tls, sockets, timed
from agn_optax.service import address as addresses

_log = logging.getLogger("agn_optax")

# Limits of the resources that clients of the page can use.
_MAX_CONNECTIONS = 32  # at a time; one more closes the oldest
_TIMEOUT = 20.0  # timeout in s of a connection
_MAX_HEAD = 16 << 10  # bytes of a request
_CHUNK = 4 << 10  # bytes
_CACHED_FOR = 0.5  # s for which all clients get the same content, at least
_MAX_CPU_SHARE = 0.05  # maximum share of the time that is spent on making the content

# Status, content type, body and content security policy.
_Response = tuple[HTTPStatus, str, bytes, str]

_BLANK_LINE = re.compile(rb"\n\r?\n")
_TEXT, _HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
_EMPTY_POLICY = "default-src 'none'; frame-ancestors 'none'"
_HEADERS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Page(Listener):
    """The HTTP server for browsers and scrapers, with one thread per connection.

    Args:
      servicer: the servicer of the center.
      address: "host:port" to listen at.
      tls: TLS settings of the center; None for plain text.

    Attributes:
      monitor: the source of the content.
      is_local: whether the page is for this machine only.
      html: the page itself, which has no data.
      policy: content security policy of the page.

    Raises:
      InvalidArgumentError: the page cannot listen at that address.
    """

    def __init__(self, servicer: Servicer, address: str, tls: Tls | None) -> None:
        super().__init__()
        self.monitor = Monitor(servicer)
        self.servicer = servicer
        self.is_local = addresses.is_local(address)
        self.html = pathlib.Path(__file__).with_name("page.html").read_bytes()
        self.policy = _policy(self.html.decode())
        as_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
        self.state = _Cached(lambda: as_json(self.monitor.view()).encode())
        self.metrics = _Cached(lambda: _metrics.exposition(self.monitor.view()))
        self._context = None if tls is None else tls.context(serves=True)
        self._socket = sockets.listen_at(address)
        port = self._socket.getsockname()[1]
        self.address = f"{address.rpartition(':')[0]}:{port}"
        scheme = "http" if tls is None else "https"
        servicer.page_address = f"{scheme}://{self.address}/"
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

    def _accept(self) -> None:
        limits = self.servicer.call_limits
        accepted = sockets.accept_connections(self._socket, lambda: self._closed)
        for connection, origin in accepted:
            if not limits.accepts_connection(origin):
                connection.close()
                continue
            try:
                self._threads.submit(self._serve, connection)
            except Exception as error:  # e.g. no further thread can be started
                _log.warning("a connection to the page is rejected: %s", error)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            # A client that disconnects or does not speak HTTP is not an error.
            expected = (OSError, EOFError, errors.CenterUnreachableError)
            stack.enter_context(contextlib.suppress(*expected))
            stack.callback(lambda: connection.close())
            host = addresses.network(connection.getpeername()[0])
            if self._context is not None:
                connection = self._context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            key = id(connection)
            with self._lock:
                if len(self._connections) >= _MAX_CONNECTIONS:
                    oldest = next(iter(self._connections))
                    sockets.shut(self._connections.pop(oldest))
                self._connections[key] = connection
                if self._closed:
                    sockets.shut(connection)
            stack.callback(self._forget, key)
            end = functools.partial(sockets.shut, connection)
            stack.enter_context(timed(end, 0, _TIMEOUT))
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            _Handler(connection, host, self)

    def _forget(self, key: int) -> None:
        with self._lock:
            self._connections.pop(key, None)


class _Handler(BaseHTTPRequestHandler):
    """The only request of a connection: bytes after its header fields are not read.

    Args:
      request: the connection.
      client_address: network address of the client.
      server: the page.
    """

    server_version, sys_version = "agn_optax", ""
    default_request_version = "HTTP/1.0"  # not 0.9, whose responses have no headers
    requestline, command = "", ""  # until they are parsed

    def __init__(self, request: socket.socket, client_address: str, server: Any):
        self._page: Page = server
        self._host = client_address
        super().__init__(request, client_address, server)

    def handle(self) -> None:
        """Receive the request line and the header fields, and respond."""
        head = b""
        while not _BLANK_LINE.search(head):
            received = self.connection.recv(_CHUNK)
            if not received or len(head) > _MAX_HEAD:
                return
            head += received
        self.rfile = io.BytesIO(head)
        self.handle_one_request()

    def do_GET(self) -> None:
        """Respond to a request for a path."""
        try:
            response = self._response(self._page, self.path.partition("?")[0])
        except Exception as error:
            response = _error(_status_of(error), str(error))
        self._send(*response)

    do_HEAD = do_GET  # noqa: N815 the name that the base class calls

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Send an error as text, also for requests that the base class rejects."""
        self._send(*_error(HTTPStatus(code), message or ""))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: clients could fill the log."""

    def _response(self, page: Page, path: str) -> _Response:
        if page.is_local and not self._is_for_this_machine():
            return _error(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this page is for this machine only, as localhost or 127.0.0.1; from "
                "another machine, open it through `ssh -L`",
            )
        if path == "/":
            return HTTPStatus.OK, _HTML, page.html, page.policy
        if path not in ("/state.json", "/metrics"):
            return _error(HTTPStatus.NOT_FOUND, "try /, /state.json, /metrics")
        authorization = self.headers.get("Authorization", "")
        if page.servicer.authenticator.access is not None and not authorization:
            # The first request of the page in a browser has no token yet.
            text = "this needs a token of this center"
            return _error(HTTPStatus.UNAUTHORIZED, text)
        caller = page.servicer.authenticate(authorization, self._host)
        page.servicer.call_limits.admit(caller.key)
        caller.check("Status")
        if path == "/state.json":
            return HTTPStatus.OK, "application/json", page.state(), _EMPTY_POLICY
        extras.require("metrics", "prometheus_client")
        return HTTPStatus.OK, _metrics.CONTENT_TYPE, page.metrics(), _EMPTY_POLICY

    def _is_for_this_machine(self) -> bool:
        """Return whether the Host field is a loopback name or address.

        A foreign name that resolves to this machine (DNS rebinding) would circumvent
        the browser's same-origin policy.
        """
        hosts = self.headers.get_all("Host", [])
        host = hosts[0] if len(hosts) == 1 else ""
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return addresses.is_loopback(name.strip("[]").rstrip(".").lower())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, policy: str) -> None:
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", 'Bearer realm="agn_optax"')
        headers = {
            **_HEADERS,
            "Content-Security-Policy": policy,
            "Content-Type": kind,
            "Content-Length": str(len(body)),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _error(status: HTTPStatus, text: str) -> _Response:
    body = f"{status.value} {status.phrase}: {text or status.description}\n"
    return status, _TEXT, body.encode("utf-8", "replace"), _EMPTY_POLICY


def _status_of(error: Exception) -> HTTPStatus:
    """Return the status of the response to a request that failed."""
    match error:
        case errors.NotAllowedError():
            is_known = error.is_known
            return HTTPStatus.FORBIDDEN if is_known else HTTPStatus.UNAUTHORIZED
        case errors.CenterUnreachableError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case errors.MissingExtraError():
            return HTTPStatus.NOT_IMPLEMENTED
    _log.error("a request for the page failed", exc_info=error)
    return HTTPStatus.INTERNAL_SERVER_ERROR


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
