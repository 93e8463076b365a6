"""The transfer of an exchange over a link, and the link that was expected."""

from __future__ import annotations

import dataclasses
import socket
import sys
from typing import NamedTuple

from agn_optax import errors
from agn_optax._internal import check


@dataclasses.dataclass(frozen=True)
class ExpectedLink:
    """The expected link between a worker and its center.

    A worker warns if they travel in another way, or if five exchanges in a row take ten
    times as long as expected and at least 0.1 s longer (`agn_optax.center.Thresholds`
    changes the ten). None expects nothing.

    Args:
      rate: bytes per second that the link moves, a positive number, without its round
        trip, which is measured. Without a rate, exchanges are compared with the fastest
        earlier one of the worker.
      interface: name of the network interface, such as ``"ib0"``, for messages that
        leave this process over a network. Only known on Linux.
      transport: name of the transport: ``"memory"``, ``"socket"`` or ``"grpc"``.

    Raises:
      InvalidTypeError: ``rate`` is not a number.
      InvalidArgumentError: ``rate`` is not positive, this machine has no such
        interface, or the system does not tell which interface a connection uses.

    Example:
      >>> from agn_optax import service
      >>> service.ExpectedLink(rate=10e9 / 8, transport="socket")
      ExpectedLink(rate=1250000000.0, interface=None, transport='socket')
    """

    rate: float | None = None
    interface: str | None = None
    transport: str | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            check.rate(self.rate, "rate", low=0.0, high=float("inf"), low_open=True)
        if self.interface is None:
            return
        if sys.platform != "linux":
            raise errors.InvalidArgumentError(
                f"interface={self.interface!r} cannot be compared: {sys.platform} does "
                "not say which interface a connection uses"
            )
        names = [name for _, name in socket.if_nameindex()]
        if self.interface not in names:
            raise errors.InvalidArgumentError(
                f"interface must be one of this machine's, which are {names}, got "
                f"{self.interface!r}"
            )


class Transfer(NamedTuple):
    """The messages of one exchange on their way over one connection."""

    address: str  # of the center
    transport: str  # "memory", "socket" or "grpc"
    # Name of the network interface; "" if no network is used, None if unknown.
    interface: str | None
    nbytes: int  # of the message and its answer
    seconds: float  # without the time for which the center had the message
    expected: ExpectedLink = ExpectedLink()
    # Why a direct connection, which the center offers, was not made; "" if it was.
    detour: str = ""
    round_trip: float = 0.0  # seconds of the fastest call so far; 0 if unknown
