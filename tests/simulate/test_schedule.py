"""Schedules: times by hand, the modes of real centers, and the same bits again."""

import dataclasses
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared

import agn_optax
from agn_optax import errors, rules, simulate
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Limits,
    MessageLimits,
    Synchronous,
)
from agn_optax.simulate import (
    CenterHost,
    Cluster,
    Drifting,
    Failure,
    Failures,
    Fixed,
    Link,
    LogNormal,
    Outcome,
    Recorded,
    SessionEvent,
)

MEDIAN = dataclasses.replace(rules.diloco(), combine=agn_optax.robust.median())
VARIED = Cluster(
    workers=7,
    speed=LogNormal(0.1, 0.5),
    link=Link(latency=0.01, bandwidth=1e6),
    center=CenterHost(seconds=0.002, rate=1e7, bandwidth=3e6),
    failures=Failures(every=20.0, down=2.0, together=2),
    joins={"worker-6": 3.0},
    leaves={"worker-5": 9.0},
)
PARAMS = jnp.zeros(1000)  # 4 kB
SLACK = agn_optax.Fragments(1, delay=5)


def seconds(times):
    return [pytest.approx(t / 1e9) for t in times]


def of(found, worker):
    return np.flatnonzero(found.worker == worker)


def test_times_of_an_exchange_add_up():
    """Two messages: each half a round trip, 4 kB at 1 MB/s, and the host's time."""
    cluster = Cluster(
        workers=1,
        speed=Fixed(0.1),
        link=Link(latency=0.02, bandwidth=1e6),
        center=CenterHost(seconds=0.003, rate=1e6),
    )
    found = simulate.schedule(
        cluster, period=5, rule=shared.downpour(), params=PARAMS, exchanges=2
    )
    start = 0.01 + 0.004
    assert seconds(found.began[:1]) == [start]
    assert seconds(found.sent[:1]) == [start + 0.5]
    assert seconds(found.arrived[:1]) == [start + 0.5 + 0.014]
    assert seconds(found.settled[:1]) == [start + 0.5 + 0.014 + 0.011]
    received = start + 0.5 + 0.014 + 0.011 + 0.014
    assert seconds(found.received[:1]) == seconds(found.adopted[:1]) == [received]
    assert seconds(found.began[1:]) == [received]
    assert found.version.tolist() == [1, 2]
    assert found.anchor_version.tolist() == [0, 1]
    assert found.steps.tolist() == [5, 5]
    assert (found.bytes_sent, found.bytes_received) == (8000, 4000)


def test_speeds_decide_who_exchanges():
    cluster = Cluster(workers=["fast", "slow"], speed=[Fixed(0.1), Fixed(0.3)])
    found = simulate.schedule(cluster, period=10, seconds=9.05)
    assert found.names == ("fast", "slow")
    assert np.bincount(found.worker).tolist() == [9, 3]
    # At 3 s, both arrive at the same time; the first worker comes first.
    assert found.staleness[of(found, 1)].tolist() == [3, 3, 3]
    assert found.staleness[of(found, 0)].tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0]
    assert found.utilization.tolist() == [1.0, 1.0]
    assert found.goodput == pytest.approx(120 / 9.05)


def test_recorded_and_drifting_times():
    cluster = Cluster(workers=2, speed=[Recorded([1.0, 3.0]), Drifting(1.0, 0.3, 0.9)])
    found = simulate.schedule(cluster, period=2, exchanges=400)
    assert found.step_time[of(found, 0)][:3].tolist() == [10**9, 3 * 10**9, 10**9]
    logs = np.log(found.step_time[of(found, 1)] / 1e9)
    assert 0.1 < logs.std() < 0.6
    assert np.corrcoef(logs[1:], logs[:-1])[0, 1] > 0.6


def test_overlap_hides_the_link():
    cluster = Cluster(workers=1, speed=Fixed(0.1), link=Link(latency=0.25))
    found = simulate.schedule(cluster, period=10, seconds=10.0, overlap=True)
    # The first exchange waits; the others are adopted after three of the next steps.
    assert found.steps_since[:4].tolist() == [0, 3, 3, 3]
    assert np.diff(found.sent)[1:] == pytest.approx(1e9)
    waiting = simulate.schedule(cluster, period=10, seconds=10.0)
    assert np.diff(waiting.sent) == pytest.approx(1.25e9)
    assert waiting.utilization[0] < 0.85 < 0.95 < found.utilization[0]


