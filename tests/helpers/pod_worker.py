"""One process of a worker whose towers span several processes, run by test_pods.

python pod_worker.py RULE DEVICES HEARTBEAT-TIMEOUT [overlap]

It reads its rank from the environment as any worker does (`service.environment`), makes
as many steps as the number in each line of stdin, and then prints its progress.
"""

import contextlib
import os
import sys
import zlib

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import agn_optax
from agn_optax import errors, service
from helpers import problem

RULES = {
    "agn": agn_optax.rules.agn(optax.adam(0.05)),
    "downpour": agn_optax.rules.downpour(),
}


def batch_of(rank, step, process=0, processes=1):
    """Return the rows of a worker's batch that one of its processes feeds."""
    rng = np.random.default_rng([rank, step])
    x = rng.normal(size=(8, 3)).astype(np.float32)
    rows = 8 // processes
    own = x[rows * process : rows * (process + 1)]
    return {"x": own, "y": np.sin(own.sum(axis=-1, keepdims=True))}


class Loop:
    """A worker over towers, as in docs/pods.md."""

    def __init__(self, center, rank, *, devices, name, part=(0, 1), **how):
        self.rank, self.part = rank, part
        self.towers = agn_optax.Towers(devices)
        reduce = agn_optax.all_reduce("towers")
        self.worker = agn_optax.Worker(
            center, optax.sgd(0.1, momentum=0.9), period=3, name=name, **how
        )

        def train_step(loop, batch):
            params, state = loop
            loss, grads = jax.value_and_grad(problem.loss)(params, batch)
            grads, _ = reduce.update(grads, reduce.init(params), params)
            updates, state = self.worker.tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        self.program = self.towers.step(train_step)
        self.steps = 0

    def start(self, **how):
        everywhere = NamedSharding(self.towers.mesh, PartitionSpec())
        params = jax.device_put(problem.params(), everywhere)
        self.loop = self.towers.replicate(self.worker.start(params, **how))

    def step(self):
        batch = batch_of(self.rank, self.steps, *self.part)
        self.loop, loss = self.program(self.loop, self.towers.shard(batch))
        self.steps += 1
        due = self.worker.due
        if due:
            self.loop = self.towers.unreplicate(self.loop)
        self.loop = self.worker.exchange(*self.loop)
        if due:
            self.loop = self.towers.replicate(self.loop)
        return loss

    def report(self):
        """Print steps, exchanges, and a checksum of the arrays of this process."""
        bits = 0
        for leaf in jax.tree.leaves(self.loop):
            bits = zlib.crc32(np.asarray(leaf.addressable_data(0)).tobytes(), bits)
        line = "progress", self.steps, self.worker.exchanges, bits
        sys.stdout.write(" ".join(map(str, line)) + "\n")
        sys.stdout.flush()


def is_rejected(processes):
    """Return whether a worker of this many processes is rejected in this job."""
    os.environ["AGN_OPTAX_PROCESSES"] = processes
    try:
        service.environment()
    except errors.InvalidArgumentError as error:
        return "job of jax.distributed with 2: if one of these ends" in str(error)
    return False


def main():
    rule = RULES[sys.argv[1]]
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
    env = service.environment()
    jax.distributed.initialize(
        **env.distributed, heartbeat_timeout_seconds=int(sys.argv[3])
    )
    center = service.connect(env.address, rule, timeout=20.0)
    part = jax.process_index(), jax.process_count()
    assert is_rejected("1")  # the job would have processes of several workers
    with contextlib.closing(center):
        loop = Loop(
            center,
            env.rank,
            devices=jax.devices(),
            name=env.worker,
            part=part,
            overlap="overlap" in sys.argv,
            give_up=5.0,
        )
        with loop.worker:
            loop.start(chief=env.rank == 0)
            loop.report()
            for line in sys.stdin:
                for _ in range(int(line)):
                    loop.step()
                loop.report()


if __name__ == "__main__":
    main()
