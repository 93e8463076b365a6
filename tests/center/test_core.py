"""The core: every exchange is applied exactly once, whatever happens to its worker."""

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import pathlib
import shutil
import tempfile
import threading
import uuid
import weakref

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared, tuning
from helpers.waiting import in_background
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
    Core,
    Journal,
    Limits,
    Submission,
    Synchronous,
)

DOWNPOUR = shared.downpour()
MODES = [
    Asynchronous(),
    BoundedStaleness(versions=1),
    BoundedStaleness(rounds=1),
    Synchronous(),
    Synchronous(quorum=1, late="drop"),
]
NAMES = st.sampled_from(["anna", "bert", "carl"])
HOW = st.sampled_from(["collect", "answer", "replace"])
LIMIT = 30  # s, generous: no test should come near it


class Clock:
    """The time that the center sees."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    tuning.set_center_clock(monkeypatch, clock.monotonic)
    return clock


@dataclasses.dataclass
class WorkerSession:
    """The model's state of one session of a worker."""

    name: str
    session_id: str
    session: object
    anchor: int
    is_registered: bool = True
    until: float = math.inf
    sent: list = dataclasses.field(default_factory=list)  # numbers, in order
    got: bool = True  # it has the response to the last message
    is_kept: bool = False  # the center has kept the response since the message
    answer: tuple | None = None  # the response, if received and kept
    anchor_sent: int = 0

    def end(self):
        self.is_registered, self.until = False, math.inf
        self.is_kept, self.answer = False, None


