"""The times of exchanges by their parts: pure arithmetic.

The docstring of `agn_optax.ops.planning` has the equations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from agn_optax.ops.planning._cluster import Cluster


class Work(NamedTuple):
    """Bytes of one exchange."""

    message: int
    answer: int
    applied: int  # read and written by the center's arithmetic
    coded: int = 0  # of the contribution before encoding, if that takes time


class Times(NamedTuple):
    """The seconds of an exchange, by its parts."""

    exchange: dict[str, float]  # parts that follow one another
    service: dict[str, float]  # parts at the center, which run side by side
    workers: int  # number of workers that take turns at the center

    @property
    def alone(self) -> float:
        """The seconds of an exchange if no other one is served meanwhile."""
        return sum(self.exchange.values())

    @property
    def occupied(self) -> float:
        """The seconds for which an exchange occupies the center."""
        return max(self.service.values())

    @property
    def longest(self) -> float:
        """The seconds of an exchange if all workers take turns."""
        return max(self.alone, self.workers * self.occupied)

    @property
    def bottleneck(self) -> str:
        """The longest part of an exchange if all workers take turns."""
        parts = self.service if self.longest > self.alone else self.exchange
        return max(parts, key=lambda name: parts[name])

    def hidden_period(self, step_time: float) -> int:
        """Return the number of local steps that hide an exchange."""
        return max(1, math.ceil(self.longest / step_time))


def exchange_times(work: Work, cluster: Cluster) -> Times:
    """Return the times of an exchange between a worker and the center."""
    machine, k = cluster.machine, cluster.shards
    both = work.message + work.answer
    center_rate = k * cluster.shared
    link = "worker link" if cluster.bandwidth <= center_rate else "center link"
    center_ends = (machine.overhead + both / (k * machine.endpoint_rate)) / 2
    arithmetic = work.applied / (k * machine.apply_rate)
    encoding = work.coded / machine.encode_rate
    decoding = 2 * work.coded / (k * machine.decode_rate)
    # One processor does all of this, one after the other.
    at_center = {"ends": center_ends, "arithmetic": arithmetic, "codec": decoding}
    processor = max(at_center, key=lambda name: at_center[name])
    exchange = {
        "latency": cluster.latency,
        link: both / min(cluster.bandwidth, center_rate),
        "ends": (1 + k) * center_ends,  # the worker's end serves all shards
        "arithmetic": arithmetic,
        "codec": encoding + decoding,
    }
    service = {
        "center link": max(work.message, work.answer) / center_rate,
        processor: sum(at_center.values()),
    }
    return Times(exchange, service, cluster.workers)
