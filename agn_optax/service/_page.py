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
from agn_optax.service import _address, _http, _metrics
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
_PATIENCE = 10.0  # seconds for a request, or without one; and in which an answer moves
_FRESH = 0.5  # seconds for which all get the same
_SHARE = 0.05  # of the time, in which it is made
_LINGERING = 1.0  # seconds for whoever still sends to hear why nobody reads it
_MOST_UNREAD = 1 << 20  # bytes that are thrown away meanwhile
_LEAST_PRESSED = 1 << 12  # bytes

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
        self._threads.keep_running(self._accept, "agn-optax page")

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
            request.refuse(HTTPStatus.NOT_FOUND, "/, /state.json and /metrics are")

    def _say(
        self, request: _Request, kind: str, body: _Body, policy: str = _NOTHING
    ) -> None:
        more, sent = {"Content-Security-Policy": policy}, body.plain
        accepted = request.headers.get("accept-encoding", "")
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
        said = request.headers.get("authorization", "")
        if self.servicer.door.access is not None and not (said or certificate):
            self._admit_host(request)  # a page asks so before it has a token
            error = errors.NotAllowedError("this needs a token of this center")
            error.is_known = False
            raise error
        try:
            return self.servicer.known(said, certificate, request.host)
        except errors.NotAllowedError:
            request.came_in()  # for it was counted among those who guess
            raise

    def _admit_host(self, request: _Request) -> None:
        self.servicer.admit_host(request.host)
        request.came_in()

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
            except Exception as error:  # no more threads, or whatever it is
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
                    self.servicer.admit_host(host)  # a handshake costs most
                    end = self._context().wrap_socket(
                        end, server_side=True, do_handshake_on_connect=False
                    )
                    with self._lock:
                        self._open[number] = end
                    with self.transfers.under_way(lambda: shut(end), 0, _PATIENCE):
                        end.do_handshake()
                request = _Request(end, host, self)
                while request.answer():
                    pass
        finally:
            self._forget(number, end if end.fileno() >= 0 else raw)


class _Request:
    """Requests of one connection, one after the other.

    A connection goes on after an answer with what was asked for, and after no other.

    Args:
      end: of the connection.
      host: whence it comes.
      page: answers.

    Attributes:
      headers: of the request, by their names in lower case.
    """

    def __init__(self, end: socket.socket, host: str, page: Page) -> None:
        self.connection, self.host, self.page = end, host, page
        self.headers: Mapping[str, str] = {}
        self._method, self._is_last = "", True
        self._has_come_in = False

    def came_in(self) -> None:
        """Note that a request was paid for: its connection counts no more."""
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
        """Send an answer."""
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
        # A socket that is closed with bytes unread takes back what it has sent.
        with self._under_way(0, _LINGERING):
            self.connection.shutdown(socket.SHUT_WR)
            left = _MOST_UNREAD
            while left > 0 and (unread := self.connection.recv(1 << 16)):
                left -= len(unread)

    @contextlib.contextmanager
    def _under_way(self, size: int, patience: float | None = None) -> Iterator[None]:
        """End the connection if that takes too long."""

        def cut() -> None:
            shut(self.connection)

        patience = _PATIENCE if patience is None else patience
        with self.page.transfers.under_way(cut, size, patience):
            yield


# What is said beside an error.
_BESIDE: dict[HTTPStatus, dict[str, str]] = {
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": 'Bearer realm="agn_optax"'},
    HTTPStatus.SERVICE_UNAVAILABLE: {"Retry-After": "1"},
    HTTPStatus.METHOD_NOT_ALLOWED: {"Allow": "GET, HEAD"},
}


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


def _listening_at(address: str) -> socket.socket:
    try:
        return bound_to(address, _BACKLOG)
    except OSError as error:
        raise errors.InvalidArgumentError(
            f"the page cannot listen at {address}: {error}. Perhaps another process "
            "does; port 0 takes one that is free"
        ) from None
