"""The cluster of a plan: workers, machines and links."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from agn_optax._internal import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of both ends of an exchange.

    The defaults are round numbers for a machine with two cores.

    Args:
      overhead: seconds of an empty exchange over a link without latency.
      endpoint_rate: bytes per second of message and answer that worker and center
        process: copies, frames and gRPC at both ends.
      apply_rate: bytes per second that the center's arithmetic reads and writes.
      encode_rate: bytes per second of contributions, before encoding, that a worker
        encodes. The defaults of ``encode_rate`` and ``decode_rate`` are about those of
        ``quantize`` to 4 bits with error feedback on one core; other codecs are faster
        or slower.
      decode_rate: bytes per second of contributions, before encoding, that a center
        decodes.

    Raises:
      InvalidArgumentError: a constant is not a positive number (``overhead`` may be 0).

    Example:
      >>> from agn_optax import planning
      >>> planning.Machine(overhead=0.001).apply_rate
      5000000000.0
    """

    overhead: float = 0.002
    endpoint_rate: float = 1e9
    apply_rate: float = 5e9
    encode_rate: float = 1e9
    decode_rate: float = 5e9

    def __post_init__(self) -> None:
        check.rate(self.overhead, "overhead", low=0.0, high=math.inf)
        _positive(self, "endpoint_rate", "apply_rate", "encode_rate", "decode_rate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers, their step time, and the links between them and the center.

    Args:
      step_time: seconds of a local step.
      bandwidth: bytes per second of each worker's link, in either direction.
      workers: number of workers.
      latency: seconds of a round trip between a worker and the center.
      center_bandwidth: bytes per second of the center's link in either direction, which
        all workers share; None for the rate of one worker's link. Each shard has a link
        of this rate.
      machine: constants of the two ends of an exchange.
      shards: number of hosts that each hold an equal part of the center.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import planning
      >>> planning.Cluster(step_time=0.8, bandwidth=125e6, workers=8).latency
      0.0
    """

    step_time: float
    bandwidth: float
    workers: int = 1
    latency: float = 0.0
    center_bandwidth: float | None = None
    machine: Machine = dataclasses.field(default_factory=Machine)
    shards: int = 1

    def __post_init__(self) -> None:
        _positive(self, "step_time", "bandwidth")
        if self.center_bandwidth is not None:
            _positive(self, "center_bandwidth")
        check.rate(self.latency, "latency", low=0.0, high=math.inf)
        check.positive_int(self.workers, "workers")
        check.positive_int(self.shards, "shards")

    @property
    def shared(self) -> float:
        """The bytes per second of the center's link, or of each shard's."""
        return self.center_bandwidth or self.bandwidth


def _positive(record: Any, *fields: str) -> None:
    """Raise unless fields are positive numbers."""
    for field in fields:
        value = getattr(record, field)
        check.rate(value, field, low=0.0, high=math.inf, low_open=True)