def test_worker_with_overlap_waits_after_its_patience():
    cluster = Cluster(workers=1, speed=Fixed(0.1), link=Link(latency=0.95))
    found = simulate.schedule(cluster, period=5, seconds=9.0, overlap=True, patience=3)
    adopted = found.adopted >= 0
    assert found.steps_since[adopted][1:].tolist() == [3] * (adopted.sum() - 1)


def test_link_of_the_center_is_shared():
    cluster = Cluster(workers=4, speed=Fixed(0.1), center=CenterHost(bandwidth=4000.0))
    found = simulate.schedule(
        cluster, period=10, rule=shared.downpour(), params=PARAMS, exchanges=4
    )
    # 4 starts share the link: 4 s; after 1 s of steps, four messages share it again.
    assert seconds(found.arrived) == [9.0] * 4
    assert seconds(found.settled) == [9.0] * 4


def test_codec_sends_its_true_bytes():
    rule = rules.diloco(codec=rules.CODECS["int8"])
    cluster = Cluster(workers=1, speed=Fixed(0.1))
    found = simulate.schedule(cluster, period=10, rule=rule, params=PARAMS, exchanges=1)
    (message,) = found.message_bytes
    assert 1000 <= message < 1100
    assert found.answer_bytes == (4000,)


def test_rounds_wait_for_the_slowest_worker():
    cluster = Cluster(workers=3, speed=[Fixed(0.1), Fixed(0.2), Fixed(0.3)])
    found = simulate.schedule(cluster, period=10, mode=Synchronous(), seconds=9.05)
    assert sorted(set(seconds_of(found.settled))) == [3.0, 6.0, 9.0]
    assert found.version.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert found.waiting[0] == pytest.approx(6.0)
    assert set(found.staleness) == {0}


def seconds_of(times):
    return (times[times >= 0] / 1e9).tolist()


def test_grace_in_the_slack_gathers_messages_and_delays_no_worker():
    cluster = Cluster(workers=3, speed=[Fixed(1.0), Fixed(1.1), Fixed(1.1)])

    def found(mode):
        return simulate.schedule(
            cluster,
            period=20,
            patience=20,
            fragments=SLACK,
            rule=shared.decoupled_diloco(),
            params=PARAMS,
            mode=mode,
            seconds=2000.0,
        )

    at_once = found(Synchronous(quorum=1))
    waits = found(agn_optax.center.decoupled_diloco(SLACK, quorum=1).mode)
    assert waits.utilization[0] == at_once.utilization[0] == 1.0
    assert waits.version.max() < 0.8 * at_once.version.max()  # more messages in each
    assert waits.goodput > 0.95 * at_once.goodput


def test_quorum_and_grace_leave_the_slowest_worker_behind():
    cluster = Cluster(workers=3, speed=[Fixed(0.1), Fixed(0.1), Fixed(0.35)])
    found = simulate.schedule(
        cluster, period=10, mode=Synchronous(quorum=2, grace=0.5), seconds=5.1
    )
    # The grace period begins with the first message that is on time, at 1 s.
    # The third round is complete with the late message.
    assert sorted(set(seconds_of(found.settled))) == [1.5, 3.0, 4.0]
    late = of(found, 2)
    assert found.version[late].tolist() == [3]
    assert found.staleness[late].tolist() == [2]


def test_late_messages_are_weighted_or_dropped():
    cluster = Cluster(workers=3, speed=[Fixed(0.1), Fixed(0.1), Fixed(0.35)])

    def last(late):
        mode = Synchronous(quorum=2, grace=0.5, late=late)
        found = simulate.schedule(cluster, period=10, mode=mode, seconds=5.1)
        (row,) = of(found, 2)
        return found.outcome[row], found.weight[row]

    assert last("weighted") == (Outcome.APPLIED, 1 / 3)
    assert last("drop") == (Outcome.DROPPED, 1.0)


def test_bounded_staleness_holds_back_the_fast_worker():
    cluster = Cluster(workers=2, speed=[Fixed(0.1), Fixed(0.5)])
    mode = BoundedStaleness(rounds=1)
    found = simulate.schedule(cluster, period=10, mode=mode, seconds=50.1)
    counts = np.bincount(found.worker[found.outcome == Outcome.APPLIED])
    assert counts[0] - counts[1] <= 2
    assert found.waiting[0] > 30.0
    mode = BoundedStaleness(versions=2)
    found = simulate.schedule(cluster, period=10, mode=mode, seconds=50.1)
    assert set(found.outcome[of(found, 1)]) == {Outcome.DROPPED}
    assert found.staleness[found.outcome == Outcome.APPLIED].max() <= 2


