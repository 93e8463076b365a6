"""The cluster of a plan: workers, machines, links and disks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from agn_optax._internal import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of both ends of an exchange; ``agn-optax plan --measure`` finds them.

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
class Disk:
    """The disk of each host of a center that keeps an `agn_optax.center.Journal`.

    Args:
      bandwidth: bytes per second that the disk writes, or reads.
      sync: additional seconds until written data is durable.
      size: bytes of the journal after which a snapshot replaces it; None for the
        journal's own default, 1 GiB, or four snapshots if they are larger. A journal
        never has more than 100,000 exchanges.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import planning
      >>> planning.Disk(bandwidth=1e9).journal_size(snapshot=4e9, message=4e9)
      16000000000.0
    """

    bandwidth: float
    sync: float = 0.0
    size: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "bandwidth")
        _positive(self, "size", optional=True)
        check.rate(self.sync, "sync", low=0.0, high=math.inf)

    def journal_size(self, snapshot: float, message: float) -> float:
        """Return the journal's maximum bytes; snapshot and message are in bytes."""
        size = self.size or max(JOURNAL_SIZE, SNAPSHOTS * snapshot)
        return min(size, RECORDS * max(1.0, message))


# The defaults of `agn_optax.center.durability`, which this layer does not import.
JOURNAL_SIZE = 1 << 30
SNAPSHOTS = 4
RECORDS = 100_000


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
      disk: disk of a center that keeps a journal; None for no journal.

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
    disk: Disk | None = None

    def __post_init__(self) -> None:
        _positive(self, "step_time", "bandwidth")
        _positive(self, "center_bandwidth", optional=True)
        check.rate(self.latency, "latency", low=0.0, high=math.inf)
        check.positive_int(self.workers, "workers")
        check.positive_int(self.shards, "shards")

    @property
    def shared(self) -> float:
        """The bytes per second of the center's link, or of each shard's."""
        return self.center_bandwidth or self.bandwidth


def _positive(record: Any, *fields: str, optional: bool = False) -> None:
    """Raise unless fields are positive numbers, or None if they are optional."""
    for field in fields:
        value = getattr(record, field)
        if value is not None or not optional:
            check.rate(value, field, low=0.0, high=math.inf, low_open=True)
