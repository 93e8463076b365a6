"""A page of a center, and its numbers for Prometheus: HTTP beside the service.

It is a listener of the service like its transports, and has its door, its certificates
and its limits. What it shows is a `Monitor`'s.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import http.client
import ipaddress
import json
import logging
import math
import pathlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.service import _address, _metrics
from agn_optax.service._access import Caller
from agn_optax.service._monitor import Monitor
from agn_optax.service._servicer import Servicer
from agn_optax.service._tls import Tls
from agn_optax.service._watchdog import Transfers
from agn_optax.service.transports import Listener
from agn_optax.service.transports._socket import bound_to, connections, shut

_log = logging.getLogger("agn_optax")

# What whoever opens it may take of a center.
_MOST_CONNECTIONS = 32  # at a time; the oldest goes where there is one more
_BACKLOG = 128  # of those that wait to be taken
_MOST_HEAD = 16 << 10  # bytes of a request
_PATIENCE = 10.0  # seconds for a request, or without one; and in which an answer moves
_FRESH = 0.5  # seconds for which all get the same
_SHARE = 0.05  # of the time, in which it is made
_LEAST_PRESSED = 1 << 12  # bytes

_TEXT, _HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NOTHING = "default-src 'none'; frame-ancestors 'none'"


class Page(Listener):
    """Answers browsers and scrapers, on a thread for each connection.

    Args:
      servicer: of the center.
      address: "host:port".
      tls: of the center; None for plain text.

    Attributes:
      url: where a browser finds it.
      monitor: what it shows.

    Raises:
      InvalidArgumentError: nothing can listen at that address.
    """

    def __init__(self, servicer: Servicer, address: str, tls: Tls | None) -> None:
        super().__init__()
        self.monitor = Monitor(servicer)
        self.servicer = servicer
        self.transfers = Transfers()
        self.is_local = _address.is_local(address)
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
        self._threads.submit(self._accept)

    def drain(self) -> None:
        self.monitor.drain()

    def close(self, timeout: float) -> None:
        with self._lock:
            self._closed = True
            ends = list(self._open.values())
        for end in (self._listening, *ends):
            shut(end)
        self.monitor.close(timeout)
        self._threads.wait(timeout)
        self._listening.close()

    def answer(self, path: str, request: _Request) -> None:
        """Answers a request for a path."""
        if path == "/":  # with nothing in it that is not in the package
            self._admit_host(request.host)
            self._say(request, _HTML, self._html, policy=self._policy)
        elif path in ("/state.json", "/metrics"):
            caller = self._caller(request)
            self.servicer.admit(caller)
            caller.check("Status")
            if path == "/state.json":
                self._say(request, "application/json", self._state())
            else:
                extras.require("metrics", "prometheus_client")
                self._say(request, _metrics.CONTENT_TYPE, self._metrics())
        else:
            self._admit_host(request.host)
            request.send_error(HTTPStatus.NOT_FOUND, "/, /state.json and /metrics are")

    def _say(
        self, request: _Request, kind: str, body: _Body, policy: str = _NOTHING
    ) -> None:
        more, sent = {"Content-Security-Policy": policy}, body.plain
        accepted = request.headers.get("Accept-Encoding", "")
        if "gzip" in accepted and len(sent) >= _LEAST_PRESSED:
            more["Content-Encoding"], sent = "gzip", body.pressed
        request.say(HTTPStatus.OK, kind, sent, more)

    def _caller(self, request: _Request) -> Caller:
        """Who asks.

        Raises:
          NotAllowedError: nobody who may.
        """
        end, certificate = request.connection, b""
        if isinstance(end, ssl.SSLSocket):
            certificate = end.getpeercert(binary_form=True) or b""
        said = request.headers.get("Authorization", "")
        if self.servicer.door.access is not None and not (said or certificate):
            self._admit_host(request.host)  # a page asks so before it has a token
            error = errors.NotAllowedError("this needs a token of this center")
            error.is_known = False
            raise error
        return self.servicer.known(said, certificate, request.host)

    def _admit_host(self, host: str) -> None:
        self.servicer.admit(Caller("somebody", frozenset(), host=host))

    # Connections.

    def _accept(self) -> None:
        ends = connections(self._listening, lambda: self._closed, self.servicer)
        for end, whence in ends:
            if not self.servicer.lets_in(whence):
                end.close()
                continue
            while not self._places.acquire(blocking=False):
                self._cut_oldest()
                if self._places.acquire(timeout=0.1):  # it may be busy with an answer
                    break
            with self._lock:
                self._open[id(end)] = end
                if self._closed:
                    shut(end)
            try:
                self._threads.submit(self._serve, end)
            except RuntimeError as error:  # no more threads
                _log.warning("somebody who opens the page is refused: %s", error)
                self._forget(id(end), end)

    def _cut_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._open.values()), None)
        if oldest is not None:
            shut(oldest)

    def _forget(self, number: int, end: socket.socket) -> None:
        with self._lock:
            self._open.pop(number, None)
        end.close()
        self._places.release()

    def _serve(self, end: socket.socket) -> None:
        number, raw = id(end), end
        try:
            # Whoever is gone, or was none of ours, is no error.
            with contextlib.suppress(OSError, EOFError, errors.CenterUnreachableError):
                host = _address.network(end.getpeername()[0])
                if self._context is not None:
                    self._admit_host(host)  # a handshake costs more than the rest
                    end = self._context().wrap_socket(
                        end, server_side=True, do_handshake_on_connect=False
                    )
                    with self._lock:
                        self._open[number] = end
                    with self.transfers.under_way(lambda: shut(end), 0, _PATIENCE):
                        end.do_handshake()
                _Request(end, host, self)
        finally:
            self._forget(number, end if end.fileno() >= 0 else raw)


class _Request(BaseHTTPRequestHandler):
    """Requests of one connection, one after the other.

    Args:
      end: of the connection.
      host: whence it comes.
      page: answers.
    """

    protocol_version = default_request_version = "HTTP/1.1"
    server_version, sys_version = "agn_optax", ""
    disable_nagle_algorithm = True

    def __init__(self, end: socket.socket, host: str, page: Page) -> None:
        self.host, self.page = host, page
        super().__init__(end, host, page)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Head(self.rfile)

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.command, self.requestline, self.request_version = "", "", "HTTP/1.1"
        with self._under_way(0):
            self.rfile.left = _MOST_HEAD
            try:
                self.raw_requestline = self.rfile.readline(_MOST_HEAD)
            except http.client.LineTooLong:
                self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
                return
            if not self.raw_requestline or not self.parse_request():
                return
        try:
            self._answer()
        except errors.NotAllowedError as error:
            code = HTTPStatus.FORBIDDEN if error.is_known else HTTPStatus.UNAUTHORIZED
            self.send_error(code, str(error))
        except errors.CenterUnreachableError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except errors.MissingExtraError as error:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED, str(error))
        except OSError:
            raise
        except Exception as error:
            _log.exception("a request for the page failed")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, repr(error))

    def _answer(self) -> None:
        if self.command not in ("GET", "HEAD"):
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD are")
            return
        has_body = self.headers.get("Content-Length", "0") != "0"
        if has_body or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # nobody reads it
        # A name of somebody else's that leads here is a way around the browser's rules.
        if self.page.is_local and not _is_loopback(self.headers.get("Host", "")):
            self.send_error(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this page is for this machine, by the names localhost or 127.0.0.1; "
                "from another one, open it through `ssh -L`",
            )
            return
        self.page.answer(self.path.partition("?")[0], self)

    def say(
        self,
        status: HTTPStatus,
        kind: str,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Sends an answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        with self._under_way(len(body)):
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """As the base class has it, in plain text."""
        status = HTTPStatus(code)
        if not (status in _GOES_ON and self.command):
            self.close_connection = True
        headers = {"Content-Security-Policy": _NOTHING}
        headers.update(_GOES_ON.get(status, {}))
        text = f"{status.value} {status.phrase}: {message or status.description}\n"
        self.say(status, _TEXT, text.encode("utf-8", "replace"), headers)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 of the base
        del format, args  # paths of strangers are nothing for a log

    @contextlib.contextmanager
    def _under_way(self, size: int) -> Iterator[None]:
        """Ends the connection if that takes too long."""

        def cut() -> None:
            shut(self.connection)

        with self.page.transfers.under_way(cut, size, _PATIENCE):
            yield


# After which a connection is as good as before, and what is said beside.
_GOES_ON: dict[HTTPStatus, dict[str, str]] = {
    HTTPStatus.NOT_FOUND: {},
    HTTPStatus.NOT_IMPLEMENTED: {},
    HTTPStatus.FORBIDDEN: {},
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": 'Bearer realm="agn_optax"'},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "1"},
    HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET, HEAD"},
}


class _Head:
    """The file of a connection, of which a request may take so much.

    Attributes:
      left: bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.left = 0

    def readline(self, most: int = -1) -> bytes:
        """A line, as far as there is room for it.

        Raises:
          LineTooLong: there is none.
        """
        line = self._file.readline(self.left + 1)
        del most  # is always more
        self.left -= len(line)
        if self.left < 0:
            raise http.client.LineTooLong("head")
        return line

    def close(self) -> None:
        """Closes it."""
        self._file.close()


class _Body:
    """What is sent."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain

    @functools.cached_property
    def pressed(self) -> bytes:
        """In gzip."""
        return gzip.compress(self.plain, compresslevel=1)


class _Made:
    """What is the same for all who ask within a while; longer, the more it costs."""

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
    return text.encode("ascii")  # as json escapes all else


def _policy(html: str) -> str:
    """Lets run what is in the page, and nothing else."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = [hashlib.sha256(each.encode()).digest() for each in found]
        return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; "
        f"style-src {hashes('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine as itself."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    name = name.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _listening_at(address: str) -> socket.socket:
    try:
        return bound_to(address, _BACKLOG)
    except OSError as error:
        raise errors.InvalidArgumentError(
            f"the page cannot listen at {address}: {error}. Perhaps another process "
            "does; port 0 takes one that is free"
        ) from None
