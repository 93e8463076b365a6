"""Events of a center as the journal records them: what decided, in one shape.

docs/tape.md has a table of the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from agn_optax.center._ledger import Batch
from agn_optax.center._submission import plain
from agn_optax.round import steps as rounds

PyTree = Any


class Event(NamedTuple):
    """The recorded part of an event."""

    kind: str
    about: dict[str, Any]
    contents: list[PyTree | None]


@dataclasses.dataclass
class Arrival:
    """The parts of a message that its entry in the ledger lacks."""

    contribution: PyTree  # as the store takes it
    norm: Any  # float scalar, perhaps on the device
    reported: dict[str, float]  # the metrics of its worker


def event_of(
    batch: Batch,
    arrivals: Sequence[Arrival],
    *,
    keeps_all: bool,
    seconds: Callable[[float], float],
    unplace: Callable[[PyTree], PyTree],
) -> Event:
    """Return the event that messages were applied, dropped or rejected.

    Args:
      batch: the messages, and what was decided.
      arrivals: the messages as they arrived, in the same order.
      keeps_all: whether the contributions of messages that were not applied are kept.
      seconds: returns the seconds from the center's beginning to a time of its clock.
      unplace: returns a contribution as a tree.
    """
    messages: list[dict[str, Any]] = []
    contents: list[PyTree | None] = []
    to_apply = set(batch.indices_to_apply)
    for i, (entry, arrival) in enumerate(zip(batch.entries, arrivals, strict=True)):
        rejection = batch.rejected.get(entry.worker)
        outcome = "applied" if i in to_apply else "dropped"
        contribution = None
        if outcome == "applied" or keeps_all:
            contribution = unplace(arrival.contribution)
        if rejection is not None:
            outcome = "rejected"
            if rejection.is_last and keeps_all:
                # Its worker gets an error before the record is written, and may then
                # write to the arrays.
                contribution = jax.tree.map(np.array, contribution)
        weights = batch.weights
        messages.append(
            {
                "worker": entry.worker,
                "worker_index": batch.indices[i],
                **plain(entry.submission),
                "arrived": seconds(entry.arrived),
                "norm": arrival.norm,
                "reported": arrival.reported,
                "staleness": batch.staleness[i],
                "round_staleness": batch.round_staleness[i],
                "factor": None if weights is None else weights[i],
                "outcome": outcome,
                "reason": "" if rejection is None else rejection.reason,
                "decoded": isinstance(arrival.contribution, rounds.Decoded),
            }
        )
        contents.append(contribution)
    kind = "exchange" if to_apply else "rejected" if batch.rejected else "dropped"
    about = {"registered": batch.workers, "messages": messages}
    return Event(kind, about, contents)
