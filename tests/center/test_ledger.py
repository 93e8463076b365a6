"""The ledger: every command in every state, and examples of each policy."""

import dataclasses
import json
import math

import pytest
from helpers import shared
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

from agn_optax import errors
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    CenterSettings,
    Limits,
    MessageLimits,
    Submission,
    Synchronous,
    _ledger,
)
from agn_optax.center._ledger import NEXT, Stage

MODES = [
    Asynchronous(),
    BoundedStaleness(versions=1),
    BoundedStaleness(rounds=1),
    BoundedStaleness(versions=1, rounds=0),
    Synchronous(),
    Synchronous(late="drop"),
    Synchronous(quorum=2, grace=0.3),
    Synchronous(quorum=1, late="drop"),
    Synchronous(quorum=2, grace=0.7, late="weighted"),
]
NAMES = st.sampled_from(["anna", "bert", "carl", "dora"])
SESSION_IDS = st.integers(0, 2).map(str)
REMEMBERED = 2  # ended sessions that are remembered
RULE = shared.downpour()
IN_A_ROW = 2  # consecutive rejections; the last one raises


@dataclasses.dataclass
class KnownSession:
    """The model's state of one session of a worker."""

    session_id: str
    round_version: int
    rounds: int
    timeout: float | None
    index: int
    connection: int = 1
    connected: bool = True
    until: float = math.inf
    has_ended: bool = False
    settled: int = 0
    unacknowledged: bool = False  # a response waits for acknowledgement
    exchanges: int = 0
    dropped: int = 0
    rejected: int = 0
    consecutive_rejections: int = 0
    message: tuple | None = None  # sequence, anchor, time

    @property
    def state(self):
        if self.has_ended:
            return Stage.ENDED
        if self.message:
            return Stage.WAITING
        return Stage.ANSWERED if self.unacknowledged else Stage.IDLE


