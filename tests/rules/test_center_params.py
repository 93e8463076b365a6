"""Finding the center in an optimizer state; errors for none and for several."""

import logging

import jax.numpy as jnp
import optax
import pytest
from helpers.support import assert_identical

import agn_optax
from agn_optax import errors

PARAMS = {"a": jnp.ones(3), "b": jnp.zeros(2)}


def agn():
    return agn_optax.agn(optax.adam(0.1), 3)


WRAPPERS = {
    "bare": agn(),
    "chain": optax.chain(optax.clip(1.0), agn()),
    "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("agn", agn())),
    "masked": optax.masked(agn(), {"a": True, "b": True}),
    "multi_transform": optax.multi_transform({"x": agn()}, {"a": "x", "b": "x"}),
    "inject_hyperparams": optax.inject_hyperparams(agn_optax.agn)(optax.adam(0.1), 3),
    "multi_steps": optax.MultiSteps(agn(), 2),
    "apply_if_finite": optax.apply_if_finite(agn(), 3),
    "deep": optax.chain(
        optax.masked(optax.chain(optax.clip(1.0), agn()), {"a": True, "b": True})
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_center_is_found_in_wrapped_states(wrapper):
    state = WRAPPERS[wrapper].init(PARAMS)
    assert_identical(agn_optax.center_params(state), PARAMS)


@pytest.mark.parametrize(
    "state", [optax.adam(0.1).init(PARAMS), (), {}, None, jnp.ones(3)], ids=str
)
def test_state_without_center_raises(state):
    with pytest.raises(errors.CenterNotFoundError, match="no center in this"):
        agn_optax.center_params(state)


def test_several_centers_raise_and_are_named_by_their_paths():
    tx = optax.multi_transform({"x": agn(), "y": agn()}, {"a": "x", "b": "y"})
    state = tx.init(PARAMS)
    with pytest.raises(errors.AmbiguousCenterError, match="found 2") as caught:
        agn_optax.center_params(state)
    assert "['x']" in str(caught.value)
    assert "['y']" in str(caught.value)
    one = agn_optax.center_params(state.inner_states["x"], PARAMS)
    assert_identical(one, PARAMS)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_rule_at_the_end_of_its_chain_gives_no_warning(wrapper, caplog):
    with caplog.at_level(logging.WARNING, "agn_optax"):
        agn_optax.center_params((WRAPPERS[wrapper].init(PARAMS), jnp.ones(3)))
    assert not caplog.text


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(agn(), optax.scale(0.5)),
        optax.chain(
            optax.clip(1.0), optax.chain(optax.clip(1.0), agn()), optax.clip(1)
        ),
        optax.masked(optax.chain(agn(), optax.scale(0.5)), {"a": True, "b": True}),
    ],
)
def test_transformation_after_a_rule_gives_a_warning(tx, caplog):
    with caplog.at_level(logging.WARNING, "agn_optax"):
        agn_optax.center_params(tx.init(PARAMS))
    assert "put the rule last" in caplog.text
