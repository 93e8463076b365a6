"""Train a small convolutional network with two worker processes, over a slow link.

Each worker has half of the training data, and a link of 200 Mbit/s to the center, paced
by the kernel; one of them is three times slower than the other. Gradients averaged at
every step are what people do otherwise; AGN, EASGD, DOWNPOUR and DiLoCo exchange once
in ten steps. All make the same number of gradient evaluations, with three seeds. Then
AGN goes on without a worker that is killed and comes back, and one worker trains alone.

This process holds the centers, tests them, and draws; the workers,
``digits_worker.py``, exchange with them over gRPC. Run it with ``make demo``, or on
MNIST with ``python examples/digits.py --mnist FOLDER``.
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
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from digits_worker import (
    EVERY_STEP,
    METHODS,
    Job,
    Method,
    Network,
    PyTree,
    Report,
    Task,
    batches,
    first_params,
    made,
    share,
    step_of,
)
from matplotlib import ticker
from orbax.checkpoint import v1 as ocp
from pacing import pace
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import agn_optax
from agn_optax import center, service
from agn_optax.ops.cli import Program, run

mpl.use("Agg")
import matplotlib.pyplot as plt

WORKER = pathlib.Path(__file__).with_name("digits_worker.py")
SLOWDOWN = 3
LONGER = 3  # times the samples, where a worker is killed and has to come back
WARM = 2  # versions of a run that is there to have everything compiled
TESTED = 2000  # images, at most, while it trains
FLAGS = ["--xla_cpu_multi_thread_eigen=false"]  # of workers: one thread each
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Its fusion emitters take most of the time to compile; newer ones are quicker.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")


@dataclasses.dataclass
class Run:
    """What became of one method with one seed."""

    method: Method
    seed: int
    versions: int = 0  # of the center, that it is to make; 0 without a center
    is_shown: bool = True  # and not there to have everything compiled
    # Points of the curves.
    seconds: list[float] = dataclasses.field(default_factory=list)  # without starts
    samples: list[int] = dataclasses.field(default_factory=list)
    megabytes: list[float] = dataclasses.field(default_factory=list)
    accuracy: list[float] = dataclasses.field(default_factory=list)
    # What each worker said at each of its exchanges, and at the starts of its lives,
    # and when.
    exchanges: dict[str, list[Report]] = dataclasses.field(default_factory=dict)
    starts: dict[str, list[Report]] = dataclasses.field(default_factory=dict)
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    began: float = 0.0
    center: PyTree = None

    @property
    def staleness(self) -> list[int]:
        """Of all messages."""
        reports = [report for each in self.exchanges.values() for report in each]
        return [r.staleness for r in reports if r.staleness is not None]

    @property
    def waiting(self) -> float:
        """Part of their time that the workers waited for their exchanges."""
        waited = sum(r.seconds for each in self.exchanges.values() for r in each)
        there = sum(times[-1] for times in self.times.values())
        return waited / there if there else 0.0

    @property
    def death_and_return(self) -> tuple[int, int] | None:
        """Versions of the center between which a worker was away, if one was."""
        for worker, starts in self.starts.items():
            if len(starts) > 1:
                reports = self.exchanges.get(worker, [])
                last = max((r.version for r in reports if r.life == 0), default=0)
                return last, starts[1].version
        return None

    def cost(self, level: float, of: Sequence[float]) -> float:
        """What it took until an accuracy was reached; infinite if it never was."""
        reached = (x for x, y in zip(of, self.accuracy, strict=True) if y >= level)
        return next(reached, math.inf)


Show = Callable[[Run], None]


class Trainer:
    """Trains by any methods on one dataset, and tests the centers as they go.

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
        self.network = Network(classes=int(data.train.labels.max()) + 1)
        self.seeds = [args.seed + i for i in range(args.seeds)]
        self.first = {
            seed: first_params(self.network, data.train.images[:1], seed)
            for seed in self.seeds
        }
        first = jax.tree.leaves(self.first[args.seed])
        self.parameter_bytes = sum(x.nbytes for x in first)

        def correct(params: PyTree, images: Any, labels: Any) -> jax.Array:
            logits = jnp.asarray(self.network.apply({"params": params}, images))
            return jnp.mean(logits.argmax(-1) == labels)

        self.correct = jax.jit(correct)
        self.all = [jnp.asarray(x) for x in data.test]
        self.test = [x[:TESTED] for x in self.all]
        # Compiled now, for reports wait while a center is tested.
        self.correct(self.first[args.seed], *self.test)
        self.rate = 1e6 * args.mbit / 8  # bytes a second
        self.data_file = scratch / "train.npz"
        np.savez(self.data_file, **data.train._asdict())

    def runs(self, methods: Sequence[Method]) -> list[Run]:
        """What is trained, in this order: a death comes last of those with a center."""
        runs = []
        for method in sorted(methods, key=lambda method: method.kills):
            seeds = self.seeds[:1] if method.kills else self.seeds
            if method.rule is None:
                runs += [Run(method, seed) for seed in seeds]
                continue
            # Rounds, not steps, are what workers share: a round is not cut in pieces.
            steps = self.args.steps * (LONGER if method.kills else 1)
            versions_a_round = 1 if is_synchronous(method) else self.args.workers
            versions = math.ceil(steps * versions_a_round / self.period(method))
            runs.append(Run(method, seeds[0], WARM, is_shown=False))
            runs += [Run(method, seed, versions) for seed in seeds]
        return runs

    def period(self, method: Method) -> int:
        """Local steps of its rounds."""
        return method.period or self.args.period

    def train(self, runs: Sequence[Run], show: Callable[[Run], None]) -> None:
        """One after the other; ``show`` is told of all points of the curves."""
        if together := [each for each in runs if each.versions]:
            self._train_with_centers(together, show)
        for each in runs:
            if not each.versions:
                self._train_alone(each, show)

    def _train_with_centers(
        self, runs: Sequence[Run], show: Callable[[Run], None]
    ) -> None:
        """By the same worker processes; each run has a center of its own."""
        due = [0] * len(runs)  # version of a center that is tested next

        def hear(worker: str, line: str) -> None:
            if not line.startswith("{"):  # a warning, an error, or the launcher's news
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
                # Reports wait while a center is tested, which is ahead of them then.
                snapshot = servers[report.task].center.pull()
                self._test(result, snapshot)
                # At first nearly every version, later one in many.
                due[report.task] = math.ceil(1.3 * snapshot.version + 0.5)
                show(result)

        with contextlib.ExitStack() as stack:
            # No worker begins before all are there; after that, nobody waits for
            # anybody unless the method says so.
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
            pace(self.rate)  # what is sent from here; workers do the same
            addresses = [server.address for server in servers]
            ended = run(
                [
                    self._program(runs, addresses, rank)
                    for rank in range(self.args.workers)
                ],
                output=hear,
            )
            for program in ended:
                if program.returncode and not program.stopped:
                    raise SystemExit(
                        f"worker {program.name!r} has failed with exit status "
                        f"{program.returncode}; what it said is above"
                    )
            for result, server in zip(runs, servers, strict=True):
                snapshot = server.center.pull()
                result.center = snapshot.params
                if result.is_shown:
                    self._test(result, snapshot)
                    show(result)

    def _program(
        self, runs: Sequence[Run], addresses: Sequence[str], rank: int
    ) -> Program:
        """A worker process."""
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
        return Program(
            job.worker,
            [sys.executable, "-B", str(WORKER), json.dumps(dataclasses.asdict(job))],
            environment={
                # What one has compiled, the next life need not.
                "JAX_COMPILATION_CACHE_DIR": os.environ.get(
                    "JAX_COMPILATION_CACHE_DIR", str(self.scratch / "compiled")
                ),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                # They share the cores of this machine, or its GPU.
                "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            restarts=1 if dies else 0,
        )

    def _test(self, result: Run, snapshot: agn_optax.Snapshot) -> None:
        """A point of the curves, unless this version has one."""
        method, version = result.method, snapshot.version
        messages = version * (self.args.workers if is_synchronous(method) else 1)
        samples = messages * self.period(method) * self.args.batch
        if result.samples[-1:] == [samples]:
            return
        now = time.perf_counter() - result.began
        ends = [times[-1] for times in result.times.values()]
        # All have left, perhaps long ago, if nobody tests before the end.
        done = version >= result.versions and len(ends) == self.args.workers
        self._append(
            result,
            seconds=(max(ends) if done else now) if version else 0.0,
            samples=samples,
            # A message and a center travel at each exchange.
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
        """On the data of the first worker, in this process, which has all cores."""
        args = self.args
        tx = made(result.method.name, args.times)[0]
        local_step = step_of(self.network, tx)
        images, labels = (jnp.asarray(x) for x in self.data.train)
        params = jax.tree.map(jnp.copy, self.first[result.seed])
        state = tx.init(params)
        mine = share(len(labels), 0, args.workers)
        rows = batches(mine, args.batch, result.seed)
        # Compiled before the clock starts, as in the workers.
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

    def part(self, result: Run) -> float:
        """Of its samples, that have been seen."""
        rounds = result.versions * self.period(result.method)
        if is_synchronous(result.method):
            rounds *= self.args.workers
        wanted = (rounds or self.args.workers * self.args.steps) * self.args.batch
        return min(1.0, result.samples[-1] / wanted)


def is_synchronous(method: Method) -> bool:
    """Whether the messages of all workers become one version of the center."""
    return method.mode is center.Synchronous


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


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """All seeds of each."""
    found: dict[str, list[Run]] = {}
    for each in runs:
        found.setdefault(each.method.name, []).append(each)
    return found


def compared(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Those in which workers exchange, and none is killed."""
    return by_method([each for each in runs if each.versions and not each.method.kills])


def common_level(runs: Sequence[Run]) -> float:
    """The highest half percent that all of these have reached, with every seed."""
    return math.floor(200 * min((max(each.accuracy) for each in runs), default=0)) / 200


def spread(numbers: Sequence[float], form: str) -> str:
    """Median, and lowest to highest in a line below."""
    low, middle, high = (
        "-" if math.isinf(x) else format(x, form)
        for x in (min(numbers), float(np.median(numbers)), max(numbers))
    )
    return middle if low == high else f"{middle}\n{low}-{high}"


def table_of(runs: Sequence[Run], trainer: Trainer, folder: pathlib.Path) -> Table:
    """What every method took, and what its checkpoint of the first seed is worth."""
    level = common_level([each for group in compared(runs).values() for each in group])
    table = Table(
        title=f"{trainer.data.name}: {trainer.args.workers} workers, "
        f"{trainer.args.mbit:g} Mbit/s, {len(trainer.seeds)} seeds: "
        "median and range",
        padding=(0, 0),
    )
    table.add_column("method", no_wrap=True)
    for column in (
        f"seconds\nto {100 * level:.3g} %",
        f"MB to\n{100 * level:.3g} %",
        "accuracy\nat end, %",
        "in ex-\nchange",
        "stale\nmean/max",
        f"exchanges\n{'/'.join(trainer.workers)}",
    ):
        table.add_column(column, justify="right")
    for name, group in by_method(runs).items():
        one, *others = group
        ends = [float(trainer.correct(save_and_read_back(one, folder), *trainer.all))]
        ends += [float(trainer.correct(each.center, *trainer.all)) for each in others]
        late = [staleness for each in group for staleness in each.staleness]
        made = [len(one.exchanges.get(worker, [])) for worker in trainer.workers]
        has_center = bool(one.versions)
        table.add_row(
            name,
            spread([each.cost(level, each.seconds) for each in group], ".2f"),
            spread([each.cost(level, each.megabytes) for each in group], ".1f")
            if has_center
            else "-",
            spread([100 * each for each in ends], ".1f"),
            f"{np.median([each.waiting for each in group]):.0%}" if has_center else "-",
            f"{np.mean(late):.2f}/{max(late)}" if late else "-",
            "/".join(map(str, made)) if has_center else "-",
        )
    return table


def conclusion(level: float, costs: Mapping[str, float], of: str) -> str:
    """What exchanging at every step costs beside the others, whoever is ahead."""
    others = {name: cost for name, cost in costs.items() if name != EVERY_STEP.name}
    if not others or len(others) == len(costs):
        return f"Test accuracy against {of}"
    parts = {name: cost / costs[EVERY_STEP.name] for name, cost in others.items()}
    ahead = sorted(part for part in parts.values() if part < 1)
    behind = [name for name, part in parts.items() if part >= 1]
    if not ahead:
        return f"{level:.3g} %: averaging at every step is ahead in {of}"

    def fraction(part: float) -> str:
        return f"1/{round(1 / part)}" if ahead[-1] < 2 / 3 else f"{part:.2f}"

    span = " to ".join(dict.fromkeys(map(fraction, (ahead[0], ahead[-1]))))
    most = f", not {', '.join(behind)}" if behind else ""
    return f"{level:.3g} % with {span} of the {of} of averaging at every step{most}"


def at_the_end(groups: Mapping[str, Sequence[Run]]) -> str:
    """How accurate the methods are when all samples have been seen."""
    ends = {
        name: float(np.median([each.accuracy[-1] for each in group]))
        for name, group in groups.items()
    }
    every_step = ends.pop(EVERY_STEP.name, None)
    if every_step is None or not ends:
        return ""
    return (
        f"After as many samples: averaging {100 * every_step:.1f} %, the others "
        f"{100 * min(ends.values()):.1f} to {100 * max(ends.values()):.1f} %"
    )


def plot(runs: Sequence[Run], trainer: Trainer, path: pathlib.Path) -> None:
    """Accuracy against seconds and bytes, and what became of a killed worker."""
    args, groups = trainer.args, compared(runs)
    level = common_level([each for group in groups.values() for each in group])
    killed = [each for each in runs if each.method.kills]
    figure = plt.figure(figsize=(12, 7.4 if killed else 5.4), layout="constrained")
    top, *bottom = figure.subfigures(
        2 if killed else 1, 1, height_ratios=[3.6, 1] if killed else None, squeeze=False
    )[:, 0]
    panels = top.subplots(1, 2, sharey=True)
    alone = [each for each in runs if not each.versions]
    best = max(max(each.accuracy) for each in runs)
    for axes, of, sums in (
        (panels[0], "time", lambda each: each.seconds),
        (panels[1], "bytes", lambda each: each.megabytes),
    ):
        lines = groups if of == "bytes" else {**groups, **by_method(alone)}
        for group in lines.values():
            _curve(axes, group, [sums(each) for each in group])
        costs = {
            name: float(np.median([each.cost(level, sums(each)) for each in group]))
            for name, group in groups.items()
        }
        axes.set_title(conclusion(100 * level, costs, of), fontsize=11)
    if alone:
        end = np.median([each.accuracy[-1] for each in alone])
        panels[1].axhline(end, linestyle=":", color=alone[0].method.color)
    panels[0].set(
        xlabel="seconds (log scale)", ylabel="test accuracy (log scale of the errors)"
    )
    panels[1].set(xlabel="MB over the links, both ways (log scale)")
    for axes in panels:
        _finish(axes, level if groups else None, best)
    handles, labels = panels[0].get_legend_handles_labels()
    top.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False
    )
    if groups:  # the one worker is there much earlier
        begins = (
            next(filter(None, each.seconds), 1.0)
            for group in groups.values()
            for each in group
        )
        panels[0].set_xlim(left=min(begins) / 2)
    for each in killed[:1]:
        _timeline(bottom[0].subplots(), each, trainer.workers)
    figure.suptitle(
        f"{trainer.data.name}: {args.workers} workers, each with its own part of the "
        f"data and a link of {args.mbit:g} Mbit/s, one {SLOWDOWN} times slower\n"
        f"{args.seeds} seeds: median, and lowest to highest. {at_the_end(groups)}",
        fontsize=12,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curve(axes: Any, group: Sequence[Run], points: Sequence[Sequence[float]]) -> None:
    """Median of the seeds, and the band that they fill, where all have points."""
    known = [
        (np.array(x)[np.array(x) > 0], np.array(each.accuracy)[np.array(x) > 0])
        for x, each in zip(points, group, strict=True)
    ]
    low, high = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    grid = np.geomspace(low, max(low, high), 200)
    rows = np.array([np.interp(np.log(grid), np.log(x), y) for x, y in known])
    method = group[0].method
    is_dashed = method is EVERY_STEP or not group[0].versions
    axes.plot(
        grid,
        np.median(rows, axis=0),
        label=_LABELS.get(method.name, method.name),
        color=method.color,
        linestyle="--" if is_dashed else "-",
        linewidth=2,
    )
    axes.fill_between(
        grid, rows.min(0), rows.max(0), color=method.color, alpha=0.15, linewidth=0
    )


_LABELS = {EVERY_STEP.name: "averaging at every step", "one worker": "one worker alone"}


def _finish(axes: Any, level: float | None, best: float) -> None:
    """Plain numbers along both axes, and room for what happens near 100 %."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_yscale(
        "function",
        functions=(
            lambda y: -np.log10(np.maximum(1.004 - y, 1e-9)),
            lambda z: 1.004 - 10.0 ** -np.asarray(z),
        ),
    )
    axes.set_yticks([0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99])
    axes.set_ylim(0.3, (1.0 + best) / 2)
    axes.yaxis.set_major_formatter(
        ticker.PercentFormatter(1.0, decimals=0, symbol=" %")
    )
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    if level is not None:
        axes.axhline(level, color="black", linewidth=0.8, alpha=0.6)
    axes.grid(alpha=0.3)


def _timeline(axes: Any, result: Run, workers: Sequence[str]) -> None:
    """The exchanges of every worker as they were made, and where one was away."""
    times = [result.times.get(worker, []) for worker in workers]
    axes.eventplot(times, colors=result.method.color, linelengths=0.7, linewidths=0.8)
    title = result.method.name
    for row, worker in enumerate(workers):
        lives = [r.life for r in result.exchanges.get(worker, [])]
        if 0 < lives.count(0) < len(lives):
            died, back = times[row][lives.count(0) - 1], times[row][lives.count(0)]
            axes.barh(row, back - died, left=died, height=0.7, color="#DDDDDD")
            before, after = (
                np.interp(x, result.seconds, result.accuracy) for x in (died, back)
            )
            text = f"killed, and back after {back - died:.1f} s"
            axes.text((died + back) / 2, row, text, ha="center", va="center")
            title = (
                f"{result.method.name}: meanwhile the center went from "
                f"{100 * before:.1f} to {100 * after:.1f} %, and came to "
                f"{100 * result.accuracy[-1]:.1f} %"
            )
    axes.set(yticks=range(len(workers)), yticklabels=workers, xlabel="seconds")
    axes.set_title(title, fontsize=12)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:g}")


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
        default=200,
        help="local steps per worker, on average (default 200)",
    )
    add("--batch", type=int, default=32, help="samples per gradient (default 32)")
    add("--mbit", type=float, default=200, help="a second, of each link (default 200)")
    add("--times", type=float, default=1, help="all learning rates times this")
    add("--seed", type=int, default=0, help="the first one (default 0)")
    add("--seeds", type=int, default=3, help="how many (default 3)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--output", type=pathlib.Path, default=pathlib.Path("demo-output"))
    args = parser.parse_args(arguments)
    for name in ("workers", "period", "steps", "batch", "seeds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name in ("mbit", "times"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} must be positive, got {getattr(args, name):g}")
    return args


