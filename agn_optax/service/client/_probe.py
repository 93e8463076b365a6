"""Measurement of the speed of the transports to a center, for each direction."""

from __future__ import annotations

import time
from typing import NamedTuple

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import Target, Transport
from agn_optax.service.transports._connection import Connection
from agn_optax.service.transports._transport import Link
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import MOST_PROBED, in_bytes, of_bytes

_FIRST = 16 << 10  # bytes of the first probe: several packets, or 0.5 s at LEAST_RATE
_FIRST_SHARED = 64 << 10  # the same for "memory": the least that uses shared memory
_LONG = 0.1  # seconds of a probe that is long enough for a measurement
_TIMES = 2  # probes of the last size: an end may have been busy during one of them


class Way(NamedTuple):
    """The measured speed of one transport to a center.

    Attributes:
      transport: name of the transport.
      round_trip: seconds for the shortest message and its answer.
      up, down: bytes per second to the center, and from it; None if nothing was
        transferred in time. Shared memory has one number for both.
    """

    transport: str
    round_trip: float
    up: float | None
    down: float | None


def measure(
    connection: Connection,
    transport: Transport,
    offer: pb.Offer | None,
) -> Way:
    """Measure one transport, for about a second.

    A probe has 16 KiB, or more if 16 KiB take less than 0.1 seconds. The timeout of the
    connection is that of one probe.

    Args:
      connection: the connection to the center.
      transport: the transport to measure.
      offer: the center's offer of that transport; None if it has none.

    Raises:
      OSError: the transport cannot be used.
      CenterUnreachableError: even the shortest message gets no answer in time.
      NotAllowedError: this end does not have the role of a reader.
      ProtocolError: the center's release does not support measurements.
    """
    is_shared, timeout = transport.name == "memory", connection.timeout
    made: list[Link] = []

    def dialled() -> Link:
        if not made or made[-1].done():
            target = Target(connection, offer, Buffers())
            made.append(transport.dial(target))
        return made[-1]

    def took(up: int = 0, down: int = 0) -> float:
        link, until = dialled(), time.monotonic() + timeout
        frame = pb.Frame(probe=pb.Probe(size=up, answer=down))
        with connection.watching(link, until):
            parcel = in_bytes(frame, up, wanted=down)
            begin = time.monotonic()
            link.send(parcel)
            said = link.control()
            if not said.HasField("probed"):
                raise errors.ProtocolError(
                    "expected the answer to a probe, got another frame"
                )
            if down:
                link.buffer(of_bytes(down), "an answer to a probe")
            return time.monotonic() - begin

    def nothing() -> float:
        dialled()  # outside of the try: its errors are not about the message
        try:
            return took()
        except TimeoutError:
            raise errors.CenterUnreachableError(
                f"the shortest message was not answered within {timeout:g} s"
            ) from None

    def rate(up: int, down: int) -> float | None:
        """Return bytes per second of the direction that is 1; None if none arrived."""
        rates: list[float] = []
        size, times = _FIRST_SHARED if is_shared else _FIRST, 0
        while times < _TIMES:
            trips.append(nothing())  # also waits for the rate limit of the last probe
            try:
                seconds = took(up * size, down * size)
            except TimeoutError:
                return rates[-1] if rates else None
            rates.append(size / max(seconds - min(trips), 1e-9))
            if seconds >= _LONG or size == MOST_PROBED:
                times += 1
            else:
                size, times = min(4 * size, MOST_PROBED), 0
        return max(rates[-_TIMES:])

    try:
        trips = [nothing() for _ in range(3)]
        if is_shared:
            both = rate(1, 1)
            return Way(transport.name, min(trips), both, both)
        up, down = rate(1, 0), None
        try:
            down = rate(0, 1)
        except errors.CenterUnreachableError:
            if up is not None:
                raise  # if `up` is None, the probe that got stuck may block this one
        return Way(transport.name, min(trips), up, down)
    finally:
        for link in made:
            link.cancel()
