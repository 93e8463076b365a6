"""Dynamic local steps: the center measures workers so that rounds take equally long."""

import heapq
import itertools
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import center_kinds, sessions, shared, tuning

import agn_optax
from agn_optax import checkpoint, errors
from agn_optax.center import Asynchronous, BoundedStaleness, Journal, Submission

LIMIT = 60  # s, generous: no test should come near it


class Clock:
    """Time that a test controls."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    tuning.set_center_clock(monkeypatch, made.monotonic)
    return made


def new_ledger(mode=None):
    """Return the ledger of a center that takes no calls."""
    return agn_optax.LocalCenter(shared.downpour(), mode=mode).core.ledger


class Workers:
    """Workers of one ledger; a test sets the seconds of each round."""

    def __init__(self, mode=None):
        self.ledger, self.now = new_ledger(mode), 0.0
        self._sequences = {}

    def join(self, *names, session_id="1"):
        for name in names:
            self.ledger.join(name, session_id, self.now, replace=True)
            self._sequences[name] = 0, session_id

    def submit(self, name, *, after=0.0, steps=0):
        self.now += after
        sequence, session_id = self._sequences[name]
        self._sequences[name] = sequence + 1, session_id
        message = Submission(sequence + 1, None, self.ledger.version, steps)
        assert self.ledger.submit(name, session_id, message, self.now)
        return self.take()

    def take(self):
        while (batch := self.ledger.due(self.now)) is not None:
            self.ledger.settle(batch, self.now)

    def round(self, name, *, seconds, steps):
        """Make a round, and return the worker's pace after it."""
        self.submit(name, after=seconds, steps=steps)
        return self.ledger.pace(name)


def test_new_worker_is_measured_from_its_second_round():
    made = Workers()
    made.join("a", "b")
    assert made.ledger.pace("a") is None
    assert made.round("a", seconds=90.0, steps=10) is None  # the first round compiles
    assert made.round("a", seconds=5.0, steps=10) == 1.0
    assert made.ledger.pace("b") is None
    made.round("b", seconds=1.0, steps=10)
    assert made.round("b", seconds=2.5, steps=10) == 1.0
    assert made.ledger.pace("a") == 0.5
    assert made.ledger.pace("nobody") is None


def test_step_time_is_that_of_the_fastest_registered_worker():
    made = Workers(Asynchronous())
    made.join("slow", "fast")
    assert made.ledger.step_time is None
    for name in ("slow", "fast"):
        made.submit(name)
    made.submit("fast", after=2.0, steps=8)
    made.submit("slow", after=2.0, steps=4)
    assert made.ledger.step_time == 0.25
    made.ledger.leave("fast", "1")
    assert made.ledger.step_time == 1.0
    made.ledger.leave("slow", "1")
    assert made.ledger.step_time is None


def test_single_outlier_round_does_not_change_the_pace():
    """For example, a worker was suspended, or made its steps before the response."""
    made = Workers()
    made.join("a", "b")
    for name in "ab":
        for _ in range(4):
            made.round(name, seconds=1.0, steps=10)
    assert made.round("a", seconds=3600.0, steps=10) == 1.0
    assert made.round("a", seconds=1.0, steps=10) == 1.0
    assert made.round("b", seconds=1e-6, steps=10) == 1.0
    assert made.ledger.pace("a") == 1.0
    made.round("b", seconds=1.0, steps=10)
    for _ in range(2):  # a lasting change is soon measured
        made.round("a", seconds=4.0, steps=10)
    assert made.ledger.pace("a") == 0.25


def test_unreported_steps_are_not_measured():
    made = Workers()
    made.join("a")
    for _ in range(3):
        assert made.round("a", seconds=1.0, steps=0) is None


def test_only_present_workers_are_compared():
    made = Workers()
    made.join("slow", "fast", "middle")
    for name, steps in (("slow", 1), ("fast", 10), ("middle", 5)):
        for _ in range(2):
            made.round(name, seconds=1.0, steps=steps)
    assert [*map(made.ledger.pace, ("slow", "fast", "middle"))] == [0.1, 1.0, 0.5]
    made.ledger.leave("fast", "1")
    assert [*map(made.ledger.pace, ("slow", "middle"))] == [0.2, 1.0]
    made.join("middle", session_id="2")  # it is known by its name
    assert made.ledger.pace("middle") == 1.0
    made.join("fast", session_id="2")
    assert made.ledger.pace("slow") == 0.1
    # The fastest becomes slower, and another worker is the fastest.
    for _ in range(4):
        made.round("fast", seconds=1.0, steps=2)
    assert [*map(made.ledger.pace, ("slow", "fast", "middle"))] == [0.2, 0.4, 1.0]