class Commands(RuleBasedStateMachine):
    """Run a ledger beside a model that checks whether each result is allowed.

    For `due`, the model does not predict the batch; it checks whether the batch, or its
    absence, is allowed.
    """

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.now = 100.0
        self.looked = -math.inf
        self.version = 0
        self.last = {}  # session of every name
        self.ended = []  # names of ended sessions, the last one last
        self.newly_ended = set()

    @initialize(
        lease=st.sampled_from([0.0, 0.1, 1.0]),
        room=st.sampled_from([None, 2, 3]),
        barrier=st.integers(0, 2),
    )
    def start(self, lease, room, barrier):
        self.lease, self.room, self.barrier = lease, room, barrier
        self.open = barrier == 0
        self.ledger = self.new()

    def new(self):
        limits = Limits(
            lease=self.lease,
            max_workers=self.room,
            messages=MessageLimits(in_a_row=IN_A_ROW, norm=1.0),
        )
        return make_ledger(
            self.mode, limits=limits, barrier=self.barrier, version=self.version
        )

    # The state of the model.

    @property
    def there(self):
        return {name: k for name, k in self.last.items() if not k.has_ended}

    @property
    def waiting(self):
        return {name: k for name, k in self.there.items() if k.message}

    def is_there(self, name, session_id):
        return name in self.there and self.last[name].session_id == session_id

    def end_session(self, name):
        known = self.last[name]
        known.has_ended, known.connected, known.until = True, False, math.inf
        known.message, known.unacknowledged = None, False
        self.newly_ended.add(name)
        self.ended.append(name)
        if len(self.ended) > REMEMBERED:
            del self.last[self.ended.pop(0)]

    def expire(self):
        """Check which workers are still present."""
        pause, self.looked = self.now - self.looked, self.now
        for name, known in self.there.items():
            silent = known.connected and known.timeout is not None
            if silent and pause > known.timeout / 2:  # the ledger itself paused
                known.until = max(known.until, self.now + known.timeout)
            if known.until <= self.now:
                self.end_session(name)

    def received(self, known):
        if known.connected:
            given = known.timeout is not None
            known.until = self.now + known.timeout if given else math.inf

    def slowest(self, default, but=None):
        rounds = [k.rounds for name, k in self.there.items() if name != but]
        return min(rounds, default=default)

    def index(self, name):
        """Return the last index of a worker, or the smallest one that is free."""
        taken = {k.index for other, k in self.there.items() if other != name}
        old = self.last.get(name)
        if old is not None and old.index not in taken:
            return old.index
        return min({*range(len(taken) + 1)} - taken)

    def round_staleness(self, name):
        """Return the versions since the round began, or since the anchor if newer."""
        return self.version - self.last[name].round_version

    def may_apply(self, names):
        """Return whether the mode allows these messages to be applied together now."""
        mode = self.mode
        if isinstance(mode, Asynchronous):
            return len(names) == 1
        if isinstance(mode, BoundedStaleness):
            (name,) = names
            near = mode.versions is None or self.round_staleness(name) <= mode.versions
            ahead = self.last[name].rounds - self.slowest(0)
            return near and (mode.rounds is None or ahead <= mode.rounds)
        if mode.late == "drop" and any(map(self.round_staleness, names)):
            return False
        if set(names) != set(self.waiting):
            return False
        on_time = [name for name in names if not self.round_staleness(name)]
        first = min(self.last[name].message[2] for name in on_time or names)
        enough = mode.quorum is not None and len(names) >= mode.quorum
        return set(names) == set(self.there) or (
            enough and self.now >= first + mode.grace
        )

    def may_drop(self, name):
        if isinstance(self.mode, BoundedStaleness):
            bound = self.mode.versions
            return bound is not None and self.round_staleness(name) > bound
        return (
            isinstance(self.mode, Synchronous)
            and self.mode.late == "drop"
            and self.round_staleness(name) > 0
        )

    def may_wait(self):
        """Return whether the mode allows that no waiting message is settled now."""
        waiting = list(self.waiting)
        alone = not isinstance(self.mode, Synchronous)
        groups = [[name] for name in waiting] if alone else [waiting]
        return not any(self.may_drop(name) for name in waiting) and not any(
            group and self.may_apply(group) for group in groups
        )

    # Commands.

    @rule(
        name=NAMES,
        session_id=SESSION_IDS,
        replace=st.booleans(),
        resume=st.booleans(),
        timeout=st.sampled_from([None, None, 0.5, 2.0]),
    )
    def join(self, name, session_id, replace, resume, timeout):
        self.expire()
        old = self.last.get(name)
        same = old is not None and old.session_id == session_id
        needs_room = old is None or old.has_ended
        full = self.room is not None and len(self.there) >= self.room
        error = None
        if resume and not same:
            error = errors.WorkerStateError
        elif not (same or needs_room or replace) and old.connected:
            error = errors.NameTakenError
        elif needs_room and full:
            error = errors.CenterFullError
        arguments = {"replace": replace, "resume": resume, "heartbeat_timeout": timeout}
        if error:
            with pytest.raises(error, match=name):
                self.ledger.join(name, session_id, self.now, **arguments)
            return
        index = self.index(name)
        connection = self.ledger.join(name, session_id, self.now, **arguments)
        self.newly_ended.discard(name)
        if name in self.ended:
            self.ended.remove(name)
            self.last[name] = self.last.pop(name)  # now the most recent one
        if same:
            if old.has_ended:
                old.rounds = self.slowest(old.rounds)
            old.connected, old.has_ended, old.timeout = True, False, timeout
            old.connection += 1
        else:
            rounds = self.slowest(0, but=name)
            self.last[name] = KnownSession(
                session_id, self.version, rounds, timeout, index
            )
        self.last[name].index = index
        self.received(self.last[name])
        assert connection == self.last[name].connection
        self.open = self.open or len(self.there) >= self.barrier

    @rule(name=NAMES, session_id=SESSION_IDS)
    def leave(self, name, session_id):
        is_there = self.is_there(name, session_id)
        assert self.ledger.leave(name, session_id) == is_there
        if is_there:
            self.end_session(name)

    @rule(name=NAMES, session_id=SESSION_IDS, earlier=st.sampled_from([0, 0, 1]))
    def disconnect(self, name, session_id, earlier):
        known = self.last.get(name)
        connection = (known.connection if known else 1) - earlier
        self.ledger.disconnect(name, session_id, connection, self.now)
        if self.is_there(name, session_id) and not earlier:
            known.connected, known.until = False, self.now + self.lease

    @rule(name=NAMES, session_id=SESSION_IDS)
    def heartbeat(self, name, session_id):
        self.expire()
        is_there = self.is_there(name, session_id)
        assert self.ledger.heartbeat(name, session_id, self.now) == is_there
        if is_there:
            self.received(self.last[name])

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 10.0]), looks=st.booleans())
    def time_passes(self, seconds, looks):
        """Without a check, the center itself may have been asleep."""
        self.now += seconds
        if looks:
            self.ledger.expire(self.now)
            self.expire()

    @rule(
        name=NAMES,
        session_id=SESSION_IDS,
        ahead=st.integers(-1, 2),
        old=st.integers(-1, 2),
    )
    def submit(self, name, session_id, ahead, old):
        """Send mostly invalid messages; `send` makes valid ones."""
        self.expire()
        known = self.last.get(name)
        sequence = (known.settled if known else 0) + ahead
        anchor = self.version - old
        if self.is_there(name, session_id):
            self.received(known)
        error, message = None, Submission(sequence, None, anchor)
        if not self.is_there(name, session_id):
            error = errors.WorkerStateError
        elif not 0 <= anchor <= self.version:
            error = errors.InvalidArgumentError
        elif ahead not in (0, 1) or sequence < 1:
            error = errors.WorkerStateError
        if error:
            with pytest.raises(error):
                self.ledger.submit(name, session_id, message, self.now)
            return
        waits = self.ledger.submit(name, session_id, message, self.now)
        assert waits == (ahead == 1)
        if waits:
            known.unacknowledged = False
        if waits and known.message is None:
            known.round_version = max(known.round_version, anchor)
            known.message = (sequence, anchor, self.now)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def send(self, data):
        """Send the next message of a present worker, from its adopted version."""
        name = data.draw(st.sampled_from(sorted(self.there)))
        known = self.last[name]
        oldest = max(0, known.round_version - 1)  # the version before its own message
        anchor = data.draw(st.integers(oldest, self.version))
        self.submit(name, known.session_id, 1, self.version - anchor)

    @rule(name=NAMES, session_id=SESSION_IDS, ahead=st.sampled_from([-1, 0, 0, 1]))
    def acknowledge(self, name, session_id, ahead):
        known = self.last.get(name)
        sequence = (known.settled if known else 0) + ahead
        self.ledger.acknowledge(name, session_id, sequence)
        if self.is_there(name, session_id) and ahead == 0:
            known.unacknowledged = False

    @rule(fails=st.booleans(), unwanted=st.sets(NAMES))
    def due(self, fails, unwanted):
        """If applying a batch fails, the messages count as never received."""
        self.apply_batch(fails, unwanted)

    def apply_batch(self, fails=False, unwanted=()):
        """Return whether there was a batch; settle or reject it."""
        for name, entry in self.ledger.pending.items():
            norm = 2.0 if name in unwanted else 0.0
            self.ledger.pending[name] = entry._replace(norm=norm)
        batch = self.ledger.due(self.now)
        self.expire()
        if batch is None:
            assert self.may_wait()
            deadline = self.ledger.deadline()
            assert deadline is None or deadline > self.now
            return False
        names = [entry.worker for entry in batch.entries]
        assert names
        assert names == sorted(set(names))
        if batch.applies:
            assert self.may_apply(names)
        else:
            assert all(map(self.may_drop, names))
        for i, name in enumerate(names):
            entry = batch.entries[i]
            sequence, anchor, arrived = self.last[name].message
            assert entry.submission == Submission(sequence, None, anchor)
            assert entry.arrived == arrived
            assert batch.staleness[i] == self.version - anchor >= 0
            assert batch.indices[i] == self.last[name].index
            if not isinstance(self.mode, Synchronous):
                assert batch.weights is None
            elif self.mode.late == "weighted":
                assert batch.weights[i] == 1 / (1 + self.round_staleness(name))
            else:
                assert batch.weights[i] == 1
        rejected = {name for name in names if name in unwanted and batch.applies}
        assert rejected == batch.rejected.keys()
        moves = batch.applies and rejected != set(names)
        for name in names:
            known = self.last[name]
            sequence, known.message = known.message[0], None
            if fails:
                continue
            known.rejected += name in rejected
            known.consecutive_rejections += name in rejected
            if name in rejected and known.consecutive_rejections >= IN_A_ROW:
                continue  # counts as never received, too
            assert sequence == known.settled + 1  # no exchange is settled twice
            known.settled, known.unacknowledged = sequence, True
            known.round_version = self.version + moves
            known.rounds += batch.applies
            if batch.applies and name not in rejected:
                known.exchanges += 1
                known.consecutive_rejections = 0
            known.dropped += not batch.applies
        if fails:
            self.ledger.fail(batch)
        else:
            self.ledger.settle(batch, self.now)
            self.version += moves
        return True

    @rule()
    def restart(self):
        """End the process; its state is saved and restored."""
        saved = json.loads(json.dumps(self.ledger.state_to_save()))
        self.ledger, self.looked = self.new(), -math.inf
        self.ledger.restore(saved, self.now)
        for known in self.there.values():
            known.connected, known.connection, known.timeout = False, 0, None
            known.until = self.now + self.lease
            known.message, known.unacknowledged = None, False
        for known in self.last.values():
            known.connection = 0
        self.ledger.take_ended()  # departures that the owner has not seen before
        self.newly_ended.clear()

    @precondition(lambda self: self.ledger.deadline() is not None)
    @rule()
    def wait_for_the_deadline(self):
        self.now = max(self.now, self.ledger.deadline())
        before = set(self.there)
        silent = any(k.connected and k.timeout for k in self.there.values())
        # The deadline may only serve to show that the center is awake.
        assert self.apply_batch() or set(self.there) != before or silent

    # Invariants.

    @invariant()
    def model_agrees_with_the_ledger(self):
        ledger = self.ledger
        assert ledger.version == self.version
        assert ledger.is_open == self.open
        assert set(ledger.registered()) == set(self.there)
        assert self.room is None or len(ledger.registered()) <= self.room
        for name, known in self.last.items():
            member = ledger.find(name)
            assert (member.session_id, member.state) == (known.session_id, known.state)
            assert (member.connected, member.round_version, member.rounds) == (
                known.connected,
                known.round_version,
                known.rounds,
            )
            assert (member.connection, member.expires) == (
                known.connection,
                known.until,
            )
            assert member.index == known.index
            assert (member.sequence, member.exchanges, member.dropped) == (
                known.settled,
                known.exchanges,
                known.dropped,
            )
            assert (member.rejected, member.consecutive_rejections) == (
                known.rejected,
                known.consecutive_rejections,
            )
            settled = member.exchanges + member.dropped
            assert settled <= member.sequence <= settled + member.rejected

    @invariant()
    def only_the_last_ended_sessions_are_remembered(self):
        names = set(ledger_names(self.ledger))
        assert names == set(self.last)
        assert len(names) - len(self.there) <= REMEMBERED

    @rule()
    def ended_sessions_are_reported_once(self):
        assert sorted(self.ledger.take_ended()) == sorted(self.newly_ended)
        assert self.ledger.take_ended() == []
        self.newly_ended.clear()

    @invariant()
    def only_present_workers_are_pending(self):
        assert {n: e.submission.sequence for n, e in self.ledger.pending.items()} == {
            n: k.message[0] for n, k in self.waiting.items()
        }

    @rule()
    def waiting_messages_are_settled_in_finite_time(self):
        """All connected workers send; then each waiting message is settled."""
        for name, known in self.there.items():
            if known.connected and not known.message:
                self.submit(name, known.session_id, 1, 0)
        for _ in range(40):
            if self.apply_batch() or not self.waiting:
                return
            self.now = self.ledger.deadline()
        raise AssertionError("nothing happened at forty deadlines")

    @rule()
    def silent_workers_are_removed_in_finite_time(self):
        """It is enough to check at each deadline."""
        silent = {n: k for n, k in self.there.items() if k.connected and k.timeout}
        for _ in range(100):
            if all(known.has_ended for known in silent.values()):
                return
            self.now = self.ledger.deadline()
            self.apply_batch()
        raise AssertionError("somebody is there for ever")

    def teardown(self):
        if hasattr(self, "ledger"):
            self.waiting_messages_are_settled_in_finite_time()


