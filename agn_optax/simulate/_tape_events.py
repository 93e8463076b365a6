"""The events of a tape that simulations need, in their order."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from agn_optax.simulate._events import SessionEvent
from agn_optax.tape import Event, Message, Tape


class Sent(NamedTuple):
    """A message, and its event."""

    message: Message
    event: Event
    session: int  # 1, 2, 3, ...
    # Begin of its round, s: its worker's last answer, or message if that was in flight
    # while local steps went on; or the time at which it joined.
    began: float
    joined_version: int  # version when its worker joined


class Change(NamedTuple):
    """A change of the registered workers."""

    # Time, s. A worker that failed did so a lease before the center gave it up; or
    # within a lease before it joined again: in the middle of the possible times.
    at: float
    worker: str
    session: int
    event: SessionEvent
    began: float = math.nan  # of the round that it ends, s; see `Sent`
    lost: float = math.nan  # time at which its connection broke, s; NaN if unknown


@dataclasses.dataclass
class _Worker:
    """A worker on its way through a tape."""

    session: int = 0
    session_id: str = ""
    began: float = math.nan  # see `Sent`
    lost: float = math.nan  # see `Change`
    arrived: float = 0.0  # arrival of its last message, s
    is_registered: bool = False
    joined_version: int = 0


def events_of(
    tape: Tape, lease: float, progress: Callable[[int], None] | None
) -> Iterator[Sent | Change]:
    """Yield messages, and changes of the registered workers, in their order.

    Args:
      tape: the tape.
      lease: the lease, s.
      progress: called with the number of each record.
    """
    workers: dict[str, _Worker] = {}

    def ended(name: str, event: SessionEvent, at: float) -> Change:
        worker = workers[name]
        return Change(at, name, worker.session, event, worker.began, worker.lost)

    for event in tape.events(tape.begin):
        now = event.time
        if progress is not None:
            progress(event.number)
        for name in event.workers:
            worker = workers.setdefault(name, _Worker())
            if event.kind == "disconnect":
                worker.lost = now
            elif event.kind == "leave":
                worker.is_registered = False
                yield ended(name, SessionEvent.LEFT, now)
            elif event.kind == "expired":
                worker.is_registered = False
                yield ended(name, SessionEvent.FAILED, now - lease)
            elif event.kind == "join":
                is_new = worker.session_id != event.session_ids[name]
                if worker.is_registered and not is_new:
                    worker.lost = math.nan
                    continue  # over another connection
                if worker.is_registered:
                    earliest = max(now - lease, worker.began)
                    yield ended(name, SessionEvent.FAILED, (earliest + now) / 2)
                worker.session += is_new
                worker.session_id = event.session_ids[name]
                worker.began, worker.lost, worker.is_registered = now, math.nan, True
                worker.joined_version = event.version
                yield Change(now, name, worker.session, SessionEvent.JOINED)
        for message in event.messages:
            worker = workers[message.worker]
            if not worker.session:  # it joined before the tape begins
                worker.session, worker.is_registered = 1, True
                worker.session_id = event.session_ids[message.worker]
            began = worker.arrived if message.late_steps else worker.began
            yield Sent(message, event, worker.session, began, worker.joined_version)
            worker.began, worker.arrived = now, message.arrived


def by_number(name: str) -> list[Any]:
    """Return a key that sorts names, with their numbers compared as numbers."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]
