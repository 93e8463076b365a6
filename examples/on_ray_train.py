"""Asynchronous workers, each a run of Ray Train's JaxTrainer, around one center.

    pip install "ray[train]>=2.60"
    agn-optax serve --address 0.0.0.0:5000 ...           # on any machine, for long
    python examples/on_ray_train.py --center HOST:5000 --storage /shared/folder

Ray Train restarts all Ray workers of a run if one fails. So every worker of the center
is a run of its own: one that is lost restarts alone, and joins under its old name.
"""

from __future__ import annotations

import argparse
from concurrent import futures
from typing import Any

import jax.numpy as jnp
import optax
import ray
import ray.train
from ray.train.v2.jax import JaxConfig, JaxTrainer

import agn_optax
from agn_optax import rules, service


def train_loop(config: dict[str, Any]) -> int:
    """Train one worker, and return its exchanges; Ray calls this again after a loss."""
    # The worker's name and its center. Variables that hang a restarted job are unset.
    env = service.environment()
    rule = rules.agn(optax.sgd(0.1))
    target = jnp.full(3, float(env.rank))
    with service.connect(env.address, rule, timeout=120) as center:
        worker = agn_optax.Worker(center, optax.sgd(0.1), period=5, name=env.worker)
        params, state = worker.start({"w": jnp.zeros(3)}, chief=env.rank == 0)
        for _ in range(config["steps"]):
            gradients = {"w": params["w"] - target}
            updates, state = worker.tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        worker.flush(params, state)
        return worker.exchanges


def trainer(rank: int, options: argparse.Namespace) -> JaxTrainer:
    """Return the trainer of one worker."""
    variables = {
        "AGN_OPTAX_CENTER": options.center,
        "AGN_OPTAX_RANK": str(rank),
        "AGN_OPTAX_WORKERS": str(options.workers),
        # and AGN_OPTAX_TOKEN_FILE, AGN_OPTAX_TLS_CA for a center with tokens and TLS
    }
    return JaxTrainer(
        train_loop,
        train_loop_config={"steps": options.steps},
        # For a worker of several hosts: num_workers=4, use_gpu or use_tpu, and no
        # jax_config, so that Ray joins them by jax.distributed (docs/pods.md).
        scaling_config=ray.train.ScalingConfig(
            num_workers=1, resources_per_worker={"CPU": 1}
        ),
        jax_config=JaxConfig(),  # joins no processes
        run_config=ray.train.RunConfig(
            name=f"worker-{rank}",
            storage_path=options.storage,
            failure_config=ray.train.FailureConfig(max_failures=-1),
            worker_runtime_env={"env_vars": variables},
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--center", required=True, help="its address, or file:PATH")
    parser.add_argument("--storage", required=True, help="folder that all nodes share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    ray.init()
    with futures.ThreadPoolExecutor(options.workers) as threads:
        runs = [
            threads.submit(trainer(rank, options).fit)
            for rank in range(options.workers)
        ]
        for rank, run in enumerate(runs):
            print(f"worker-{rank}: {run.result().return_value} exchanges", flush=True)


if __name__ == "__main__":
    main()
