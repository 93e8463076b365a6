"""An HTTP server with a page about a center, and metrics for Prometheus.

It is a listener of the service, as the transports are, and shares the service's
authentication, certificates and rate limits. A `Monitor` supplies the content.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import logging
import math
import pathlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.ops.watch import _http, _metrics
from agn_optax.ops.watch._monitor import Monitor
from agn_optax.service import Caller, Listener, Servicer, Tls, Transfers, sockets
from agn_optax.service import address as addresses

_log = logging.getLogger("agn_optax")

# Limits of the resources that clients of the page can use.
_MOST_CONNECTIONS = 32  # at a time; one more closes the oldest
_BACKLOG = 128  # connections that wait to be accepted
_PATIENCE = 10.0  # timeout in s of a request or idle connection, and of stalled sending
_FRESH = 0.5  # s for which all clients get the same content
_SHARE = 0.05  # maximum share of the time that is spent on making the content
_LINGERING = 1.0  # s for a client that is still sending to receive an error
_MOST_UNREAD = 1 << 20  # bytes that are received and discarded meanwhile
_LEAST_PRESSED = 1 << 12  # bytes from which on content is compressed

_TEXT, _HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
_HEADERS = {
    "Server": "agn_optax",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NOTHING = "default-src 'none'; frame-ancestors 'none'"


class Page(Listener):
    """The HTTP server for browsers and scrapers, with one thread per connection.

    Args:
      servicer: the servicer of the center.
      address: "host:port" to listen at.
      tls: TLS settings of the center; None for plain text.

    Attributes:
      url: URL of the page.
      monitor: the source of the content.

    Raises:
      InvalidArgumentError: the page cannot listen at that address.
    """

    def __init__(self, servicer: Servicer, address: str, tls: Tls | None) -> None:
        super().__init__()
        self.monitor = Monitor(servicer)
        self.servicer = servicer
        self.transfers = Transfers()
        self.is_local = addresses.is_local(address)
        html = pathlib.Path(__file__).with_name("page.html").read_bytes()
        self._html, self._policy = _Body(html), _policy(html.decode())
        self._state = _Made(lambda: _as_json(self.monitor.view()))
        self._metrics = _Made(lambda: _metrics.exposition(self.monitor.view()))
        self._context = None if tls is None else tls.serving_context()
        self._listening = _listening_at(address)
        port = self._listening.getsockname()[1]
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self.url = servicer.page_address = (
            f"http{'' if tls is None else 's'}://{self.address}/"
        )
        self._places = threading.Semaphore(_MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}  # by number, the oldest first
        self._closed = False

    def start(self) -> None:
        self.monitor.start()
        self._threads.keep_running(self._accept, "agn-optax page")

    def drain(self) -> None:
        self.monitor.drain()

    def close(self, timeout: float) -> None:
        with self._lock:
            self._closed = True
            ends = list(self._open.values())
        for end in (self._listening, *ends):
            sockets.shut(end)
        self.monitor.close(timeout)
        self._threads.wait(timeout)
        self._listening.close()

    def answer(self, path: str, request: _Request) -> None:
        """Answer a request for a path."""
        if path == "/":  # static content, so no authentication is needed
            self._admit_host(request)
            self._say(request, _HTML, self._html, policy=self._policy)
        elif path in ("/state.json", "/metrics"):
            caller = self._caller(request)
            self.servicer.admit(caller, "Status")
            request.came_in()
            caller.check("Status")
            if path == "/state.json":
                self._say(request, "application/json", self._state())
            else:
                extras.require("metrics", "prometheus_client")
                self._say(request, _metrics.CONTENT_TYPE, self._metrics())
        else:
            self._admit_host(request)
            request.refuse(HTTPStatus.NOT_FOUND, "try /, /state.json, /metrics")

    def _say(
        self, request: _Request, kind: str, body: _Body, policy: str = _NOTHING
    ) -> None:
        more, sent = {"Content-Security-Policy": policy}, body.plain
        accepted = request.headers.get("accept-encoding", "")
        if "gzip" in accepted and len(sent) >= _LEAST_PRESSED:
            more["Content-Encoding"], sent = "gzip", body.pressed
        request.say(HTTPStatus.OK, kind, sent, more)

    def _caller(self, request: _Request) -> Caller:
        """Return the caller of a request.

        Raises:
          NotAllowedError: the caller is unknown.
        """
        end, certificate = request.connection, b""
        if isinstance(end, ssl.SSLSocket):
            certificate = end.getpeercert(binary_form=True) or b""
        said = request.headers.get("authorization", "")
        if self.servicer.door.access is not None and not (said or certificate):
            self._admit_host(request)  # the page's first request has no token yet
            error = errors.NotAllowedError("this needs a token of this center")
            error.is_known = False
            raise error
        try:
            return self.servicer.known(said, certificate, request.host)
        except errors.NotAllowedError:
            request.came_in()  # already counted as a failed authentication
            raise

    def _admit_host(self, request: _Request) -> None:
        self.servicer.admit_host(request.host)
        request.came_in()

    # Connections.

    def _accept(self) -> None:
        ends = sockets.connections(self._listening, lambda: self._closed, self.servicer)
        for end, whence in ends:
            if not self.servicer.lets_in(whence):
                end.close()
                continue
            while not self._places.acquire(blocking=False):
                self._cut_oldest()
                if self._places.acquire(timeout=0.1):  # the oldest may be busy
                    break
            with self._lock:
                self._open[id(end)] = end
                if self._closed:
                    sockets.shut(end)
            try:
                self._threads.submit(self._serve, end)
            except Exception as error:  # e.g. no further thread can be started
                _log.warning("a connection to the page is rejected: %s", error)
                self._forget(id(end), end)

    def _cut_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._open.values()), None)
        if oldest is not None:
            sockets.shut(oldest)

    def _forget(self, number: int, end: socket.socket) -> None:
        with self._lock:
            self._open.pop(number, None)
        end.close()
        self._places.release()

    def _serve(self, end: socket.socket) -> None:
        number, raw = id(end), end
        try:
            # A client that disconnects or does not speak HTTP is not an error.
            with contextlib.suppress(OSError, EOFError, errors.CenterUnreachableError):
                host = addresses.network(end.getpeername()[0])
                if self._context is not None:
                    self.servicer.admit_host(host)  # before the expensive handshake
                    end = self._context().wrap_socket(
                        end, server_side=True, do_handshake_on_connect=False
                    )
                    with self._lock:
                        self._open[number] = end
                    with self.transfers.under_way(
                        lambda: sockets.shut(end), 0, _PATIENCE
                    ):
                        end.do_handshake()
                request = _Request(end, host, self)
                while request.answer():
                    pass
        finally:
            self._forget(number, end if end.fileno() >= 0 else raw)


class _Request:
    """The requests of one connection, one after the other.

    A connection is closed after any error response.

    Args:
      end: socket of the connection.
      host: network address of the client.
      page: the page that answers the requests.

    Attributes:
      headers: header fields of the current request, by their names in lower case.
    """

    def __init__(self, end: socket.socket, host: str, page: Page) -> None:
        self.connection, self.host, self.page = end, host, page
        self.headers: Mapping[str, str] = {}
        self._method, self._is_last = "", True
        self._has_come_in = False

    def came_in(self) -> None:
        """Stop counting the connection as unauthenticated: a request was admitted."""
        if not self._has_come_in:
            self._has_come_in = True
            self.page.servicer.came_in(self.host)

    def answer(self) -> bool:
        """Answer the next request; return whether another one may follow."""
        self._method, self._is_last = "", True
        with self._under_way(0):
            heard = _http.receive(self.connection.recv)
        if not heard:
            return False
        try:
            request = _http.parse(heard, is_local=self.page.is_local)
            self.headers = request.fields
            self._method, self._is_last = request.method, request.is_last
            self.page.answer(request.path, self)
        except _http.RefusedRequestError as error:
            self.refuse(error.status, str(error))
        except errors.NotAllowedError as error:
            code = HTTPStatus.FORBIDDEN if error.is_known else HTTPStatus.UNAUTHORIZED
            self.refuse(code, str(error))
        except errors.CenterUnreachableError as error:
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except errors.MissingExtraError as error:
            self.refuse(HTTPStatus.NOT_IMPLEMENTED, str(error))
        except OSError:
            raise
        except Exception as error:
            _log.exception("a request for the page failed")
            self.refuse(HTTPStatus.INTERNAL_SERVER_ERROR, repr(error))
        return not self._is_last

    def say(
        self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str]
    ) -> None:
        """Send a response."""
        lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
        fields = {
            **_HEADERS,
            **headers,
            "Date": formatdate(usegmt=True),
            "Content-Type": kind,
            "Content-Length": str(len(body)),
        }
        if self._is_last:
            fields["Connection"] = "close"
        lines += [f"{name}: {value}" for name, value in fields.items()]
        head = "\r\n".join((*lines, "", "")).encode("ascii")
        with self._under_way(len(body)):
            self.connection.sendall(head + (b"" if self._method == "HEAD" else body))

    def refuse(self, status: HTTPStatus, why: str) -> None:
        """Send an error, and end the connection."""
        self._is_last = True
        headers = {"Content-Security-Policy": _NOTHING, **_BESIDE.get(status, {})}
        text = f"{status.value} {status.phrase}: {why}\n"
        self.say(status, _TEXT, text.encode("utf-8", "replace"), headers)
        # Closing a socket with unread bytes resets the connection, and the client may
        # then never see the response.
        with self._under_way(0, _LINGERING):
            self.connection.shutdown(socket.SHUT_WR)
            left = _MOST_UNREAD
            while left > 0 and (unread := self.connection.recv(1 << 16)):
                left -= len(unread)

    @contextlib.contextmanager
    def _under_way(self, size: int, patience: float | None = None) -> Iterator[None]:
        """End the connection if the block takes too long."""

        def cut() -> None:
            sockets.shut(self.connection)

        patience = _PATIENCE if patience is None else patience
        with self.page.transfers.under_way(cut, size, patience):
            yield


# Additional header fields of error responses.
_BESIDE: dict[HTTPStatus, dict[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": 'Bearer realm="agn_optax"'},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "1"},
    HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET, HEAD"},
}


class _Body:
    """The content of a response."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain

    @functools.cached_property
    def pressed(self) -> bytes:
        """The content compressed with gzip."""
        return gzip.compress(self.plain, compresslevel=1)


class _Made:
    """Cached content, kept longer the more CPU time it takes to make."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._next = -math.inf
        self._made = _Body(b"")

    def __call__(self) -> _Body:
        with self._lock:
            if time.monotonic() >= self._next:
                began = time.thread_time()
                self._made = _Body(self._make())
                cost = time.thread_time() - began
                self._next = time.monotonic() + max(_FRESH, cost / _SHARE)
            return self._made


def _as_json(view: dict[str, Any]) -> bytes:
    text = json.dumps(view, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")  # json.dumps escapes all other characters


def _policy(html: str) -> str:
    """Return a content security policy that allows only the page's own scripts."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = [hashlib.sha256(each.encode()).digest() for each in found]
        return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; "
        f"style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _listening_at(address: str) -> socket.socket:
    try:
        return sockets.bound_to(address, _BACKLOG)
    except OSError as error:
        raise errors.InvalidArgumentError(
            f"the page cannot listen at {address}: {error}. Perhaps another process "
            "does; port 0 takes a free port"
        ) from None
