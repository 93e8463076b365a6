"""The launcher of ``digits.py``: its centers and worker processes, and its options.

This process holds the centers, tests them, and draws the plot; the workers,
``digits_worker.py``, exchange with them over gRPC.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import datasets
import digits
import jax
import jax.numpy as jnp
import numpy as np
from digits import METHODS, Method, PyTree, made
from digits_results import SLOWDOWN, Run, Setup, display, plot, table_of
from digits_worker import Job, Report, Task
from pacing import pace
from rich.console import Console

import agn_optax
from agn_optax import center, service
from agn_optax.ops import cli

WORKER = pathlib.Path(__file__).with_name("digits_worker.py")
LONGER = 3  # times the samples, if a worker is killed and has to come back
WARM = 2  # center versions in a run that only compiles everything
TESTED = 2000  # images at most, during training
FLAGS = ["--xla_cpu_multi_thread_eigen=false"]  # for workers: one thread each
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Its fusion emitters take most of the compile time; newer ones are faster.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")


class Trainer:
    """Training with several methods on one dataset, and tests of their centers.

    Args:
      data: the dataset.
      args: the command line.
      scratch: a folder for the workers' data and compiled programs.
      console: gets the workers' output other than reports.
    """

    def __init__(
        self,
        data: datasets.Dataset,
        args: argparse.Namespace,
        scratch: pathlib.Path,
        console: Console,
    ) -> None:
        self.data = data
        self.args = args
        self.scratch = scratch
        self.console = console
        count = args.workers
        fast = ["fast"] if count <= 2 else [f"fast-{i}" for i in range(count - 1)]
        self.workers = [*fast, "slow"][:count]
        self.network = digits.Network(classes=int(data.train.labels.max()) + 1)
        self.seeds = [args.seed + i for i in range(args.seeds)]
        self.first = {
            seed: digits.first_params(self.network, data.train.images[:1], seed)
            for seed in self.seeds
        }
        first = jax.tree.leaves(self.first[args.seed])
        self.parameter_bytes = sum(x.nbytes for x in first)
        self.correct = digits.accuracy_of(self.network)
        self.all = [jnp.asarray(x) for x in data.test]
        self.test = [x[:TESTED] for x in self.all]
        # Compile now, because reports wait while a center is tested.
        self.correct(self.first[args.seed], *self.test)
        self.rate = 1e6 * args.mbit / 8  # bytes/s
        self.data_file = scratch / "train.npz"
        np.savez(self.data_file, **data.train._asdict())

    def runs(self, methods: Sequence[Method]) -> list[Run]:
        """Return all runs in order; the one with a killed worker comes last."""
        runs = []
        for method in sorted(methods, key=lambda method: method.kills):
            seeds = self.seeds[:1] if method.kills else self.seeds
            if method.rule is None:
                runs += [Run(method, seed) for seed in seeds]
                continue
            # Workers share the number of rounds, because a round cannot be divided.
            steps = self.args.steps * (LONGER if method.kills else 1)
            versions_a_round = 1 if is_synchronous(method) else self.args.workers
            versions = math.ceil(steps * versions_a_round / self.period(method))
            runs.append(Run(method, seeds[0], WARM, is_shown=False))
            runs += [Run(method, seed, versions) for seed in seeds]
        return runs

    def period(self, method: Method) -> int:
        """Return the local steps in a round of a method."""
        return method.period or self.args.period

    def train(self, runs: Sequence[Run], show: Callable[[Run], None]) -> None:
        """Train all runs in order; call ``show`` for each point of the curves."""
        if together := [each for each in runs if each.versions]:
            self._train_with_centers(together, show)
        for each in runs:
            if not each.versions:
                self._train_alone(each, show)

    def _train_with_centers(
        self, runs: Sequence[Run], show: Callable[[Run], None]
    ) -> None:
        """Train runs in the same worker processes, each with its own center."""
        due = [0] * len(runs)  # version of each center that is tested next

        def receive(worker: str, line: str) -> None:
            if not line.startswith("{"):  # a warning, an error, or launcher output
                self.console.print(f"{worker}: {line}", markup=False, highlight=False)
                return
            report = Report(**json.loads(line))
            result, now = runs[report.task], time.perf_counter()
            if report.staleness is None:
                result.began = result.began or now
                result.starts.setdefault(worker, []).append(report)
            else:
                result.exchanges.setdefault(worker, []).append(report)
                result.times.setdefault(worker, []).append(now - result.began)
            if result.is_shown and report.version >= due[report.task]:
                # Reports wait while a center is tested, so the center may be newer.
                snapshot = servers[report.task].center.pull()
                self._test(result, snapshot)
                # Test nearly every version at first, and fewer later.
                due[report.task] = math.ceil(1.3 * snapshot.version + 0.5)
                show(result)

        with contextlib.ExitStack() as stack:
            # The barrier lets all workers begin together; after that, they only wait
            # for each other in synchronous methods.
            servers = [
                stack.enter_context(
                    service.serve(
                        made(each.method.name, self.args.times)[1],
                        self.first[each.seed],
                        mode=each.method.mode(),
                        barrier=self.args.workers,
                        direct_address=False,
                    )
                )
                for each in runs
            ]
            pace(self.rate)  # for data sent by this process; workers do the same
            addresses = [server.address for server in servers]
            ended = cli.run(
                [
                    self._program(runs, addresses, rank)
                    for rank in range(self.args.workers)
                ],
                output=receive,
            )
            for program in ended:
                if program.returncode and not program.stopped:
                    raise SystemExit(
                        f"worker {program.name!r} has failed with exit status "
                        f"{program.returncode}; its output is above"
                    )
            for result, server in zip(runs, servers, strict=True):
                snapshot = server.center.pull()
                result.center = snapshot.params
                if result.is_shown:
                    self._test(result, snapshot)
                    show(result)

    def _program(
        self, runs: Sequence[Run], addresses: Sequence[str], rank: int
    ) -> cli.Program:
        """Return the program of a worker process."""
        args = self.args
        dies = rank == 0 and any(each.method.kills for each in runs)
        tasks = [
            Task(
                method=each.method.name,
                center=address,
                period=self.period(each.method),
                versions=each.versions,
                seed=each.seed,
                dies_at=each.versions // 4 if dies and each is runs[-1] else None,
            )
            for each, address in zip(runs, addresses, strict=True)
        ]
        job = Job(
            worker=self.workers[rank],
            rank=rank,
            workers=args.workers,
            data=str(self.data_file),
            classes=self.network.classes,
            batch=args.batch,
            slowdown=SLOWDOWN if self.workers[rank] == "slow" else 1,
            rate=self.rate,
            times=args.times,
            tasks=tasks,
        )
        return cli.Program(
            job.worker,
            [sys.executable, "-B", str(WORKER), json.dumps(dataclasses.asdict(job))],
            environment={
                # For `service.environment`, as `agn-optax launch` sets them.
                "AGN_OPTAX_CENTER": addresses[0],
                "AGN_OPTAX_RANK": str(rank),
                "AGN_OPTAX_WORKERS": str(args.workers),
                # A restarted worker reuses compiled programs.
                "JAX_COMPILATION_CACHE_DIR": os.environ.get(
                    "JAX_COMPILATION_CACHE_DIR", str(self.scratch / "compiled")
                ),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                # The workers share the cores of this machine, or its GPU.
                "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            restarts=1 if dies else 0,
        )

    def _test(self, result: Run, snapshot: agn_optax.Snapshot) -> None:
        """Add a point to the curves, unless this version has one."""
        method, version = result.method, snapshot.version
        messages = version * (self.args.workers if is_synchronous(method) else 1)
        samples = messages * self.period(method) * self.args.batch
        if result.samples[-1:] == [samples]:
            return
        now = time.perf_counter() - result.began
        ends = [times[-1] for times in result.times.values()]
        # The workers may have left long before this last test.
        done = version >= result.versions and len(ends) == self.args.workers
        self._append(
            result,
            seconds=(max(ends) if done else now) if version else 0.0,
            samples=samples,
            # Each exchange sends a message and a center.
            sent=2 * messages * self.parameter_bytes,
            params=snapshot.params,
        )

    def _append(
        self, result: Run, *, seconds: float, samples: int, sent: int, params: PyTree
    ) -> None:
        result.seconds.append(seconds)
        result.samples.append(samples)
        result.megabytes.append(sent / 1e6)
        result.accuracy.append(float(self.correct(params, *self.test)))

    def _train_alone(self, result: Run, show: Callable[[Run], None]) -> None:
        """Train on the first worker's data, in this process, with all cores."""
        args = self.args
        tx = made(result.method.name, args.times)[0]
        local_step = digits.step_of(self.network, tx)
        images, labels = (jnp.asarray(x) for x in self.data.train)
        params = jax.tree.map(jnp.copy, self.first[result.seed])
        state = tx.init(params)
        mine = digits.share(len(labels), 0, args.workers)
        rows = digits.batches(mine, args.batch, result.seed)
        # Compile before the clock starts, as in the workers.
        local_step(*jax.tree.map(jnp.copy, (params, state)), images, labels, next(rows))
        seconds, due = 0.0, 1
        steps = args.workers * args.steps
        began = time.perf_counter()
        for step, batch in zip(range(1, steps + 1), rows, strict=False):
            params, state = local_step(params, state, images, labels, batch)
            if step in (due, steps):
                jax.block_until_ready(params)
                seconds += time.perf_counter() - began
                self._append(
                    result,
                    seconds=seconds,
                    samples=step * args.batch,
                    sent=0,
                    params=params,
                )
                show(result)
                due, began = math.ceil(1.3 * step), time.perf_counter()
        result.center = params

    def accuracy(self, params: PyTree) -> float:
        """Return the accuracy of parameters on all test images."""
        return float(self.correct(params, *self.all))

    def part(self, result: Run) -> float:
        """Return the fraction of a run's samples that have been seen."""
        rounds = result.versions * self.period(result.method)
        if is_synchronous(result.method):
            rounds *= self.args.workers
        wanted = (rounds or self.args.workers * self.args.steps) * self.args.batch
        return min(1.0, result.samples[-1] / wanted)


