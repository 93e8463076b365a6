"""The proxy between this machine and a center, as `doctor` checks it."""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import urllib.parse
from typing import NamedTuple

from agn_optax.service import address

# In gRPC's order of preference; gRPC reads only the lower-case names.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
_LONGEST_LINE = 1024  # bytes of the first line of a proxy's answer


class Proxy(NamedTuple):
    """A proxy that gRPC goes through.

    Attributes:
      variable: environment variable that names the proxy.
      host, port: address of the proxy.
      user: "user:password" for the proxy; "" for none.
    """

    variable: str
    host: str
    port: int
    user: str


def proxy_of(center: str) -> Proxy | None:
    """Return the proxy that gRPC uses for an address; None if it connects directly."""
    if address.is_local(center):
        return None
    variable = next((name for name in _PROXIES if os.environ.get(name)), None)
    if variable is None:
        return None
    said = urllib.parse.urlsplit(os.environ[variable])
    if said.scheme != "http" or not said.hostname:  # gRPC supports no other scheme
        return None
    exceptions = next((os.environ[e] for e in _EXCEPTIONS if os.environ.get(e)), "")
    if any(_is_in(address.host(center), each) for each in exceptions.split(",")):
        return None
    user = said.netloc.rpartition("@")[0]
    return Proxy(variable, said.hostname, said.port or 80, urllib.parse.unquote(user))


def why_not_through(proxy: Proxy, center: str, timeout: float) -> str:
    """Return why a proxy does not connect to a center; "" if it does."""
    lines = [f"CONNECT {center} HTTP/1.1", f"Host: {center}"]
    if proxy.user:
        user = base64.b64encode(proxy.user.encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {user}")
    try:
        with socket.create_connection((proxy.host, proxy.port), timeout) as end:
            end.sendall("\r\n".join([*lines, "", ""]).encode())
            answer = b""
            while b"\n" not in answer and len(answer) < _LONGEST_LINE:
                more = end.recv(_LONGEST_LINE)
                if not more:
                    return "it closed the connection without an answer"
                answer += more
    except OSError as error:
        return str(error)
    line = answer.splitlines()[0].decode("ascii", "replace")
    return "" if line.split()[1:2] == ["200"] else f"it answered {line!r}"


def _is_in(host: str, entry: str) -> bool:
    """Return whether an entry of ``no_proxy`` matches a host, as gRPC reads it."""
    entry = entry.strip()
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return bool(entry) and host.lower().endswith(entry.lower())
