"""One process of a sharded worker that makes exchanges until it has made enough.

python sharded_life.py COORDINATOR PROCESSES PROCESS NAME ADDRESS ELEMENTS EXCHANGES
    [TIMEOUT]

Every message adds 1 to each element of the center, so that the center's parameters say
how many were applied. The first process prints the number of each exchange.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    coordinator, count, process, name, address, elements, exchanges = sys.argv[1:8]
    timeout = float(sys.argv[8]) if len(sys.argv) > 8 else 60.0
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
    with service.connect(address, RULE, timeout=timeout) as center:
        worker = agn_optax.Worker(center, optax.sgd(0.5), period=2, name=name)

        @jax.jit
        def step(params, state):
            grads = jax.tree.map(lambda x: jnp.full_like(x, -1.0), params)
            updates, state = worker.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with worker:
            params, state = worker.start(first, chief=name == "anna")
            while worker.exchanges < int(exchanges):
                params, state = worker.exchange(*step(params, state))
                if jax.process_index() == 0:
                    sys.stdout.write(f"exchanged {worker.exchanges}\n")
                    sys.stdout.flush()
            (shard, *_) = params["w"].addressable_shards
            low, high = np.min(shard.data), np.max(shard.data)
            assert low == high == worker.version, (low, high, worker.version)


if __name__ == "__main__":
    main()
