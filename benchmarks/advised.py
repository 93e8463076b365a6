"""The advice of `agn_optax.planning.advise` against real runs.

Three settings lie between those of the simulations that the advice comes from. In each,
a center and workers have processes of their own and train the network of those
simulations (docs/figures/advice.py), with the method that is advised and with three
others, for the same time. A local step is a gradient and a pause up to the time of the
step. Each worker has a link of its own, a proxy that passes on so many bytes a second
that an exchange without a codec takes the time of the setting. In the setting "kills",
two worker processes are killed by SIGKILL, and others join by their names later.

    real         loss of the center on held-out digits at the end: the mean of the
                 seeds, and the lowest and highest
    simulated    the mean of simulations of the same setting
    behind       by how much the real loss is above the lowest one of the setting, %

    python benchmarks/advised.py
    python benchmarks/advised.py --only kills --seeds 3
"""

import contextlib
import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import reality
from helpers.network import Proxy
from measuring import Benchmark, Process, Row

import agn_optax
from agn_optax import planning, service, simulate
from docs.figures import advice

LINKS = "127.0.0.1"


class Kill(NamedTuple):
    """A worker whose process is killed."""

    worker: int
    at: float  # fraction of the run


class Case(NamedTuple):
    """A setting between those of the advice."""

    setting: advice.Setting
    steps: float  # local steps of the median worker in the time of the run
    kills: Sequence[Kill] = ()
    step: float = 0.25  # s of the median worker


CASES = {
    "five": Case(advice.Setting(5, 1.0, 1.5), 120.0),
    "slow links": Case(advice.Setting(3, 20.0), 600.0, step=0.1),
    "kills": Case(
        advice.Setting(3, 1.0, 3.0, 1 / 180), 120.0, [Kill(1, 0.3), Kill(2, 0.6)]
    ),
}


@functools.cache
def task() -> advice.Task:
    """Return the task of a process."""
    return advice.Task()


@functools.cache
def local_step(update: Any) -> Any:
    """Return a compiled local step."""

    @jax.jit
    def step(params: Any, state: Any, worker: int, number: int) -> Any:
        grads = jax.grad(task().loss)(params, task().data(worker, number))
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


# In the process of the center.

_stack = contextlib.ExitStack()
_center: list[Any] = []


def serve(case: Case, candidate: advice.Candidate, seed: int) -> list[str]:
    """Serve a center; return its address over each worker's link."""
    logging.getLogger("agn_optax").setLevel(logging.ERROR)
    setting = case.setting
    rule = advice.rule_of(candidate.method, setting.workers, candidate.codec)
    server = service.serve(
        rule,
        task().params(seed),
        address=f"{LINKS}:0",
        mode=advice.mode_of(candidate.method, setting.workers),
        limits=service.Limits(
            max_workers=None, calls=None, lease=advice.LEASE * case.step
        ),
    )
    _stack.callback(server.stop, grace=1.0)
    host, _, port = server.address.rpartition(":")
    rate = 2 * advice.MESSAGE / (setting.exchange * case.step)
    addresses = []
    for _ in range(setting.workers):
        proxy = _stack.enter_context(Proxy(rate))
        addresses.append(f"{LINKS}:{proxy.forward((host, int(port)))}")
    _center[:] = [_stack.enter_context(service.connect(server.address, rule))]
    task().held_out(_center[0].pull().params)  # compiled
    return addresses


def loss_at(when: float) -> float:
    """Return the loss of the center at a time of the clock of this machine."""
    time.sleep(max(0.0, when - time.monotonic()))
    return task().held_out(_center[0].pull().params)


def close() -> None:
    """Close the center and the links."""
    _stack.close()


# In the process of a worker.


class Part(NamedTuple):
    """The part of a worker in a run."""

    candidate: advice.Candidate
    workers: int
    number: int
    step: float  # s, the median
    first: int = 0  # number of the first local step


def worker_at(center: Any, part: Part) -> agn_optax.Worker:
    """Return a worker, whose local step is `local_step`."""
    return agn_optax.Worker(
        center,
        task().inner,
        period=part.candidate.period,
        name=f"worker-{part.number}",
        overlap=part.candidate.overlap,
    )


def practice(part: Part) -> None:
    """Make two rounds with a center in this process, which compiles all programs."""
    logging.getLogger("agn_optax").setLevel(logging.ERROR)
    rule = advice.rule_of(part.candidate.method, part.workers, part.candidate.codec)
    worker = worker_at(agn_optax.LocalCenter(rule, task().params(0)), part)
    step, loop = local_step(worker.tx.update), worker.start()
    for number in range(2 * part.candidate.period):
        loop = worker.exchange(*step(*loop, part.number, number))
    worker.leave()


_joined: list[Any] = []  # the center, the worker and its parameters and state


def join(part: Part, address: str) -> None:
    """Connect to a center and adopt its parameters."""
    rule = advice.rule_of(part.candidate.method, part.workers, part.candidate.codec)
    center = service.connect(address, rule, transports=["grpc"])
    worker = worker_at(center, part)
    _joined[:] = [center, worker, worker.start()]


