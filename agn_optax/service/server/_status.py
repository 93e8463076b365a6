"""Traffic of a center's workers, and their status."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection

from agn_optax.center import Member
from agn_optax.service import center_pb2 as pb


@dataclasses.dataclass
class Traffic:
    """The traffic and the reported numbers of one worker, for its status."""

    bytes_received: int = 0
    bytes_sent: int = 0
    period: int = 0  # local steps
    norm: float | None = None
    transport: str = ""
    interface: str = ""  # of the worker
    rate: float | None = None  # bytes per second
    reported: dict[str, float] = dataclasses.field(default_factory=dict)


class WorkerTraffic:
    """The traffic of all workers.

    Args:
      max_workers: maximum number of workers.

    Attributes:
      total: traffic of all workers since the start.
    """

    def __init__(self, max_workers: int) -> None:
        self.total = Traffic()
        self._max_kept = 2 * max_workers
        self._lock = threading.Lock()
        self._workers: dict[str, Traffic] = {}  # in the order of their last exchange

    def get(self, worker: str) -> Traffic:
        """Return a worker's traffic.

        If too many are kept, forget the one that has been idle longest.
        """
        with self._lock:
            found = self._workers[worker] = self._workers.pop(worker, Traffic())
            if len(self._workers) > self._max_kept:
                del self._workers[next(iter(self._workers))]
        return found

    def count(self, traffic: Traffic, *, received: int = 0, sent: int = 0) -> None:
        """Add bytes to the traffic of a worker and to the total."""
        with self._lock:
            for counted in (traffic, self.total):
                counted.bytes_received += received
                counted.bytes_sent += sent

    def statuses(
        self,
        members: dict[str, Member],
        waiting: Collection[str],
        stalled: Collection[str],
    ) -> list[pb.WorkerStatus]:
        """Return the statuses of workers, in the order of their names.

        Args:
          members: the workers by their names.
          waiting: names of workers whose message waits to be applied.
          stalled: names of workers that make no exchanges, as a notice says.
        """
        workers = dict(self._workers)
        return [
            _status_of(
                name, member, name in waiting, name in stalled, workers.get(name)
            )
            for name, member in sorted(members.items())
        ]


def _status_of(
    name: str, member: Member, waits: bool, is_stalled: bool, traffic: Traffic | None
) -> pb.WorkerStatus:
    now = time.monotonic()
    exchanges, steps = member.recent.rates(now) or (None, None)
    return pb.WorkerStatus(
        name=name,
        connected=member.connected,
        exchanges=member.exchanges,
        dropped=member.dropped,
        staleness=member.staleness,
        joined=now - member.joined,
        seen=now - member.seen,
        waits=waits,
        rejected=member.rejected,
        exchanges_per_second=exchanges,
        steps_per_second=steps,
        stalled=member.recent.idle(now) if is_stalled else None,
        **member.totals._asdict(),
        **({} if traffic is None else dataclasses.asdict(traffic)),
    )
