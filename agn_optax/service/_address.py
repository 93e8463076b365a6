"""Where a center listens and how it is reached."""

from __future__ import annotations

import ipaddress
from typing import Any

from agn_optax import errors

EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 hosts of one on all networks
PROTOCOL = 2  # version of center.proto
SERVICE = "agn_optax.center.v1.Center"
# Seconds between two Waiting packets, by which a worker knows that the center is there.
WAITING_INTERVAL = 2.0
_HERE = "this machine"
_MAX_MESSAGE = 64 << 20  # bytes; of gRPC, for descriptions of very many leaves

# Both sides ping a silent connection, so that a host that vanished is noticed.
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
]


def client_options(address: str) -> list[tuple[str, Any]]:
    """Of a channel."""
    return [
        *OPTIONS,
        ("grpc.max_receive_message_length", _MAX_MESSAGE),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # What an attempt may take, greetings of TCP, TLS and HTTP included; gRPC calls
        # it a backoff, but one that is refused is over at once.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # One that takes the place of one that went silent must not share its socket.
        ("grpc.use_local_subchannel_pool", 1),
        # No proxy of the environment is on the way to this machine.
        ("grpc.enable_http_proxy", int(not is_local(address))),
    ]


def check(address: Any) -> str:
    """``address`` if it is "host:port", "[ipv6]:port" or "unix:path".

    Raises:
      InvalidArgumentError: it is not.
    """
    wanted = (
        'an address must be "host:port", "[ipv6 address]:port" or "unix:path", '
        f"got {address!r}"
    )
    if not isinstance(address, str):
        raise errors.InvalidTypeError(wanted)
    if address.startswith("unix:") and len(address) > len("unix:"):
        return address
    host, _, port = address.rpartition(":")
    is_host = ":" not in host or (host.startswith("[") and host.endswith("]"))
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (host and is_host and is_port):
        raise errors.InvalidArgumentError(wanted)
    return address


def is_fixed(address: str) -> bool:
    """Whether it is the same in the next process: it asks for no free port."""
    return not address.endswith(":0")


def is_local(address: str) -> bool:
    """Whether nothing leaves this machine."""
    if address.startswith("unix:"):
        return True
    return is_loopback(host(address))


def is_loopback(name: str) -> bool:
    """Return whether a name or an IP address is one of this machine for itself."""
    try:
        return _ip(name).is_loopback
    except ValueError:
        return name == "localhost"


def is_everywhere(address: str) -> bool:
    """Whether who listens there does so at all addresses of its host."""
    if address.startswith("unix:"):
        return False
    try:
        return ipaddress.ip_address(host(address)).is_unspecified
    except ValueError:
        return False


def host_of(network: str) -> str:
    """The address of one host, of what `network` makes of it; "" if it says less."""
    if network == _HERE:
        return "127.0.0.1"
    try:
        return str(ipaddress.IPv4Address(network))
    except ValueError:
        return ""


def path(address: str) -> str:
    """Of the file of a Unix socket."""
    return address.removeprefix("unix:").removeprefix("//")


def host(address: str) -> str:
    """Of an address with a port, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def network(name: str) -> str:
    """What is one host, of the IP address of a peer; "" is a Unix socket.

    All of this machine is one. An IPv6 host has as many addresses as it likes, so its
    /64 counts, which it may share with others.
    """
    try:
        address = _ip(name or "127.0.0.1")
    except ValueError:
        return name
    if address.is_loopback:
        return _HERE
    if address.version == 4 or address.is_link_local:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _ip(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IP address, of IPv4 where IPv6 only writes it otherwise.

    Raises:
      ValueError: it is none.
    """
    address = ipaddress.ip_address(name)
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
