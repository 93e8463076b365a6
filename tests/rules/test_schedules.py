"""Learning-rate schedules of center optimizers, by exchanges and by local steps."""

import logging

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import leaf_groups, support

import agn_optax
from agn_optax import errors, rules

RATES = jnp.array([0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02])


def rate(count):
    return RATES[count]


SGD = {
    "sgd": lambda: optax.sgd(rate),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
    "in a chain": lambda: optax.chain(optax.clip(1e6), optax.sgd(rate)),
}


def center_after(tx, steps):
    """Return the center after steps on one parameter whose gradient is always 1."""
    params = jnp.zeros(())
    feeds = jnp.zeros((steps,))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(jnp.ones(()), state, params)
        return (optax.apply_updates(params, updates), state), None

    (_, state), _ = jax.jit(lambda c: jax.lax.scan(body, c, feeds))(
        (params, tx.init(params))
    )
    return float(agn_optax.center_params(state))


@pytest.mark.parametrize("name", SGD)
def test_center_moves_at_the_rate_of_the_last_local_step(name):
    tx = agn_optax.agn(SGD[name](), period=3)
    assert center_after(tx, 6) == pytest.approx(-float(RATES[2] + RATES[5]))


def test_schedule_follows_local_steps_when_the_period_changes():
    tx = agn_optax.agn(SGD["sgd"](), period=lambda exchanges: 2 + 2 * exchanges)
    assert center_after(tx, 6) == pytest.approx(-float(RATES[1] + RATES[5]))


def test_explicit_center_schedule_counts_exchanges_with_a_warning(caplog):
    tx = agn_optax.agn(optax.sgd(0.1), period=3, center=SGD["injected"]())
    with caplog.at_level(logging.WARNING, "agn_optax"):
        assert center_after(tx, 6) == pytest.approx(-float(RATES[0] + RATES[1]))
    assert "by_local_steps" in caplog.text
    caplog.clear()
    by_steps = rules.by_local_steps(SGD["sgd"]())
    tx = agn_optax.agn(optax.sgd(0.1), period=3, center=by_steps)
    assert center_after(tx, 6) == pytest.approx(-float(RATES[2] + RATES[5]))
    assert not caplog.text
    assert rules.by_local_steps(by_steps) is by_steps


def test_by_local_steps_advances_only_schedule_counters():
    """Adam's own count must stay the number of updates in its moments."""
    by_steps = rules.by_local_steps(optax.adam(rate))
    _, state = by_steps.update(
        jnp.ones(()), by_steps.init(jnp.ones(())), steps=jnp.int32(4)
    )
    counts = [int(value) for _, value in optax.tree.get_all_with_path(state, "count")]
    assert sorted(counts) == [1, 4]


def test_by_local_steps_is_equal_in_leaf_groups(monkeypatch):
    params = support.tree()
    feeds = support.feeds(params, 6)
    by_steps = rules.by_local_steps(optax.adam(rate))
    found = []
    for choose in (leaf_groups.allow, leaf_groups.forbid):
        choose(monkeypatch)
        tx = agn_optax.diloco(optax.sgd(0.1), 3, center=by_steps)
        _, _, state = support.run(tx, params, feeds)
        found.append(agn_optax.center_params(state))
    support.assert_close(*found)


def test_by_local_steps_is_rejected_without_step_count():
    rule = rules.agn(rules.by_local_steps(SGD["sgd"]()))
    with pytest.raises(errors.InvalidArgumentError, match="cannot count local steps"):
        agn_optax.LocalCenter(rule, {"w": jnp.ones(2)})
    with pytest.raises(errors.InvalidArgumentError, match="cannot count local steps"):
        agn_optax.service.serve(rule, {"w": jnp.ones(2)}, address="127.0.0.1:0")
    one = jnp.ones(())
    with pytest.raises(errors.MissingArgumentError, match="got steps=None"):
        rule.center.update(one, rule.center.init(one), one)
    with pytest.raises(errors.InvalidTypeError, match="optimizer must be"):
        rules.by_local_steps("adam")
