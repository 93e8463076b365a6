"""A worker of two processes, of which the second dies in its first life."""

import os

import jax

import agn_optax
from agn_optax import service


def main():
    me = service.environment()
    agn_optax.initialize_distributed(**me.distributed)
    process, processes = jax.process_index(), jax.process_count()
    print(f"life {me.restarts} process {process} of {processes}")  # noqa: T201
    if process == 1 and not me.restarts:
        os.kill(os.getpid(), 9)
    with service.connect(me.address, me.rule) as center:
        print("it finds", center)  # noqa: T201


if __name__ == "__main__":
    main()