class Exchanges(RuleBasedStateMachine):
    """Run a core whose messages are the numbers 1, 2, 3, ..., one for each exchange.

    The core's own calls tell the model which messages were applied, so the model knows
    each version of the center. Integers make sums exact.
    """

    def __init__(self, mode, clock, journals):
        super().__init__()
        self.mode, self.clock, self.journals = mode, clock, journals
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.numbers = itertools.count(1)
        self.sessions = {}  # the last one of each name
        self.replaced = []
        self.applied = {}  # by number: version that includes it
        self.dropped = set()
        self.versions = [np.zeros(2)]  # versions of the center
        self.promised = 0  # version that survives a kill
        self.handed_out = []

    @initialize(lease=st.sampled_from([0.0, 10.0]))
    def start(self, lease):
        self.lease = lease
        self.begin(self.folder / "0", jnp.zeros(2))

    def begin(self, directory, params=None):
        self.directory = directory
        durability = Journal(directory) if self.journals else None
        self.core = Core(
            CenterSettings(
                DOWNPOUR,
                params,
                mode=self.mode,
                limits=Limits(lease=self.lease),
                durability=durability,
            )
        )
        answer = self.core._answer

        def observed(batch, messages, before):
            answer(batch, messages, before)
            for i in batch.indices_to_apply:
                self.observe(messages[i].submission)

        self.core._answer = observed

    def observe(self, submission):
        number = int(submission.contribution[0])
        assert number not in self.applied
        assert number not in self.dropped
        self.applied[number] = self.core.store.current.number
        # Else the message was applied together with another one.
        if self.applied[number] == len(self.versions):
            self.versions.append(self.versions[-1])
        assert self.applied[number] == len(self.versions) - 1
        self.versions[-1] = self.versions[-1] - (number, 1)

    # The state of the model.

    def expire(self):
        """Remove workers with an expired lease; return the present ones."""
        members = self.core.members()[1]
        for known in self.sessions.values():
            if known.until <= self.clock.now:
                known.end()
        assert set(members) == {
            known.name for known in self.sessions.values() if known.is_registered
        }
        return members

    def session_of(self, name):
        """Return the last session of a name, which joins if needed."""
        self.expire()
        known = self.sessions.get(name)
        if known is None:
            self.join(name)
        elif not known.is_registered or known.session is None:
            self.join_again(name)
        return self.sessions[name]

    # Commands.

    @rule(name=NAMES)
    def join(self, name):
        """Join with a new session, which replaces the previous one of this name."""
        session_id = uuid.uuid4().hex
        session = self.core.join(name, session_id, replace=True)
        with self.core.reading(kept=True) as version:
            anchor = version.number
        self.promised = max(self.promised, anchor)
        if name in self.sessions:
            self.replaced.append(self.sessions[name])
            self.replaced[-1].end()
        self.sessions[name] = WorkerSession(name, session_id, session, anchor)
        self.expire()

    @precondition(lambda self: self.sessions)
    @rule(name=NAMES)
    def join_again(self, name):
        """Join with the same session over another connection."""
        known = self.sessions.get(name)
        if known is not None:
            self.expire()
            known.session = self.core.join(name, known.session_id, resume=True)
            known.is_registered, known.until = True, math.inf
            with self.core.reading(kept=True) as version:  # and thus that it is back
                self.promised = max(self.promised, version.number)

    @precondition(lambda self: self.replaced)
    @rule(number=st.integers(0, 9))
    def use_a_replaced_session(self, number):
        known = self.replaced[number % len(self.replaced)]
        with pytest.raises(errors.WorkerStateError, match="was replaced"):
            self.core.join(known.name, known.session_id, resume=True)
        if known.session is not None:
            self.is_rejected(known)
            known.session.acknowledge(1)
            known.session.disconnect()
            known.session.leave()
        self.expire()

    def is_rejected(self, known):
        with pytest.raises(errors.WorkerStateError, match=known.name):
            known.session.submit(Submission(1, jnp.ones(2), anchor_version=0))
        for sequence in (1, len(known.sent)):
            with pytest.raises(errors.WorkerStateError, match=known.name):
                known.session.collect(sequence, 0.0)

    @rule(name=NAMES, repeats=st.booleans())
    def submit(self, name, repeats):
        """Send the next number if the last one has a response; else repeat the last."""
        known = self.session_of(name)
        if known.got and not (known.sent and repeats):
            known.sent.append(next(self.numbers))
            known.got, known.is_kept, known.answer = False, True, None
            known.anchor_sent = known.anchor
        contribution = jnp.array([float(known.sent[-1]), 1.0])
        known.session.submit(
            Submission(len(known.sent), contribution, anchor_version=known.anchor)
        )

    @rule(name=NAMES, how=HOW)
    def collect(self, name, how):
        known = self.session_of(name)
        if not known.sent:
            return
        sequence, number = len(known.sent), known.sent[-1]
        try:
            answer = self.read(known.session, sequence, how)
        except errors.WorkerStateError as error:
            if "asks for the answer" not in str(error):
                raise
            answer = None
            assert not known.is_kept  # its message was removed with it, or never sent
        if answer is None:
            assert not known.got
            assert number not in self.applied
            return
        version, staleness, applied, norm, params = answer
        np.testing.assert_array_equal(params, self.versions[version])
        assert applied == (number in self.applied)
        if applied:
            assert staleness == self.applied[number] - 1 - known.anchor_sent
        else:
            self.dropped.add(number)
        assert (norm is not None) == known.is_kept or not known.got
        if norm is None:
            assert version == len(self.versions) - 1  # the current center
        else:
            assert known.answer in (None, answer[:4])
            assert not applied or version == self.applied[number]
            known.answer, known.is_kept = answer[:4], True
        known.got, known.anchor = True, version
        self.promised = max(self.promised, version)

    @rule(name=NAMES, how=HOW, acknowledges=st.booleans())
    def exchange(self, name, how, acknowledges):
        """Exchange as far as possible without waiting."""
        self.submit(name, repeats=False)
        self.collect(name, how)
        if acknowledges:
            self.acknowledge(name)

    def read(self, session, sequence, how):
        """Return version, staleness, applied, norm and parameters; or None."""
        if how == "collect":
            snapshot = session.collect(sequence, 0.0)
            if snapshot is None:
                return None
            self.handed_out.append(snapshot)
            answer, params = snapshot, snapshot.params
        else:
            kept = session.answer(sequence, 0.0)
            if kept is None:
                return None
            session.wait_until_kept(kept)
            with self.core.reading(kept.version) as version:
                params = jnp.copy(version.params)
            if how == "replace":
                kept = session.replace(kept, jnp.copy(params))
            answer = kept.answer
            assert answer.version == kept.version.number
        norm = None if answer.norm is None else float(answer.norm)
        numbers = answer.version, answer.staleness, answer.applied, norm
        return *numbers, np.asarray(params)

    @rule(name=NAMES)
    def acknowledge(self, name):
        known = self.session_of(name)
        if known.sent and known.got:
            known.session.acknowledge(len(known.sent))
            known.is_kept, known.answer = False, None

    @rule(name=NAMES)
    def disconnect(self, name):
        known = self.session_of(name)
        known.session.disconnect()
        known.until = self.clock.now + self.lease
        self.expire()

    @rule(name=NAMES)
    def leave(self, name):
        known = self.session_of(name)
        for _ in range(2):
            known.session.leave()
        known.end()
        self.expire()
        self.is_rejected(known)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @precondition(lambda self: self.journals)
    @rule(kills=st.booleans())
    def restart(self, kills):
        there = self.expire()
        directory = self.folder / str(len(list(self.folder.iterdir())))
        if kills:  # nothing may be written during the copy
            with self.core.reading(kept=True):
                shutil.copytree(self.directory, directory)
        self.end()
        if not kills:
            shutil.copytree(self.directory, directory)
        self.begin(directory)
        version = self.core.members()[0]
        assert self.promised <= version < len(self.versions)
        assert kills or version == len(self.versions) - 1
        self.promised = version
        del self.versions[version + 1 :]
        self.applied = {n: v for n, v in self.applied.items() if v <= version}
        for known in self.sessions.values():
            # A leave just before the kill may or may not be on disk.
            known.is_registered = known.name in self.core.members()[1]
            assert known.is_registered or known.name not in there or not self.lease
            known.until = self.clock.now + self.lease
            known.session, known.is_kept, known.answer = None, False, None
        for known in self.replaced:
            known.session = None

    def end(self):
        """Close the core; kept responses remain available, and waiting calls raise."""
        self.expire()
        waits = self.core.members()[2]
        self.core.close()
        for known in self.sessions.values():
            if known.name in waits:
                with pytest.raises(errors.CenterClosedError, match="has been closed"):
                    known.session.collect(len(known.sent))
            elif known.is_registered and known.session and known.is_kept:
                assert known.session.collect(len(known.sent)) is not None
        with pytest.raises(errors.CenterClosedError):
            self.core.join("somebody")

    @invariant()
    def members_match_the_model(self):
        if hasattr(self, "core"):
            self.expire()

    def teardown(self):
        if hasattr(self, "core"):
            with self.core.reading() as version:
                np.testing.assert_array_equal(version.params, self.versions[-1])
            self.end()
            for snapshot in self.handed_out:
                expected = self.versions[snapshot.version]
                np.testing.assert_array_equal(snapshot.params, expected)
        shutil.rmtree(self.folder)


