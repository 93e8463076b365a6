"""The network, the methods and the worker process of ``digits.py``.

``digits.py`` starts this file once per worker, with a `Job` as its argument. A worker
has its own share of the data, the addresses of the centers and its own settings. It
knows nothing about other workers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from pacing import pace

import agn_optax
from agn_optax import center, rules, service

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Method:
    """A rule and optimizers that work well with it.

    Each learning rate is the best of three that differ by factors of two, with two
    seeds other than the demo's: the rate that reached 94 % after the fewest exchanges,
    or among equals the highest accuracy at the end. (DOWNPOUR's rate is a quarter of
    that one, with which one of the demo's seeds ended at 82 %.) Try ``--times 0.5`` and
    the like to see the effect of other rates.
    """

    name: str
    inner: Callable[[float], optax.GradientTransformation]  # learning rate -> optimizer
    rule: Callable[[float], rules.Rule] | None  # None for one worker without a center
    rate: float
    color: str  # from Okabe and Ito's palette, which color-blind people can distinguish
    mode: Callable[[], Any] = center.Asynchronous
    period: int | None = None  # None for the period of the command line
    kills: bool = False  # whether a worker is killed in the middle, and restarted


EVERY_STEP = Method(
    # The center's Adam gets the gradients of all workers at every step, and workers
    # make no steps of their own.
    "averaging",
    inner=lambda rate: optax.set_to_zero(),
    rule=lambda rate: rules.agn(optax.adam(rate)),
    rate=8e-3,
    color="#000000",
    mode=center.Synchronous,
    period=1,
)
AGN = Method(
    "AGN",
    inner=optax.adam,
    rule=lambda rate: rules.agn(optax.adam(rate)),
    rate=16e-3,
    color="#D55E00",
)
EASGD = Method(
    # With a Nesterov inner optimizer, as here, EASGD is EAMSGD.
    "EASGD",
    inner=lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    rule=lambda rate: rules.easgd(moving_rate=0.4),
    rate=0.08,
    color="#0072B2",
)
DOWNPOUR = Method(
    "DOWNPOUR",
    inner=optax.adam,
    rule=lambda rate: rules.downpour(),
    rate=1e-3,
    color="#009E73",
)
DILOCO = Method(
    "DiLoCo",
    inner=optax.adam,
    rule=lambda rate: rules.diloco(),
    rate=4e-3,
    color="#CC79A7",
    mode=center.Synchronous,
)
KILLED = dataclasses.replace(AGN, name="AGN, one killed", kills=True)
ALONE = Method(
    "one worker",
    inner=optax.adam,
    rule=None,
    rate=2e-3,
    color="#7F7F7F",
)
METHODS = {
    method.name: method
    for method in (EVERY_STEP, AGN, EASGD, DOWNPOUR, DILOCO, KILLED, ALONE)
}


def made(name: str, times: float) -> tuple[Any, Any]:
    """Return the inner optimizer of a method, and its rule if it has one."""
    method = METHODS[name]
    return _made(method.inner, method.rule, times * method.rate)


@functools.cache  # the same objects, so that programs are compiled once
def _made(inner: Any, rule: Any, rate: float) -> tuple[Any, Any]:
    return inner(rate), rule(rate) if rule else None


class Network(nn.Module):
    """Two convolutions and two dense layers, for images of any size.

    It has 139,000 parameters, independent of that size.
    """

    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits [n, classes] of images [n, height, width, 1]."""
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=(2, 2))(x))
        if x.shape[1:3] != (4, 4):  # for images that are not 8 x 8
            x = jax.image.resize(x, (len(x), 4, 4, 32), "linear")
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(self.classes)(x)


def first_params(network: Network, images: Any, seed: int) -> PyTree:
    """Initialize the network as Flax does, without compiling anything.

    Kernels are normal with variance 1 / inputs; biases are 0.
    """
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.ndim == 1:
            return jnp.zeros_like(leaf)
        inputs = leaf.size // leaf.shape[-1]
        drawn = rng.normal(scale=inputs**-0.5, size=leaf.shape)
        return jnp.asarray(drawn, leaf.dtype)

    shapes = jax.eval_shape(network.init, jax.random.key(0), images)["params"]
    return jax.tree.map(draw, shapes)


def loss_fn(network: Network, params: PyTree, images: Any, labels: Any) -> jax.Array:
    """Return the mean cross-entropy of a batch."""
    logits = network.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.cache
def gradient_of(network: Network) -> Callable[..., PyTree]:
    """Return the compiled gradient on the rows ``batch`` of images and labels.

    It takes most of the compile time, so it is a separate program for all rules.
    """

    @jax.jit
    def gradient(params: PyTree, images: Any, labels: Any, batch: Any) -> PyTree:
        loss = functools.partial(loss_fn, network)
        return jax.grad(loss)(params, images[batch], labels[batch])

    return gradient


@functools.cache
def step_of(network: Network, tx: Any) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return a compiled local step, the same one for all seeds."""
    gradient = gradient_of(network)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def apply(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def local_step(
        params: PyTree, state: PyTree, images: Any, labels: Any, batch: Any
    ) -> tuple[PyTree, PyTree]:
        return apply(params, state, gradient(params, images, labels, batch))

    return local_step


def share(size: int, rank: int, workers: int) -> np.ndarray[Any, Any]:
    """Return the rows of the data that one worker has, and no other worker."""
    return np.arange(size)[rank::workers]


def batches(
    rows: np.ndarray[Any, Any], batch_size: int, *seed: int
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield batches of these rows forever, with a new order in each epoch."""
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < batch_size:
            order.extend(rng.permutation(rows))
        yield np.array(order[:batch_size])
        del order[:batch_size]


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
            train(job, task, Report(number, restarts, 0), images, labels, rows)


def train(
    job: Job, task: Task, report: Report, images: Any, labels: Any, rows: Any
) -> None:
    """Train until the center has the task's version.

    In asynchronous methods, the fast workers make most of the exchanges.
    """
    inner, rule = made(task.method, job.times)
    with (
        # The center is on this machine, but the demo shows one at the end of a link:
        # shared memory is not used.
        service.connect(task.center, rule, transports=["grpc"]) as remote,
        agn_optax.Worker(remote, inner, period=task.period, name=job.worker) as worker,
    ):
        local_step = step_of(Network(job.classes), worker.tx)
        # Compile before the start, where all workers wait for each other once.
        params = remote.pull().params
        local_step(params, worker.tx.init(params), images, labels, next(rows))

        # The same after a restart: a worker only needs the center to continue.
        params, state = worker.start()
        pace(job.rate)
        send(dataclasses.replace(report, version=worker.version))
        for batch in rows:
            begin = time.perf_counter()
            params, state = local_step(params, state, images, labels, batch)
            jax.block_until_ready(params)
            time.sleep((job.slowdown - 1) * (time.perf_counter() - begin))
            dies = report.restarts == 0 and task.dies_at is not None
            if dies and worker.version >= task.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)  # without leaving the center
            exchanges, begin = worker.exchanges, time.perf_counter()
            params, state = worker.exchange(params, state)
            if worker.exchanges > exchanges:
                send(
                    dataclasses.replace(
                        report,
                        version=worker.version,
                        staleness=worker.staleness,
                        seconds=time.perf_counter() - begin,
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
