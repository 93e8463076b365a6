"""A worker process of ``digits.py``.

``digits_launch.py`` starts this file once per worker, with a `Job` as its argument. A
worker has its own share of the data, the addresses of the centers and its own settings.
It knows nothing about other workers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from digits import Network, PyTree, batches, made, share, step_of, train
from pacing import pace

import agn_optax
from agn_optax import service


@dataclasses.dataclass(frozen=True)
class Task:
    """One run with its own center."""

    method: str
    center: str  # address of the center
    period: int
    versions: int  # center version at which the run ends
    seed: int
    dies_at: int | None = None  # version at which the process kills itself, once


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings of a worker process."""

    worker: str  # name of this worker at the centers, the same after a restart
    rank: int
    workers: int  # total number of workers
    data: str  # path of an .npz file with images and labels
    classes: int
    batch: int
    slowdown: int  # 3 for a worker that takes three times as long for a step
    rate: float  # bytes/s of its link, in either direction
    times: float  # factor of all learning rates
    tasks: list[Task]  # in order


@dataclasses.dataclass(frozen=True)
class Report:
    """A line of JSON to the launcher, at the start of a run and after an exchange."""

    task: int  # index of the task
    restarts: int  # number of restarts before
    version: int  # version of the center
    staleness: int | None = None  # staleness of the message; None at the start
    seconds: float = 0.0  # time that the worker waited for the exchange


def work(job: Job) -> None:
    """Do all tasks in order; after a restart, do the last one only."""
    restarts = service.environment().restarts
    with np.load(job.data) as data:
        images, labels = jnp.asarray(data["images"]), jnp.asarray(data["labels"])
    mine = share(len(labels), job.rank, job.workers)
    for number, task in enumerate(job.tasks):
        if restarts == 0 or number == len(job.tasks) - 1:
            # A restarted worker uses the data in another order.
            rows = batches(mine, job.batch, task.seed, job.rank, restarts)
            do(job, task, Report(number, restarts, 0), images, labels, rows)


def do(
    job: Job, task: Task, report: Report, images: Any, labels: Any, rows: Any
) -> None:
    """Train until the center has the task's version."""
    inner, rule = made(task.method, job.times)
    with (
        # The center is on this machine, but the demo shows one at the end of a link:
        # shared memory is not used.
        service.connect(task.center, rule, transports=["grpc"]) as remote,
        agn_optax.Worker(remote, inner, period=task.period, name=job.worker) as worker,
    ):
        step = step_of(Network(job.classes), worker.tx)
        # Compile before the start, where all workers wait for each other once.
        params = remote.pull().params
        step(params, worker.tx.init(params), images, labels, next(rows))

        def local_step(params: PyTree, state: PyTree, batch: Any) -> Any:
            """Make a local step, as slowly as this worker; be killed at ``dies_at``."""
            begin = time.perf_counter()
            loop = jax.block_until_ready(step(params, state, images, labels, batch))
            time.sleep((job.slowdown - 1) * (time.perf_counter() - begin))
            dies = report.restarts == 0 and task.dies_at is not None
            if dies and worker.version >= task.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)  # without leaving the center
            return loop

        # The same after a restart: a worker only needs the center to continue.
        params, state = worker.start()
        pace(job.rate)
        send(dataclasses.replace(report, version=worker.version))
        for seconds in train(worker, params, state, local_step, rows):
            send(
                dataclasses.replace(
                    report,
                    version=worker.version,
                    staleness=worker.staleness,
                    seconds=seconds,
                )
            )
            if worker.version >= task.versions:
                return


def send(report: Report) -> None:
    """Send a report to the launcher, which reads this process's output."""
    print(json.dumps(dataclasses.asdict(report)), flush=True)


def job_of(text: str) -> Job:
    """Read a job from JSON."""
    fields = json.loads(text)
    return Job(**{**fields, "tasks": [Task(**task) for task in fields["tasks"]]})


if __name__ == "__main__":
    try:
        work(job_of(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