@pytest.mark.few(3)
@pytest.mark.parametrize("journals", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_every_exchange_is_applied_once(mode, journals, clock, monkeypatch):
    tuning.set_least_reserved(monkeypatch, 1 << 14)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a copy needs no sync
    tuning.set_journal_sync(monkeypatch, lambda file, sync: None)
    run_state_machine_as_test(
        lambda: Exchanges(mode, clock, journals),
        settings=settings(max_examples=6 if journals else 15, stateful_step_count=40),
    )


# Results of calls of one session. Messages are integers again.


def core_of(mode=None, **settings):
    return Core(CenterSettings(DOWNPOUR, jnp.zeros(2), mode=mode, **settings))


def submit(session, sequence=1, anchor_version=0):
    session.submit(Submission(sequence, jnp.ones(2), anchor_version=anchor_version))


def exchange(session, sequence=1, anchor_version=0):
    return session.exchange(
        Submission(sequence, jnp.ones(2), anchor_version=anchor_version)
    )


@contextlib.contextmanager
def collecting(session, monkeypatch, sequence=1):
    """Wait for a response in another thread; yield its future."""
    condition = session._core._messages[session.worker].done
    waiting = threading.Event()
    wait = condition.wait

    def waits(timeout=None):
        waiting.set()
        return wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(condition, "wait", waits)
        got = in_background(lambda: session.collect(sequence, LIMIT), "collects")
        assert waiting.wait(LIMIT)
    # The thread holds the lock until it waits, so nothing happens before.
    yield got


@pytest.mark.parametrize("goes", ["leave", "disconnect", "replace"])
def test_waiting_worker_wakes_when_another_one_goes(goes, monkeypatch):
    core = core_of(Synchronous(), limits=Limits(lease=0.0))
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        if goes == "replace":
            core.join("bert", replace=True).leave()
        else:
            getattr(bert, goes)()
    assert got.result(LIMIT).version == 1


def test_waiting_worker_wakes_when_all_have_sent(monkeypatch):
    core = core_of(Synchronous())
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        assert exchange(bert).version == 1
    assert got.result(LIMIT).version == 1
    np.testing.assert_array_equal(core.snapshot().params, -2)


def test_waiting_worker_wakes_when_a_lease_expires(monkeypatch):
    core = core_of(Synchronous(), limits=Limits(lease=0.2))
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        bert.disconnect()
    assert got.result(LIMIT).applied


def test_waiting_worker_that_is_replaced_gets_an_error(monkeypatch):
    core = core_of(Synchronous())
    anna, _ = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        core.join("anna", replace=True)
    with pytest.raises(errors.WorkerStateError, match="'anna' was replaced"):
        got.result(LIMIT)


def test_waiting_worker_gets_an_error_when_the_center_closes(monkeypatch):
    core = core_of(Synchronous())
    anna, _ = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        core.close("it is late")
    with pytest.raises(errors.CenterClosedError, match="it is late"):
        got.result(LIMIT)
    assert core.snapshot().version == 0


@pytest.mark.parametrize(
    "mode", [BoundedStaleness(rounds=1), Synchronous()], ids=["bounded", "rounds"]
)
def test_hanging_worker_does_not_block_others(mode):
    """It stays connected but sends no heartbeats."""
    core = core_of(mode)
    core.join("hangs", heartbeat_timeout=0.4)
    works = core.join("works")
    for sequence in range(1, 6):
        assert exchange(works, sequence, sequence - 1).version == sequence
    assert set(core.members()[1]) == {"works"}
    assert core.heartbeat([("hangs", "whatever")]) == []


def test_connection_is_cut_when_its_session_ends_or_reconnects():
    core = core_of(limits=Limits(lease=0.0))
    cut = []

    def join(name, *args, **kwargs):
        number = len(cut) + len(core._connection_closers)
        return core.join(
            name, *args, close_connection=lambda: cut.append(number), **kwargs
        )

    first = join("anna")
    assert not cut
    again = join("anna", first.session_id, resume=True)
    assert cut == [0]
    first.disconnect()  # its connection is no longer the current one
    assert set(core.members()[1]) == {"anna"}
    join("anna", replace=True)
    assert cut == [0, 1]
    again.leave()
    assert cut == [0, 1]
    core.join("bert", heartbeat_timeout=0.0)
    core.leave("anna", core.members()[1]["anna"].session_id)
    assert cut == [0, 1, 2]
    core.close()
    assert cut == [0, 1, 2]


def test_message_that_fails_to_apply_may_be_sent_again(monkeypatch):
    core = core_of()
    anna, bert = core.join("anna"), core.join("bert")

    def fails(*args, **kwargs):
        raise FloatingPointError("no memory for this")

    monkeypatch.setattr(core.store, "apply", fails)
    submit(anna)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="no memory"):
            anna.collect(1)
    monkeypatch.undo()
    assert exchange(bert).version == 1
    assert exchange(anna).version == 2
    np.testing.assert_array_equal(core.snapshot().params, -2)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [None, Synchronous()])
