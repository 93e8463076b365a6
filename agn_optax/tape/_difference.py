"""The first difference of two runs."""

from __future__ import annotations

import bisect
import hashlib
import json
from typing import Any, Literal, NamedTuple

from agn_optax.tape._events import Event, Message
from agn_optax.tape._tape import Tape


class Difference(NamedTuple):
    """Where two runs part."""

    # "start": other parameters, or another state of the center optimizer. "order":
    # other workers came first. "content": a worker sent something else. "answer": the
    # center did something else with the same messages. "end": one run is longer.
    kind: Literal["start", "order", "content", "answer", "end"]
    number: int  # of the first record that differs, in the first run if it has it
    version: int  # of the center before it
    first: Event | None  # the record of the first run; None at its end
    second: Event | None

    def __str__(self) -> str:
        if self.kind == "start":
            return "the runs differ from the start: in the center's first parameters"
        shown = [_shown(event) for event in (self.first, self.second)]
        return (
            f"the runs part after version {self.version}: "
            f"{_WORDS[self.kind]}\n  first   {shown[0]}\n  second  {shown[1]}"
        )


_WORDS = {
    "order": "another worker came first (order)",
    "content": "a worker sent something else (content)",
    "answer": "the center did something else with the same messages (answer)",
    "end": "one run ends here (end)",
}


def diff(first: Tape, second: Tape) -> Difference | None:
    """Return the first difference of two runs; None if they are the same.

    Runs are the same if the same messages moved the center, were dropped or rejected,
    in the same order: then all versions are the same. Times, session ids and reported
    numbers may differ, and so may joins and leaves, which show in the messages. The
    first record that differs is found by bisection over digests, each of which stands
    for a message and all before it.

    Args:
      first: tape of the first run.
      second: tape of the second run, or of a fork of the first one, which is compared
        from its first record on.

    Raises:
      DurabilityError: a tape is damaged.
    """
    begin = max(first.begin, second.begin)
    starts = [tape.start_hash(begin) for tape in (first, second)]
    if None not in starts and starts[0] != starts[1]:
        return Difference("start", begin, 0, None, None)
    (a, of_a), (b, of_b) = (_prefixes(tape, begin) for tape in (first, second))
    common = min(len(a), len(b))
    parted = bisect.bisect_left(range(common), True, key=lambda i: a[i] != b[i])
    if parted == len(a) == len(b):
        return None
    ours, theirs = (
        next(tape.events(numbers[parted])) if parted < len(numbers) else None
        for tape, numbers in ((first, of_a), (second, of_b))
    )
    event = ours or theirs
    assert event is not None
    before = event.version - bool(event.applied)
    return Difference(_kind(ours, theirs), event.number, before, ours, theirs)


def _prefixes(tape: Tape, begin: int) -> tuple[list[bytes], list[int]]:
    """Return digests of what happened up to each message, and record numbers."""
    digest, digests, numbers = b"", [], []
    for event in tape.events(begin):
        if event.messages:
            text = json.dumps([_sent(event), _answered(event)]).encode()
            digest = hashlib.blake2b(digest + text, digest_size=16).digest()
            digests.append(digest)
            numbers.append(event.number)
    return digests, numbers


def _kind(
    ours: Event | None, theirs: Event | None
) -> Literal["order", "content", "answer", "end"]:
    if ours is None or theirs is None:
        return "end"
    if _sent(ours) == _sent(theirs):
        return "answer"
    # The same exchanges of the same workers: then the messages themselves differ.
    return "order" if _senders(ours) != _senders(theirs) else "content"


def _senders(event: Event) -> Any:
    return [[message.worker, message.sequence] for message in event.messages]


def _sent(event: Event) -> Any:
    fields = ("worker", "sequence", "anchor_version", "steps", "weight", "hash")
    return [[getattr(m, name) for name in fields] for m in event.messages]


def _answered(event: Event) -> Any:
    fields = ("outcome", "staleness", "factor", "reason")
    answers = [[getattr(m, name) for name in fields] for m in event.messages]
    return [event.registered, answers]


def _shown(event: Event | None) -> str:
    if event is None:
        return "has ended"
    messages = "; ".join(map(_shown_message, event.messages))
    return f"{messages} at {event.time:.3f} s (record {event.number})"


def _shown_message(message: Message) -> str:
    return (
        f"exchange {message.sequence} of {message.worker} from version "
        f"{message.anchor_version} ({message.hash[:8]}), {message.outcome}, "
        f"staleness {message.staleness}"
    )
