"""What a plan is for: machines, the links between them, and how the center is kept."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from agn_optax import errors
from agn_optax._internal import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What an exchange takes beside the links: constants, as ``--measure`` finds them.

    The defaults are round numbers of a machine with two cores.

    Args:
      overhead: seconds of an exchange of nothing, over no distance.
      endpoint_rate: bytes a second, message and answer, through worker and center:
        copies, frames and gRPC at both ends.
      apply_rate: bytes a second that the center's arithmetic reads and writes.
      encode_rate: bytes a second of contributions, as they are, that a worker encodes.
        The default, and that of the next, is about what ``quantize`` to 4 bits with
        error feedback takes on one core; other codecs take more or less.
      decode_rate: bytes a second of contributions, as they are, that a center decodes.

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
        _not_negative(self, "overhead")
        _positive(self, "endpoint_rate", "apply_rate", "encode_rate", "decode_rate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """Of each host of a center that keeps a `agn_optax.center.Journal`.

    Args:
      bandwidth: bytes a second that it writes, or reads.
      sync: seconds until what was written is there for good, beside that.
      size: bytes of the journal after which a snapshot takes its place; None for the
        journal's own default, 1 GiB, or four snapshots if they are larger. It has never
        more than 100,000 exchanges.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import planning
      >>> planning.Disk(bandwidth=1e9, sync=0.005).journal(snapshot=4e9, message=4e9)
      16000000000.0
    """

    bandwidth: float
    sync: float = 0.0
    size: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "bandwidth")
        _not_negative(self, "sync")
        if self.size is not None:
            _positive(self, "size")

    def journal(self, snapshot: float, message: float) -> float:
        """Bytes that the journal has at most, for messages of so many."""
        size = self.size or max(JOURNAL_SIZE, SNAPSHOTS * snapshot)
        return min(size, RECORDS * max(1.0, message))


# As `agn_optax.center.durability` has them, which is beside this layer.
JOURNAL_SIZE = 1 << 30
SNAPSHOTS = 4
RECORDS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """Centers that are workers of other centers, up to one that is the root.

    Args:
      fan_out: how many workers, or centers, one center has at most. Instead of:
      levels: of centers, from those that have workers to the root.
      period: exchanges at a center between two of it with its parent; None for as many
        as hide the latter.
      bandwidth: bytes a second in either direction between centers: of the link by
        which a center reaches its parent, and of the parent's, for all of them
        together. None is as much as a center's link to its workers.
      latency: seconds of a round trip between a center and its parent; None is as
        much as between a worker and its center.

    Raises:
      InvalidArgumentError: a number is out of range, or there is not one of ``fan_out``
        and ``levels``.

    Example:
      >>> from agn_optax import planning
      >>> planning.Tree(levels=3).centers(27)
      [(9, 3), (3, 3), (1, 3)]
      >>> planning.Tree(fan_out=100).centers(10_000)
      [(100, 100), (1, 100)]
    """

    fan_out: int | None = None
    levels: int | None = None
    period: int | None = None
    bandwidth: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        if (self.fan_out is None) == (self.levels is None):
            raise errors.InvalidArgumentError(
                "a tree needs one of fan_out and levels, got "
                f"fan_out={self.fan_out!r}, levels={self.levels!r}"
            )
        if self.fan_out is not None:
            check.whole_number(self.fan_out, "fan_out", least=2)
        if self.levels is not None:
            check.positive_int(self.levels, "levels")
        if self.period is not None:
            check.positive_int(self.period, "parent_period")
        if self.bandwidth is not None:
            check_rate(self.bandwidth, "parent_bandwidth")
        if self.latency is not None:
            check.rate(self.latency, "parent_latency", low=0.0, high=math.inf)

    def centers(self, workers: int) -> list[tuple[int, int]]:
        """Centers of each level, from below, and what the fullest of them has."""
        fan_out = self.fan_out or _root(workers, self.levels or 1)
        levels: list[tuple[int, int]] = []
        below = workers
        while not levels or below > 1:
            count = -(-below // fan_out)
            levels.append((count, -(-below // count)))
            below = count
        return levels


def _root(number: int, degree: int) -> int:
    """The smallest whole number from 2 whose power is not less."""
    near = max(2, int(number ** (1 / degree)) - 1)  # which floats may miss by one
    while near**degree < number:
        near += 1
    return near


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers, what a step takes them, and what lies between them and the center.

    Args:
      step_time: seconds of a local step.
      bandwidth: of each worker's link, bytes a second in either direction.
      workers: how many.
      latency: seconds of a round trip between a worker and the center.
      center_bandwidth: of the center's link, bytes a second in either direction, for
        all workers together; None is as much as one worker's. Each shard has as much.
      machine: what the two ends take.
      shards: hosts that have a part of the center each, all of one size.
      tree: of centers; None for one that has all workers.
      disk: of a center that keeps a journal (in a tree, the root, as no other can);
        None for one that does not.

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
    tree: Tree | None = None
    disk: Disk | None = None

    def __post_init__(self) -> None:
        _positive(self, "step_time", "bandwidth")
        if self.center_bandwidth is not None:
            _positive(self, "center_bandwidth")
        _not_negative(self, "latency")
        check.positive_int(self.workers, "workers")
        check.positive_int(self.shards, "shards")

    @property
    def shared(self) -> float:
        """Bytes a second of the center's link, or of each shard's."""
        given = self.center_bandwidth
        return self.bandwidth if given is None else given

    @property
    def centers(self) -> list[tuple[int, int]]:
        """Centers of each level, from below, and what the fullest of them has."""
        return (
            [(1, self.workers)]
            if self.tree is None
            else self.tree.centers(self.workers)
        )


def check_rate(value: Any, name: str) -> None:
    """It is a positive number."""
    check.rate(value, name, low=0.0, high=math.inf, low_open=True)


def _positive(record: Any, *fields: str) -> None:
    for field in fields:
        check_rate(getattr(record, field), field)


def _not_negative(record: Any, *fields: str) -> None:
    for field in fields:
        check.rate(getattr(record, field), field, low=0.0, high=math.inf)
