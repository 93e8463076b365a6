"""Local steps while an exchange is in flight, compared with undisturbed steps.

A `Worker(overlap=True)` trains a model whose exchange takes as long as several of its
steps. JAX has one core; the center and all threads of the exchange have the others. In
every round the steps during the exchange are compared with the other steps: "speed" is
the rate during the exchange relative to the other rate, the median of the rounds with
its quartiles. The first step of an exchange waits until the contribution is made;
"later" is the rate without that step. "lost" is the additional time of all steps
during the exchange in milliseconds, and "whole round" includes the adoption after it.

The bound is the rate of local steps with no exchange at all, while the other core
copies memory.

There are two models of the same size: one trains a few of its layers (a step of matrix
products), the other all of them (so that a step also moves the whole model through
memory).

    python benchmarks/overlap.py --megabytes 400
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import time
from typing import Any

import centers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from processes import Process, on_cores
from report import Report, Row, parse

import agn_optax

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """Square layers, of which the first ``trained`` are used."""

    layers: int
    width: int
    trained: int
    batch: int

    @property
    def bytes(self) -> int:
        """The bytes of all layers."""
        return 4 * self.layers * self.width**2

    def loss(self, params: PyTree, inputs: jax.Array) -> jax.Array:
        """Return the loss of an autoencoder."""
        hidden = inputs
        for weights in params[: self.trained]:
            hidden = jnp.tanh(hidden @ weights.reshape(self.width, self.width))
        return jnp.mean((hidden - inputs) ** 2)


@dataclasses.dataclass
class Span:
    """A span of time."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return self.end - self.start

    def holds(self, other: Span) -> bool:
        """Return whether another span lies within this one."""
        return self.start <= other.start and other.end <= self.end

    def meets(self, other: Span) -> bool:
        """Return whether another span overlaps this one."""
        return self.start < other.end and other.start < self.end


def windows(seconds: float, number: int) -> list[Span]:
    """Return ``number`` spans of equal length, with pauses of the same length."""
    start = time.monotonic() + seconds
    starts = [start + 2 * seconds * n for n in range(number)]
    return [Span(start, start + seconds) for start in starts]


