"""Simulated runs against real ones.

A real run has a center and workers in processes of their own, which train a network on
scikit-learn's digits. A local step is a gradient and a pause up to the time of the
step, which varies from round to round. The center keeps a tape, and workers report
the seconds of their local steps and of their exchanges. So all numbers of a real run
are read from its tape, those of a worker that was killed, too.

The simulation gets the batches of the run and the cluster of its tape: the times of the
local steps, and when workers joined and were killed. The rest is measured before the
runs: the seconds of a call that exchanges, of one worker alone; how many exchanges a
second the center makes for all workers together; and the rate of a slow link, with one
worker.

There are three runs of each case, with different first parameters, batches and times of
local steps. Each is simulated. The table has means of the three; an error is the
largest of the three.

    exchanges a second    messages that the center applied, by the seconds of the run
    staleness             mean of these messages
    histograms differ     half of the sum of the differences between two histograms of
                          staleness, as fractions of all messages
    waiting               fraction of the workers' time in calls that exchange; its
                          error is in percent of the whole time
    loss                  of the center on held-out digits, at the end of the run
    in the band           the number of eight times, evenly spread over the run, at
                          which the mean loss of the simulations is neither below nor
                          above those of all real runs

The slow links are paced by the kernel, for each worker's connection alone. The shared
link is a proxy, whose rate all connections share. In the case "kill", the processes of
two workers are killed by SIGKILL, one after another. A new process joins by the name of
the first one when the lease of the dead process has ended, and by that of the second
one before.

    python benchmarks/reality.py
    python benchmarks/reality.py --only unequal --window 60
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import centers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.network import Network
from measuring import Benchmark, Process, Row

import agn_optax
from agn_optax import service, simulate, tape
from agn_optax.center import Asynchronous, BoundedStaleness, Journal, Mode, Synchronous
from examples import datasets, two_hosts
from examples.pacing import pace

PyTree = Any
PERIOD = 5
ROWS = 32  # of a batch
SPREAD = 0.1  # standard deviation of the logarithm of a round's time
LEASE = 3.0  # s
WARM_UP = 1.0  # s, before all measurements
CALIBRATION = 4.0  # s, for each measurement before the runs
TIMES = 8  # at which losses are compared
MEMORY = "/dev/shm"  # noqa: S108 a disk in memory, so that the tape takes little time
STEP = "step_seconds"  # number that workers report
PARAMS_PER_UNIT = 64 + 1 + 10  # of a hidden unit


class Kill(NamedTuple):
    """A worker whose process is killed."""

    worker: int
    at: float  # fraction of the window
    down: float  # s, until another process of the same name joins


class Case(NamedTuple):
    """A run: seconds of each worker's steps, bytes, and bytes per second of links."""

    steps: Sequence[float]
    size: int = 40_000
    bandwidth: float | None = None  # of each worker's link
    shared: float | None = None  # of the center's link
    mode: Mode = Asynchronous()
    kills: Sequence[Kill] = ()

    @property
    def hidden(self) -> int:
        """The hidden units of a network of this size."""
        return round(self.size / 4 / PARAMS_PER_UNIT)

    @property
    def limits(self) -> service.Limits:
        """The limits of the center."""
        return service.Limits(max_workers=None, calls=None, lease=LEASE)


UNEQUAL = [0.021, 0.033, 0.047, 0.088]
CASES = {
    "equal": Case([0.030] * 4),
    "unequal": Case(UNEQUAL),
    "slow links": Case(UNEQUAL, 2_000_000, bandwidth=20e6),
    "shared link": Case(UNEQUAL, 400_000, shared=4e6),
    "kill": Case(
        [0.021, 0.030, 0.030, 0.033],
        mode=BoundedStaleness(rounds=4),
        kills=[Kill(1, 0.25, down=LEASE + 2), Kill(2, 0.6, down=1.0)],
    ),
    "quorum": Case(UNEQUAL, mode=Synchronous(3, grace=0.1)),
}


class Numbers(NamedTuple):
    """The numbers of a run, real or simulated."""

    rate: float  # applied messages per second
    staleness: np.ndarray  # of each of them
    waiting: float  # fraction of the workers' time
    losses: np.ndarray  # at `TIMES` times


class Calibration(NamedTuple):
    """The measurements before a run."""

    alone: float  # seconds of a call that exchanges, of one worker alone
    paced: float  # the same over a slow link
    together: float  # exchanges a second of all workers


# What is trained.


