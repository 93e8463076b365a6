"""Messages that could make a center infinite are rejected without effect."""

import contextlib
import dataclasses

import jax
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.support import assert_identical

import agn_optax
from agn_optax import errors, rules, service
from agn_optax.center import LocalCenter, PackedCenter, Submission
from agn_optax.rules import COMBINE_METHODS

ONES = {"a": np.ones((3, 2), np.float32), "b": np.ones(5, np.float32)}


def times(number, dtype="float32"):
    return jax.tree.map(lambda x: (x * number).astype(dtype), ONES)


def assert_rejects(center, message):
    before = center.save()
    answer = sessions.exchange(
        center, message, anchor_version=center.version, worker="a"
    )
    assert "finite" in answer.rejected
    assert not answer.applied
    assert_identical(center.save(), before)


def assert_applies(center, message):
    answer = sessions.exchange(
        center, message, anchor_version=center.version, worker="a"
    )
    assert answer.applied
    for leaf in jax.tree.leaves(center.save()):
        assert np.isfinite(np.asarray(leaf, np.float64)).all()


# Norms of messages: the largest that a center of a dtype takes, nearly, and one above.
LIMITS = {
    "float32": (0.99e17, 1.01e17),
    "bfloat16": (0.99e17, 1.01e17),
    "float16": (65504, np.inf),
}
# Optimizers whose numbers stay finite with messages of such norms.
OPTIMIZERS = {
    "sgd": shared.sgd(0.3),
    "adam": shared.adam(0.1),
    "adamw": shared.adamw(0.1),
    "nadam": optax.nadam(0.1),
    "nesterov": shared.sgd(0.1, momentum=0.9, nesterov=True),
    "lookahead": agn_optax.center_optimizers.momentum_lookahead(0.5, 0.3),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "adagrad": optax.adagrad(0.1),
    "adabelief": optax.adabelief(0.1),
    "heloco": agn_optax.center_optimizers.heloco(0.5),
    "global_clip": optax.chain(optax.clip_by_global_norm(1.0), shared.adam(0.1)),
}
MODES = [None, agn_optax.center.Synchronous()]


def of_norm(norm, dtype="float32"):
    """Return a message whose norm is that of one of its elements."""
    message = times(0.0, dtype)
    message["b"][3] = norm
    return message


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("dtype", LIMITS)
def test_message_that_is_not_finite_or_far_too_large_does_not_move_the_center(
    dtype, flatten, mode
):
    params = times(0.0, dtype)
    center = (PackedCenter if flatten else LocalCenter)(
        shared.downpour(), params, mode=mode
    )
    allowed, excessive = LIMITS[dtype]
    assert_applies(center, of_norm(allowed, dtype))
    for number in (excessive, -excessive, np.inf, -np.inf, np.nan):
        assert_rejects(center, of_norm(number, dtype))
    assert_applies(center, of_norm(1.0, dtype))
    assert center.version == 2


def test_norm_at_a_float16_center_is_limited_by_its_largest_number():
    center = LocalCenter(shared.downpour(), times(0.0, "float16"))
    for size, takes in [(4e4, assert_applies), (5e4, assert_rejects)]:
        message = times(0.0, "float16")
        message["b"][:2] = size
        takes(center, message)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_largest_messages_leave_center_and_optimizer_finite(name, dtype):
    center = LocalCenter(shared.agn(OPTIMIZERS[name]), times(1.0, dtype))
    for _ in range(5):
        assert_applies(center, of_norm(LIMITS[dtype][0], dtype))
        assert_applies(center, of_norm(1.0, dtype))


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("combine", COMBINE_METHODS)
def test_rounds_of_the_largest_messages_leave_the_optimizer_finite(combine, dtype):
    rule = dataclasses.replace(
        shared.agn(shared.adam(0.1)), combine=COMBINE_METHODS[combine]
    )
    center = LocalCenter(rule, times(1.0, dtype), mode=agn_optax.center.Synchronous())
    joined = [center.join(name) for name in "abcde"]
    large = LIMITS[dtype][0]
    rounds = [(large,) * 5, (large, -large, large, -large, 1.0), (0.0,) * 5]
    for number, norms in enumerate(rounds):
        for session, norm in zip(joined, norms, strict=True):
            session.submit(Submission(number + 1, of_norm(norm, dtype), number))
        for session in joined:
            assert session.collect(number + 1).applied
    for leaf in jax.tree.leaves(center.save()):
        assert np.isfinite(np.asarray(leaf, np.float64)).all()


