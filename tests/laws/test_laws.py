"""The algebraic laws, over inner optimizers, periods, dtypes and trees."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support import (
    INNERS,
    RULES,
    assert_close,
    assert_identical,
    feeds,
    gradient,
    run,
    run_split,
    run_worker,
    tree,
)

import agn_optax
from agn_optax import rules

STEPS = 21

inners = pytest.mark.parametrize("inner", INNERS)
periods = pytest.mark.parametrize("period", [1, 3, 10])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@inners
@periods
@dtypes
def test_1_downpour_of_one_worker_is_its_inner_optimizer(inner, period, dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    expected, *_ = run(INNERS[inner](), params, targets)
    actual, *_ = run(agn_optax.downpour(INNERS[inner](), period), params, targets)
    assert_close(actual, expected, dtype)


@dtypes
def test_2_agn_with_period_1_and_inner_sgd_is_downpour_with_period_1(dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    expected, *_ = run(agn_optax.downpour(optax.sgd(0.1), 1), params, targets)
    actual, *_ = run(agn_optax.agn(optax.sgd(0.1), 1), params, targets)
    assert_close(actual, expected, dtype)


@inners
@periods
@dtypes
def test_3_agn_window_of_one_worker_is_lookahead(inner, period, dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    lookahead = optax.lookahead(
        INNERS[inner](), sync_period=period, slow_step_size=1 / period
    )
    both = optax.LookaheadParams(fast=params, slow=params)
    state = lookahead.init(both)

    @jax.jit
    def step(both, state, target):
        updates, state = lookahead.update(gradient(both.fast, target), state, both)
        return optax.apply_updates(both, updates), state

    tx = agn_optax.agn_window(INNERS[inner](), period)
    trajectory, _, final = run(tx, params, targets)
    for i in range(STEPS):
        both, state = step(both, state, jax.tree.map(lambda f: f[i], targets))  # noqa: B023
        assert_close(jax.tree.map(lambda t: t[i], trajectory), both.fast, dtype)  # noqa: B023
    assert_close(agn_optax.center_params(final), both.slow, dtype)


@inners
@periods
@dtypes
def test_4_dynsgd_of_fresh_messages_is_downpour(inner, period, dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    expected = run(agn_optax.downpour(INNERS[inner](), period), params, targets)
    actual = run(agn_optax.dynsgd(INNERS[inner](), period), params, targets)
    assert_identical(actual[:2], expected[:2])


@inners
@periods
@dtypes
def test_4_diloco_with_center_sgd_1_is_average(inner, period, dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    diloco = agn_optax.diloco(INNERS[inner](), period, center=optax.sgd(1.0))
    expected = run(agn_optax.average(INNERS[inner](), period), params, targets)
    assert_identical(run(diloco, params, targets)[:2], expected[:2])


def total(params, center):
    """Σ_i x_i + c, with the workers on the first dimension."""
    return jax.tree.map(lambda x, c: x.sum(0) + c, params, center)


@inners
@periods
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_5_easgd_conserves_the_sum_of_workers_and_center(inner, period, rho):
    workers = 4
    one = tree()
    params = jax.tree.map(
        lambda x: x + jnp.arange(workers).reshape(-1, *[1] * x.ndim), one
    )
    split = agn_optax.phases(
        INNERS[inner](), rules.easgd(0.2, rho=rho), axis_name="workers"
    )
    state = jax.vmap(split.init)(params)
    state = state._replace(center=jax.tree.map(lambda x: jnp.stack([x] * workers), one))
    targets = feeds(one, period, workers=(workers,))
    update = jax.jit(jax.vmap(split.update))
    exchange = jax.jit(jax.vmap(split.exchange, axis_name="workers"))
    for i in range(period):
        grads = gradient(params, jax.tree.map(lambda f: f[i], targets))  # noqa: B023
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    before = total(params, one)
    params, state = exchange(params, state)
    center = jax.tree.map(lambda c: c[0], state.center)
    assert_close(total(params, center), before)


@inners
def test_5_easgd_with_rate_0_leaves_workers_alone(inner):
    # A rate of 0 is refused as a constant; as a hyperparameter it may be turned to 0.
    params = tree()
    targets = feeds(params, STEPS)
    tx = optax.inject_hyperparams(agn_optax.easgd)(
        INNERS[inner](), period=3, moving_rate=0.5
    )
    state = tx.init(params)
    state.hyperparams["moving_rate"] = jnp.zeros_like(state.hyperparams["moving_rate"])
    actual, _, final = run(tx, params, targets, state)
    expected, *_ = run(INNERS[inner](), params, targets)
    assert_close(actual, expected)
    assert_identical(agn_optax.center_params(final), params)


@pytest.mark.parametrize("rule", RULES)
@periods
@pytest.mark.parametrize("inner", ["sgd", "adam"])
@dtypes
def test_8_drop_in_split_and_round_give_the_same_numbers(rule, period, inner, dtype):
    params = tree(dtype)
    rounds = 3
    targets = feeds(params, period * rounds)
    tx = agn_optax.exchange_every(INNERS[inner](), RULES[rule](), period)
    split = agn_optax.phases(INNERS[inner](), RULES[rule]())
    _, *dropped_in = run(tx, params, targets)

    apart = run_split(split, params, targets, period)
    assert_close(apart, tuple(dropped_in), dtype)

    def local_step(params, state, target):
        updates, state = split.update(gradient(params, target), state, params)
        return optax.apply_updates(params, updates), state, ()

    one_round = jax.jit(agn_optax.scan_round(local_step, split.exchange))
    scanned = params, split.init(params)
    for i in range(rounds):
        batches = jax.tree.map(lambda f: f[i * period : (i + 1) * period], targets)  # noqa: B023
        *scanned, _ = one_round(*scanned, batches)
    assert_close(tuple(scanned), apart, dtype)


@pytest.mark.parametrize("rule", [name for name in RULES if "easgd" not in name])
@pytest.mark.parametrize("center_dtype", ["float32", "bfloat16"])
def test_8_adoption_is_exact_in_the_split_and_round_forms(rule, center_dtype):
    params = tree("bfloat16" if center_dtype == "bfloat16" else "float32")
    split = agn_optax.phases(optax.adam(0.05), RULES[rule]())
    params, state = run_split(split, params, feeds(params, 6), period=3)
    assert_identical(params, state.center)

    def local_step(params, state, target):
        updates, state = split.update(gradient(params, target), state, params)
        return optax.apply_updates(params, updates), state, ()

    one_round = jax.jit(agn_optax.scan_round(local_step, split.exchange))
    params, state, _ = one_round(params, state, feeds(params, 3))
    assert_identical(params, state.center)


@pytest.mark.parametrize("rule", RULES)
@periods
def test_8_the_embedded_center_gives_the_numbers_of_the_split_form(rule, period):
    params = tree()
    targets = feeds(params, 2 * period)
    split = agn_optax.phases(optax.adam(0.05), RULES[rule]())
    expected, state = run_split(split, params, targets, period)
    center = agn_optax.LocalCenter(RULES[rule](), params)
    worker = agn_optax.Worker(center, optax.adam(0.05), period=period)
    actual, _ = run_worker(worker, *worker.start(), targets)
    if rule == "dynsgd":  # the anchor's own version is fresh, so nothing is scaled
        assert worker.staleness == 0
    assert_close(actual, expected, tolerance=1e-6)
    assert_close(center.pull().params, state.center, tolerance=1e-6)
