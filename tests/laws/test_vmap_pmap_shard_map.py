"""Law 6: vmap, pmap, shard_map and exchanges one by one give the same numbers."""

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


def targets_of_worker(targets, worker):
    return jax.tree.map(lambda t: t[:, worker], targets)


def stacked(params):
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params)


@functools.cache
def make_tx(name, inner=None):
    """Return an optimizer, cached so that tests share compiled programs."""
    inner = inner or shared.adam(0.05)
    extra = {"num_workers": WORKERS} if name.startswith("easgd") else {}
    return DROP_INS[name](inner, PERIOD, axis_name="workers", **extra)


def make_loop(tx):
    """Return the training loop of one worker, to be mapped over workers."""

    def body(carry, target):
        params, state = carry
        updates, state = tx.update(gradient(params, target), state, params)
        return (optax.apply_updates(params, updates), state), ()

    def run(params, targets):
        (params, state), _ = jax.lax.scan(body, (params, tx.init(params)), targets)
        return params, agn_optax.center_params(state)

    return run


@functools.cache
def with_vmap(tx):
    return jax.jit(jax.vmap(make_loop(tx), in_axes=(0, 1), axis_name="workers"))


@functools.cache
def with_shard_map(tx):
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    P = jax.sharding.PartitionSpec

    def one_worker(params, targets):
        params = jax.tree.map(lambda x: x[0], params)
        targets = jax.tree.map(lambda x: x[:, 0], targets)
        return jax.tree.map(lambda x: x[None], make_loop(tx)(params, targets))

    return jax.jit(
        jax.shard_map(
            one_worker,
            mesh=mesh,
            in_specs=(P("workers"), P(None, "workers")),
            out_specs=P("workers"),
        )
    )


def with_pmap(tx):
    devices = jax.devices()[:WORKERS]
    return jax.pmap(make_loop(tx), axis_name="workers", in_axes=(0, 1), devices=devices)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", DROP_INS)
def test_vmap_shard_map_and_pmap_agree(name):
    params = stacked(tree())
    targets = feeds(tree(), STEPS, workers=(WORKERS,))
    expected = with_vmap(make_tx(name))(params, targets)
    assert_close(with_shard_map(make_tx(name))(params, targets), expected)
    assert_close(with_pmap(make_tx(name))(params, targets), expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DROP_INS)
def test_all_workers_have_the_same_center(name):
    params = stacked(tree())
    targets = feeds(tree(), STEPS, workers=(WORKERS,))
    _, center = with_shard_map(make_tx(name))(params, targets)
    for leaf in jax.tree.leaves(center):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DROP_INS)
def test_replicated_center_stays_replicated_in_shard_map_with_check_vma(name):
    """State enters shard_map with local parts per worker and one replicated center."""
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    P = jax.sharding.PartitionSpec
    tx = make_tx(name)
    params = tree()
    targets = feeds(params, STEPS, workers=(WORKERS,))
    state = tx.init(params)
    spec = agn_optax.ExchangeState(
        local=P("workers"), center=P(), center_state=P(), exchanges=P()
    )

    def body(carry, target):
        params, state = carry
        updates, state = tx.update(gradient(params, target), state, params)
        return (optax.apply_updates(params, updates), state), ()

    def row(stacked):
        return jax.tree.map(lambda x: x[0], stacked)

    def one_worker(params, state, targets):
        carry = row(params), state._replace(local=row(state.local))
        (params, state), _ = jax.lax.scan(body, carry, row(targets))
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
    trained, center = run(
        stacked(params), state._replace(local=stacked(state.local)), per_worker
    )
    expected, centers = with_vmap(make_tx(name))(stacked(params), targets)
    assert_close(trained, expected)
    assert_close(center, row(centers))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DROP_INS)
def test_permuting_the_workers_permutes_the_results(name):
    params = stacked(tree())
    targets = feeds(tree(), STEPS, workers=(WORKERS,))
    order = jnp.array([2, 0, 3, 1])
    trained, center = with_vmap(make_tx(name))(params, targets)
    permuted_targets = jax.tree.map(lambda t: t[:, order], targets)
    permuted, same_center = with_vmap(make_tx(name))(params, permuted_targets)
    assert_close(permuted, jax.tree.map(lambda x: x[order], trained))
    assert_close(same_center, center)


