"""Requests of HTTP/1.1 that have no body, strictly read: bytes in, a request out.

A page is read and never written to, so a request is a line and fields, and nothing
follows its blank line. Whatever else comes is refused, and its connection ends: then no
byte of one request can be taken for the next one, and no browser can be made to send a
request with another `Host` than the one it believes to talk to.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus

from agn_optax.service import _address

MOST_HEAD = 16 << 10  # bytes of a request
_CHUNK = 4 << 10  # bytes
_BLANK = b"\r\n\r\n"

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/(\d\.\d)" % _TOKEN)
# Each in one pass: blanks around a value are stripped afterwards, as an expression that
# matches them in several ways takes the square or cube of their number.
_FIELD = re.compile(rb"(%s):([\t\x20-\x7e\x80-\xff]*)" % _TOKEN)
_BLANKS = " \t"
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(?::\d{1,5})?")
_BARE_NEWLINE = re.compile(rb"(?<!\r)\n")
_ONCE = ("host", "content-length", "transfer-encoding", "authorization")
_METHODS = ("GET", "HEAD")


class RefusedRequestError(Exception):
    """A request that is not answered with what it asks for.

    Args:
      status: of the answer.
      why: its text.
    """

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for a path.

    Attributes:
      method: "GET" or "HEAD".
      path: without the query.
      fields: by their names in lower case.
      is_last: whether its connection ends with the answer.
    """

    method: str
    path: str
    fields: Mapping[str, str]
    is_last: bool


def receive(recv: Callable[[int], bytes]) -> bytes:
    """Receive bytes until a request is whole, or cannot become one.

    Args:
      recv: of a socket.

    Returns:
      What came; b"" if the connection ended before that.
    """
    heard = bytearray()
    while len(heard) <= MOST_HEAD:
        more = recv(_CHUNK)
        if not more:
            return b""
        new = max(0, len(heard) - len(_BLANK))  # a blank line may come in two parts
        heard += more
        if heard.find(_BLANK, new) >= 0 or _BARE_NEWLINE.search(heard, new):
            break
    return bytes(heard)


def parse(heard: bytes, *, is_local: bool) -> Request:
    """Return the request that some bytes are.

    Args:
      heard: what `receive` returned.
      is_local: whether the page is for this machine only. Then a browser must have
        reached it by a name of this machine: a name of somebody else's that leads here
        is a way around the browser's rules.

    Raises:
      RefusedRequestError: they are no request, or one that is not answered.
    """
    head, blank, rest = heard.partition(_BLANK)
    if len(heard) > MOST_HEAD:
        raise RefusedRequestError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            if b"\r\n" in heard[:MOST_HEAD]
            else HTTPStatus.REQUEST_URI_TOO_LONG,
            f"a request has at most {MOST_HEAD} bytes here",
        )
    line, *lines = head.split(b"\r\n")
    found = _LINE.fullmatch(line)
    if found is None:
        raise _bad("this is no request of HTTP")
    method, target, version = (each.decode("ascii") for each in found.groups())
    if version not in ("1.0", "1.1"):
        raise RefusedRequestError(
            HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 is spoken here"
        )
    fields = _fields_of(lines)
    _check_host(fields.get("host", ""), is_local)
    if method not in _METHODS:
        raise RefusedRequestError(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD are")
    has_body = fields.get("content-length", "0") != "0"
    if has_body or rest or "transfer-encoding" in fields:
        raise _bad("a request has no body here, and waits for the answer before it")
    if not blank or not target.startswith("/"):
        raise _bad("a request names a path, and ends with a blank line")
    options = fields.get("connection", "").lower().split(",")
    is_last = version == "1.0" or "close" in (each.strip(_BLANKS) for each in options)
    return Request(method, target.partition("?")[0], fields, is_last)


def is_loopback(host: str) -> bool:
    """Return whether a Host field names this machine as itself."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return _address.is_loopback(name.strip("[]").rstrip(".").lower())


def _fields_of(lines: list[bytes]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise _bad("a line is no field of HTTP")
        name, value = (each.decode("latin-1") for each in found.groups())
        name, value = name.lower(), value.strip(_BLANKS)
        if name in fields and name in _ONCE:
            raise _bad(f"there is more than one field {name}")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def _check_host(host: str, is_local: bool) -> None:
    if not _HOST.fullmatch(host):
        raise _bad("a request has one field Host, with a name or an address")
    if is_local and not is_loopback(host):
        raise RefusedRequestError(
            HTTPStatus.MISDIRECTED_REQUEST,
            "this page is for this machine, by the names localhost or 127.0.0.1; "
            "from another one, open it through `ssh -L`",
        )


def _bad(why: str) -> RefusedRequestError:
    return RefusedRequestError(HTTPStatus.BAD_REQUEST, why)
