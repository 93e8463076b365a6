"""The network interface that a connection uses, by the address of its near end."""

from __future__ import annotations

import array
import contextlib
import ipaddress
import pathlib
import socket
import struct
import sys
from collections.abc import Iterator

from agn_optax.service import _address

if sys.platform == "linux":
    import fcntl

_IPV6 = pathlib.Path("/proc/net/if_inet6")
_SIOCGIFCONF = 0x8912  # of Linux: the IPv4 addresses of all interfaces
_MAX_ADDRESSES = 256
_IFREQ = struct.Struct("16s4x4s16x")  # name and IPv4 address, on 64-bit systems


def interface_of(local: str) -> str | None:
    """Return the name of the interface that has an IP address of this machine.

    Args:
      local: the address; "" for a connection without a network.

    Returns:
      The name; "" without a network, and None if the system does not tell it.
    """
    if not local:
        return ""
    if sys.platform != "linux":
        return None
    address = _address.ip(local)
    if address.is_loopback:
        return "lo"
    with contextlib.suppress(OSError):
        return next((name for name, ip in _addresses() if ip == address), None)
    return None


def source_address(center: str) -> str:
    """Return this machine's IP address on the route to a center, without any packet.

    Python's gRPC does not say which address its connections have, so this asks the
    system how it would reach the center.
    """
    if center.startswith("unix:"):
        return ""
    host, port = _address.host(center), int(center.rpartition(":")[2])
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as sock:
        sock.connect(target)
        return str(sock.getsockname()[0])


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield the interfaces of this machine with their addresses, on Linux."""
    found = array.array("B", bytes(_MAX_ADDRESSES * _IFREQ.size))
    start, size = found.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        filled = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", size, start))
    (size, _) = struct.unpack("iP", filled)
    for name, packed in _IFREQ.iter_unpack(found.tobytes()[:size]):
        label = name.partition(b"\0")[0].decode()
        yield label.partition(":")[0], ipaddress.IPv4Address(packed)
    if _IPV6.exists():
        for line in _IPV6.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(int(digits, 16))