@functools.cache
def digits() -> datasets.Dataset:
    """Return the digits, on the device."""
    with jax.ensure_compile_time_eval():  # the first call comes from a traced function
        name, *splits = datasets.digits()
        return datasets.Dataset(name, *jax.tree.map(jnp.asarray, splits))


def batch(seed: Any, worker: Any, step: Any) -> datasets.Split:
    """Return the batch of a worker for a local step."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), worker), step)
    train = digits().train
    rows = jax.random.randint(key, (ROWS,), 0, len(train.labels))
    return jax.tree.map(lambda leaf: leaf[rows], train)


def first_params(case: Case, seed: int = 0) -> PyTree:
    """Return the first parameters of the center."""
    return two_hosts.make_params(64, hidden=case.hidden, seed=seed)


@jax.jit
def loss_of(params: PyTree) -> jax.Array:
    """Return the loss on held-out digits."""
    return two_hosts.loss_fn(params, digits().test)


@functools.cache
def inner(hidden: int) -> optax.GradientTransformation:
    """Return the inner optimizer, whose rate suits the width of the network."""
    return optax.sgd(2.0 / hidden)


@functools.cache
def local_step(update: Any) -> Any:
    """Return a compiled local step, the same one for all workers of a process."""

    @jax.jit
    def step(params: PyTree, state: PyTree, *which: int) -> Any:
        grads = jax.grad(two_hosts.loss_fn)(params, batch(*which))
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


# In the process of the center.

_stacks: dict[str, contextlib.ExitStack] = {}


def serve(case: Case, seed: int, durability: Journal) -> str:
    """Serve a center, behind a proxy if its link is slow; return its address."""
    logging.getLogger("agn_optax").setLevel(logging.ERROR)
    server = service.serve(
        centers.rule(),
        first_params(case, seed),
        address="127.0.0.1:0",
        mode=case.mode,
        limits=case.limits,
        durability=durability,
    )
    stack = contextlib.ExitStack()
    stack.callback(server.stop, grace=10.0)
    address = server.address
    if case.shared is not None:
        network = Network(server, "socket", case.shared)
        address = stack.enter_context(network).address
    _stacks[address] = stack
    return address


def close(address: str) -> None:
    """Close a center, and its proxy."""
    _stacks.pop(address).close()


# In the process of a worker.

_center: Any = None


def connect(address: str) -> None:
    """Connect to a center, instead of the last one."""
    global _center  # one for each process
    logging.getLogger("agn_optax").setLevel(logging.ERROR)
    if _center is not None:
        _center.close()
    _center = centers.connect(address, "socket")


class Part(NamedTuple):
    """The part of a worker in a run."""

    number: int
    seconds: float
    start: float = 0.0  # time.monotonic()
    seed: int = 0
    first: int = 0  # number of the first local step
    exchanges: bool = True  # False for local steps alone


def work(case: Case, part: Part) -> list[float]:
    """Make rounds in a session of a while; return the seconds of their exchanges."""
    number = part.number
    random = np.random.default_rng((part.seed, number, part.first))
    made = itertools.count(part.first)
    worker = agn_optax.Worker(
        _center, inner(case.hidden), period=PERIOD, name=f"worker-{number}"
    )
    step = local_step(worker.tx.update)
    time.sleep(max(0.0, part.start - time.monotonic()))
    loop = worker.start()
    if case.bandwidth is not None:
        pace(case.bandwidth)
    waits: list[float] = []
    now = time.monotonic()
    end = (part.start or now) + part.seconds
    while now < end:
        begun = due = time.monotonic()
        pause = case.steps[number] * np.exp(SPREAD * random.standard_normal())
        for _ in range(PERIOD):
            loop = jax.block_until_ready(step(*loop, part.seed, number, next(made)))
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
            sent = time.monotonic()
            if part.exchanges:
                waited = waits[-1] if waits else 0.0
                worker.report(**{STEP: (sent - begun) / PERIOD, "waited": waited})
                loop = jax.block_until_ready(worker.exchange(*loop))
        now = time.monotonic()
        waits.append(now - sent)
    worker.leave()
    return waits


def exchange_for(case: Case, number: int, seconds: float) -> float:
    """Exchange without steps for a while; return how often in a second."""
    params = jax.tree.map(lambda x: 1e-9 * x, first_params(case))
    run = centers.exchanging(_center, params, f"bare-{number}")
    run()
    return 1 / centers.seconds_of_one(run, seconds)


# In the process of the benchmark.


class Recording(NamedTuple):
    """A real run, as its tape has it."""

    numbers: Numbers
    cluster: simulate.Cluster
    begin: float  # s since the center began, when the first worker joined


def losses_at(times: Any, seconds: Any, losses: Any) -> np.ndarray:
    """Return losses at some times; ``losses`` are those of versions at ``seconds``."""
    return np.asarray(losses)[np.searchsorted(seconds, times, side="right") - 1]


def times_of(begin: float, window: float) -> np.ndarray:
    """Return the times at which losses are compared."""
    return begin + window * np.arange(1, TIMES + 1) / TIMES


def read(folder: str, window: float) -> Recording:
    """Read the tape of a run, which begins when the first worker joins."""
    found = tape.read(folder)
    events = [*found.events()]
    begin = next(event.time for event in events if event.kind == "join")
    inside = [event for event in events if event.time <= begin + window]
    spent = defaultdict[str, Any](lambda: np.zeros(2))  # s: in all, and waiting
    for message in (message for event in inside for message in event.messages):
        steps, waited = PERIOD * message.reported[STEP], message.reported["waited"]
        spent[message.worker] += (steps + waited, waited)
    staleness = [message.staleness for event in inside for message in event.applied]
    measured = tape.evaluate(found, centers.rule(), loss_of)
    seconds = [each.time for each in measured]
    losses = [each.numbers["value"] for each in measured]
    numbers = Numbers(
        len(staleness) / window,
        np.array(staleness),
        float(np.mean([waited / whole for whole, waited in spent.values()])),
        losses_at(times_of(begin, window), seconds, losses),
    )
    cluster = simulate.cluster_of(found, lease=LEASE, reported=STEP)
    return Recording(numbers, cluster, begin)


def simulated(
    case: Case, seed: int, calibration: Calibration, real: Recording, window: float
) -> Numbers:
    """Return the numbers of the simulation of a real run."""
    alone, extra = calibration.alone, calibration.paced - calibration.alone
    host = min(alone, 1 / calibration.together)
    rate = None if case.bandwidth is None else 2 * case.size / max(extra, 1e-3)
    found = simulate.run(
        centers.rule(),
        inner(case.hidden),
        two_hosts.loss_fn,
        functools.partial(batch, seed),
        first_params(case, seed),
        cluster=dataclasses.replace(
            real.cluster,
            link=simulate.Link(latency=alone - host, bandwidth=rate),
            center=simulate.CenterHost(seconds=host, bandwidth=case.shared),
        ),
        period=PERIOD,
        mode=case.mode,
        limits=case.limits.of_center,
        seconds=real.begin + window,
        evaluate=loss_of,
        every=1,
    )
    planned = found.schedule
    times = times_of(real.begin, window)
    return Numbers(
        len(planned.applied) / window,
        planned.staleness[planned.applied],
        float(np.mean(1 - planned.utilization)),
        losses_at(times, found.evaluation_seconds, found.evaluations),
    )


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return half of the sum of the differences of two histograms, as fractions."""
    most = 1 + max(one.max(), other.max())
    first, second = (np.bincount(s, minlength=most) / len(s) for s in (one, other))
    return float(np.abs(first - second).sum() / 2)


