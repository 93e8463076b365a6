"""Tapes of real runs are simulated again, and simulated runs are written as tapes."""

import functools
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import children, problem, shared
from helpers.loops import INNER, PERIOD, Loop, data
from helpers.support import RULES, assert_identical
from helpers.waiting import LIMIT, wait_until

import agn_optax
from agn_optax import errors, simulate, tape
from agn_optax.center import (
    BoundedStaleness,
    Journal,
    Limits,
    LocalCenter,
    MessageLimits,
    Submission,
    Synchronous,
)
from agn_optax.rules import codecs
from agn_optax.service import serve
from agn_optax.simulate import (
    Cluster,
    Failure,
    Failures,
    Fixed,
    Link,
    LogNormal,
    Outcome,
    SessionEvent,
)

RULE = shared.agn(shared.sgd(0.1))
PROCESS = pathlib.Path(__file__).with_name("loop_process.py")
BITS = codecs.error_feedback(codecs.quantize(4))


execute = functools.partial(
    simulate.execute, inner=INNER, loss=problem.loss, data=data, exact=True
)


def real_run(path, rule, rounds=5, kills=False, overlap=False, **settings):
    """Let three threads train; the center's last state."""
    journal = Journal(path, keep="contributions")
    with LocalCenter(rule, problem.params(), durability=journal, **settings) as center:
        started = threading.Barrier(3)

        def train(index):
            loop = Loop(center, index, overlap=overlap)
            started.wait(LIMIT)
            loop.run(PERIOD * rounds)
            if kills and index == 1:
                number = loop.number
                loop.run(1)  # in a round that is lost
                loop = Loop(center, index, first=number).run(PERIOD * rounds)
            loop.worker.flush(*loop.loop)
            loop.worker.leave()

        with ThreadPoolExecutor(3) as pool:
            for each in [pool.submit(train, index) for index in range(3)]:
                each.result(LIMIT)
        return jax.tree.map(np.array, center.save())


def check_again(path, rule, last, again, **arguments):
    """Simulate a recorded run, and compare all bits."""
    recorded = tape.read(path)
    planned = simulate.schedule_of(recorded, rule, **arguments)
    journal = Journal(again, keep="contributions")
    found = execute(planned, params=recorded.replay(rule, 0).params, durability=journal)
    assert_identical(found.center, last)
    assert tape.diff(recorded, tape.read(again)) is None
    hashes = [
        [message.hash for event in each.events() for message in event.messages]
        for each in (recorded, tape.read(again))
    ]
    assert all(hashes[0])
    assert hashes[0] == hashes[1]
    return planned


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["agn", *[pytest.param(each, marks=SLOW) for each in ("easgd", "diloco")]]
)
def test_tape_of_threads_is_simulated_bit_for_bit(name, tmp_path):
    rule = RULES[name]()
    last = real_run(tmp_path / "run", rule)
    planned = check_again(tmp_path / "run", rule, last, tmp_path / "again")
    assert len(planned) == 15
    assert planned.staleness.max() >= 2
    assert planned.names == ("worker-0", "worker-1", "worker-2")
    *_, end = tape.read(tmp_path / "run").events()
    assert planned.duration == end.time


@pytest.mark.parametrize(
    "name", ["agn", *[pytest.param(each, marks=SLOW) for each in ("easgd", "diloco")]]
)
def test_tape_of_overlapping_exchanges_is_simulated_bit_for_bit(name, tmp_path):
    rule = RULES[name]()
    last = real_run(tmp_path / "run", rule, overlap=True)
    planned = check_again(tmp_path / "run", rule, last, tmp_path / "again")
    assert planned.steps_since.max() >= 1
    assert np.all(planned.steps_since <= PERIOD)


