"""The network path of a TCP connection: interface, packet size, segment size.

Only Linux provides all of it; on other systems less is known.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

if sys.platform != "win32":
    import fcntl

_IS_LINUX = sys.platform == "linux"
# Constants of Linux that Python's socket module does not have.
_IP_MTU, _IPV6_MTU = 14, 24
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_RTM_GETADDR, _NLM_F_DUMP_REQUEST, _NLMSG_DONE = 22, 0x301, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")  # of netlink: length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type


class Route(NamedTuple):
    """Settings of a TCP connection that the system would otherwise choose.

    Attributes:
      interface: network interface by which packets leave; "" for any.
      segment: maximum size of a TCP segment in bytes, in each direction; 0 for the
        system's choice.
    """

    interface: str = ""
    segment: int = 0


class Path(NamedTuple):
    """The path of a connection, as far as the system knows it.

    Attributes:
      source: IP address of this end.
      segment: size in bytes of the TCP segments that this end sends; 0 if unknown.
      mtu: maximum size in bytes of a packet on the whole path, as far as the system has
        discovered it; 0 if unknown.
    """

    source: str
    segment: int = 0
    mtu: int = 0


class Interface(NamedTuple):
    """A network interface, physical or virtual.

    Attributes:
      name: name of the interface.
      mtu: maximum size of a packet in bytes.
      mbit: nominal speed in Mbit/s; None if the driver reports none.
      is_loopback: whether it is a loopback interface.
      addresses: IP addresses of the interface.
    """

    name: str
    mtu: int
    mbit: int | None
    is_loopback: bool
    addresses: tuple[str, ...]


def connected(host: str, port: int, timeout: float, route: Route) -> socket.socket:
    """Return a socket that is connected on a route.

    Raises:
      OSError: no connection can be made, or this system does not support the route.
    """
    failed: OSError | None = None
    for kind in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        family, sort, protocol, _, where = kind
        with contextlib.ExitStack() as closing:
            try:
                end = closing.enter_context(socket.socket(family, sort, protocol))
                end.settimeout(timeout)
                if route.interface:
                    if not _IS_LINUX:
                        raise OSError("only Linux connects by a chosen interface")
                    name = route.interface.encode() + b"\0"
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
                if route.segment:
                    option = socket.IPPROTO_TCP, socket.TCP_MAXSEG, route.segment
                    end.setsockopt(*option)
                end.connect(where)
            except OSError as error:
                failed = error
                continue
            closing.pop_all()
            return end
    raise failed or OSError(f"{host} has no address")


def path_of(end: socket.socket) -> Path | None:
    """Return the path of a connected socket; None if it is not a TCP socket."""
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    source = end.getsockname()[0]
    if not _IS_LINUX:
        return Path(source)
    mtu = (socket.IPPROTO_IP, _IP_MTU)
    if end.family == socket.AF_INET6 and not source.startswith("::ffff:"):
        mtu = (socket.IPPROTO_IPV6, _IPV6_MTU)
    segment = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    return Path(source.removeprefix("::ffff:"), segment, end.getsockopt(*mtu))


def interfaces() -> list[Interface]:
    """Return this machine's interfaces that are up and have an address; Linux only."""
    if not _IS_LINUX:
        return []
    found = []
    own: dict[int, list[str]] = {}
    for index, address in _addresses():
        own.setdefault(index, []).append(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def asked(what: int, name: str) -> int:
            request = struct.pack("16si20x", name.encode(), 0)
            answer = fcntl.ioctl(any_socket, what, request)
            return int(struct.unpack("16si20x", answer)[1])

        for index, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface may have been removed
                flags = asked(_SIOCGIFFLAGS, name) & 0xFFFF
                if flags & _IFF_UP and index in own:
                    mtu = asked(_SIOCGIFMTU, name)
                    is_loopback = bool(flags & _IFF_LOOPBACK)
                    addresses = tuple(own[index])
                    speed = _speed(name)
                    found.append(Interface(name, mtu, speed, is_loopback, addresses))
    return found


def _speed(name: str) -> int | None:
    try:
        said = int(pathlib.Path("/sys/class/net", name, "speed").read_text())
    except (OSError, ValueError):
        return None
    return said if said > 0 else None


def _addresses() -> Iterator[tuple[int, str]]:
    """Yield this machine's IP addresses, each after the number of its interface."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
        size = _HEADER.size + _ADDRESS.size
        head = _HEADER.pack(size, _RTM_GETADDR, _NLM_F_DUMP_REQUEST, 1, 0)
        kernel.send(head + _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        while True:
            said = memoryview(kernel.recv(1 << 16))
            while said:
                length, kind, *_ = _HEADER.unpack_from(said)
                if kind == _NLMSG_DONE:
                    return
                if kind == _RTM_GETADDR - 2:  # RTM_NEWADDR
                    yield from _in_message(said[_HEADER.size : length])
                said = said[_aligned(length) :]


def _in_message(said: memoryview) -> Iterator[tuple[int, str]]:
    family, _, _, _, index = _ADDRESS.unpack_from(said)
    found: dict[int, str] = {}
    said = said[_ADDRESS.size :]
    while said:
        length, kind = _ATTRIBUTE.unpack_from(said)
        if kind in (_IFA_ADDRESS, _IFA_LOCAL):
            raw = bytes(said[_ATTRIBUTE.size : length])
            found[kind] = socket.inet_ntop(family, raw)
        said = said[_aligned(length) :]
    # On a point-to-point link, IFA_ADDRESS is the address of the other end.
    if (own := found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)) is not None:
        yield index, own


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