def work(part: Part, begin: float, end: float) -> int:
    """Make local steps and exchanges until a time, and return the number of steps."""
    center, worker, loop = _joined
    step = local_step(worker.tx.update)
    random = np.random.default_rng((part.number, part.first))
    made = 0
    time.sleep(max(0.0, begin - time.monotonic()))
    while time.monotonic() < end:
        due = time.monotonic()
        pause = part.step * np.exp(advice.SIGMA * random.standard_normal())
        for _ in range(part.candidate.period):
            loop = jax.block_until_ready(step(*loop, part.number, part.first + made))
            made += 1
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() > end:
                break
            loop = jax.block_until_ready(worker.exchange(*loop))
    center.close()
    return made


def join_and_work(part: Part, address: str, begin: float, end: float) -> int:
    """Join at a time, and then work."""
    time.sleep(max(0.0, begin - time.monotonic()))
    join(part, address)
    return work(part, begin, end)


# In the process of the benchmark.


def candidates(setting: advice.Setting) -> list[advice.Candidate]:
    """Return what is advised, and three others."""
    found = planning.advise(**setting._asdict())
    advised, second, *_ = (
        advice.candidate_of(**choice._asdict()) for choice in found.best
    )
    period = 16 if setting.exchange < 10 else 64
    others = [
        second,
        *(
            advice.Candidate(method, period)
            for method in (
                "diloco, synchronous, 0.7",
                "dynsgd, asynchronous, 0",
                "easgd, asynchronous, 0.9",
            )
        ),
    ]
    return list(dict.fromkeys([advised, *others]))[:4]


class Advised(Benchmark, quick="--only five --seeds 1 --scale 0.2"):
    """Advised methods against others, in real runs.

    Args:
      only: the cases.
      seeds: number of runs of each method.
      scale: factor of the time of the runs.
    """

    only: Sequence[str] = tuple(CASES)
    seeds: int = 2
    scale: float = 1.0

    def run(self) -> None:
        """Compare the methods in all cases."""
        for name in self.only:
            case = CASES[name]._replace(steps=self.scale * CASES[name].steps)
            with contextlib.ExitStack() as self.stack:
                rows = self.compare(case)
            self.add(name, f"{name}: {case.setting}", rows)

    def compare(self, case: Case) -> list[Row]:
        """Return a row for each method, of which the first is the advised one."""
        self.center = self.hire()
        self.crew = [self.hire() for _ in range(case.setting.workers)]
        rows: list[Row] = []
        for candidate in candidates(case.setting):
            real, steps = [], []
            for seed in range(1, 1 + self.seeds):
                loss, made = self.real(case, candidate, seed)
                real.append(loss)
                steps.append(made)
            simulated = [
                advice.simulated(task(), cluster(case), candidate, case.steps, seed)
                for seed in range(1, 1 + self.seeds)
            ]
            row: Row = {
                "method": ", ".join(map(str, candidate)),
                "real": float(np.mean(real)),
                "lowest, highest": [min(real), max(real)],
                "simulated": float(np.mean(simulated)),
                "steps": float(np.mean(steps)),
            }
            sys.stderr.write(f"{row}\n")  # progress
            rows.append(row)
        least = min(row["real"] for row in rows)
        for row in rows:
            row["behind, %"] = 100 * (row["real"] / least - 1)
        return rows

    def hire(self) -> Process:
        """Return a process."""
        return self.stack.enter_context(Process())

    def real(
        self, case: Case, candidate: advice.Candidate, seed: int
    ) -> tuple[float, float]:
        """Return the loss of a run, and the mean steps of workers that live on."""
        workers = case.setting.workers
        parts = [
            Part(candidate, workers, number, case.step * step)
            for number, step in enumerate(advice.steps_of(case.setting))
        ]
        spares = [self.hire() for _ in case.kills]
        late = [parts[kill.worker]._replace(first=512) for kill in case.kills]
        every = [(part,) for part in (*parts, *late)]
        reality.all_of([*self.crew, *spares], practice, every)
        addresses = self.center.call(serve, case, candidate, seed)
        reality.all_of(self.crew, join, [*zip(parts, addresses, strict=True)])
        begin = time.monotonic() + 1.0
        seconds = case.step * case.steps
        end = begin + seconds
        loss = self.center.submit(loss_at, end)
        running = [
            process.submit(work, part, begin, end)
            for process, part in zip(self.crew, parts, strict=True)
        ]
        for kill, spare, part in zip(case.kills, spares, late, strict=True):
            at, number = begin + kill.at * seconds, kill.worker
            time.sleep(max(0.0, at - time.monotonic()))
            self.crew[number].kill()
            later = time.monotonic() + case.step * advice.DOWN
            # Its local steps have other numbers than those of the dead process.
            running[number] = spare.submit(
                join_and_work, part, addresses[number], later, end
            )
            self.crew[number] = spare
        made = [each.result() for each in running]
        killed = {kill.worker for kill in case.kills}
        steps = [number for i, number in enumerate(made) if i not in killed]
        found = loss.result()
        self.center.call(close)
        return found, float(np.mean(steps))


def cluster(case: Case) -> simulate.Cluster:
    """Return the simulated cluster of a case, with its failures."""
    failures = [
        simulate.Failure(kill.at * case.steps, [f"worker-{kill.worker}"], advice.DOWN)
        for kill in case.kills
    ]
    return dataclasses.replace(
        advice.cluster_of(case.setting),
        failures=simulate.Failures(recorded=failures),
    )


if __name__ == "__main__":
    Advised.main()
