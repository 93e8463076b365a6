"""One worker of several on digits: DiLoCo around a center that `launch` starts.

agn-optax launch --workers 2 --rule diloco --mode synchronous minimal_worker.py
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import agn_optax
from agn_optax import service

me = service.environment()  # this worker's rank, and the center's address
images, labels = (x[me.rank :: me.workers] for x in load_digits(return_X_y=True))
draw = np.random.default_rng(me.rank)


def loss_fn(params, x, y):
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


center = service.connect(me.address, me.rule)
inner = optax.adam(0.01)
with center, agn_optax.Worker(center, inner, period=20, name=me.worker) as worker:

    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = worker.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    first = {"w": np.zeros((64, 10), "f4"), "b": np.zeros(10, "f4")}
    params, state = worker.start(first, chief=me.rank == 0)
    for _ in range(400):
        rows = draw.integers(len(labels), size=64)
        params, state, loss = step(params, state, images[rows] / 16, labels[rows])
        params, state = worker.exchange(params, state)  # acts at every 20th call
    print(f"{worker.name}: loss {loss:.3f} after {worker.exchanges} exchanges")
