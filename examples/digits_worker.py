"""What is trained in ``digits.py``, by which rules, and what one worker process does.

``digits.py`` starts this file once per worker, with a `Job` as its argument. A worker
has its own share of the data, knows the addresses of centers and its own settings, and
nothing of other workers.
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
    """A rule and the optimizers that it works well with.

    Learning rates are the best of three by factors of two, with two other seeds than
    the demo's: those that reached 94 % after the fewest exchanges, or at equality the
    highest accuracy at the end. (DOWNPOUR's is a quarter of that, at which one of the
    demo's seeds ended at 82 %.) ``--times 0.5`` and the like show what that changes.
    """

    name: str
    inner: Callable[[float], optax.GradientTransformation]  # of the learning rate
    rule: Callable[[float], rules.Rule] | None  # None: one alone, without a center
    rate: float
    color: str  # of Okabe and Ito's palette, which color-blind people can tell apart
    mode: Callable[[], Any] = center.Asynchronous
    period: int | None = None  # None for that of the command line
    kills: bool = False  # one worker, in the middle; it is started again


EVERY_STEP = Method(
    # The center's Adam sees the gradients of all workers at every step, and nobody
    # makes a step of their own.
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
    """The inner optimizer of a method, and its rule if it has one."""
    method = METHODS[name]
    return _made(method.inner, method.rule, times * method.rate)


@functools.cache  # what is one and the same is compiled once
def _made(inner: Any, rule: Any, rate: float) -> tuple[Any, Any]:
    return inner(rate), rule(rate) if rule else None


class Network(nn.Module):
    """Two convolutions and two dense layers, for images of any size.

    It has 139,000 parameters, whatever that size.
    """

    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [n, classes] of images [n, height, width, 1]."""
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=(2, 2))(x))
        if x.shape[1:3] != (4, 4):  # those of images that are not 8 x 8
            x = jax.image.resize(x, (len(x), 4, 4, 32), "linear")
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(self.classes)(x)


def first_params(network: Network, images: Any, seed: int) -> PyTree:
    """As Flax initializes such layers, but nothing has to be compiled for it.

    Kernels are normal with a variance of one over their inputs; biases are 0.
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
    """Mean cross-entropy of a batch."""
    logits = network.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.cache
def gradient_of(network: Network) -> Callable[..., PyTree]:
    """The gradient on the rows ``batch`` of the images and labels: one for all rules.

    It takes most of the time that there is to compile, so it is a program of its own.
    """

    @jax.jit
    def gradient(params: PyTree, images: Any, labels: Any, batch: Any) -> PyTree:
        loss = functools.partial(loss_fn, network)
        return jax.grad(loss)(params, images[batch], labels[batch])

    return gradient


@functools.cache
def step_of(network: Network, tx: Any) -> Callable[..., tuple[PyTree, PyTree]]:
    """A compiled local step; the same one for all seeds."""
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
    """The rows of the data that one worker has, and no other worker sees."""
    return np.arange(size)[rank::workers]


def batches(
    rows: np.ndarray[Any, Any], batch_size: int, *seed: int
) -> Iterator[np.ndarray[Any, Any]]:
    """Batches of these rows without end, epoch after epoch, each in its own order."""
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < batch_size:
            order.extend(rng.permutation(rows))
        yield np.array(order[:batch_size])
        del order[:batch_size]


@dataclasses.dataclass(frozen=True)
class Task:
    """One run, and the center that it has to itself."""

    method: str
    center: str  # its address
    period: int
    versions: int  # of the center, at which the run is over
    seed: int
    dies_at: int | None = None  # version at which the process is killed, once


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a worker process is told."""

    worker: str  # the name by which centers know this worker, in all of its lives
    rank: int
    workers: int  # in all
    data: str  # an .npz file with images and labels
    classes: int
    batch: int
    slowdown: int  # 3 for a worker that takes three times as long for a step
    rate: float  # bytes a second, of its link in either direction
    times: float  # of all learning rates
    tasks: list[Task]  # one after the other


@dataclasses.dataclass(frozen=True)
class Report:
    """A line of JSON to the launcher, at the start of a run and after an exchange."""

    task: int  # its place among the tasks
    life: int
    version: int  # of the center
    staleness: int | None = None  # of the message; None at the start
    seconds: float = 0.0  # for which the worker waited for the exchange


def work(job: Job) -> None:
    """Does one task after the other; another life goes on with the last one."""
    life = int(os.environ["AGN_OPTAX_RESTARTS"])
    with np.load(job.data) as data:
        images, labels = jnp.asarray(data["images"]), jnp.asarray(data["labels"])
    mine = share(len(labels), job.rank, job.workers)
    for number, task in enumerate(job.tasks):
        if life == 0 or number == len(job.tasks) - 1:
            # Another life goes through the data in another order.
            rows = batches(mine, job.batch, task.seed, job.rank, life)
            train(job, task, Report(number, life, 0), images, labels, rows)


def train(
    job: Job, task: Task, report: Report, images: Any, labels: Any, rows: Any
) -> None:
    """Trains until the center has the version that is wanted.

    Where nobody waits for anybody, the fast workers make most of the exchanges.
    """
    inner, rule = made(task.method, job.times)
    with (
        # The center is on this machine, but what is shown is another one at the end of
        # a link: nothing in shared memory.
        service.connect(task.center, rule, transports=["grpc"]) as remote,
        agn_optax.Worker(remote, inner, period=task.period, name=job.worker) as worker,
    ):
        local_step = step_of(Network(job.classes), worker.tx)
        # Compiled before the start, at which all workers wait for each other once.
        params = remote.pull().params
        local_step(params, worker.tx.init(params), images, labels, next(rows))

        # In a later life too: the center is all that a worker needs to go on.
        params, state = worker.start()
        pace(job.rate)
        tell(dataclasses.replace(report, version=worker.version))
        for batch in rows:
            begin = time.perf_counter()
            params, state = local_step(params, state, images, labels, batch)
            jax.block_until_ready(params)
            time.sleep((job.slowdown - 1) * (time.perf_counter() - begin))
            dies = report.life == 0 and task.dies_at is not None
            if dies and worker.version >= task.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)  # without a word to anybody
            exchanges, begin = worker.exchanges, time.perf_counter()
            params, state = worker.exchange(params, state)
            if worker.exchanges > exchanges:
                tell(
                    dataclasses.replace(
                        report,
                        version=worker.version,
                        staleness=worker.staleness,
                        seconds=time.perf_counter() - begin,
                    )
                )
                if worker.version >= task.versions:
                    return


def tell(report: Report) -> None:
    """Says something to the launcher, which reads this process's output."""
    print(json.dumps(dataclasses.asdict(report)), flush=True)


def job_of(text: str) -> Job:
    """What `json.dumps` made of one."""
    said = json.loads(text)
    return Job(**{**said, "tasks": [Task(**task) for task in said["tasks"]]})


if __name__ == "__main__":
    try:
        work(job_of(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
