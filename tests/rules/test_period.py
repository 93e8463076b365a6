"""Periods that are schedules: warm-ups and rounds of changing length."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.support import assert_close, assert_identical, feeds, run, run_worker, tree

import agn_optax
from agn_optax import rules

SCHEDULES = {
    "constant": (3, [3, 6, 9, 12]),
    "local at first": (lambda exchanges: jnp.where(exchanges < 1, 8, 3), [8, 11]),
    "often at first": (
        lambda exchanges: jnp.where(exchanges < 3, 1, 4),
        [1, 2, 3, 7, 11],
    ),
    "growing": (lambda exchanges: 1 + exchanges, [1, 3, 6, 10]),
    "jnp": (lambda exchanges: jnp.where(exchanges < 2, 2, 5), [2, 4, 9]),
}


def between(targets, start, stop):
    return jax.tree.map(lambda f: f[start:stop], targets)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_drop_in_and_worker_exchange_at_the_same_steps(name):
    period, expected = SCHEDULES[name]
    params = tree()
    targets = feeds(params, 12)

    tx = agn_optax.diloco(optax.sgd(0.1), period)
    state, x, seen = tx.init(params), params, []
    for step in range(1, 13):
        _, x, after = run(tx, x, between(targets, step - 1, step), state)
        if int(after.exchanges) > int(state.exchanges):
            seen.append(step)
        state = after
    assert seen == expected

    center = agn_optax.LocalCenter(rules.diloco(), params)
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=period)
    y, local = worker.start()
    for i, (start, stop) in enumerate(itertools.pairwise([0, *expected])):
        y, local = run_worker(worker, y, local, between(targets, start, stop))
        assert worker.exchanges == i + 1
    y, local = run_worker(worker, y, local, between(targets, expected[-1], 12))
    assert worker.exchanges == len(expected)
    assert_close(y, x)
    assert_close(center.pull().params, agn_optax.center_params(state))


def test_flushed_window_is_divided_by_its_own_steps():
    center = agn_optax.LocalCenter(rules.agn(optax.sgd(1.0)), jnp.zeros(2))
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=10)
    params, state = worker.start()
    for gradient in (1.0, 2.0, 6.0):
        updates, state = worker.tx.update(jnp.full(2, gradient), state, params)
        params, state = worker.exchange(optax.apply_updates(params, updates), state)
    assert center.version == 0
    params, state = worker.flush(params, state)
    np.testing.assert_allclose(center.pull().params, -3.0)  # the mean, not 9 / 10
    assert_identical(params, center.pull().params)
    assert worker.flush(params, state)[0] is params  # nothing is left to send
    assert center.version == 1


def test_invalid_schedule_value_raises_before_the_exchange():
    center = agn_optax.LocalCenter(rules.downpour(), jnp.zeros(2))
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=lambda k: 1 - k)
    params, state = worker.start()
    updates, state = worker.tx.update(jnp.ones(2), state, params)
    params = optax.apply_updates(params, updates)
    with pytest.raises(agn_optax.errors.InvalidArgumentError, match=r"period\(1\)"):
        worker.exchange(params, state)
    assert center.version == 0
    assert not params.is_deleted()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_work_under_strict_promotion(name):
    period, expected = SCHEDULES[name]
    tx = agn_optax.downpour(optax.sgd(0.1), period)
    params = jnp.ones(2)
    with jax.numpy_dtype_promotion("strict"):
        _, _, state = run(tx, params, np.zeros((12, 2), np.float32))
    assert int(state.exchanges) == len(expected)


def test_fractional_period_is_rounded_up():
    tx = agn_optax.downpour(optax.sgd(0.1), lambda k: jnp.asarray(1.0 + 1.5 * k))
    state, exchanges = tx.init(jnp.ones(2)), []
    for _ in range(14):
        _, state = tx.update(jnp.zeros(2), state, jnp.ones(2))
        exchanges.append(int(state.exchanges))
    # The periods are 1, 2.5, 4 and 5.5.
    assert exchanges == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4]