def ledger_names(ledger):
    return ledger.state_to_save()["members"]


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_every_command_in_every_state(mode, monkeypatch):
    monkeypatch.setattr(_ledger, "_MAX_ENDED_SESSIONS", REMEMBERED)
    run_state_machine_as_test(
        lambda: Commands(mode),
        settings=settings(max_examples=25, stateful_step_count=30),
    )


@pytest.mark.parametrize("state", Stage, ids=lambda state: state.name)
@pytest.mark.parametrize("event", sorted({event for _, event in NEXT}))
def test_transition_table_matches_the_commands(state, event):
    """Events that are not in the table are rejected or have no effect."""
    ledger = make_ledger(Synchronous(quorum=1), "a")
    if state is not Stage.IDLE:
        send(ledger, "a")
    waiting = ledger.due(0.0) if state is Stage.ANSWERED else None
    if state is Stage.ANSWERED:
        ledger.settle(waiting, 0.0)
    elif state is Stage.ENDED:
        ledger.leave("a", "1")
    member = ledger.find("a")
    assert member.state is state
    last = member.sequence
    commands = {
        "join": lambda: ledger.join("a", "1", 0.0),
        "submit": lambda: ledger.submit("a", "1", Submission(last + 1, None, 0), 0.0),
        "repeat": lambda: ledger.submit(
            "a", "1", Submission(last + (state is Stage.WAITING), None, 0), 0.0
        ),
        "settle": lambda: ledger.settle(ledger.due(0.0), 0.0),
        "fail": lambda: ledger.fail(ledger.due(0.0)),
        "acknowledge": lambda: ledger.acknowledge("a", "1", last),
        "disconnect": lambda: ledger.disconnect("a", "1", 1, 0.0),
        "leave": lambda: ledger.leave("a", "1"),
    }
    if event in ("settle", "fail") and state is not Stage.WAITING:
        assert (state, event) not in NEXT
        assert ledger.due(0.0) is None  # there is nothing to settle
        return
    if event == "repeat" and state is Stage.IDLE:
        # Repeat a finished exchange whose response was acknowledged.
        assert exchange(ledger, "a") == "a"
        ledger.acknowledge("a", "1", 1)
        last = 1
    rejected = state is Stage.ENDED and event in ("submit", "repeat")
    without_effect = state is Stage.ENDED and event != "join" and not rejected
    # A second submit while a message waits repeats that message.
    same = (state, event) == (Stage.WAITING, "submit")
    if rejected:
        with pytest.raises(errors.WorkerStateError, match="join again"):
            commands[event]()
    else:
        commands[event]()
    assert ((state, event) in NEXT) != (rejected or without_effect or same)
    assert member.state is NEXT.get((state, event), state)


