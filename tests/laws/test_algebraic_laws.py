"""The algebraic laws, over inner optimizers, periods, dtypes and trees."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared
from helpers.support import (
    INNERS,
    RULES,
    TOLERANCE,
    assert_close,
    assert_identical,
    at,
    each_inner,
    each_tree,
    feeds,
    gradient,
    run,
    run_split,
    run_worker,
    step,
    tree,
)

import agn_optax

STEPS = 21
PERIODS = [1, 3, 10]

# One program has all inner optimizers, each with its own parameters. Adam is also
# tested alone, as a rule may treat a plain optimizer differently.
Problem = collections.namedtuple("Problem", ["inner", "params"])
PROBLEMS = {
    "adam": lambda: Problem(INNERS["adam"](), tree()),
    "each": lambda: Problem(each_inner(), each_tree()),
    "bfloat16": lambda: Problem(each_inner(), each_tree(dtype="bfloat16")),
}


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]()


def at_every_period(drop_in, params, targets):
    """Run ``drop_in(period)`` with the period as an argument of one program."""

    @jax.jit
    def at(period):
        trajectory, last, state = run(drop_in(period), params, targets)
        return trajectory, last, agn_optax.center_params(state)

    return {period: at(jnp.int32(period)) for period in PERIODS}


def test_1_downpour_of_one_worker_is_its_inner_optimizer(problem):
    inner, params = problem
    targets = feeds(params, STEPS)
    expected, *_ = run(inner, params, targets)
    drop_in = functools.partial(agn_optax.downpour, inner)
    for actual, *_ in at_every_period(drop_in, params, targets).values():
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_2_agn_with_period_1_and_inner_sgd_is_downpour_with_period_1(dtype):
    params = tree(dtype)
    targets = feeds(params, STEPS)
    expected, *_ = run(agn_optax.downpour(shared.sgd(0.1), 1), params, targets)
    actual, *_ = run(agn_optax.agn(shared.sgd(0.1), 1), params, targets)
    assert_close(actual, expected)


@pytest.mark.few(1)
def test_3_agn_window_of_one_worker_is_lookahead(problem):
    inner, params = problem
    targets = feeds(params, STEPS)
    drop_in = functools.partial(agn_optax.agn_window, inner)
    for period, ours in at_every_period(drop_in, params, targets).items():
        theirs = optax.lookahead(inner, sync_period=period, slow_step_size=1 / period)

        def body(carry, target, theirs=theirs):
            both, state = carry
            updates, state = theirs.update(gradient(both.fast, target), state, both)
            both = optax.apply_updates(both, updates)
            return (both, state), both.fast

        both = optax.LookaheadParams(fast=params, slow=params)
        carry, trajectory = jax.lax.scan(body, (both, theirs.init(both)), targets)
        assert_close(ours, (trajectory, carry[0].fast, carry[0].slow))


def test_4_dynsgd_of_fresh_messages_is_downpour(problem):
    inner, params = problem
    targets = feeds(params, STEPS)
    assert_identical(
        at_every_period(functools.partial(agn_optax.dynsgd, inner), params, targets),
        at_every_period(functools.partial(agn_optax.downpour, inner), params, targets),
    )


def test_4_diloco_with_center_sgd_1_is_average(problem):
    inner, params = problem
    targets = feeds(params, STEPS)
    diloco = functools.partial(agn_optax.diloco, inner, center=shared.sgd(1.0))
    assert_identical(
        at_every_period(diloco, params, targets),
        at_every_period(functools.partial(agn_optax.average, inner), params, targets),
    )


def total(params, center):
    """Return Σ_i x_i + c; the first dimension is that of the workers."""
    return jax.tree.map(lambda x, c: np.sum(x, 0) + np.asarray(c), params, center)


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_5_easgd_conserves_the_sum_of_workers_and_center(rho):
    workers = 4
    one = each_tree()
    many = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * workers), tree)  # noqa: E731
    params = jax.tree.map(
        lambda x: x + np.arange(workers, dtype="f").reshape(-1, *[1] * x.ndim), one
    )
    split = agn_optax.phases(
        each_inner(), shared.easgd(0.2, rho=rho), axis_name="workers"
    )
    state = jax.vmap(split.init)(many(one))
    local = jax.jit(jax.vmap(functools.partial(step, split)))
    exchange = jax.jit(jax.vmap(split.exchange, axis_name="workers"))
    for period in PERIODS:
        for i in range(period):
            targets = feeds(one, PERIODS[-1], workers=(workers,))
            params, state = local(params, state, at(targets, i))
        before = total(params, at(state.center, 0))
        center = state.center
        params, state = exchange(params, state)
        assert_close(total(params, at(state.center, 0)), before)
        for name, c in state.center.items():
            assert np.min(np.abs(c - center[name])) > 1e-4


@pytest.mark.parametrize("bound", ["workers", None])
def test_workers_with_different_initial_params_are_rejected(bound):
    tx = agn_optax.agn(optax.sgd(0.1), 3, axis_name="workers")
    init = jax.vmap(tx.init, axis_name=bound)
    many = {"w": jnp.zeros((3, 2)), "b": {"c": jnp.zeros((3, 5))}}
    assert init(many).center["w"].shape == (3, 2)
    many["b"]["c"] = many["b"]["c"].at[2, 4].set(1e-20)
    with pytest.raises(
        agn_optax.errors.InvalidArgumentError,
        match=r"'workers' begin with different parameters, .* params\['b'\]\['c'\]",
    ):
        init(many)
    # Without an axis name the workers are independent, as in a sweep.
    alone = agn_optax.agn(optax.sgd(0.1), 3)
    assert jax.vmap(alone.init)(many).center["w"].shape == (3, 2)


def test_5_easgd_with_rate_0_leaves_workers_alone():
    # A rate of 0 is rejected as a constant, but an injected one may be set to 0.
    inner, params = PROBLEMS["each"]()
    targets = feeds(params, STEPS)
    tx = optax.inject_hyperparams(agn_optax.easgd)(inner, period=3, moving_rate=0.5)
    state = tx.init(params)
    state.hyperparams["moving_rate"] = jnp.zeros_like(state.hyperparams["moving_rate"])
    actual, _, final = run(tx, params, targets, state)
    expected, *_ = run(inner, params, targets)
    assert_close(actual, expected)
    assert_identical(agn_optax.center_params(final), params)


def schedule(periods):
    """Return a schedule that has one of the periods for each exchange."""
    return lambda exchanges: jnp.asarray(periods)[exchanges]


@functools.cache
def split_form(rule, inners):
    """Return the split form with one inner optimizer or with several."""
    inner = each_inner(inners) if inners else INNERS["adam"]()
    return agn_optax.phases(inner, RULES[rule]())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rule", "inners", "dtype", "periods"),
    [
        *((rule, None, "float32", PERIODS) for rule in RULES),
        *((rule, tuple(INNERS), "float32", [3, 3]) for rule in RULES),
        *((rule, ("sgd", "adam"), "bfloat16", [3, 3]) for rule in ("agn", "easgd_rho")),
    ],
)
def test_8_drop_in_split_and_round_give_the_same_numbers(rule, inners, dtype, periods):
    inner = each_inner(inners) if inners else INNERS["adam"]()
    params = each_tree(inners, dtype) if inners else tree(dtype)
    targets = feeds(params, sum(periods))
    constant = len(set(periods)) == 1
    tx = agn_optax.exchange_every(
        inner, RULES[rule](), periods[0] if constant else schedule(periods)
    )
    _, *dropped_in = run(tx, params, targets)

    split = split_form(rule, inners)
    in_halves = run_split(split, params, targets, periods)
    assert_close(in_halves, tuple(dropped_in))

    one_round = jax.jit(
        agn_optax.scan_round(lambda *args: (*step(split, *args), ()), split.exchange)
    )
    scanned, start = (params, split.init(params)), 0
    for period in periods:
        batches = jax.tree.map(lambda f: f[start : start + period], targets)  # noqa: B023
        *scanned, _ = one_round(*scanned, batches)
        start += period
    assert_close(tuple(scanned), in_halves)

    if (
        "easgd" not in rule
    ):  # easgd adopts a part of the center, the other rules all of it
        for params, state in (in_halves, scanned):
            assert_identical(params, state.center)


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
def test_8_embedded_center_gives_the_numbers_of_the_split_form(rule):
    params = tree()
    targets = feeds(params, sum(PERIODS))
    expected, state = run_split(split_form(rule, None), params, targets, PERIODS)
    center = agn_optax.LocalCenter(RULES[rule](), params)
    worker = agn_optax.Worker(
        center, shared.adam(0.05), period=lambda exchanges: (*PERIODS, 1)[exchanges]
    )
    actual, _ = run_worker(worker, *worker.start(), targets)
    assert worker.exchanges == len(PERIODS)
    if rule == "dynsgd":  # messages have no staleness, so they are not scaled
        assert worker.staleness == 0
    assert_close(actual, expected, tolerance=1e-6)
    assert_close(center.pull().params, state.center, tolerance=1e-6)


@pytest.mark.parametrize("needs_params", [True, False])
def test_8_custom_adopt_gives_the_same_numbers_in_both_forms(needs_params):
    """It adopts the midpoint of the last parameters and the center."""
    halfway = dataclasses.replace(
        shared.agn(shared.sgd(0.3)),
        adopt=lambda x, c: jax.tree.map(lambda x, c: (x + c) / 2, x, c),
        needs_params=needs_params,
    )
    params = tree()
    targets = feeds(params, 6)
    tx = agn_optax.exchange_every(shared.sgd(0.1), halfway, 3)
    split = agn_optax.phases(shared.sgd(0.1), halfway)
    _, *dropped_in = run(tx, params, targets)
    assert_close(run_split(split, params, targets, 3), tuple(dropped_in))