def test_worker_that_resumed_after_a_late_answer_is_simulated_bit_for_bit(tmp_path):
    journal = Journal(tmp_path / "run", keep="contributions")
    with LocalCenter(RULE, problem.params(), durability=journal) as center:
        loop = Loop(center, 0, overlap=True).run(2 * PERIOD)
        params, state = loop.run(1).loop
        loop.loop = loop.worker.receive(params, state)
        saved, token = loop.worker.save(*loop.loop), loop.worker.resume_token
        loop.worker = agn_optax.Worker(
            center, INNER, period=PERIOD, name="worker-0", overlap=True
        )
        loop.loop = loop.worker.restore(saved, resume_token=token)
        loop.run(PERIOD)
        loop.worker.flush(*loop.loop)
        last = jax.tree.map(np.array, center.save())
    planned = check_again(tmp_path / "run", RULE, last, tmp_path / "again")
    assert planned.steps_since.tolist() == [0, 1, 1, 0]


@pytest.mark.slow
def test_tape_with_drops_is_simulated_bit_for_bit(tmp_path):
    rule = agn_optax.rules.agn(optax.sgd(0.3), codec=BITS)
    last = real_run(tmp_path / "run", rule, mode=BoundedStaleness(versions=1))
    planned = check_again(tmp_path / "run", rule, last, tmp_path / "again")
    assert np.any(planned.outcome == Outcome.DROPPED)


@pytest.mark.parametrize("late", ["weighted", pytest.param("drop", marks=SLOW)])
def test_tape_of_rounds_with_a_quorum_is_simulated_bit_for_bit(late, tmp_path):
    rule, mode = RULES["diloco"](), Synchronous(quorum=2, late=late)
    last = real_run(tmp_path / "run", rule, mode=mode)
    planned = check_again(tmp_path / "run", rule, last, tmp_path / "again")
    assert planned.combines


def test_tape_of_a_worker_that_was_lost_and_joined_again_is_simulated(tmp_path):
    last = real_run(tmp_path / "run", RULE, kills=True)
    planned = check_again(tmp_path / "run", RULE, last, tmp_path / "again")
    events = planned.sessions["event"][planned.sessions["worker"] == 1]
    assert events.tolist() == [
        *(SessionEvent.JOINED, SessionEvent.STARTED, SessionEvent.FAILED),
        *(SessionEvent.JOINED, SessionEvent.STARTED, SessionEvent.LEFT),
    ]
    assert planned.session[planned.worker == 1].max() == 2


@pytest.mark.slow
def test_tape_of_processes_is_simulated_bit_for_bit(tmp_path):
    server = serve(
        RULE,
        problem.params(),
        address="127.0.0.1:0",
        durability=Journal(tmp_path / "run", keep="contributions"),
        limits=agn_optax.service.Limits(lease=1.0),
    )
    core = server.center.core

    def is_lost(name):
        return not core.members()[1][name].connected

    try:
        with children.processes(PROCESS, 4) as (first, second, third, again):
            for index, each in enumerate((first, second, third)):
                each.ask(do="start", address=server.address, index=index)
            for each in (first, second, third):
                each.send(do="run", steps=5 * PERIOD)
            for each in (first, second, third):
                each.answer()
            second.ask(do="run", steps=1)  # in a round that is lost
            second.kill()
            wait_until(lambda: is_lost("worker-1"))
            again.ask(do="start", address=server.address, index=1, first=5 * PERIOD)
            third.kill()
            for each in (first, again):
                each.send(do="run", steps=5 * PERIOD)
            for each in (first, again):
                each.answer()
            wait_until(lambda: "worker-2" not in server.center.workers)
            first.ask(do="run", steps=PERIOD)
        last = jax.tree.map(np.array, server.center.save())
    finally:
        server.stop()
    limits = Limits(max_workers=None, lease=1.0)
    planned = check_again(
        tmp_path / "run", RULE, last, tmp_path / "again", limits=limits
    )
    assert len(planned) == 26
    failed = planned.sessions["event"] == SessionEvent.FAILED
    assert {1, 2} <= {*planned.sessions["worker"][failed]}
    cluster = simulate.cluster_of(tape.read(tmp_path / "run"), lease=1.0)
    failures = {f.workers[0]: f.down for f in cluster.failures.recorded}
    assert failures["worker-1"] >= 0
    assert failures["worker-2"] is None


