"""The first difference of two runs."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from agn_optax.tape._events import Event, Message
from agn_optax.tape._tape import Tape


class Difference(NamedTuple):
    """The first difference of two runs."""

    # "start": other parameters, or another state of the center optimizer. "order":
    # other workers came first, or other workers were registered. "content": a worker
    # sent something else. "answer": the center did something else with the same
    # messages. "end": one run is longer.
    kind: Literal["start", "order", "content", "answer", "end"]
    number: int  # of the first record that differs, in the first run if it has it
    version: int  # of the center before it
    first: Event | None  # the record of the first run; None at its end
    second: Event | None
    # Names of workers that were registered in only one of the runs, sorted.
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "start":
            return "the runs differ from the start: in the center's first parameters"
        words = _WORDS[self.kind]
        registered = [*self.only_first, *self.only_second]
        if registered:
            words = "other workers were registered (order)"
        lines = [f"the runs part after version {self.version}: {words}"]
        for label, event, names in (
            ("first ", self.first, self.only_first),
            ("second", self.second, self.only_second),
        ):
            also = f"; only here: {', '.join(names)}" if names else ""
            lines.append(f"  {label}  {_shown(event)}{also}")
        return "\n".join(lines)


_WORDS = {
    "order": "another worker came first (order)",
    "content": "a worker sent something else (content)",
    "answer": "the center did something else with the same messages (answer)",
    "end": "one run ends here (end)",
}


def diff(
    first: Tape, second: Tape, *, progress: Callable[[int], None] | None = None
) -> Difference | None:
    """Return the first difference of two runs; None if they are the same.

    Runs are the same if the same messages moved the center, were dropped or rejected,
    in the same order, while the same workers were registered: then all versions are the
    same. Times, session ids and reported numbers may differ, and so may the order of
    joins and leaves between two messages. The first record that differs is found by
    bisection over digests, each of which stands for a message and all before it.

    Args:
      first: tape of the first run.
      second: tape of the second run, or of a fork of the first one, which is compared
        from its first record on.
      progress: called with the number of each record of the first run, then of the
        second.

    Raises:
      DurabilityError: a tape is damaged.
    """
    begin = max(first.begin, second.begin)
    starts = [tape.start_hash(begin) for tape in (first, second)]
    if None not in starts and starts[0] != starts[1]:
        return Difference("start", begin, 0, None, None)
    runs = [_steps(tape, begin, progress) for tape in (first, second)]
    (a, b), common = runs, min(map(len, runs))
    parted = bisect.bisect_left(
        range(common), True, key=lambda i: a[i].digest != b[i].digest
    )
    if parted == len(a) == len(b):
        return None
    ours, theirs = (run[parted] if parted < len(run) else None for run in runs)
    one = next(first.events(ours.number)) if ours else None
    other = next(second.events(theirs.number)) if theirs else None
    event = one or other
    assert event is not None
    before = event.version - bool(event.applied)
    if ours is None or theirs is None or one is None or other is None:
        return Difference("end", event.number, before, one, other)
    only_first = tuple(sorted(ours.registered - theirs.registered))
    only_second = tuple(sorted(theirs.registered - ours.registered))
    kind: Literal["order", "content", "answer"] = "answer"
    if only_first or only_second or _order(one) != _order(other):
        kind = "order"
    elif _sent(one) != _sent(other):
        kind = "content"
    return Difference(kind, event.number, before, one, other, only_first, only_second)


class _Step(NamedTuple):
    """A record with messages."""

    number: int
    digest: bytes  # of this step and all before it
    registered: frozenset[str]  # names of the registered workers


def _steps(
    tape: Tape, begin: int, progress: Callable[[int], None] | None
) -> list[_Step]:
    digest, steps = b"", list[_Step]()
    before = None
    for event, registered in tape.events_with_registered(begin, progress=progress):
        if event.messages:
            content = [_sent(event), _answered(event)]
            if registered != before:  # there may be thousands
                before, names = registered, sorted(registered)
                content.append(names)
            text = json.dumps(content).encode()
            digest = hashlib.blake2b(digest + text, digest_size=16).digest()
            steps.append(_Step(event.number, digest, registered))
    return steps


def _order(event: Event) -> Any:
    return [[message.worker, message.sequence] for message in event.messages]


def _sent(event: Event) -> Any:
    fields = ("worker", "sequence", "anchor_version", "steps", "weight", "hash")
    return [[getattr(m, name) for name in fields] for m in event.messages]


def _answered(event: Event) -> Any:
    fields = ("outcome", "staleness", "factor", "reason")
    return [[getattr(m, name) for name in fields] for m in event.messages]


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
