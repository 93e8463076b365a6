"""Center optimizers for messages that come one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import assert_identical

import agn_optax
from agn_optax import errors, rules


def trained(tx, grads, params=None, **extra):
    params = jnp.zeros(3) if params is None else params
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


RANDOM = np.random.default_rng(0)
GRADS = [jnp.asarray(RANDOM.normal(size=3), jnp.float32) for _ in range(12)]


def test_without_delay_it_is_nesterov():
    ours, _ = trained(agn_optax.delayed_nesterov(0.5, 0.75, delay=1), GRADS)
    theirs, _ = trained(optax.sgd(0.5, 0.75, nesterov=True), GRADS)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.125, 0.25])
def test_n_messages_act_as_their_mean_in_one_step(spread):
    """After each full buffer the momentum is that of the means; so is what has moved.

    With all momentum in the last of N messages (k = 0), the center is where Nesterov's
    is. Spread out, each message carries a part of the momentum that was there before.
    """
    tx = agn_optax.delayed_nesterov(0.5, 0.75, delay=4, spread=spread)
    params, state = trained(tx, GRADS)
    means = [sum(GRADS[i : i + 4]) / 4 for i in range(0, 12, 4)]
    sgd = optax.sgd(0.5, 0.75, nesterov=True)
    wanted, expected = trained(sgd, means)
    np.testing.assert_allclose(state.momentum, expected[0].trace, rtol=1e-5)
    if spread == 0.0:
        np.testing.assert_allclose(params, wanted, rtol=1e-5)
    assert int(state.held) == 0
    assert not state.buffer.any()


def test_it_stands_messages_one_by_one_where_momentum_does_not():
    """Four workers' messages of one quadratic: ordinary momentum overshoots, it not."""

    def distance(tx, rounds=60):
        @jax.jit
        def one(x, state, stale):
            updates, state = tx.update(stale, state, x)
            return optax.apply_updates(x, updates), state

        x = jnp.ones(1)
        state, worst = tx.init(x), 0.0
        for _ in range(rounds):
            stale = x  # all four have read the same center
            for _ in range(4):
                x, state = one(x, state, 0.4 * stale)
            worst = max(worst, abs(float(x[0])))
        return worst, abs(float(x[0]))

    plain = distance(optax.sgd(0.7, 0.9, nesterov=True))
    delayed = distance(agn_optax.delayed_nesterov(0.7, 0.9, delay=4))
    assert delayed[1] < 1e-2
    assert delayed[0] < 1.0 < plain[0]


def test_it_runs_a_center():
    rule = rules.diloco(agn_optax.delayed_nesterov(0.7, 0.9, delay=2))
    center = agn_optax.LocalCenter(rule, jnp.ones(2))
    workers = [agn_optax.Worker(center, optax.sgd(0.1), period=1) for _ in range(2)]
    loops = [worker.start() for worker in workers]
    for _ in range(4):
        for i, worker in enumerate(workers):
            params, state = loops[i]
            updates, state = worker.tx.update(params, state, params)
            loops[i] = worker.exchange(optax.apply_updates(params, updates), state)
    assert center.version == 8
    saved = center.save()
    again = agn_optax.LocalCenter.restore(rule, saved).save()
    assert_identical(again.center_state, saved.center_state)


def test_staleness_weighs_by_a_power():
    g = jnp.full(3, 8.0)
    for settings, late, wanted in [
        ({}, 3, 2.0),
        ({"exponent": 0.5}, 3, 4.0),
        ({"exponent": 0.0, "decay": 0.5}, 2, 2.0),
        ({"exponent": 1.0, "decay": 0.5}, 1, 2.0),
    ]:
        tx = agn_optax.scale_by_staleness(**settings)
        moved, _ = tx.update(g, tx.init(g), staleness=late)
        np.testing.assert_allclose(moved, np.full(3, wanted), rtol=1e-6)


def test_buffered_aggregation_is_optax_multi_steps():
    """FedBuff: the center moves once every k messages, by their mean."""
    every = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    rule = dataclasses.replace(rules.downpour(), name="fedbuff", center=every)
    center = agn_optax.LocalCenter(rule, jnp.zeros(1))
    worker = agn_optax.Worker(center, optax.sgd(1.0), period=1)
    params, state = worker.start()
    seen = []
    for step in range(4):
        updates, state = worker.tx.update(jnp.array([1.0 + step]), state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
        seen.append(float(center.pull().params[0]))
    assert seen == [0.0, -1.5, -1.5, -5.0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: agn_optax.delayed_nesterov(delay=0), "delay must be"),
        (lambda: agn_optax.delayed_nesterov(delay=4, spread=0.3), "spread must be"),
        (lambda: agn_optax.delayed_nesterov(momentum=1.5, delay=4), "momentum must be"),
        (lambda: agn_optax.scale_by_staleness(exponent=-1.0), "exponent must be"),
        (lambda: agn_optax.scale_by_staleness(decay=0.0), "decay must be"),
    ],
)
def test_wrong_settings(make, said):
    with pytest.raises(errors.InvalidArgumentError, match=said):
        make()