def test_kept_error_holds_no_arrays_of_its_round(mode):
    def update(updates, state, params=None):
        raise FloatingPointError("no such update")

    failing = optax.GradientTransformation(lambda params: (), update)
    core = Core(CenterSettings(shared.agn(failing), jnp.zeros(2), mode=mode))
    anna = core.join("anna")
    message = jnp.ones(2)
    held = weakref.ref(message)
    for _ in range(2):
        anna.submit(Submission(1, message, anchor_version=0))
        with pytest.raises(FloatingPointError, match="no such update") as raised:
            anna.collect(1)
        note = "".join(raised.value.__notes__)  # the traceback is kept as a note
        assert "in update" in note
    del message, raised
    gc.collect()
    assert held() is None
    with pytest.raises(FloatingPointError, match="no such update"):
        anna.collect(1)


def test_response_is_not_read_once_its_worker_has_joined_anew():
    """Its arrays may have been reused for the next version."""
    core = Core(CenterSettings(DOWNPOUR, jnp.zeros(2)))
    anna, bert = core.join("anna"), core.join("bert")
    anna.submit(Submission(1, jnp.ones(2), anchor_version=0))
    answer = anna.answer(1)
    anna.disconnect()
    core.join("anna")  # a new session, without pending responses
    bert.submit(Submission(1, jnp.ones(2), anchor_version=1))
    assert bert.answer(1).version.number == 2
    with (
        pytest.raises(errors.WorkerStateError, match="version 1 was released"),
        core.reading(answer.version),
    ):
        pass
    with pytest.raises(errors.WorkerStateError, match="version 1 was released"):
        core.snapshot(answer.version)


