"""Training loops of real workers, whose batches depend on worker and step alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import agn_optax
from helpers import problem, shared

PERIOD = 3
INNER = shared.adam(0.05)


def data(worker, step):
    key = jax.random.fold_in(jax.random.key(worker), step)
    x = jax.random.normal(key, (8, 3))
    return {"x": x, "y": jnp.sin(x.sum(axis=-1, keepdims=True))}


class Loop:
    """The training loop of a worker.

    Args:
      center: its center.
      index: number of the worker.
      first: number of its first local step.
      **settings: further arguments of the `Worker`.
    """

    def __init__(self, center, index, *, first=0, **settings):
        self.worker = agn_optax.Worker(
            center, INNER, period=PERIOD, name=f"worker-{index}", **settings
        )
        self.index, self.number = index, first
        self.data, self.step = jax.jit(data), jax.jit(self._step)
        self.loop = self.worker.start()

    def _step(self, params, state, batch):
        grads = jax.grad(problem.loss)(params, batch)
        updates, state = self.worker.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run(self, steps, **counts):
        for _ in range(steps):
            batch = self.data(np.int32(self.index), np.int32(self.number))
            self.loop = self.worker.exchange(*self.step(*self.loop, batch), **counts)
            self.number += 1
        return self