def main(arguments: list[str] | None = None) -> list[Run]:
    """Trains by every method, prints the table and writes plot and checkpoints."""
    args = parse(arguments)
    if args.mnist:
        data = datasets.mnist(args.mnist)
    else:
        # Few to train on, so that half of them are not enough; many to test on, so that
        # one percent is twelve images.
        data = datasets.digits(test_fraction=2 / 3)
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    progress = Progress(
        TextColumn("{task.description:>15}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[seed]:<6}"),
        TextColumn("{task.fields[accuracy]:>6}"),
        TextColumn("{task.fields[workers]:<24}"),
        TimeElapsedColumn(),
        console=console,
    )
    console.print(
        "Live: seed; test accuracy of the center; exchanges of each worker, and in "
        "brackets the staleness of its last message."
    )
    with tempfile.TemporaryDirectory(prefix="agn-optax-") as scratch:
        trainer = Trainer(data, args, pathlib.Path(scratch), console)
        runs = trainer.runs([METHODS[name] for name in args.methods])
        shown = [each for each in runs if each.is_shown]
        with progress:
            bars = {
                name: progress.add_task(
                    name,
                    total=len(group),
                    seed="",
                    accuracy="",
                    workers="",
                    start=False,
                )
                for name, group in by_method(shown).items()
            }

            def show(result: Run) -> None:
                group = by_method(shown)[result.method.name]
                bar = bars[result.method.name]
                workers = "  ".join(
                    f"{name} {len(reports)} ({reports[-1].staleness})"
                    for name, reports in sorted(result.exchanges.items())
                )
                progress.start_task(bar)
                progress.update(
                    bar,
                    completed=group.index(result) + trainer.part(result),
                    seed=f"seed {result.seed}",
                    accuracy=f"{result.accuracy[-1]:.1%}",
                    workers=workers,
                )
                if trainer.part(result) < 1:  # so those before it are through
                    for other in progress.tasks:
                        if other.started and other.id != bar and not other.stop_time:
                            progress.stop_task(other.id)

            trainer.train(runs, show)
        console.print(table_of(shown, trainer, args.output / "checkpoints"))
    plot(shown, trainer, args.output / "digits.png")
    console.print(f"plot: {args.output / 'digits.png'}")
    console.print(f"centers, as Orbax checkpoints: {args.output / 'checkpoints'}")
    return shown


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
