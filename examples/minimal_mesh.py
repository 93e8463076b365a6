"""Four workers on digits in one program, a device each: AGN on a mesh of towers.

PJRT_NPROC=32 JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 python minimal_mesh.py
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import agn_optax

images, labels = load_digits(return_X_y=True)
images, labels = images.astype("f4") / 16, labels.astype("i4")
tx = agn_optax.agn(
    optax.adam(0.01), period=20, center=optax.adam(0.05), axis_name="workers"
)


def loss_fn(params, x, y):
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def step(state, batch):  # as for one device; each worker has its part of the batch
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


towers = agn_optax.Towers(workers=4)
step = towers.step(step)
params = {"w": np.zeros((64, 10), "f4"), "b": np.zeros(10, "f4")}
state, draw = towers.replicate((params, tx.init(params))), np.random.default_rng(0)
for _ in range(400):
    rows = draw.integers(len(labels), size=256)
    state, losses = step(state, towers.shard((images[rows], labels[rows])))
center = towers.center_params(state)
print(f"loss of the center {loss_fn(center, images, labels):.3f}")