def test_dynamic_period_makes_rounds_equally_long():
    cluster = Cluster(workers=2, speed=[Fixed(0.1), Fixed(0.4)])
    period = agn_optax.dynamic_period(20, first=4)
    found = simulate.schedule(cluster, period=period, seconds=60.0)
    assert found.steps[of(found, 0)][3:].tolist() == [20] * (len(of(found, 0)) - 3)
    assert set(found.steps[of(found, 1)][3:]) == {5}


def test_periods_may_follow_a_schedule():
    cluster = Cluster(workers=1, speed=Fixed(0.1))
    found = simulate.schedule(cluster, period=lambda n: 1 + n, exchanges=4)
    assert found.steps.tolist() == [1, 2, 3, 4]


def test_fragments_take_turns():
    cluster = Cluster(workers=2, speed=Fixed(0.1), link=Link(latency=0.15))
    fragments = agn_optax.Fragments(2, delay=2)
    params = {"a": jnp.zeros(10), "b": jnp.zeros(1000)}
    found = simulate.schedule(
        cluster,
        period=10,
        fragments=fragments,
        rule=shared.downpour(),
        params=params,
        seconds=4.2,
    )
    assert sorted(found.message_bytes) == [40, 4000]
    first = of(found, 0)
    assert found.fragment[first].tolist() == [0, 1] * 4
    assert np.diff(found.sent[first]) == pytest.approx(0.5e9)
    answered = first[found.adopted[first] >= 0]
    assert set(found.steps_since[answered]) == {2}
    steps = found.steps[found.outcome == Outcome.APPLIED].sum()
    assert found.goodput * found.duration == pytest.approx(steps / 2)


def test_rule_that_adopts_before_its_message_gets_the_version_before():
    cluster = Cluster(workers=1, speed=Fixed(0.1))
    rule = rules.easgd(0.1)
    found = simulate.schedule(cluster, period=1, rule=rule, exchanges=3)
    assert found.answer_version.tolist() == [0, 1, 2]
    assert found.staleness.tolist() == [0, 1, 1]


def test_failed_worker_holds_a_round_until_its_lease_ends():
    failure = Failure(at=0.55, workers=["worker-1"], down=None)
    cluster = Cluster(
        workers=2, speed=Fixed(0.1), failures=Failures(recorded=[failure])
    )
    found = simulate.schedule(
        cluster,
        period=10,
        mode=Synchronous(),
        limits=Limits(max_workers=None, lease=3.0),
        seconds=6.0,
    )
    assert seconds_of(found.settled)[:2] == pytest.approx([3.55, 4.55])
    assert found.workers.tolist()[:2] == [1, 1]
    assert found.sessions["event"].tolist() == [
        *[SessionEvent.JOINED] * 2,
        *[SessionEvent.STARTED] * 2,
        SessionEvent.FAILED,
    ]


def test_announced_preemption_does_not_hold_a_round():
    failure = Failure(at=0.55, workers=["worker-1"], down=2.0)
    failures = Failures(recorded=[failure], announced=True)
    cluster = Cluster(workers=2, speed=Fixed(0.1), failures=failures)
    found = simulate.schedule(cluster, period=10, mode=Synchronous(), seconds=5.7)
    assert seconds_of(found.settled)[0] == pytest.approx(1.0)
    assert set(found.session[of(found, 1)]) == {2}


def test_message_in_transit_is_lost_with_its_worker():
    failure = Failure(at=1.1, workers=["worker-0"], down=1.0)
    cluster = Cluster(
        workers=1,
        speed=Fixed(0.1),
        link=Link(latency=1.0),
        failures=Failures(recorded=[failure]),
        joins={"worker-0": 0.0},
    )
    found = simulate.schedule(cluster, period=3, seconds=4.5)
    assert found.outcome.tolist()[:2] == [Outcome.LOST, Outcome.APPLIED]
    assert found.session.tolist()[:2] == [1, 2]