def test_waiting_for_others_does_not_count_as_slow():
    """Each waits for the other's rounds, and both rounds end at the same time."""
    made = Workers(BoundedStaleness(rounds=0))
    made.join("slow", "fast")
    made.submit("fast", after=1.0, steps=10)
    for _ in range(4):
        made.submit("fast", after=1.0, steps=10)
        assert [*made.ledger.pending] == ["fast"]
        made.submit("slow", after=8.0, steps=10)
    assert made.ledger.pace("slow") == pytest.approx(1 / 9, rel=1e-3)
    assert made.ledger.pace("fast") == 1.0


def test_restarted_center_keeps_speeds_and_ignores_the_outage():
    made = Workers()
    made.join("a", "b")
    for name, steps in (("a", 10), ("b", 5)):
        for _ in range(3):
            made.round(name, seconds=1.0, steps=steps)
    again = Workers()
    again.ledger.restore(made.ledger.state_to_save(), again.now)
    again.ledger.version = made.ledger.version
    again._sequences = made._sequences
    assert [*map(again.ledger.pace, "ab")] == [1.0, 0.5]
    for name in "ab":
        again.ledger.join(name, "1", again.now, resume=True)
    # It arrives at once because most of it was computed before.
    assert again.round("b", seconds=1e-3, steps=5) == 0.5
    assert again.round("b", seconds=1.0, steps=5) == 0.5
    saved = made.ledger.state_to_save()
    for member in saved["members"].values():  # as saved by a release without speeds
        del member["speeds"]
    old = new_ledger()
    old.restore(saved, 0.0)
    assert old.pace("a") is None


class Simulation:
    """Workers around an embedded center, each with a time for a local step."""

    def __init__(self, center, clock, period):
        self.center, self.clock, self.period = center, clock, period
        self.events, self.lengths, self.order = [], {}, itertools.count()
        self.rounds = {}  # by worker: times when rounds ended

    def add(self, name, seconds):
        worker = agn_optax.Worker(
            self.center, shared.sgd(0.1), period=self.period, name=name
        )
        self._begin(worker, worker.start(), seconds)

    def _begin(self, worker, loop, seconds):
        steps = sessions.fragment(worker).round_length_at(worker.exchanges)
        self.lengths.setdefault(worker.name, []).append(steps)
        end = self.clock.now + steps * seconds
        heapq.heappush(
            self.events, (end, next(self.order), worker, loop, seconds, steps)
        )

    def run(self, seconds, stalls=None):
        """Run for some seconds; each of ``stalls`` delays one round of a worker."""
        until, stalls = self.clock.now + seconds, dict(stalls or {})
        while self.events and self.events[0][0] <= until:
            end, _, worker, loop, each, steps = heapq.heappop(self.events)
            if late := stalls.pop(worker.name, None):
                event = (end + late, next(self.order), worker, loop, each, steps)
                heapq.heappush(self.events, event)
                continue
            self.clock.now = end
            self.rounds.setdefault(worker.name, []).append(end)
            self._begin(worker, worker.exchange(*loop, steps=steps), each)
        self.clock.now = until

    def remove(self, name):
        (gone,) = [event for event in self.events if event[2].name == name]
        gone[2].leave()
        self.events = [event for event in self.events if event is not gone]
        heapq.heapify(self.events)


def test_dynamic_rounds_take_equally_long(clock):
    center = agn_optax.LocalCenter(shared.dynsgd(), jnp.ones(3))
    made = Simulation(center, clock, agn_optax.dynamic_period(40))
    speeds = {"fast": 0.1, "middle": 0.25, "slow": 1.0, "slowest": 5.0}
    for name, seconds in speeds.items():
        made.add(name, seconds)
    made.run(500.0)
    expected = {"fast": 40, "middle": 16, "slow": 4, "slowest": 1}
    for name, lengths in made.lengths.items():
        assert lengths[:2] == [40, 40], "it is not known before"
        assert set(lengths[2:]) == {expected[name]}
    # No worker waits, and each one that can needs four seconds for a round.
    for name in ("fast", "middle", "slow"):
        times = np.diff(made.rounds[name][2:])
        np.testing.assert_allclose(times, 4.0, rtol=1e-9)

    made.remove("fast")  # from their next response on, the others make longer rounds
    made.run(60.0)
    assert made.lengths["middle"][-1] == 40
    assert made.lengths["slow"][-1] == 10
    made.add("newcomer", 0.05)
    made.run(60.0)
    assert made.lengths["newcomer"][:3] == [40, 40, 40]
    assert made.lengths["middle"][-1] == 8
    before = {name: lengths[-1] for name, lengths in made.lengths.items()}
    made.run(100.0, stalls={"middle": 50.0, "newcomer": 30.0})
    made.run(30.0)
    for name in ("middle", "slow", "newcomer"):
        assert set(made.lengths[name][-8:]) == {before[name]}, name


def test_first_rounds_may_be_shorter(clock):
    center = agn_optax.LocalCenter(shared.dynsgd(), jnp.ones(3))
    made = Simulation(center, clock, agn_optax.dynamic_period(40, first=3))
    made.add("one", 0.1)
    made.run(20.0)
    assert made.lengths["one"][:4] == [3, 3, 40, 40]