def is_synchronous(method: Method) -> bool:
    """Return whether the messages of all workers together make one version."""
    return method.mode is center.Synchronous


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=digits.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--mnist", metavar="FOLDER", help="train on MNIST, with its idx files in FOLDER"
    )
    add("--workers", type=int, default=2, help="worker processes (default 2)")
    add("--period", type=int, default=10, help="local steps per exchange (default 10)")
    add(
        "--steps",
        type=int,
        default=200,
        help="local steps per worker, on average (default 200)",
    )
    add("--batch", type=int, default=32, help="samples per gradient (default 32)")
    add("--mbit", type=float, default=200, help="Mbit/s of each link (default 200)")
    add(
        "--times",
        type=float,
        default=1,
        help="factor of all learning rates (default 1)",
    )
    add("--seed", type=int, default=0, help="first seed (default 0)")
    add("--seeds", type=int, default=3, help="number of seeds (default 3)")
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="NAME",
        help=f"methods to compare (default all: {', '.join(map(repr, METHODS))})",
    )
    add(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("demo-output"),
        help="folder for plot and checkpoints (default demo-output)",
    )
    args = parser.parse_args(arguments)
    for name in ("workers", "period", "steps", "batch", "seeds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name in ("mbit", "times"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} must be positive, got {getattr(args, name):g}")
    return args


def main(arguments: list[str] | None = None) -> list[Run]:
    """Train with every method, print the table and write plot and checkpoints."""
    args = parse(arguments)
    data = digits.load(args.mnist)
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="agn-optax-") as scratch:
        trainer = Trainer(data, args, pathlib.Path(scratch), console)
        runs = trainer.runs([METHODS[name] for name in args.methods])
        shown = [each for each in runs if each.is_shown]
        with display(shown, trainer.part, console) as show:
            trainer.train(runs, show)
        setup = Setup(data.name, trainer.workers, args.seeds, args.mbit)
        folder = args.output / "checkpoints"
        console.print(table_of(shown, setup, folder, trainer.accuracy))
    plot(shown, setup, args.output / "digits.png")
    console.print(f"plot: {args.output / 'digits.png'}")
    console.print(f"centers, as Orbax checkpoints: {args.output / 'checkpoints'}")
    return shown


def run() -> None:
    """Run as a program, which Ctrl-C ends with status 130."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
