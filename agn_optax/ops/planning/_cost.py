"""What a plan says: bytes, seconds, parts of 1, and what would help."""

from __future__ import annotations

from typing import NamedTuple


class WorkerMemory(NamedTuple):
    """Bytes that a worker keeps, beside what its train step takes (gradients, ...)."""

    params: int
    inner_state: int  # the inner optimizer's
    record: int = 0
    codec_state: int = 0  # what the rule's codec keeps from one exchange to the next
    anchor: int = 0  # the center as last adopted, where the rule reads it
    staged: int = 0  # during an exchange: the message, and the answer
    overlap: int = 0  # the parameters as sent, where local steps go on meanwhile

    @property
    def waiting(self) -> int:
        """All of it, in a worker that waits for its answers."""
        return sum(self) - self.overlap

    @property
    def overlapping(self) -> int:
        """All of it, in a worker with ``overlap=True``."""
        return sum(self)


class CenterMemory(NamedTuple):
    """Bytes that a center keeps, all its shards together."""

    center: int = 0
    center_state: int = 0  # the center optimizer's
    version: int = 0  # the next one, while somebody reads the current one
    messages: int = 0  # one for everybody that it has, if all exchange at once

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class Level(NamedTuple):
    """The centers of one level, where exchanges overlap with local steps."""

    centers: int
    children: int  # workers, or centers below, that the fullest of them has
    period: int  # of each child: local steps, or exchanges, between two with its parent
    interval: float  # seconds between them
    exchange: float  # seconds, where nobody else is served meanwhile
    exchanges: float  # a second, at each of the centers
    received: float  # bytes a second, by all shards of a center
    sent: float
    load: float  # part of the time for which these occupy the center
    bottleneck: str  # what keeps the period from being shorter


class Kept(NamedTuple):
    """What a journal is for a center: of each of its hosts."""

    written: float  # bytes a second, with the snapshots that replace the journal
    snapshot: int  # bytes
    journal: int  # bytes, at most
    read: float  # seconds, of both
    replay: float  # seconds, of the messages in the journal
    rejoin: float  # seconds, until all workers have joined and sent again

    @property
    def restart(self) -> float:
        """Seconds from its start until the center goes on, and with all workers."""
        return self.read + self.replay + self.rejoin


class Coding(NamedTuple):
    """What a codec takes for an exchange, and over which links it makes up for that."""

    contribution: int  # bytes of it, as it is
    encode: float  # seconds, at the worker
    decode: float  # seconds, at the center
    # Bytes a second of the link, below which an exchange is shorter than without the
    # codec; 0 if it never is, None if it is over every link.
    pays_below: float | None


class Remedies(NamedTuple):
    """What each of them would have to be, for workers to wait less, by itself.

    The numbers of shards and levels are those at which the center is no bottleneck any
    more: it has time for all workers within the given period, or while one worker by
    itself exchanges. None where no number does it.
    """

    period: int | None  # the shortest that hides
    # The same with messages and answers in 16 bits, in place of the rule's codec, if
    # that is shorter.
    bfloat16: int | None
    shards: int | None
    levels: int | None  # of a tree of centers; 1 is a single one


class Cost(NamedTuple):
    """What a rule costs on a `Cluster`."""

    rule: str
    message: int  # bytes of one exchange, from the worker
    answer: int  # bytes of one exchange, to the worker
    exchange: float  # seconds, where nobody else is served meanwhile
    service: float  # seconds for which it occupies the center
    applied: int  # bytes that the center's arithmetic reads and writes for it
    hidden_period: int | None  # local steps; None if there is none
    period: int  # local steps, of the following two
    utilization: float  # part of the time in local steps, where workers wait
    utilization_overlapping: float  # ... where exchanges overlap with local steps
    worker: WorkerMemory
    center: CenterMemory
    # What keeps the period from being shorter, or one that was given from hiding:
    # "latency", "worker link", "center link", "ends", "arithmetic", "codec",
    # "journal", or "nothing".
    bottleneck: str = "nothing"
    hosts: int = 0  # of all centers
    levels: tuple[Level, ...] = ()  # from those that have workers to the root
    kept: Kept | None = None  # of a center that keeps a journal
    remedies: Remedies | None = None
    coding: Coding | None = None  # of a rule with a codec