@pytest.mark.slow
def test_tape_with_rejections_needs_the_limits_of_its_center(tmp_path):
    limits = Limits(messages=MessageLimits(steps=PERIOD))
    rule = agn_optax.rules.agn(optax.sgd(0.3), codec=BITS)
    journal = Journal(tmp_path / "run", keep="contributions")
    with LocalCenter(
        rule, problem.params(), durability=journal, limits=limits
    ) as center:
        loops = [Loop(center, index) for index in range(2)]
        for i in range(4):
            for loop in loops:
                loop.run(PERIOD - 1)
                batch = data(loop.index, loop.number)
                params, state = loop.step(*loop.loop, batch)
                loop.number += 1
                if (i + loop.index) % 2:
                    params, state = loop.step(
                        params, state, data(loop.index, loop.number)
                    )
                    loop.number += 1
                    loop.loop = loop.worker.exchange(params, state, steps=2)
                else:
                    loop.loop = loop.worker.exchange(params, state)
        last = jax.tree.map(np.array, center.save())
        assert loops[0].worker.rejected == 2
    with pytest.raises(
        errors.InvalidArgumentError, match=r"was rejected .*give limits"
    ):
        simulate.schedule_of(tape.read(tmp_path / "run"), rule)
    planned = check_again(
        tmp_path / "run", rule, last, tmp_path / "again", limits=limits
    )
    assert np.sum(planned.outcome == Outcome.REJECTED) == 4


def test_claimed_weights_of_a_tape_are_simulated(tmp_path):
    rule = RULES["average"]()
    journal = Journal(tmp_path / "run", keep="contributions")
    mode = Synchronous(quorum=1)
    with LocalCenter(rule, problem.params(), durability=journal, mode=mode) as center:
        loops = [Loop(center, index) for index in range(2)]
        for _ in range(2):
            for weight, loop in enumerate(loops):
                loop.run(PERIOD, weight=1.0 + weight)
        last = jax.tree.map(np.array, center.save())
    planned = check_again(tmp_path / "run", rule, last, tmp_path / "again")
    np.testing.assert_array_equal(planned.claimed_weight, [3.0, 6.0, 3.0, 6.0])


def read_whole_run(path):
    return simulate.schedule_of(tape.read(path), RULE)


def test_run_without_its_begin_has_no_schedule(tmp_path):
    saved = LocalCenter(RULE, problem.params()).save()._replace(version=7)
    LocalCenter.restore(RULE, saved, durability=Journal(tmp_path / "later")).close()
    with pytest.raises(errors.InvalidArgumentError, match="begins with version 7"):
        read_whole_run(tmp_path / "later")
    LocalCenter(RULE, problem.params(), durability=Journal(tmp_path / "none")).close()
    with pytest.raises(errors.InvalidArgumentError, match="has no messages"):
        read_whole_run(tmp_path / "none")
    with pytest.raises(errors.InvalidArgumentError, match="no message with local step"):
        simulate.cluster_of(tape.read(tmp_path / "none"))


def test_tape_of_another_rule_has_no_schedule(tmp_path):
    real_run(tmp_path, RULE, rounds=1)
    with pytest.raises(errors.RuleMismatchError):
        simulate.schedule_of(tape.read(tmp_path), RULES["easgd"]())


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ([{"steps": 0}], "does not say how many local steps"),
        ([{}, {"anchor_version": 0}], "lost that answer and got a later one"),
        ([{}, {"steps": 0}], "message 2 of worker 'worker-0' does not say"),
    ],
)
def test_messages_that_cannot_be_made_again_are_rejected(sent, words, tmp_path):
    contribution = jax.tree.map(jnp.ones_like, problem.params())
    with LocalCenter(
        RULE, problem.params(), durability=Journal(tmp_path, keep="hashes")
    ) as center:
        session = center.join("worker-0")
        for i, fields in enumerate(sent):
            fields = {"anchor_version": i, "steps": 3} | fields
            session.exchange(Submission(i + 1, contribution, **fields))
    with pytest.raises(errors.InvalidArgumentError, match=words):
        simulate.schedule_of(tape.read(tmp_path), RULE)


