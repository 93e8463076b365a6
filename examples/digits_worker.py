"""What is trained in ``digits.py``, by which rules, and what one worker process does.

``digits.py`` starts this file once per worker, with a `Job` as its argument. A worker
knows the address of the center and its own settings, and nothing of other workers.
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

import agn_optax
from agn_optax import rules, service

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Method:
    """A rule and the optimizers that it works well with."""

    name: str
    inner: Callable[[], optax.GradientTransformation]
    rule: Callable[[], rules.Rule] | None  # None: one worker alone, without a center
    color: str
    kills: bool = False  # one worker, in the middle; it is started again


AGN = Method(
    "AGN",
    inner=lambda: optax.adam(2e-3),
    rule=lambda: rules.agn(optax.adam(2e-3)),
    color="tab:red",
)
EASGD = Method(
    # With a Nesterov inner optimizer, as here, EASGD is EAMSGD.
    "EASGD",
    inner=lambda: optax.sgd(0.02, momentum=0.9, nesterov=True),
    rule=lambda: rules.easgd(moving_rate=0.2),
    color="tab:blue",
)
DOWNPOUR = Method(
    "DOWNPOUR",
    inner=lambda: optax.sgd(0.05),
    rule=rules.downpour,
    color="tab:green",
)
KILLED = dataclasses.replace(
    AGN, name="AGN, one killed", color="tab:orange", kills=True
)
ALONE = dataclasses.replace(AGN, name="one worker", rule=None, color="tab:gray")
METHODS = {method.name: method for method in (AGN, EASGD, DOWNPOUR, KILLED, ALONE)}


class Network(nn.Module):
    """Two convolutions and two dense layers, for images of any size."""

    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [n, classes] of images [n, height, width, 1]."""
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=(2, 2))(x))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(self.classes)(x)


def loss_fn(network: Network, params: PyTree, images: Any, labels: Any) -> jax.Array:
    """Mean cross-entropy of a batch."""
    logits = network.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_local_step(network: Network, tx: Any) -> Callable[..., Any]:
    """A compiled local step on the rows ``batch`` of the images and labels."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def local_step(
        params: PyTree, state: PyTree, images: Any, labels: Any, batch: Any
    ) -> tuple[PyTree, PyTree]:
        grads = jax.grad(functools.partial(loss_fn, network))(
            params, images[batch], labels[batch]
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return local_step


def batches(size: int, batch_size: int, *seed: int) -> Iterator[np.ndarray[Any, Any]]:
    """Rows of batches without end, epoch after epoch, each in an order of its own."""
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < batch_size:
            order.extend(rng.permutation(size))
        yield np.array(order[:batch_size])
        del order[:batch_size]


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a worker process is told."""

    method: str
    center: str  # its address
    worker: str  # the name by which the center knows this worker, in all of its lives
    rank: int
    data: str  # an .npz file with images and labels
    classes: int
    batch: int
    period: int
    exchanges: int  # of all workers together
    slowdown: int  # 3 for a worker that takes three times as long for a step
    dies_at: int | None  # version of the center at which its first life ends
    seed: int


@dataclasses.dataclass(frozen=True)
class Report:
    """A line of JSON to the launcher, at the start of a life and after an exchange."""

    life: int
    version: int  # of the center
    staleness: int | None = None  # of the message; None at the start


def work(job: Job) -> None:
    """Trains until all workers together have made the exchanges that are wanted.

    So the fast ones make most of them, and nobody waits for anybody.
    """
    method = METHODS[job.method]
    assert method.rule is not None
    life = int(os.environ["AGN_OPTAX_RESTARTS"])
    with np.load(job.data) as data:
        images, labels = jnp.asarray(data["images"]), jnp.asarray(data["labels"])
    # Everybody has all of the data, each in an order of its own, so that none of it is
    # lost with a worker; and a new life goes through it anew.
    rows = batches(len(labels), job.batch, job.seed, job.rank, life)

    with (
        service.connect(job.center, method.rule()) as center,
        agn_optax.Worker(
            center, method.inner(), period=job.period, name=job.worker
        ) as worker,
    ):
        local_step = make_local_step(Network(job.classes), worker.tx)
        # Compiled before the start, at which all workers wait for each other once.
        params = center.pull().params
        local_step(params, worker.tx.init(params), images, labels, next(rows))

        # In a later life too: the center is all that a worker needs to go on.
        params, state = worker.start()
        tell(Report(life, worker.version))
        for batch in rows:
            begin = time.perf_counter()
            params, state = local_step(params, state, images, labels, batch)
            jax.block_until_ready(params)
            time.sleep((job.slowdown - 1) * (time.perf_counter() - begin))
            dies = life == 0 and job.dies_at is not None
            if dies and worker.version >= job.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)  # without a word to anybody
            exchanges = worker.exchanges
            params, state = worker.exchange(params, state)
            if worker.exchanges > exchanges:
                tell(Report(life, worker.version, worker.staleness))
                if worker.version >= job.exchanges:
                    return


def tell(report: Report) -> None:
    """Says something to the launcher, which reads this process's output."""
    print(json.dumps(dataclasses.asdict(report)), flush=True)


if __name__ == "__main__":
    try:
        work(Job(**json.loads(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(130)
