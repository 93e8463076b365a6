"""One process of a sharded worker that makes exchanges until a file appears.

python sharded_life.py COORDINATOR PROCESSES PROCESS NAME ADDRESS ELEMENTS FILE TIMEOUT

Every message adds 1 to each element of the center, so that the center's parameters say
how many were applied. The first process prints the number of each exchange, and the
version of the center that it has adopted.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import agn_optax
from agn_optax import service

HEARTBEAT_TIMEOUT = 10  # s
RULE = agn_optax.rules.downpour()


def shapes(elements):
    """Return the shapes of the leaves: two large ones and a small one."""
    rows = elements // 2048
    return {"w": (rows, 1024), "v": (1024, rows), "b": (7,)}


def main():
    coordinator, count, process, name, address, elements, end, timeout = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        coordinator,
        int(count),
        int(process),
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
    )
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    specs = {"w": P("fsdp"), "v": P(None, "fsdp"), "b": P()}
    first = {
        key: jax.jit(
            lambda shape=shape: jnp.zeros(shape, jnp.float32),
            out_shardings=NamedSharding(mesh, specs[key]),
        )()
        for key, shape in shapes(int(elements)).items()
    }
    with service.connect(address, RULE, timeout=float(timeout)) as center:
        worker = agn_optax.Worker(center, optax.sgd(0.5), period=2, name=name)

        @jax.jit
        def step(params, state):
            grads = jax.tree.map(lambda x: jnp.full_like(x, -1.0), params)
            updates, state = worker.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with worker:
            params, state = worker.start(first, chief=name == "anna")
            is_over = False
            while not is_over:
                made = worker.exchanges
                params, state = worker.exchange(*step(params, state))
                if worker.exchanges == made:
                    continue
                if jax.process_index() == 0:
                    said = f"exchanged {worker.exchanges} {worker.version}\n"
                    sys.stdout.write(said)
                    sys.stdout.flush()
                # All processes end after the same exchange.
                is_over = multihost_utils.broadcast_one_to_all(
                    pathlib.Path(end).exists()
                )
            (shard, *_) = params["w"].addressable_shards
            low, high = np.min(shard.data), np.max(shard.data)
            assert low == high, (low, high)
            # It may have made a round of steps while the center was lost.
            assert 0.0 <= low - worker.version <= 1.0, (low, worker.version)


if __name__ == "__main__":
    main()