def test_workers_of_a_group_fail_together():
    failures = Failures(every=5.0, down=1.0, together=3)
    cluster = Cluster(workers=6, speed=Fixed(0.1), failures=failures)
    found = simulate.schedule(cluster, period=10, seconds=100.0)
    failed = found.sessions["event"] == SessionEvent.FAILED
    times = found.sessions["time"][failed]
    groups = found.sessions["worker"][failed] // 3
    assert len(times) > 30
    for time in set(times):
        (group,) = set(groups[times == time])
        here = found.sessions["worker"][failed][times == time]
        assert here.tolist() == [3 * group, 3 * group + 1, 3 * group + 2]


def test_barrier_holds_all_workers_back():
    cluster = Cluster(workers=2, speed=Fixed(0.1), joins={"worker-1": 5.0})
    found = simulate.schedule(cluster, period=10, barrier=2, exchanges=2)
    assert seconds_of(found.began) == [5.0, 5.0]


def test_claims_beyond_the_limits_are_rejected():
    cluster = Cluster(workers=1, speed=Fixed(0.1))
    limits = Limits(messages=MessageLimits(steps=5, in_a_row=3))
    found = simulate.schedule(cluster, period=10, limits=limits, seconds=20.0)
    assert found.outcome.tolist() == [Outcome.REJECTED] * 3
    assert found.sessions["event"].tolist()[-1] == SessionEvent.LEFT


