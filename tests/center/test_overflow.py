"""Finite messages that would make a center infinite are rejected without effect."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.support import assert_identical

import agn_optax
from agn_optax import errors, rules, service
from agn_optax.center import LocalCenter, PackedCenter, Store, Submission, _reach

ONES = {"a": np.ones((3, 2), np.float32), "b": np.ones(5, np.float32)}


def times(number, dtype="float32"):
    return jax.tree.map(lambda x: (x * number).astype(dtype), ONES)


# For each cause: a rule, and messages of which only the last is too large.
HARMFUL = {
    "learning_rate": (shared.agn(shared.sgd(1e25)), [1.0, 1e10, 4e13]),
    "sum": (shared.downpour(), [3e38, -1.0, 3e38]),
    "0/0": (shared.agn(shared.adam(0.1, eps=0.0)), [0.0]),
    "momentum": (shared.diloco(shared.sgd(1.0, momentum=0.9)), [1e38, 3.3e38]),
    "state": (shared.agn(shared.adam(0.1)), [1.0, 1e18, 1e22]),
    "easgd": (shared.easgd(1.0), [-3e38, 3e38]),
    "decay": (
        shared.agn(optax.chain(optax.add_decayed_weights(10.0), shared.sgd(1.0))),
        [1.0, -1e37, 3e38],
    ),
}


def assert_rejects(center, number, worker="a", dtype="float32"):
    before = center.save()
    answer = sessions.exchange(
        center, times(number, dtype), anchor_version=center.version, worker=worker
    )
    assert "finite" in answer.rejected
    assert not answer.applied
    assert_identical(center.save(), before)


def assert_applies(center, number, worker="a", dtype="float32"):
    answer = sessions.exchange(
        center, times(number, dtype), anchor_version=center.version, worker=worker
    )
    assert answer.applied
    for leaf in jax.tree.leaves(center.save()):
        assert np.isfinite(np.asarray(leaf, np.float64)).all()


@pytest.mark.parametrize("mode", [None, agn_optax.center.Synchronous()])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("harm", HARMFUL)
def test_message_that_would_overflow_the_center_is_rejected(harm, packs, mode):
    rule, (*good, bad) = HARMFUL[harm]
    center = (PackedCenter if packs else LocalCenter)(rule, times(0.0), mode=mode)
    for number in good:
        assert_applies(center, number)
    assert_rejects(center, bad)
    assert_rejects(center, bad)  # also when it is sent again
    assert_applies(center, 1e-3)
    assert center.version == len(good) + 1


@pytest.mark.parametrize("packs", [True, False])
def test_round_whose_norms_exceed_float32_is_rejected(packs):
    """NumPy must not warn, because the warning as an error would fail the round."""
    mode = agn_optax.center.Synchronous()
    center = (PackedCenter if packs else LocalCenter)(
        shared.downpour(), times(0.0), mode=mode
    )
    sessions = [center.join(name) for name in "abc"]
    for session in sessions:
        session.submit(Submission(1, times(3e38), anchor_version=0))
    for session in sessions:
        assert "finite" in session.collect(1).rejected
    assert center.version == 0


@pytest.mark.parametrize("rule", [shared.downpour(), shared.easgd(1.0)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_narrow_center_rejects_messages_that_overflow_it(rule, dtype):
    center = agn_optax.LocalCenter(rule, times(0.0, "float16"))
    assert_applies(center, 6e4, dtype=dtype)
    if rule.message is None:
        assert_rejects(center, 6e4, dtype=dtype)
    assert_applies(center, 1.0, dtype=dtype)
    if dtype == "float32":
        assert_rejects(center, 7e4, dtype=dtype)


def test_sum_of_small_messages_that_overflows_is_rejected():
    center = agn_optax.LocalCenter(shared.downpour(), times(0.0, "float16"))
    for _ in range(6):
        assert_applies(center, -1e4)
    assert_rejects(center, -1e4)
    assert_applies(center, 1e4)


@pytest.mark.parametrize("name", ["downpour", "easgd"])
def test_center_stays_in_the_range_of_its_codec(name):
    """Beyond the range of float16, workers would adopt infinity."""
    codec = agn_optax.codecs.cast("float16")
    rate = (1.0,) if name == "easgd" else ()
    rule = getattr(rules, name)(*rate, codec=codec)
    sign = 1 if name == "easgd" else -1  # sign of parameters, or of displacements
    center = agn_optax.LocalCenter(rule, times(0.0))
    assert_applies(center, sign * 6e4)
    if name == "downpour":
        assert_rejects(center, sign * 1e4)
    assert_applies(center, 1.0)
    with pytest.raises(
        errors.InvalidArgumentError, match=r"up to 65504; .* have 70000"
    ):
        agn_optax.LocalCenter(rule, times(7e4))


def test_center_moves_at_most_by_the_range_of_its_downlink_codec():
    codec = agn_optax.codecs.two_way(
        agn_optax.codecs.identity(), agn_optax.codecs.cast("float16")
    )
    center = agn_optax.LocalCenter(shared.downpour(codec=codec), times(1e5))
    assert_applies(center, -6e4)
    assert_applies(center, -6e4)
    assert_rejects(center, -7e4)
    assert_applies(center, 1.0)


def test_center_that_is_not_finite_accepts_messages():
    """One non-finite initial number must not stop all training."""
    params = times(1.0)
    params["b"][2] = np.nan
    center = agn_optax.LocalCenter(shared.downpour(), params)
    sessions.exchange(center, times(0.5), anchor_version=0, worker="a")
    np.testing.assert_array_equal(center.pull().params["a"], 0.5 * ONES["a"])


def test_broadcast_params_follow_the_finite_part_of_the_center():
    codec = agn_optax.codecs.two_way(
        agn_optax.codecs.identity(), agn_optax.codecs.quantize(8)
    )
    params = times(1.0)
    params["b"][2] = np.nan
    center = agn_optax.LocalCenter(shared.downpour(codec=codec), params)
    sessions.exchange(center, times(0.5), anchor_version=0, worker="a")
    exact, public = center.pull().params, center.pull(broadcast=True).params
    np.testing.assert_array_equal(public["a"], 0.5 * ONES["a"])
    np.testing.assert_array_equal(public["b"], exact["b"])


def test_served_center_rejects_messages_that_overflow_it():
    rule = shared.agn(shared.sgd(1e25))
    with (
        service.serve(rule, times(0.0)) as served,
        service.connect(served.address, rule) as center,
    ):
        for version, number in enumerate((1.0, 1e10)):
            sessions.exchange(center, times(number), anchor_version=version, worker="a")
        before = center.pull()
        for _ in range(2):
            answer = sessions.exchange(
                center, times(4e13), anchor_version=2, worker="a"
            )
            assert "would not be finite" in answer.rejected
            assert_identical(answer.params, before.params)
        assert_identical(center.pull().params, before.params)
        answer = sessions.exchange(center, times(1.0), anchor_version=2, worker="a")
        assert answer.version == 3


def _done_first(x):
    """Run a loop whose first result is a boolean."""
    start = jnp.zeros((), bool), x
    return jax.lax.while_loop(lambda c: ~c[0], lambda c: (True, 1e30 * c[1]), start)[1]


# If a test fails for one of these on a new JAX or optax, adapt the table in
# `rules/_declared.py`: without a bound the center is scanned at every message.
BOUNDED = {
    "sgd": shared.sgd(0.3),
    "chain": optax.chain(optax.scale(-2.0), shared.sgd(3.0)),
    "none": optax.identity(),
    "adam": shared.adam(0.1),
    "adamw": shared.adamw(0.1),
    "nadam": optax.nadam(0.1),
    "momentum": shared.sgd(0.1, momentum=0.9),
    "nesterov": shared.sgd(0.1, momentum=0.99, nesterov=True),
    "lookahead": agn_optax.center_optimizers.momentum_lookahead(0.5, 0.3),
    "lion": optax.lion(0.1),
    "decay": optax.chain(optax.add_decayed_weights(0.1), shared.sgd(0.1)),
    "schedule": shared.sgd(optax.linear_schedule(0.1, 1.0, 10)),
    "cosine": shared.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 20)),
    "rmsprop": optax.rmsprop(0.1),
    "sign": optax.scale_by_sign(),
    "clip": optax.chain(optax.clip(1.0), shared.sgd(0.1)),
    "global_clip": optax.chain(optax.clip_by_global_norm(1.0), shared.adam(0.1)),
}
UNBOUNDED = {
    "noise": optax.add_noise(0.1, 0.5, 0),
    "inverse": optax.stateless(lambda u, _: jax.tree.map(lambda x: 1 / x, u)),
    "own": optax.chain(shared.sgd(0.1), optax.stateless(lambda u, _: u)),
    "loop": optax.stateless(lambda u, _: jax.tree.map(_done_first, u)),
    "weight": rules.scale_by_weight(),
    "masked": optax.masked(shared.sgd(0.1), {"a": True, "b": False}),
    "whole": optax.lamb(0.1),
}


def bound_of(rule, center, state, norm=5.0, messages=60):
    largest = [float(number) for number in _reach.largest_of(center, state)]
    return _reach.bound(rule, center, state, norm, messages, largest)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("signs", ["equal", "random"])
@pytest.mark.parametrize("name", BOUNDED)
def test_center_stays_within_the_computed_bound(name, signs, dtype):
    rule = shared.agn(BOUNDED[name])
    center = times(10.0, dtype)
    state = rule.center.init(center)
    assert _reach.is_bounded(rule)
    bound = bound_of(rule, center, state)
    if bound == np.inf:
        # 0.99 and 0.999 may round to 1.
        assert dtype == "bfloat16"
        assert name not in {"sgd", "chain", "none", "momentum", "schedule", "sign"}
        return
    update = jax.jit(rule.center.update)
    random = np.random.default_rng(0)
    for step in range(60):
        size = random.choice([0.0, 1e-30, 1e-3, 1.0, 5.0 / 11**0.5])
        sign = random.choice([-1.0, 1.0]) if signs == "random" else -1.0
        extra_args = {"staleness": jnp.int32(step % 3), "outside": True}
        updates, state = update(times(sign * size, dtype), state, center, **extra_args)
        center = optax.apply_updates(center, updates)
        for leaf in jax.tree.leaves(center):
            assert np.abs(np.asarray(leaf, np.float64)).max() <= bound


@pytest.mark.parametrize("name", UNBOUNDED)
def test_optimizer_that_is_not_in_the_table_has_no_bound(name):
    assert not _reach.is_bounded(shared.agn(UNBOUNDED[name]))


def test_optimizer_that_divides_by_zero_has_no_bound():
    rule = shared.agn(shared.adam(0.1, eps=0.0))
    center = times(1.0)
    assert bound_of(rule, center, rule.center.init(center)) == np.inf


def test_schedule_is_bounded_at_the_counts_to_come():
    rate = optax.piecewise_constant_schedule(1e-3, {59: 1e6})
    rule, center = shared.agn(shared.sgd(rate)), times(1.0)
    state = rule.center.init(center)
    assert bound_of(rule, center, state, messages=59) < 10
    assert bound_of(rule, center, state, messages=60) > 1000
    assert bound_of(rule, center, optax.tree.set(state, count=jnp.int32(10))) > 1000


@pytest.mark.parametrize("rule", [shared.downpour(), rules.dynsgd(), rules.diloco()])
def test_rule_with_its_own_center_optimizer_has_a_bound(rule):
    center = times(1.0)
    assert _reach.is_bounded(rule)
    assert bound_of(rule, center, rule.center.init(center)) < 1e5


def test_message_computed_from_the_center_has_no_bound():
    rule = dataclasses.replace(shared.easgd(0.5), center=shared.sgd(0.5))
    assert not _reach.is_bounded(rule)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", ["sgd", "adam", "momentum"])
def test_center_is_scanned_once_and_not_for_every_message(name, packs, monkeypatch):
    rule = shared.agn(BOUNDED[name])
    center = (PackedCenter if packs else LocalCenter)(rule, times(0.0))
    assert_applies(center, 1.0)

    def looks(*args):
        raise AssertionError("the center is looked at")

    monkeypatch.setattr(center.core.store, "check_finite", looks)
    for number in (1.0, -2.0, 1e-6, 0.0, 3.0):
        assert_applies(center, number)


@pytest.fixture
def bounds(monkeypatch):
    """Count computations of bounds, and scans of a center."""
    counts = {"bounds": 0, "looks": 0}
    bound, look = _reach.bound, Store.check_finite

    def counted(kind, call):
        def act(*args):
            counts[kind] += 1
            return call(*args)

        return act

    monkeypatch.setattr(_reach, "bound", counted("bounds", bound))
    monkeypatch.setattr(Store, "check_finite", counted("looks", look))
    return counts


@pytest.mark.parametrize("name", ["adam", "adamw", "momentum", "rmsprop", "lion"])
def test_bounds_are_recomputed_after_changes_of_the_center(name, bounds):
    """The changes are a restart and larger messages."""
    rule = shared.agn(BOUNDED[name])
    center = agn_optax.LocalCenter(rule, times(0.0))
    for number in (1.0, -0.5):
        assert_applies(center, number)
    center = agn_optax.LocalCenter.restore(rule, center.save())
    for act in (
        lambda: None,
        lambda: assert_applies(center, 100.0),
    ):
        act()
        bounds["looks"] = 0
        for _ in range(5):
            assert_applies(center, 1.0)
        assert bounds["looks"] <= 1
    bounds["looks"] = 0
    for _ in range(150):
        sessions.exchange(center, times(0.1), anchor_version=center.version, worker="a")
    assert bounds["looks"] <= 5
    assert bounds["bounds"] < 10


def test_missing_bounds_are_not_computed_for_every_message(bounds):
    """Two of these messages together are too large for the narrow center."""
    center = agn_optax.LocalCenter(shared.downpour(), times(0.0, "float16"))
    for i in range(50):
        assert_applies(center, (-1) ** i * 3e4)
    assert bounds["looks"] == 50
    assert bounds["bounds"] < 10
    for i in range(10):  # but for much smaller messages
        assert_applies(center, (-1) ** i)
    assert bounds["looks"] == 51


@pytest.mark.parametrize("mode", [None, agn_optax.center.Synchronous()])
@pytest.mark.parametrize(
    "discount", [lambda x: 1000 * x, lambda x: x + 1000], ids=["more", "another"]
)
def test_bound_is_that_of_the_discounted_message(discount, mode):
    made = optax.stateless(lambda u, _: jax.tree.map(discount, u))
    rule = dataclasses.replace(shared.downpour(), discount=made)
    center = agn_optax.LocalCenter(rule, times(0.0, "float16"), mode=mode)
    joined = [center.join(name) for name in "abcdefgh"[: 1 if mode is None else 8]]
    moved = 0
    while moved < 100:
        moved += 1
        for each in joined:
            each.submit(
                Submission(moved, times(1.0, "float16"), anchor_version=center.version)
            )
        answers = [each.collect(moved) for each in joined]
        assert np.isfinite(np.asarray(answers[0].params["a"], np.float64)).all()
        if answers[0].rejected:
            break
    assert answers[0].rejected
    assert moved * 1000 * len(joined) > 60_000


def test_scan_detects_non_finite_numbers():
    """It does so even where the maximum would skip NaN."""
    leaf = jnp.ones(100_000).at[70_000].set(jnp.nan)
    infinite = jnp.ones(3).at[1].set(jnp.inf)
    finite = [jnp.arange(3), -2 * jnp.ones(2)]
    assert list(map(float, _reach.largest_of(leaf, finite, infinite))) == [
        np.inf,
        2.0,
        np.inf,
    ]


@pytest.mark.parametrize("codec", ["cast", "feedback", "two_way"])
@pytest.mark.parametrize("shards", [1, 2])
def test_message_that_overflows_float16_is_rejected_by_all_shards(codec, shards):
    """If one leaf overflows, for example in one shard of two, no leaf is applied."""
    narrow = agn_optax.codecs.cast("float16")
    made = {
        "cast": narrow,
        "feedback": agn_optax.codecs.error_feedback(narrow),
        "two_way": agn_optax.codecs.two_way(narrow, narrow),
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
