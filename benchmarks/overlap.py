"""Local steps while an exchange is in flight, compared with undisturbed steps.

A `Worker(overlap=True)` trains a model whose exchange takes as long as several of its
steps. JAX has one core; the center and all threads of the exchange have the others. In
every round the steps during the exchange are compared with the other steps: "speed" is
the rate during the exchange relative to the other rate, the median of the rounds with
its quartiles. The first step of an exchange waits until the contribution is made;
"later" is the rate without that step. "whole round" includes the adoption after it.

There are two models of the same size: one trains a few of its layers (a step of matrix
products), the other all of them (so that a step also moves the whole model through
memory).

    python benchmarks/overlap.py --megabytes 400
"""

import contextlib
import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import centers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import Benchmark, Process, Row, spread
from optimizer_overhead import loss

import agn_optax
from agn_optax.center import Session

PyTree = Any
BATCH, WIDTH, TRAINED = 64, 1000, 12
SGD = optax.sgd(1e-3)


class Model(NamedTuple):
    """Square layers, of which the first ``trained`` are used."""

    layers: int
    trained: int
    batch: int

    def local_step(self, tx: optax.GradientTransformation) -> Any:
        """Return a compiled function (params, state) -> (params, state)."""
        inputs = jnp.ones((self.batch, WIDTH))

        def own_loss(params: PyTree) -> jax.Array:
            own = [leaf.reshape(WIDTH, WIDTH) for leaf in params[: self.trained]]
            return loss(own, inputs)

        def step(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            updates, state = tx.update(jax.grad(own_loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        return jax.jit(step, donate_argnums=(0, 1))


Spans = list[tuple[float, float]]  # begins and ends


@contextlib.contextmanager
def on_cores(cores: list[int]) -> Iterator[None]:
    """Let threads that this thread starts run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    yield
    os.sched_setaffinity(0, before)


def train(
    model: Model, address: str, transport: str, rounds: int, cores: list[int]
) -> tuple[Spans, Spans]:
    """Return steps and exchanges; JAX has started all its threads before, on one core.

    Args:
      model: the model.
      address: address of the center.
      transport: transport of the exchanges.
      rounds: exchanges to return, and one more.
      cores: the other cores, for all threads of the exchanges.
    """
    steps, answers, departures = Spans(), Spans(), []
    length, answered, exchange = 2, 0, Session.exchange

    def traced(*args: Any, **kwargs: Any) -> Any:
        with on_cores(cores):  # for the thread of an exchange
            start = time.monotonic()
            answer = exchange(*args, **kwargs)
            answers.append((start, time.monotonic()))
        return answer

    with mock.patch.object(Session, "exchange", traced):
        with on_cores(cores):  # for the threads of the connection
            center = centers.connect(address, transport)
            worker = agn_optax.Worker(
                center, SGD, period=lambda _: length, overlap=True
            )
            params, state = worker.start()
        local = model.local_step(worker.tx)
        while len(answers) < 4 + rounds:
            start = time.monotonic()
            params, state = jax.block_until_ready(local(params, state))
            steps.append((start, time.monotonic()))
            start, before = time.monotonic(), worker._workers[0].message
            params, state = worker.exchange(params, state)
            if worker._workers[0].message not in (None, before):
                departures.append(start)
            if len(answers) > max(answered, 1):  # all programs are compiled by now
                answered = len(answers)
                flight, quiet = np.max(np.diff(answers[1:])), np.median(np.diff(steps))
                length = min(2000, 4 + math.ceil(2.5 * flight / quiet))
        worker.flush(params, state)
    center.close()
    # Leave out the first exchange, which waited, and the next two, whose rounds were
    # too short.
    ends = [end for _, end in answers[1:]]
    return steps, list(zip(departures, ends, strict=False))[2 : 3 + rounds]


def row_of(steps: Spans, flights: Spans) -> Row:
    """Return the numbers of a row: medians of all rounds but the last."""
    samples: dict[str, list[float]] = defaultdict(list)
    for (start, answered), (following, _) in itertools.pairwise(flights):
        whole_steps = [(a, b) for a, b in steps if start <= a and b <= following]
        # A fast exchange ends before the first step does.
        within = [end - begin for begin, end in whole_steps if begin < answered]
        # The first step after the answer waits for the adoption.
        outside = [end - begin for begin, end in whole_steps if begin >= answered][1:]
        if within and outside:
            alone = float(np.mean(outside))
            samples["step_ms"].append(1e3 * alone)
            samples["exchange_ms"].append(1e3 * (answered - start))
            samples["speed"].append(alone / float(np.mean(within)))
            samples["whole_round"].append(
                alone * len(whole_steps) / (following - start)
            )
            if within[1:]:
                samples["later"].append(alone / float(np.mean(within[1:])))
    if not samples:
        raise ValueError("no step lay within an exchange: give a larger --megabytes")
    medians = {key: float(np.median(values)) for key, values in samples.items()}
    return {"later": None} | medians | spread("speed", samples["speed"])


class Overlap(Benchmark, quick="--megabytes 8 --transports memory"):
    """Local steps during an exchange.

    Args:
      megabytes: size of the model.
      rounds: exchanges that are measured.
      transports: transports of the exchanges.
    """

    megabytes: float = 400.0
    rounds: int = 8
    transports: Sequence[str] = centers.TRANSPORTS

    def run(self) -> None:
        """Measure both models with each transport."""
        layers = max(2, round(1e6 * self.megabytes / 4 / WIDTH**2))
        size, some = 4 * layers * WIDTH**2, min(TRAINED, layers - 1)
        models = {f"{some} of": Model(layers, some, BATCH)}
        models["all"] = Model(layers, layers, max(1, BATCH * some // layers))
        cores = sorted(os.sched_getaffinity(0))
        others, rows = cores[1:] or cores, []
        server, process = self.use(Process()), self.use(Process())
        server.call(os.sched_setaffinity, 0, others)
        process.call(os.sched_setaffinity, 0, cores[:1])
        process.call(centers.tree, 4.0)  # starts all threads of JAX, on one core
        for trained, model in models.items():
            for transport in self.transports:
                address = server.call(centers.serve, size, layers)
                how = (model, address, transport, self.rounds, others)
                row = {"trained": f"{trained} {layers} layers", "transport": transport}
                rows.append(row | row_of(*process.call(train, *how)))
                server.call(centers.stop, address)
        title = f"local steps during an exchange of {self.megabytes:g} MB"
        self.add("overlap", f"{title}, JAX on one of {len(cores)} cores", rows)


if __name__ == "__main__":
    Overlap.main()
