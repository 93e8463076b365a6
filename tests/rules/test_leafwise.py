"""Exchanges by groups of leaves: the same numbers with less memory."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import leaf_groups, support

import agn_optax

# AGN's message needs no parameters, so its updates are never kept in memory.
DROP_INS = {k: v for k, v in support.DROP_INS.items() if k != "agn"}


@pytest.fixture
def groups(monkeypatch):
    """Allow every leaf to be a group; return the groups of each traced exchange."""
    leaf_groups.allow(monkeypatch)
    return leaf_groups.recorded(monkeypatch)


def trained(tx, dtype="float32"):
    params = support.tree(dtype)
    _, params, state = support.run(tx, params, support.feeds(params, 7))
    return params, agn_optax.center_params(state)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DROP_INS)
def test_drop_in_is_equal_by_groups_and_whole(name, dtype, groups, monkeypatch):
    found = trained(DROP_INS[name](optax.adam(0.05), 3), dtype)
    assert groups == [[{0}, {1}, {2}]]
    leaf_groups.forbid(monkeypatch)
    whole = trained(DROP_INS[name](optax.adam(0.05), 3), dtype)
    support.assert_close(found, whole, dtype, tolerance=1e-6)
    assert len(groups) == 1


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", support.RULES)
def test_exchange_is_equal_by_groups_and_whole(rule, groups, monkeypatch):
    params = support.tree()

    def run():  # a new optimizer, because compiled programs are cached by it
        split = agn_optax.phases(optax.adam(0.05), support.RULES[rule]())
        return support.run_split(split, params, support.feeds(params, 7), 3)

    found = run()
    assert groups == ([[{0}, {1}, {2}]] if "easgd" in rule else [])
    leaf_groups.forbid(monkeypatch)
    support.assert_close(found, run())


def test_center_optimizer_with_a_random_key_exchanges():
    """Its state has a key, whose dtype is none of NumPy's."""
    noisy = optax.chain(
        optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1)
    )
    _, center = trained(agn_optax.diloco(optax.sgd(0.1), 3, center=noisy))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(center))


def test_injected_moving_rate_exchanges_by_groups(groups):
    tx = optax.inject_hyperparams(
        lambda moving_rate: agn_optax.easgd(optax.sgd(0.1), 3, moving_rate=moving_rate)
    )(moving_rate=0.3)
    trained(tx)
    assert groups


def test_state_that_changes_its_dtype_is_exchanged_whole(groups):
    """A loop's carry has fixed dtypes; the first update turns the rate to bfloat16."""
    adam = optax.inject_hyperparams(optax.adam)
    center = adam(optax.linear_schedule(1e-2, 1e-3, 5))
    rule = dataclasses.replace(agn_optax.rules.easgd(0.3), center=center)
    split = agn_optax.phases(optax.sgd(0.1), rule)
    params = {"a": jnp.ones(3), "b": jnp.ones(3, jnp.bfloat16)}
    jax.jit(split.exchange)(params, split.init(params))
    assert not groups


def test_several_workers_are_equal_by_groups_and_whole(groups, monkeypatch):
    params = support.tree()

    def run():
        tx = agn_optax.downpour(optax.sgd(0.1), 3, axis_name="workers")
        one = jax.vmap(
            lambda feeds: support.run(tx, params, feeds)[1],
            axis_name="workers",
            in_axes=1,
        )
        return one(support.feeds(params, 4, workers=(2,)))

    found = run()
    assert len(groups) == 1
    leaf_groups.forbid(monkeypatch)
    support.assert_close(found, run())


PLACEMENTS = {
    "whole": agn_optax.Placement(),
    "towers": agn_optax.Placement(shard_axis="towers"),
    "workers": agn_optax.Placement(shard_axis="workers"),
    "both": agn_optax.Placement(shard_axis=("workers", "towers")),
    "host": agn_optax.Placement(memory="host"),
    "shards on the host": agn_optax.Placement(shard_axis="towers", memory="host"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(name, marks=[support.needs_host] if "host" in name else [])
        for name in PLACEMENTS
    ],
)
@pytest.mark.parametrize("form", ["drop-in", "split"])
def test_elastic_exchange_on_a_mesh_is_equal_by_groups_and_whole(
    form, placement, groups, monkeypatch
):
    """The center has several placements; some leaves stay whole on the mesh."""
    towers = agn_optax.Towers(4, workers=2)
    rule = agn_optax.rules.easgd(0.3, rho=0.1)
    options = {"axis_name": "workers", "placement": PLACEMENTS[placement]}
    params = {"w": jnp.arange(15.0).reshape(5, 3), "b": jnp.ones(()), "v": jnp.ones(7)}

    def exchanged():
        if form == "split":
            tx = agn_optax.phases(optax.sgd(0.1), rule, **options)
            act = towers.apply(lambda state: tx.exchange(*state))
        else:
            tx = agn_optax.exchange_every(optax.sgd(0.1), rule, 1, **options)
            act = towers.apply(lambda s: tx.update(s[0], s[1], s[0]))
        rows = jnp.arange(4.0) // 2  # the second worker has other parameters
        params_of, state = towers.create(lambda p: (p, tx.init(p)), params)
        params_of = jax.tree.map(
            lambda x: x + rows.reshape(4, *[1] * (x.ndim - 1)), params_of
        )
        made, state = act((params_of, state))
        return made, towers.center_params(state)

    found = exchanged()
    assert groups == [[{0}, {1}, {2}]]
    leaf_groups.forbid(monkeypatch)
    support.assert_close(found, exchanged())