@pytest.mark.parametrize("kind", center_kinds.KINDS)
def test_every_kind_of_center_reports_the_pace(kind):
    with center_kinds.made(kind, shared.downpour(), {"w": jnp.ones((4, 2))}) as center:
        period = agn_optax.dynamic_period(6, first=2)
        worker = agn_optax.Worker(center, shared.sgd(0.1), period=period)
        loop, lengths = worker.start(), []
        for _ in range(2 * 2 + 2 * 6):
            before = worker.exchanges
            loop = worker.exchange(*loop)
            lengths.append(worker.exchanges - before)
        assert np.flatnonzero(lengths).tolist() == [1, 3, 9, 15]
        assert worker.pace == 1.0


@pytest.mark.parametrize("overlap", [False, True])
def test_slow_worker_thread_gets_shorter_rounds(overlap):
    """The center is served, and the clock is real."""
    rule, until = shared.dynsgd(), time.monotonic() + LIMIT
    with center_kinds.made("server", rule, jnp.ones(3)) as center:
        workers = {
            name: agn_optax.Worker(
                center,
                shared.sgd(0.1),
                period=agn_optax.dynamic_period(20),
                name=name,
                overlap=overlap,
            )
            for name in ("fast", "slow")
        }
        seconds, failed = {"fast": 0.001, "slow": 0.02}, []
        reported, lengths = threading.Event(), []

        def work(name):
            try:
                worker = workers[name]
                loop = worker.start()
                while not reported.is_set() and time.monotonic() < until:
                    time.sleep(seconds[name])  # stands for a local step
                    loop = worker.exchange(*loop)
                    if name == "slow" and (worker.pace or 1.0) < 0.5:
                        lengths.append(sessions.fragment(worker).round_length_at(0))
                        reported.set()
                worker.flush(*loop)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not failed
        assert reported.is_set()
        assert lengths[0] < 10


def test_center_without_pace_gives_a_warning(caplog, monkeypatch):
    center = agn_optax.LocalCenter(shared.downpour(), jnp.ones(3))
    monkeypatch.setattr(center.core.ledger, "pace", lambda worker: None)
    period = agn_optax.dynamic_period(3, first=2)
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=period, name="w")
    loop = worker.start()
    for _ in range(10):
        loop = worker.exchange(*loop)
    assert worker.exchanges == 5
    (record,) = caplog.records
    assert "its rounds stay at 2 local steps" in record.getMessage()


def test_restored_worker_keeps_its_pace(tmp_path):
    center = agn_optax.LocalCenter(shared.downpour(), jnp.ones(3))
    period = agn_optax.dynamic_period(10)

    def made():
        return agn_optax.Worker(center, shared.sgd(0.1), period=period, name="w")

    worker = made()
    loop = worker.start()
    sessions.fragment(worker).pace = 0.35
    saved = worker.save(*loop)
    for pace in (0.35, None):
        again = made()
        (part,) = saved.fragments
        again.restore(saved._replace(fragments=(part._replace(pace=pace),)))
        assert sessions.fragment(again).round_length == (10 if pace is None else 3)
    loop = worker.restore(saved)
    checkpoint.save(tmp_path / "saved", worker=(worker, *loop))
    again = made()
    checkpoint.load(tmp_path / "saved", worker=again)
    assert again.pace == 0.35


def test_journal_restores_speeds(tmp_path, clock):
    kept = Journal(tmp_path / "a")
    center = agn_optax.LocalCenter(shared.downpour(), jnp.ones(3), durability=kept)
    session = center.join("w")
    for sequence in (1, 2):
        session.exchange(Submission(sequence, jnp.ones(3), anchor_version=0, steps=7))
        clock.now += 2.0
    center.close()
    again = agn_optax.LocalCenter(shared.downpour(), durability=kept)
    session = again.join("w", resume_token=session.resume_token)
    clock.now += 1.0
    answer = session.exchange(Submission(3, jnp.ones(3), anchor_version=0, steps=7))
    assert answer.pace == 1.0
    assert again.core.members()[1]["w"].speeds == (3.5,)
    again.close()


def test_dynamic_period_is_rejected_elsewhere():
    period = agn_optax.dynamic_period(10)
    for make in (
        lambda: agn_optax.agn(optax.sgd(0.1), period),
        lambda: agn_optax.exchange_every(optax.sgd(0.1), shared.downpour(), period),
        lambda: agn_optax.Worker(
            agn_optax.LocalCenter(shared.downpour(), jnp.ones(3)),
            shared.sgd(0.1),
            period=period,
            fragments=agn_optax.Fragments(1),
        ),
    ):
        with pytest.raises(errors.InvalidTypeError, match=r"^dynamic_period"):
            make()
    for wrong in ((0,), (2.5,), (10, 0), (10, 11)):
        longest, *first = wrong
        with pytest.raises(errors.AgnOptaxError, match=r"longest|first"):
            agn_optax.dynamic_period(longest, first=first[0] if first else None)
