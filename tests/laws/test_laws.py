"""The algebraic laws, over inner optimizers, periods, dtypes and trees."""

import dataclasses
import functools

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
PERIODS = [1, 3, 10]

inners = pytest.mark.parametrize("inner", INNERS)
periods = pytest.mark.parametrize("period", PERIODS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def at_every_period(drop_in, params, targets):
    """Runs of ``drop_in(period)``, with the period an argument of one program."""

    @jax.jit
    def at(period):
        trajectory, last, state = run(drop_in(period), params, targets)
        return trajectory, last, agn_optax.center_params(state)

    return {period: at(jnp.int32(period)) for period in PERIODS}


@inners
@dtypes
def test_1_downpour_of_one_worker_is_its_inner_optimizer(inner, dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    expected, *_ = run(INNERS[inner](), params, targets)
    drop_in = functools.partial(agn_optax.downpour, INNERS[inner]())
    for actual, *_ in at_every_period(drop_in, params, targets).values():
        assert_close(actual, expected, dtype)


@dtypes
def test_2_agn_with_period_1_and_inner_sgd_is_downpour_with_period_1(dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    expected, *_ = run(agn_optax.downpour(optax.sgd(0.1), 1), params, targets)
    actual, *_ = run(agn_optax.agn(optax.sgd(0.1), 1), params, targets)
    assert_close(actual, expected, dtype)


@inners
@dtypes
def test_3_agn_window_of_one_worker_is_lookahead(inner, dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    drop_in = functools.partial(agn_optax.agn_window, INNERS[inner]())
    for period, ours in at_every_period(drop_in, params, targets).items():
        theirs = optax.lookahead(
            INNERS[inner](), sync_period=period, slow_step_size=1 / period
        )

        def body(carry, target, theirs=theirs):
            both, state = carry
            updates, state = theirs.update(gradient(both.fast, target), state, both)
            both = optax.apply_updates(both, updates)
            return (both, state), both.fast

        both = optax.LookaheadParams(fast=params, slow=params)
        carry, trajectory = jax.lax.scan(body, (both, theirs.init(both)), targets)
        assert_close(ours, (trajectory, carry[0].fast, carry[0].slow), dtype)


@inners
@dtypes
def test_4_dynsgd_of_fresh_messages_is_downpour(inner, dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    downpour = functools.partial(agn_optax.downpour, INNERS[inner]())
    dynsgd = functools.partial(agn_optax.dynsgd, INNERS[inner]())
    assert_identical(
        at_every_period(dynsgd, params, targets),
        at_every_period(downpour, params, targets),
    )


@inners
@dtypes
def test_4_diloco_with_center_sgd_1_is_average(inner, dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    average = functools.partial(agn_optax.average, INNERS[inner]())
    diloco = functools.partial(agn_optax.diloco, INNERS[inner](), center=optax.sgd(1.0))
    assert_identical(
        at_every_period(diloco, params, targets),
        at_every_period(average, params, targets),
    )


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
@pytest.mark.parametrize(
    ("period", "inner", "dtype"),
    [
        *[(period, "adam", "float32") for period in PERIODS],
        *[(3, inner, "float32") for inner in INNERS if inner != "adam"],
        *[(3, inner, "bfloat16") for inner in ("sgd", "adam")],
    ],
)
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


@pytest.mark.parametrize("needs_params", [True, False])
def test_8_a_rule_with_an_adoption_of_its_own(needs_params):
    """Halfway to the center, from the parameters after the last local step."""
    halfway = dataclasses.replace(
        rules.agn(optax.sgd(0.3)),
        adopt=lambda x, c: jax.tree.map(lambda x, c: (x + c) / 2, x, c),
        needs_params=needs_params,
    )
    params = tree()
    targets = feeds(params, 6)
    tx = agn_optax.exchange_every(optax.sgd(0.1), halfway, 3)
    split = agn_optax.phases(optax.sgd(0.1), halfway)
    _, *dropped_in = run(tx, params, targets)
    assert_close(run_split(split, params, targets, 3), tuple(dropped_in))
