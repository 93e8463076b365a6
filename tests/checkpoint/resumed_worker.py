"""A worker process that trains over one epoch, run by test_killed_worker.

Each sample adds one to its own element of the center, or of each fragment.
"""

import grain
import jax
import numpy as np
import optax
from helpers import children, shared

import agn_optax
from agn_optax import checkpoint, service


def train(addresses, directory, samples, batch, period, overlap):
    count = len(addresses)
    fragments = agn_optax.Fragments(count) if count > 1 else None
    where = addresses if count > 1 else addresses[0]
    with service.connect(where, shared.downpour(), timeout=60) as center:
        worker = agn_optax.Worker(
            center,
            shared.sgd(1.0),
            period=period,
            name="w",
            overlap=overlap,
            fragments=fragments,
        )

        @jax.jit
        def step(params, state, drawn):
            grads = -jax.nn.one_hot(drawn, samples).sum(axis=0)
            updates, state = worker.tx.update([grads] * count, state, params)
            return optax.apply_updates(params, updates), state

        data = grain.MapDataset.range(samples).seed(7).shuffle().batch(batch)
        data = iter(data.to_iter_dataset(grain.ReadOptions(num_threads=0)))
        with checkpoint.Resumable(worker, directory, data=data) as loop:
            params, state = loop.start(timeout=60)
            for drawn in data:
                params, state = step(params, state, np.asarray(drawn))
                params, state = loop.exchange(params, state)
            loop.flush(params, state)
            return {"exchanges": worker.exchanges, "resumed": loop.resumed}


if __name__ == "__main__":
    children.serve_commands({"train": train})
