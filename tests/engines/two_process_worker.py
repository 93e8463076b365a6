"""A worker of two processes whose second process is killed before its restart."""

import os
import pathlib
import sys
import time

import jax

import agn_optax
from agn_optax import service


def main():
    me = service.environment()
    agn_optax.initialize_distributed(**me.distributed)
    process, processes = jax.process_index(), jax.process_count()
    print(f"life {me.restarts} process {process} of {processes}", flush=True)  # noqa: T201
    if not me.restarts:
        # Wait for the first process's output: it is ended together with the second.
        has_spoken = pathlib.Path(sys.argv[1], "has-spoken")
        if process == 0:
            has_spoken.touch()
            time.sleep(600)  # until it is ended with the other
        else:
            while not has_spoken.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), 9)
    with service.connect(me.address, me.rule) as center:
        print("it finds", center)  # noqa: T201


if __name__ == "__main__":
    main()