def test_lease_of_a_tape_with_ended_leases_must_be_given(tmp_path):
    planned = plan(period=PERIOD, exchanges=40)
    journal = Journal(tmp_path / "run", keep="contributions")
    found = execute(planned, params=problem.params(), durability=journal)
    with pytest.raises(errors.InvalidArgumentError, match="given up less than 10 s"):
        simulate.schedule_of(tape.read(tmp_path / "run"), RULE)
    limits = Limits(max_workers=None, lease=1.0)
    again = check_again(
        tmp_path / "run", RULE, found.center, tmp_path / "again", limits=limits
    )
    failed = again.sessions["event"] == SessionEvent.FAILED
    first, *others = sorted(again.sessions["time"][failed] / 1e9)
    assert 0.2 <= first <= 1.2  # it joined again at 1.2 s
    np.testing.assert_allclose(others, [1.5, 2.0], atol=1e-5)


def test_rejection_while_local_steps_went_on_cannot_be_made_again(tmp_path):
    contribution = jax.tree.map(jnp.ones_like, problem.params())
    limits = Limits(messages=MessageLimits(steps=5))
    journal = Journal(tmp_path, keep="hashes")
    with LocalCenter(
        RULE, problem.params(), durability=journal, limits=limits
    ) as center:
        session = center.join("worker-0")
        for i, (steps, late) in enumerate([(3, 0), (7, 2), (3, 0)]):
            version = center.version
            sent = Submission(i + 1, contribution, version, steps, late_steps=late)
            session.exchange(sent)
    with pytest.raises(errors.InvalidArgumentError, match="these were discarded"):
        simulate.schedule_of(tape.read(tmp_path), RULE, limits=limits)


def test_worker_that_went_on_from_a_saved_state_cannot_be_made_again(tmp_path):
    journal = Journal(tmp_path, keep="hashes")
    with LocalCenter(RULE, problem.params(), durability=journal) as center:
        loop, other = Loop(center, 0), Loop(center, 1)
        loop.run(1)
        saved = loop.worker.save(*loop.loop)
        other.run(PERIOD)
        loop.loop = loop.worker.restore(saved)
        loop.run(PERIOD - 1)
    with pytest.raises(errors.InvalidArgumentError, match="went on from a saved"):
        simulate.schedule_of(tape.read(tmp_path), RULE)


def test_workers_of_a_tape_have_the_given_numbers(tmp_path):
    real_run(tmp_path, RULE, rounds=2)
    found = tape.read(tmp_path)
    names = ["worker-2", "worker-0", "other", "worker-1"]
    planned = simulate.schedule_of(found, RULE, workers=names)
    seen = []
    plain = simulate.schedule_of(found, RULE, progress=seen.append)
    assert seen == [event.number for event in found.events()]
    given = {names.index(name): i for i, name in enumerate(plain.names)}
    assert [given[i] for i in planned.worker] == plain.worker.tolist()
    for wrong in (names[:2], [*names, "other"], "worker-0"):
        with pytest.raises(errors.InvalidArgumentError, match="workers must have"):
            simulate.schedule_of(found, RULE, workers=wrong)


def test_parameters_must_be_those_of_the_tape(tmp_path):
    real_run(tmp_path, RULE, rounds=1)
    planned = simulate.schedule_of(tape.read(tmp_path), RULE)
    with pytest.raises(errors.InvalidArgumentError, match="params must be those"):
        execute(planned, params=problem.params()["hidden"])


# Simulated runs, written as tapes.

FAILS = Failures(
    recorded=[
        Failure(1.0, ["worker-1"], 0.2),
        Failure(1.5, ["worker-0"], 2.0),
        Failure(2.0, ["worker-2"]),
    ]
)
SPEEDS = [LogNormal(0.1, 0.3), LogNormal(0.15, 0.3), LogNormal(0.2, 0.3), Fixed(0.2)]
CLUSTER = Cluster(
    workers=4,
    speed=SPEEDS,
    link=Link(latency=0.05),
    failures=FAILS,
    joins={"worker-3": 0.7},
    leaves={"worker-3": 3.0},
)
MODES = {
    "asynchronous": {},
    "bounded": {"mode": BoundedStaleness(versions=2)},
    "behind": {"mode": BoundedStaleness(rounds=1)},
    "rounds": {"mode": Synchronous(quorum=2, grace=0.1, late="weighted")},
    "dropping": {"mode": Synchronous(quorum=2, grace=0.1, late="drop")},
    "limits": {"limits": Limits(messages=MessageLimits(steps=3), lease=1.0)},
    "overlap": {"overlap": True},
}


