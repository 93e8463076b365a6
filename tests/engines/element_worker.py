"""A worker that moves element after element of the center by one: run by test_ray.py.

Files in a folder record the elements tried and those acknowledged; the file "stop" ends
the worker.
"""

import os
import pathlib
import sys
import time

import jax.numpy as jnp
import numpy as np
import optax

import agn_optax
from agn_optax import errors, service

SLOTS = 8192


def main():
    folder, me = pathlib.Path(sys.argv[1]), service.environment()
    print("start", me.restarts, "of", me.worker, flush=True)  # noqa: T201
    (folder / f"pid-{me.rank}").write_text(str(os.getpid()))
    tried, acknowledged = folder / f"tried-{me.rank}", folder / f"done-{me.rank}"
    slot = len(tried.read_bytes()) if tried.exists() else 0
    with (
        service.connect(me.address, me.rule, timeout=120) as center,
        tried.open("ab", buffering=0) as tries,
        acknowledged.open("ab", buffering=0) as done,
    ):
        worker = agn_optax.Worker(
            center, optax.sgd(1.0), period=1, name=me.worker, patience=0
        )
        zeros = np.zeros((me.workers, SLOTS), np.float32)
        params, state = worker.start(jnp.asarray(zeros), chief=me.rank == 0)
        while not (folder / "stop").exists():
            gradient = zeros.copy()
            gradient[me.rank, slot] = 1
            updates, state = worker.tx.update(jnp.asarray(gradient), state, params)
            params = optax.apply_updates(params, updates)
            tries.write(b".")
            while True:
                try:
                    params, state = worker.exchange(params, state)
                    break
                except errors.CenterUnreachableError:
                    time.sleep(0.1)
            done.write(f"{slot}\n".encode())
            slot += 1
            time.sleep(0.05)


if __name__ == "__main__":
    main()
