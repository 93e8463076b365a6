"""The events of a tape, as plain records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from agn_optax.center import History, Record, Store, apply_record, contribution_in


class Message(NamedTuple):
    """A message of a worker, and what the center did with it."""

    worker: str
    sequence: int  # number of the exchange within the worker's session
    anchor_version: int  # version that the worker adopted last
    steps: int  # local steps; 0 if unknown
    weight: float | None  # weight that the worker claims
    staleness: int  # versions since the anchor
    outcome: Literal["applied", "dropped", "rejected"]
    reason: str  # of a rejection; "" otherwise
    arrived: float  # s, since the center began
    factor: float | None  # factor of the message in its round; None without rounds
    norm: float | None  # norm of the message; None if it was not measured
    reported: Mapping[str, Any]  # what the worker reports, by name
    hash: str  # of the contribution; "" if it was not recorded
    is_kept: bool  # whether the contribution is on the tape
    late_steps: int = 0  # of `steps`: made before the worker adopted its anchor
    worker_index: int = -1  # of the worker, for center optimizers; -1 on older tapes


class FailedJoin(NamedTuple):
    """A worker that could not join."""

    time: float  # s, since the center began
    worker: str
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """An event of a tape: a record, without its contributions.

    Attributes:
      number: number of the record.
      kind: "join", "leave", "expired", "exchange", or another kind of docs/tape.md.
      time: seconds since the center began.
      version: version of the center after the event.
      workers: names of the workers that are concerned.
      messages: the messages that were applied, dropped or rejected together.
      registered: number of registered workers.
      digest: digest of the record, which stands for all records up to it, in hex.
    """

    number: int
    kind: str
    time: float
    version: int
    workers: tuple[str, ...]
    messages: tuple[Message, ...]
    registered: int
    digest: str
    _record: Record = dataclasses.field(repr=False)
    _history: History = dataclasses.field(repr=False)

    @property
    def applied(self) -> list[Message]:
        """The messages that moved the center, of which a round may have several."""
        return [each for each in self.messages if each.outcome == "applied"]

    def contributions(self) -> list[list[np.ndarray] | None]:
        """Read the contributions of the messages, as they were sent.

        Returns:
          The arrays of each contribution; None for one that is not on the tape.
        """
        return [
            None if content is None else content.arrays
            for content in self._history.record(self.number).contents
        ]

    @property
    def failed_join(self) -> FailedJoin | None:
        """The worker that could not join; None for an event of another kind."""
        if self.kind != "failed_join":
            return None
        about = self._record.about
        return FailedJoin(self.time, about["worker"], about["reason"])

    @property
    def more_failed_joins(self) -> int:
        """Number of failed joins since the event before that have no event."""
        return self._record.about.get("more_failed_joins", 0)

    @property
    def session_ids(self) -> Mapping[str, str]:
        """The session ids of the workers, by name."""
        members = self._record.about["ledger"]["members"]
        return {name: member["session_id"] for name, member in members.items()}

    @property
    def ledger(self) -> dict[str, Any]:
        """The state of the workers that are concerned, for `Ledger.restore`."""
        return self._record.about["ledger"]

    @property
    def snapshots(self) -> dict[int, str]:
        """Digests of the snapshots that were saved before the event, by number."""
        return dict(self._record.about.get("snapshots", ()))

    def apply(self, store: Store) -> None:
        """Apply the messages to a store as they were applied before."""
        apply_record(self._record, store)

    def contribution(self, index: int, store: Store) -> Any:
        """Read a contribution, and place it where a store takes it.

        Args:
          index: index of the message.
          store: a store of the same model.
        """
        return contribution_in(self._history.record(self.number), index, store)


def event_of(record: Record, history: History) -> Event:
    """Return a record as an event.

    Args:
      record: the record.
      history: its history, which has the contributions.
    """
    about = record.about
    messages = tuple(
        _message(each, content, history.is_kept(record.number))
        for each, content in zip(
            about.get("messages", ()), record.contents, strict=True
        )
    )
    return Event(
        record.number,
        about["kind"],
        about["time"],
        about["version"],
        tuple(about["workers"]),
        messages,
        about.get("registered", 0),
        record.digest.hex(),
        record,
        history,
    )


def _message(about: Mapping[str, Any], content: Any, is_kept: bool) -> Message:
    own: dict[str, Any] = {
        "hash": "" if content is None else content.digest.hex(),
        "is_kept": content is not None and is_kept,
    }
    # Tapes of earlier releases lack some fields.
    return Message(**own, **{n: about[n] for n in Message._fields if n in about})
