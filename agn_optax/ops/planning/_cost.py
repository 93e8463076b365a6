"""The results of a plan: bytes, seconds, fractions and remedies."""

from __future__ import annotations

from typing import NamedTuple


class WorkerMemory(NamedTuple):
    """Bytes that a worker keeps, beside those of its train step (gradients, ...)."""

    params: int  # the parameters
    inner_state: int  # state of the inner optimizer
    record: int = 0  # accumulated by the rule between exchanges
    codec_state: int = 0  # kept by the rule's codec from one exchange to the next
    anchor: int = 0  # the center as last adopted, if the rule reads it
    staged: int = 0  # during an exchange: the message and the answer
    overlap: int = 0  # the parameters as sent, if local steps go on meanwhile

    @property
    def waiting(self) -> int:
        """The total of a worker that waits for its answers."""
        return sum(self) - self.overlap

    @property
    def overlapping(self) -> int:
        """The total of a worker with ``overlap=True``."""
        return sum(self)


class CenterMemory(NamedTuple):
    """Bytes that a center keeps, all its shards together."""

    center: int = 0  # the center's parameters
    center_state: int = 0  # state of the center optimizer
    version: int = 0  # the next version, while the current one is being read
    messages: int = 0  # a message of every worker, if all exchange at once

    @property
    def total(self) -> int:
        """The total."""
        return sum(self)


class Load(NamedTuple):
    """The load of the center, if exchanges overlap with local steps."""

    interval: float  # seconds between two exchanges of a worker
    exchanges: float  # exchanges per second
    fraction: float  # of the time, for which these exchanges occupy the center


class JournalCost(NamedTuple):
    """The costs of a center's journal, for each of the center's hosts."""

    written: float  # bytes per second, including the snapshots that replace the journal
    snapshot: int  # bytes of a snapshot
    size: int  # maximum bytes of the journal
    read: float  # seconds to read snapshot and journal after a restart
    replay: float  # seconds to apply the messages in the journal
    rejoin: float  # seconds until all workers have joined and sent a message again

    @property
    def restart(self) -> float:
        """The seconds from a restart until the center continues with all workers."""
        return self.read + self.replay + self.rejoin


class Coding(NamedTuple):
    """The time that a codec takes in an exchange, and the links over which it pays."""

    contribution: int  # bytes of a contribution before encoding
    encode: float  # seconds to encode, at the worker
    decode: float  # seconds to decode, at the center
    pays_below: float | None  # bytes per second of a link, below which an exchange is
    # shorter with the codec; 0 if it never is, None if it always is


class Remedies(NamedTuple):
    """Changes that would make workers wait less, each by itself.

    The number of shards is the smallest for which the center is not the bottleneck: it
    can serve all workers within the given period, or else within the time of one
    worker's exchange. None means that no number is enough.
    """

    period: int | None  # the shortest period that hides exchanges
    bfloat16: int | None  # the same with messages and answers in 16 bits, in place of
    # the rule's codec; None if that is not shorter
    shards: int | None  # number of hosts of the center


class Cost(NamedTuple):
    """The cost of a rule on a `Cluster`."""

    rule: str  # name of the rule
    message: int  # bytes of one exchange, from the worker
    answer: int  # bytes of one exchange, to the worker
    exchange: float  # seconds of an exchange, if no other one is served meanwhile
    service: float  # seconds for which an exchange occupies the center
    applied: int  # bytes that the center's arithmetic reads and writes in an exchange
    hidden_period: int | None  # shortest period that hides exchanges; None if none does
    period: int  # local steps between exchanges, for the two utilizations
    utilization: float  # fraction of time in local steps, if workers wait for answers
    utilization_overlapping: float  # the same, if exchanges overlap with local steps
    worker: WorkerMemory  # memory of a worker
    center: CenterMemory  # memory of the center
    bottleneck: str = "nothing"  # part that keeps the period from being shorter, or a
    # given one from hiding exchanges: "latency", "worker link", "center link", "ends",
    # "arithmetic", "codec", "journal", or "nothing"
    load: Load | None = None  # of the center; None without one
    journal: JournalCost | None = None  # for a center that keeps a journal
    remedies: Remedies | None = None  # changes that would help
    coding: Coding | None = None  # for a rule with a codec
