"""The exchange machine of a worker: when a message is made, sent, and sent again.

The machine holds no arrays, no lock, no socket, no thread and no clock. Its owner
reports events, and asks questions that are answered from numbers alone:

    start, leave     begin a session, or end it
    begin, end       a call of the loop begins with the counts of its round, or ends
    make             a message exists; it is made of the round
    send             the message is sent in the background, and a new round begins
    answer           the answer has arrived, for which the caller has waited
    lose             the center is unreachable: the same message must be sent again
    discard          the message was certainly not applied: before `send` its steps stay
                     in the round, afterwards they are lost
    adopt            the answer was adopted
    is_full, must_act, may_receive, is_due, background  what to do next

The counts of a call (local steps and their weight) become those of the round when the
call returns, or when a message exists with them. If the call raises, the same call
again has the same effect, and another one does not lose the steps of arrays that are
kept. The table `NEXT` has the allowed events for each state.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.Enum):
    """The states of a worker between and during its exchanges."""

    GONE = "it has not started, or it has left"
    LOCAL = "local steps are made, and no message exists"
    MADE = "a message exists: the caller waits for its answer, or sends it again"
    ANSWERED = "the answer has arrived and is not adopted yet"
    IN_FLIGHT = "a message is sent in the background, and local steps go on"


# The state after an event, by the state before and the event.
NEXT = {
    (State.GONE, "start"): State.LOCAL,
    (State.LOCAL, "begin"): State.LOCAL,
    (State.LOCAL, "make"): State.MADE,
    (State.LOCAL, "leave"): State.GONE,
    (State.MADE, "begin"): State.MADE,
    (State.MADE, "send"): State.IN_FLIGHT,
    (State.MADE, "answer"): State.ANSWERED,
    (State.MADE, "lose"): State.MADE,
    (State.MADE, "discard"): State.LOCAL,
    (State.MADE, "leave"): State.GONE,
    (State.ANSWERED, "begin"): State.ANSWERED,
    (State.ANSWERED, "adopt"): State.LOCAL,
    (State.ANSWERED, "leave"): State.GONE,
    (State.IN_FLIGHT, "begin"): State.IN_FLIGHT,
    (State.IN_FLIGHT, "lose"): State.IN_FLIGHT,
    (State.IN_FLIGHT, "discard"): State.LOCAL,
    (State.IN_FLIGHT, "adopt"): State.LOCAL,
    (State.IN_FLIGHT, "leave"): State.GONE,
}
# A worker may leave on another thread at any time: its exchange then goes on to its
# end, and has no effect.
_ALWAYS = ("begin", "make", "send", "answer", "lose", "discard", "adopt", "leave")
NEXT |= {(State.GONE, event): State.GONE for event in _ALWAYS}


class Counts(NamedTuple):
    """The local steps of a round, and their weight."""

    steps: int = 0
    weight: float | None = None  # None if none was given

    def plus(self, steps: int, weight: float | None) -> Counts:
        """Return the counts with more steps and their weight."""
        if weight is not None:
            weight = (self.weight or 0.0) + weight
        return Counts(self.steps + steps, self.weight if weight is None else weight)


class Machine:
    """The exchanges of a worker, or of one fragment of a worker.

    Args:
      overlap: whether messages after the first one are sent in the background.
      delay: local steps after which an answer is adopted; 0 adopts it once it is there.
        With a delay, all messages are sent in the background.
      patience: local steps without an answer after which the worker waits; None is one
        round. With 0, a lost center is an error.

    Attributes:
      state: the state; all other attributes are numbers.
      exchanges: number of answers adopted, in all sessions.
      settled: number of exchanges of this session that are over.
      counts: counts of the round so far, by calls that have returned.
      now: counts of the loop's arrays: the same, with those of the call under way, or
        of one that raised and whose arrays are kept.
      message: counts of the message under way.
    """

    def __init__(
        self, *, overlap: bool = False, delay: int = 0, patience: int | None = None
    ) -> None:
        self.overlap = overlap
        self.delay = delay
        self.patience = patience
        self.state = State.GONE
        self.exchanges = 0
        self.settled = 0
        self.counts = self.now = self.message = Counts()
        self._call = ""  # name of the call under way; "" if it counts nothing
        self._before = Counts()  # `now` before that call
        self._begun = False  # whether a round began in that call
        # Name of the last call that raised after its arrays were donated, until one
        # returns; and whether its counts are in a message, or were discarded.
        self._raised = ""
        self._spent = False

    def start(
        self, *, settled: int = 0, exchanges: int | None = None, counts: Counts
    ) -> None:
        """Begin a session, new or resumed, in which ``settled`` exchanges are over."""
        self._move("start")
        if exchanges is not None:
            self.exchanges = exchanges
        self.settled = settled
        self.counts = self.now = counts
        self._call = self._raised = ""

    def leave(self) -> None:
        """End the session; the counts of a message without an answer are lost."""
        self._move("leave")

    def begin(self, call: str, steps: int = 0, weight: float | None = None) -> None:
        """Begin a call of this name, with its local steps and their weight."""
        self._move("begin")
        self._call, self._before, self._begun = call, self.now, False
        if call != self._raised:
            self.now = self.now.plus(steps, weight)
        elif self._spent:
            self.now = self.counts
        else:  # it is repeated
            self.now = self.counts.plus(steps, weight)

    def count(self, steps: int, weight: float | None) -> None:
        """Count a call that is not due."""
        self.counts = self.now = self.now.plus(steps, weight)

    def end(self, *, returns: bool, keeps: bool = False) -> None:
        """End the call.

        Args:
          returns: whether it returns; if it raises, the round has no counts of it.
          keeps: whether arrays with its local steps are kept for the next call.
        """
        if returns:
            self.counts, self._raised = self.now, ""
        elif self._begun or keeps:
            self._raised, self._spent = self._call, self._begun
        else:
            self.now = self._before
        self._call = ""

    def make(self) -> None:
        """Record that a message exists, made of the round."""
        self._move("make")
        self.message = self.now

    def send(self) -> None:
        """Record that the message is sent in the background, and begin a round."""
        self._move("send")
        self._begin_round()

    def answer(self) -> None:
        """Record that the answer has arrived, for which the caller waits."""
        self._move("answer")

    def lose(self) -> bool:
        """Record that the center is lost; return whether to go on without it."""
        self._move("lose")
        return self.patience != 0

    def discard(self) -> None:
        """Record that the message was not sent, or certainly not applied."""
        self._move("discard")

    def adopt(self, *, resets: bool = False) -> None:
        """Record that the answer was adopted.

        Args:
          resets: whether local steps made since the message are discarded, too.
        """
        begins = resets or self.state is State.ANSWERED
        self._move("adopt")
        self.settled += 1
        self.exchanges += 1
        if begins:
            self._begin_round()

    @property
    def number(self) -> int:
        """The number of the message under way, or of the next one, in its session."""
        return self.settled + 1

    @property
    def round(self) -> int:
        """The number of rounds before this one, by which its length is scheduled."""
        return self.exchanges + self.in_flight

    @property
    def in_flight(self) -> bool:
        """True if local steps go on while a message has no answer."""
        return self.state is State.IN_FLIGHT

    @property
    def is_stuck(self) -> bool:
        """True if a message must be completed before anything else."""
        return self.state in (State.MADE, State.ANSWERED)

    @property
    def background(self) -> bool:
        """True if the next message is sent in the background.

        With overlap the first one is not, so that a new worker starts from a center
        that includes its message.
        """
        return bool(self.delay or (self.overlap and self.exchanges))

    @property
    def sends_in_background(self) -> bool:
        """True if a message that is made now is sent in the background."""
        return self.state is State.LOCAL and self.background

    @property
    def can_make(self) -> bool:
        """True if a message can be made: the round has steps, and there is none."""
        return self.state is State.LOCAL and self.now.steps > 0

    def is_full(self, length: int) -> bool:
        """Return whether a round of ``length`` is full."""
        return self.now.steps >= length

    def must_act(self, length: int) -> bool:
        """Return whether a call must send, or wait for an answer."""
        if not self.in_flight:
            return self.is_stuck or self.is_full(length)
        delay = min(self.delay, length)  # the round may be shorter
        patience = delay or length
        if self.patience is not None:
            patience = max(self.patience, delay, 1)
        return self.now.steps >= patience

    def may_receive(self, length: int) -> bool:
        """Return whether an answer to the message in flight may be adopted."""
        return self.in_flight and self.now.steps >= min(self.delay, length)

    def is_due(self, length: int, steps: int = 1) -> bool:
        """Return whether a call after ``steps`` more local steps acts, or may act."""
        made = self.now.steps + steps
        if made >= length or self._raised:
            return True
        if self.state is State.LOCAL:
            return False
        return self.is_stuck or (self.in_flight and made >= self.delay)

    def _begin_round(self) -> None:
        self.counts = self.now = self._before = Counts()
        self._begun = True
        self._spent = self._spent or not self._call

    def _move(self, event: str) -> None:
        self.state = NEXT[self.state, event]
