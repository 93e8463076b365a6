"""The exchange machine of a worker: every event in every state, and what it answers."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agn_optax.worker._machine import NEXT, Counts, ExchangeMachine, State

EVENTS = sorted({event for _, event in NEXT})
NOTHING = Counts()
SLOW = [State.PENDING, State.ANSWERED]
steps = st.integers(1, 3)
weights = st.sampled_from([None, 0.5, 2.0])


def happen(machine, event):
    """Report an event with the arguments of a plain one."""
    with_arguments = {
        "start": lambda: machine.start(counts=NOTHING),
        "begin_call": lambda: machine.begin_call("exchange", 1),
    }
    with_arguments.get(event, lambda: getattr(machine, event)())()


def machine_in(state, **how):
    """Return a machine in a state, after an exchange for which it has waited."""
    machine = ExchangeMachine(**how)
    events = {
        State.NO_SESSION: [],
        State.LOCAL: ["start"],
        State.PENDING: ["start", "prepare"],
        State.ANSWERED: ["start", "prepare", "answer"],
        State.IN_FLIGHT: ["start", "prepare", "send"],
    }
    for event in events[state]:
        happen(machine, event)
    assert machine.state is state
    return machine


def attributes(machine):
    return {name: getattr(machine, name) for name in machine.__slots__}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", State)
def test_events_outside_the_table_are_impossible(state, event):
    machine = machine_in(state)
    if (state, event) in NEXT:
        happen(machine, event)
        assert machine.state is NEXT[state, event]
        return
    before = attributes(machine)
    with pytest.raises(KeyError):
        happen(machine, event)
    assert attributes(machine) == before


class Events(RuleBasedStateMachine):
    """Run a machine beside a model that knows each local step by its number.

    The model has three lists of steps: of calls that returned, of the arrays that the
    loop has (with those of calls that raised and were kept), and of the message. Each
    step has a weight, so that equal counts of other steps are noticed.
    """

    @initialize(
        overlap=st.booleans(),
        delay=st.sampled_from([0, 0, 2]),
        patience=st.sampled_from([None, 0, 1, 4]),
    )
    def create(self, overlap, delay, patience):
        self.overlap, self.delay, self.patience = overlap, delay, patience
        self.machine = ExchangeMachine(overlap=overlap, delay=delay, patience=patience)
        self.state = State.NO_SESSION
        self.exchanges = self.settled = self.late = 0
        self.round, self.arrays, self.message = [], [], []
        self.call = None  # name, arrays before, and whether a round began since
        self.raised = None  # name of a call that is repeated, and whether it is spent

    def counted(self, made):
        """Return the counts of steps."""
        weighed = [weight for _, weight in made if weight is not None]
        return Counts(sum(n for n, _ in made), sum(weighed) if weighed else None)

    def begins_round(self):
        self.round, self.arrays = [], []
        if self.call:
            self.call = (self.call[0], [], True)
        elif self.raised:
            self.raised = (self.raised[0], True)

    @property
    def has_session(self):
        return self.state is not State.NO_SESSION

    # Sessions.

    @precondition(lambda self: not self.has_session and not self.call)
    @rule(settled=st.integers(0, 3), more=st.none() | st.integers(0, 9), n=steps)
    def start(self, settled, more, n):
        self.machine.start(completed=settled, exchanges=more, counts=Counts(n, None))
        self.state, self.settled, self.late = State.LOCAL, settled, 0
        self.exchanges = self.exchanges if more is None else more
        self.round, self.arrays, self.raised = [(n, None)], [(n, None)], None

    @precondition(lambda self: not self.call)
    @rule()
    def leave(self):
        self.machine.leave()
        self.state = State.NO_SESSION

    # Calls.

    @precondition(lambda self: self.has_session and not self.call)
    @rule(name=st.sampled_from(["exchange", "flush"]), n=steps, weight=weights)
    def begin(self, name, n, weight):
        if name == "flush":
            n = 0  # it counts nothing
        added = [(n, weight)] if n else []
        repeated = self.raised is not None and self.raised[0] == name
        self.call = (name, self.arrays, False)
        base = self.round if repeated else self.arrays
        spent = repeated and self.raised[1]
        self.arrays = list(self.round) if spent else base + added
        self.machine.begin_call(name, n, weight if n else None)

    @precondition(lambda self: self.has_session and not self.call and not self.raised)
    @rule(n=steps, weight=weights)
    def count(self, n, weight):
        self.machine.count_steps(n, weight)
        self.round = self.arrays = [*self.arrays, (n, weight)]

    @precondition(lambda self: self.call)
    @rule()
    def returns(self):
        self.machine.end_call(returned=True)
        self.round, self.call, self.raised = self.arrays, None, None

    @precondition(lambda self: self.call)
    @rule(kept=st.booleans())
    def raises(self, kept):
        self.machine.end_call(returned=False, kept=kept)
        name, before, begun = self.call
        if begun or kept:
            self.raised = (name, begun)
        else:
            self.arrays = before
        self.call = None

    # A message.

    @precondition(lambda self: self.state is State.LOCAL)
    @rule()
    def make(self):
        assert self.machine.can_prepare is bool(self.arrays)
        self.machine.prepare()
        self.state, self.message = State.PENDING, self.arrays

    @precondition(lambda self: self.state is State.PENDING)
    @rule()
    def send(self):
        self.machine.send()
        self.state = State.IN_FLIGHT
        self.begins_round()

    @precondition(lambda self: self.state is State.PENDING)
    @rule()
    def answer(self):
        self.machine.answer()
        self.state = State.ANSWERED

    @precondition(lambda self: self.state in (State.PENDING, State.IN_FLIGHT))
    @rule()
    def lose(self):
        assert self.machine.lose_center() is (self.patience != 0)

    @precondition(lambda self: self.state in (State.PENDING, State.IN_FLIGHT))
    @rule()
    def discard(self):
        self.machine.discard()
        self.state = State.LOCAL

    @precondition(lambda self: self.state in (State.ANSWERED, State.IN_FLIGHT))
    @rule(resets=st.booleans())
    def adopt(self, resets):
        waited = self.state is State.ANSWERED
        self.machine.adopt(resets=resets)
        self.state = State.LOCAL
        self.exchanges += 1
        self.settled += 1
        self.late = self.counted(self.arrays).steps
        if waited or resets:
            self.begins_round()
            self.late = 0

    @invariant()
    def numbers_are_those_of_the_model(self):
        machine = self.machine
        assert machine.state is self.state
        assert (machine.exchanges, machine.completed) == (self.exchanges, self.settled)
        assert machine.number == self.settled + 1
        assert machine.committed == self.counted(self.round)
        assert machine.current == self.counted(self.arrays)
        assert machine.late == self.late
        if self.state in (*SLOW, State.IN_FLIGHT):
            assert machine.message == self.counted(self.message)

    @invariant()
    def answers_are_those_of_the_model(self):
        machine, made = self.machine, self.counted(self.arrays).steps
        in_flight = self.state is State.IN_FLIGHT
        assert machine.in_flight is in_flight
        assert machine.finished_rounds == self.exchanges + in_flight
        assert machine.has_pending_message is (self.state in SLOW)
        late = bool(self.delay) or (self.overlap and self.exchanges > 0)
        assert machine.sends_in_background is late
        assert machine.can_send_in_background is (late and self.state is State.LOCAL)
        if not self.has_session:
            return
        for length in (1, 2, 5):
            waits = max(self.patience or 0, min(self.delay, length), 1)
            if self.patience is None:
                waits = min(self.delay, length) or length
            must = made >= waits if in_flight else self.state in SLOW or made >= length
            assert machine.must_act(length) is must
            assert machine.may_receive(length) is (
                in_flight and made >= min(self.delay, length)
            )
            if must and not in_flight:  # the steps before it were not more
                assert machine.is_due(length)


def test_every_event_in_every_state():
    run_state_machine_as_test(
        Events, settings=settings(max_examples=200, stateful_step_count=40)
    )


def test_repeated_call_counts_once():
    machine = machine_in(State.LOCAL)
    for _ in range(3):
        machine.begin_call("exchange", 2, 1.5)
        assert machine.current == (2, 1.5)
        machine.end_call(returned=False)
        assert machine.current == machine.committed == (0, None)
    machine.begin_call("exchange", 2, 1.5)
    machine.end_call(returned=True)
    assert machine.current == machine.committed == (2, 1.5)


def test_steps_of_a_repeated_call_are_not_sent_twice():
    """Its message was sent in the background, and waiting for the answer raised."""
    machine = machine_in(State.LOCAL, delay=1)
    machine.begin_call("exchange", 3, 6.0)
    machine.prepare()
    machine.send()
    machine.lose_center()
    machine.end_call(returned=False, kept=True)
    assert machine.message == (3, 6.0)
    machine.begin_call("exchange", 3, 6.0)
    machine.adopt()
    assert not machine.can_prepare
    machine.end_call(returned=True)
    machine.begin_call("exchange", 3, 6.0)
    assert machine.can_prepare


def test_steps_in_kept_arrays_are_in_the_next_message():
    """Another call than the one that raised takes them along."""
    machine = machine_in(State.IN_FLIGHT)
    machine.begin_call("exchange", 1, 4.0)
    machine.adopt()
    machine.end_call(returned=False, kept=True)
    assert (machine.committed, machine.current) == (Counts(), Counts(1, 4.0))
    machine.begin_call("flush")
    machine.prepare()
    assert machine.message == (1, 4.0)


def test_discarded_message_leaves_its_steps_in_the_round():
    machine = machine_in(State.LOCAL)
    machine.begin_call("exchange", 2)
    machine.end_call(returned=True)
    for _ in range(2):
        machine.begin_call("exchange", 1)
        machine.prepare()
        assert (machine.number, machine.message.steps) == (1, 3)
        machine.discard()
        machine.end_call(returned=False)
        assert machine.committed.steps == 2


@pytest.mark.parametrize(
    "event", ["prepare", "send", "answer", "lose_center", "discard"]
)
def test_events_after_leaving_have_no_effect(event):
    """Another thread may leave while an exchange goes on."""
    machine = machine_in(State.NO_SESSION)
    happen(machine, event)
    assert machine.state is State.NO_SESSION
    machine.start(counts=NOTHING)
    assert (machine.exchanges, machine.number) == (0, 1)
