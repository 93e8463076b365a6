"""Message limits: rejected messages, and how their workers continue."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.support import RULES, assert_identical, tree

import agn_optax
from agn_optax import codecs, errors
from agn_optax.center import (
    BoundedStaleness,
    Journal,
    Limits,
    LocalCenter,
    MessageLimits,
    PackedCenter,
    ShardedCenter,
    Submission,
    Synchronous,
)

ZEROS = {"a": np.zeros(3, np.float32), "b": np.zeros((4, 4), np.float32)}


def message_of_norm(value):
    """Return a message with one nonzero element, so that its value is the norm."""
    made = jax.tree.map(np.copy, ZEROS)
    made["b"][3, 1] = value
    return made


def send(center, value, worker="anna", behind=0):
    return sessions.exchange(
        center,
        message_of_norm(value),
        anchor_version=center.version - behind,
        worker=worker,
    )


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("norm", 0, "norm must be a number in \\(0, inf\\)"),
        ("norm", "1", "norm must be a number"),
        ("norm", float("nan"), "norm must be"),
        ("times_median", 1, "times_median must be a number in \\(1"),
        ("steps", 0, "steps must be a whole number >= 1"),
        ("steps", 1.5, "steps must be a whole number"),
        ("in_a_row", 0, "in_a_row must be a whole number >= 1"),
        ("in_a_row", None, "in_a_row must be"),
        ("nonfinite", 1, "nonfinite must be True or False"),
    ],
)
def test_invalid_limits_are_rejected(setting, value, expected):
    with pytest.raises(errors.InvalidArgumentError, match=expected):
        MessageLimits(**{setting: value})


def test_messages_must_be_message_limits():
    with pytest.raises(
        errors.InvalidTypeError, match=r"messages must be MessageLimits"
    ):
        Limits(messages=True)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("mode", [None, Synchronous()])
@pytest.mark.parametrize(
    ("settings", "good", "bad", "why"),
    [
        ({}, 1e15, np.nan, "it is not finite (its norm is nan)"),
        ({"norm": 10}, -9.5, 11.0, "its norm is 11, and this center takes 10 at most"),
        ({"norm": 10, "nonfinite": False}, 9.5, np.nan, "its norm is nan, and"),
        (
            {"times_median": 3},
            2.0,
            7.0,
            "its norm is 7, more than 3 times 2, the median norm of the last 10",
        ),
    ],
)
def test_message_beyond_a_limit_is_rejected(settings, good, bad, why, mode, flatten):
    center = (PackedCenter if flatten else LocalCenter)(
        shared.downpour(),
        ZEROS,
        mode=mode,
        limits=Limits(messages=MessageLimits(**settings)),
    )
    for _ in range(10):
        assert send(center, good).rejected == ""
    before = center.save()
    answer = send(center, bad)
    assert answer.rejected.startswith(why)
    assert not answer.applied
    assert answer.version == 10
    assert_identical(answer.params, before.params)
    assert_identical(center.save(), before)
    assert send(center, good).applied
    kind = next(iter(settings), "nonfinite")
    assert center.core.ledger.rejections.counts == {kind: 1}


def test_non_finite_message_is_applied_if_allowed():
    """The center then becomes infinite, as configured."""
    center = LocalCenter(
        shared.downpour(), ZEROS, limits=Limits(messages=MessageLimits(nonfinite=False))
    )
    assert send(center, np.inf).applied
    assert np.isinf(center.pull().params["b"]).any()


def test_median_is_that_of_the_last_messages():
    center = LocalCenter(
        shared.downpour(), ZEROS, limits=Limits(messages=MessageLimits(times_median=4))
    )
    for norm in (1.0, 100.0, 1e4, 3.0, 1e-3, 1.0, 1.0, 1.0, 1.0):
        assert send(center, norm).applied  # these are too few to compare with
    assert send(center, 1.0).applied
    assert send(center, 4.5).rejected
    for _ in range(100):
        assert send(center, 4.0).applied
    assert send(center, 15.0).applied
    assert send(center, 17.0).rejected


def test_zero_messages_set_no_limit():
    center = LocalCenter(
        shared.downpour(), ZEROS, limits=Limits(messages=MessageLimits(times_median=2))
    )
    for _ in range(20):
        send(center, 0.0)
    assert send(center, 5.0).applied


def test_too_many_rejections_in_a_row_raise():
    reject = MessageLimits(norm=1.0, in_a_row=3)
    center = LocalCenter(shared.downpour(), ZEROS, limits=Limits(messages=reject))
    for _ in range(2):
        assert send(center, 2.0).rejected
    assert send(center, 1.0).applied  # this ends the row of rejections
    for _ in range(2):
        assert send(center, 2.0).rejected
    for _ in range(2):  # also when repeated
        with pytest.raises(errors.MessageRejectedError, match=r"'anna' has sent 3.*2"):
            send(center, 2.0)
    assert send(center, 1.0).applied  # the messages that raised count as never received
    for _ in range(2):
        assert send(center, 2.0).rejected
    sessions.join(center, "anna")
    assert send(center, 2.0).rejected  # a new session
    assert center.version == 2


def test_worker_may_start_again_after_too_many_rejections():
    center = LocalCenter(
        shared.downpour(),
        jnp.zeros(2),
        limits=Limits(messages=MessageLimits(in_a_row=3)),
    )
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, name="anna")
    loop = worker.start()
    for _ in range(2):
        loop = worker.exchange(loop[0] * np.nan, loop[1])
        assert_identical(loop[0], jnp.zeros(2))
    with pytest.raises(errors.MessageRejectedError, match="not finite"):
        worker.exchange(loop[0] * np.nan, loop[1])
    assert (worker.exchanges, worker.rejected, center.version) == (2, 2, 0)
    params, state = worker.start()
    worker.exchange(params - 1, state)
    assert center.version == 1


def local(worker):
    @jax.jit
    def step(params, state, gradient):
        gradients = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)
        updates, state = worker.tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("overlap", [False, True])
def test_worker_restarts_from_the_center_after_a_non_finite_message(rule, overlap):
    center = LocalCenter(RULES[rule](), tree())
    worker = agn_optax.Worker(center, shared.adam(0.1), period=2, overlap=overlap)
    params, state = worker.start()
    step = local(worker)
    for gradient in (1.0, 1.0, 1.0, np.nan):
        params, state = worker.exchange(*step(params, state, gradient))
    params, state = worker.flush(params, state)
    assert worker.rejected == 1
    assert worker.exchanges == 2
    assert_identical(params, center.pull().params)
    fresh = agn_optax.Worker(center, shared.adam(0.1), period=2).start()[1]
    assert_identical(state, fresh)  # because its moments were not finite
    for _ in range(4):
        params, state = worker.exchange(*step(params, state, 1.0))
    worker.flush(params, state)
    assert (worker.exchanges, worker.rejected, center.version) == (4, 1, 3)


def test_finite_inner_state_is_kept_after_a_rejection():
    center = LocalCenter(
        shared.downpour(), jnp.zeros(2), limits=Limits(messages=MessageLimits(norm=1.0))
    )
    worker = agn_optax.Worker(center, shared.adam(10.0), period=1)
    params, state = worker.start()
    params, state = local(worker)(params, state, 1.0)
    before = jax.tree.map(np.array, state.inner_state)
    params, state = worker.exchange(params, state)
    assert worker.rejected == 1
    assert_identical(state.inner_state, before)
    assert_identical(params, jnp.zeros(2))


@pytest.mark.parametrize("overlap", [False, True])
def test_residual_is_unchanged_by_a_non_finite_message(overlap):
    rule = shared.downpour(codec=codecs.error_feedback(codecs.quantize(8)))
    center = LocalCenter(rule, jnp.zeros(300))
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, overlap=overlap)
    params, state = worker.start()
    rng = np.random.default_rng(0)
    params, state = worker.exchange(params + rng.normal(size=300), state)
    kept = jax.tree.map(np.array, state.codec_state)
    assert np.abs(jax.tree.leaves(kept)[0]).max() > 0
    bad = (params + rng.normal(size=300)).at[7].set(np.nan)
    params, state = worker.flush(*worker.exchange(bad, state))
    assert worker.rejected == 1
    assert_identical(jax.tree.map(np.asarray, state.codec_state), kept)


def test_dropped_message_is_not_a_rejection():
    mode = BoundedStaleness(versions=0)
    center = LocalCenter(shared.downpour(), jnp.zeros(2), mode=mode)
    for worker in ("anna", "bert"):
        sessions.join(center, worker)
    for worker in ("anna", "bert"):
        answer = sessions.exchange(center, jnp.ones(2), anchor_version=0, worker=worker)
    assert (answer.applied, answer.rejected) == (False, "")


def test_round_continues_without_rejected_messages():
    """A rejected worker starts from the result of the others, as if it took part."""
    center = LocalCenter(
        shared.average(),
        jnp.zeros(2),
        mode=Synchronous(),
        limits=Limits(messages=MessageLimits(norm=10.0)),
    )
    members = {name: center.join(name) for name in ("anna", "bert", "carl")}
    values = {"anna": 2.0, "bert": 100.0, "carl": 4.0}
    for name, session in members.items():
        message = jnp.full(2, values[name])
        session.submit(Submission(1, message, anchor_version=0))
    answers = {name: session.collect(1, 10) for name, session in members.items()}
    assert [bool(answer.rejected) for answer in answers.values()] == [0, 1, 0]
    for answer in answers.values():
        assert answer.version == 1
        np.testing.assert_array_equal(answer.params, -3.0)
    members["anna"].submit(Submission(2, jnp.full(2, 100.0), anchor_version=1))
    members["bert"].submit(Submission(2, jnp.full(2, 100.0), anchor_version=1))
    members["carl"].submit(Submission(2, jnp.full(2, 100.0), anchor_version=1))
    for session in members.values():
        answer = session.collect(2, 10)
        assert answer.rejected
        assert answer.version == 1


def test_rejected_worker_adopts_the_round_also_under_easgd():
    center = LocalCenter(
        shared.easgd(0.5),
        jnp.zeros(2),
        mode=Synchronous(),
        limits=Limits(messages=MessageLimits(norm=10.0)),
    )
    anna, bert = center.join("anna"), center.join("bert")
    anna.submit(Submission(1, jnp.full(2, 2.0), anchor_version=0))
    bert.submit(Submission(1, jnp.full(2, 100.0), anchor_version=0))
    assert anna.collect(1, 10).version == 0
    answer = bert.collect(1, 10)
    assert answer.version == 1
    np.testing.assert_array_equal(answer.params, 1.0)


def test_rejected_round_counts_for_waiting_workers():
    mode = BoundedStaleness(rounds=0)
    center = LocalCenter(
        shared.downpour(),
        ZEROS,
        mode=mode,
        limits=Limits(messages=MessageLimits(norm=1.0)),
    )
    for name in ("anna", "bert"):
        sessions.join(center, name)
    assert send(center, 2.0, "anna").rejected
    assert send(center, 1.0, "bert").applied
    session, _ = sessions._sessions[center]["bert"]
    session.submit(Submission(2, message_of_norm(1.0), anchor_version=1))
    assert session.collect(2, 0.0).applied
    session.submit(Submission(3, message_of_norm(1.0), anchor_version=2))
    assert session.collect(3, 0.0) is None  # it waits until anna has made another round
    assert send(center, 2.0, "anna").rejected
    assert session.collect(3, 10).applied


@pytest.mark.parametrize("acknowledges", [False, True])
def test_repeated_message_is_rejected_once(acknowledges):
    center = LocalCenter(
        shared.downpour(), ZEROS, limits=Limits(messages=MessageLimits(norm=1.0))
    )
    session = center.join("anna")
    for _ in range(3):
        session.submit(Submission(1, message_of_norm(2.0), anchor_version=0))
        answer = session.collect(1)
        assert answer.rejected.startswith("its norm is 2,")
        if acknowledges:
            session.acknowledge(1)
    assert center.core.ledger.rejections.counts == {"norm": 1}


def test_journal_restores_the_rejections_of_workers(tmp_path):
    settings = {
        "limits": Limits(messages=MessageLimits(norm=3.0, in_a_row=3)),
        "durability": Journal(tmp_path),
    }

    def submit(center, sequences, values):
        for name, value in values:
            joined[name].submit(
                Submission(sequences[name], message_of_norm(value), anchor_version=0)
            )
            joined[name].collect(sequences[name])
            sequences[name] += 1

    def decisions(center):
        return {
            name: (
                m.round_version,
                m.consecutive_rejections,
                m.rejected,
                m.rejection_reason,
            )
            for name, m in center.core.ledger.registered().items()
        }

    center = LocalCenter(shared.downpour(), ZEROS, **settings)
    joined = {name: center.join(name) for name in ("anna", "bert")}
    sequences = {"anna": 1, "bert": 1}
    even = [(name, 1.0 + i / 10) for i in range(7) for name in joined]
    submit(center, sequences, even)
    submit(center, sequences, [("anna", 50.0), ("anna", np.nan), ("bert", 1.5)])
    before = decisions(center)
    assert before["anna"][1:3] == (2, 2)
    center.core.keeper._directory.close()  # as if the process was killed
    center.core.keeper.close = lambda: None
    again = LocalCenter(shared.downpour(), **settings)
    assert decisions(again) == before
    session = again.core.join("anna", joined["anna"].session_id, resume=True)
    repeated = session.exchange(
        Submission(sequences["anna"] - 1, message_of_norm(1.0), anchor_version=0)
    )
    assert "not finite" in repeated.rejected
    with pytest.raises(errors.MessageRejectedError, match="50"):
        session.exchange(
            Submission(sequences["anna"], message_of_norm(50.0), anchor_version=0)
        )
    again.close()


def test_shards_apply_their_limits_separately():
    """A message that is not finite in one shard is rejected by all."""
    reject = MessageLimits(norm=1.0)
    kept = [
        LocalCenter(shared.downpour(), limits=Limits(messages=reject)) for _ in "ab"
    ]
    center = ShardedCenter(kept)
    center.initialize({"a": jnp.zeros(8), "b": jnp.zeros(8)}, worker="")
    worker = agn_optax.Worker(center, shared.sgd(1.0), period=1, name="anna")
    params, state = worker.start()
    params, state = worker.exchange({**params, "b": params["b"] + 3.0}, state)
    assert worker.rejection.startswith("its norm is 8.485")
    assert sorted(worker.version) == [0, 1]
    assert_identical(params, center.pull().params)
    bad = {**params, "b": params["b"].at[0].set(np.nan)}
    params, state = worker.exchange(bad, state)
    assert worker.rejection == "it is not finite (its norm is nan)"
    assert sorted(worker.version) == [0, 1]
    counts = [each.core.ledger.rejections.counts for each in kept]
    assert sum(count.get("nonfinite", 0) for count in counts) == 2


WHERE = ["around the worker's", "inside of the worker's"]


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", ["agn", "downpour", "easgd"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("overlap", [False, True])
def test_loss_scale_recovers_and_exchanges_continue(rule, where, overlap):
    """Gradients in float16 overflow until the scale is low enough, and sometimes later.

    Once the parameters themselves become NaN, which no scale could repair.
    """
    start = {"w": jnp.zeros(4)}
    center = LocalCenter(
        RULES[rule](), start, limits=Limits(messages=MessageLimits(times_median=100))
    )
    scaling = functools.partial(
        agn_optax.loss_scaling, initial_scale=2.0**24, growth_interval=6
    )
    around, inner = where == WHERE[0], shared.adam(0.05)
    worker = agn_optax.Worker(
        center, inner if around else scaling(inner), period=3, overlap=overlap
    )
    tx = scaling(worker.tx) if around else worker.tx
    params, state = worker.start()
    state = tx.init(params)._replace(inner_state=state) if around else state

    @jax.jit
    def step(params, state, x):
        def loss(params):
            error = (params["w"].astype(jnp.float16) - 1) * x.astype(jnp.float16)
            return jnp.sum(error**2).astype(jnp.float32) * agn_optax.loss_scale(state)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    rng, scales = np.random.default_rng(0), []
    for i in range(150):
        x = rng.normal(size=4).astype(np.float32) * (100 if i % 17 == 0 else 1)
        params, state = step(params, state, x)
        if i == 70:
            params = jax.tree.map(lambda p: p * np.nan, params)
        local = state.inner_state if around else state
        params, local = worker.exchange(params, local)
        if (
            overlap and sessions.fragment(worker).message is not None
        ):  # the response is adopted one step later
            concurrent.futures.wait([sessions.fragment(worker).message.flight])
        state = state._replace(inner_state=local) if around else local
        scales.append(float(agn_optax.loss_scale(state)))
    assert worker.exchanges > 35
    assert worker.rejected < 25
    assert center.version >= 20
    assert max(scales[-20:]) > min(scales) >= 2.0**6
    np.testing.assert_allclose(center.pull().params["w"], 1.0, atol=0.3)
