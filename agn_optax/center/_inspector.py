"""The numbers that a center's notices need, of the last messages and versions.

Norms come from the message limits, which measure every message. Directions of messages
and movements of the center come from a sample of about a thousand elements, the same
ones each time, so that no check reads a whole model. An exchange only takes the sample;
samples are compared about once a second, a limited number of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from agn_optax._internal import Notices, trees
from agn_optax.center._ledger import Member

LOOK_INTERVAL = 1.0  # s, minimum time between two looks at all workers
_MESSAGES = 10  # last messages of a worker, among which lost ones are counted
_NORMS = 5  # last norms of a worker, of which the median counts
_MIN_NORMS = 3
_MIN_FIRST = 60.0  # s, minimum time expected before a first exchange: it may compile
_MAX_OTHERS = 32  # workers with which another one is compared, the last that sent
_MIN_MOVED = 0.1  # share of the elements reached by messages that has to move
_MAX_WAITING = 64  # messages and versions between two looks; others are not compared


@dataclasses.dataclass
class _Messages:
    """The last messages of a worker."""

    norms: deque[float] = dataclasses.field(
        default_factory=lambda: deque(maxlen=_NORMS)
    )
    norm: float | None = None  # median of `norms`; None for too few
    direction: Any = None  # sample of the last message, with norm 1
    apart: int = 0  # messages in a row that point away from those of the others


class Inspector:
    """The values that are compared with the thresholds of a center.

    Its owner holds a lock for all calls except `read`, `is_full`.

    Args:
      notices: the notices.
      compares: whether the messages of workers should point in similar directions.
    """

    def __init__(self, notices: Notices, *, compares: bool) -> None:
        self._notices = notices
        self._compares = compares
        self._dtype = ""
        # By worker: how its last messages were lost; "" for messages in time.
        self._lost_because: dict[str, deque[str]] = {}
        # Calls for what has not been read yet, and what the device still computes.
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._reading = threading.Lock()
        # Only `read` uses these. The worker that sent last comes last.
        self._workers: dict[str, _Messages] = {}
        self._sample: Any = None  # of the last sampled version
        self._moved = 0  # number of the last sampled version that had moved
        self._reached: Any = False  # elements that messages since then would move
        self._is_zero = True  # whether all messages since then were zero

    def start(self, number: int, sample: Any, dtype: str) -> None:
        """Begin with a version of the center, whose dtype is for texts."""
        self._dtype = dtype
        self._waiting.append((self._on_start, (number, sample)))

    @property
    def is_full(self) -> bool:
        """True if no more messages are compared before the next look."""
        return len(self._waiting) >= _MAX_WAITING

    def add_message(
        self, worker: str, norm: Any, sample: Any, lost_because: str
    ) -> None:
        """Add a message that was applied, dropped or rejected.

        Args:
          worker: the worker's name.
          norm: the message's norm.
          sample: the message's sample, see `Store.measure`; None for none.
          lost_because: how the message was lost, such as "was dropped"; "" if it was
            applied in time.
        """
        last = self._lost_because.get(worker)
        if last is None:
            last = self._lost_because[worker] = deque(maxlen=_MESSAGES)
        was_good = not any(last)
        last.append(lost_because)
        if lost_because or not was_good:
            lost = [each for each in last if each]
            self._notices.measure(
                "lost_messages",
                len(lost) / _MESSAGES,
                worker,
                lost=len(lost),
                count=len(last),
                reason=lost[-1] if lost else "",
            )
        if sample is not None and not self.is_full:
            self._waiting.append((self._on_message, (worker, norm, sample)))

    def add_version(self, number: int, sample: Callable[[], Any]) -> None:
        """Add a version of the center; its sample is computed only if it is compared.

        Every version is compared while there is room: after a gap, it is unknown when
        the center last moved.
        """
        if self._notices.is_on("still_center") and not self.is_full:
            self._waiting.append((self._on_version, (number, sample())))

    def look(
        self, members: Mapping[str, Member], waiting: Mapping[str, Any], now: float
    ) -> None:
        """Look for workers that make no exchanges.

        Args:
          members: the registered workers.
          waiting: the workers whose message waits to be applied.
          now: time in seconds.
        """
        longest = {name: member.recent.longest() for name, member in members.items()}
        for name, member in members.items():
            own = longest[name]
            if own is None:  # no exchange yet
                known = [each for each in longest.values() if each is not None]
                own = max([_MIN_FIRST, *known])
            seconds = member.recent.idle(now)
            is_awaited = member.connected and name not in waiting
            periods = seconds / own if is_awaited and seconds is not None else None
            self._notices.measure(
                "missed_periods", periods, name, seconds=seconds, longest=own
            )

    def forget(self, worker: str) -> None:
        """Forget a worker whose session has ended."""
        self._lost_because.pop(worker, None)
        self._notices.forget(worker)

    def read(self, names: Collection[str]) -> None:
        """Compare the messages and versions that the device has computed.

        Args:
          names: the registered workers; the others are forgotten.
        """
        with self._reading:
            while self._waiting and all(map(_is_ready, self._waiting[0][1])):
                call, arguments = self._waiting.popleft()
                call(*arguments)
            for worker in [name for name in self._workers if name not in names]:
                del self._workers[worker]
                self._notices.forget(worker)

    def _on_start(self, number: int, sample: Any) -> None:
        self._moved, self._sample = number, trees.on_host(sample)

    def _on_message(self, worker: str, norm: Any, sample: Any) -> None:
        norm, sample = trees.on_host((norm, sample))
        norm = float(norm)
        if not np.isfinite(norm):
            return
        messages = self._workers.pop(worker, _Messages())
        self._workers[worker] = messages
        self._is_zero = self._is_zero and not norm
        self._reached = self._reached | (sample != 0)
        last = itertools.islice(reversed(self._workers.items()), _MAX_OTHERS + 1)
        others = [other for name, other in last if name != worker]
        self._compare_norm(worker, messages, norm, others)
        if self._compares:
            self._compare_direction(worker, messages, sample, others)

    def _compare_norm(
        self, worker: str, messages: _Messages, norm: float, others: list[_Messages]
    ) -> None:
        messages.norms.append(norm)
        if len(messages.norms) < _MIN_NORMS:
            return
        own = messages.norm = statistics.median(messages.norms)
        norms = [other.norm for other in others if other.norm is not None]
        usual = statistics.median(norms) if norms else 0.0
        factor = None
        if usual:
            factor = max(own / usual, usual / own) if own else np.inf
        self._notices.measure("other_norm", factor, worker, norm=own, others=usual)

    def _compare_direction(
        self, worker: str, messages: _Messages, sample: Any, others: list[_Messages]
    ) -> None:
        size = float(np.linalg.norm(sample))
        if not size:
            return
        messages.direction = sample / size
        known = [other.direction for other in others if other.direction is not None]
        cosine = float(messages.direction @ sum(known)) / len(known) if known else 0.0
        messages.apart = messages.apart + 1 if cosine < 0 else 0
        self._notices.measure("apart", messages.apart, worker, cosine=cosine)

    def _on_version(self, number: int, sample: Any) -> None:
        before, self._sample = self._sample, trees.on_host(sample)
        reached, self._reached = self._reached, False
        is_zero, self._is_zero = self._is_zero, True
        moved, aimed = np.sum(self._sample != before), np.sum(reached)
        # A message of few elements, such as of `top_k`, may reach none of the sample.
        is_unknown = not (is_zero or aimed)
        if is_unknown or (moved and moved >= _MIN_MOVED * aimed):
            self._moved = number
        reason = "all messages are zero"
        if not is_zero:
            reason = (
                "the steps of its optimizer are zero, or smaller than the rounding of "
                f"{self._dtype}"
            )
        self._notices.measure("still_center", number - self._moved, reason=reason)


def _is_ready(value: Any) -> bool:
    """Return whether a value can be read without waiting for the device."""
    return not hasattr(value, "is_ready") or value.is_ready()
