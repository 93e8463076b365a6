"""Train a small convolutional network with two worker processes and one center.

Three rules (AGN, EASGD, DOWNPOUR), then AGN with one worker killed and started again,
and one worker alone, all with the same number of gradient evaluations. This process
holds the center, tests it, and draws; the workers, ``digits_worker.py``, exchange with
it over gRPC. The last of them is three times slower than the others. Run it with
``make demo``, or on MNIST with ``python examples/digits.py --mnist FOLDER``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from digits_worker import (
    METHODS,
    Job,
    Method,
    Network,
    PyTree,
    Report,
    batches,
    make_local_step,
)
from orbax.checkpoint import v1 as ocp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import agn_optax
from agn_optax import service
from agn_optax.cli import Program, run

mpl.use("Agg")
import matplotlib.pyplot as plt

WORKER = pathlib.Path(__file__).with_name("digits_worker.py")
SLOWDOWN = 3
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


@dataclasses.dataclass
class Run:
    """What became of one method."""

    method: Method
    # Points of the curves.
    samples: list[int] = dataclasses.field(default_factory=list)
    megabytes: list[float] = dataclasses.field(default_factory=list)
    accuracy: list[float] = dataclasses.field(default_factory=list)
    # What each worker said at each of its exchanges, and at the starts of its lives.
    exchanges: dict[str, list[Report]] = dataclasses.field(default_factory=dict)
    starts: dict[str, list[Report]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0  # of training: without the start of processes
    center: PyTree = None

    @property
    def staleness(self) -> list[int]:
        """Of all messages."""
        reports = [report for each in self.exchanges.values() for report in each]
        return [r.staleness for r in reports if r.staleness is not None]

    @property
    def death_and_return(self) -> tuple[int, int] | None:
        """Versions of the center between which a worker was away, if one was."""
        for worker, starts in self.starts.items():
            if len(starts) > 1:
                reports = self.exchanges.get(worker, [])
                last = max((r.version for r in reports if r.life == 0), default=0)
                return last, starts[1].version
        return None


class Trainer:
    """Trains by any method on one dataset, and tests the center as it goes.

    Args:
      data: the dataset.
      args: the command line.
      scratch: a folder for what the workers read and compile.
      console: gets what the workers say that is no report.
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
        self.steps = args.workers * args.steps
        self.network = Network(classes=int(data.train.labels.max()) + 1)
        key, images = jax.random.key(args.seed), data.train.images[:1]
        self.first = jax.jit(self.network.init)(key, images)["params"]
        self.parameter_bytes = sum(x.nbytes for x in jax.tree.leaves(self.first))
        test = jax.tree.map(jnp.asarray, data.test)

        def correct(params: PyTree) -> jax.Array:
            logits = jnp.asarray(self.network.apply({"params": params}, test.images))
            return jnp.mean(logits.argmax(-1) == test.labels)

        self.correct = jax.jit(correct)
        self.data_file = scratch / "train.npz"
        np.savez(self.data_file, **data.train._asdict())

    def train(self, method: Method, show: Callable[[Run], None]) -> Run:
        """One run of ``args.workers * args.steps`` gradient evaluations."""
        result = Run(method)
        if method.rule is None:
            self._train_alone(result, show)
        else:
            self._train_with_center(result, show)
        return result

    def _train_with_center(self, result: Run, show: Callable[[Run], None]) -> None:
        method = result.method
        assert method.rule is not None
        rule = method.rule()
        began = time.perf_counter()
        due = 0  # version of the center that is tested next

        def hear(worker: str, line: str) -> None:
            nonlocal began, due
            if not line.startswith("{"):  # a warning, an error, or the launcher's news
                self.console.print(f"{worker}: {line}", markup=False, highlight=False)
                return
            report = Report(**json.loads(line))
            if report.staleness is None:
                if not result.starts:
                    began = time.perf_counter()
                result.starts.setdefault(worker, []).append(report)
            else:
                result.exchanges.setdefault(worker, []).append(report)
                result.seconds = time.perf_counter() - began
            # Reports wait while the center is tested, which is ahead of them then.
            if report.version >= due:
                snapshot = server.center.pull()
                due = snapshot.version + 2 * self.args.workers
                self._test(result, snapshot)
            show(result)

        # No worker begins before all are there; after that, nobody waits for anybody.
        workers = range(self.args.workers)
        with service.serve(rule, self.first, barrier=len(workers)) as server:
            ended = run(
                [self._program(method, server.address, rank) for rank in workers],
                output=hear,
            )
            for program in ended:
                if program.returncode and not program.stopped:
                    raise SystemExit(
                        f"{method.name}: worker {program.name!r} has failed with exit "
                        f"status {program.returncode}; what it said is above"
                    )
            snapshot = server.center.pull()
        self._test(result, snapshot)
        result.center = snapshot.params
        show(result)

    def _program(self, method: Method, address: str, rank: int) -> Program:
        """A worker process."""
        args = self.args
        # Rounds, not steps, are what workers share: a round is not cut in pieces.
        exchanges = math.ceil(self.steps / args.period)
        dies = method.kills and rank == 0
        job = Job(
            method=method.name,
            center=address,
            worker=self.workers[rank],
            rank=rank,
            data=str(self.data_file),
            classes=self.network.classes,
            batch=args.batch,
            period=args.period,
            exchanges=exchanges,
            slowdown=SLOWDOWN if self.workers[rank] == "slow" else 1,
            dies_at=exchanges // 2 if dies else None,
            seed=args.seed,
        )
        return Program(
            job.worker,
            [sys.executable, "-B", str(WORKER), json.dumps(dataclasses.asdict(job))],
            environment={
                # What one has compiled, the next life and the next method need not.
                "JAX_COMPILATION_CACHE_DIR": str(self.scratch / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                # They share the cores of this machine, or its GPU.
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}",
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            restarts=1 if dies else 0,
        )

    def _test(self, result: Run, snapshot: agn_optax.Snapshot) -> None:
        """A point of the curves: every exchange stands for a round of one worker."""
        samples = snapshot.version * self.args.period * self.args.batch
        # A message and a center travel at each exchange.
        sent = 2 * snapshot.version * self.parameter_bytes
        self._append(result, samples, sent, snapshot.params)

    def _append(self, result: Run, samples: int, sent: int, params: PyTree) -> None:
        result.samples.append(samples)
        result.megabytes.append(sent / 1e6)
        result.accuracy.append(float(self.correct(params)))

    def _train_alone(self, result: Run, show: Callable[[Run], None]) -> None:
        args = self.args
        tx = result.method.inner()
        local_step = make_local_step(self.network, tx)
        images, labels = (jnp.asarray(x) for x in self.data.train)
        params = jax.tree.map(jnp.copy, self.first)
        state = tx.init(params)
        rows = batches(len(labels), args.batch, args.seed)
        # Compiled before the clock starts, as in the workers.
        local_step(*jax.tree.map(jnp.copy, (params, state)), images, labels, next(rows))
        began = time.perf_counter()
        for step, batch in zip(range(1, self.steps + 1), rows, strict=False):
            params, state = local_step(params, state, images, labels, batch)
            if step % (4 * args.period) == 0 or step == self.steps:
                self._append(result, step * args.batch, 0, params)
                show(result)
        result.seconds = time.perf_counter() - began
        result.center = params


def save_and_read_back(result: Run, folder: pathlib.Path) -> PyTree:
    """The center as an Orbax checkpoint, and what comes back from it."""
    folder = folder.resolve() / re.sub(r"\W+", "-", result.method.name).lower()
    shutil.rmtree(folder, ignore_errors=True)
    ocp.save(folder, result.center)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        result.center,
    )
    return ocp.load(folder, abstract)


