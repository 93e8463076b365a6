"""The core: every exchange is applied once, whatever happens to who sent it."""

import dataclasses
import itertools
import math
import os
import pathlib
import shutil
import tempfile
import threading
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agn_optax import errors, rules
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Core,
    Journal,
    Synchronous,
    _core,
)
from agn_optax.center.durability import _journal, _keeper

DOWNPOUR = rules.downpour()
MODES = [
    Asynchronous(),
    BoundedStaleness(versions=1),
    BoundedStaleness(rounds=1),
    Synchronous(),
    Synchronous(quorum=1, late="drop"),
]
NAMES = st.sampled_from(["anna", "bert", "carl"])
HOW = st.sampled_from(["collect", "answer", "replace"])
LIMIT = 60  # seconds that nothing here takes


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
            DOWNPOUR, params, mode=self.mode, lease=self.lease, durability=durability
        )
        self.core.observe(self.observe)

    def observe(self, contribution):
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
            assert "asks for the answer" in str(error)
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
        if kills:
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
    monkeypatch.setattr(_journal, "_RESERVED", 1 << 14)  # bytes, quickly copied
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a copy needs none
    monkeypatch.setattr(_journal, "_sync", lambda file: None)
    run_state_machine_as_test(
        lambda: Exchanges(mode, clock, journals),
        settings=settings(max_examples=10 if journals else 30, stateful_step_count=40),
    )