def all_of(
    crew: Sequence[Process], function: Any, arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Call a function in processes at the same time, and return its results."""
    submitted = [
        process.submit(function, *each)
        for process, each in zip(crew, arguments, strict=True)
    ]
    return [answer.result() for answer in submitted]


class Reality(Benchmark, quick="--window 4 --only unequal"):
    """Simulated runs against real ones.

    Args:
      only: the cases.
      window: seconds of a real run.
    """

    only: Sequence[str] = tuple(CASES)
    window: float = 30.0
    repeats = 3

    def run(self) -> None:
        """Compare all cases."""
        rows = []
        for name in self.only:
            with contextlib.ExitStack() as self.stack:
                self.use = self.stack.enter_context
                rows.append({"run": name, **self.compare(CASES[name])})
                print(rows[-1], file=sys.stderr)  # progress
        title = f"Real and simulated runs, {self.repeats} of {self.window:g} s each"
        self.add("reality", title, rows)

    def compare(self, case: Case) -> Row:
        """Return the row of a case."""
        self.center = self.use(Process())
        practice = case._replace(mode=Asynchronous(), shared=None)
        folder = self.use(tempfile.TemporaryDirectory(dir=MEMORY))
        self.practice = self.center.call(serve, practice, 0, Journal(folder))
        self.crew = self.hire(case, range(len(case.steps)))
        calibration = self.calibrate(case)
        pairs = []
        for seed in range(self.repeats):
            with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
                recording = self.real(case, seed, folder)
            found = simulated(case, seed, calibration, recording, self.window)
            pairs.append((recording.numbers, found))
        return self.row(pairs)

    def hire(self, case: Case, numbers: Sequence[int]) -> list[Process]:
        """Return processes for workers, in which all programs are compiled."""
        crew = [self.use(Process()) for _ in numbers]
        all_of(crew, connect, [(self.practice,)] * len(crew))
        case = case._replace(bandwidth=None)
        all_of(crew, work, [(case, Part(number, WARM_UP)) for number in numbers])
        return crew

    def calibrate(self, case: Case) -> Calibration:
        """Measure what a simulation must know."""
        numbers = range(len(case.steps))

        def exchange(case: Case) -> float:
            """Return the mean seconds of an exchange; others only make local steps."""
            parts = [Part(i, CALIBRATION, exchanges=i == 0) for i in numbers]
            _, *waits = all_of(self.crew, work, [(case, part) for part in parts])[0]
            return float(np.mean(waits))  # without the first one, which takes longer

        alone = paced = exchange(case._replace(bandwidth=None))
        rates = all_of(
            self.crew, exchange_for, [(case, i, CALIBRATION) for i in numbers]
        )
        if case.bandwidth is not None:
            self.center.call(pace, case.bandwidth)
            paced = exchange(case)
            self.center.call(pace, centers.LOOPBACK)
        return Calibration(alone, paced, sum(rates))

    def real(self, case: Case, seed: int, folder: str) -> Recording:
        """Make a real run; ``folder`` is the directory of its center."""
        spares = self.hire(case, [kill.worker for kill in case.kills])
        journal = Journal(folder, keep="contributions")
        address = self.center.call(serve, case, seed, journal)
        all_of(self.crew + spares, connect, [(address,)] * len(self.crew + spares))
        if case.bandwidth is not None:
            self.center.call(pace, case.bandwidth)
        start, window = time.monotonic() + 0.5, self.window
        submitted = [
            process.submit(work, case, Part(i, window, start, seed))
            for i, process in enumerate(self.crew)
        ]
        for kill, spare in zip(case.kills, spares, strict=True):
            at = kill.at * window
            time.sleep(max(0.0, start + at - time.monotonic()))
            self.crew[kill.worker].kill()
            later = time.monotonic() - start + kill.down
            # Its local steps have other numbers than those of the dead process.
            part = Part(kill.worker, window - later, start + later, seed, 1_000_000)
            self.crew[kill.worker] = spare
            submitted[kill.worker] = spare.submit(work, case, part)
        for answer in submitted:
            answer.result()
        self.center.call(close, address)
        self.center.call(pace, centers.LOOPBACK)
        return read(folder, window)

    def row(self, pairs: Sequence[tuple[Numbers, Numbers]]) -> Row:
        """Return the row of real runs and their simulations."""
        reals, ours = zip(*pairs, strict=True)

        def both(function: Any) -> tuple[list[float], Any]:
            """Return the means, and the values of all runs."""
            values = [[*map(function, runs)] for runs in (reals, ours)]
            return [float(np.mean(each)) for each in values], np.array(values)

        rates, rate = both(lambda run: run.rate)
        means, mean = both(lambda run: run.staleness.mean())
        waits, waiting = both(lambda run: 100 * run.waiting)
        apart = [distance(x.staleness, y.staleness) for x, y in pairs]
        by_chance = [
            distance(x.staleness, y.staleness)
            for x, y in itertools.combinations(reals, 2)
        ]
        real = np.array([run.losses for run in reals])  # [runs, times]
        mine = np.mean([run.losses for run in ours], axis=0)  # [times]
        low, high = real.min(axis=0), real.max(axis=0)

        def percent(value: Any) -> float:
            return round(100 * float(value), 2)

        return {
            "exchanges a second [real, simulated]": rates,
            "error, %": percent(np.abs(rate[1] / rate[0] - 1).max()),
            "staleness [real, simulated]": means,
            "its error, %": percent(np.abs(mean[1] / mean[0] - 1).max()),
            "histograms differ by, %": percent(np.mean(apart)),
            "those of two real runs, %": percent(np.mean(by_chance or 0)),
            "waiting, % [real, simulated]": waits,
            "its error": round(float(np.abs(waiting[1] - waiting[0]).max()), 2),
            "loss [real: lowest, highest]": [float(low[-1]), float(high[-1])],
            "simulated": float(mine[-1]),
            f"in the band, of {TIMES}": int(np.sum((low <= mine) & (mine <= high))),
        }


if __name__ == "__main__":
    Reality.main()
