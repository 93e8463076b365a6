"""Law 6: vmap, shard_map, pmap and serial workers give the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared
from helpers.support import (
    DROP_INS,
    RULES,
    assert_close,
    assert_identical,
    feeds,
    gradient,
    run_worker,
    tree,
)

import agn_optax

WORKERS = 4
STEPS = 7
PERIOD = 3


def stacked(one):
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), one)


@functools.cache
def make(name, inner=None):
    """Return one cached object for all tests, which then share compiled programs."""
    inner = inner or shared.adam(0.05)
    extra = {"num_workers": WORKERS} if name.startswith("easgd") else {}
    return DROP_INS[name](inner, PERIOD, axis_name="workers", **extra)


def train(tx):
    """Return the loop of one worker, to be mapped over workers in any way."""

    def body(carry, feed):
        params, state = carry
        updates, state = tx.update(gradient(params, feed), state, params)
        return (optax.apply_updates(params, updates), state), ()

    def run(params, targets):
        (params, state), _ = jax.lax.scan(body, (params, tx.init(params)), targets)
        return params, agn_optax.center_params(state)

    return run


@functools.cache
def with_vmap(tx):
    return jax.jit(jax.vmap(train(tx), in_axes=(0, 1), axis_name="workers"))


@functools.cache
def with_shard_map(tx):
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    P = jax.sharding.PartitionSpec

    def one(params, targets):
        params = jax.tree.map(lambda x: x[0], params)
        targets = jax.tree.map(lambda x: x[:, 0], targets)
        return jax.tree.map(lambda x: x[None], train(tx)(params, targets))

    return jax.jit(
        jax.shard_map(
            one,
            mesh=mesh,
            in_specs=(P("workers"), P(None, "workers")),
            out_specs=P("workers"),
        )
    )


def with_pmap(tx):
    devices = jax.devices()[:WORKERS]
    return jax.pmap(train(tx), axis_name="workers", in_axes=(0, 1), devices=devices)


@pytest.mark.parametrize("name", DROP_INS)
def test_vmap_shard_map_and_pmap_agree(name):
    params = stacked(tree())
    targets = feeds(tree(), STEPS, workers=(WORKERS,))
    expected = with_vmap(make(name))(params, targets)
    assert_close(with_shard_map(make(name))(params, targets), expected)
    assert_close(with_pmap(make(name))(params, targets), expected)


@pytest.mark.parametrize("name", DROP_INS)
def test_all_workers_have_the_same_center(name):
    params = stacked(tree())
    targets = feeds(tree(), STEPS, workers=(WORKERS,))
    _, center = with_shard_map(make(name))(params, targets)
    for leaf in jax.tree.leaves(center):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


@pytest.mark.parametrize("name", DROP_INS)
def test_replicated_center_stays_replicated_in_a_checked_shard_map(name):
    """The state is an input of the mesh: parameters per worker, one center."""
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    P = jax.sharding.PartitionSpec
    tx = make(name)
    one = tree()
    targets = feeds(one, STEPS, workers=(WORKERS,))
    state = tx.init(one)
    spec = agn_optax.ExchangeState(
        local=P("workers"), center=P(), center_state=P(), exchanges=P()
    )

    def body(carry, feed):
        params, state = carry
        updates, state = tx.update(gradient(params, feed), state, params)
        return (optax.apply_updates(params, updates), state), ()

    def one_worker(params, state, targets):
        first = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
        carry = first(params), state._replace(local=first(state.local))
        (params, state), _ = jax.lax.scan(body, carry, first(targets))
        return jax.tree.map(lambda x: x[None], params), state.center

    run = jax.jit(
        jax.shard_map(
            one_worker,
            mesh=mesh,
            in_specs=(P("workers"), spec, P("workers")),
            out_specs=(P("workers"), P()),
        )
    )
    per_worker = jax.tree.map(lambda f: np.swapaxes(f, 0, 1), targets)
    params, moved = run(
        stacked(one), state._replace(local=stacked(state.local)), per_worker
    )
    expected, centers = with_vmap(make(name))(stacked(one), targets)
    assert_close(params, expected)
    assert_close(moved, jax.tree.map(lambda c: c[0], centers))


@pytest.mark.parametrize("name", DROP_INS)
def test_permuting_the_workers_permutes_the_results(name):
    params = stacked(tree())
    targets = feeds(tree(), STEPS, workers=(WORKERS,))
    order = jnp.array([2, 0, 3, 1])
    permuted = jax.tree.map(lambda f: f[:, order], targets)
    params_there, center_there = with_vmap(make(name))(params, permuted)
    params_here, center_here = with_vmap(make(name))(params, targets)
    assert_close(params_there, jax.tree.map(lambda x: x[order], params_here))
    assert_close(center_there, center_here)


@pytest.mark.parametrize("name", ["agn", "agn_window", "downpour"])
def test_mesh_equals_serial_exchanges_at_one_version(name):
    """Sum rules with a linear center optimizer ignore order and batching."""
    rule = shared.agn(shared.sgd(0.1)) if name == "agn" else RULES[name]()
    one = tree()
    targets = feeds(one, PERIOD, workers=(WORKERS,))
    center = agn_optax.LocalCenter(rule, one)
    workers = [
        agn_optax.Worker(center, shared.sgd(0.1), period=PERIOD) for _ in range(WORKERS)
    ]
    started = [worker.start() for worker in workers]  # all at version 0
    for i, worker in enumerate(workers):
        mine = jax.tree.map(lambda f: f[:, i], targets)  # noqa: B023
        run_worker(worker, *started[i], mine)
        assert worker.staleness == i
    _, expected = with_vmap(make(name, shared.sgd(0.1)))(stacked(one), targets)
    assert_close(center.pull().params, jax.tree.map(lambda c: c[0], expected))


def test_mesh_sums_messages_in_the_center_dtype():
    """A sum in the workers' bfloat16 would lose the small messages."""
    rule = shared.agn(shared.sgd(1.0))
    split = agn_optax.phases(
        shared.sgd(0.1), rule, axis_name="workers", center_dtype="float32"
    )

    @jax.jit
    @functools.partial(jax.vmap, axis_name="workers")
    def exchanged(grads):
        params = jnp.zeros((), grads.dtype)
        _, state = split.update(grads, split.init(params), params)
        return split.exchange(params, state)[1].center

    grads = jnp.array([1, 2**-9, 2**-9, 2**-9], jnp.bfloat16)
    np.testing.assert_array_equal(exchanged(grads), -(1 + 3 * 2**-9))


