"""A worker's exchanges with the states and models of Flax and of other libraries."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import shared

import agn_optax

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def a_worker(center, period=2, **settings):
    return agn_optax.Worker(center, shared.adam(0.1), period=period, **settings)


def a_center():
    return agn_optax.LocalCenter(shared.agn(shared.adam(0.1)))


def same(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def reference(params, loss, steps=5):
    """Return the center and own parameters of a loop without a framework."""
    center = a_center()
    worker = a_worker(center)
    params, state = worker.start(params, chief=True)
    for _ in range(steps):
        updates, state = worker.tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
    params, state = worker.flush(params, state)
    return center.pull().params, params


class NormedState(TrainState):
    batch_stats: object
    key: jax.Array


def test_train_state_exchanges_only_its_params():
    model = nn.BatchNorm(use_running_average=False)
    variables = model.init(jax.random.key(0), X)
    center = a_center()
    worker = a_worker(center)
    state = NormedState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=worker.tx,
        batch_stats=variables["batch_stats"],
        key=jax.random.key(7),
    )

    def loss(params, stats):
        variables = {"params": params, "batch_stats": stats}
        out, new = model.apply(variables, X, mutable=["batch_stats"])
        return jnp.mean((out - Y) ** 2), new["batch_stats"]

    @jax.jit
    def step(state):
        grads, stats = jax.grad(loss, has_aux=True)(state.params, state.batch_stats)
        return state.apply_gradients(grads=grads, batch_stats=stats)

    params, opt_state = worker.start(state.params, chief=True)
    for _ in range(5):
        state = step(state.replace(params=params, opt_state=opt_state))
        params, opt_state = worker.exchange(state.params, state.opt_state)
    params, opt_state = worker.flush(params, opt_state)
    assert (worker.exchanges, int(state.step)) == (3, 5)
    same(jax.random.key_data(state.key), jax.random.key_data(jax.random.key(7)))
    start = variables["batch_stats"]
    expected, own = reference(variables["params"], lambda p: loss(p, start)[0])
    for a, b in zip(
        jax.tree.leaves((center.pull().params, params)),
        jax.tree.leaves((expected, own)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def test_workers_of_an_nnx_model_exchange_only_parameters():
    """It follows docs/loops.md: keys and batch statistics stay with each worker."""
    center = a_center()
    workers = [a_worker(center, name=name) for name in ("chief", "member")]
    models = [nnx.split(Model(nnx.Rngs(i)), nnx.Param, ...) for i in range(2)]

    @jax.jit
    def train_step(params, state, rest):
        def loss(params):
            model = nnx.merge(models[0][0], params, rest, copy=True)
            value = jnp.mean((model(X) - Y) ** 2)
            return value, nnx.split(model, nnx.Param, ...)[2]

        grads, rest = jax.grad(loss, has_aux=True)(params)
        updates, state = workers[0].tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, rest

    loops = [
        worker.start(params, chief=worker is workers[0])
        for worker, (_, params, _) in zip(workers, models, strict=True)
    ]
    same(loops[1][0], models[0][1])  # the chief's parameters
    rests = [rest for _, _, rest in models]
    for i, worker in enumerate(workers):
        params, state = loops[i]
        for _ in range(2):
            params, state, rests[i] = train_step(params, state, rests[i])
            params, state = worker.exchange(params, state)
    assert center.version == 2
    same(params, center.pull().params)
    trained = [nnx.merge(models[0][0], params, rest) for rest in rests]
    assert not np.array_equal(*(model.norm.mean[...] for model in trained))
    assert len({str(model.dropout.rngs.key[...]) for model in trained}) == 2


@pytest.mark.slow
def test_partitioned_equinox_model_trains():
    """It follows docs/loops.md: arrays are exchanged; static parts are kept apart."""
    center = a_center()
    worker = a_worker(center)
    model = eqx.nn.MLP(3, 1, 4, 1, activation=jax.nn.tanh, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params):
        return jnp.mean((jax.vmap(eqx.combine(params, static))(X) - Y) ** 2)

    grad = jax.jit(jax.grad(loss))
    start, state = worker.start(params, chief=True)
    for _ in range(3):
        updates, state = worker.tx.update(grad(start), state, start)
        start = optax.apply_updates(start, updates)
        start, state = worker.exchange(start, state)
    start, state = worker.flush(start, state)
    trained = eqx.combine(center.pull().params, static)
    assert isinstance(trained, eqx.nn.MLP)
    assert loss(center.pull().params) < loss(params)
