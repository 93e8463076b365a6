"""Addresses of centers, and the settings of gRPC channels to them."""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import Any

from agn_optax import errors

EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 hosts of addresses on all networks
PROTOCOL = 1  # version of center.proto
SERVICE = "agn_optax.center.v1.Center"
# Seconds between two Waiting frames, which show a worker that the center is alive.
WAITING_INTERVAL = 2.0
_HERE = "this machine"
_MAX_PATH = 107 if sys.platform == "linux" else 103  # bytes of a Unix socket's path
_MAX_MESSAGE = 64 << 20  # bytes of a gRPC message; descriptions can have many leaves

# Both sides ping a silent connection, to notice when the other host has vanished.
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
]


def client_options(address: str) -> list[tuple[str, Any]]:
    """Return the gRPC options of a client's channel to an address."""
    return [
        *OPTIONS,
        ("grpc.max_receive_message_length", _MAX_MESSAGE),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # In spite of its name, the timeout of one attempt to connect, with the
        # handshakes of TCP, TLS and HTTP. A refused connection fails before that.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # A channel that replaces a silent channel must open a new socket.
        ("grpc.use_local_subchannel_pool", 1),
        # Connections within this machine ignore a proxy set in the environment.
        ("grpc.enable_http_proxy", int(not is_local(address))),
    ]


def check(address: Any) -> str:
    """Return ``address`` if it is "host:port", "[ipv6]:port" or "unix:path".

    Raises:
      InvalidTypeError: it is not a string.
      InvalidArgumentError: it is a string of another form, or the path is longer than
        the system allows.
    """
    wanted = (
        'an address must be "host:port", "[ipv6 address]:port" or "unix:path", '
        f"got {address!r}"
    )
    if not isinstance(address, str):
        raise errors.InvalidTypeError(wanted)
    if address.startswith("unix:") and len(address) > len("unix:"):
        length = len(os.fsencode(path(address)))
        if length > _MAX_PATH:
            raise errors.InvalidArgumentError(
                f"the path of a Unix socket can have {_MAX_PATH} bytes, and the one of "
                f"{address!r} has {length}"
            )
        return address
    host, _, port = address.rpartition(":")
    is_host = ":" not in host or (host.startswith("[") and host.endswith("]"))
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (host and is_host and is_port):
        raise errors.InvalidArgumentError(wanted)
    return address


def is_fixed(address: str) -> bool:
    """Return whether an address names its port, instead of asking for a free one."""
    return not address.endswith(":0")


def is_local(address: str) -> bool:
    """Return whether traffic to an address stays on this machine."""
    if address.startswith("unix:"):
        return True
    return is_loopback(host(address))


def is_loopback(name: str) -> bool:
    """Return whether a host's name or IP address is a loopback address."""
    try:
        return ip(name).is_loopback
    except ValueError:
        return name == "localhost"


def path(address: str) -> str:
    """Return the path of the file of a Unix socket's address."""
    return address.removeprefix("unix:").removeprefix("//")


def host(address: str) -> str:
    """Return the host of an address with a port, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def network(name: str) -> str:
    """Return the name under which a peer's host is counted, such as by rate limits.

    All loopback addresses, and "" for a Unix socket, are one host. An IPv6 host can
    have any number of addresses, so its /64 network is counted instead, which it may
    share with other hosts.

    Args:
      name: IP address of the peer; "" for a Unix socket.
    """
    try:
        address = ip(name or "127.0.0.1")
    except ValueError:
        return name
    if address.is_loopback:
        return _HERE
    if address.version == 4 or address.is_link_local:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def ip(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IP address; an IPv4-mapped IPv6 address becomes the IPv4 address.

    Raises:
      ValueError: ``name`` is not an IP address.
    """
    address = ipaddress.ip_address(name)
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
