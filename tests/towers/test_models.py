"""Models with towers: flax train states, batch statistics, dropout, and a GAN."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import problem, support

import agn_optax

pytestmark = pytest.mark.slow

WORKERS = {"data parallel": 1, "independent": 4, "islands": 2}


def optimizer(period=2):
    return optax.chain(
        agn_optax.all_reduce("towers"), problem.agn(optax.adam(0.05), period)
    )


# This step is written for one device, without towers.
def flax_step(state, batch):
    def loss(params):
        return (
            (state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2
        ).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value}


@pytest.mark.parametrize("mode", WORKERS)
def test_flax_train_state_trains_on_towers(mode):
    towers = agn_optax.Towers(4, workers=WORKERS[mode])
    model, data = nn.Dense(1), problem.batches(4)
    params = model.init(jax.random.key(0), data[0]["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer())
    step = towers.step(flax_step)
    replicas = towers.replicate(state)
    for batch in data:
        replicas, metrics = step(replicas, towers.shard(batch))
    assert metrics["loss"].shape == (4,)
    trained = towers.unreplicate(replicas)
    assert trained.step == 4
    assert towers.towers_agree(replicas)
    # The reference is one device with as many workers under vmap.
    own = TrainState.create(
        apply_fn=model.apply, params=params, tx=problem.agn(optax.adam(0.05), 2)
    )
    workers = towers.workers
    expected = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * workers), own)
    alone = jax.jit(jax.vmap(flax_step, axis_name="workers"))
    for batch in data:
        rows = jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), batch)
        expected, _ = alone(expected, rows)
    support.assert_close(problem.of_workers(towers, replicas.params), expected.params)
    support.assert_close(
        towers.center_params(replicas),
        jax.tree.map(lambda c: c[0], agn_optax.center_params(expected.opt_state)),
    )


def nnx_step(model, optimizer, batch):
    loss = lambda model: ((model(batch["x"]) - batch["y"]) ** 2).mean()  # noqa: E731
    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def test_nnx_optimizer_trains_on_towers():
    """The step splits and merges graph and state with flax's functional API."""
    towers, data = agn_optax.Towers(4, workers=2), problem.batches(4)

    def build(tx):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    graph, state = nnx.split(build(optimizer()))

    def train_step(state, batch):
        model, own = nnx.merge(graph, state)
        value = nnx_step(model, own, batch)
        return nnx.state((model, own)), {"loss": value}

    step = towers.step(train_step)
    replicas = towers.replicate(state)
    for batch in data:
        replicas, _ = step(replicas, towers.shard(batch))
    assert towers.towers_agree(replicas)
    model, own = nnx.merge(graph, towers.unreplicate(replicas))
    assert own.step[...] == 4

    # The reference is a dense layer in plain JAX with the same numbers.
    start = nnx.state(build(optimizer())[0], nnx.Param)
    params = {"w": start["kernel"][...], "b": start["bias"][...]}

    def plain(state, batch):
        def loss(p):
            return ((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2).mean()

        grads = jax.grad(loss)(state[0])
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), None

    tx = problem.agn(optax.adam(0.05), 2)
    pair = jax.tree.map(lambda x: jnp.stack([x] * 2), (params, tx.init(params)))
    run = jax.jit(jax.vmap(plain, axis_name="workers"))
    for batch in data:
        rows = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        pair, _ = run(pair, rows)
    support.assert_close(model.kernel[...], pair[0]["w"][0])
    support.assert_close(model.bias[...], pair[0]["b"][0])


class Normed(nn.Module):
    axis_name: Any = None

    @nn.compact
    def __call__(self, x, train):
        norm = nn.BatchNorm(
            use_running_average=not train, axis_name=self.axis_name, momentum=0.5
        )
        return nn.Dense(1)(norm(x))


class NormedState(TrainState):
    batch_stats: Any


def normed_step(state, batch):
    def loss(params):
        out, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["x"],
            train=True,
            mutable=["batch_stats"],
        )
        return ((out - batch["y"]) ** 2).mean(), changed["batch_stats"]

    grads, stats = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), None


def normed_state(axis_name, tx):
    model = Normed(axis_name)
    # Initialize without the axis, which is bound only in the step.
    variables = Normed().init(jax.random.key(0), jnp.ones((2, 3)), train=False)
    return NormedState.create(apply_fn=model.apply, tx=tx, **variables)


def test_batch_statistics_are_reduced_over_towers_or_kept_by_each():
    towers, data = agn_optax.Towers(4), problem.batches(3)
    step = towers.step(normed_step)
    tx = optax.chain(agn_optax.all_reduce("towers"), optax.sgd(0.1))

    # Reduced in the model, statistics equal those of one device with the whole batch.
    together = towers.replicate(normed_state("towers", tx))
    alone = normed_state(None, optax.sgd(0.1))
    for batch in data:
        together, _ = step(together, towers.shard(batch))
        alone, _ = jax.jit(normed_step)(alone, batch)
    assert towers.towers_agree(together)
    one = towers.unreplicate(together)
    support.assert_close(one.params, alone.params, tolerance=1e-4)
    support.assert_close(one.batch_stats, alone.batch_stats, tolerance=1e-4)

    # Statistics may also be kept by each tower and reduced later.
    kept = towers.replicate(normed_state(None, tx))
    for batch in data:
        kept, _ = step(kept, towers.shard(batch))
    assert towers.towers_agree(kept.params)
    differs = towers.towers_agree(kept).differs
    assert differs == ".batch_stats['BatchNorm_0']['mean']"
    mean = towers.mean(kept.batch_stats)
    # The mean of the means of equal parts is the mean.
    support.assert_close(
        mean["BatchNorm_0"]["mean"], alone.batch_stats["BatchNorm_0"]["mean"]
    )
    kept = kept.replace(batch_stats=towers.replicate(mean))
    assert towers.towers_agree(kept)
    step(kept, towers.shard(data[0]))


