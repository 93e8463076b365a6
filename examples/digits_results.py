"""The results of the demo: a live display, a table, a plot and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from digits import EVERY_STEP, Method, PyTree
from digits_worker import Report
from matplotlib import ticker
from orbax.checkpoint import v1 as ocp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

mpl.use("Agg")
import matplotlib.pyplot as plt

SLOWDOWN = 3  # a step of the slow worker takes this many times as long


@dataclasses.dataclass
class Run:
    """The results of one method with one seed."""

    method: Method
    seed: int
    versions: int = 0  # center version at which the run ends; 0 without a center
    is_shown: bool = True  # False for a run that only compiles everything
    # Points of the curves.
    seconds: list[float] = dataclasses.field(default_factory=list)  # without startup
    samples: list[int] = dataclasses.field(default_factory=list)
    megabytes: list[float] = dataclasses.field(default_factory=list)
    accuracy: list[float] = dataclasses.field(default_factory=list)
    # The reports of each worker after its exchanges and at its starts, and the times of
    # the exchanges.
    exchanges: dict[str, list[Report]] = dataclasses.field(default_factory=dict)
    starts: dict[str, list[Report]] = dataclasses.field(default_factory=dict)
    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    began: float = 0.0
    center: PyTree = None

    @property
    def staleness(self) -> list[int]:
        """The staleness of all messages."""
        reports = itertools.chain.from_iterable(self.exchanges.values())
        return [r.staleness for r in reports if r.staleness is not None]

    @property
    def waiting(self) -> float:
        """Fraction of their time that the workers waited for exchanges."""
        reports = itertools.chain.from_iterable(self.exchanges.values())
        waited = sum(report.seconds for report in reports)
        total = sum(times[-1] for times in self.times.values())
        return waited / total if total else 0.0

    @property
    def death_and_return(self) -> tuple[int, int] | None:
        """The center versions between which a killed worker was away, if one was."""
        for worker, starts in self.starts.items():
            if len(starts) > 1:
                reports = self.exchanges.get(worker, [])
                last = max((r.version for r in reports if r.restarts == 0), default=0)
                return last, starts[1].version
        return None

    def cost(self, level: float, of: Sequence[float]) -> float:
        """Return the cost of reaching an accuracy; infinite if it was not reached."""
        reached = (x for x, y in zip(of, self.accuracy, strict=True) if y >= level)
        return next(reached, math.inf)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings that all runs of a table or a plot have in common."""

    data: str  # name of the dataset
    workers: Sequence[str]  # their names
    seeds: int
    mbit: float  # Mbit/s of each link


@contextlib.contextmanager
def display(
    runs: Sequence[Run], part: Callable[[Run], float], console: Console
) -> Iterator[Callable[[Run], None]]:
    """Show a bar for each method; yield a function that shows the state of a run.

    Args:
      runs: the runs, in order.
      part: returns the fraction of a run that is over.
      console: where the bars are shown.
    """
    console.print(
        "The bars show the seed, the test accuracy of the center, the exchanges of "
        "each worker and, in brackets, the staleness of its last message."
    )
    progress = Progress(
        TextColumn("{task.description:>15}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[seed]:<6}"),
        TextColumn("{task.fields[accuracy]:>6}"),
        TextColumn("{task.fields[workers]:<24}"),
        TimeElapsedColumn(),
        console=console,
    )
    groups = by_method(runs)
    with progress:
        bars = {
            name: progress.add_task(
                name,
                total=len(group),
                start=False,
                seed="",
                accuracy="",
                workers="",
            )
            for name, group in groups.items()
        }

        def show(result: Run) -> None:
            bar = bars[result.method.name]
            workers = "  ".join(
                f"{name} {len(reports)} ({reports[-1].staleness})"
                for name, reports in sorted(result.exchanges.items())
            )
            progress.start_task(bar)
            progress.update(
                bar,
                completed=groups[result.method.name].index(result) + part(result),
                seed=f"seed {result.seed}",
                accuracy=f"{result.accuracy[-1]:.1%}",
                workers=workers,
            )
            if part(result) < 1:  # the runs before this one have ended
                for other in progress.tasks:
                    if other.started and other.id != bar and not other.stop_time:
                        progress.stop_task(other.id)

        yield show


