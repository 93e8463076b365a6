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
from agn_optax.service.wire._frames import MAX_PROBE, bytes_schema, random_frame

_FIRST_SIZE = 16 << 10  # bytes of the first probe; they take 0.5 s at MIN_RATE
_FIRST_SHARED_SIZE = 64 << 10  # the same for "memory": the smallest shared buffer
_MIN_SECONDS = 0.1  # of a probe that is long enough for a measurement
_LONG_PROBES = 2  # number of long probes: an end may have been busy during one of them


class TransportSpeed(NamedTuple):
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
    connection: Connection, transport: Transport, offer: pb.Offer | None
) -> TransportSpeed:
    """Measure one transport, for about a second.

    The first probe has 16 KiB (64 KiB in memory); the next ones are larger until one
    takes 0.1 s or has 4 MiB. Each probe has the timeout of the connection.

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
    links: list[Link] = []

    def open_link() -> Link:
        if not links or links[-1].is_done():
            target = Target(connection, offer, Buffers())
            links.append(transport.dial(target))
        return links[-1]

    def measure_probe(up: int = 0, down: int = 0) -> float:
        link, until = open_link(), time.monotonic() + timeout
        header = pb.Header(probe=pb.Probe(size=up, answer=down))
        with connection.watching(link, until):
            frame = random_frame(header, up, answer_size=down)
            begin = time.monotonic()
            link.send(frame)
            if not link.read_header().HasField("probed"):
                raise errors.ProtocolError(
                    "expected the answer to a probe, got another frame"
                )
            if down:
                link.read_buffer(bytes_schema(down), "an answer to a probe")
            return time.monotonic() - begin

    def measure_round_trip() -> float:
        open_link()  # outside of the try: its timeouts are not about the message
        try:
            return measure_probe()
        except TimeoutError:
            raise errors.CenterUnreachableError(
                f"the shortest message was not answered within {timeout:g} s"
            ) from None

    def rate(up: int, down: int) -> float | None:
        """Return bytes per second in the directions that are 1; None if none came."""
        rates: list[float] = []
        size, long_probes = _FIRST_SHARED_SIZE if is_shared else _FIRST_SIZE, 0
        while long_probes < _LONG_PROBES:
            # This also waits for the rate limit of the last probe.
            round_trips.append(measure_round_trip())
            try:
                seconds = measure_probe(up * size, down * size)
            except TimeoutError:
                return rates[-1] if rates else None
            rates.append(size / max(seconds - min(round_trips), 1e-9))
            if seconds >= _MIN_SECONDS or size == MAX_PROBE:
                long_probes += 1
            else:
                size, long_probes = min(4 * size, MAX_PROBE), 0
        return max(rates[-_LONG_PROBES:])

    try:
        round_trips = [measure_round_trip() for _ in range(3)]
        if is_shared:
            speed = rate(1, 1)
            return TransportSpeed(transport.name, min(round_trips), speed, speed)
        up, down = rate(1, 0), None
        try:
            down = rate(0, 1)
        except errors.CenterUnreachableError:
            if up is not None:
                raise  # if `up` is None, the probe that got stuck may block this one
        return TransportSpeed(transport.name, min(round_trips), up, down)
    finally:
        for link in links:
            link.cancel()