@pytest.mark.parametrize("again", [False, True])
def test_new_session_does_not_get_the_error_of_the_previous_one(again, monkeypatch):
    core = core_of()
    anna = core.join("anna")

    def fails(*args, **kwargs):
        raise FloatingPointError("no memory for this")

    monkeypatch.setattr(core.store, "apply", fails)
    submit(anna)
    monkeypatch.undo()
    if again:
        anna.leave()
        anna = core.join("anna", anna.session_id, resume=True)
    else:
        anna = core.join("anna", replace=True)
    with pytest.raises(errors.WorkerStateError, match="asks for the answer"):
        anna.collect(1)


def test_new_session_neither_sends_nor_gets_messages_of_the_old_one():
    core = core_of(Synchronous())
    first, bert = core.join("anna"), core.join("bert")
    first.submit(Submission(1, jnp.full(2, 100.0), anchor_version=0))
    second = core.join("anna", replace=True)
    submit(bert)
    submit(second)
    assert second.collect(1, 0.0).version == bert.collect(1, 0.0).version == 1
    np.testing.assert_array_equal(core.snapshot().params, -2)
    third = core.join("anna", replace=True)
    third.submit(Submission(1, jnp.full(2, 100.0), anchor_version=1))
    assert third.collect(1, 0.0) is None  # it waits for bert
    exchange(bert, 2, 1)
    assert third.collect(1, 0.0).version == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_exchange_is_applied_once(when, monkeypatch):
    """For example, by Ctrl-C in a cell of a notebook."""
    core = core_of()
    anna = core.join("anna")
    apply = core.store.apply

    def interrupted(*args, **kwargs):
        if when == "after":
            apply(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(core.store, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(anna)
    monkeypatch.undo()
    submit(anna)
    assert anna.collect(1, LIMIT).version == 1
    np.testing.assert_array_equal(core.snapshot().params, -1)
    assert exchange(anna, 2, 1).version == 2


def test_late_response_is_not_overwritten():
    """No call says when it was read, so its arrays are not reused."""
    core = core_of()
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    anna.acknowledge(1)
    late = anna.answer(1)
    assert (late.answer.norm, late.version.number) == (None, 1)
    assert exchange(bert).version == 2
    np.testing.assert_array_equal(late.version.params, -1)


def test_response_is_not_overwritten_until_it_is_acknowledged():
    core = core_of()
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    answer = anna.answer(1)
    exchange(bert)
    np.testing.assert_array_equal(answer.version.params, -1)
    anna.acknowledge(1)
    assert answer.version.readers == 0


def test_version_without_readers_is_overwritten():
    core = core_of()
    anna = core.join("anna")
    first = None
    for sequence in range(1, 5):
        submit(anna, sequence, sequence - 1)
        answer = anna.answer(sequence)
        anna.acknowledge(sequence)
        assert first is None or first.params.is_deleted()
        first = answer.version


def test_copy_replaces_the_version_of_a_response():
    """The version can then be overwritten, and the copy is the response."""
    core = core_of()
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    answer = anna.answer(1)
    copied = anna.replace(answer, np.array([-1.0, -1.0], np.float32))
    assert anna.answer(1) is copied
    submit(bert)
    assert answer.version.params.is_deleted()
    np.testing.assert_array_equal(anna.collect(1).params, -1)
    anna.acknowledge(1)
    assert copied.version.readers == 0
    # No copy is kept of a response that is no longer kept.
    late = anna.answer(1)
    assert anna.replace(late, np.zeros(2, np.float32)) is not late
    assert not core._answers.keys() - {"bert"}


def test_kept_state_does_not_grow_with_departed_workers():
    core = core_of()
    for number in range(3000):
        session = core.join(f"worker-{number}", close_connection=lambda: None)
        if number % 100 == 0:
            submit(session)
        session.leave()
    kept = core._messages, core._answers, core._failures, core._connection_closers
    assert not any(kept)
    assert len(core.ledger.state_to_save()["members"]) < 1100