# Examples of each policy. A worker's only session is called "1".


def make_ledger(mode=None, workers="", version=0, **settings):
    ledger = CenterSettings(RULE, mode=mode, **settings).make_ledger()
    ledger.version = version
    for worker in workers:
        ledger.join(worker, "1", 0.0)
    return ledger


def send(ledger, worker, anchor=None, now=0.0):
    sequence = ledger.find(worker).sequence + 1
    anchor = ledger.version if anchor is None else anchor
    assert ledger.submit(worker, "1", Submission(sequence, None, anchor), now)


def take(ledger, now=0.0):
    """Return the names of the next batch, which is settled; "" if all must wait."""
    batch = ledger.due(now)
    if batch is None:
        return ""
    ledger.settle(batch, 0.0)
    return "".join(e.worker for e in batch.entries) + "!" * (not batch.applies)


def exchange(ledger, worker, anchor=None, now=0.0):
    send(ledger, worker, anchor, now)
    return take(ledger, now)


def test_asynchronous_mode_never_waits():
    ledger = make_ledger(workers="abc")
    for worker in "cab":
        send(ledger, worker)
    assert [take(ledger) for _ in range(4)] == ["c", "a", "b", ""]
    assert ledger.version == 3
    assert [ledger.find(w).staleness for w in "cab"] == [0, 1, 2]
    assert ledger.deadline() is None


def test_version_bound_drops_older_messages():
    ledger = make_ledger(BoundedStaleness(versions=1), "abc")
    assert exchange(ledger, "a") == exchange(ledger, "a") == "a"
    assert exchange(ledger, "b", anchor=1) == "b"
    assert exchange(ledger, "c", anchor=1) == "c!"
    assert ledger.version == 3
    member = ledger.find("c")
    assert (member.exchanges, member.dropped, member.sequence) == (0, 1, 1)
    assert member.staleness == 2
    # A dropped message is settled, too.
    assert not ledger.submit("c", "1", Submission(1, None, 1), 0.0)


def test_adopting_the_version_before_the_own_message_is_not_stale():
    """The anchor of an elastic rule precedes the worker's own last message."""
    ledger = make_ledger(BoundedStaleness(versions=0), "a")
    assert exchange(ledger, "a", anchor=0) == "a"
    assert exchange(ledger, "a", anchor=0) == "a"
    assert exchange(ledger, "a", anchor=1) == "a"


def test_waiting_message_is_dropped_once_it_is_too_old():
    ledger = make_ledger(BoundedStaleness(versions=1, rounds=0), "abc")
    assert exchange(ledger, "a") == "a"
    assert exchange(ledger, "a", anchor=1) == ""  # waits for b and c
    assert exchange(ledger, "b") == "b"
    assert take(ledger) == ""
    assert exchange(ledger, "c") == "c"
    assert take(ledger) == "a!"
    assert exchange(ledger, "a") == "a"  # it has made no round and does not wait


@pytest.mark.parametrize("mode", [BoundedStaleness(versions=0), "late"])
def test_staleness_is_that_of_the_time_of_applying(mode):
    """Messages that arrived before may be applied in the meantime."""
    if mode == "late":
        ledger = make_ledger(Synchronous(quorum=1, late="drop"), "ab")
    else:
        ledger = make_ledger(mode, "ab")
    send(ledger, "a")
    first = ledger.due(0.0)  # applying it takes a while
    send(ledger, "b")
    ledger.settle(first, 0.0)
    second = ledger.due(0.0)
    assert second.entries[0].worker == "b"
    assert not second.indices_to_apply


def test_round_bound_waits_for_the_slowest():
    ledger = make_ledger(BoundedStaleness(rounds=1), "ab")
    assert exchange(ledger, "a") == exchange(ledger, "a") == "a"
    assert exchange(ledger, "a") == ""  # two rounds ahead of b, which has made none
    assert ledger.deadline() is None
    assert exchange(ledger, "b") == "b"
    assert take(ledger) == "a"


