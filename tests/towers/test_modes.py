"""Data parallel, independent and island training compared with one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, support
from helpers.traffic import traffic

import agn_optax

MODES = {"data parallel": 1, "independent": 8, "islands": 2}
INNERS = {"sgd": lambda: optax.sgd(0.1), "adam": lambda: optax.adam(0.05)}


def make(inner, **options):
    return optax.chain(
        agn_optax.all_reduce("towers", **options), problem.agn(INNERS[inner]())
    )


@pytest.mark.slow
@pytest.mark.parametrize(("inner", "dtype"), [("sgd", "bfloat16"), ("adam", "float32")])
@pytest.mark.parametrize("mode", MODES)
def test_train_step_equals_the_reference_in_every_mode(mode, inner, dtype):
    towers = agn_optax.Towers(workers=MODES[mode])
    data = problem.batches(6, dtype)
    start = problem.params(dtype)
    (params, opt_state), metrics = problem.train(towers, make(inner), data, start)
    expected, losses = problem.reference(
        problem.agn(INNERS[inner]()), data, start, towers.workers
    )
    support.assert_close(problem.of_workers(towers, params), expected[0], dtype)
    support.assert_close(
        towers.center_params(opt_state),
        jax.tree.map(lambda c: c[0], agn_optax.center_params(expected[1])),
        dtype,
    )
    assert bool(towers.towers_agree((params, opt_state)))
    of_worker = metrics["loss"].reshape(towers.workers, -1)  # means of equal shares
    support.assert_close(
        of_worker.astype(jnp.float32).mean(axis=1),
        losses["loss"].astype(jnp.float32),
        dtype,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", support.RULES)
def test_every_rule_equals_the_reference_on_islands(rule):
    towers, data = agn_optax.Towers(4, workers=2), problem.batches(4)
    own = agn_optax.exchange_every(
        optax.sgd(0.1), support.RULES[rule](), period=2, axis_name="workers"
    )
    tx = optax.chain(agn_optax.all_reduce("towers"), own)
    (params, _), _ = problem.train(towers, tx, data, problem.params())
    expected, _ = problem.reference(own, data, problem.params(), towers.workers)
    support.assert_close(problem.of_workers(towers, params), expected[0])


def test_reduced_gradient_is_that_of_the_whole_batch():
    towers = agn_optax.Towers()
    tx = agn_optax.all_reduce("towers")
    params, (batch,) = problem.params(), problem.batches(1)

    def step(state, batch):
        grads = jax.grad(problem.loss)(state, batch)
        return tx.update(grads, tx.init(state))[0], None

    reduced, _ = towers.step(step)(towers.replicate(params), towers.shard(batch))
    assert towers.towers_agree(reduced)
    whole = jax.jit(jax.grad(problem.loss))(params, batch)
    support.assert_close(towers.unreplicate(reduced), whole, tolerance=1e-6)


@pytest.mark.slow
def test_permuted_towers_give_permuted_results():
    data = problem.batches(4)
    order = np.array([3, 1, 0, 2])
    own = problem.agn(optax.sgd(0.1), period=2)
    towers = agn_optax.Towers(4, workers=4)

    def permuted(batch):
        return jax.tree.map(
            lambda x: x.reshape(4, -1, *x.shape[1:])[order].reshape(x.shape), batch
        )

    (params, state), _ = problem.train(towers, own, data, problem.params())
    (other, other_state), _ = problem.train(
        towers, own, [permuted(b) for b in data], problem.params()
    )
    support.assert_close(other, jax.tree.map(lambda x: x[order], params))
    support.assert_close(towers.center_params(other_state), towers.center_params(state))
    # The assignment of devices to towers changes nothing.
    turned = agn_optax.Towers(jax.devices()[3::-1], workers=4)
    (same, _), _ = problem.train(turned, own, data, problem.params())
    support.assert_close(same, params, tolerance=1e-6)


@pytest.mark.slow
def test_pmap_and_vmap_give_the_same_numbers():
    data = problem.batches(4)
    tx = optax.chain(
        agn_optax.all_reduce("towers"), agn_optax.agn(optax.sgd(0.1), period=2)
    )
    towers = agn_optax.Towers()
    (expected, _), _ = problem.train(towers, tx, data, problem.params())
    for transform in (jax.pmap, jax.vmap):
        step = transform(problem.train_step(tx), axis_name="towers")
        params = problem.params()
        state = jax.tree.map(lambda x: jnp.stack([x] * 8), (params, tx.init(params)))
        for batch in data:
            own = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
            state, _ = step(state, own)
        support.assert_close(state[0], expected, tolerance=1e-6)


def test_all_reduce_works_in_a_checked_shard_map():
    mesh = jax.make_mesh((8,), ("towers",), axis_types=(jax.sharding.AxisType.Auto,))
    params, (batch,) = problem.params(), problem.batches(1)
    tx = agn_optax.all_reduce("towers", algorithm="reduce_scatter")

    def reduced(params, batch, vary=True):
        if vary:
            params = jax.tree.map(
                lambda p: jax.lax.pcast(p, "towers", to="varying"), params
            )
        grads = jax.grad(problem.loss)(params, batch)
        return tx.update(grads, tx.init(params))[0]

    P = jax.P
    checked = jax.shard_map(
        reduced, mesh=mesh, in_specs=(P(), P("towers")), out_specs=P()
    )
    whole = jax.grad(problem.loss)(params, batch)
    support.assert_close(jax.jit(checked)(params, batch), whole, tolerance=1e-6)

    twice = jax.shard_map(
        lambda p, b: reduced(p, b, vary=False),
        mesh=mesh,
        in_specs=(P(), P("towers")),
        out_specs=P(),
    )
    with pytest.raises(agn_optax.errors.TreeMismatchError, match="same on every tower"):
        jax.jit(twice)(params, batch)


def test_one_device_has_no_collectives():
    towers = agn_optax.Towers(1)
    tx = optax.chain(
        agn_optax.all_reduce("towers", bucket_bytes=100),
        agn_optax.loss_scaling(
            problem.agn(optax.adam(0.1)), axis_name=("workers", "towers")
        ),
    )
    state = towers.replicate((problem.params(), tx.init(problem.params())))
    batch = towers.shard(problem.batches(1)[0])
    compiled = towers.step(problem.train_step(tx)).lower(state, batch).compile()
    assert traffic(compiled).collectives == 0
    for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        assert name not in compiled.as_text()


@pytest.mark.parametrize(("workers", "members"), [(8, 8), (2, 2), (1, None)])
def test_axis_of_one_member_has_no_collectives(workers, members):
    towers = agn_optax.Towers(workers=workers)
    tx = problem.agn(optax.sgd(0.1))
    if towers.size > workers:
        tx = optax.chain(agn_optax.all_reduce("towers"), tx)
    state = towers.replicate((problem.params(), tx.init(problem.params())))
    batch = towers.shard(problem.batches(1)[0])
    compiled = towers.step(problem.train_step(tx)).lower(state, batch).compile()
    text = compiled.as_text()
    # One collective reduces gradients of several towers, one exchanges between workers.
    expected = (towers.size > workers) + (members is not None)
    assert traffic(compiled).collectives == expected
    assert ("{{0},{1}" in text) is False  # no group of one


def test_towers_without_communication_are_rejected():
    towers = agn_optax.Towers(4)
    tx = optax.sgd(0.1)
    with pytest.raises(
        agn_optax.errors.InvalidArgumentError, match=r"never communicates over 'towers'"
    ):
        problem.train(towers, tx, problem.batches(1), problem.params())
    # Independent workers need no communication.
    problem.train(
        agn_optax.Towers(4, workers=4), tx, problem.batches(1), problem.params()
    )


@pytest.mark.parametrize("form", ["drop-in", "split", "round"])
@pytest.mark.parametrize("workers", [4, 2])
@pytest.mark.parametrize("axis_name", [None, "towers"])
def test_rule_without_the_axis_of_the_workers_is_rejected(form, workers, axis_name):
    """Each worker would train its own model, and the first would be the center."""
    towers = agn_optax.Towers(4, workers=workers)
    inner, params = optax.sgd(0.1), problem.params()
    if form == "drop-in":
        tx = agn_optax.agn(inner, 3, axis_name=axis_name)
    else:
        tx = agn_optax.phases(inner, agn_optax.rules.average(), axis_name=axis_name)
    step = tx if workers == 4 else optax.chain(agn_optax.all_reduce("towers"), tx)
    state = towers.replicate((params, step.init(params)))
    batch, train_step = problem.batches(1)[0], problem.train_step(step)

    def run():
        if form == "round":
            run = towers.step(problem.whole_round(train_step, tx.exchange))
            return run(state, towers.shard(problem.stacked([batch])))
        own, _ = towers.step(train_step)(state, towers.shard(batch))
        return towers.apply(lambda s: tx.exchange(*s))(own)

    with pytest.raises(
        agn_optax.errors.InvalidArgumentError,
        match=f"{workers} members of 'workers': each would train a model of its own",
    ):
        run()


def test_create_rejects_different_centers_of_workers():
    """The check is made once, when the state is created."""
    towers = agn_optax.Towers(4, workers=2)
    tx = problem.agn(optax.sgd(0.1))

    def make(axis, params):
        own = 1e-9 * jax.lax.axis_index(axis)
        return tx.init(jax.tree.map(lambda x: x + own, params))

    with pytest.raises(
        agn_optax.errors.InvalidArgumentError,
        match=r"different centers, .* state\.center\['hidden'\]",
    ):
        towers.create(functools.partial(make, "workers"), problem.params())


def test_step_compiles_once_and_donates_the_state():
    towers = agn_optax.Towers(4, workers=2)
    tx = make("adam")
    step = towers.step(problem.train_step(tx))
    state = towers.replicate((problem.params(), tx.init(problem.params())))
    for batch in problem.batches(3):
        sharded, before = towers.shard(batch), state
        with jax.transfer_guard("disallow"):
            state, _ = step(state, sharded)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert step.jitted._cache_size() == 1

    kept = towers.step(problem.train_step(tx), donate=False)
    kept(state, sharded)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_round_has_at_most_one_live_copy_of_the_state():
    towers = agn_optax.Towers(2, workers=2)
    tx = agn_optax.phases(
        optax.adam(0.1), agn_optax.rules.agn(optax.sgd(0.1)), axis_name="workers"
    )
    params = {"w": jnp.ones((256, 256))}

    def local(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: ((batch @ p["w"]) ** 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    run = towers.step(problem.whole_round(local, tx.exchange))
    state = towers.replicate((params, tx.init(params)))
    batches = towers.shard(np.ones((4, 3, 256), np.float32))
    memory = run.lower(state, batches).compile().memory_analysis()
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2  # of one tower
    # All outputs but a reset counter are written over the donated state.
    assert memory.alias_size_in_bytes >= own - 8
    model = 4 * 256 * 256
    assert memory.temp_size_in_bytes < 3 * model  # gradients and messages, no state


@pytest.mark.parametrize("split", [True, False])
def test_round_equals_its_steps(split):
    towers = agn_optax.Towers(4, workers=2)
    data, start = problem.batches(6), problem.params()
    rule = agn_optax.rules.diloco()
    own = agn_optax.exchange_every(optax.adam(0.05), rule, 3, axis_name="workers")
    expected, _ = problem.train(
        towers, optax.chain(agn_optax.all_reduce("towers"), own), data, start
    )
    phases = agn_optax.phases(optax.adam(0.05), rule, axis_name="workers")
    tx = optax.chain(agn_optax.all_reduce("towers"), phases if split else own)
    run = towers.step(
        problem.whole_round(problem.train_step(tx), phases.exchange if split else None)
    )
    state = towers.replicate((start, tx.init(start)))
    for first in (0, 3):
        batches = problem.stacked(data[first : first + 3])
        state, metrics = run(state, towers.shard(batches))
    assert metrics["loss"].shape == (4, 3)
    support.assert_close(state[0], expected[0])
    support.assert_close(towers.center_params(state), towers.center_params(expected))
    assert run.jitted._cache_size() == 1


def test_restored_towers_continue_bit_for_bit():
    """The run stops at the end of a round; only one replica is saved."""
    towers = agn_optax.Towers(4)
    tx = make("adam")
    data, step = problem.batches(6), towers.step(problem.train_step(make("adam")))
    through, _ = problem.train(towers, tx, data, problem.params(), step)
    stopped, _ = problem.train(towers, tx, data[:3], problem.params(), step)
    saved = jax.tree.map(np.asarray, towers.unreplicate(stopped))
    state = towers.replicate(saved)
    for batch in data[3:]:
        state, _ = step(state, towers.shard(batch))
    support.assert_identical(state, through)
