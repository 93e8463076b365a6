"""Train one worker: `agn-optax launch run.toml` starts all of them and a center."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import config as settings
import data
import jax
import model
import optax
import sharding

import agn_optax
from agn_optax import checkpoint, service

PyTree = Any


def make_optimizer(config: settings.Config) -> optax.GradientTransformation:
    """Return the optimizer of the local steps; its schedule counts local steps."""
    rate = optax.warmup_cosine_decay_schedule(
        *(0.0, config.learning_rate, config.warmup, config.steps)
    )
    return optax.adamw(rate, b2=0.95)


def make_step(
    worker: agn_optax.Worker, graph: Any, shardings: PyTree, clip: float
) -> Any:
    """Return the compiled local step, whose results have the given shardings."""
    clipped = optax.clip_by_global_norm(clip)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=shardings)
    def step(params: PyTree, state: PyTree, rows: jax.Array) -> Any:
        loss = functools.partial(model.loss_fn, graph)
        value, grads = jax.value_and_grad(loss)(params, rows)
        grads, _ = clipped.update(grads, clipped.init(params))
        updates, state = worker.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def main() -> None:
    logging.getLogger("absl").setLevel("ERROR")  # Orbax warns at each checkpoint
    config, env = settings.parse(), service.environment()
    if env.distributed:  # this worker has several processes
        jax.distributed.initialize(**env.distributed)
    mesh = sharding.make_mesh(config)
    graph, params = model.create(config)
    rows = iter(data.training_batches(config, env.rank, env.workers))
    config.output.mkdir(parents=True, exist_ok=True)
    log = (config.output / f"{env.worker}-{jax.process_index()}.jsonl").open("a")

    def write(exchange: int, values: Mapping[str, float]) -> None:
        line = {"exchange": exchange, "time": time.time(), **values}
        print(json.dumps(line), file=log, flush=True)

    with log, service.connect(env.address, env.rule) as center:
        worker = agn_optax.Worker(
            *(center, make_optimizer(config)),
            period=config.period,
            name=env.worker,
            callbacks=[write],
        )
        shardings = sharding.shardings_of(mesh, params, worker.tx)
        step = make_step(worker, graph, shardings, config.clip)
        folder = config.output / "checkpoints" / env.worker
        with (
            service.delay_sigterm() as terminated,
            checkpoint.Resumable(worker, folder, rows=rows) as loop,
        ):
            started = loop.start(params, chief=env.rank == 0)
            params, state = jax.device_put(started, shardings[:2])
            print(f"{env.worker} starts after {worker.exchanges} exchanges", flush=True)
            for batch in rows:
                batch = sharding.place_rows(mesh, batch)
                params, state, loss = step(params, state, batch)
                loop.report(loss=loss)
                params, state = loop.exchange(params, state)
                if terminated():
                    break
            loop.flush(params, state)


if __name__ == "__main__":
    main()
