"""The results of a plan: bytes, seconds and fractions."""

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
    bottleneck: str  # part that keeps the period from being shorter, or a given one
    # from hiding exchanges: "latency", "worker link", "center link", "ends",
    # "arithmetic", "codec", or "nothing"
