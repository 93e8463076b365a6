"""Sites: centers that are workers of a parent, and what they send and adopt."""

import contextlib
import dataclasses
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared, tuning
from helpers.waiting import wait_until

import agn_optax
from agn_optax import accumulate, elastic_pull, errors
from agn_optax.center import CenterSettings, Core, ShardedCenter, Snapshots, Submission
from agn_optax.worker import Uplink

LIMIT = 60  # s, generous: no test should come near it


class Parent(agn_optax.LocalCenter):
    """A center that records the messages it gets."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.sent = []  # contribution, anchor version, and steps
        self.meanwhile = []  # functions to call while a message is in flight
        self.before = []  # functions to call before a message is applied

    def join(self, *args, **kwargs):
        session = super().join(*args, **kwargs)
        submit = session.submit

        def seen(submission):
            while self.before:
                self.before.pop()()
            sent = jax.tree.map(np.array, submission.contribution)
            self.sent.append((sent, submission.anchor_version, submission.steps))
            submit(submission)
            while self.meanwhile:
                self.meanwhile.pop()()

        session.submit = seen
        return session


class Site:
    """A center with one worker and a parent with which it exchanges periodically."""

    def __init__(self, rule, parent, *, period, params=None):
        self.core = Core(CenterSettings(rule, params))
        self.uplink = Uplink(self.core, parent, period=period, name="site")
        assert self.uplink.ready.wait(LIMIT)
        self.worker = self.core.join("anna")
        self.num_sent = 0

    def exchange(self, value, times=1):
        for _ in range(times):
            self.num_sent += 1
            with self.core.reading() as version:
                message = jax.tree.map(
                    lambda x: jnp.full_like(x, value), version.params
                )
                anchor = version.number
            self.worker.exchange(
                Submission(self.num_sent, message, anchor_version=anchor)
            )

    def meets(self, times):
        """Wait until it has exchanged this often with its parent, and adopted."""
        version = self.num_sent + self.shifts + times
        assert self.core.wait_for(
            lambda: self.core.store.current.number >= version, LIMIT
        )
        assert self.uplink._worker.exchanges == times

    shifts = 0  # rebases at the start


@contextlib.contextmanager
def running_site(*args, **settings):
    site = Site(*args, **settings)
    try:
        yield site
    finally:
        site.uplink.stop()
    assert site.uplink.error is None


def test_site_sends_its_displacement_since_the_last_adoption():
    parent = Parent(shared.downpour(), jnp.zeros(3))
    with running_site(shared.downpour(), parent, period=3) as site:
        for meeting in (1, 2, 3):
            site.exchange(float(meeting), times=3)
            site.meets(meeting)
            contribution, anchor, steps = parent.sent[-1]
            np.testing.assert_array_equal(contribution, 3.0 * meeting)
            assert (anchor, steps) == (meeting - 1, 3)
        site.exchange(10.0)
    assert [steps for *_, steps in parent.sent] == [
        3,
        3,
        3,
        1,
    ]  # the last one when it stops
    np.testing.assert_array_equal(parent.pull().params, -3.0 * 6 - 10)
    np.testing.assert_array_equal(site.core.snapshot().params, -3.0 * 6 - 10)
    assert not parent.workers


def test_site_sends_its_gradients_since_the_last_adoption():
    """Its record is reset after each exchange, and divided by the steps it sends."""
    parent = Parent(shared.agn(shared.sgd(0.1)), jnp.zeros(3))
    with running_site(shared.agn(shared.sgd(1.0)), parent, period=2) as site:
        for meeting in (1, 2, 3):
            site.exchange(float(meeting), times=2)
            site.meets(meeting)
            contribution, anchor, steps = parent.sent[-1]
            np.testing.assert_allclose(contribution, float(meeting), rtol=1e-6)
            assert (anchor, steps) == (meeting - 1, 2)
    np.testing.assert_allclose(parent.pull().params, -0.6, rtol=1e-6)


def test_site_adopts_the_progress_of_others():
    parent = Parent(shared.downpour(), jnp.zeros(3))
    with running_site(shared.downpour(), parent, period=2) as site:
        other = parent.join("other")
        other.exchange(Submission(1, jnp.full(3, 100.0), anchor_version=0))
        site.exchange(1.0, times=2)
        site.meets(1)
        np.testing.assert_array_equal(site.core.snapshot().params, -102.0)
        site.exchange(1.0, times=2)
        site.meets(2)
        np.testing.assert_array_equal(parent.sent[-1][0], 2.0)
    np.testing.assert_array_equal(parent.pull().params, -104.0)


@pytest.mark.parametrize("record", [False, True])
def test_site_continues_while_its_message_is_in_flight(record):
    """Progress made meanwhile stays in its center and is in its next message."""
    rule = shared.agn(shared.sgd(1.0)) if record else shared.downpour()
    parent = Parent(shared.agn(shared.sgd(1.0)) if record else rule, jnp.zeros(3))
    with running_site(rule, parent, period=2) as site:
        sent = threading.Event()  # a session is used by one thread at a time
        parent.meanwhile.append(lambda: sent.wait(LIMIT) and site.exchange(5.0))
        site.exchange(1.0, times=2)
        sent.set()
        site.core.wait_for(lambda: site.num_sent == 3, LIMIT)
        site.meets(1)
        first = -1.0 if record else -2.0  # the parent has received this
        np.testing.assert_array_equal(site.core.snapshot().params, first - 5.0)
        np.testing.assert_array_equal(parent.pull().params, first)
        site.exchange(1.0)
        site.meets(2)
        np.testing.assert_array_equal(parent.sent[-1][0], 3.0 if record else 6.0)
        assert [steps for *_, steps in parent.sent] == [2, 2]


def test_site_moves_its_anchor_under_a_parent_with_a_penalty():
    """A worker of such a rule keeps the anchor in its state for local steps."""
    pulled = dataclasses.replace(shared.downpour(), penalty=elastic_pull(0.5))
    parent = Parent(pulled, jnp.zeros(3))
    with running_site(shared.downpour(), parent, period=2) as site:
        for meeting in (1, 2, 3):
            site.exchange(float(meeting), times=2)
            site.meets(meeting)
            np.testing.assert_array_equal(parent.sent[-1][0], 2.0 * meeting)
    np.testing.assert_array_equal(parent.pull().params, -12.0)


def test_site_starts_with_the_params_of_its_parent():
    parent = Parent(shared.downpour(), jnp.full(3, 7.0))
    for params in (None, jnp.zeros(3)):
        with running_site(shared.downpour(), parent, period=2, params=params) as site:
            np.testing.assert_array_equal(site.core.snapshot().params, 7.0)
            assert site.core.store.current.number == (params is not None)
    assert not parent.sent


def test_parent_starts_with_the_params_of_a_site():
    parent = Parent(shared.downpour())
    with running_site(
        shared.downpour(), parent, period=2, params=jnp.full(3, 7.0)
    ) as site:
        np.testing.assert_array_equal(parent.pull().params, 7.0)
        site.exchange(1.0, times=2)
        site.meets(1)
    np.testing.assert_array_equal(parent.pull().params, 5.0)


def test_parent_that_sums_gradients_needs_such_a_site():
    core = Core(CenterSettings(shared.easgd(0.3), jnp.zeros(3)))
    parent = Parent(shared.agn(shared.sgd(0.1)), jnp.zeros(3))
    with pytest.raises(
        errors.InvalidArgumentError, match="parent whose rule sums grad"
    ):
        Uplink(core, parent, period=2, name="site")
    assert not parent.workers


class DeliberateError(Exception):
    """An error after which the site has to rejoin its parent."""


def fails():
    raise DeliberateError("on purpose")


@pytest.fixture
def soon(monkeypatch):
    tuning.set_parent_pauses(monkeypatch, 0.01)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("lost", ["before", "meanwhile"])
@pytest.mark.parametrize("record", [False, True])
def test_site_rejoins_its_parent_after_any_error(lost, record, caplog):
    """Its message is sent again only if the parent has not applied it."""
    rule = shared.agn(shared.sgd(1.0)) if record else shared.downpour()
    parent = Parent(rule, jnp.zeros(3))
    with running_site(rule, parent, period=2) as site:
        site.exchange(1.0, times=2)
        site.meets(1)
        there, goes_on = threading.Event(), threading.Event()

        def fails_when_released():
            there.set()
            assert goes_on.wait(LIMIT)
            fails()

        getattr(parent, lost).append(fails_when_released)
        site.exchange(2.0, times=2)
        assert there.wait(LIMIT)
        site.exchange(5.0)  # it accumulates meanwhile
        goes_on.set()
        wait_until(lambda: len(parent.sent) == 2 and site.uplink._joined)
        wait_until(lambda: not site.uplink._rounds)
        site.exchange(7.0)
        wait_until(lambda: len(parent.sent) == 3)
    steps = [steps for *_, steps in parent.sent]
    assert steps == [2, 2, 2]
    expected = [1.0, 2.0, 6.0] if record else [2.0, 4.0, 12.0]
    for (contribution, *_), value in zip(parent.sent, expected, strict=True):
        np.testing.assert_allclose(contribution, value, rtol=1e-6)
    np.testing.assert_allclose(parent.pull().params, -sum(expected), rtol=1e-6)
    np.testing.assert_allclose(site.core.snapshot().params, -sum(expected), rtol=1e-6)
    assert "goes on without its parent" in caplog.text
    assert "on purpose" in caplog.text


@pytest.mark.usefixtures("soon")
def test_site_is_degraded_until_it_has_rejoined_its_parent():
    parent = Parent(shared.downpour(), jnp.zeros(3))
    with running_site(shared.downpour(), parent, period=1) as site:
        assert site.core.degraded == ""
        join, may_join = parent.core.join, threading.Event()

        def rejects(*args, **kwargs):
            if not may_join.is_set():
                raise errors.CenterFullError("there is no room")
            return join(*args, **kwargs)

        parent.core.join = rejects
        parent.before.append(fails)
        site.exchange(1.0)
        wait_until(lambda: "there is no room" in site.core.degraded)
        assert "goes on without its parent since" in site.core.degraded
        assert isinstance(site.uplink.error, errors.CenterFullError)
        site.exchange(1.0, times=3)
        may_join.set()
        wait_until(lambda: not site.core.degraded)
        assert site.uplink.error is None
    np.testing.assert_array_equal(parent.pull().params, -4.0)


@pytest.mark.usefixtures("soon")
def test_stopping_site_tries_to_rejoin_and_sends_its_progress():
    parent = Parent(shared.downpour(), jnp.zeros(3))
    with running_site(shared.downpour(), parent, period=100) as site:
        site.exchange(1.0, times=3)
        parent.before += [fails, fails]
    np.testing.assert_array_equal(parent.pull().params, -3.0)


@pytest.mark.usefixtures("soon")
def test_parent_that_lost_everything_gets_the_params_of_the_site():
    """They include all progress, which is not sent again."""
    parent = Parent(shared.downpour(), jnp.zeros(3))
    with running_site(shared.downpour(), parent, period=2) as site:
        site.exchange(1.0, times=2)
        site.meets(1)

        lost = threading.Event()

        def loses_all():
            agn_optax.LocalCenter.__init__(parent, parent.rule)
            lost.set()
            fails()

        parent.before.append(loses_all)
        site.exchange(2.0, times=2)
        assert lost.wait(LIMIT)
        wait_until(lambda: parent.core.is_initialized and parent.workers)
        np.testing.assert_array_equal(parent.pull().params, -6.0)
        site.exchange(1.0)
    np.testing.assert_array_equal(parent.pull().params, -7.0)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("attempts", [0, 1, 2])
def test_progress_counts_once_if_rejoining_fails_halfway(
    attempts, arrives, shards, tmp_path
):
    """Attempts fail after the join; a parent with the message has a snapshot of it."""
    rule = shared.downpour()
    kept = Snapshots(tmp_path / "kept", seconds=None, exchanges=1000)
    parents = [Parent(rule, durability=kept), *[Parent(rule)][: shards - 1]]
    above = ShardedCenter(parents) if shards == 2 else parents[0]
    above.initialize({"a": jnp.zeros(2), "b": jnp.zeros(2)}, worker="chief")
    failures = []

    def goes_on_from_a_snapshot():
        parents[0].core.write_snapshot()
        shutil.copytree(tmp_path / "kept", tmp_path / "later")
        later = Snapshots(tmp_path / "later", seconds=None, exchanges=1000)
        parents[0].__init__(rule, durability=later)

    def breaks():
        if arrives and shards == 1:
            goes_on_from_a_snapshot()
        pull, join = above.pull, above.join

        def fails_after_a_join(**how):
            above.pull = pull
            failures.append(how)
            raise errors.CenterUnreachableError("not now")

        def joins(*args, **settings):
            session = join(*args, **settings)
            if len(failures) < attempts:
                above.pull = fails_after_a_join
            return session

        above.join = joins
        fails()

    with running_site(rule, above, period=2) as site:
        for parent in parents[1:]:
            (parent.meanwhile if arrives else parent.before).append(fails)
        (parents[0].meanwhile if arrives else parents[0].before).append(breaks)
        site.exchange(1.0, times=2)
        wait_until(lambda: site.uplink._joined and not site.uplink._rounds)
        wait_until(lambda: len(failures) == attempts and site.uplink.error is None)
        site.exchange(1.0)
    for params in (above.pull().params, site.core.snapshot().params):
        for leaf in params.values():
            np.testing.assert_array_equal(leaf, -3.0)


def slow_record():
    """Return a sum of gradients that takes the device about half a second."""
    sums = accumulate()

    def update(gradients, state, params=None, **more):
        def turn(_, x):
            return jnp.cos(x)

        slow = jax.lax.fori_loop(0, 50_000, turn, gradients)
        gradients = jax.tree.map(lambda g, s: jnp.where(s > 2, s, g), gradients, slow)
        return sums.update(gradients, state, params, **more)

    return optax.GradientTransformationExtraArgs(sums.init, update)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("at", ["join", "send"])
def test_response_that_failed_to_be_adopted_is_adopted_later(at):
    """Progress that the parent has by then counts once, at the parent and the site."""
    parent = Parent(shared.downpour(), jnp.zeros(3))
    with running_site(shared.downpour(), parent, period=2) as site:
        shift, attempts = site.core.rebase, []

        def fails_once(*args):
            attempts.append(args)
            if len(attempts) == 1:
                fails()
            shift(*args)

        site.core.rebase = fails_once
        other = parent.join("other")
        # Now there is progress to adopt.
        other.exchange(Submission(1, jnp.ones(3), anchor_version=0))
        if at == "join":
            parent.meanwhile.append(
                fails
            )  # the message arrives, and the response is lost
        site.exchange(1.0, times=2)
        wait_until(lambda: len(attempts) > 1 and site.uplink.error is None)
        other.leave()
        site.exchange(1.0)
    np.testing.assert_array_equal(parent.pull().params, -4.0)
    np.testing.assert_array_equal(site.core.snapshot().params, -4.0)


def test_record_of_a_site_is_traced_once():
    """It is compiled under the lock of the site's center."""
    rule, traced, sums = shared.agn(shared.sgd(1.0)), [], accumulate()

    def update(*args, **more):
        traced.append(args)
        return sums.update(*args, **more)

    record = optax.GradientTransformationExtraArgs(sums.init, update)
    parent = Parent(dataclasses.replace(rule, record=record), jnp.zeros(3))
    with running_site(rule, parent, period=2) as site:
        site.exchange(1.0, times=5)
    assert sum(steps for *_, steps in parent.sent) == 5
    assert len(traced) == 1


def test_uplink_reads_contributions_without_blocking_the_lock():
    """A worker may overwrite its message as soon as it has the response."""
    rule = shared.agn(shared.sgd(1.0))
    parent = Parent(dataclasses.replace(rule, record=slow_record()), jnp.zeros(1000))
    core = Core(CenterSettings(rule, jnp.zeros(1000)))
    uplink = Uplink(core, parent, period=100, name="site")
    ready = []

    def observed(submission):
        read = uplink._observe(submission)
        ready.append(read.is_ready())
        return read

    core.observer = observed
    try:
        assert uplink.ready.wait(LIMIT)
        session = core.join("anna")
        session.exchange(Submission(1, np.ones(1000, np.float32), anchor_version=0))
        assert ready == [False]
        assert uplink._record.sum.is_ready()
    finally:
        uplink.stop()
    np.testing.assert_array_equal(parent.sent[-1][0], 1.0)