@pytest.mark.parametrize("how", ["leaves", "dies", "is replaced"])
def test_round_bound_ignores_ended_sessions(how):
    ledger = make_ledger(BoundedStaleness(rounds=0), "ab", limits=Limits(lease=5.0))
    assert exchange(ledger, "a") == "a"
    assert exchange(ledger, "a") == ""
    if how == "leaves":
        ledger.leave("b", "1")
        assert take(ledger) == "a"
    elif how == "dies":
        ledger.disconnect("b", "1", 1, 1.0)
        assert ledger.deadline() == 6.0
        assert take(ledger, 5.9) == ""
        assert take(ledger, 6.0) == "a"
    else:
        ledger.join("b", "2", 1.0, replace=True)
        assert take(ledger) == "a"


def test_new_worker_starts_at_the_round_of_the_slowest():
    ledger = make_ledger(BoundedStaleness(rounds=1), "ab")
    for worker in "abab":
        assert exchange(ledger, worker) == worker
    assert exchange(ledger, "a") == "a"
    ledger.join("n", "1", 0.0)
    assert exchange(ledger, "n") == exchange(ledger, "n") == "n"  # it does not wait
    assert exchange(ledger, "n") == ""
    assert exchange(ledger, "b") == "b"  # others do not wait for its first rounds
    assert take(ledger) == "n"


@pytest.mark.parametrize("rounds", [0, 7])
def test_returning_worker_starts_at_the_round_of_the_slowest(rounds):
    ledger = make_ledger(BoundedStaleness(rounds=0), "a", limits=Limits(lease=1.0))
    for _ in range(rounds):
        assert exchange(ledger, "a") == "a"
    ledger.disconnect("a", "1", 1, 0.0)
    ledger.join("b", "1", 2.0)
    for _ in range(3):
        assert exchange(ledger, "b", now=2.0) == "b"
    ledger.join("a", "1", 3.0)
    for worker in "abab":
        assert exchange(ledger, worker, now=3.0) == worker
    assert ledger.find("a").sequence == rounds + 2


def test_round_waits_for_all_workers():
    ledger = make_ledger(Synchronous(), "abc")
    assert exchange(ledger, "c") == exchange(ledger, "a") == ""
    assert take(ledger, 1e9) == ""
    assert ledger.deadline() is None
    assert exchange(ledger, "b") == "abc"
    assert ledger.version == 1
    assert [ledger.find(w).staleness for w in "abc"] == [0, 0, 0]


def test_quorum_is_enough_after_the_grace_time():
    ledger = make_ledger(Synchronous(quorum=2, grace=3.0), "abc")
    assert exchange(ledger, "a", now=1.0) == ""
    assert ledger.deadline() is None
    assert exchange(ledger, "b", now=2.0) == ""
    assert ledger.deadline() == 4.0
    assert take(ledger, 3.9) == ""
    assert take(ledger, 4.0) == "ab"
    assert ledger.deadline() is None
    assert exchange(ledger, "a", now=5.0) == exchange(ledger, "b", now=5.0) == ""
    assert (
        exchange(ledger, "c", now=5.5, anchor=0) == "abc"
    )  # all workers, so no grace time


def test_all_workers_are_enough_if_fewer_than_the_quorum():
    ledger = make_ledger(Synchronous(quorum=5, grace=3.0), "ab")
    assert exchange(ledger, "a") == ""
    assert exchange(ledger, "b") == "ab"


@pytest.mark.parametrize(
    ("late", "weights"), [("next", (1.0, 1.0)), ("weighted", (1.0, 1 / 3))]
)
def test_late_message_is_used_in_the_next_round(late, weights):
    ledger = make_ledger(Synchronous(quorum=1, late=late), "ab")
    assert exchange(ledger, "a") == exchange(ledger, "a") == "a"
    send(ledger, "b", anchor=0)
    send(ledger, "a")
    batch = ledger.due(0.0)
    assert batch.weights == weights
    assert batch.staleness == (0, 2)
    ledger.settle(batch, 0.0)
    send(ledger, "b")
    send(ledger, "a")
    assert ledger.due(0.0).weights == (1.0, 1.0)  # no longer late


def test_late_message_is_dropped_with_late_drop():
    ledger = make_ledger(Synchronous(quorum=1, late="drop"), "ab")
    assert exchange(ledger, "a") == "a"
    send(ledger, "a")
    assert exchange(ledger, "b", anchor=0) == "b!"
    assert take(ledger) == "a"
    assert ledger.version == 2
    # Its round began at version 1, and version 2 came before it ended.
    assert exchange(ledger, "b", anchor=1) == "b!"
    assert exchange(ledger, "b") == "b"


@pytest.mark.parametrize("late", ["weighted", "drop"])
def test_anchor_before_the_own_message_is_not_late(late):
    """EASGD adopts the center as it was before the worker's own message."""
    ledger = make_ledger(Synchronous(late=late), "ab")
    for version in range(4):
        for worker in "ab":
            send(ledger, worker, anchor=max(0, version - 1))
        batch = ledger.due(0.0)
        assert batch.applies
        assert batch.weights == (1.0, 1.0)
        ledger.settle(batch, 0.0)


def test_late_message_does_not_start_the_grace_time():
    ledger = make_ledger(Synchronous(quorum=2, grace=3.0), "abcd")
    send(ledger, "a")
    assert exchange(ledger, "b", now=3.0) == "ab"
    assert exchange(ledger, "c", now=4.0, anchor=0) == ""  # it missed that round
    assert exchange(ledger, "a", now=6.0) == ""
    assert ledger.deadline() == 9.0
    assert take(ledger, 8.9) == ""
    assert take(ledger, 9.0) == "ac"
    # If all messages are late, the first one starts the grace time.
    ledger = make_ledger(Synchronous(quorum=2, grace=3.0), "abcd")
    send(ledger, "a")
    assert exchange(ledger, "b", now=3.0) == "ab"
    send(ledger, "c", now=4.0, anchor=0)
    send(ledger, "d", now=5.0, anchor=0)
    assert ledger.deadline() == 7.0


