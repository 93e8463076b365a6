"""A small regression that the tests of towers train, and its one-device reference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import agn_optax

ROWS = 16  # rows of a batch, over all towers


def params(dtype="float32"):
    rng = np.random.default_rng(0)
    leaf = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, dtype)  # noqa: E731
    return {"hidden": {"w": leaf(3, 5)}, "out": leaf(5, 1), "s": leaf()}


def batches(count, dtype="float32", rows=ROWS):
    rng = np.random.default_rng(1)
    xs = rng.normal(size=(count, rows, 3))
    ys = np.sin(xs.sum(axis=-1, keepdims=True))
    return [
        {"x": x.astype(jnp.dtype(dtype)), "y": y.astype(jnp.dtype(dtype))}
        for x, y in zip(xs, ys, strict=True)
    ]


def predict(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["w"])
    return hidden @ params["out"] + params["s"]


def losses(params, batch):
    return ((predict(params, batch["x"]) - batch["y"]) ** 2)[:, 0]


def loss(params, batch):
    return losses(params, batch).mean()


def train_step(tx):
    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    return step


def whole_round(train_step, exchange=None, fragments=None):
    """Return a function for `Towers.step`, whose batches come from `stacked`."""

    def local_step(params, opt_state, batch):
        (params, opt_state), metrics = train_step((params, opt_state), batch)
        return params, opt_state, metrics

    scanned = agn_optax.scan_round(
        local_step, exchange or (lambda *state: state), fragments=fragments
    )

    def run(state, batches):
        batches = jax.tree.map(lambda x: x.swapaxes(0, 1), batches)
        *state, metrics = scanned(*state, batches)
        return tuple(state), metrics

    return run


def stacked(all_batches):
    """Return the batches of a round as one, with the steps in dimension 1."""
    return jax.tree.map(lambda *rows: np.stack(rows, axis=1), *all_batches)


def train(towers, tx, all_batches, params, step=None):
    """Return the state of all towers and the last metrics after a step per batch."""
    step = towers.step(train_step(tx)) if step is None else step
    state = towers.create(lambda p: (p, tx.init(p)), params)
    for batch in all_batches:
        state, metrics = step(state, towers.shard(batch))
    return state, metrics


def reference(tx, all_batches, params, workers):
    """Train the same on one device: workers under vmap, each with its towers' rows."""
    state = (params, tx.init(params))
    state = jax.tree.map(lambda x: jnp.stack([x] * workers), state)
    step = jax.jit(jax.vmap(train_step(tx), axis_name="workers"))
    for batch in all_batches:
        own = jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), batch)
        state, metrics = step(state, own)
    return state, metrics


def of_workers(towers, tree):
    """Return the rows of the first tower of every worker."""
    return jax.tree.map(lambda x: x[:: towers.size // towers.workers], tree)


def agn(inner, period=3, **options):
    return agn_optax.agn(inner, period, axis_name="workers", **options)
