"""Law 10: dtypes and masked, frozen, None, empty and scalar leaves are preserved."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared
from helpers.support import (
    DROP_INS,
    RULES,
    assert_close,
    assert_identical,
    feeds,
    gradient,
    run,
    run_worker,
    tree,
)

import agn_optax

TREES = {
    "nothing": {},
    "only None": {"a": None},
    "scalar": jnp.float32(2.0),
    "python float": 2.0,
    "all": (
        {"numpy": np.ones((2, 2), np.float32)},
        {"w": jnp.ones((0, 3)), "v": jnp.ones(2)},
        [jnp.zeros(3), None, ()],
        tree(),
    ),
}


# Every rule trains the tree with all kinds of leaves; two rules train the others.
CASES = [("all", name) for name in RULES]
CASES += itertools.product(set(TREES) - {"all"}, ["agn", "easgd_rho"])
cases = pytest.mark.parametrize(("kind", "name"), sorted(CASES))


def descend(tx, params, state):
    """Make a step to the minimum at zero."""
    updates, state = tx.update(params, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.few(3)
@cases
def test_drop_in_preserves_leaves(kind, name):
    params = TREES[kind]
    tx = DROP_INS[name](shared.sgd(0.1), 2)
    state = tx.init(params)
    assert jax.tree.structure(state.center) == jax.tree.structure(params)
    local = jax.jit(functools.partial(descend, tx))
    for _ in range(3):
        params, state = local(params, state)
    assert int(state.exchanges) == 1
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, TREES[kind])


@pytest.mark.few(3)
@cases
def test_worker_preserves_leaves(kind, name):
    center = agn_optax.LocalCenter(RULES[name](), TREES[kind])
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=2)
    params, state = worker.start()
    local = jax.jit(functools.partial(descend, worker.tx))
    for _ in range(3):
        params, state = worker.exchange(*local(params, state))
    assert center.version == 1
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, TREES[kind])


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DROP_INS)
def test_frozen_subtrees_do_not_move(name):
    params = {"body": tree(), "head": jnp.ones(3), "steps": jnp.arange(2)}
    labels = {"body": "frozen", "head": "trained", "steps": "frozen"}
    tx = optax.multi_transform(
        {"trained": DROP_INS[name](shared.sgd(0.1), 2), "frozen": optax.set_to_zero()},
        labels,
    )
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(4):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert_identical(params["body"], tree())
    assert_identical(params["steps"], jnp.arange(2))
    assert float(params["head"][0]) < 1
    center = agn_optax.center_params(state, params)
    assert jax.tree.structure(center) == jax.tree.structure(params)
    assert_identical(center["body"], tree())


@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_stays_bfloat16(rule):
    params = tree("bfloat16")
    split = agn_optax.phases(shared.sgd(0.1), RULES[rule]())

    def one_round(params):
        grads = gradient(params, tree("bfloat16", 1))
        updates, state = split.update(grads, split.init(params), params)
        return updates, split.exchange(optax.apply_updates(params, updates), state)

    leaves = jax.tree.leaves(jax.jit(one_round)(params))
    dtypes = {x.dtype for x in leaves if x.dtype != jnp.int32}
    assert dtypes == {jnp.dtype("bfloat16")}


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
def test_float32_center_accumulates_steps_below_bfloat16_precision(rule):
    """Every form of a rule keeps steps that bfloat16 parameters would lose."""
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    steps, period = 64, 2
    # A step of 2⁻⁹ vanishes next to 1 in bfloat16.
    inner = shared.sgd(2.0**-9)
    record = shared.agn(shared.sgd(2.0**-9), record_dtype="float32")
    rule = record if rule == "agn" else RULES[rule]()
    split = agn_optax.phases(inner, rule, center_dtype="float32")
    state = split.init(params)
    grads = {"w": jnp.ones(4, jnp.bfloat16)}
    for step in range(steps):
        updates, state = split.update(grads, state, params)
        assert updates["w"].dtype == jnp.bfloat16
        params = optax.apply_updates(params, updates)
        if (step + 1) % period == 0:
            params, state = split.exchange(params, state)
            assert params["w"].dtype == jnp.bfloat16
    assert state.center["w"].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(state.center_state)} <= {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }
    if rule is record:
        np.testing.assert_array_equal(state.center["w"], 1 - 2.0**-9 * steps / period)


def test_rounding_of_the_anchor_is_not_sent_as_displacement():
    """A worker without progress leaves the center unchanged."""
    center = {"w": jnp.array([1.0 + 2**-12, 3.0 - 2**-11])}
    for rule in (shared.downpour(), shared.average(), shared.agn_window()):
        split = agn_optax.phases(shared.sgd(0.0), rule, center_dtype="float32")
        params = jax.tree.map(lambda c: c.astype(jnp.bfloat16), center)
        state = split.init(params)._replace(center=center)
        updates, state = split.update(params, state, params)
        _, state = split.exchange(optax.apply_updates(params, updates), state)
        assert_identical(state.center, center)


def test_float32_local_center_works_with_bfloat16_workers():
    params = tree("bfloat16")
    center = agn_optax.LocalCenter(shared.average(), dtype="float32")
    worker = agn_optax.Worker(center, shared.sgd(0.1), period=2)
    started, state = worker.start(params, chief=True)
    assert_identical(started, params)
    targets = feeds(params, 4)
    local, _ = run_worker(worker, started, state, targets)
    assert {x.dtype for x in jax.tree.leaves(center.pull().params)} == {
        jnp.dtype("float32")
    }
    assert {x.dtype for x in jax.tree.leaves(local)} == {jnp.dtype("bfloat16")}
    expected = run(agn_optax.average(shared.sgd(0.1), 2), tree("bfloat16"), targets)[1]
    assert_close(local, expected, "bfloat16")


@pytest.mark.parametrize("rule", ["agn", "agn_window", "downpour", "diloco"])
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_params_adopt_the_rounded_values_of_a_narrower_center(rule, narrow):
    """Under jit, XLA must not skip the rounding on the way to the parameters."""
    params = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
    split = agn_optax.phases(shared.sgd(0.1), RULES[rule](), center_dtype=narrow)
    state = split.init(params)
    exchange = jax.jit(split.exchange)
    for _ in range(3):
        updates, state = split.update(params * 0.3 + 0.1, state, params)
        params = optax.apply_updates(params, updates)
        adopted, after = exchange(params, state)
        assert_identical(adopted, after.center.astype(jnp.float32))