def test_worker_restored_from_several_records_counts_once_among_the_slowest():
    bounded = BoundedStaleness(rounds=1)
    ledger, again = make_ledger(bounded, "ab"), make_ledger(bounded)
    again.restore(ledger.state_to_save(), 0.0)
    for worker in "abab":
        send(ledger, worker)
        assert take(ledger) == worker
        again.restore(ledger.state_to_save(worker), 0.0)
    again.version = ledger.version
    again.join("a", "1", 0.0, resume=True)
    send(again, "a")
    assert take(again) == "a"


@pytest.mark.parametrize("how", ["whole", "of one worker"])
def test_replaced_session_stays_replaced_after_restart(how):
    ledger = make_ledger(workers="ab")
    again = make_ledger()
    if how == "whole":
        ledger.join("a", "2", 0.0, replace=True)
        again.restore(ledger.state_to_save(), 0.0)
    else:  # as in a journal: first one session, then the other
        again.restore(ledger.state_to_save("ab"), 0.0)
        ledger.join("a", "2", 0.0, replace=True)
        again.restore(ledger.state_to_save("a"), 0.0)
    with pytest.raises(errors.WorkerStateError, match="was replaced"):
        again.join("a", "1", 1.0, resume=True)
    again.join("a", "2", 1.0, resume=True)
    again.join("b", "1", 1.0, resume=True)


def test_round_ignores_workers_with_an_expired_lease():
    ledger = make_ledger(Synchronous(), "abc", limits=Limits(lease=10.0))
    assert exchange(ledger, "a") == exchange(ledger, "b") == ""
    ledger.disconnect("c", "1", 1, 1.0)
    assert ledger.deadline() == 11.0
    assert take(ledger, 10.9) == ""
    assert take(ledger, 11.0) == "ab"


def test_round_waits_for_a_worker_that_reconnects_in_time():
    ledger = make_ledger(Synchronous(), "ab", limits=Limits(lease=10.0))
    assert exchange(ledger, "a") == ""
    ledger.disconnect("b", "1", 1, 1.0)
    ledger.join("b", "1", 9.0)
    assert ledger.deadline() is None
    assert take(ledger, 99.0) == ""
    assert exchange(ledger, "b", now=99.0) == "ab"


def test_message_of_a_worker_with_an_expired_lease_is_not_used():
    ledger = make_ledger(Synchronous(), "ab", limits=Limits(lease=10.0))
    assert exchange(ledger, "b") == ""
    ledger.disconnect("b", "1", 1, 1.0)
    assert exchange(ledger, "a", now=11.0) == "a"
    assert ledger.find("b").sequence == 0


def test_new_worker_takes_part_in_the_current_round():
    ledger = make_ledger(Synchronous(late="drop"), "a")
    assert exchange(ledger, "a") == "a"
    ledger.join("n", "1", 0.0)
    assert exchange(ledger, "a") == ""
    assert exchange(ledger, "n") == "an"


def test_new_worker_that_left_again_blocks_no_round():
    ledger = make_ledger(Synchronous(), "a")
    ledger.join("n", "1", 0.0)
    assert exchange(ledger, "a") == ""
    ledger.leave("n", "1")
    assert take(ledger) == "a"
    ledger.leave("n", "1")  # leaving twice is allowed


@pytest.mark.parametrize("how", ["back in time", "given up before"])
def test_settled_message_is_not_applied_again(how):
    ledger = make_ledger(workers="a", limits=Limits(lease=10.0))
    assert exchange(ledger, "a") == "a"
    ledger.disconnect("a", "1", 1, 0.0)
    later = 5.0 if how == "back in time" else 50.0
    ledger.expire(later)
    assert ("a" in ledger.registered()) == (how == "back in time")
    ledger.join("a", "1", later)
    assert not ledger.submit("a", "1", Submission(1, None, 0), later)
    assert take(ledger, later) == ""
    assert exchange(ledger, "a", now=later) == "a"


def test_waiting_message_may_be_repeated():
    ledger = make_ledger(Synchronous(), "ab")
    send(ledger, "a", now=1.0)
    send(ledger, "a", now=2.0)
    assert ledger.pending["a"].arrived == 1.0
    assert exchange(ledger, "b") == "ab"
    assert ledger.find("a").exchanges == 1


@pytest.mark.parametrize("sequence", [-1, 0, 2, 5])
def test_sequence_number_out_of_order_is_rejected(sequence):
    ledger = make_ledger(workers="a")
    with pytest.raises(
        errors.WorkerStateError, match=f"'a' sent exchange {sequence}, but its last.* 0"
    ):
        ledger.submit("a", "1", Submission(sequence, None, 0), 0.0)
    assert not ledger.pending


@pytest.mark.parametrize("anchor", [-1, 2])
def test_unknown_anchor_version_is_rejected(anchor):
    ledger = make_ledger(workers="a")
    assert exchange(ledger, "a") == "a"
    with pytest.raises(
        errors.InvalidArgumentError, match=rf"in \[0, 1\].*got {anchor}"
    ):
        ledger.submit("a", "1", Submission(2, None, anchor), 0.0)


