"""Sharded centers: every shard gets its part of each exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import shared
from helpers.support import assert_identical

import agn_optax
from agn_optax import codecs, errors
from agn_optax.center import (
    Answer,
    BoundedStaleness,
    Limits,
    ShardedCenter,
    Submission,
    Synchronous,
)

PARAMS = {"a": jnp.zeros((6, 2)), "b": jnp.zeros(5), "c": jnp.zeros(())}
ONES = jax.tree.map(jnp.ones_like, PARAMS)


def shards(count=2, params=PARAMS, codec=None, **settings):
    rule = shared.downpour(codec=codec)
    made = ShardedCenter(
        [agn_optax.LocalCenter(rule, **settings) for _ in range(count)]
    )
    made.initialize(params, worker="")
    return made


def move(center, shard, times=1):
    """Exchange with only one of the shards."""
    part = center.cut(ONES)[shard]
    session = center.centers[shard].join("somebody")
    for sequence in range(1, times + 1):
        session.exchange(Submission(sequence, part, anchor_version=sequence - 1))
    session.leave()


def versions(center):
    return [shard.version for shard in center.centers]


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_response_combines_all_shards(shard):
    center = shards(3)
    session = center.join("anna")
    move(center, shard, times=2)
    answer = session.exchange(Submission(1, ONES, anchor_version=(0, 0, 0)))
    assert answer.version == tuple(3 if i == shard else 1 for i in range(3))
    assert answer.staleness == 2  # of the most stale part
    assert answer.applied
    assert_identical(answer.params, center.pull().params)
    np.testing.assert_allclose(answer.norm, np.sqrt(6 * 2 + 5 + 1), rtol=1e-6)
    answer = session.exchange(Submission(2, ONES, anchor_version=answer.version))
    assert answer.staleness == 0


# Answers of two shards, and the answer of the center: no field keeps its default.
FIELDS = {
    "params": (None, None, PARAMS),
    "version": (4, 6, (4, 6)),
    "sequence": (3, 3, 3),
    "staleness": (5, 2, 5),
    "norm": (3.0, 4.0, 5.0),
    "applied": (True, False, False),
    "rejected": ("", "too large", "too large"),
    "pace": (0.75, 0.5, 0.5),
    "is_partial": (False, False, True),
    "received": (100, 20, 120),
    "notices": (("still",), ("apart",), ("still", "apart")),
    "witness": ("a", "b", ("a", "b")),
}


def test_every_field_of_an_answer_is_combined():
    center = shards()
    defaults = Answer._field_defaults
    assert set(FIELDS) == set(Answer._fields)
    first, second = (
        Answer(**{name: values[shard] for name, values in FIELDS.items()})._replace(
            params=part
        )
        for shard, part in enumerate(center.cut(PARAMS))
    )
    answer = center.unite_answers([first, second])
    for name, (*_, expected) in FIELDS.items():
        assert name not in defaults or expected != defaults[name]
        assert_identical(getattr(answer, name), expected)


@pytest.mark.parametrize("shard", [0, 1])
def test_message_counts_as_applied_if_all_parts_are(shard):
    center = shards(mode=BoundedStaleness(versions=0))
    session = center.join("anna")
    assert session.exchange(Submission(1, ONES, anchor_version=(0, 0))).applied
    move(center, shard)
    answer = session.exchange(Submission(2, ONES, anchor_version=(1, 1)))
    assert not answer.applied
    assert answer.version == (2, 2)
    assert session.exchange(Submission(3, ONES, anchor_version=answer.version)).applied


@pytest.mark.slow
@pytest.mark.parametrize("late", [(0,), (1,), (0, 1)])
def test_message_dropped_by_all_shards_is_restored_to_the_residual(late):
    """If a shard applied its part, nothing is restored, so nothing is applied twice."""
    codec = codecs.error_feedback(codecs.quantize(2))
    center = shards(codec=codec, mode=BoundedStaleness(versions=0))
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=1)
    params, state = worker.start()
    for shard in late:
        part = center.cut(ONES)[shard]
        sent, _ = codec.encode(part, codec.init(part))
        center.centers[shard].join("somebody").exchange(
            Submission(1, sent, anchor_version=0)
        )
    moved = jax.tree.map(lambda x: x - 0.375, {**params, "b": params["b"] - 0.625})
    params, state = worker.exchange(moved, state)
    assert worker.dropped == 1
    for name, contributed, sent in (("a", 0.375, 0.5), ("b", 1.0, 1.0)):
        expected = contributed if len(late) == 2 else contributed - sent
        residual = np.asarray(state.codec_state.residual[name])
        np.testing.assert_array_equal(residual, np.full_like(residual, expected))


@pytest.mark.parametrize("where", ["submit", "collect", "acknowledge"])
@pytest.mark.parametrize("shard", [0, 1])
def test_message_that_reached_some_shards_is_completed(shard, where, monkeypatch):
    center = shards()
    session = center.join("anna")

    def lost(*args, **kwargs):
        raise errors.CenterUnreachableError("nobody answers")

    for attempts in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(session._sessions[shard], where, lost)
            with pytest.raises(errors.CenterUnreachableError):
                session.exchange(Submission(1, ONES, anchor_version=(0, 0)))
        assert versions(center)[1 - shard] == 1, attempts
    answer = session.exchange(Submission(1, ONES, anchor_version=(0, 0)))
    assert answer.version == (1, 1)
    for leaf in jax.tree.leaves(answer.params):
        np.testing.assert_array_equal(leaf, -1)
    assert session.exchange(Submission(2, ONES, anchor_version=(1, 1))).version == (
        2,
        2,
    )


def test_response_is_complete_when_all_shards_responded():
    center = shards(mode=Synchronous())
    session = center.join("anna")
    other = center.centers[1].join("bert")
    session.submit(Submission(1, ONES, anchor_version=(0, 0)))
    assert versions(center) == [1, 0]
    assert session.collect(1, 0.0) is None
    other.leave()
    assert session.collect(1, 20.0).version == (1, 1)


def test_message_that_one_shard_would_reject_reaches_no_shard():
    center = shards()
    session = center.join("anna")
    bad = ONES | {"c": jnp.float32(np.nan)}
    answer = session.exchange(Submission(1, bad, anchor_version=(0, 0)))
    assert answer.rejected == "it is not finite (its norm is nan)"
    for wrong in (0, (0,), (0, 0, 0), [0, 0]):
        with pytest.raises(errors.InvalidArgumentError, match="tuple of 2 versions"):
            session.exchange(Submission(2, ONES, anchor_version=wrong))
    assert versions(center) == [0, 0]


def test_worker_that_cannot_join_one_shard_joins_none():
    center = shards(limits=Limits(max_workers=1))
    first = center.centers[1].join("bert")
    with pytest.raises(errors.CenterFullError, match="'anna'"):
        center.join("anna")
    assert not center.centers[0].workers
    first.leave()
    center.join("anna").leave()
    assert not any(shard.workers for shard in center.centers)


def test_disconnect_reaches_all_shards():
    center = shards(limits=Limits(lease=0.0))
    center.join("anna").disconnect()
    assert not any(shard.workers for shard in center.centers)


def test_after_an_error_of_one_shard_the_session_rejects_messages():
    """Another shard would treat the next message as a repetition of an applied one."""
    strict = agn_optax.center.MessageLimits(norm=3.0, in_a_row=1)
    center = shards(
        params={"a": jnp.zeros(4), "b": jnp.zeros(4)}, limits=Limits(messages=strict)
    )
    small = {"a": jnp.ones(4), "b": jnp.ones(4)}
    session = center.join("anna")
    with pytest.raises(errors.MessageRejectedError):
        session.exchange(
            Submission(1, {**small, "a": jnp.full(4, 9.0)}, anchor_version=(0, 0))
        )
    assert sorted(versions(center)) == [0, 1]
    with pytest.raises(errors.WorkerStateError, match=r"start\(\) again"):
        session.exchange(Submission(1, small, anchor_version=(0, 0)))
    again = center.join("anna")
    assert again.exchange(
        Submission(1, small, anchor_version=tuple(versions(center)))
    ).applied
