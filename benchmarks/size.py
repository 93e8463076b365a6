"""Cost of an exchange by size and by number of leaves, and its fit by a line.

First a model in few leaves, from a kilobyte to a gigabyte, with a straight line through
the milliseconds (fitted to relative errors, so that small sizes count as much as large
ones). Then models of one size in 1 to 10,000 leaves, in turns with the one in one leaf.

    python benchmarks/size.py
    python benchmarks/size.py --largest 4e9 --leaves 1 10 100
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

import centers
import numpy as np
import side_by_side
from processes import Process
from report import Report, Row, parse
from side_by_side import Form


class Models:
    """Centers of many shapes, each with a worker in this process."""

    def __init__(self, process: Process, stack: contextlib.ExitStack) -> None:
        self._process, self._stack = process, stack

    def form(
        self, name: str, peer: str, size: float, leaves: int, transport: str
    ) -> Form:
        """Make the form of a model's exchanges; small models make several per run."""
        served = centers.served(self._process, size, leaves)
        address = self._stack.enter_context(served)
        # The first exchange of very many leaves compiles for longer than the default
        # timeout.
        center = centers.connect(address, transport, timeout=600.0)
        self._stack.enter_context(center)
        contribution = centers.tree(size, leaves, 1e-6)
        exchange = centers.exchanging(center, contribution, "worker-0")
        return Form(name, peer, averaged(exchange, times(size)))


def times(size: float) -> int:
    """Return the exchanges per run: one of a small model would be mostly noise."""
    return max(1, min(20, round(4e6 / size)))


def averaged(exchange: Callable[[], None], count: int) -> Callable[[], float]:
    """Return a function that measures the mean seconds of ``count`` exchanges."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(count):
            exchange()
        return (time.perf_counter() - start) / count

    return run


def against_size(leaves: int, args: argparse.Namespace, report: Report) -> Row:
    """Add a table with a row for every size, and return the fitted line."""
    exponents = range(3, round(np.log10(args.largest)) + 1)
    sizes = [10.0**e for e in exponents if 10.0**e < args.largest] + [args.largest]
    with Process() as process, contextlib.ExitStack() as stack:
        models = Models(process, stack)
        forms = [
            models.form(f"{size:g}", "", size, leaves, args.transport) for size in sizes
        ]
        seconds = side_by_side.take_turns(forms, args.repeats, report.console)
        del forms
    medians = np.array([np.median(seconds[f"{size:g}"]) for size in sizes])
    line = np.stack([np.ones(len(sizes)), np.array(sizes)], axis=1)
    (start, per_byte), *_ = np.linalg.lstsq(
        line / medians[:, None], np.ones(len(sizes)), rcond=None
    )
    rows: list[Row] = []
    for size, median in zip(sizes, medians, strict=True):
        low, high = 1e3 * np.percentile(seconds[f"{size:g}"], [25, 75])
        rows.append(
            {
                "bytes": f"{size:,.0f}",
                "milliseconds": 1e3 * float(median),
                "quartiles": [float(low), float(high)],
                "GB/s": 2e-9 * size / float(median),
                "of_the_line": round(float(median / (start + per_byte * size)), 3),
            }
        )
    title = f"exchange against size, leaves: {leaves}, over {args.transport}, TCP"
    report.add(f"size, {leaves} leaves", title, rows)
    off = [row["of_the_line"] for row in rows]
    return {
        "leaves": leaves,
        "milliseconds_at_0": 1e3 * float(start),
        "ns_a_byte": 1e9 * float(per_byte),
        "GB/s_at_large": 2e-9 / float(per_byte),
        "farthest_off": max(off, key=lambda ratio: abs(np.log(ratio))),
    }


def against_leaves(megabytes: float, args: argparse.Namespace, report: Report) -> None:
    """Add a table with a row for every number of leaves."""
    size = 1e6 * megabytes
    one = str(args.leaves[0])
    begun = {}
    with Process() as process, contextlib.ExitStack() as stack:
        models = Models(process, stack)
        forms = []
        for leaves in args.leaves:
            start = time.perf_counter()
            form = models.form(str(leaves), one, size, leaves, args.transport)
            form.run()  # compiles
            begun[leaves] = time.perf_counter() - start
            forms.append(form)
        seconds = side_by_side.take_turns(forms, args.repeats, report.console)
        del forms, form
    rows = []
    for leaves in args.leaves:
        row = side_by_side.compare(seconds, str(leaves), one)
        more = row["seconds"] - float(np.median(seconds[one]))
        added = leaves - args.leaves[0]
        rows.append(
            {
                "leaves": leaves,
                "milliseconds": 1e3 * row["seconds"],
                "ratio": row["ratio"],
                "quartiles": row["quartiles"],
                "µs_a_leaf": 1e6 * more / added if added else None,
                "first_exchange_s": begun[leaves],
            }
        )
    title = f"exchange of {megabytes:g} MB against leaves, over {args.transport}, TCP"
    report.add(f"leaves, {megabytes:g} MB", title, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost against size and leaves.")
    add = parser.add_argument
    add("--largest", type=float, default=1e9, help="bytes of the largest model")
    add("--lines", type=int, nargs="*", default=[1, 10], help="leaves of those models")
    add("--leaves", type=int, nargs="+", default=[1, 10, 100, 1_000, 10_000])
    add("--totals", type=float, nargs="*", default=[40, 400], help="MB in those leaves")
    add("--transport", choices=centers.TRANSPORTS, default="memory")
    add("--repeats", type=int, default=7)
    args = parse(parser, largest=1e5, lines=[1], leaves=[1, 8], totals=[0.1], repeats=1)
    report = Report(args.json)
    lines = [against_size(leaves, args, report) for leaves in args.lines]
    if lines:
        report.add("lines", "straight lines through exchanges against size", lines)
    for megabytes in args.totals:
        against_leaves(megabytes, args, report)
    report.write()


if __name__ == "__main__":
    main()