def save_and_read_back(result: Run, folder: pathlib.Path) -> PyTree:
    """Save the center as an Orbax checkpoint, and return it as read back."""
    folder = folder.resolve() / re.sub(r"\W+", "-", result.method.name).lower()
    shutil.rmtree(folder, ignore_errors=True)
    ocp.save(folder, result.center)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        result.center,
    )
    return ocp.load(folder, abstract)


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by method, each with all its seeds."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.method.name, []).append(run)
    return groups


def compared(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs in which workers exchange and none is killed, by method."""
    return by_method([run for run in runs if run.versions and not run.method.kills])


def common_level(runs: Sequence[Run]) -> float:
    """Return the accuracy that all runs reached, rounded down to half a percent."""
    return math.floor(200 * min((max(run.accuracy) for run in runs), default=0)) / 200


def spread(numbers: Sequence[float], form: str) -> str:
    """Format the median, and the range in a line below."""
    low, middle, high = (
        "-" if math.isinf(x) else format(x, form)
        for x in (min(numbers), float(np.median(numbers)), max(numbers))
    )
    return middle if low == high else f"{middle}\n{low}-{high}"


def table_of(
    runs: Sequence[Run],
    setup: Setup,
    folder: pathlib.Path,
    accuracy: Callable[[PyTree], float],
) -> Table:
    """Make a table of each method's cost and accuracy.

    The accuracy of the first seed is that of its checkpoint, read back from disk.

    Args:
      runs: the runs to show.
      setup: what they have in common.
      folder: for the checkpoints.
      accuracy: returns the test accuracy of parameters.
    """
    level = common_level([run for group in compared(runs).values() for run in group])
    table = Table(
        title=f"{setup.data}: {len(setup.workers)} workers, {setup.mbit:g} Mbit/s, "
        f"{setup.seeds} seeds: median and range",
        padding=(0, 0),
    )
    table.add_column("method", no_wrap=True)
    for column in (
        f"seconds\nto {100 * level:.3g} %",
        f"MB to\n{100 * level:.3g} %",
        "accuracy\nat end, %",
        "waiting\ntime",
        "staleness\nmean/max",
        f"exchanges\n{'/'.join(setup.workers)}",
    ):
        table.add_column(column, justify="right")
    for name, group in by_method(runs).items():
        first, *others = group
        ends = [accuracy(save_and_read_back(first, folder))]
        ends += [accuracy(run.center) for run in others]
        late = [staleness for run in group for staleness in run.staleness]
        made = [len(first.exchanges.get(worker, [])) for worker in setup.workers]
        has_center = bool(first.versions)
        table.add_row(
            name,
            spread([run.cost(level, run.seconds) for run in group], ".2f"),
            spread([run.cost(level, run.megabytes) for run in group], ".1f")
            if has_center
            else "-",
            spread([100 * end for end in ends], ".1f"),
            f"{np.median([run.waiting for run in group]):.0%}" if has_center else "-",
            f"{np.mean(late):.2f}/{max(late)}" if late else "-",
            "/".join(map(str, made)) if has_center else "-",
        )
    return table


def conclusion(level: float, costs: Mapping[str, float], of: str) -> str:
    """Compare the costs of the methods with averaging at every step, in a sentence."""
    others = {name: cost for name, cost in costs.items() if name != EVERY_STEP.name}
    if not others or len(others) == len(costs):
        return f"Test accuracy against {of}"
    parts = {name: cost / costs[EVERY_STEP.name] for name, cost in others.items()}
    ahead = sorted(part for part in parts.values() if part < 1)
    behind = [name for name, part in parts.items() if part >= 1]
    if not ahead:
        return f"{level:.3g} %: averaging at every step is cheapest in {of}"

    def fraction(part: float) -> str:
        return f"1/{round(1 / part)}" if ahead[-1] < 2 / 3 else f"{part:.2f}"

    span = " to ".join(dict.fromkeys(map(fraction, (ahead[0], ahead[-1]))))
    most = f", except {', '.join(behind)}" if behind else ""
    return f"{level:.3g} % with {span} of the {of} of averaging at every step{most}"


def at_the_end(groups: Mapping[str, Sequence[Run]]) -> str:
    """Compare the accuracies after all samples, in a sentence."""
    ends = {
        name: float(np.median([run.accuracy[-1] for run in group]))
        for name, group in groups.items()
    }
    every_step = ends.pop(EVERY_STEP.name, None)
    if every_step is None or not ends:
        return ""
    return (
        f"After equally many samples: averaging {100 * every_step:.1f} %, "
        f"others {100 * min(ends.values()):.1f} to {100 * max(ends.values()):.1f} %"
    )


def plot(runs: Sequence[Run], setup: Setup, path: pathlib.Path) -> None:
    """Plot accuracy against seconds and bytes, and the exchanges of a killed worker."""
    groups = compared(runs)
    level = common_level([run for group in groups.values() for run in group])
    killed = [run for run in runs if run.method.kills]
    figure = plt.figure(figsize=(12, 7.4 if killed else 5.4), layout="constrained")
    top, *bottom = figure.subfigures(
        2 if killed else 1, 1, height_ratios=[3.6, 1] if killed else None, squeeze=False
    )[:, 0]
    panels = top.subplots(1, 2, sharey=True)
    alone = [run for run in runs if not run.versions]
    best = max(max(run.accuracy) for run in runs)
    for axes, of, sums in (
        (panels[0], "time", lambda run: run.seconds),
        (panels[1], "bytes", lambda run: run.megabytes),
    ):
        lines = groups if of == "bytes" else {**groups, **by_method(alone)}
        for group in lines.values():
            _curve(axes, group, [sums(run) for run in group])
        costs = {
            name: float(np.median([run.cost(level, sums(run)) for run in group]))
            for name, group in groups.items()
        }
        axes.set_title(conclusion(100 * level, costs, of), fontsize=11)
    if alone:
        end = np.median([run.accuracy[-1] for run in alone])
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
    if groups:  # the curve of the single worker begins much earlier
        begins = (
            next(filter(None, run.seconds), 1.0)
            for group in groups.values()
            for run in group
        )
        panels[0].set_xlim(left=min(begins) / 2)
    for run in killed[:1]:
        _timeline(bottom[0].subplots(), run, setup.workers)
    figure.suptitle(
        f"{setup.data}: {len(setup.workers)} workers, each with its own part of the "
        f"data and a link of {setup.mbit:g} Mbit/s, one {SLOWDOWN} times slower\n"
        f"{setup.seeds} seeds: median, and lowest to highest. {at_the_end(groups)}",
        fontsize=12,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curve(axes: Any, group: Sequence[Run], points: Sequence[Sequence[float]]) -> None:
    """Plot the median and the range of the seeds, where all have points."""
    known = [
        (np.array(x)[np.array(x) > 0], np.array(run.accuracy)[np.array(x) > 0])
        for x, run in zip(points, group, strict=True)
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
    """Set scales and ticks: plain numbers, and more room near 100 %."""
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
    """Plot the times of all workers' exchanges, and the absence of a killed worker."""
    times = [result.times.get(worker, []) for worker in workers]
    axes.eventplot(times, colors=result.method.color, linelengths=0.7, linewidths=0.8)
    title = result.method.name
    for row, worker in enumerate(workers):
        restarts = [r.restarts for r in result.exchanges.get(worker, [])]
        before_kill = restarts.count(0)
        if 0 < before_kill < len(restarts):
            died, back = times[row][before_kill - 1], times[row][before_kill]
            axes.barh(row, back - died, left=died, height=0.7, color="#DDDDDD")
            before, after = (
                np.interp(x, result.seconds, result.accuracy) for x in (died, back)
            )
            text = f"killed; back after {back - died:.1f} s"
            axes.text((died + back) / 2, row, text, ha="center", va="center")
            title = (
                f"{result.method.name}: meanwhile the center's accuracy went from "
                f"{100 * before:.1f} to {100 * after:.1f} %; at the end it was "
                f"{100 * result.accuracy[-1]:.1f} %"
            )
    axes.set(yticks=range(len(workers)), yticklabels=workers, xlabel="seconds")
    axes.set_title(title, fontsize=12)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:g}")