def plan(cluster=CLUSTER, rule=RULE, exchanges=40, **settings):
    settings = {"limits": Limits(max_workers=None, lease=1.0), **settings}
    return simulate.schedule(
        cluster, rule=rule, params=problem.params(), exchanges=exchanges, **settings
    )


FAST = ("asynchronous", "rounds", "limits")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else SLOW) for name in MODES],
)
def test_simulated_tape_is_that_of_a_center(name, tmp_path):
    rule = agn_optax.rules.agn(optax.sgd(0.3), codec=BITS)
    period = (lambda k: 4 if k % 3 == 1 else 3) if name == "limits" else PERIOD
    planned = plan(rule=rule, period=period, **MODES[name])
    plain = execute(planned, params=problem.params(), exact=False)
    journal = Journal(tmp_path, keep="contributions", size=2000)
    found = execute(planned, params=problem.params(), exact=False, durability=journal)
    assert found.digest == plain.digest
    assert_identical(found.center, plain.center)
    recorded = tape.read(tmp_path)
    assert_identical(recorded.replay(rule, whole=True), found.center)
    audit = tape.audit(recorded, rule)
    assert audit.checked.snapshots > 1
    assert audit.seconds == pytest.approx(planned.duration, abs=1e-6)
    messages = [(e, m) for e in recorded.events() for m in e.messages]
    rows = found.rows
    for field, expected in {
        "worker": [planned.names[worker] for worker in planned.worker[rows]],
        "sequence": planned.sequence[rows],
        "steps": planned.steps[rows],
        "anchor_version": planned.anchor_version[rows],
        "staleness": planned.staleness[rows],
        "outcome": [Outcome(o).name.lower() for o in planned.outcome[rows]],
    }.items():
        assert [getattr(m, field) for _, m in messages] == [*expected], field
    times = [(m.arrived, e.time) for e, m in messages]
    expected = np.stack([planned.arrived[rows], planned.settled[rows]], axis=1) / 1e9
    np.testing.assert_allclose(times, expected, atol=1e-6)
    assert [e.registered for e, _ in messages] == planned.workers[rows].tolist()
    losses = [m.reported["loss"] for _, m in messages]
    np.testing.assert_allclose(losses, found.loss, rtol=1e-6)
    if planned.in_background.any():
        assert max(m.late_steps for _, m in messages) > 0
    if planned.combines:
        assert [m.factor for _, m in messages] == planned.weight[rows].tolist()


def test_simulated_tape_has_joins_leaves_and_ended_leases(tmp_path):
    planned = plan(period=PERIOD, exchanges=60)
    execute(
        planned, params=problem.params(), durability=Journal(tmp_path, keep="hashes")
    )
    found = [
        (event.kind, *event.workers, round(event.time, 3))
        for event in tape.read(tmp_path).events()
        if event.kind in ("join", "leave", "expired")
    ]
    end = round(planned.duration, 3)
    assert sorted(found, key=lambda each: each[1:]) == [
        ("join", "worker-0", 0.0),
        ("expired", "worker-0", 2.5),
        ("join", "worker-0", 3.5),
        ("leave", "worker-0", end),
        ("join", "worker-1", 0.0),
        ("join", "worker-1", 1.2),
        ("leave", "worker-1", end),
        ("join", "worker-2", 0.0),
        ("expired", "worker-2", 3.0),
        ("join", "worker-3", 0.7),
        ("leave", "worker-3", 3.0),
    ]


def test_simulated_and_real_center_of_the_same_order_differ_only_in_times(tmp_path):
    cluster = Cluster(workers=3, speed=SPEEDS[:3])
    planned = plan(cluster, period=PERIOD, exchanges=20)
    execute(
        planned,
        params=problem.params(),
        durability=Journal(tmp_path / "a", keep="contributions"),
    )
    journal = Journal(tmp_path / "b", keep="contributions")
    with LocalCenter(RULE, problem.params(), durability=journal) as center:
        loops = [Loop(center, index) for index in range(3)]
        for row in np.argsort(planned.order)[np.sum(planned.order < 0) :]:
            loops[planned.worker[row]].run(PERIOD)
    assert tape.diff(tape.read(tmp_path / "a"), tape.read(tmp_path / "b")) is None


