"""Plots of the results of all benchmarks; run_all.py draws them.

To draw them again:

    python benchmarks/plots.py bench-output/results.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

Tables = Sequence[dict[str, Any]]


def draw(found: Sequence[dict[str, Any]], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw a plot for each benchmark that has one, and return the files."""
    paths = []
    for each in found:
        drawing = DRAWINGS.get(each["benchmark"])
        if drawing is None:
            continue
        figure = drawing(each["tables"])
        path = folder / f"{each['benchmark']}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        plt.close(figure)
        paths.append(path)
    return paths


def exchange(tables: Tables) -> Any:
    """Plot throughput against size, a line for each form, a panel for each network."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for table in tables:
        network, comma, size = table["key"].partition(", ")
        if not comma:
            continue  # a table of small exchanges
        lines = panels.setdefault(network, {})
        for row in table["rows"]:
            if "bfloat16" not in row["form"]:
                point = (float(size.removesuffix(" MB")), row["GB/s"])
                lines.setdefault(row["form"], []).append(point)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 4.5), sharey=True, squeeze=False
    )
    colors: dict[str, str] = {}  # by form, the same in all panels
    for axis, (network, lines) in zip(axes[0], panels.items(), strict=True):
        for form, points in lines.items():
            style = "o-" if form.startswith("agn_optax") else "o--"
            kind = "raw" if form in ("raw TCP", "raw Unix socket") else form
            color = colors.setdefault(kind, f"C{len(colors)}")
            axis.plot(
                *zip(*sorted(points), strict=True), style, label=form, color=color
            )
        axis.set(title=f"Over {_of(network)}; dashed: without this library")
        axis.set_xlabel("MB in each direction")
        _logarithmic(
            axis.xaxis, sorted({x for each in lines.values() for x, _ in each})
        )
        _logarithmic(axis.yaxis)
        _legend(axis)
    axes[0][0].set_ylabel("GB/s, both directions")
    return figure


def fan_in(tables: Tables) -> Any:
    """Plot exchanges/s against workers, a line for each transport."""
    figure, axis = plt.subplots(figsize=(6.5, 4.5))
    counts: set[float] = set()
    for table in tables:
        workers, a_second = _columns(table, "workers", "a_second")
        axis.plot(workers, a_second, "o-", label=table["key"])
        counts.update(workers)
    axis.set(
        title="Exchanges of all workers at one center",
        xlabel="workers",
        ylabel="exchanges a second, all workers",
    )
    _logarithmic(axis.xaxis, sorted(counts))
    axis.set_ylim(bottom=0)
    _legend(axis)
    return figure


def size(tables: Tables) -> Any:
    """Plot milliseconds against bytes, and against leaves."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5))
    leaves: set[float] = set()
    for table in tables:
        kind, _, rest = table["key"].partition(", ")
        if kind == "size":
            sizes, milliseconds = _columns(table, "bytes", "milliseconds")
            numbers = [float(each.replace(",", "")) for each in sizes]
            label = "1 leaf" if rest == "1 leaves" else rest
            axes[0].plot(numbers, milliseconds, "o-", label=label)
        elif kind == "leaves":
            numbers, milliseconds = _columns(table, "leaves", "milliseconds")
            axes[1].plot(numbers, milliseconds, "o-", label=rest)
            leaves.update(numbers)
    axes[0].set(title="One exchange, by the model's size", xlabel="bytes of parameters")
    axes[1].set(title="One exchange, by the number of leaves", xlabel="leaves")
    _logarithmic(axes[0].xaxis, within=[1])
    _logarithmic(axes[1].xaxis, sorted(leaves))
    for axis in axes:
        _logarithmic(axis.yaxis)
        _legend(axis)
    axes[0].xaxis.set_major_formatter(ticker.EngFormatter("B"))
    axes[0].set_ylabel("ms an exchange")
    return figure


def optimizer_overhead(tables: Tables) -> Any:
    """Plot step times relative to the peer's, as bars with quartiles.

    Bars begin at 1, on a logarithmic axis: a form that takes twice as long is as far
    from 1 as one that takes half as long.
    """
    figure, axes = plt.subplots(
        1, len(tables), figsize=(6 * len(tables), 6), sharey=True, squeeze=False
    )
    for axis, table in zip(axes[0], tables, strict=True):
        rows = [row for row in table["rows"] if row["form"] != row["peer"]]
        ratios = [row["ratio"] for row in rows]
        spread = [
            [row["ratio"] - row["quartiles"][0] for row in rows],
            [row["quartiles"][1] - row["ratio"] for row in rows],
        ]
        names = [f"{row['form']} / {row['peer']}" for row in rows]
        beyond = [ratio - 1 for ratio in ratios]
        axis.barh(names, beyond, left=1.0, xerr=spread, height=0.7, color="#56B4E9")
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set_title(table["title"], fontsize="medium")
        axis.set_xlabel("time relative to the peer's, with quartiles (log scale)")
        _logarithmic(axis.xaxis, [0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5, 8])
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    return figure


def _of(network: str) -> str:
    return network if network.isupper() else f"a {network}"


def _logarithmic(
    axis: Any, ticks: Sequence[float] = (), within: Sequence[float] = (1, 2, 5)
) -> None:
    """Make an axis logarithmic, with plain numbers at given or default places."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    if ticks:
        axis.set_major_locator(ticker.FixedLocator(ticks))
    else:
        axis.set_major_locator(ticker.LogLocator(subs=within))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(ticker.NullLocator())


def _legend(axis: Any) -> None:
    """Draw the legend below the axes, where it hides no line."""
    axis.grid(alpha=0.3)
    axis.legend(
        fontsize="small",
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        frameon=False,
    )


def _columns(table: dict[str, Any], *names: str) -> Iterator[list[Any]]:
    return ([row[name] for row in table["rows"]] for name in names)


DRAWINGS: dict[str, Callable[[Tables], Any]] = {
    "exchange": exchange,
    "fan_in": fan_in,
    "size": size,
    "optimizer_overhead": optimizer_overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws what run_all.py found.")
    parser.add_argument("results", type=pathlib.Path)
    results = parser.parse_args().results
    for path in draw(json.loads(results.read_text()), results.parent):
        print(path)


if __name__ == "__main__":
    main()
