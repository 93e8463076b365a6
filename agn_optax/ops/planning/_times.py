"""The times of exchanges by their parts, and the load of centers: pure arithmetic.

The docstring of `agn_optax.ops.planning` has the equations.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import NamedTuple

from agn_optax.ops.planning._cluster import Cluster, Disk
from agn_optax.ops.planning._cost import JournalCost, Load

_MOST_SHARDS = 1 << 20


class Work(NamedTuple):
    """Bytes of one exchange."""

    message: int
    answer: int
    applied: int  # read and written by the center's arithmetic
    snapshot: int  # of the center with its optimizer's state
    coded: int = 0  # of the contribution before encoding, if that takes time


class Times(NamedTuple):
    """The seconds of an exchange, by its parts."""

    exchange: dict[str, float]  # parts that follow one another
    service: dict[str, float]  # parts at the center, which run side by side

    @property
    def alone(self) -> float:
        """The seconds of an exchange if no other one is served meanwhile."""
        return sum(self.exchange.values())

    @property
    def occupied(self) -> float:
        """The seconds for which an exchange occupies the center."""
        return max(self.service.values())

    def longest(self, workers: int) -> float:
        """Return the seconds of an exchange if ``workers`` take turns."""
        return max(self.alone, workers * self.occupied)

    def bottleneck(self, workers: int) -> str:
        """Return the longest part of an exchange if ``workers`` take turns."""
        served = workers * self.occupied > self.alone
        parts = self.service if served else self.exchange
        return max(parts, key=lambda name: parts[name])


def exchange_times(work: Work, cluster: Cluster) -> Times:
    """Return the times of an exchange of a worker with the center."""
    machine, k, disk = cluster.machine, cluster.shards, cluster.disk
    both = work.message + work.answer
    is_workers = cluster.bandwidth <= k * cluster.shared
    wide = both / min(cluster.bandwidth, k * cluster.shared)
    center_ends = (machine.overhead + both / (k * machine.endpoint_rate)) / 2
    ends = (1 + k) * center_ends  # the worker's end serves all shards
    arithmetic = work.applied / (k * machine.apply_rate)
    encoding, decoding = coding(work, cluster)
    # One processor does all of this, one after the other.
    at_center = {"ends": center_ends, "arithmetic": arithmetic, "codec": decoding}
    processor = max(at_center, key=lambda name: at_center[name])
    exchange = {
        "latency": cluster.latency,
        "worker link" if is_workers else "center link": wide,
        "ends": ends,
        "arithmetic": arithmetic,
        "codec": encoding + decoding,
    }
    service = {
        "center link": max(work.message, work.answer) / (k * cluster.shared),
        processor: sum(at_center.values()),
    }
    if disk is not None:
        exchange["journal"] = disk.sync + work.message / (k * disk.bandwidth)
        service["journal"] = bytes_written(work, k, disk) / disk.bandwidth
    return Times(exchange, service)


def coding(work: Work, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds to encode at the worker, and to decode twice at the center."""
    machine = cluster.machine
    decoded = 2 * work.coded / cluster.shards
    return work.coded / machine.encode_rate, decoded / machine.decode_rate


def codec_pays_below(work: Work, plain: Work, cluster: Cluster) -> float | None:
    """Return the bytes per second of a link below which a codec pays.

    ``plain`` is the work without the codec. None means over every link.
    """
    saved = plain.message + plain.answer - work.message - work.answer
    if saved <= 0:
        return 0.0

    def without_links(work: Work) -> float:
        times = exchange_times(work, cluster).exchange
        return sum(times[name] for name in times if not name.endswith("link"))

    added = without_links(work) - without_links(plain)
    return saved / added if added > 0 else None


def bytes_written(work: Work, shards: int, disk: Disk) -> float:
    """Return the bytes that a host writes for an exchange, snapshots included."""
    message, snapshot = work.message / shards, work.snapshot / shards
    return message * (1 + snapshot / disk.journal_size(snapshot, message))


def bottleneck(
    times: Times, workers: int, hidden: int, given_period: int | None
) -> str:
    """Return the part that limits the period, or that a given period does not hide."""
    is_free = hidden == 1 if given_period is None else given_period >= hidden
    return "nothing" if is_free else times.bottleneck(workers)


def journal_cost(work: Work, cluster: Cluster, load: Load, disk: Disk) -> JournalCost:
    """Return the costs of the center's journal, for each of its hosts."""
    k, machine = cluster.shards, cluster.machine
    message, snapshot = work.message / k, work.snapshot / k
    journal = disk.journal_size(snapshot, message)
    apply = (work.applied / machine.apply_rate + work.coded / machine.decode_rate) / k
    return JournalCost(
        written=load.exchanges * bytes_written(work, k, disk),
        snapshot=math.ceil(snapshot),
        size=math.ceil(journal),
        read=(snapshot + journal) / disk.bandwidth,
        replay=journal / max(1.0, message) * apply,
        rejoin=cluster.workers * machine.overhead + load.fraction * load.interval,
    )


def shards(work: Work, cluster: Cluster, target: float) -> int | None:
    """Return the number of shards that serve all workers in ``target`` seconds.

    None if no number is enough.
    """

    def fits(count: int) -> bool:
        sharded = dataclasses.replace(cluster, shards=count)
        return cluster.workers * exchange_times(work, sharded).occupied <= target

    counts = range(1, _MOST_SHARDS + 1)
    found = bisect.bisect_left(counts, True, key=fits)
    return counts[found] if found < len(counts) else None
