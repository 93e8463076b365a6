"""The exchange machine of a worker: when a message is sent, sent again and adopted.

The machine holds no arrays, lock, socket, thread or clock. Its owner reports events to
it, and asks it what to do next:

    start, leave     begin a session, or end it
    begin_call, end_call  a call of the training loop begins with the local steps that
                     were made before it, or ends
    prepare          a message is to be sent, with the local steps of the round so far
    send             the message is sent in the background, and a new round begins
    answer           the answer has arrived, for which the caller has waited
    lose_center      the center is unreachable: the same message must be sent again
    discard          the message was certainly not applied: before `send` its steps stay
                     in the round, afterwards they are lost
    adopt            the answer was adopted
    is_full, must_act, may_receive, is_due, sends_in_background  what to do next

The steps of a call are committed to the round when the call returns, or when a message
is sent with them. If the call raises, they are rolled back, and the same call can be
repeated; if the arrays with these steps are kept, another call includes them. `NEXT`
has the allowed events for each state.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple


class State(enum.Enum):
    """The states of a worker between and during its exchanges."""

    __hash__ = object.__hash__  # `NEXT` is read several times in each exchange

    NO_SESSION = "the worker has not started, or it has left"
    LOCAL = "local steps are made, and no message exists"
    PENDING = "a message is to be sent, perhaps again; the caller waits for its answer"
    ANSWERED = "the answer has arrived and is not adopted yet"
    IN_FLIGHT = "a message is sent in the background, and local steps go on"


# The state after an event, by the state before and the event.
NEXT = {
    (State.NO_SESSION, "start"): State.LOCAL,
    (State.LOCAL, "begin_call"): State.LOCAL,
    (State.LOCAL, "prepare"): State.PENDING,
    (State.LOCAL, "leave"): State.NO_SESSION,
    (State.PENDING, "begin_call"): State.PENDING,
    (State.PENDING, "send"): State.IN_FLIGHT,
    (State.PENDING, "answer"): State.ANSWERED,
    (State.PENDING, "lose_center"): State.PENDING,
    (State.PENDING, "discard"): State.LOCAL,
    (State.PENDING, "leave"): State.NO_SESSION,
    (State.ANSWERED, "begin_call"): State.ANSWERED,
    (State.ANSWERED, "adopt"): State.LOCAL,
    (State.ANSWERED, "leave"): State.NO_SESSION,
    (State.IN_FLIGHT, "begin_call"): State.IN_FLIGHT,
    (State.IN_FLIGHT, "lose_center"): State.IN_FLIGHT,
    (State.IN_FLIGHT, "discard"): State.LOCAL,
    (State.IN_FLIGHT, "adopt"): State.LOCAL,
    (State.IN_FLIGHT, "leave"): State.NO_SESSION,
}
# A worker may leave on another thread at any time: its exchange then ends without an
# effect.
NEXT |= {
    (State.NO_SESSION, event): State.NO_SESSION
    for _, event in [*NEXT]
    if event != "start"
}
# The same by event. A lookup in it makes no tuple, and an exchange needs four of them.
_AFTER: dict[str, dict[State, State]] = {event: {} for _, event in NEXT}
for (_before, _event), _after in NEXT.items():
    _AFTER[_event][_before] = _after
# Attributes of an enum are slow to read in Python 3.11.
_LOCAL, _PENDING = State.LOCAL, State.PENDING
_ANSWERED, _IN_FLIGHT = State.ANSWERED, State.IN_FLIGHT


class Counts(NamedTuple):
    """The local steps of a round, and their weight."""

    steps: int = 0
    weight: float | None = None  # None if none was given

    def plus(self, steps: int, weight: float | None) -> Counts:
        """Return the counts with more steps and their weight."""
        if weight is not None:
            weight = (self.weight or 0.0) + weight
        return Counts(self.steps + steps, self.weight if weight is None else weight)


_NO_COUNTS = Counts()


class ExchangeMachine:
    """The state of a worker's exchanges, or of those of one fragment.

    Args:
      overlap: whether messages after the first one are sent in the background.
      delay: local steps after which an answer is adopted; 0 adopts it as soon as it
        arrives. With a delay, all messages are sent in the background.
      patience: local steps without an answer after which the worker waits; None is one
        round. With 0, a lost center is an error.

    Attributes:
      state: the state; all other attributes are numbers.
      exchanges: number of answers adopted, in all sessions.
      completed: number of exchanges completed in this session.
      committed: counts of the round so far, of calls that have returned.
      current: counts in the loop's arrays: ``committed`` with those of the call in
        progress, or of a call that raised and whose arrays are kept.
      message: counts of the message.
      late: local steps that the loop had made since a message when its answer was
        adopted, for the next message; 0 if the worker waited for the answer.
    """

    __slots__ = (  # a simulation has many machines
        *("overlap", "delay", "patience", "state", "exchanges", "completed"),
        *("committed", "current", "message", "late"),
        *("_call", "_before_call", "_round_began", "_raised", "_raised_was_used"),
    )

    def __init__(
        self, *, overlap: bool = False, delay: int = 0, patience: int | None = None
    ) -> None:
        self.overlap = overlap
        self.delay = delay
        self.patience = patience
        self.state = State.NO_SESSION
        self.exchanges = 0
        self.completed = 0
        self.committed = self.current = self.message = _NO_COUNTS
        self.late = 0
        self._call = ""  # name of the call in progress; "" if it counts nothing
        self._before_call = _NO_COUNTS  # `current` before that call
        self._round_began = False  # whether a round began in that call
        # Name of the last call that raised after its arrays were donated, until a call
        # returns; and whether its counts are in a message, or were discarded.
        self._raised = ""
        self._raised_was_used = False

    def start(
        self,
        *,
        completed: int = 0,
        exchanges: int | None = None,
        counts: Counts,
        late: int = 0,
    ) -> None:
        """Begin a session, or resume one with ``completed`` exchanges."""
        self._move("start")
        if exchanges is not None:
            self.exchanges = exchanges
        self.completed = completed
        self.committed = self.current = counts
        self.late = late
        self._call = self._raised = ""

    def leave(self) -> None:
        """End the session; the counts of a message without an answer are lost."""
        self._move("leave")

    def begin_call(
        self, call: str, steps: int = 0, weight: float | None = None
    ) -> None:
        """Begin a call of this name, with its local steps and their weight."""
        self._move("begin_call")
        self._call, self._before_call, self._round_began = call, self.current, False
        if call != self._raised:
            self.current = self.current.plus(steps, weight)
        elif self._raised_was_used:
            self.current = self.committed
        else:  # the call that raised is repeated
            self.current = self.committed.plus(steps, weight)

    def count_steps(self, steps: int, weight: float | None) -> None:
        """Count the local steps of a call that does nothing else."""
        self.committed = self.current = self.current.plus(steps, weight)

    def end_call(self, *, returned: bool, kept: bool = False) -> None:
        """End the call.

        Args:
          returned: whether the call returned; if it raised, its counts are rolled back.
          kept: whether arrays with its local steps are kept for the next call.
        """
        if returned:
            self.committed, self._raised = self.current, ""
        elif self._round_began or kept:
            self._raised, self._raised_was_used = self._call, self._round_began
        else:
            self.current = self._before_call
        self._call = ""

    def prepare(self) -> None:
        """Record that a message is to be sent, with the local steps of the round."""
        self._move("prepare")
        self.message = self.current

    def send(self) -> None:
        """Record that the message is sent in the background; a new round begins."""
        self._move("send")
        self._begin_round()

    def answer(self) -> None:
        """Record that the answer has arrived, for which the caller waits."""
        self._move("answer")

    def lose_center(self) -> bool:
        """Record that the center is lost; return whether to continue without it."""
        self._move("lose_center")
        return self.patience != 0

    def discard(self) -> None:
        """Record that the message was not sent, or certainly not applied."""
        self._move("discard")

    def adopt(self, *, resets: bool = False) -> None:
        """Record that the answer was adopted.

        Args:
          resets: whether local steps made since the message are discarded, too.
        """
        begins = resets or self.state is _ANSWERED
        self._move("adopt")
        self.completed += 1
        self.exchanges += 1
        self.late = 0 if begins else self.current.steps
        if begins:
            self._begin_round()

    @property
    def number(self) -> int:
        """The number of the message in its session, or of the next if there is none."""
        return self.completed + 1

    @property
    def finished_rounds(self) -> int:
        """The number of finished rounds; the length of a round depends on it."""
        return self.exchanges + (self.state is _IN_FLIGHT)

    @property
    def in_flight(self) -> bool:
        """True if a message is in flight, while local steps go on."""
        return self.state is _IN_FLIGHT

    @property
    def has_pending_message(self) -> bool:
        """True if a message must be sent, or its answer adopted, before all else."""
        return self.state is _PENDING or self.state is _ANSWERED

    @property
    def sends_in_background(self) -> bool:
        """True if the next message is sent in the background.

        With overlap the first message is not, so that a new worker starts from a center
        that includes this message.
        """
        return bool(self.delay or (self.overlap and self.exchanges))

    @property
    def can_send_in_background(self) -> bool:
        """True if a message can be prepared now, and will be sent in the background."""
        return self.state is _LOCAL and self.sends_in_background

    @property
    def can_prepare(self) -> bool:
        """True if a message can be prepared: there are steps, and no message."""
        return self.state is _LOCAL and self.current.steps > 0

    def is_full(self, length: int) -> bool:
        """Return whether a round of ``length`` is full."""
        return self.current.steps >= length

    def must_act(self, length: int) -> bool:
        """Return whether a call must send a message, or wait for an answer."""
        return self.has_pending_message or self.steps_left(length) <= 0

    def may_receive(self, length: int) -> bool:
        """Return whether an answer to the message in flight may be adopted."""
        return self.in_flight and self.steps_left(length, is_answered=True) <= 0

    def steps_left(self, length: int, *, is_answered: bool = False) -> int:
        """Return the local steps until a call sends a message, or needs an answer.

        Args:
          length: the length of the round.
          is_answered: whether the answer to a message in flight has arrived.
        """
        made = self.current.steps
        if self.state is not _IN_FLIGHT:
            return length - made
        delay = min(self.delay, length)  # the round may be shorter
        if is_answered:
            return delay - made
        if self.patience is not None:
            return max(self.patience, delay, 1) - made
        return (delay or length) - made

    def is_due(self, length: int, steps: int = 1) -> bool:
        """Return whether a call after ``steps`` more local steps may do anything."""
        made = self.current.steps + steps
        if made >= length or self._raised:
            return True
        if self.state is _LOCAL:
            return False
        return self.has_pending_message or (self.in_flight and made >= self.delay)

    def _begin_round(self) -> None:
        self.committed = self.current = self._before_call = _NO_COUNTS
        self._round_began = True
        self._raised_was_used = self._raised_was_used or not self._call

    def _move(self, event: str) -> None:
        self.state = _AFTER[event][self.state]


def due_fragments(
    machines: Sequence[ExchangeMachine],
    turn: int,
    must_act_now: Callable[[int], bool],
    is_full: Callable[[int], bool],
) -> list[int]:
    """Return the fragments of one call: one to adopt, and perhaps one to send.

    Args:
      machines: the machine of each fragment.
      turn: the fragment that comes first.
      must_act_now: whether an action of a fragment is due.
      is_full: whether the round of a fragment is full.
    """
    fragments = range(len(machines))
    if pending := [f for f in fragments if machines[f].has_pending_message]:
        return pending  # must be completed before all else
    due = [f for f in (*fragments[turn:], *fragments[:turn]) if must_act_now(f)]
    receiving = [f for f in due if machines[f].in_flight][:1]
    if not receiving or is_full(receiving[0]):  # it also sends
        return due[:1]
    return receiving + [f for f in due if machines[f].can_send_in_background][:1]
