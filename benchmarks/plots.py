"""The results of all benchmarks as pictures; run_all.py draws them.

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
    """A picture for each benchmark that has one; gives their files."""
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
    """Throughput against size, a line for every form; a panel for every network."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for table in tables:
        network, comma, size = table["key"].partition(", ")
        if not comma:
            continue  # of small exchanges
        lines = panels.setdefault(network, {})
        for row in table["rows"]:
            if "bfloat16" not in row["form"]:
                point = (float(size.removesuffix(" MB")), row["GB/s"])
                lines.setdefault(row["form"], []).append(point)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 4.5), sharey=True, squeeze=False
    )
    colors: dict[str, str] = {}  # of forms, the same in all panels
    for axis, (network, lines) in zip(axes[0], panels.items(), strict=True):
        for form, points in lines.items():
            style = "o-" if form.startswith("agn_optax") else "o--"
            kind = "raw" if form.startswith("raw") else form
            color = colors.setdefault(kind, f"C{len(colors)}")
            axis.plot(
                *zip(*sorted(points), strict=True), style, label=form, color=color
            )
        axis.set(title=network, xlabel="MB", xscale="log", yscale="log")
        _finish(axis)
    axes[0][0].set_ylabel("GB/s, both directions")
    return figure


def fan_in(tables: Tables) -> Any:
    """Exchanges a second against workers, a line for every transport."""
    figure, axis = plt.subplots(figsize=(6, 4))
    for table in tables:
        columns = _columns(table, "workers", "a_second")
        axis.plot(*columns, "o-", label=table["key"])
    axis.set(xlabel="workers", ylabel="exchanges a second, all workers")
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def size(tables: Tables) -> Any:
    """Milliseconds against bytes, and against leaves."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5))
    for table in tables:
        kind = table["key"].partition(",")[0]
        if kind == "size":
            sizes, milliseconds = _columns(table, "bytes", "milliseconds")
            numbers = [float(each.replace(",", "")) for each in sizes]
            axes[0].plot(numbers, milliseconds, "o-", label=table["key"])
        elif kind == "leaves":
            axes[1].plot(
                *_columns(table, "leaves", "milliseconds"), "o-", label=table["key"]
            )
    for axis, label in zip(axes, ("bytes", "leaves"), strict=True):
        axis.set(xlabel=label, xscale="log", yscale="log")
        _finish(axis)
    axes[0].set_ylabel("ms an exchange")
    return figure


def optimizer_overhead(tables: Tables) -> Any:
    """Time of a step relative to the peer's, as bars with their quartiles."""
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
        axis.barh(names, ratios, xerr=spread, height=0.7)
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set(title=table["title"], xlabel="time relative to the peer's")
    axes[0][0].invert_yaxis()
    return figure


def _finish(axis: Any) -> None:
    """Plain numbers along a logarithmic axis, and a legend that hides no line."""
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axis.legend(
        fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13)
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