def test_real_center_goes_on_from_a_simulated_tape(tmp_path):
    found = execute(
        plan(period=PERIOD), params=problem.params(), durability=Journal(tmp_path)
    )
    server = serve(RULE, address="127.0.0.1:0", durability=Journal(tmp_path))
    try:
        assert server.center.version == found.center.version
        assert_identical(server.center.save(), found.center)
        assert not server.center.workers
    finally:
        server.stop()


@pytest.mark.slow
def test_run_writes_a_tape_up_to_its_target(tmp_path):
    found = simulate.run(
        RULE,
        INNER,
        problem.loss,
        data,
        problem.params(),
        cluster=CLUSTER,
        period=PERIOD,
        exchanges=40,
        evaluate=lambda params: problem.loss(params, data(1000, 0)),
        every=5,
        target=100.0,
        durability=Journal(tmp_path, keep="contributions"),
    )
    recorded = tape.read(tmp_path)
    assert recorded.find().version == found.center.version == 5
    assert_identical(recorded.replay(RULE, whole=True), found.center)
    *_, last = recorded.events()
    assert last.time == pytest.approx(found.seconds[-1], abs=1e-6)


@pytest.mark.slow
def test_simulated_tape_of_overlapping_exchanges_is_simulated_again(tmp_path):
    planned = plan(period=PERIOD, overlap=True)
    journal = Journal(tmp_path / "run", keep="contributions")
    found = execute(planned, params=problem.params(), durability=journal)
    limits = Limits(max_workers=None, lease=1.0)
    check_again(tmp_path / "run", RULE, found.center, tmp_path / "again", limits=limits)


def test_rejections_for_a_norm_are_on_a_simulated_tape(tmp_path):
    limits = Limits(max_workers=None, lease=1.0, messages=MessageLimits(norm=1.5))
    found = simulate.run(
        RULE,
        INNER,
        problem.loss,
        data,
        problem.params(),
        cluster=CLUSTER,
        period=PERIOD,
        exchanges=40,
        exact=True,
        limits=limits,
        durability=Journal(tmp_path / "run", keep="contributions"),
    )
    recorded = tape.read(tmp_path / "run")
    outcomes = [m.outcome for e in recorded.events() for m in e.messages]
    schedule = found.schedule
    rows = schedule.outcome[found.rows]
    assert outcomes == [Outcome(o).name.lower() for o in rows]
    assert 0 < outcomes.count("rejected") < 40
    check_again(tmp_path / "run", RULE, found.center, tmp_path / "again", limits=limits)


def test_rounds_in_which_all_are_rejected_are_the_same_again(tmp_path):
    limits = Limits(
        max_workers=None, lease=1.0, messages=MessageLimits(steps=1, in_a_row=99)
    )
    planned = plan(period=PERIOD, limits=limits, mode=Synchronous(quorum=2, grace=0.1))
    journal = Journal(tmp_path / "run", keep="contributions")
    found = execute(planned, params=problem.params(), durability=journal)
    assert not found.center.version
    check_again(tmp_path / "run", RULE, found.center, tmp_path / "again", limits=limits)
    rounds = [len(e.messages) for e in tape.read(tmp_path / "run").events()]
    times = np.unique(planned.settled[found.rows], return_counts=True)[1]
    assert [count for count in rounds if count] == times.tolist()


def test_run_with_fragments_writes_no_tape(tmp_path):
    with pytest.raises(errors.InvalidArgumentError, match="without fragments"):
        simulate.run(
            RULE,
            INNER,
            problem.loss,
            data,
            problem.params(),
            cluster=CLUSTER,
            period=PERIOD,
            exchanges=40,
            fragments=agn_optax.Fragments(2),
            durability=Journal(tmp_path / "run"),
        )
    assert not (tmp_path / "run").exists()