def test_only_the_last_exchange_can_be_acknowledged():
    ledger = make_ledger(workers="a")
    assert exchange(ledger, "a") == "a"
    for worker, session_id, sequence in (
        ("a", "1", 7),
        ("a", "1", 0),
        ("a", "2", 1),
        ("nobody", "1", 1),
    ):
        ledger.acknowledge(worker, session_id, sequence)
        assert ledger.find("a").state is Stage.ANSWERED
    ledger.acknowledge("a", "1", 1)
    assert ledger.find("a").state is Stage.IDLE
    # The exchange stays settled.
    assert not ledger.submit("a", "1", Submission(1, None, 0), 0.0)
    assert ledger.find("a").state is Stage.IDLE


def test_taken_name_is_rejected():
    ledger = make_ledger(workers="a")
    with pytest.raises(
        errors.NameTakenError, match="'a' already, which joined 7 s ago"
    ):
        ledger.join("a", "2", 7.0)
    ledger.submit("a", "1", Submission(1, None, 0), 0.0)  # the first session continues
    ledger.disconnect("a", "1", 1, 8.0)
    ledger.join("a", "2", 9.0)  # a broken connection does not hold the name
    assert not ledger.pending


def test_replaced_worker_gets_an_error():
    ledger = make_ledger(workers="a")
    assert exchange(ledger, "a") == "a"
    send(ledger, "a")
    ledger.join("a", "2", 0.0, replace=True)
    assert take(ledger) == ""
    with pytest.raises(errors.WorkerStateError, match="'a' was replaced by another"):
        ledger.submit("a", "1", Submission(2, None, 1), 0.0)
    ledger.leave("a", "1")
    ledger.disconnect("a", "1", 1, 0.0)
    assert ledger.member("a", "2").connected  # the first session cannot change it


@pytest.mark.parametrize("second", ["there", "disconnected", "has_ended"])
@pytest.mark.parametrize("restarts", [False, True])
def test_replaced_session_cannot_rejoin(second, restarts):
    """Its sequence number is forgotten, so its messages could be applied again."""
    ledger = make_ledger(workers="a")
    assert exchange(ledger, "a") == "a"
    ledger.join("a", "2", 0.0, replace=True)
    if second == "disconnected":
        ledger.disconnect("a", "2", 1, 0.0)
    elif second == "has_ended":
        ledger.leave("a", "2")
    if restarts:
        saved, ledger = ledger.state_to_save(), make_ledger(version=1)
        ledger.restore(saved, 0.0)
    for replace in (False, True):
        with pytest.raises(
            errors.WorkerStateError, match="'a' was replaced by another"
        ):
            ledger.join("a", "1", 1.0, replace=replace, resume=True)


def test_forgotten_session_must_start_again(monkeypatch):
    monkeypatch.setattr(_ledger, "_MAX_ENDED_SESSIONS", 2)
    ledger = make_ledger(workers="abc")
    assert exchange(ledger, "a") == "a"
    for worker in "abc":
        ledger.leave(worker, "1")
    assert ledger.find("a") is None
    with pytest.raises(errors.WorkerStateError, match="too long ago to be resumed"):
        ledger.join("a", "1", 0.0, resume=True)
    ledger.join("b", "1", 0.0, resume=True)
    ledger.join("a", "2", 0.0)
    assert ledger.submit("a", "2", Submission(1, None, 1), 0.0)
    assert take(ledger) == "a"


class CountingDict(dict):
    """A dict that counts iterations over its items."""

    seen = 0

    def _count(self, items):
        for item in items:
            CountingDict.seen += 1
            yield item

    def __iter__(self):
        return self._count(super().__iter__())

    def items(self):
        return self._count(super().items())

    def values(self):
        return self._count(super().values())


@pytest.mark.parametrize(
    "mode", [Asynchronous(), BoundedStaleness(versions=3, rounds=3), Synchronous()]
)
def test_cost_of_an_exchange_does_not_grow_with_ended_sessions(mode):
    ledger, work = make_ledger(mode), []
    ledger._registered, ledger._ended = CountingDict(), CountingDict()
    for many in (10, 20_000):
        for number in range(many):
            ledger.join(f"{many}-{number}", "1", 0.0, heartbeat_timeout=100.0)
            ledger.leave(f"{many}-{number}", "1")
        for worker in "ab":
            ledger.join(worker, "1", 0.0)
        CountingDict.seen = 0
        for worker in "ab":
            sequence = ledger.find(worker).sequence + 1
            ledger.submit(worker, "1", Submission(sequence, None, ledger.version), 0.0)
            while (batch := ledger.due(0.0)) is not None:
                ledger.settle(batch, 0.0)
            ledger.deadline()
            ledger.state_to_save([worker])
            ledger.acknowledge(worker, "1", sequence)
        work.append(CountingDict.seen)
    assert work[0] == work[1]
    assert len(ledger._ended) <= _ledger._MAX_ENDED_SESSIONS
    assert len(ledger.take_ended()) == 20_010  # each of them once
    assert not ledger.take_ended()


def test_late_disconnect_of_an_old_connection_is_ignored():
    ledger = make_ledger(workers="a")
    assert ledger.join("a", "1", 1.0) == 2
    ledger.disconnect("a", "1", 1, 2.0)
    assert ledger.find("a").connected
    ledger.disconnect("a", "1", 2, 2.0)
    assert not ledger.find("a").connected


def test_silent_worker_is_removed_though_it_is_connected():
    ledger = make_ledger(BoundedStaleness(rounds=0), "a")
    ledger.join("b", "1", 0.0, heartbeat_timeout=8.0)
    assert exchange(ledger, "a") == "a"
    assert exchange(ledger, "a") == ""
    for now in range(1, 8):
        assert take(ledger, now) == ""
    assert ledger.heartbeat("b", "1", 7.5)
    assert ledger.heartbeat("a", "1", 7.5)
    for now in range(8, 16):
        assert take(ledger, now) == ""
    assert take(ledger, 15.5) == "a"
    assert ledger.take_ended() == ["b"]
    assert not ledger.heartbeat("b", "1", 15.6)


