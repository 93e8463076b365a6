"""The times of exchanges by their parts, and the load of centers: pure arithmetic.

The docstring of `agn_optax.ops.planning` has the equations.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import NamedTuple

from agn_optax.ops.planning._cluster import Cluster, Disk, Tree
from agn_optax.ops.planning._cost import JournalCost, Level

_MOST_SHARDS = 1 << 20


class Work(NamedTuple):
    """Bytes of one exchange."""

    message: int
    answer: int
    applied: int  # read and written by the center's arithmetic
    snapshot: int  # of the center with its optimizer's state
    coded: int = 0  # of the contribution before encoding, if that takes time


class LinkRates(NamedTuple):
    """The link between a worker and its center, or a center and its parent."""

    bandwidth: float  # bytes per second of the lower end
    shared: float  # bytes per second of the upper end, which all below share
    latency: float  # seconds of a round trip


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

    def longest(self, children: int) -> float:
        """Return the seconds of an exchange if ``children`` take turns."""
        return max(self.alone, children * self.occupied)

    def bottleneck(self, children: int) -> str:
        """Return the longest part of an exchange if ``children`` take turns."""
        served = children * self.occupied > self.alone
        parts = self.service if served else self.exchange
        return max(parts, key=lambda name: parts[name])


def exchange_times(
    work: Work, cluster: Cluster, link: LinkRates, disk: Disk | None
) -> Times:
    """Return the times of an exchange over a link; ``disk`` is that of a journal."""
    machine, k = cluster.machine, cluster.shards
    both = work.message + work.answer
    is_workers = link.bandwidth <= k * link.shared
    wide = both / min(link.bandwidth, k * link.shared)
    center_ends = (machine.overhead + both / (k * machine.endpoint_rate)) / 2
    ends = (1 + k) * center_ends  # the worker's end serves all shards
    arithmetic = work.applied / (k * machine.apply_rate)
    encoding, decoding = coding(work, cluster)
    # One processor does all of this, one after the other.
    at_center = {"ends": center_ends, "arithmetic": arithmetic, "codec": decoding}
    processor = max(at_center, key=lambda name: at_center[name])
    exchange = {
        "latency": link.latency,
        "worker link" if is_workers else "center link": wide,
        "ends": ends,
        "arithmetic": arithmetic,
        "codec": encoding + decoding,
    }
    service = {
        "center link": max(work.message, work.answer) / (k * link.shared),
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
        times = exchange_times(work, cluster, *worker_link(cluster)).exchange
        return sum(times[name] for name in times if not name.endswith("link"))

    added = without_links(work) - without_links(plain)
    return saved / added if added > 0 else None


def bytes_written(work: Work, shards: int, disk: Disk) -> float:
    """Return the bytes that a host writes for an exchange, snapshots included."""
    message, snapshot = work.message / shards, work.snapshot / shards
    return message * (1 + snapshot / disk.journal_size(snapshot, message))


def level(
    work: Work,
    times: Times,
    place: tuple[int, int],
    period: int,
    interval: float,
    limit: str,
) -> Level:
    """Return a level of centers, whose children each exchange once in an interval."""
    centers, children = place
    rate = children / interval
    return Level(
        centers=centers,
        children=children,
        period=period,
        interval=interval,
        exchange=times.alone,
        exchanges=rate,
        received=rate * work.message,
        sent=rate * work.answer,
        load=rate * times.occupied,
        bottleneck=limit,
    )


def bottleneck(
    times: Times, children: int, hidden: int, given_period: int | None
) -> str:
    """Return the part that limits the period, or that a given period does not hide."""
    is_free = hidden == 1 if given_period is None else given_period >= hidden
    return "nothing" if is_free else times.bottleneck(children)


def tree_levels(lowest: Level, up: Work, cluster: Cluster) -> tuple[Level, ...]:
    """Return all levels of a tree, whose upper centers have centers below them."""
    tree = cluster.tree
    levels = [lowest]
    if tree is not None:
        wide = cluster.shared if tree.bandwidth is None else tree.bandwidth
        latency = cluster.latency if tree.latency is None else tree.latency
        link = LinkRates(wide, wide, latency)
        for place in cluster.centers[1:]:
            times = exchange_times(
                up, cluster, link, cluster.disk if place[0] == 1 else None
            )
            rate = levels[-1].exchanges  # per second, at each child
            hidden = max(1, math.ceil(times.longest(place[1]) * rate))
            period = max(hidden, tree.period or 1)
            limit = bottleneck(times, place[1], hidden, tree.period)
            levels.append(level(up, times, place, period, period / rate, limit))
    return tuple(levels)


def journal_cost(work: Work, cluster: Cluster, root: Level, disk: Disk) -> JournalCost:
    """Return the costs of the root's journal, for each of its hosts."""
    k, machine = cluster.shards, cluster.machine
    message, snapshot = work.message / k, work.snapshot / k
    journal = disk.journal_size(snapshot, message)
    apply = (work.applied / machine.apply_rate + work.coded / machine.decode_rate) / k
    return JournalCost(
        written=root.exchanges * bytes_written(work, k, disk),
        snapshot=math.ceil(snapshot),
        size=math.ceil(journal),
        read=(snapshot + journal) / disk.bandwidth,
        replay=journal / max(1.0, message) * apply,
        rejoin=root.children * machine.overhead + root.load * root.interval,
    )


def shards(work: Work, cluster: Cluster, target: float) -> int | None:
    """Return the number of shards that serve all workers in ``target`` seconds.

    None if no number is enough.
    """

    def fits(count: int) -> bool:
        return _fits(work, dataclasses.replace(cluster, shards=count), target)

    counts = range(1, _MOST_SHARDS + 1)
    found = bisect.bisect_left(counts, True, key=fits)
    return counts[found] if found < len(counts) else None


def depth(work: Work, cluster: Cluster, target: float) -> int | None:
    """Return the levels with which a lowest center serves its workers in ``target`` s.

    None if no number is enough.
    """
    for count in range(1, max(1, math.ceil(math.log2(cluster.workers))) + 1):
        tree = dataclasses.replace(cluster, tree=Tree(levels=count))
        if _fits(work, tree, target):
            return count
    return None


def worker_link(cluster: Cluster) -> tuple[LinkRates, Disk | None]:
    """Return the link between workers and their centers, and these centers' disk."""
    link = LinkRates(cluster.bandwidth, cluster.shared, cluster.latency)
    return link, cluster.disk if len(cluster.centers) == 1 else None


def _fits(work: Work, cluster: Cluster, target: float) -> bool:
    occupied = exchange_times(work, cluster, *worker_link(cluster)).occupied
    return cluster.centers[0][1] * occupied <= target