@pytest.mark.parametrize("name", ["agn", "agn_window", "downpour"])
def test_mesh_equals_exchanges_one_by_one_from_one_anchor(name):
    """A rule that sums, with SGD, may add messages one by one or all at once."""
    rule = shared.agn(shared.sgd(0.1)) if name == "agn" else RULES[name]()
    params = tree()
    targets = feeds(params, PERIOD, workers=(WORKERS,))
    center = agn_optax.LocalCenter(rule, params)
    workers = [
        agn_optax.Worker(center, shared.sgd(0.1), period=PERIOD) for _ in range(WORKERS)
    ]
    loops = [worker.start() for worker in workers]  # all at version 0
    for i, worker in enumerate(workers):
        run_worker(worker, *loops[i], targets_of_worker(targets, i))
        assert worker.staleness == i
    _, expected = with_vmap(make_tx(name, shared.sgd(0.1)))(stacked(params), targets)
    assert_close(center.pull().params, jax.tree.map(lambda c: c[0], expected))


def test_mesh_sums_messages_in_the_center_dtype():
    """A sum in the workers' bfloat16 would lose the small messages."""
    rule = shared.agn(shared.sgd(1.0))
    split = agn_optax.phases(
        shared.sgd(0.1), rule, axis_name="workers", center_dtype="float32"
    )

    @jax.jit
    @functools.partial(jax.vmap, axis_name="workers")
    def center_after_exchange(grads):
        params = jnp.zeros((), grads.dtype)
        _, state = split.update(grads, split.init(params), params)
        return split.exchange(params, state)[1].center

    grads = jnp.array([1, 2**-9, 2**-9, 2**-9], jnp.bfloat16)
    np.testing.assert_array_equal(center_after_exchange(grads), -(1 + 3 * 2**-9))


def test_average_is_the_mean_of_the_workers():
    params = {"w": jnp.arange(3.0)}
    targets = feeds(params, PERIOD, workers=(WORKERS,))
    tx = make_tx("average", shared.sgd(0.1))
    trained, center = with_vmap(tx)(stacked(params), targets)
    sgd = shared.sgd(0.1)
    final_params = []
    for i in range(WORKERS):
        x, state = params, sgd.init(params)
        for t in range(PERIOD):
            target = {"w": targets["w"][t, i]}
            updates, state = sgd.update(gradient(x, target), state, x)
            x = optax.apply_updates(x, updates)
        final_params.append(x["w"])
    np.testing.assert_allclose(center["w"][0], np.mean(final_params, axis=0), rtol=1e-6)
    assert_close(trained, center, tolerance=1e-6)


def test_eamsgd_is_easgd_with_a_nesterov_inner_optimizer():
    """v <- μv - ηg(x + μv), x <- x + v, with the elastic exchange of EASGD."""
    rate, lr, momentum, workers = 0.2, 0.05, 0.9, 2
    inner = shared.sgd(lr, momentum, nesterov=True)
    tx = agn_optax.easgd(inner, PERIOD, moving_rate=rate, axis_name="workers")
    w = jnp.array([1.0, -2.0])
    params = {"w": jnp.stack([w, 3 * w])}
    state = jax.vmap(tx.init)({"w": jnp.stack([w, w])})
    step = jax.jit(jax.vmap(tx.update, axis_name="workers"))

    x = np.asarray(params["w"], np.float64)
    trace, center = np.zeros_like(x), np.asarray(w, np.float64)
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
    many = jax.jit(jax.vmap(make_loop(tx), in_axes=(0, 1), axis_name="workers"))(
        jax.tree.map(lambda x: x[None], params), targets
    )
    tx = agn_optax.agn(shared.adam(0.05), PERIOD)
    alone = jax.jit(make_loop(tx))(params, jax.tree.map(lambda f: f[:, 0], targets))
    assert_identical(jax.tree.map(lambda x: x[0], many), alone)