def test_directory_of_a_simulated_tape_must_be_new(tmp_path):
    LocalCenter(RULE, problem.params(), durability=Journal(tmp_path / "a")).close()
    before = sorted((tmp_path / "a").iterdir())
    planned = plan(period=PERIOD, exchanges=5)
    with pytest.raises(errors.InvalidArgumentError, match="new or an empty directory"):
        execute(planned, params=problem.params(), durability=Journal(tmp_path / "a"))
    assert sorted((tmp_path / "a").iterdir()) == before
    with pytest.raises(errors.InvalidTypeError, match="must be Journal"):
        execute(planned, params=problem.params(), durability=str(tmp_path / "b"))


def test_directory_is_released_when_a_simulation_fails(tmp_path):
    def data(worker, step):
        if step > 3:
            raise FloatingPointError
        return jax.tree.map(np.asarray, {"x": np.ones((8, 3)), "y": np.ones((8, 1))})

    journal = Journal(tmp_path)
    with pytest.raises(FloatingPointError):
        execute(
            plan(period=PERIOD), params=problem.params(), data=data, durability=journal
        )
    with LocalCenter(RULE, problem.params(), durability=journal) as center:
        assert center.version > 0


# Clusters of recorded runs.


def test_cluster_of_a_simulated_tape_gives_its_times_again(tmp_path):
    cluster = Cluster(
        workers=4,
        speed=SPEEDS,
        failures=FAILS,
        joins={"worker-3": 0.7},
        leaves={"worker-3": 3.0},
    )
    planned = plan(cluster, period=PERIOD, exchanges=60)
    execute(
        planned, params=problem.params(), durability=Journal(tmp_path, keep="hashes")
    )
    found = simulate.cluster_of(tape.read(tmp_path), lease=1.0)
    assert found.names == cluster.names
    assert found.joins["worker-3"] == pytest.approx(0.7)
    assert found.leaves["worker-3"] == pytest.approx(3.0)
    again = plan(found, period=PERIOD, exchanges=60)
    rows, same = planned.applied, again.applied
    np.testing.assert_array_equal(again.worker[same], planned.worker[rows])
    np.testing.assert_array_equal(again.staleness[same], planned.staleness[rows])
    np.testing.assert_allclose(again.settled[same], planned.settled[rows], atol=1e4)
    np.testing.assert_allclose(again.step_time[same], planned.step_time[rows], atol=1e3)


def test_cluster_of_real_workers_has_their_steps_and_failures(tmp_path):
    real_run(tmp_path, RULE, kills=True)
    cluster = simulate.cluster_of(tape.read(tmp_path))
    assert [len(speed.seconds) for speed in cluster.speeds] == [7, 13, 7]
    (failure,) = cluster.failures.recorded
    assert failure.workers == ("worker-1",)
    assert failure.down >= 0
    assert cluster.leaves.keys() == {"worker-0", "worker-1", "worker-2"}
    assert not cluster.failures.announced


def test_speed_that_workers_report_is_taken(tmp_path):
    contribution = jax.tree.map(jnp.ones_like, problem.params())
    journal = Journal(tmp_path, keep="hashes")
    with LocalCenter(RULE, problem.params(), durability=journal) as center:
        session = center.join("worker-0")
        for i in range(3):
            reported = {"step_seconds": 0.25 + i} if i != 1 else {}
            sent = Submission(i + 1, contribution, i, steps=3, reported=reported)
            session.exchange(sent)
    found = tape.read(tmp_path)
    first, second, third, _ = (
        simulate.cluster_of(found, reported="step_seconds").speeds[0].seconds
    )
    assert (first, third) == (0.25, 2.25)
    assert 0 < second < LIMIT
    assert simulate.cluster_of(found).speeds[0].seconds[1] == second


def test_workers_that_leave_and_join_again_have_announced_failures(tmp_path):
    journal = Journal(tmp_path, keep="hashes")
    with LocalCenter(RULE, problem.params(), durability=journal) as center:
        for first in (0, PERIOD):
            Loop(center, 0, first=first).run(PERIOD).worker.leave()
    found = simulate.cluster_of(tape.read(tmp_path))
    assert found.failures.announced
    assert len(found.failures.recorded) == len(found.leaves) == 1
