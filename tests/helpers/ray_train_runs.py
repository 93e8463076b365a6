"""Runs of Ray Train's JaxTrainer with two processes, run by test_ray_train.

python ray_train_runs.py FOLDER CENTER

In the first run the processes are two workers; in the second, Ray joins them by
jax.distributed, and they are worker-1. Each process writes its environment into a file.
"""

import json
import os
import pathlib
import sys

import jax
import ray
import ray.train
from on_ray_train import train_loop
from ray.train.v2.jax import JaxConfig, JaxTrainer

from agn_optax import service


def loop(config):
    env = service.environment()
    found = {
        **env._asdict(),
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "megascale": [name for name in os.environ if name.startswith("MEGASCALE_")],
    }
    process = ray.train.get_context().get_world_rank()
    (pathlib.Path(config["folder"]) / f"{process}.json").write_text(json.dumps(found))
    return None if config["joined"] else train_loop(config)


def run(folder, center, joined):
    folder.mkdir()
    # An environment of a slice that was one of three.
    variables = {"AGN_OPTAX_CENTER": center, "MEGASCALE_NUM_SLICES": "3"}
    if joined:
        variables |= {"AGN_OPTAX_RANK": "1", "AGN_OPTAX_WORKERS": "2"}
    config = {"folder": str(folder), "joined": joined, "steps": 50}
    JaxTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 1}
        ),
        # With JAX_PLATFORMS=cpu, Ray joins processes without GPUs, too.
        jax_config=JaxConfig(use_gpu=joined),
        run_config=ray.train.RunConfig(
            storage_path=str(folder), worker_runtime_env={"env_vars": variables}
        ),
    ).fit()


def main():
    ray.init(num_cpus=2)
    for name in ("separate", "joined"):
        run(pathlib.Path(sys.argv[1]) / name, sys.argv[2], name == "joined")


if __name__ == "__main__":
    main()
