"""The rates of workers' links, compared with each other.

A worker compares its link with the best of its own exchanges, which says nothing about
a link that is slow from the first one.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque

from agn_optax._internal import Notices

_RATES = 5  # last rates of a worker, of which the best counts
_MAX_WORKERS = 64  # whose rates are kept, those that exchanged last
_MIN_EXCESS = 0.1  # s, beyond the time at the others' rate: less is noise


class Links:
    """The rates of workers that exchange over a network.

    Args:
      notices: the notices.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._lock = threading.Lock()
        # Bytes per second by worker. The worker that exchanged last comes last.
        self._rates: dict[str, deque[float]] = {}

    def add(self, worker: str, route: str, nbytes: int, seconds: float) -> None:
        """Add an exchange, and compare the worker's rate with those of the others.

        Args:
          worker: the worker's name.
          route: transport and interface, for the notice.
          nbytes: bytes of the message and its answer.
          seconds: their time on the link, greater than zero.
        """
        with self._lock:
            rates = self._rates.pop(worker, deque(maxlen=_RATES))
            rates.append(nbytes / seconds)
            self._rates[worker] = rates
            if len(self._rates) > _MAX_WORKERS:
                del self._rates[next(iter(self._rates))]
            own = max(rates)
            others = [max(x) for name, x in self._rates.items() if name != worker]
        usual = statistics.median(others) if others else own
        is_slow = len(rates) == _RATES and nbytes / own - nbytes / usual > _MIN_EXCESS
        self._notices.measure(
            "slow_link",
            usual / own if is_slow else None,
            worker,
            route=route,
            rate=own / 1e6,
            others=usual / 1e6,
        )
