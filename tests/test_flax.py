"""A worker's exchanges with the states and models of Flax and of other libraries."""

import dataclasses
import functools

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
from agn_optax import errors

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
# Modes of nnx.Optimizer: graph mode, and tree mode if this Flax has it.
MODES = [{}]
if "graph" in nnx.Optimizer.__init__.__annotations__:
    MODES.append({"graph": False})


def a_worker(center, period=2, **settings):
    return agn_optax.Worker(center, shared.adam(0.1), period=period, **settings)


def a_center():
    return agn_optax.LocalCenter(shared.agn(shared.adam(0.1)))


def same(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def reference(params, loss, steps=5):
    """Return the center and own parameters of a loop without a helper."""
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

    state = agn_optax.flax.start(worker, state, chief=True)
    for _ in range(5):
        stepped = step(state)
        stats = stepped.batch_stats
        state = agn_optax.flax.exchange(worker, stepped)
        assert state.batch_stats is stats  # each worker keeps its own statistics
    state = agn_optax.flax.flush(worker, state)
    assert (worker.exchanges, int(state.step)) == (3, 5)
    same(jax.random.key_data(state.key), jax.random.key_data(jax.random.key(7)))
    start = variables["batch_stats"]
    expected, own = reference(variables["params"], lambda p: loss(p, start)[0])
    for a, b in zip(
        jax.tree.leaves((center.pull().params, state.params)),
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


@pytest.mark.parametrize("mode", MODES, ids=["graph", "tree"][: len(MODES)])
def test_nnx_model_is_updated_in_place(mode):
    center = a_center()
    worker = a_worker(center, name="chief")
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, worker.tx, wrt=nnx.Param, **mode)
    other = Model(nnx.Rngs(1))  # of a worker with its own keys
    member = a_worker(center, name="member")
    its = nnx.Optimizer(other, member.tx, wrt=nnx.Param, **mode)

    def train(model, optimizer):
        graph, params, rest = nnx.split(model, nnx.Param, ..., **mode)

        @jax.jit
        @functools.partial(jax.grad, has_aux=True)
        def train_step(params, rest):
            own = nnx.merge(
                graph, params, rest, copy=True
            )  # copies belong to this trace
            value = jnp.mean((own(X) - Y) ** 2)
            return value, nnx.split(own, nnx.Param, ..., **mode)[2]

        grads, rest = train_step(params, rest)
        optimizer.update(model, grads)
        nnx.update(model, rest)

    assert agn_optax.flax.start(worker, model, optimizer, chief=True) is model
    agn_optax.flax.start(member, other, its, chief=False)
    # Other workers adopt the chief's parameters and keep their own keys.
    same(other.linear.kernel[...], model.linear.kernel[...])
    kept = [v.dropout.rngs.key[...] for v in (model, other)]
    for _ in range(2):
        train(model, optimizer)
        assert agn_optax.flax.exchange(worker, model, optimizer) is model
    train(other, its)
    agn_optax.flax.exchange(member, other, its)
    agn_optax.flax.flush(member, other, its)
    assert (center.version, int(optimizer.step[...])) == (2, 2)
    same(other.linear.kernel[...], center.pull().params["linear"]["kernel"])
    assert not np.array_equal(model.norm.mean[...], other.norm.mean[...])
    for v, key in zip((model, other), kept, strict=True):
        assert v.dropout.rngs.key[...] == key
    # The counters of the optimizer state are those of a worker's own loop.
    assert int(optimizer.opt_state.local_steps[...]) == 0
    assert int(optimizer.opt_state.inner_state[0].count[...]) == 2


def test_custom_dataclass_can_be_the_state():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        params: object
        opt_state: object
        seen: int

    def loss(p):
        return jnp.sum((p - 1.0) ** 2)

    center = a_center()
    worker = a_worker(center)
    state = State(jnp.zeros(3), None, 0)
    state = agn_optax.flax.start(worker, state, chief=True)
    for _ in range(5):
        grads = jax.grad(loss)(state.params)
        updates, opt_state = worker.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = agn_optax.flax.exchange(worker, State(params, opt_state, 1))
    state = agn_optax.flax.flush(worker, state)
    expected, own = reference(jnp.zeros(3), loss)
    same((center.pull().params, state.params), (expected, own))
    assert state.seen == 1


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


def test_state_of_another_optimizer_is_rejected():
    worker = a_worker(a_center(), name="w")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    other = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(errors.InvalidArgumentError, match=r"worker 'w'.*worker\.tx"):
        agn_optax.flax.start(worker, model, other, chief=True)
    state = TrainState.create(apply_fn=None, params={"w": X}, tx=optax.adam(0.1))
    with pytest.raises(errors.InvalidArgumentError, match=r"tx=worker\.tx"):
        agn_optax.flax.start(worker, state, chief=True)
    for wrong in (model, {"params": 1, "opt_state": 2}, TrainState):
        with pytest.raises(errors.InvalidTypeError, match="params and opt_state"):
            agn_optax.flax.start(worker, wrong, chief=True)
    with pytest.raises(errors.InvalidTypeError, match=r"nnx\.Optimizer of the model"):
        agn_optax.flax.start(worker, model, optax.adam(0.1), chief=True)
    assert worker.version is None  # nothing was started


@pytest.mark.parametrize("period", [1, 3])
def test_exchange_inside_jit_is_rejected(period):
    center = a_center()
    worker = a_worker(center, period=period)
    params = {"w": jnp.zeros(3)}
    state = TrainState.create(apply_fn=None, params=params, tx=worker.tx)
    state = agn_optax.flax.start(worker, state, chief=True)

    @jax.jit
    def step(state):
        state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
        return agn_optax.flax.exchange(worker, state)

    with pytest.raises(errors.InvalidTypeError, match=r"not inside jax\.jit"):
        step(state)
    assert center.version == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("period", [1, 3])
def test_exchange_inside_nnx_jit_is_rejected(period, mode):
    center = a_center()
    worker = a_worker(center, period=period)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, worker.tx, wrt=nnx.Param, **mode)
    agn_optax.flax.start(worker, model, optimizer, chief=True)

    @nnx.jit(**mode)
    def step(model, optimizer):
        grads = nnx.grad(lambda m: m(X).sum(), **mode)(model)
        optimizer.update(model, grads)
        agn_optax.flax.exchange(worker, model, optimizer)

    with pytest.raises(errors.InvalidTypeError, match=r"not inside jax\.jit"):
        step(model, optimizer)
    assert center.version == 0


def test_exchange_counts_several_local_steps_of_a_train_step():
    center = a_center()
    worker = a_worker(center, period=4)
    state = TrainState.create(apply_fn=None, params={"w": jnp.zeros(3)}, tx=worker.tx)
    state = agn_optax.flax.start(worker, state, chief=True)
    for calls in range(1, 5):
        for _ in range(2):
            state = state.apply_gradients(grads={"w": jnp.ones(3)})
        state = agn_optax.flax.exchange(worker, state, steps=2)
        assert center.version == calls // 2