class DropoutState(TrainState):
    key: jax.Array


class DropoutModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


def test_each_tower_draws_its_own_dropout_mask():
    towers = agn_optax.Towers(4)
    model = DropoutModel()

    def step(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        out = state.apply_fn({}, batch, rngs={"dropout": key})
        grads = jax.lax.pmean({"w": out.mean()}, "towers")
        return state.apply_gradients(grads=grads), out

    key = jax.random.key(7)
    state = DropoutState.create(
        apply_fn=model.apply, params={"w": jnp.zeros(())}, tx=optax.sgd(0.1), key=key
    )
    replicas = towers.replicate(state)
    run = towers.step(step)
    ones = towers.shard(np.ones((4, 64), np.float32))
    masks = []
    for _ in range(2):
        replicas, out = run(replicas, ones)
        masks.append(np.asarray(out[:, 0]) > 0)
    flat = [tuple(mask) for masks_of_step in masks for mask in masks_of_step]
    assert len(set(flat)) == 8  # four towers, two steps
    assert towers.towers_agree(replicas)
    # Tower 0 draws the mask of a single device.
    alone = model.apply(
        {}, np.ones((1, 64)), rngs={"dropout": jax.random.fold_in(key, 0)}
    )
    np.testing.assert_array_equal(masks[0][0], np.asarray(alone[0]) > 0)


def gan_step(txs):
    """Return a train step with two networks, two losses and two optimizers."""

    def generate(params, noise):
        return noise @ params["w"] + params["b"]

    def score(params, x):
        return jnp.tanh(x @ params["w"]) @ params["v"]

    def step(state, batch):
        params, opt_states = state["params"], state["opt_states"]

        def judge_loss(judge):
            fake = generate(params["maker"], batch["noise"])
            real = jax.nn.softplus(-score(judge, batch["real"]))
            return (real + jax.nn.softplus(score(judge, fake))).mean()

        def maker_loss(maker):
            fake = generate(maker, batch["noise"])
            return jax.nn.softplus(-score(params["judge"], fake)).mean()

        new, states, losses = {}, {}, {}
        for name, loss in (("judge", judge_loss), ("maker", maker_loss)):
            losses[name], grads = jax.value_and_grad(loss)(params[name])
            updates, states[name] = txs[name].update(
                grads, opt_states[name], params[name]
            )
            new[name] = optax.apply_updates(params[name], updates)
        return {"params": new, "opt_states": states}, losses

    return step


@pytest.mark.parametrize("mode", WORKERS)
def test_gan_with_two_optimizers_trains_on_towers(mode):
    towers = agn_optax.Towers(4, workers=WORKERS[mode])
    rng = np.random.default_rng(0)
    leaf = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {
        "maker": {"w": leaf(2, 3), "b": leaf(3)},
        "judge": {"w": leaf(3, 4), "v": leaf(4)},
    }
    own = {
        "maker": agn_optax.easgd(
            optax.sgd(0.1), 2, moving_rate=0.3, axis_name="workers"
        ),
        "judge": problem.agn(optax.adam(0.05), 2),
    }
    reduced = {
        name: optax.chain(agn_optax.all_reduce("towers"), tx)
        for name, tx in own.items()
    }

    def start(txs):
        states = {name: tx.init(params[name]) for name, tx in txs.items()}
        return {"params": params, "opt_states": states}

    data = [
        {
            "noise": rng.normal(size=(8, 2)).astype(np.float32),
            "real": rng.normal(size=(8, 3)).astype(np.float32) + 2,
        }
        for _ in range(4)
    ]
    state, step = towers.replicate(start(reduced)), towers.step(gan_step(reduced))
    workers = towers.workers
    expected = jax.tree.map(lambda x: jnp.stack([x] * workers), start(own))
    alone = jax.jit(jax.vmap(gan_step(own), axis_name="workers"))
    for batch in data:
        state, losses = step(state, towers.shard(batch))
        rows = jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), batch)
        expected, _ = alone(expected, rows)
    assert set(losses) == {"maker", "judge"}
    assert towers.towers_agree(state)
    support.assert_close(
        problem.of_workers(towers, state["params"]), expected["params"]
    )
    support.assert_close(
        towers.center_params(state["opt_states"]["maker"]),
        jax.tree.map(
            lambda c: c[0], agn_optax.center_params(expected["opt_states"]["maker"])
        ),
    )