def copy(size: int, when: list[Span]) -> None:
    """Copy ``size`` bytes repeatedly within given spans."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    for span in when:
        time.sleep(max(0.0, span.start - time.monotonic()))
        while time.monotonic() < span.end:
            np.copyto(target, source)


def local_step(model: Model, tx: optax.GradientTransformation) -> Any:
    """Return a compiled function (params, state) -> (params, state)."""
    inputs = jnp.ones((model.batch, model.width))

    def step(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        grads = jax.grad(model.loss)(params, inputs)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


@functools.cache
def alone(model: Model) -> Any:
    """Return an optimizer and its local step, compiled once."""
    inner = optax.sgd(1e-3)
    return inner, local_step(model, inner)


def train_alone(model: Model, end: float) -> list[Span]:
    """Make local steps until ``end``, and return all but the first."""
    params: PyTree = [jnp.zeros(model.width**2) for _ in range(model.layers)]
    inner, step = alone(model)
    loop = step(params, inner.init(params))
    steps = []
    while time.monotonic() < end:
        start = time.monotonic()
        loop = jax.block_until_ready(step(*loop))
        steps.append(Span(start, time.monotonic()))
    return steps


def bound(
    model: Model, worker: Process, other: Process, seconds: float, number: int
) -> Row:
    """Measure local steps while the other core copies, in windows of time."""
    worker.call(train_alone, model, 0.0)
    when = windows(seconds, number)
    other.ask(copy, model.bytes, when)
    steps = worker.call(train_alone, model, when[-1].end)
    other.answer()
    speeds, quiet = [], []
    for span in when[:-1]:
        pause = Span(span.end, 2 * span.end - span.start)
        disturbed, undisturbed = (
            float(np.median([step.seconds for step in steps if part.holds(step)]))
            for part in (span, pause)
        )
        quiet.append(undisturbed)
        speeds.append(undisturbed / disturbed)
    return {"step_ms": 1e3 * float(np.median(quiet)), **spread(speeds)}


def median(rounds: list[dict[str, float]], key: str) -> float:
    """Return the median of one value over all rounds."""
    return float(np.median([each[key] for each in rounds]))


def spread(speeds: list[float]) -> Row:
    """Return median and quartiles."""
    low, middle, high = np.percentile(speeds, [25, 50, 75])
    return {
        "speed": round(float(middle), 3),
        "quartiles": [round(float(low), 3), round(float(high), 3)],
    }


@dataclasses.dataclass
class Trace:
    """All local steps and all exchanges."""

    steps: list[Span]
    flights: list[Span]


def train(
    model: Model, address: str, transport: str, rounds: int, cores: list[int]
) -> Trace:
    """Train in a process that began on one core; ``cores`` are the others."""
    square = jnp.ones((model.width, model.width))
    jax.block_until_ready(square @ square)  # JAX has started all its threads now
    trace = Trace([], [])
    departures: list[float] = []
    length, answered = 2, 0
    with on_cores(cores):  # for the threads of the connection
        center = centers.connect(address, transport)
        join = center.join

        def joined(*args: Any, **kwargs: Any) -> Any:
            session = join(*args, **kwargs)
            exchange = session.exchange

            def traced(*args: Any, **kwargs: Any) -> Any:
                with on_cores(cores):  # for the thread of an exchange
                    start = time.monotonic()
                    answer = exchange(*args, **kwargs)
                    trace.flights.append(Span(start, time.monotonic()))
                return answer

            session.exchange = traced
            return session

        center.join = joined
        worker = agn_optax.Worker(
            center, optax.sgd(1e-3), period=lambda _: length, overlap=True
        )
        params, state = worker.start()

    local = local_step(model, worker.tx)
    (exchanges,) = worker._parts
    while len(trace.flights) < 4 + rounds:
        start = time.monotonic()
        params, state = jax.block_until_ready(local(params, state))
        trace.steps.append(Span(start, time.monotonic()))
        start, before = time.monotonic(), exchanges.message
        params, state = worker.exchange(params, state)
        if exchanges.message is not None and exchanges.message is not before:
            departures.append(start)
        if len(trace.flights) > max(answered, 1):  # all programs are compiled by now
            answered = len(trace.flights)
            flight = max(flight.seconds for flight in trace.flights[1:])
            quiet = float(np.median([step.seconds for step in trace.steps]))
            length = min(2000, 4 + math.ceil(2.5 * flight / quiet))
    worker.flush(params, state)
    center.close()
    # Leave out the first exchange, which waited, and the next two, whose rounds were
    # too short.
    trace.flights = [
        Span(start, flight.end)
        for start, flight in zip(departures, trace.flights[1:], strict=False)
    ][2 : 3 + rounds]
    return trace


def rounds_of(trace: Trace) -> list[dict[str, float]]:
    """Return the values of each round, from one departure to the next."""
    found = []
    for flight, following in zip(trace.flights, trace.flights[1:], strict=False):
        whole = Span(flight.start, following.start)
        quiet = Span(flight.end, following.start)
        steps = [step for step in trace.steps if whole.holds(step)]
        # A fast exchange ends before the first step does.
        within = [step.seconds for step in steps if flight.meets(step)]
        # The first step after the answer waits for the adoption.
        outside = [step.seconds for step in steps if quiet.holds(step)][1:]
        if within and outside:
            alone = float(np.mean(outside))
            each = {
                "outside": alone,
                "speed": alone / float(np.mean(within)),
                "flight": flight.seconds,
                "lost": sum(within) - len(within) * alone,
                "whole": alone / (whole.seconds / len(steps)),
            }
            if within[1:]:
                each["later"] = alone / float(np.mean(within[1:]))
            found.append(each)
    if not found:
        raise ValueError("no step lay within an exchange: give a larger --megabytes")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Local steps during an exchange.")
    add = parser.add_argument
    add("--megabytes", type=float, default=400, help="of the model")
    add("--width", type=int, default=1000, help="of its layers")
    add("--trained", type=int, default=12, help="layers that the first model trains")
    add("--batch", type=int, default=64, help="of that; larger ones have less")
    add("--rounds", type=int, default=8)
    add("--window", type=float, default=2.0, help="seconds of copying, for the bound")
    add("--transports", nargs="+", default=centers.TRANSPORTS)
    small = {"megabytes": 5, "width": 500, "trained": 1, "batch": 64, "rounds": 2}
    args = parse(parser, transports=["memory"], window=0.2, **small)
    report = Report(args.json)
    layers = max(2, round(1e6 * args.megabytes / 4 / args.width**2))
    trained = min(args.trained, layers - 1)
    models = {
        f"{trained} of {layers} layers": Model(layers, args.width, trained, args.batch),
        f"all {layers} layers": Model(
            layers, args.width, layers, max(1, args.batch * trained // layers)
        ),
    }
    cores = sorted(os.sched_getaffinity(0))
    bounds: list[Row] = []
    rows: list[Row] = []
    others = cores[1:] or cores
    runs = itertools.product(models.items(), args.transports)
    with Process(others) as server, Process(cores[:1]) as process:
        for name, model in models.items():
            found = bound(model, process, server, args.window, args.rounds + 1)
            bounds.append({"trained": name, **found})
        for (name, model), transport in runs:
            with centers.served(server, model.bytes, layers) as address:
                trace = process.call(
                    train, model, address, transport, args.rounds, others
                )
            rounds = rounds_of(trace)
            longer = [each for each in rounds if "later" in each]
            rows.append(
                {
                    "trained": name,
                    "transport": transport,
                    "step_ms": 1e3 * median(rounds, "outside"),
                    "exchange_ms": 1e3 * median(rounds, "flight"),
                    **spread([each["speed"] for each in rounds]),
                    "later": median(longer, "later") if longer else None,
                    "lost_ms": 1e3 * median(rounds, "lost"),
                    "whole_round": median(rounds, "whole"),
                }
            )
    title = (
        f"local steps during an exchange of {args.megabytes:g} MB, JAX on one of "
        f"{len(cores)} cores"
    )
    report.add("bound", "local steps while the other core copies memory", bounds)
    report.add("overlap", title, rows)
    report.write()


if __name__ == "__main__":
    main()