def test_average_is_the_mean_of_the_workers():
    one = {"w": jnp.arange(3.0)}
    targets = feeds(one, PERIOD, workers=(WORKERS,))
    params, center = with_vmap(make("average", shared.sgd(0.1)))(stacked(one), targets)
    alone = shared.sgd(0.1)
    ends = []
    for i in range(WORKERS):
        x, state = one, alone.init(one)
        for t in range(PERIOD):
            feed = jax.tree.map(lambda f: f[t, i], targets)  # noqa: B023
            updates, state = alone.update(gradient(x, feed), state, x)
            x = optax.apply_updates(x, updates)
        ends.append(x["w"])
    np.testing.assert_allclose(center["w"][0], np.mean(ends, axis=0), rtol=1e-6)
    assert_close(params, center, tolerance=1e-6)


def test_eamsgd_is_easgd_with_a_nesterov_inner_optimizer():
    """v <- μv - ηg(x + μv), x <- x + v, with the elastic exchange of EASGD."""
    rate, lr, momentum, workers = 0.2, 0.05, 0.9, 2
    inner = shared.sgd(lr, momentum, nesterov=True)
    tx = agn_optax.easgd(inner, PERIOD, moving_rate=rate, axis_name="workers")
    one = {"w": jnp.array([1.0, -2.0])}
    params = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), one)
    state = jax.vmap(tx.init)(jax.tree.map(lambda x: jnp.stack([x] * 2), one))
    step = jax.jit(jax.vmap(tx.update, axis_name="workers"))

    x = np.asarray(params["w"], np.float64)
    trace, center = np.zeros_like(x), np.asarray(one["w"], np.float64)
    rng = np.random.default_rng(0)
    for t in range(2 * PERIOD):
        grads = rng.normal(size=x.shape)
        updates, state = step({"w": jnp.asarray(grads, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        trace = grads + momentum * trace
        x = x - lr * (grads + momentum * trace)
        if (t + 1) % PERIOD == 0:
            pull = rate * (x - center)
            x, center = x - pull, center + pull.sum(0)
    np.testing.assert_allclose(params["w"], x, rtol=1e-5)
    for i in range(workers):
        np.testing.assert_allclose(state.center["w"][i], center, rtol=1e-5)


def test_axis_of_one_worker_equals_no_axis():
    params = tree()
    targets = feeds(params, STEPS, workers=(1,))
    tx = agn_optax.agn(shared.adam(0.05), PERIOD, axis_name="workers")
    many = jax.jit(jax.vmap(train(tx), in_axes=(0, 1), axis_name="workers"))(
        jax.tree.map(lambda x: x[None], params), targets
    )
    tx = agn_optax.agn(shared.adam(0.05), PERIOD)
    alone = jax.jit(train(tx))(params, jax.tree.map(lambda f: f[:, 0], targets))
    assert_identical(jax.tree.map(lambda x: x[0], many), alone)