@pytest.mark.parametrize("momentum", [None, 0.9])  # a state with holes is not cut
def test_masked_center_optimizer_is_equal_by_groups_and_whole(
    momentum, groups, monkeypatch
):
    mask = jax.tree.map(lambda x: x.ndim > 1, support.tree())
    center = agn_optax.elementwise(optax.masked(optax.sgd(0.5, momentum), mask))
    rule = agn_optax.rules.diloco(center)

    def run():
        return trained(agn_optax.exchange_every(optax.sgd(0.1), rule, 3))

    found = run()
    assert bool(groups) == (momentum is None)
    leaf_groups.forbid(monkeypatch)
    support.assert_close(found, run(), tolerance=1e-6)


WHOLE = {
    "a norm of all leaves": optax.chain(
        optax.clip_by_global_norm(1e-3), optax.sgd(0.5)
    ),
    "the number of leaves": optax.stateless(
        lambda updates, _: jax.tree.map(
            lambda u: -u / len(jax.tree.leaves(updates)), updates
        )
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_optimizer_that_reads_several_leaves_is_exchanged_whole(name, groups):
    rule = agn_optax.rules.diloco(WHOLE[name])
    trained(agn_optax.exchange_every(optax.sgd(0.1), rule, 3))
    assert not groups


@pytest.mark.slow
@pytest.mark.parametrize("name", DROP_INS)
def test_drop_in_temporary_has_the_size_of_a_few_leaves(name):
    params = [jax.ShapeDtypeStruct((1 << 20,), jnp.float32) for _ in range(16)]
    tx = DROP_INS[name](optax.adam(1e-3), 10)

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    step = jax.jit(step, donate_argnums=(0, 1)).lower(params, state)
    memory = step.compile().memory_analysis()
    model = sum(4 * leaf.size for leaf in params)
    assert memory.temp_size_in_bytes < 0.6 * model
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024


def test_elastic_exchange_temporary_has_the_size_of_a_few_leaves():
    params = [jnp.ones(1 << 20) for _ in range(16)]
    split = agn_optax.phases(optax.sgd(0.1), agn_optax.rules.easgd(0.3))
    exchange = jax.jit(split.exchange, donate_argnums=(0, 1))
    memory = exchange.lower(params, split.init(params)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.3 * sum(leaf.nbytes for leaf in params)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_sharded_elastic_exchange_temporary_has_the_size_of_a_few_leaves(workers):
    towers = agn_optax.Towers(4, workers=workers)
    params = [jnp.ones(1 << 20) for _ in range(16)]
    axis = "towers" if workers == 1 else "workers"
    split = agn_optax.phases(
        optax.sgd(0.1),
        agn_optax.rules.easgd(0.3),
        axis_name="workers",
        placement=agn_optax.Placement(shard_axis=axis),
    )
    state = towers.create(lambda p: (p, split.init(p)), params)
    exchange = towers.apply(lambda state: split.exchange(*state))
    memory = exchange.lower(state).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.6 * sum(leaf.nbytes for leaf in params)


def test_log_says_why_an_exchange_is_whole(groups, caplog):
    rule = agn_optax.rules.diloco(WHOLE["a norm of all leaves"])
    with caplog.at_level("DEBUG", "agn_optax"):
        trained(agn_optax.exchange_every(optax.sgd(0.1), rule, 3))
    (record,) = caplog.records
    assert "by groups of leaves, because of rule 'diloco'" in record.message


def test_optimizer_that_fails_on_a_part_of_the_leaves_is_exchanged_whole(groups):

    def update(updates, params):
        del params
        if len(jax.tree.leaves(updates)) == 1:
            raise RuntimeError("on purpose")
        return updates

    rule = agn_optax.rules.diloco(agn_optax.elementwise(optax.stateless(update)))
    trained(agn_optax.exchange_every(optax.sgd(0.1), rule, 3))
    assert not groups
