"""Modes by themselves, and a mode that does not come with the library."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import shared

import agn_optax
from agn_optax import errors
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Mode,
    Submission,
    Synchronous,
)


class Entry(NamedTuple):
    """A message as modes see it."""

    worker: str
    submission: Any
    arrived: float  # time, s


class PendingMessages:
    """Messages that wait, by worker: their round staleness and rounds ahead."""

    step_time = None

    def __init__(self, is_complete=False, **lateness):
        self.is_complete, self._lateness = is_complete, lateness
        self.pending = {
            name: Entry(name, Submission(1, None, 0), float(i))
            for i, name in enumerate(lateness)
        }

    def round_staleness(self, entry):
        return self._lateness[entry.worker][0]

    def rounds_ahead(self, entry):
        return self._lateness[entry.worker][1]

    def to_look_at(self, *, versions):
        return self.pending.values()

    @property
    def round_began(self):
        entries = self.pending.values()
        on_time = [e.arrived for e in entries if not self.round_staleness(e)]
        return min(on_time or [e.arrived for e in entries])


def due(mode, waiting, now=9.0):
    found = mode.due(waiting, now)
    if found is None:
        return ""
    return "".join(e.worker for e in found.entries) + "!" * (not found.applies)


@pytest.mark.parametrize(
    ("mode", "lateness", "expected"),
    [
        (Asynchronous(), {}, ""),
        (Asynchronous(), {"a": (9, 9), "b": (0, 0)}, "a"),
        (BoundedStaleness(versions=1), {"a": (2, 0), "b": (0, 0)}, "a!"),
        (BoundedStaleness(rounds=1), {"a": (2, 2), "b": (9, 1)}, "b"),
        (BoundedStaleness(versions=1, rounds=1), {"a": (1, 2)}, ""),
        (Synchronous(), {"a": (0, 0)}, ""),
        (Synchronous(quorum=1), {"a": (3, 0), "b": (0, 0)}, "ab"),
        (Synchronous(late="drop"), {"a": (0, 0), "b": (1, 0)}, "b!"),
    ],
)
def test_messages_that_are_due(mode, lateness, expected):
    assert due(mode, PendingMessages(**lateness)) == expected


def test_round_ends_when_all_messages_are_there_or_with_its_grace():
    mode = Synchronous(quorum=2, grace=3.0)
    waiting = PendingMessages(a=(1, 0), b=(0, 0))
    assert mode.deadline(waiting) == 1.0 + 3.0  # b's: a is late
    assert (due(mode, waiting, 3.9), due(mode, waiting, 4.0)) == ("", "ab")
    assert due(mode, PendingMessages(is_complete=True, a=(0, 0))) == "a"
    assert mode.deadline(PendingMessages(a=(0, 0))) == math.inf


def test_grace_period_is_the_slack_of_the_fastest_worker():
    mode = Synchronous(quorum=1, grace=7.0, slack_steps=10, sync_time=1.0)
    waiting = PendingMessages(a=(0, 0))
    assert mode.deadline(waiting) == 7.0  # no step time is known
    waiting.step_time = 0.5
    assert mode.deadline(waiting) == 10 * 0.5 - 1.0
    half = dataclasses.replace(mode, slack_share=0.5)
    assert half.deadline(waiting) == 2.0
    waiting.step_time = 0.01  # the synchronization takes longer than the slack
    assert mode.deadline(waiting) == 0.0


def test_slack_without_a_quorum_is_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="slack_steps needs a quorum"):
        Synchronous(slack_steps=1)


def test_only_rounds_have_weights():
    assert Synchronous(late="weighted").weights([0, 3]) == (1.0, 0.25)
    assert Synchronous().weights([0, 3]) == (1.0, 1.0)
    for mode in (Asynchronous(), BoundedStaleness(rounds=1)):
        assert mode.weights([0]) is None
        assert mode.deadline(PendingMessages(a=(0, 0))) == math.inf


class Pairs(Mode):
    """Messages are applied two by two."""

    combines = True

    def due(self, waiting, now):
        entries = list(waiting.pending.values())[:2]
        if len(entries) < 2:
            return None
        return Asynchronous().due(waiting, now)._replace(entries=entries)

    def weights(self, round_staleness):
        return (1.0,) * len(round_staleness)


def test_center_takes_another_mode():
    center = agn_optax.LocalCenter(shared.average(), jnp.zeros(2), mode=Pairs())
    sessions = [center.join(f"w{i}") for i in range(3)]
    for i, session in enumerate(sessions):
        session.submit(Submission(1, jnp.full(2, float(i)), anchor_version=0))
    assert sessions[0].collect(1).version == sessions[1].collect(1).version == 1
    assert sessions[2].collect(1, 0.0) is None
    np.testing.assert_array_equal(center.pull().params, -0.5)
    sessions[0].submit(Submission(2, jnp.zeros(2), anchor_version=1))
    assert sessions[2].collect(1).staleness == 1


@pytest.mark.parametrize("mode", [Synchronous, "synchronous"])
def test_another_object_is_no_mode(mode):
    with pytest.raises(errors.InvalidTypeError, match=r"mode must be Asynchronous\(\)"):
        agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2), mode=mode)
