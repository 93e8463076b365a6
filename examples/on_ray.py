"""A center and workers as actors of a Ray program.

    pip install ray
    python examples/on_ray.py --folder /shared/folder

Ray restarts lost actors, on any node. The center continues from its journal, in a
folder that all nodes can read and write. The method of a lost worker is called again
and continues from the center; a message sent twice is applied once.
"""

from __future__ import annotations

import argparse
import pathlib
import secrets
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

import agn_optax
from agn_optax import errors, rules, service
from agn_optax.center import Journal

RULE = rules.agn(optax.sgd(0.1))


class Center:
    """An actor that serves the center; after a restart it continues anywhere."""

    def __init__(self, folder: pathlib.Path, token: str) -> None:
        security = service.Security(
            access=service.Access(f"chief,operator * {token}".encode()),
            insecure=True,  # only in a network that you trust
        )
        while True:
            try:
                self._server = service.serve(
                    RULE,
                    address=f"{ray.util.get_node_ip_address()}:0",
                    durability=Journal(folder / "journal"),
                    security=security,
                )
                break
            except errors.DurabilityError as error:
                # The last actor, on a node that is being lost, still has the folder.
                print(error)
                time.sleep(1.0)
        (folder / "address").write_text(self._server.address)

    def address(self) -> str:
        """Return the address, once the center serves."""
        return self._server.address

    def stop(self) -> Any:
        """Drain the center, and return its parameters."""
        self._server.stop()
        return jax.tree.map(np.asarray, self._server.center.pull().params)


class Worker:
    """An actor that trains with its part of the data."""

    def train(self, rank: int, folder: pathlib.Path, token: str, steps: int) -> int:
        """Make local steps, and return the number of exchanges."""
        target = jnp.full(3, float(rank))
        # The file is read again at every call, so a center that was restarted elsewhere
        # is found.
        with service.connect(
            f"file:{folder}/address", RULE, timeout=120, token=token, insecure=True
        ) as center:
            worker = agn_optax.Worker(
                center, optax.sgd(0.1), period=5, name=f"worker-{rank}"
            )
            params, state = worker.start({"w": jnp.zeros(3)}, chief=rank == 0)
            for _ in range(steps):
                gradients = {"w": params["w"] - target}
                updates, state = worker.tx.update(gradients, state, params)
                params = optax.apply_updates(params, updates)
                params, state = worker.exchange(params, state)
            worker.flush(params, state)
            return worker.exchanges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    ray.init()
    token, folder = secrets.token_hex(32), options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)

    restarted = {"max_restarts": -1, "max_task_retries": -1}
    kinds: Any = ray.remote(Center), ray.remote(Worker)
    center = kinds[0].options(name="center", **restarted).remote(folder, token)
    print("the center serves at", ray.get(center.address.remote()), flush=True)
    trained = []
    for rank in range(options.workers):
        worker = kinds[1].options(name=f"worker-{rank}", num_cpus=1, **restarted)
        trained.append(worker.remote().train.remote(rank, folder, token, options.steps))
    exchanges = sum(ray.get(trained))
    print(f"{exchanges} exchanges; the center is {ray.get(center.stop.remote())}")


if __name__ == "__main__":
    main()
