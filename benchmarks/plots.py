"""Plots of the results of all benchmarks; run_all.py draws them."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

Tables = Sequence[dict[str, Any]]


def draw(found: Sequence[dict[str, Any]], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw a plot for each benchmark that has one, and return the files."""
    paths = []
    for name, drawing in DRAWINGS.items():
        own = [each for each in found if each["benchmark"] == name]
        if own:
            figure = drawing([table for each in own for table in each["tables"]])
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
            plt.close(figure)
    return paths


def exchange(tables: Tables) -> Any:
    """Plot throughput against size, a line for each form, a panel for each network."""
    points = [
        (network, row["form"], float(size.removesuffix(" MB")), row["GB/s"])
        for table in tables
        for network, comma, size in [table["key"].partition(", ")]
        for row in table["rows"]
        if comma and "bfloat16" not in row["form"]
    ]
    return _lines(points, "MB in each direction", "GB/s, both directions")


def fan_in(tables: Tables) -> Any:
    """Plot exchanges/s against workers, a line for each transport."""
    points = [
        (*table["key"].split(", ", 1), row["workers"], row["a_second"])
        for table in tables
        for row in table["rows"]
    ]
    return _lines(points, "workers", "exchanges a second, all workers")


def size(tables: Tables) -> Any:
    """Plot milliseconds against bytes, and against leaves."""
    points = [
        (f"by {x}", f"{row[other]:,} {other}", row[x], row["milliseconds"])
        for table in tables
        for x, other in (("bytes", "leaves"), ("leaves", "bytes"))
        if len({row[x] for row in table["rows"]}) > 1
        for row in table["rows"]
    ]
    return _lines(points, "bytes, or leaves", "ms an exchange")


def _lines(points: Sequence[tuple[Any, ...]], x: str, y: str) -> Any:
    """Plot lines of (panel, label, x, y), on logarithmic axes."""
    panels = list(dict.fromkeys(panel for panel, *_ in points))
    figure, axes = _panels(len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        own = sorted(point[1:] for point in points if point[0] == panel)
        for label, line in itertools.groupby(own, lambda point: point[0]):
            _, *xy = zip(*line, strict=True)
            is_peer = label.startswith(("raw", "gRPC", "shared", "torch"))
            axis.plot(*xy, "o--" if is_peer else "o-", label=label)
        axis.set(title=f"{panel}; dashed: without this library", xlabel=x, ylabel=y)
        _logarithmic(axis.xaxis, sorted({each for _, each, _ in own}))
        _logarithmic(axis.yaxis)
        # Below the axes, where it hides no line.
        axis.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    return figure


def _panels(count: int) -> tuple[Any, Any]:
    figure = plt.figure(figsize=(6.5 * count, 5), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def optimizer_overhead(tables: Tables) -> Any:
    """Plot step times relative to the peer's, as bars with quartiles.

    Bars begin at 1, on a logarithmic axis: a form that takes twice as long is as far
    from 1 as one that takes half as long.
    """
    tables = [table for table in tables if table["key"].endswith(" M")]
    figure, axes = _panels(len(tables))
    for axis, table in zip(axes, tables, strict=True):
        rows = [row for row in reversed(table["rows"]) if row["form"] != row["peer"]]
        names = [f"{row['form']} / {row['peer']}" for row in rows]
        ratios = np.array([row["ratio"] for row in rows])
        spread = np.abs(np.array([row["quartiles"] for row in rows]).T - ratios)
        axis.barh(names, ratios - 1, left=1.0, xerr=spread, color="#56B4E9")
        axis.axvline(1.0, color="black", linewidth=1)
        label = "time relative to the peer's, with quartiles (log scale)"
        axis.set(title=table["title"], xlabel=label)
        _logarithmic(axis.xaxis, [0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5, 8])
    return figure


def _logarithmic(axis: Any, ticks: Sequence[float] = ()) -> None:
    """Make an axis logarithmic, with plain numbers at given or default places."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    at = ticker.FixedLocator(ticks) if ticks else ticker.LogLocator(subs=(1, 2, 5))
    axis.set_major_locator(at)
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(ticker.NullLocator())
    axis.axes.grid(alpha=0.3)


DRAWINGS = {f.__name__: f for f in (exchange, fan_in, size, optimizer_overhead)}
