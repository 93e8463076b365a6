"""Train on one device with donated arguments and a center in host memory.

`test_placement` runs this in its own process: JAX aborts if a donated host buffer
becomes an output on the device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import agn_optax

PERIOD, ROUNDS = 2, 2
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "scale": jnp.ones(())}


def centers():
    """Return center optimizers: one without scalars in its state, one with several."""
    return [
        optax.sgd(0.1),
        optax.chain(
            agn_optax.scale_by_weight(),
            optax.scale_by_adam(),
            optax.scale_by_schedule(lambda count: -0.1 / (count + 1)),
        ),
    ]


def gradient(params, target):
    return jax.tree.map(lambda x: x - target, params)


def phases(center, memory):
    placement = agn_optax.Placement(memory=memory)
    rule = agn_optax.rules.agn(center)
    return agn_optax.phases(optax.sgd(0.1, momentum=0.9), rule, placement=placement)


def step(tx):
    def step(params, state, target):
        updates, state = tx.update(gradient(params, target), state, params)
        return optax.apply_updates(params, updates), state, ()

    return step


def split(tx):
    """Train as the docs of `phases` do: a local step donates only the state."""
    local = jax.jit(tx.update, donate_argnums=1)
    exchange = jax.jit(tx.exchange, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    for i in range(PERIOD * ROUNDS):
        updates, state = local(gradient(params, 0.1 * i), state, params)
        params = optax.apply_updates(params, updates)
        if (i + 1) % PERIOD == 0:
            params, state = exchange(params, state)
    return params, agn_optax.center_params(state)


def scanned(tx):
    one = jax.jit(agn_optax.scan_round(step(tx), tx.exchange), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    for i in range(ROUNDS):
        targets = 0.1 * (PERIOD * i + jnp.arange(PERIOD))
        params, state, _ = one(params, state, targets)
    return params, agn_optax.center_params(state)


def towers_round(tx):
    towers = agn_optax.Towers(1)

    def train_step(state, batch):
        params, state, _ = step(tx)(*state, batch.mean())
        return (params, state), {}

    def train_round(state, targets):
        state, metrics = jax.lax.scan(train_step, state, targets.T)
        return tx.exchange(*state), metrics

    one = towers.step(train_round)
    state = towers.create(lambda params: (params, tx.init(params)), PARAMS)
    for i in range(ROUNDS):
        targets = 0.1 * (PERIOD * i + np.arange(PERIOD, dtype=np.float32))
        state, _ = one(state, towers.shard(targets[None]))
    params = jax.tree.map(lambda x: x[0], state[0])
    return params, towers.center_params(state[1])


FORMS = [split, scanned, towers_round]


def main():
    for center in centers():
        expected = jax.device_get(split(phases(center, "device")))
        for form in FORMS:
            found = jax.device_get(form(phases(center, "host")))
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
                *(found, expected),
            )


if __name__ == "__main__":
    main()
