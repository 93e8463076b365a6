"""Workers join and leave at any time: what holds in every mode."""

import functools
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.waiting import in_background

import agn_optax
from agn_optax import errors
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Limits,
    LocalCenter,
    Submission,
    Synchronous,
)

LIMIT = 30  # s, generous: no test should come near it
ZEROS = np.zeros(2, np.float32)


def one_local_step(worker, params, state):
    """Make a local step with gradient -1, which adds 1 with sgd(1)."""
    updates, state = worker.tx.update(-jnp.ones_like(params), state, params)
    return optax.apply_updates(params, updates), state


def train(center, name, exchanges, *, period=1, leave="leaves", begin=None, also=None):
    """Run a worker; return it and its local steps that the center applied.

    It makes the given number of exchanges, and continues until ``also`` returns True.
    """
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=period, name=name)
    params, state = worker.start(jnp.zeros(2))
    if begin is not None:
        begin.wait(LIMIT)
    while worker.exchanges < exchanges or not (also is None or also(worker)):
        params, state = one_local_step(worker, params, state)
        params, state = worker.exchange(params, state)
    if leave == "vanishes":  # its connection breaks for good
        sessions.of_worker(worker).disconnect()
    else:
        worker.leave()
    return worker, (worker.exchanges - worker.dropped) * period


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "mode",
    [
        Asynchronous(),
        BoundedStaleness(rounds=1),
        BoundedStaleness(versions=8, rounds=2),
        Synchronous(),
        Synchronous(quorum=2, grace=0.01),
        Synchronous(quorum=3, grace=0.01, late="weighted"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("leave", ["leaves", "vanishes"])
def test_scaling_from_two_to_four_to_two_workers_loses_no_step(mode, leave):
    center = LocalCenter(shared.average(), ZEROS, mode=mode, limits=Limits(lease=0.1))
    two, are_there = threading.Barrier(2), threading.Event()
    others = []

    def stays(worker):
        if worker.exchanges >= 20:
            are_there.set()
        return all(other.done() for other in others)

    def comes(name):
        assert are_there.wait(LIMIT)
        return train(center, name, 7, leave=leave)

    others += [in_background(functools.partial(comes, name), name) for name in "cd"]
    stay = [
        in_background(
            functools.partial(train, center, name, 20, begin=two, also=stays), name
        )
        for name in "ab"
    ]
    ended = [future.result(LIMIT) for future in (*stay, *others)]
    made = [worker.exchanges for worker, _ in ended]
    assert min(made[:2]) >= 20
    assert made[2:] == [7, 7]
    if not isinstance(mode, Synchronous):  # each step is applied exactly once
        applied = sum(steps for _, steps in ended)
        assert center.version == applied
        np.testing.assert_array_equal(center.pull().params, applied)
    elif mode.late == "next":  # a mean of ones is one for any number of workers
        assert max(made) <= center.version < sum(made)
        np.testing.assert_array_equal(center.pull().params, center.version)
    assert center.workers <= set("cd" if leave == "vanishes" else "")


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": BoundedStaleness(versions=0)},
        {"mode": Synchronous(late="drop")},
    ],
)
def test_new_worker_starts_from_the_current_center(settings):
    center = LocalCenter(shared.downpour(), ZEROS, **settings)
    train(center, "a", 50)
    worker, applied = train(center, "b", 3)
    assert (worker.staleness, worker.dropped, worker.rejected, applied) == (0, 0, 0, 3)
    np.testing.assert_array_equal(center.pull().params, 53)


def test_slow_worker_that_left_blocks_no_other():
    center = LocalCenter(shared.downpour(), ZEROS, mode=BoundedStaleness(rounds=2))
    slow = center.join("slow")
    fast = in_background(lambda: train(center, "fast", 50), "fast")
    with pytest.raises(TimeoutError):
        fast.result(0.2)
    slow.leave()
    assert fast.result(LIMIT)[1] == 50


def test_workers_may_have_different_periods():
    """Rounds are counted independent of their numbers of steps, like in DyLU."""
    center = LocalCenter(shared.downpour(), ZEROS, mode=BoundedStaleness(rounds=0))
    both = threading.Barrier(2)
    run = functools.partial(train, center, exchanges=10, begin=both)
    fast = in_background(lambda: run(name="fast", period=6), "fast")
    slow = in_background(lambda: run(name="slow", period=2), "slow")
    assert [each.result(LIMIT)[1] for each in (fast, slow)] == [60, 20]
    np.testing.assert_array_equal(center.pull().params, 80)


def test_max_workers_limits_the_present_workers():
    center = LocalCenter(
        shared.downpour(), ZEROS, limits=Limits(max_workers=2, lease=0.1)
    )
    sessions = [center.join(name) for name in "ab"]
    with pytest.raises(
        errors.CenterFullError, match="takes at most 2 workers, and 2 are"
    ):
        train(center, "c", 1)
    sessions[0].leave()
    train(center, "c", 1)  # it leaves at the end
    sessions[1].disconnect()
    again = center.join("b")  # its name is free until its lease expires
    train(center, "d", 1)
    again.leave()
    assert center.version == 2


def test_barrier_blocks_only_the_first_workers():
    center = LocalCenter(shared.downpour(), ZEROS, barrier=2)
    begin = threading.Barrier(2)
    first = [
        in_background(functools.partial(train, center, name, 3, begin=begin), name)
        for name in "ab"
    ]
    assert sum(each.result(LIMIT)[1] for each in first) == 6
    assert not center.workers
    assert train(center, "c", 3)[1] == 3  # later, and alone


def in_turns(center, workers, rounds):
    """Exchange in turns; return how many messages of each worker were applied."""
    sessions = [center.join(f"worker-{i}") for i in range(workers)]
    anchors, applied = [0] * workers, [0] * workers
    for sequence in range(1, rounds + 1):
        for i, session in enumerate(sessions):
            answer = session.exchange(
                Submission(sequence, -jnp.ones(2), anchor_version=anchors[i])
            )
            anchors[i] = answer.version
            applied[i] += answer.applied and not answer.rejected
    for session in sessions:
        session.leave()
    return applied


def test_version_bound_must_grow_with_the_number_of_workers():
    """With a bound of 1, two of four workers are always dropped."""
    mode = BoundedStaleness(versions=1)
    assert in_turns(LocalCenter(shared.downpour(), ZEROS, mode=mode), 2, 20) == [20, 20]
    center = LocalCenter(shared.downpour(), ZEROS, mode=mode)
    assert in_turns(center, 4, 20) == [20, 20, 0, 0]
    mode = BoundedStaleness(versions=3)
    assert in_turns(LocalCenter(shared.downpour(), ZEROS, mode=mode), 4, 20) == [20] * 4
