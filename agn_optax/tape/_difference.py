"""The first difference of two runs."""

from __future__ import annotations

import bisect
import hashlib
import json
from typing import Any, Literal, NamedTuple

from agn_optax import errors
from agn_optax.tape._events import Event, Message
from agn_optax.tape._tape import Tape


class Difference(NamedTuple):
    """Where two runs part."""

    # "start": other parameters, or another state of the center optimizer. "order":
    # other workers came first. "content": a worker sent something else. "answer": the
    # center did something else with the same messages. "end": one run is longer.
    kind: Literal["start", "order", "content", "answer", "end"]
    number: int  # of the first record that differs
    version: int  # of the center before it
    first: Event | None  # the record of the first run; None at its end
    second: Event | None

    def __str__(self) -> str:
        if self.kind == "start":
            return "the runs differ from the start: in the center's first parameters"
        shown = [_shown(event) for event in (self.first, self.second)]
        return (
            f"the runs part at record {self.number}, after version {self.version}: "
            f"{_WORDS[self.kind]}\n  first   {shown[0]}\n  second  {shown[1]}"
        )


_WORDS = {
    "order": "other events came first (order)",
    "content": "a worker sent something else (content)",
    "answer": "the center did something else with the same messages (answer)",
    "end": "one run ends here (end)",
}


def diff(first: Tape, second: Tape) -> Difference | None:
    """Return the first difference of two runs; None if they are the same.

    Runs are the same if the same events happened in the same order: the same joins and
    leaves, and messages with the same contributions, which the center treated the same.
    Times, session ids and reported numbers may differ. The first record that differs is
    found by bisection over digests, each of which stands for a record and all before.

    Args:
      first: tape of the first run.
      second: tape of the second run, or of a fork of the first one, which is compared
        from its first record on.

    Raises:
      DurabilityError: a tape is damaged, or the tapes have no common record numbers.
    """
    begin = max(first.begin, second.begin)
    digests = [_prefixes(tape, begin) for tape in (first, second)]
    lengths = [len(each) for each in digests]
    for tape, length in zip((first, second), lengths, strict=True):
        if not length and tape.begin < begin:
            raise errors.DurabilityError(
                f"{tape.path} has records before {begin} only, where the other tape "
                "begins, so the two cannot be compared"
            )
    starts = [tape.start_hash(begin) for tape in (first, second)]
    if None not in starts and starts[0] != starts[1]:
        return Difference("start", begin, 0, None, None)
    a, b = digests
    common = min(lengths)
    parted = bisect.bisect_left(range(common), True, key=lambda i: a[i] != b[i])
    if parted == max(lengths):
        return None
    events = [_event(tape, begin + parted) for tape in (first, second)]
    kind = _kind(events[0], events[1], first, second)
    versions = [e.version - bool(e.applied) for e in events if e is not None]
    return Difference(kind, begin + parted, versions[0], events[0], events[1])


def _prefixes(tape: Tape, begin: int) -> list[bytes]:
    """Return, for each record, a digest of what happened up to it."""
    digest, found = b"", []
    for event in tape.events(begin):
        text = json.dumps([_sent(event), _answered(event)]).encode()
        digest = hashlib.blake2b(digest + text, digest_size=16).digest()
        found.append(digest)
    return found


def _event(tape: Tape, number: int) -> Event | None:
    return next(tape.events(number), None)


def _kind(
    a: Event | None, b: Event | None, first: Tape, second: Tape
) -> Literal["order", "content", "answer", "end"]:
    if a is None or b is None:
        return "end"
    if _sent(a) == _sent(b):
        return "answer"
    if _who(a) != _who(b):
        return "order"
    # The same workers at the same exchanges: the messages themselves differ.
    return "content"


def _who(event: Event) -> Any:
    messages = [[each.worker, each.sequence] for each in event.messages]
    kind = "" if event.messages else event.kind
    return [kind, messages or list(event.workers)]


def _sent(event: Event) -> Any:
    fields = ("worker", "sequence", "anchor_version", "steps", "weight", "hash")
    sent = [[getattr(message, name) for name in fields] for message in event.messages]
    return [_who(event), sent]


def _answered(event: Event) -> Any:
    fields = ("outcome", "staleness", "factor", "reason")
    return [[getattr(m, name) for name in fields] for m in event.messages]


def _shown(event: Event | None) -> str:
    if event is None:
        return "has ended"
    if not event.messages:
        return f"{event.kind} of {', '.join(event.workers)} at {event.time:.3f} s"
    return "; ".join(map(_shown_message, event.messages)) + f" at {event.time:.3f} s"


def _shown_message(message: Message) -> str:
    return (
        f"exchange {message.sequence} of {message.worker} from version "
        f"{message.anchor_version} ({message.hash[:8]}), {message.outcome}, "
        f"staleness {message.staleness}"
    )
