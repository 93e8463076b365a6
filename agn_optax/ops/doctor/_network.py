"""The network between this machine and a center, as `doctor` checks it."""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import urllib.parse
from typing import NamedTuple

from agn_optax import errors
from agn_optax.service import Observer, address, handshake, path

# In gRPC's order of preference; gRPC reads only the lower-case names.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
_LONGEST_LINE = 1024  # bytes of the first line of a proxy's answer
_OPTIONS = 12  # bytes of TCP's timestamps, which nearly all connections have
_HEADERS = {4: 40, 6: 60}  # bytes of IP and TCP
_SEGMENTS = (1400, 1360, 1300, 1220, 1100, 1000, 536)  # bytes: sizes to try
_PATIENCE = 2.0  # seconds to wait for packets of one size
_MOST_INTERFACES = 8  # interfaces to try


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


def path_to(center: str, timeout: float) -> path.Path | None:
    """Return the path of a connection to gRPC's port; None if it fails or is no TCP."""
    try:
        with handshake.connected(center, timeout) as end:
            return path.path_of(end)
    except OSError:
        return None


def interface_of(own: path.Path) -> path.Interface | None:
    """Return the interface that a connection leaves by; None if it is unknown."""
    for each in path.interfaces():
        if own.source in each.addresses:
            return each
    return None


def others(own: path.Path, route: path.Interface | None) -> list[path.Interface]:
    """Return other interfaces that the same packets might leave by."""
    version = ipaddress.ip_address(own.source.partition("%")[0]).version
    return [
        each
        for each in path.interfaces()
        if not each.is_loopback
        and (route is None or each.name != route.name)
        and any(_is_global(one, version) for one in each.addresses)
    ][:_MOST_INTERFACES]


def _is_global(text: str, version: int) -> bool:
    """Return whether packets to other networks may have this source address."""
    found = ipaddress.ip_address(text)
    return found.version == version and not found.is_link_local


def headers(own: path.Path) -> int:
    """Return the bytes of a packet that are not data."""
    version = ipaddress.ip_address(own.source.partition("%")[0]).version
    return _HEADERS[version] + _OPTIONS


def largest_segment(center: Observer, own: path.Path, timeout: float) -> int | None:
    """Return the largest of some segment sizes, in bytes, that passes both ways.

    None if no size passes, or no measurement is possible.
    """
    for segment in _SEGMENTS:
        if segment >= own.segment:
            continue
        route = path.Route(segment=segment)
        try:
            way = center.measure("socket", route=route, timeout=min(timeout, _PATIENCE))
        except errors.AgnOptaxError:
            continue
        if way.up and way.down:
            return segment
    return None