@pytest.mark.parametrize("woken_by", ["the silent one", "another"])
@pytest.mark.parametrize("slept", [7.9, 8.0, 1000.0])
def test_no_worker_is_removed_after_the_center_was_asleep(woken_by, slept):
    """Heartbeats sent meanwhile are read a little later."""
    ledger = make_ledger(workers="a")
    ledger.join("b", "1", 0.0, heartbeat_timeout=8.0)
    if woken_by == "another":
        assert ledger.heartbeat("a", "1", slept)
        ledger.expire(slept + 0.1)
    assert ledger.heartbeat("b", "1", slept + 0.2)
    ledger.expire(slept + 4.0)
    assert "b" in ledger.registered()


def test_worker_without_heartbeats_is_never_removed():
    ledger = make_ledger(workers="a")
    for now in range(100):
        ledger.expire(float(now))
    assert "a" in ledger.registered()
    assert ledger.deadline() is None


def test_message_that_failed_to_apply_counts_as_never_received():
    ledger = make_ledger(BoundedStaleness(rounds=0), "ab")
    send(ledger, "a")
    ledger.fail(ledger.due(0.0))
    assert ledger.find("a").state is Stage.IDLE
    assert ledger.version == ledger.find("a").sequence == 0
    assert take(ledger) == ""
    assert exchange(ledger, "a") == "a"


@pytest.mark.parametrize("how", ["never joined", "left", "given up"])
def test_absent_worker_cannot_submit(how):
    ledger = make_ledger(
        workers="" if how == "never joined" else "a", limits=Limits(lease=1.0)
    )
    if how == "left":
        ledger.leave("a", "1")
    elif how == "given up":
        ledger.disconnect("a", "1", 1, 0.0)
    with pytest.raises(
        errors.WorkerStateError, match=r"'a' is not registered.*join again"
    ):
        ledger.submit("a", "1", Submission(1, None, 0), 1.0)


def test_full_center_rejects_new_workers():
    ledger = make_ledger(workers="ab", limits=Limits(max_workers=2, lease=10.0))
    message = "'c': this center takes at most 2 workers, and 2 are registered"
    with pytest.raises(errors.CenterFullError, match=message):
        ledger.join("c", "1", 0.0)
    ledger.join("a", "2", 0.0, replace=True)  # it replaces only its own session
    ledger.disconnect("b", "1", 1, 0.0)
    with pytest.raises(errors.CenterFullError, match=message):
        ledger.join("c", "1", 9.9)  # b may still return
    ledger.join("c", "1", 10.0)
    with pytest.raises(errors.CenterFullError, match="'b'"):
        ledger.join("b", "1", 10.0)
    assert ledger.registered().keys() == {"a", "c"}


@pytest.mark.parametrize("settings", [{}, {"mode": None}], ids=repr)
def test_center_is_asynchronous_by_default(settings):
    assert CenterSettings(RULE, **settings).make_ledger().mode == Asynchronous()


def test_barrier_opens_once():
    ledger = make_ledger(workers="a", barrier=2)
    assert not ledger.is_open
    ledger.leave("a", "1")
    ledger.join("b", "1", 0.0)
    assert not ledger.is_open  # not at the same time
    ledger.join("a", "1", 0.0)
    assert ledger.is_open
    ledger.leave("a", "1")
    ledger.leave("b", "1")
    assert ledger.is_open
    assert make_ledger().is_open


def test_ledger_starts_from_a_given_version():
    ledger = make_ledger(Synchronous(late="drop"), "a", version=41)
    assert exchange(ledger, "a") == "a"
    assert ledger.version == 42


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BoundedStaleness(), "versions=, rounds= or both, got neither"),
        (lambda: BoundedStaleness(versions=-1), "versions must be .* >= 0, got -1"),
        (lambda: BoundedStaleness(rounds=1.0), "rounds must be .* >= 0, got 1.0"),
        (lambda: BoundedStaleness(rounds=True), "rounds must be .* >= 0, got True"),
        (lambda: Synchronous(quorum=0), "quorum must be .* >= 1, got 0"),
        (lambda: Synchronous(grace=-0.1), "grace must be .* seconds >= 0, got -0.1"),
        (lambda: Synchronous(grace=math.nan), "grace must be .* got nan"),
        (lambda: Synchronous(late="never"), "late must be 'next', .* got 'never'"),
        (lambda: Limits(lease=math.inf), "lease must be .* got inf"),
        (lambda: Limits(lease="10"), "lease must be .* got '10'"),
        (lambda: Limits(max_workers=0), "max_workers must be .* >= 1, got 0"),
        (lambda: make_ledger(barrier=-1), "barrier must be .* >= 0, got -1"),
        (lambda: make_ledger(barrier=None), "barrier must be .* >= 0, got None"),
        (
            lambda: make_ledger(barrier=3, limits=Limits(max_workers=2)),
            "at most max_workers, 2,.* got 3",
        ),
    ],
)
def test_invalid_ledger_settings_are_rejected(make, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize("mode", [Synchronous, "async", 3])
def test_invalid_mode_is_rejected(mode):
    with pytest.raises(errors.InvalidTypeError, match="mode must be Asynchronous"):
        make_ledger(mode)


def test_restore_after_data_loss_keeps_exchanges_but_no_workers():
    ledger = make_ledger(barrier=1)
    ledger.join("anna", "first", 0.0)
    ledger.submit("anna", "first", Submission(1, None, 0), 0.0)
    ledger.settle(ledger.due(0.0), 0.0)
    again = make_ledger(barrier=1)
    again.restore(ledger.state_to_save(), 0.0, is_new_id=True)
    assert not again.registered()
    assert not again.is_open
    assert again.find("anna").session_id == "first"
    assert again.find("anna").sequence == 1