def table_of(results: list[Run], trainer: Trainer, folder: pathlib.Path) -> Table:
    """The result of every run, its accuracy measured on the checkpoint read back."""
    table = Table(title=f"{trainer.data.name}: {trainer.args.workers} workers")
    table.add_column("method")
    for column in (
        "test\naccuracy",
        f"exchanges\n{' / '.join(trainer.workers)}",
        "staleness\nmean / max",
        "MB\nexchanged",
        "seconds",
    ):
        table.add_column(column, justify="right")
    for result in results:
        accuracy = float(trainer.correct(save_and_read_back(result, folder)))
        made = [str(len(result.exchanges.get(name, []))) for name in trainer.workers]
        staleness = result.staleness
        table.add_row(
            result.method.name,
            f"{accuracy:.2%}",
            " / ".join(made) if staleness else "-",
            f"{np.mean(staleness):.2f} / {max(staleness)}" if staleness else "-",
            f"{result.megabytes[-1]:.1f}",
            f"{result.seconds:.1f}",
        )
    return table


def plot(results: list[Run], trainer: Trainer, path: pathlib.Path) -> None:
    """Accuracy against samples and bytes, and the staleness of the messages."""
    args = trainer.args
    figure, (by_samples, by_bytes, stale) = plt.subplots(1, 3, figsize=(16, 4.4))
    for result in results:
        style = {"label": result.method.name, "color": result.method.color}
        by_samples.plot(result.samples, result.accuracy, **style)
        if result.exchanges:
            by_bytes.plot(result.megabytes, result.accuracy, **style)
        else:
            by_bytes.axhline(result.accuracy[-1], linestyle="--", **style)
    by_samples.set(xlabel="training samples, all workers", ylabel="test accuracy")
    by_bytes.set(xlabel="MB exchanged with the center", ylabel="test accuracy")
    for axes in (by_samples, by_bytes):
        worst = min(result.accuracy[-1] for result in results)
        axes.set_ylim(max(0.0, worst - 0.35), 1.0)

    # Of the last one with a center: that in which a worker is killed.
    for result in [each for each in results if each.exchanges][-1:]:
        per_exchange = args.period * args.batch
        for name, reports in sorted(result.exchanges.items()):
            stale.scatter(
                [report.version * per_exchange for report in reports],
                [report.staleness for report in reports],
                label=name,
                color="black" if name == "slow" else None,
                alpha=0.5,
                s=14,
            )
        if result.death_and_return:
            killed, back = (x * per_exchange for x in result.death_and_return)
            for axes in (by_samples, stale):
                axes.axvline(killed, label="killed", linestyle=":", color="black")
                axes.axvline(back, label="back", linestyle="-.", color="black")
        stale.set(
            title=f"{result.method.name}: the messages",
            xlabel="training samples, all workers",
            ylabel="staleness",
        )
    for axes in (by_samples, by_bytes, stale):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper right" if axes is stale else "lower right")
    figure.suptitle(
        f"{trainer.data.name}: the center of {args.workers} asynchronous workers, one "
        f"{SLOWDOWN} times slower; period {args.period}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mnist", metavar="FOLDER", help="train on the idx files in FOLDER instead")
    add("--workers", type=int, default=2, help="worker processes (default 2)")
    add("--period", type=int, default=10, help="local steps per exchange (default 10)")
    add(
        "--steps",
        type=int,
        default=2000,
        help="local steps per worker, on average (default 2000)",
    )
    add("--batch", type=int, default=32, help="samples per gradient (default 32)")
    add("--seed", type=int, default=0)
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--output", type=pathlib.Path, default=pathlib.Path("demo-output"))
    args = parser.parse_args(arguments)
    for name in ("workers", "period", "steps", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(arguments: list[str] | None = None) -> list[Run]:
    """Trains by every method, prints the table and writes plot and checkpoints."""
    args = parse(arguments)
    data = datasets.mnist(args.mnist) if args.mnist else datasets.digits()
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    progress = Progress(
        TextColumn("{task.description:>19}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[accuracy]:>6}"),
        TextColumn("{task.fields[workers]:<26}"),
        TimeElapsedColumn(),
        console=console,
    )
    console.print(
        "Live: test accuracy of the center; exchanges of each worker, and in brackets "
        "the staleness of its last message."
    )
    results = []
    with tempfile.TemporaryDirectory(prefix="agn-optax-") as scratch:
        trainer = Trainer(data, args, pathlib.Path(scratch), console)
        with progress:
            for method in (METHODS[name] for name in args.methods):
                bar = progress.add_task(
                    method.name,
                    total=trainer.steps * args.batch,
                    accuracy="",
                    workers="",
                )

                def show(result: Run, bar: Any = bar) -> None:
                    workers = "  ".join(
                        f"{name} {len(reports)} ({reports[-1].staleness})"
                        for name, reports in sorted(result.exchanges.items())
                    )
                    progress.update(
                        bar,
                        completed=result.samples[-1],
                        accuracy=f"{result.accuracy[-1]:.1%}",
                        workers=workers,
                    )

                results.append(trainer.train(method, show))
    console.print(table_of(results, trainer, args.output / "checkpoints"))
    plot(results, trainer, args.output / "digits.png")
    console.print(f"plot: {args.output / 'digits.png'}")
    console.print(f"centers, as Orbax checkpoints: {args.output / 'checkpoints'}")
    return results


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