@pytest.mark.parametrize(
    "mode",
    [
        Asynchronous(),
        BoundedStaleness(versions=6, rounds=2),
        Synchronous(),
        Synchronous(quorum=3, grace=0.2, late="weighted"),
        Synchronous(quorum=3, late="drop"),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_invariants_of_any_run(mode, overlap):
    found = simulate.schedule(
        VARIED,
        period=5,
        mode=mode,
        rule=shared.downpour(),
        params=PARAMS,
        overlap=overlap,
        seconds=60.0,
        seed=3,
    )
    applied = found.applied
    assert len(applied) > 100
    versions = found.version[applied]
    assert set(np.diff(versions)) <= {0, 1}
    assert versions[0] == 1
    assert (found.staleness[applied] >= 0).all()
    np.testing.assert_array_equal(
        found.version[applied] - 1 - found.staleness[applied],
        found.anchor_version[applied],
    )
    for earlier, later in [
        ("began", "sent"),
        ("sent", "arrived"),
        ("arrived", "settled"),
        ("settled", "received"),
        ("received", "adopted"),
    ]:
        both = getattr(found, later) >= 0
        assert (getattr(found, earlier)[both] <= getattr(found, later)[both]).all()
    assert (found.busy <= found.present).all()
    for worker in range(7):
        own = of(found, worker)
        for session in set(found.session[own]):
            sequence = found.sequence[own][found.session[own] == session]
            assert sequence.tolist() == [*range(1, len(sequence) + 1)]


PROGRAM = """
import sys
sys.path[:0] = {path}
from simulate import test_schedule as module
print(module.digest())
"""


def digest(cluster=VARIED, seed=5):
    return simulate.schedule(
        cluster,
        period=agn_optax.dynamic_period(8),
        rule=shared.downpour(),
        params=PARAMS,
        seconds=30.0,
        seed=seed,
    ).digest


def test_same_seed_gives_the_same_digest_in_another_process():
    tests = pathlib.Path(__file__).parents[1]
    program = PROGRAM.format(path=[str(tests), str(tests.parent)])
    ended = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == digest()
    assert digest() != digest(seed=6)


def test_one_more_worker_changes_no_random_number_of_another():
    def drawn(workers):
        cluster = dataclasses.replace(VARIED, workers=workers, leaves={})
        cluster = dataclasses.replace(cluster, failures=Failures(every=9.0, down=1.0))
        found = simulate.schedule(cluster, period=5, seconds=30.0, seed=1)
        steps = [found.step_time[of(found, w)][:15].tolist() for w in range(7)]
        failed = found.sessions["event"] == SessionEvent.FAILED
        first = [
            found.sessions["time"][failed & (found.sessions["worker"] == w)].tolist()
            for w in range(7)
        ]
        return steps, first

    assert drawn(7) == drawn(8)


def test_schedule_is_that_of_a_real_center():
    """The exchanges of the schedule, made by real workers in its order."""
    cluster = Cluster(workers=3, speed=[Fixed(0.1), Fixed(0.17), Fixed(0.41)])
    rule = rules.dynsgd()
    found = simulate.schedule(
        cluster, period=3, rule=rule, mode=BoundedStaleness(versions=3), exchanges=60
    )
    center = agn_optax.LocalCenter(
        rule, jnp.zeros(2), mode=BoundedStaleness(versions=3)
    )
    workers = [
        agn_optax.Worker(center, optax.sgd(0.1), period=3, name=name)
        for name in found.names
    ]
    loops = [worker.start() for worker in workers]
    for row in np.argsort(np.where(found.order < 0, len(found), found.order)):
        if found.order[row] < 0:
            continue
        w = found.worker[row]
        worker, (params, state) = workers[w], loops[w]
        assert worker.version == found.anchor_version[row]
        updates, state = worker.tx.update(jnp.ones(2), state, params)
        params = optax.apply_updates(params, updates)
        loops[w] = worker.exchange(params, state, steps=int(found.steps[row]))
        assert worker.staleness == found.staleness[row]
        assert worker.version == found.answer_version[row]
    assert center.version == found.version.max()
    assert sum(worker.dropped for worker in workers) == np.sum(
        found.outcome == Outcome.DROPPED
    )


def test_progress_is_reported():
    reported = []
    cluster = Cluster(workers=50, speed=Fixed(0.1))
    simulate.schedule(cluster, period=1, exchanges=15_000, progress=reported.append)
    assert reported == sorted(reported)
    assert 0 < reported[0] < reported[-1] <= 1


@pytest.mark.parametrize("mode", [Asynchronous(), Synchronous()])
def test_steps_end_a_simulation(mode):
    cluster = Cluster(workers=3, speed=[Fixed(0.1), Fixed(0.2), Fixed(0.3)])
    found = simulate.schedule(cluster, period=5, mode=mode, steps=31)
    settled = found.steps[found.settled >= 0].sum()
    assert settled == (45 if mode.combines else 35)
    assert found.duration == found.settled.max() / 1e9
    early = simulate.schedule(cluster, period=5, mode=mode, steps=31, seconds=1.0)
    assert early.duration == 1


def test_steps_of_fragments_are_counted_once():
    cluster = Cluster(workers=2, speed=Fixed(0.1))
    fragments, params = agn_optax.Fragments(2), {"a": PARAMS, "b": PARAMS}
    found = simulate.schedule(
        cluster,
        period=4,
        rule=shared.downpour(),
        params=params,
        fragments=fragments,
        steps=40,
    )
    assert 80 <= found.steps[found.settled >= 0].sum() < 80 + 8


# Simulations that are not possible.


def test_simulation_that_cannot_end_is_an_error():
    cluster = Cluster(workers=2, speed=Fixed(0.1), leaves={"worker-0": 2.0})
    failing = Failures(recorded=[Failure(at=3.0, workers=["worker-1"])])
    gone = dataclasses.replace(cluster, failures=failing)
    with pytest.raises(errors.SimulationError, match=r"cannot end: .* 2 of 2 workers"):
        simulate.schedule(gone, period=5, exchanges=1000)
    with pytest.raises(errors.SimulationError, match=r"\d+ local steps of 1000,"):
        simulate.schedule(gone, period=5, steps=1000)
    often = Failures(every=0.01, down=0.0)
    restless = dataclasses.replace(cluster, leaves={}, failures=often)
    with pytest.raises(errors.SimulationError, match="fail before they complete"):
        simulate.schedule(restless, period=1000, exchanges=1)
    assert len(simulate.schedule(gone, period=5, seconds=1e6)) < 20


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "give exchanges=, steps= or seconds="),
        ({"exchanges": 0}, "exchanges must be"),
        ({"steps": 0}, "steps must be"),
        ({"seconds": -1.0}, "seconds must be"),
        ({"seconds": 1e300}, "seconds must be less than"),
        ({"exchanges": 1, "limits": 5}, "limits must be Limits"),
        ({"exchanges": 10**15}, "exchanges of 2 workers need .* GB"),
        ({"exchanges": 1, "barrier": 3}, "barrier must be at most"),
        ({"exchanges": 1, "limits": Limits(max_workers=1)}, "takes at most 1 workers"),
        ({"exchanges": 1, "period": 0}, "period must be"),
        ({"exchanges": 1, "params": PARAMS}, "params needs a rule"),
        ({"exchanges": 1, "mode": "synchronous"}, "mode must be"),
        ({"exchanges": 1, "seed": -1}, "seed must be"),
        ({"exchanges": 1, "rule": MEDIAN}, "a robust combine and a center that is not"),
        ({"exchanges": 1, "fragments": 2}, "fragments must be an agn_optax.Fragments"),
        (
            {"exchanges": 1, "fragments": agn_optax.Fragments(2, delay=5)},
            "must be complete before its next one begins",
        ),
        (
            {
                "exchanges": 1,
                "fragments": agn_optax.Fragments(2, delay=1),
                "overlap": True,
            },
            "a delay and overlap=True do not go together",
        ),
        (
            {
                "exchanges": 1,
                "fragments": agn_optax.Fragments(2),
                "period": agn_optax.dynamic_period(8),
            },
            "dynamic_period and fragments do not go together",
        ),
    ],
)
def test_bad_arguments_are_rejected(arguments, text):
    cluster = Cluster(workers=2, speed=Fixed(0.1))
    with pytest.raises(errors.InvalidArgumentError, match=text):
        simulate.schedule(cluster, **{"period": 5, **arguments})


