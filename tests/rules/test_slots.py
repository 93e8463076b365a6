"""Slots: the per-parameter arrays of a state under unique names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.support import assert_identical

import agn_optax
from agn_optax import codecs, errors
from agn_optax.round import ExchangeState

PARAMS = {"a": jnp.ones((2, 3)), "b": {"c": jnp.zeros(2)}}
MASK = {"a": True, "b": False}  # a prefix of the parameters
LABELS = {"a": "x", "b": "y"}
MASKED = optax.MaskedNode()


def agn(**settings):
    return agn_optax.agn(optax.adam(0.1), 3, center=optax.sgd(0.1, 0.9), **settings)


OF_AGN = ["inner/mu", "inner/nu", "record/sum", "center", "center_optimizer/trace"]
WRAPPERS = {
    "bare": (agn(), OF_AGN),
    "chain": (optax.chain(optax.clip(1.0), agn()), OF_AGN),
    "named_chain": (
        optax.named_chain(("clip", optax.clip(1.0)), ("rule", agn())),
        [f"rule/{name}" for name in OF_AGN],
    ),
    "masked": (optax.masked(agn(), MASK), OF_AGN),
    "multi_transform": (
        optax.multi_transform({"x": agn(), "y": optax.sgd(0.1, 0.9)}, LABELS),
        [*(f"x/{name}" for name in OF_AGN), "y/trace"],
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(agn_optax.agn)(
            optax.adam(0.1), 3, center=optax.sgd(0.1, 0.9)
        ),
        OF_AGN,
    ),
    "multi_steps": (optax.MultiSteps(agn(), 2), [*OF_AGN, "acc_grads"]),
    "apply_if_finite": (optax.apply_if_finite(agn(), 3), OF_AGN),
    "loss_scaling": (agn_optax.loss_scaling(agn()), OF_AGN),
    "delayed": (
        optax.chain(agn_optax.all_reduce("towers", delay=1), agn()),
        ["in_flight", *OF_AGN],
    ),
    "easgd": (
        agn_optax.easgd(optax.sgd(0.1, 0.9), 3, moving_rate=0.1, rho=0.1),
        ["inner/trace", "anchor", "center"],
    ),
    "codec": (
        agn_optax.downpour(
            optax.sgd(0.1), 3, codec=codecs.error_feedback(codecs.quantize(8))
        ),
        ["codec/residual", "center"],
    ),
    "plain": (optax.adam(0.1), ["mu", "nu"]),
    "nothing": (optax.sgd(0.1), []),
    "injected": (optax.inject_hyperparams(optax.adam)(0.1), ["mu", "nu"]),
    "twice": (
        optax.chain(optax.trace(0.9), optax.adam(0.1), optax.trace(0.5)),
        ["[0].trace", "mu", "nu", "[2].trace"],
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_slot_names_of_wrapped_optimizers(name):
    tx, expected = WRAPPERS[name]
    state = tx.init(PARAMS)
    found = agn_optax.slots(state, PARAMS)
    assert list(found) == expected
    # Every array of the state is in a slot, except scalars.
    ours = [leaf for tree in found.values() for leaf in jax.tree.leaves(tree)]
    others = {id(leaf) for leaf in jax.tree.leaves(state)} - {id(x) for x in ours}
    for leaf in jax.tree.leaves(state):
        assert id(leaf) not in others or jnp.ndim(leaf) == 0


def test_slot_values_are_those_of_the_state():
    tx = agn()
    grads = jax.tree.map(lambda x: jnp.full_like(x, 2.0), PARAMS)
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = tx.update(grads, state, PARAMS)
    found = agn_optax.slots(state)  # the center gives the structure
    assert_identical(found["record/sum"], jax.tree.map(lambda g: 2 * g, grads))
    np.testing.assert_allclose(found["inner/mu"]["a"], 2.0 * (0.1 + 0.1 * 0.9))
    assert_identical(found["center"], agn_optax.center_params(state))
    assert not np.any(found["center_optimizer/trace"]["a"])  # the center has not moved
    _, state = tx.update(grads, state, PARAMS)
    found = agn_optax.slots(state)
    np.testing.assert_allclose(found["center_optimizer/trace"]["a"], 2.0, rtol=1e-6)
    assert not np.any(found["record/sum"]["a"])


def test_masked_leaves_are_masked_nodes_in_slots():
    state = WRAPPERS["multi_transform"][0].init(PARAMS)
    found = agn_optax.slots(state, PARAMS)
    assert found["y/trace"]["a"] == MASKED
    assert found["x/inner/mu"]["b"] == MASKED
    assert found["x/center"]["b"] == MASKED
    with pytest.raises(errors.MissingArgumentError, match=r"no tree that could have"):
        agn_optax.slots(state)


def test_slots_of_a_worker():
    center = agn_optax.LocalCenter(agn_optax.rules.agn(optax.sgd(0.1)), PARAMS)
    _, state = agn_optax.Worker(center, optax.adam(0.1), period=3).start()
    assert list(agn_optax.slots(state)) == ["inner/mu", "inner/nu", "record/sum"]
    center = agn_optax.LocalCenter(agn_optax.rules.downpour(), PARAMS)
    params, state = agn_optax.Worker(center, optax.adam(0.1), period=3).start()
    assert list(agn_optax.slots(state, params)) == ["inner/mu", "inner/nu"]
    with pytest.raises(errors.MissingArgumentError, match=r"slots\(opt_state, params"):
        agn_optax.slots(state)


def test_slots_of_towers():
    towers = agn_optax.Towers()
    state = towers.replicate(agn().init(PARAMS))
    assert agn_optax.slots(state)["center"]["a"].shape == (8, 2, 3)
    assert list(agn_optax.slots(towers.unreplicate(state), PARAMS)) == OF_AGN


def test_slots_of_a_sharded_center():
    towers = agn_optax.Towers(workers=len(jax.devices()))
    placement = agn_optax.Placement(shard_axis="workers")
    tx = agn(axis_name="workers", placement=placement)
    params = {"a": jnp.ones((4, 6)), "b": {"c": jnp.zeros(2)}}
    state = towers.create(tx.init, params)
    found = agn_optax.slots(state)
    assert list(found) == OF_AGN
    assert found["inner/mu"]["a"].shape == (8, 4, 6)
    assert found["center"]["a"].shape == (8, 1, 3)  # one shard of each leaf
    assert found["center_optimizer/trace"]["a"].shape == (8, 1, 3)


class TestParametersThatAreOneArray:
    """With a single array as parameters, any array of the state could be a slot."""

    @pytest.mark.parametrize("params", [jnp.ones(3), jnp.ones(()), 1.0])
    def test_counters_are_not_slots(self, params):
        tx = optax.chain(optax.add_noise(0.1, 0.1, 0), agn())
        assert list(agn_optax.slots(tx.init(params))) == OF_AGN

    def test_scalars_that_may_be_slots_are_listed(self):
        state = optax.inject_hyperparams(optax.trace)(0.9).init(1.0)
        assert list(agn_optax.slots(state, 1.0)) == ["hyperparams/decay", "trace"]


def test_slot_names_are_unique():
    labelled = {"x": agn(), "0": optax.trace(0.9)}
    tx = optax.chain(
        optax.multi_transform(labelled, {"a": "x", "b": "0"}),
        optax.trace(0.9),
        optax.trace(0.9),
        optax.named_chain(("2", optax.trace(0.9))),
    )
    state = tx.init(PARAMS)
    found = agn_optax.slots(state, PARAMS)
    slots = len([x for x in jax.tree.leaves(state) if jnp.ndim(x)])
    assert slots == sum(len(jax.tree.leaves(tree)) for tree in found.values())


def test_slots_reject_params_of_another_model():
    with pytest.raises(errors.TreeMismatchError, match="have the same tree"):
        agn_optax.slots(agn().init(PARAMS), {"w": jnp.ones(3)})


def test_slots_work_under_jit():
    state = agn().init(PARAMS)
    total = jax.jit(lambda state: agn_optax.slots(state)["center"]["a"].sum())(state)
    assert total == 6.0
    assert isinstance(state, ExchangeState)
