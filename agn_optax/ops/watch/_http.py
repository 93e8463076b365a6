"""A strict parser of HTTP/1.1 requests without a body: bytes in, a request out.

The page is read-only, so a request consists of a request line and header fields, and
ends with a blank line. Any other input is rejected. A connection has one request, so no
bytes of a request are taken for another one (request smuggling).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus

from agn_optax.service import address as addresses

MAX_HEAD = 16 << 10  # bytes of a request
_CHUNK = 4 << 10  # bytes
_BLANK = b"\r\n\r\n"

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/(\d\.\d)" % _TOKEN)
# Blanks around a value are stripped after the match: an expression that can match them
# in several ways takes quadratic or cubic time.
_FIELD = re.compile(rb"(%s):([\t\x20-\x7e\x80-\xff]*)" % _TOKEN)
_BLANKS = " \t"
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::\d{1,5})?")
_BARE_NEWLINE = re.compile(rb"(?<!\r)\n")
_ONCE = ("host", "content-length", "transfer-encoding", "authorization")
_METHODS = ("GET", "HEAD")


class RejectedRequestError(Exception):
    """A rejected request.

    Args:
      problem: text of the response.
      status: status of the response.
    """

    def __init__(
        self, problem: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST
    ) -> None:
        super().__init__(problem)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for a path.

    Attributes:
      method: "GET" or "HEAD".
      path: the path, without the query.
      fields: the header fields, by their names in lower case.
    """

    method: str
    path: str
    fields: Mapping[str, str]


def receive(recv: Callable[[int], bytes]) -> bytes:
    """Receive bytes until a request is complete or known to be malformed.

    Args:
      recv: the method of a socket.

    Returns:
      The received bytes; b"" if the connection ended before that.
    """
    received = bytearray()
    while len(received) <= MAX_HEAD:
        chunk = recv(_CHUNK)
        if not chunk:
            return b""
        start = max(0, len(received) - len(_BLANK))  # a blank line may be in two chunks
        received += chunk
        if received.find(_BLANK, start) >= 0 or _BARE_NEWLINE.search(received, start):
            break
    return bytes(received)


def parse(received: bytes, *, is_local: bool) -> Request:
    """Parse a request.

    Args:
      received: the bytes that `receive` returned.
      is_local: whether the page is for this machine only. If so, the Host field must
        be a loopback name or address. A foreign name that resolves to this machine (DNS
        rebinding) would circumvent the browser's same-origin policy.

    Raises:
      RejectedRequestError: the bytes are not a request, or the request is rejected.
    """
    head, blank, rest = received.partition(_BLANK)
    if len(received) > MAX_HEAD:
        too_large = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        if b"\r\n" not in received[:MAX_HEAD]:
            too_large = HTTPStatus.REQUEST_URI_TOO_LONG
        problem = f"a request must have at most {MAX_HEAD} bytes"
        raise RejectedRequestError(problem, too_large)
    line, *lines = head.split(b"\r\n")
    match = _LINE.fullmatch(line)
    if match is None:
        raise RejectedRequestError("this is not an HTTP request")
    method, target, version = (group.decode("ascii") for group in match.groups())
    if version not in ("1.0", "1.1"):
        problem = "this server speaks HTTP/1.1"
        raise RejectedRequestError(problem, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    fields = _fields_of(lines)
    _check_host(fields.get("host", ""), is_local)
    if method not in _METHODS:
        raise RejectedRequestError("use GET or HEAD", HTTPStatus.METHOD_NOT_ALLOWED)
    has_body = fields.get("content-length", "0") != "0"
    if has_body or rest or "transfer-encoding" in fields:
        raise RejectedRequestError("send no body, and one request per connection")
    if not blank or not target.startswith("/"):
        raise RejectedRequestError("name a path, and end with a blank line")
    return Request(method, target.partition("?")[0], fields)


def is_loopback(host: str) -> bool:
    """Return whether a Host field is a loopback name or address."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return addresses.is_loopback(name.strip("[]").rstrip(".").lower())


def _fields_of(lines: list[bytes]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise RejectedRequestError("a line is not a header field")
        name, value = (group.decode("latin-1") for group in match.groups())
        name, value = name.lower(), value.strip(_BLANKS)
        if name in fields and name in _ONCE:
            raise RejectedRequestError(f"there is more than one header field {name}")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def _check_host(host: str, is_local: bool) -> None:
    if not _HOST.fullmatch(host):
        raise RejectedRequestError("give a header field Host with a name or an address")
    if is_local and not is_loopback(host):
        raise RejectedRequestError(
            "this page is for this machine only, as localhost or 127.0.0.1; from "
            "another machine, open it through `ssh -L`",
            HTTPStatus.MISDIRECTED_REQUEST,
        )