@pytest.mark.parametrize("flatten", [True, False])
def test_round_whose_norms_exceed_float32_is_rejected(flatten):
    """NumPy must not warn, because the warning as an error would fail the round."""
    mode = agn_optax.center.Synchronous()
    center = (PackedCenter if flatten else LocalCenter)(
        shared.downpour(), times(0.0), mode=mode
    )
    sessions = [center.join(name) for name in "abc"]
    for session in sessions:
        session.submit(Submission(1, times(3e38), anchor_version=0))
    for session in sessions:
        assert "finite" in session.collect(1).rejected
    assert center.version == 0


def test_first_parameters_must_be_in_the_range_of_the_codec():
    """Beyond the range of float16, workers would adopt infinity."""
    rule = rules.downpour(codec=agn_optax.codecs.cast("float16"))
    agn_optax.LocalCenter(rule, times(6e4))
    with pytest.raises(
        errors.InvalidArgumentError, match=r"up to 65504; .* have 70000"
    ):
        agn_optax.LocalCenter(rule, times(7e4))


def test_center_that_is_not_finite_accepts_messages():
    """One non-finite initial number must not stop all training."""
    params = times(1.0)
    params["b"][2] = np.nan
    center = agn_optax.LocalCenter(shared.downpour(), params)
    sessions.exchange(center, times(0.5), anchor_version=0, worker="a")
    np.testing.assert_array_equal(center.pull().params["a"], 0.5 * ONES["a"])


def test_served_center_rejects_messages_that_are_far_too_large():
    rule = shared.downpour()
    with (
        service.serve(rule, times(0.0)) as served,
        service.connect(served.address, rule) as center,
    ):
        sessions.exchange(center, times(1.0), anchor_version=0, worker="a")
        before = center.pull()
        for _ in range(2):
            answer = sessions.exchange(
                center, times(1e19), anchor_version=1, worker="a"
            )
            assert "not finite, or beyond 1e+17" in answer.rejected
            assert_identical(answer.params, before.params)
        assert_identical(center.pull().params, before.params)
        answer = sessions.exchange(center, times(1.0), anchor_version=1, worker="a")
        assert answer.version == 2


@pytest.mark.parametrize("codec", ["cast", "feedback"])
@pytest.mark.parametrize("shards", [1, 2])
def test_message_that_overflows_float16_is_rejected_by_all_shards(codec, shards):
    """If one leaf overflows, for example in one shard of two, no leaf is applied."""
    narrow = agn_optax.codecs.cast("float16")
    made = {
        "cast": narrow,
        "feedback": agn_optax.codecs.error_feedback(narrow),
    }[codec]
    rule = shared.downpour(codec=made)
    with contextlib.ExitStack() as stack:
        served = [stack.enter_context(service.serve(rule)) for _ in range(shards)]
        center = service.connect([each.address for each in served], rule)
        stack.callback(center.close)
        center.initialize(times(0.0), worker="")
        worker = agn_optax.Worker(center, shared.sgd(1.0), period=1)
        loop = worker.start()
        for size, is_rejected in (
            (7e4, True),
            (1.0, False),
            (-7e4, True),
            (2.0, False),
        ):
            before = center.pull()
            grads = {**times(1.0), "a": ONES["a"] * np.float32(size)}
            updates, state = worker.tx.update(grads, loop[1], loop[0])
            loop = worker.exchange(optax.apply_updates(loop[0], updates), state)
            assert bool(worker.rejection) == is_rejected
            if is_rejected:
                assert_identical(center.pull(), before)
                assert_identical(loop[0], before.params)
        for leaf in jax.tree.leaves((loop, center.pull().params)):
            assert np.isfinite(np.asarray(leaf, np.float64)).all()
        total = {"a": -3.0 * ONES["a"], "b": -2.0 * ONES["b"]}
        if codec == "feedback":  # nothing is lost of the finite leaves
            total["b"] = -4.0 * ONES["b"]
        assert_identical(center.pull().params, total)