@pytest.mark.parametrize(
    "speed",
    [
        Fixed(1e300),
        Recorded(np.array([1e300])),
        LogNormal(0.1, 1e6),
        Drifting(1e9, 1e6),
    ],
    ids=lambda speed: type(speed).__name__,
)
def test_steps_that_take_for_ever_are_not_made(speed):
    rule = rules.downpour()
    cluster = Cluster(workers=30, speed=speed, link=Link(bandwidth=1.0))
    found = simulate.schedule(cluster, period=1, rule=rule, params=PARAMS, seconds=9.0)
    assert found.duration == 9.0
    with pytest.raises(errors.SimulationError, match="cannot end: after 4"):
        simulate.schedule(Cluster(workers=1, speed=Fixed(1e300)), period=1, exchanges=1)


@pytest.mark.parametrize("times", [[10**8], [10**8, 0], [1e8]])
def test_speed_of_ones_own_must_yield_positive_ints_without_an_end(times):
    class Own:
        def draws(self, seed, worker):
            yield from times

    with pytest.raises(errors.InvalidArgumentError, match="must yield a positive int"):
        simulate.schedule(Cluster(workers=1, speed=Own()), period=1, exchanges=9)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Fixed(0.0), "seconds must be a positive number"),
        (lambda: Recorded([]), "seconds must be a sequence with at least one"),
        (lambda: Recorded(0.1), "seconds must be a sequence with at least one"),
        (lambda: LogNormal(1.0, -0.1), "sigma must be"),
        (lambda: Drifting(1.0, 0.1, 1.5), "memory must be"),
        (lambda: Link(bandwidth=0.0), "bandwidth must be"),
        (lambda: CenterHost(rate=0.0), "rate must be"),
        (lambda: Failures(every=0.0), "every must be"),
        (lambda: Failure(at=1.0, workers=[]), "workers must be a sequence of names"),
        (lambda: Failures(recorded=[(1.0, ["a"])]), "recorded must be a Failure"),
        (lambda: Failures(recorded=Failure(1.0, ["a"])), "must be a sequence"),
        (lambda: Cluster(workers=0, speed=Fixed(1.0)), "workers must be"),
        (lambda: Cluster(workers=["a", 1], speed=Fixed(1.0)), "non-empty str, got 1"),
        (lambda: Cluster(workers=1, speed=Fixed), "got type Fixed; call it first"),
        (
            lambda: Cluster(workers=1, speed=Fixed(1.0), joins=[1.0]),
            "by name, got list",
        ),
        (
            lambda: Cluster(
                workers=["a"], speed=Fixed(1.0), joins={"a": 2.0}, leaves={"a": 1.0}
            ),
            "leaves of 'a' must not be before it joins, at 2 s",
        ),
        (
            lambda: Cluster(workers=10**9, speed=Fixed(1.0)),
            r"workers need 8.19e\+03 GB",
        ),
        (lambda: Cluster(workers=["a", "a"], speed=Fixed(1.0)), "unique names"),
        (lambda: Cluster(workers=3, speed=[Fixed(1.0)] * 2), "speed must be one for"),
        (lambda: Cluster(workers=3, speed=0.1), "speed must be a speed such as"),
        (lambda: Cluster(workers=1, speed=Fixed(1.0), link=1e9), "link must be"),
        (
            lambda: Cluster(workers=1, speed=Fixed(1.0), joins={"anna": 1.0}),
            "joins must name workers, got 'anna'",
        ),
    ],
)
def test_bad_clusters_are_rejected(make, text):
    with pytest.raises(errors.InvalidArgumentError, match=text):
        make()
