"""Workers are added and removed at any time: what stays as it was, in every mode."""

import functools
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared

import agn_optax
from agn_optax import errors
from agn_optax._internal import in_background
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Limits,
    LocalCenter,
    Refuse,
    Synchronous,
)

LIMIT = 30  # seconds that nothing here takes
ZEROS = np.zeros(2, np.float32)


def one_local_step(worker, params, state):
    """A local step against a gradient of -1: it adds 1, with sgd(1)."""
    updates, state = worker.tx.update(-jnp.ones_like(params), state, params)
    return optax.apply_updates(params, updates), state


def train(center, name, exchanges, *, period=1, leave="leaves", begin=None, also=None):
    """A worker's whole life; it, and the local steps that are in the center by then.

    It makes so many exchanges, and goes on until ``also`` says that this is enough.
    """
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=period, name=name)
    params, state = worker.start(jnp.zeros(2))
    if begin is not None:
        begin.wait(LIMIT)
    while worker.exchanges < exchanges or not (also is None or also(worker)):
        params, state = one_local_step(worker, params, state)
        params, state = worker.exchange(params, state)
    if leave == "vanishes":  # its connection breaks, and it does not come back
        worker._session.disconnect()
    else:
        worker.leave()
    return worker, (worker.exchanges - worker.dropped) * period


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
def test_from_two_to_four_to_two(mode, leave):
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
    if not isinstance(mode, Synchronous):  # each step once, and none lost
        applied = sum(steps for _, steps in ended)
        assert center.version == applied
        np.testing.assert_array_equal(center.pull().params, applied)
    elif mode.late == "next":  # a mean of ones is one, however many they are of
        assert max(made) <= center.version < sum(made)
        np.testing.assert_array_equal(center.pull().params, center.version)
    assert center.workers <= set("cd" if leave == "vanishes" else "")


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": BoundedStaleness(versions=0)},
        {"mode": Synchronous(late="drop")},
        {"limits": Limits(messages=Refuse(staleness=0))},
    ],
)
def test_a_newcomer_begins_with_the_center_as_it_is(settings):
    center = LocalCenter(shared.downpour(), ZEROS, **settings)
    train(center, "a", 50)
    worker, applied = train(center, "b", 3)
    assert (worker.staleness, worker.dropped, worker.refused, applied) == (0, 0, 0, 3)
    np.testing.assert_array_equal(center.pull().params, 53)


def test_whoever_was_slow_and_has_left_holds_nobody():
    center = LocalCenter(shared.downpour(), ZEROS, mode=BoundedStaleness(rounds=2))
    slow = center.join("slow")
    fast = in_background(lambda: train(center, "fast", 50), "fast")
    with pytest.raises(TimeoutError):
        fast.result(0.2)
    slow.leave()
    assert fast.result(LIMIT)[1] == 50


def test_each_has_a_period_of_its_own():
    """As DyLU chooses them: rounds count, however many steps they have."""
    center = LocalCenter(shared.downpour(), ZEROS, mode=BoundedStaleness(rounds=0))
    both = threading.Barrier(2)
    run = functools.partial(train, center, exchanges=10, begin=both)
    fast = in_background(lambda: run(name="fast", period=6), "fast")
    slow = in_background(lambda: run(name="slow", period=2), "slow")
    assert [each.result(LIMIT)[1] for each in (fast, slow)] == [60, 20]
    np.testing.assert_array_equal(center.pull().params, 80)


def test_so_many_workers_at_a_time():
    center = LocalCenter(
        shared.downpour(), ZEROS, limits=Limits(max_workers=2, lease=0.1)
    )
    sessions = [center.join(name) for name in "ab"]
    with pytest.raises(errors.CenterFullError, match="takes 2 workers, and 2 are"):
        train(center, "c", 1)
    sessions[0].leave()
    train(center, "c", 1)  # leaves at its end
    sessions[1].disconnect()
    again = center.join("b")  # its own place, before its lease is over
    train(center, "d", 1)
    again.leave()
    assert center.version == 2


def test_a_barrier_is_for_the_first_ones():
    center = LocalCenter(shared.downpour(), ZEROS, barrier=2)
    begin = threading.Barrier(2)
    first = [
        in_background(functools.partial(train, center, name, 3, begin=begin), name)
        for name in "ab"
    ]
    assert sum(each.result(LIMIT)[1] for each in first) == 6
    assert not center.workers
    assert train(center, "c", 3)[1] == 3  # alone, later


def in_turns(center, workers, rounds):
    """Messages of workers of one speed; how many of each were applied."""
    sessions = [center.join(f"worker-{i}") for i in range(workers)]
    anchors, applied = [0] * workers, [0] * workers
    for sequence in range(1, rounds + 1):
        for i, session in enumerate(sessions):
            answer = session.exchange(sequence, -jnp.ones(2), anchor_version=anchors[i])
            anchors[i] = answer.version
            applied[i] += answer.applied and not answer.refused
    for session in sessions:
        session.leave()
    return applied


def test_a_share_that_so_few_cannot_keep_is_not_asked():
    """It was meant for many, and most of them have left."""
    refuse = Refuse(share=0.45)
    center = LocalCenter(shared.downpour(), ZEROS, limits=Limits(messages=refuse))
    assert in_turns(center, 2, 20) == [20, 20]
    # Of three each can, and one that does as much as the others together is refused.
    sessions = [center.join(name) for name in "abc"]
    anchor = center.version
    for sequence in range(1, 11):
        for session in sessions:
            made = session.exchange(sequence, -jnp.ones(2), anchor_version=anchor)
            assert not made.refused
    large = sessions[0].exchange(11, -50 * jnp.ones(2), anchor_version=anchor)
    assert "of all movement would be its worker's" in large.refused


def test_a_bound_of_versions_is_to_be_as_high_as_workers_are_many():
    """With two of four workers it is not, and the same two are left out for good."""
    mode = BoundedStaleness(versions=1)
    assert in_turns(LocalCenter(shared.downpour(), ZEROS, mode=mode), 2, 20) == [20, 20]
    center = LocalCenter(shared.downpour(), ZEROS, mode=mode)
    assert in_turns(center, 4, 20) == [20, 20, 0, 0]
    mode = BoundedStaleness(versions=3)
    assert in_turns(LocalCenter(shared.downpour(), ZEROS, mode=mode), 4, 20) == [20] * 4
