"""The core: every exchange is applied once, whatever happens to who sent it."""

import contextlib
import dataclasses
import functools
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

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared
from helpers.waiting import wait_until
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
from agn_optax._internal import in_background
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Core,
    Journal,
    Limits,
    Synchronous,
    _core,
)
from agn_optax.center.durability import _directory, _keeper, _writer

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
LIMIT = 30  # seconds that nothing here takes


class Clock:
    """Time as a center sees it."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_core, "time", clock)
    monkeypatch.setattr(_keeper, "time", clock)
    return clock


@dataclasses.dataclass
class Life:
    """What the model knows of one life of a worker."""

    name: str
    incarnation: str
    session: object
    anchor: int
    there: bool = True
    until: float = math.inf
    sent: list = dataclasses.field(default_factory=list)  # numbers, in order
    got: bool = True  # it has the answer to the last
    is_kept: bool = False  # the center has kept that since the number was sent
    answer: tuple | None = None  # it, if it has come and is kept
    anchor_sent: int = 0

    def goes(self):
        self.there, self.until = False, math.inf
        self.is_kept, self.answer = False, None


class Exchanges(RuleBasedStateMachine):
    """A core whose messages are the numbers 1, 2, 3, ..., each of one exchange.

    The model is told by an observer which of them have been applied, and so knows what
    each version of the center must be: whole numbers, so that sums are exact.
    """

    def __init__(self, mode, clock, journals):
        super().__init__()
        self.mode, self.clock, self.journals = mode, clock, journals
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.numbers = itertools.count(1)
        self.lives = {}  # the last of each name
        self.replaced = []
        self.applied = {}  # number: version that it became part of
        self.dropped = set()
        self.versions = [np.zeros(2)]  # of the center
        self.promised = 0  # version that outlives a kill
        self.handed_out = []

    @initialize(lease=st.sampled_from([0.0, 10.0]))
    def start(self, lease):
        self.lease = lease
        self.begin(self.folder / "0", jnp.zeros(2))

    def begin(self, directory, params=None):
        self.directory = directory
        durability = Journal(directory) if self.journals else None
        self.core = Core(
            DOWNPOUR,
            params,
            mode=self.mode,
            limits=Limits(lease=self.lease),
            durability=durability,
        )
        self.core.observer = self.observe

    def observe(self, contribution, claim):
        number = int(contribution[0])
        assert number not in self.applied
        assert number not in self.dropped
        self.applied[number] = self.core.store.current.number
        if self.applied[number] == len(self.versions):  # else applied with another
            self.versions.append(self.versions[-1])
        assert self.applied[number] == len(self.versions) - 1
        self.versions[-1] = self.versions[-1] - (number, 1)

    # What the model knows.

    def look(self):
        """Whose lease is over has gone; returns who is there."""
        # What another thread looks at is as if it had been there at once.
        assert self.core.wait_for(lambda: self.core._look is None, LIMIT)
        there = self.core.members()[1]
        for life in self.lives.values():
            if life.until <= self.clock.now:
                life.goes()
        assert set(there) == {life.name for life in self.lives.values() if life.there}
        return there

    def life(self, name):
        """The last of a name, which is there and has a session."""
        self.look()
        life = self.lives.get(name)
        if life is None:
            self.join(name)
        elif not life.there or life.session is None:
            self.join_again(name)
        return self.lives[name]

    # Commands.

    @rule(name=NAMES)
    def join(self, name):
        """A new life, which takes the name from the one before."""
        incarnation = uuid.uuid4().hex
        session = self.core.join(name, incarnation, replace=True)
        with self.core.reading(kept=True) as version:
            anchor = version.number
        self.promised = max(self.promised, anchor)
        if name in self.lives:
            self.replaced.append(self.lives[name])
            self.replaced[-1].goes()
        self.lives[name] = Life(name, incarnation, session, anchor)
        self.look()

    @precondition(lambda self: self.lives)
    @rule(name=NAMES)
    def join_again(self, name):
        """The same life, over another connection."""
        life = self.lives.get(name)
        if life is not None:
            self.look()
            life.session = self.core.join(name, life.incarnation, back=True)
            life.there, life.until = True, math.inf
            with self.core.reading(kept=True) as version:  # and so that it is back
                self.promised = max(self.promised, version.number)

    @precondition(lambda self: self.replaced)
    @rule(number=st.integers(0, 9))
    def say_something_in_a_life_that_was_replaced(self, number):
        life = self.replaced[number % len(self.replaced)]
        with pytest.raises(errors.WorkerStateError, match="was replaced"):
            self.core.join(life.name, life.incarnation, back=True)
        if life.session is not None:
            self.is_refused(life)
            life.session.acknowledge(1)
            life.session.disconnect()
            life.session.leave()
        self.look()

    def is_refused(self, life):
        with pytest.raises(errors.WorkerStateError, match=life.name):
            life.session.submit(1, jnp.ones(2), anchor_version=0)
        for sequence in (1, len(life.sent)):
            with pytest.raises(errors.WorkerStateError, match=life.name):
                life.session.collect(sequence, 0.0)

    @rule(name=NAMES, repeats=st.booleans())
    def submit(self, name, repeats):
        """The next number, once the last was answered; else the same again."""
        life = self.life(name)
        if life.got and not (life.sent and repeats):
            life.sent.append(next(self.numbers))
            life.got, life.is_kept, life.answer = False, True, None
            life.anchor_sent = life.anchor
        contribution = jnp.array([float(life.sent[-1]), 1.0])
        life.session.submit(len(life.sent), contribution, anchor_version=life.anchor)

    @rule(name=NAMES, how=HOW)
    def collect(self, name, how):
        life = self.life(name)
        if not life.sent:
            return
        sequence, number = len(life.sent), life.sent[-1]
        try:
            answer = self.read(life.session, sequence, how)
        except errors.WorkerStateError as error:
            if "asks for the answer" not in str(error):
                raise
            answer = None
            assert not life.is_kept  # its message left with it, or was never sent
        if answer is None:
            assert not life.got
            assert number not in self.applied
            return
        version, staleness, applied, norm, params = answer
        np.testing.assert_array_equal(params, self.versions[version])
        assert applied == (number in self.applied)
        if applied:
            assert staleness == self.applied[number] - 1 - life.anchor_sent
        else:
            self.dropped.add(number)
        assert (norm is not None) == life.is_kept or not life.got
        if norm is None:
            assert version == len(self.versions) - 1  # the center as it is
        else:
            assert life.answer in (None, answer[:4])
            assert not applied or version == self.applied[number]
            life.answer, life.is_kept = answer[:4], True
        life.got, life.anchor = True, version
        self.promised = max(self.promised, version)

    @rule(name=NAMES, how=HOW, acknowledges=st.booleans())
    def exchange(self, name, how, acknowledges):
        """As far as it goes without waiting."""
        self.submit(name, repeats=False)
        self.collect(name, how)
        if acknowledges:
            self.acknowledge(name)

    def read(self, session, sequence, how):
        """Version, staleness, whether it was applied, norm and parameters; or None."""
        if how == "collect":
            snapshot = session.collect(sequence, 0.0)
            if snapshot is None:
                return None
            self.handed_out.append(snapshot)
            number, answer, params = snapshot.version, snapshot, snapshot.params
        else:
            answer = session.answer(sequence, 0.0)
            if answer is None:
                return None
            session.wait_until_kept(answer)
            with self.core.reading(answer.version) as version:
                params = jnp.copy(version.params)
            if how == "replace":
                answer = session.replace(answer, jnp.copy(params))
            number = answer.version.number
        norm = None if answer.norm is None else float(answer.norm)
        return number, answer.staleness, answer.applied, norm, np.asarray(params)

    @rule(name=NAMES)
    def acknowledge(self, name):
        life = self.life(name)
        if life.sent and life.got:
            life.session.acknowledge(len(life.sent))
            life.is_kept, life.answer = False, None

    @rule(name=NAMES)
    def disconnect(self, name):
        life = self.life(name)
        life.session.disconnect()
        life.until = self.clock.now + self.lease
        self.look()

    @rule(name=NAMES)
    def leave(self, name):
        life = self.life(name)
        for _ in range(2):
            life.session.leave()
        life.goes()
        self.look()
        self.is_refused(life)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @precondition(lambda self: not self.journals)  # a site of a tree has none
    @rule()
    def shift(self):
        with self.core.reading() as version:
            sent = jnp.copy(version.params)
        self.versions.append(self.versions[-1] + (5, 0))
        self.core.shift(sent + jnp.array([5.0, 0.0]), sent)

    @precondition(lambda self: self.journals)
    @rule(kills=st.booleans())
    def restart(self, kills):
        there = self.look()
        directory = self.folder / str(len(list(self.folder.iterdir())))
        if kills:  # a copy takes its time, in which nothing may be written
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
        for life in self.lives.values():
            # Who left a moment ago may have been written down, or not.
            life.there = life.name in self.core.members()[1]
            assert life.there or life.name not in there or not self.lease
            life.until = self.clock.now + self.lease
            life.session, life.is_kept, life.answer = None, False, None
        for life in self.replaced:
            life.session = None

    def end(self):
        """What was answered can still be asked for; what waits never will be."""
        self.look()
        waits = self.core.members()[2]
        self.core.close()
        for life in self.lives.values():
            if life.name in waits:
                with pytest.raises(errors.CenterClosedError, match="has been closed"):
                    life.session.collect(len(life.sent))
            elif life.there and life.session and life.is_kept:
                assert life.session.collect(len(life.sent)) is not None
        with pytest.raises(errors.CenterClosedError):
            self.core.join("somebody")

    @invariant()
    def nobody_looks(self):
        if hasattr(self, "core"):
            self.look()

    def teardown(self):
        if hasattr(self, "core"):
            with self.core.reading() as version:
                np.testing.assert_array_equal(version.params, self.versions[-1])
            self.end()
            for snapshot in self.handed_out:
                expected = self.versions[snapshot.version]
                np.testing.assert_array_equal(snapshot.params, expected)
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("journals", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_every_exchange_is_applied_once(mode, journals, clock, monkeypatch):
    monkeypatch.setattr(_directory, "_LEAST_RESERVED", 1 << 14)  # bytes, quickly copied
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a copy needs none
    monkeypatch.setattr(_writer, "_sync", lambda file: None)
    run_state_machine_as_test(
        lambda: Exchanges(mode, clock, journals),
        settings=settings(max_examples=6 if journals else 15, stateful_step_count=40),
    )


# What one life of a worker is told, and when. Integers again.


def core_of(mode=None, **settings):
    return Core(DOWNPOUR, jnp.zeros(2), mode=mode, **settings)


def submit(session, sequence=1, anchor_version=0):
    session.submit(sequence, jnp.ones(2), anchor_version=anchor_version)


def exchange(session, sequence=1, anchor_version=0):
    return session.exchange(sequence, jnp.ones(2), anchor_version=anchor_version)


@contextlib.contextmanager
def collecting(session, monkeypatch, sequence=1):
    """Somebody waits for an answer meanwhile; yields what comes of it, as a future."""
    condition = session._core._messages[session.worker].over
    waiting = threading.Event()
    wait = condition.wait

    def waits(timeout=None):
        waiting.set()
        return wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(condition, "wait", waits)
        got = in_background(lambda: session.collect(sequence, LIMIT), "collects")
        assert waiting.wait(LIMIT)
    # It has the lock until it waits, and so nothing can happen before.
    yield got


@pytest.mark.parametrize("goes", ["leave", "disconnect", "replace"])
def test_who_waits_is_woken_when_another_goes(goes, monkeypatch):
    core = core_of(Synchronous(), limits=Limits(lease=0.0))
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        if goes == "replace":
            core.join("bert", replace=True).leave()
        else:
            getattr(bert, goes)()
    assert got.result(LIMIT).version == 1


def test_who_waits_is_woken_when_the_others_have_sent(monkeypatch):
    core = core_of(Synchronous())
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        assert exchange(bert).version == 1
    assert got.result(LIMIT).version == 1
    np.testing.assert_array_equal(core.snapshot().params, -2)


def test_who_waits_is_woken_when_a_lease_is_over(monkeypatch):
    core = core_of(Synchronous(), limits=Limits(lease=0.2))
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        bert.disconnect()
    assert got.result(LIMIT).applied


def test_who_waits_is_told_that_it_was_replaced(monkeypatch):
    core = core_of(Synchronous())
    anna, _ = core.join("anna"), core.join("bert")
    submit(anna)
    with collecting(anna, monkeypatch) as got:
        core.join("anna", replace=True)
    with pytest.raises(errors.WorkerStateError, match="'anna' was replaced"):
        got.result(LIMIT)


def test_who_waits_is_told_that_the_center_is_closed(monkeypatch):
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
def test_a_worker_that_hangs_does_not_hold_the_others_up(mode):
    """It is connected all the time, but gives no sign of life any more."""
    core = core_of(mode)
    core.join("hangs", silence=0.4)
    works = core.join("works")
    for sequence in range(1, 6):
        assert exchange(works, sequence, sequence - 1).version == sequence
    assert set(core.members()[1]) == {"works"}
    assert core.hear([("hangs", "whatever")]) == []


def test_a_connection_is_cut_when_its_life_is_over_or_over_another_one():
    core = core_of(limits=Limits(lease=0.0))
    cut = []

    def join(name, *args, **kwargs):
        number = len(cut) + len(core._cuts)
        return core.join(name, *args, cut=lambda: cut.append(number), **kwargs)

    first = join("anna")
    assert not cut
    again = join("anna", first.incarnation, back=True)
    assert cut == [0]
    first.disconnect()  # its connection is not the last one
    assert set(core.members()[1]) == {"anna"}
    join("anna", replace=True)
    assert cut == [0, 1]
    again.leave()
    assert cut == [0, 1]
    core.join("bert", silence=0.0)
    core.leave("anna", core.members()[1]["anna"].incarnation)
    assert cut == [0, 1, 2]
    core.close()
    assert cut == [0, 1, 2]


def test_what_the_rule_cannot_apply_is_refused_and_may_be_sent_again(monkeypatch):
    core = core_of()
    anna, bert = core.join("anna"), core.join("bert")

    def fails(*args):
        raise FloatingPointError("no memory for this")

    monkeypatch.setattr(core.store, "move", fails)
    submit(anna)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="no memory"):
            anna.collect(1)
    monkeypatch.undo()
    assert exchange(bert).version == 1
    assert exchange(anna).version == 2
    np.testing.assert_array_equal(core.snapshot().params, -2)


@pytest.mark.parametrize("mode", [None, Synchronous()])
def test_failure_that_is_kept_holds_no_arrays_of_its_round(mode):
    def update(updates, state, params=None):
        raise FloatingPointError("no such update")

    failing = optax.GradientTransformation(lambda params: (), update)
    core = Core(shared.agn(failing), jnp.zeros(2), mode=mode)
    anna = core.join("anna")
    message = jnp.ones(2)
    held = weakref.ref(message)
    for _ in range(2):
        anna.submit(1, message, anchor_version=0)
        with pytest.raises(FloatingPointError, match="no such update") as raised:
            anna.collect(1)
        note = "".join(raised.value.__notes__)  # where it came from, nevertheless
        assert "in update" in note
    del message, raised
    gc.collect()
    assert held() is None
    with pytest.raises(FloatingPointError, match="no such update"):
        anna.collect(1)


def test_answer_is_not_read_once_its_worker_has_joined_anew():
    """Its arrays may be those of the next version by then."""
    core = Core(DOWNPOUR, jnp.zeros(2))
    anna, bert = core.join("anna"), core.join("bert")
    anna.submit(1, jnp.ones(2), anchor_version=0)
    answer = anna.answer(1)
    anna.disconnect()
    core.join("anna")  # another life, to which nothing is owed
    bert.submit(1, jnp.ones(2), anchor_version=1)
    assert bert.answer(1).version.number == 2
    with (
        pytest.raises(errors.WorkerStateError, match="version 1 is kept no longer"),
        core.reading(answer.version),
    ):
        pass
    with pytest.raises(errors.WorkerStateError, match="version 1 is kept no longer"):
        core.snapshot(answer.version)


def look_and_wait(looks, may, updates, params):
    """An optimizer whose programs tell when they run, and wait until they may."""

    def wait(update):
        looks.set()
        assert may.wait(LIMIT)
        return update

    return jax.pure_callback(wait, jax.eval_shape(lambda: updates), updates)


@pytest.mark.parametrize("mode", [None, Synchronous()])
def test_center_answers_others_while_the_device_looks_at_a_message(mode):
    """Nobody waits for the device under the lock; and turns stay as they are."""
    looks, may = threading.Event(), threading.Event()
    waiting = optax.stateless(functools.partial(look_and_wait, looks, may))
    core = Core(shared.agn(waiting), jnp.zeros(2), mode=mode)
    anna, bert = core.join("anna"), core.join("bert")
    sends = [threading.Thread(target=submit, args=(each,)) for each in (anna, bert)]
    for thread in sends:
        thread.start()
    answered = threading.Event()

    def others():
        lives = [(each.worker, each.incarnation) for each in (anna, bert)]
        assert core.hear(lives) == ["anna", "bert"]
        core.join("carl").leave()
        assert set(core.members()[1]) == {"anna", "bert"}
        assert core.snapshot().version == 0
        answered.set()

    assert looks.wait(LIMIT)
    asks = threading.Thread(target=others)
    asks.start()
    try:
        assert answered.wait(10.0)
    finally:
        may.set()
        asks.join(LIMIT)
    for thread in sends:
        thread.join(LIMIT)
    versions = {each.collect(1, LIMIT).version for each in (anna, bert)}
    assert versions == ({1, 2} if mode is None else {1})


def test_worker_that_leaves_while_its_message_is_looked_at_moves_nothing():
    looks, may = threading.Event(), threading.Event()
    waiting = optax.stateless(functools.partial(look_and_wait, looks, may))
    core = Core(shared.agn(waiting), jnp.zeros(2))
    anna, bert = core.join("anna"), core.join("bert")
    sends = threading.Thread(target=submit, args=(anna,))
    sends.start()
    assert looks.wait(LIMIT)
    anna.leave()
    may.set()
    sends.join(LIMIT)
    assert core.snapshot().version == 0
    assert exchange(bert).version == 1
    back = core.join("anna", anna.incarnation, back=True)
    assert exchange(back, 1).version == 2


@contextlib.contextmanager
def a_held_look(core, *submits):
    """Messages that are looked at meanwhile, of an optimizer that waits."""
    looks, may = threading.Event(), threading.Event()
    look = core.store.look

    def held(prepared):
        looks.set()
        assert may.wait(LIMIT)
        return look(prepared)

    core.store.look = held
    threads = [threading.Thread(target=submit) for submit in submits]
    for thread in threads:
        thread.start()
    try:
        assert looks.wait(LIMIT)
        yield
    finally:
        core.store.look = look
        may.set()
        for thread in threads:
            thread.join(LIMIT)


def test_leases_end_while_the_device_looks_at_a_message():
    core = core_of(limits=Limits(lease=0.0))
    anna, bert = core.join("anna"), core.join("bert")
    with a_held_look(core, lambda: submit(anna)):
        bert.disconnect()
        assert set(core.members()[1]) == {"anna"}
    assert anna.collect(1, LIMIT).version == 1


def test_a_message_that_comes_during_a_look_may_be_too_old_after_it():
    core = core_of(BoundedStaleness(versions=0))
    anna, bert = core.join("anna"), core.join("bert")
    with a_held_look(core, lambda: submit(anna)):
        submit(bert)
    assert anna.collect(1, LIMIT).applied
    answer = bert.collect(1, LIMIT)
    assert (answer.applied, answer.staleness) == (False, 1)


def test_nobody_asks_again_and_again_during_a_look():
    """The round is over, but nothing can be decided before the look is."""
    core = core_of(Synchronous(quorum=2, grace=0.01))
    anna, bert, _ = (core.join(name) for name in ("anna", "bert", "carl"))
    settled = 0
    settle = core._settle

    def counted(**how):
        nonlocal settled
        settled += 1
        settle(**how)

    def end_a_round():  # the look is held before it may begin, however slow this is
        submit(anna)
        submit(bert)
        anna.collect(1, LIMIT)

    core._settle = counted
    with a_held_look(core, end_a_round):
        settled = 0
        assert bert.collect(1, 0.2) is None
        assert settled < 10
    assert bert.collect(1, LIMIT).version == 1


def test_a_round_ends_in_time_after_a_look(monkeypatch):
    """Though whoever waits for it did not have to wake up before."""
    monkeypatch.setattr(_core, "_LOOKS", math.inf)
    core = core_of(Synchronous(quorum=1, grace=0.5))  # longer than a submit takes
    anna, bert, _ = (core.join(name) for name in ("anna", "bert", "carl"))
    submit(anna)
    with a_held_look(core, functools.partial(anna.collect, 1, LIMIT)):
        submit(bert)
        with collecting(bert, monkeypatch) as got:
            pass
    assert got.result(LIMIT).version == 2


@pytest.mark.parametrize("fails", [RuntimeError, KeyboardInterrupt])
def test_a_look_that_could_not_begin_is_begun_by_the_next(fails, monkeypatch):
    """There may be no more threads, or Ctrl-C comes before it."""
    monkeypatch.setattr(_core, "_LOOKS", 0.05)  # seconds until somebody tries again
    core = core_of(Synchronous(quorum=1, grace=0.5))  # longer than a submit takes
    anna, bert = core.join("anna"), core.join("bert")

    def broken(*args, **kwargs):
        raise fails("not now")

    with monkeypatch.context() as patch:
        submit(anna)
        if fails is RuntimeError:
            patch.setattr(_core, "in_background", broken)
            act = functools.partial(anna.collect, 1, LIMIT)
        else:
            patch.setattr(core, "_look_at", broken)
            act = functools.partial(submit, bert)
        with pytest.raises(fails, match="not now"):
            act()
    assert anna.collect(1, LIMIT).version == 1


def test_what_a_look_s_thread_raises_is_logged(caplog):
    core = core_of(Synchronous(quorum=1, grace=0.5))  # longer than a submit takes
    anna, _ = core.join("anna"), core.join("bert")

    def broken(contribution, claim):
        raise ZeroDivisionError("an observer's")

    core.observer = broken
    submit(anna)
    assert anna.collect(1, LIMIT).version == 1
    wait_until(lambda: "ZeroDivisionError: an observer's" in caplog.text)


@pytest.mark.parametrize("again", [False, True])
def test_a_new_life_is_not_told_what_became_of_the_last(again, monkeypatch):
    core = core_of()
    anna = core.join("anna")

    def fails(*args):
        raise FloatingPointError("no memory for this")

    monkeypatch.setattr(core.store, "move", fails)
    submit(anna)
    monkeypatch.undo()
    if again:
        anna.leave()
        anna = core.join("anna", anna.incarnation, back=True)
    else:
        anna = core.join("anna", replace=True)
    with pytest.raises(errors.WorkerStateError, match="asks for the answer"):
        anna.collect(1)


def test_a_new_life_neither_sends_nor_gets_what_was_the_last_one_s():
    core = core_of(Synchronous())
    first, bert = core.join("anna"), core.join("bert")
    first.submit(1, jnp.full(2, 100.0), anchor_version=0)
    second = core.join("anna", replace=True)
    submit(bert)
    submit(second)
    assert second.collect(1, 0.0).version == bert.collect(1, 0.0).version == 1
    np.testing.assert_array_equal(core.snapshot().params, -2)
    third = core.join("anna", replace=True)
    third.submit(1, jnp.full(2, 100.0), anchor_version=1)
    assert third.collect(1, 0.0) is None  # waits for bert
    exchange(bert, 2, 1)
    assert third.collect(1, 0.0).version == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exchange_that_is_interrupted_is_applied_once(when, monkeypatch):
    """By Ctrl-C in the middle of a notebook's cell, say."""
    core = core_of()
    anna = core.join("anna")
    move = core.store.move

    def interrupted(*args):
        if when == "after":
            move(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(core.store, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(anna)
    monkeypatch.undo()
    submit(anna)
    assert anna.collect(1, LIMIT).version == 1
    np.testing.assert_array_equal(core.snapshot().params, -1)
    assert exchange(anna, 2, 1).version == 2


def test_a_late_answer_stays_what_it_is():
    """Nobody says when it has been read, and so it is not written over."""
    core = core_of()
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    anna.acknowledge(1)
    late = anna.answer(1)
    assert (late.norm, late.version.number) == (None, 1)
    assert exchange(bert).version == 2
    np.testing.assert_array_equal(late.version.params, -1)


def test_an_answer_stays_what_it_is_until_it_is_acknowledged():
    core = core_of()
    anna, bert = core.join("anna"), core.join("bert")
    submit(anna)
    answer = anna.answer(1)
    exchange(bert)
    np.testing.assert_array_equal(answer.version.params, -1)
    anna.acknowledge(1)
    assert answer.version.readers == 0


def test_a_version_is_written_over_once_nobody_reads_it():
    core = core_of()
    anna = core.join("anna")
    first = None
    for sequence in range(1, 5):
        submit(anna, sequence, sequence - 1)
        answer = anna.answer(sequence)
        anna.acknowledge(sequence)
        assert first is None or first.params.is_deleted()
        first = answer.version


def test_a_copy_takes_the_place_of_a_version():
    """Which then is written over, and the copy is what is answered."""
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
    # Of an answer that is not kept any more, nothing is kept.
    late = anna.answer(1)
    assert anna.replace(late, np.zeros(2, np.float32)) is not late
    assert not core._answers.keys() - {"bert"}


def test_what_is_kept_does_not_grow_with_names_that_have_gone():
    core = core_of()
    for number in range(3000):
        session = core.join(f"worker-{number}", cut=lambda: None)
        if number % 100 == 0:
            submit(session)
        session.leave()
    kept = core._messages, core._answers, core._failures, core._cuts
    assert not any(kept)
    assert len(core.ledger.memory()["members"]) < 1100
