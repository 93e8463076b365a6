"""The numbers of a synchronous round of several messages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared
from helpers.support import (
    RULES,
    assert_close,
    assert_identical,
    submissions,
    tree,
)

import agn_optax
from agn_optax.center import Store, Submission, Synchronous

WORKERS = 3


def values(dtype, seed, like=None):
    return jax.tree.map(
        lambda x: (
            np.random.default_rng(seed).uniform(1.0, 2.0, x.shape).astype(x.dtype)
        ),
        tree(dtype) if like is None else like,
    )


def store(rule, center):
    return Store(rule, center, None, None)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rule", RULES)
def test_round_equals_an_exchange_of_the_same_workers_on_a_mesh(rule, dtype):
    made, center = RULES[rule](), values(dtype, seed=9)
    split = agn_optax.phases(shared.sgd(0.1), made, axis_name="workers")
    params = [values(dtype, seed) for seed in range(WORKERS)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *params)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="workers")
    def contributes(params):
        state = split.init(center)
        _, state = split.update(jax.tree.map(lambda x: x / 8, params), state, params)
        return split.exchange(params, state)[1]

    expected = contributes(stacked)

    @jax.jit
    def sends(params):
        state = split.init(center)
        _, state = split.update(jax.tree.map(lambda x: x / 8, params), state, params)
        return made.contribution(
            state.local.record, params, center, state.local.local_steps
        )

    kept = store(made, center)
    sent = [sends(each) for each in params]
    kept.apply(submissions(*sent), [0] * WORKERS, [1.0] * WORKERS)
    first = jax.tree.map(lambda c: c[0], expected.center)
    # A mesh sums messages in the center's dtype.
    ulp = float(jnp.finfo(dtype).eps)
    assert_close(kept.current.params, first, tolerance=3 * WORKERS * ulp)


@pytest.mark.parametrize("rule", ["average", "downpour"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_round_is_rounded_once(rule, dtype):
    with jax.enable_x64(True):
        center = {"w": np.zeros(1000, jnp.dtype(dtype))}
        sent = [values(dtype, seed, center) for seed in range(WORKERS)]
        kept = store(RULES[rule](), center)
        kept.apply(submissions(*sent), [0] * WORKERS, [1.0] * WORKERS)
        total = sum(np.asarray(each["w"], np.float64) for each in sent)
        exact = -total / (WORKERS if rule == "average" else 1)
        found = np.asarray(kept.current.params["w"])
        assert found.dtype == dtype
        if dtype in ("bfloat16", "float16"):
            np.testing.assert_array_equal(found, exact.astype(found.dtype))
        else:
            np.testing.assert_allclose(found, exact, rtol=2 * np.finfo(dtype).eps)


@pytest.mark.parametrize("combine", ["sum", "mean"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1 / 3), (0.5, 0.25)])
def test_messages_are_weighted(combine, weights):
    rule = dataclasses.replace(shared.downpour(), combine=combine)
    kept = store(rule, np.zeros(2, np.float32))
    sent = [np.array([1.0, 3.0], np.float32), np.array([-6.0, 12.0], np.float32)]
    kept.apply(submissions(*sent), [0, 0], weights)
    total = weights[0] * sent[0] + weights[1] * sent[1]
    expected = -total / (2 if combine == "mean" else 1)
    np.testing.assert_allclose(kept.current.params, expected, rtol=1e-6)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("late", ["next", "weighted"])
@pytest.mark.parametrize("rule", ["downpour", "dynsgd", "by staleness"])
def test_late_message_is_scaled_equally_alone_and_in_a_round(rule, late, alone):
    """The rule or the mode scales it by its own staleness, but not both."""
    by_staleness = optax.chain(agn_optax.scale_by_staleness(), shared.sgd(1.0))
    made = {
        **{name: RULES[name]() for name in ("downpour", "dynsgd")},
        "by staleness": dataclasses.replace(shared.downpour(), center=by_staleness),
    }[rule]
    mode = Synchronous(quorum=1, late=late)
    center = agn_optax.LocalCenter(made, np.zeros(1, np.float32), mode=mode)
    sessions = {worker: center.join(worker) for worker in ("fast", "slow")}

    def settles(*sent):
        """Exchange for some workers, with messages of 1; return the displacement."""
        before = center.pull()
        with center.core.atomically():  # so that the round has all these messages
            center.core.ledger.mode = dataclasses.replace(mode, quorum=len(sent))
        for worker, sequence, anchor in sent:
            message = np.ones(1, np.float32)
            sessions[worker].submit(Submission(sequence, message, anchor))
        for worker, sequence, _ in sent:
            assert sessions[worker].collect(sequence).version == before.version + 1
        return float(before.params[0] - center.pull().params[0])

    for version in range(3):
        assert settles(("fast", version + 1, version)) == 1.0
    counts = 1 / 4 if rule == "dynsgd" or late == "weighted" else 1.0
    if alone:
        assert settles(("slow", 1, 0)) == counts
    else:
        assert settles(("slow", 1, 0), ("fast", 4, 3)) == 1.0 + counts


def test_round_of_one_message_equals_a_single_message():
    for rule in RULES.values():
        center = values("float32", seed=9)
        kept, other = (store(rule(), center) for _ in range(2))
        sent = values("float32", seed=1)
        kept.apply(submissions(sent), [0], [1.0])
        other.apply(submissions(sent), [0])
        assert_identical(kept.current.params, other.current.params)
