"""One of several processes that train together, run by test_distributed.

python distributed_program.py OUTPUT
"""

import dataclasses
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import problem
from jax.experimental import sparse

import agn_optax
from agn_optax import errors

MODES = {"data parallel": 1, "islands": 2}


def optimizer(placement=None):
    rule = agn_optax.rules.agn(optax.adam(0.05))
    return optax.chain(
        agn_optax.all_reduce("towers"),
        agn_optax.exchange_every(
            optax.adam(0.05), rule, 2, axis_name="workers", placement=placement
        ),
    )


PLACEMENTS = {
    "whole": None,
    "sharded": agn_optax.Placement(shard_axis=("workers", "towers")),
}


@dataclasses.dataclass
class Part:
    """Select the rows of a batch that one of several processes feeds."""

    index: int
    count: int

    def __call__(self, tree):
        def own(x):
            rows = len(x) // self.count
            return x[rows * self.index : rows * (self.index + 1)]

        return jax.tree.map(own, tree)


def cut(batch, rows):
    return jax.tree.map(lambda x: x[:rows], batch)


def metric(params, batch):
    return {"loss": problem.losses(params, batch)}


def scores(params, batch):
    return problem.predict(params, batch["x"])


def results(devices, part):
    """Return numbers that must not depend on the number of processes."""
    found = {}
    for mode, workers in MODES.items():
        for name, placement in PLACEMENTS.items():
            if placement is not None and mode != "islands":
                continue
            towers = agn_optax.Towers(devices, workers=workers)
            tx = optimizer(placement)
            step = towers.step(problem.train_step(tx))
            # Only the parameters of process 0 are used.
            params = jax.tree.map(lambda x: x + part.index, problem.params())
            params = towers.unreplicate(towers.replicate(params))
            state = towers.create(lambda p, tx=tx: (p, tx.init(p)), params)
            for batch in problem.batches(4):
                state, metrics = step(state, towers.shard(part(batch)))
            agreement = towers.towers_agree(state)
            center = towers.center_params(state)
            key = f"{mode}, {name}"
            found[f"{key}: center"] = center
            found[f"{key}: params"] = towers.unreplicate(state[0])
            found[f"{key}: agree"] = jnp.asarray(bool(agreement))
            found[f"{key}: loss"] = towers.mean(metrics["loss"])
    (batch,) = problem.batches(1, rows=12)
    # The parts are uneven: the first process has more rows than the second.
    mine = (
        batch
        if part.count == 1
        else jax.tree.map(lambda x: x[:7] if part.index == 0 else x[7:], batch)
    )
    center = jax.tree.map(np.asarray, center)
    found["evaluate"] = towers.evaluate(metric, center, mine)
    found["predict"] = towers.predict(scores, center, mine)
    alone = agn_optax.Towers(devices, workers=4)
    keys = alone.replicate({"key": jax.random.key(0)})
    drawn = alone.step(lambda s, _: (s, jax.random.normal(s["key"])))
    found["keys"] = alone.mean(drawn(keys, alone.shard(part(np.ones(4))))[1])
    # The processes store different numbers of elements.
    rows = sparse.BCOO.fromdense(part(np.tri(8, 3, dtype=np.float32)))
    product = alone.step(lambda s, m: (s, (m @ jnp.arange(3.0)).sum()))
    found["sparse"] = alone.mean(product(alone.replicate(0), alone.shard(rows))[1])
    # If one process has no rows, all raise, and none waits for it.
    try:
        towers.evaluate(metric, center, mine if part.index else cut(batch, 0))
    except errors.InvalidArgumentError as error:
        found["rejected"] = jnp.asarray("batch has no rows" in str(error))
    run = towers.step(problem.whole_round(problem.train_step(tx)))
    batches = towers.shard(part(problem.stacked(problem.batches(2))))
    state, metrics = run(towers.create(lambda p: (p, tx.init(p)), center), batches)
    found["round"] = towers.mean(metrics["loss"])
    return found


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    index, count = int(os.environ["JAX_PROCESS_ID"]), 2
    jax.distributed.initialize(num_processes=count, process_id=index)
    assert len(jax.devices()) == 4
    found = results(jax.devices(), Part(index, count))
    leaves = jax.tree_util.tree_leaves_with_path(found)
    np.savez(
        pathlib.Path(sys.argv[1]) / f"{index}.npz",
        **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
    )


if __name__ == "__main__":
    main()
