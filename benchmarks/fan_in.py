"""Total exchanges/s of many workers at one center, and the slowest worker's share.

Workers are threads of a few client processes, each with its own connection, and
exchange as fast as they can for a while. The numbers of workers take turns. "speed" is
the total relative to that of one worker, "of peak" relative to the best number of
workers, and "slowest" the share of the slowest worker relative to the mean. "raw TCP"
has as many sockets that send, add and send back, each with its own numbers.

    python benchmarks/fan_in.py --workers 1 2 4 8 16 32 64
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import centers
import numpy as np
import peers
import side_by_side
from processes import Process
from report import Report, parse
from side_by_side import Form

RAW = "raw TCP"


class FanIn:
    """Teams of workers, one for each transport."""

    def __init__(self, crew: centers.Crew, args: argparse.Namespace) -> None:
        self._crew, self._args = crew, args
        self._done: dict[str, list[list[float]]] = {}  # by form: [runs][workers]

    def exchanging(self, transport: str, address: str) -> list[Form]:
        """Hire workers at a center, and return a form for each number of them."""
        size, leaves = 1e6 * self._args.megabytes, self._args.leaves
        worker = functools.partial(centers.worker, address, transport, size, leaves)
        names = [f"worker-{i}" for i in range(max(self._args.workers))]
        return self._forms(
            transport, [functools.partial(worker, each) for each in names]
        )

    def raw(self, process: Process) -> list[Form]:
        """Open raw sockets, and return a form for each number of them."""
        size, most = peers.bytes_of(self._args.megabytes), max(self._args.workers)
        return self._forms(RAW, [peers.raw_worker(process, size) for _ in range(most)])

    def _forms(self, transport: str, makers: Sequence[Callable[[], Any]]) -> list[Form]:
        self._crew.hire(transport, makers)
        first = name_of(transport, self._args.workers[0])
        return [
            Form(
                name_of(transport, workers),
                first,
                functools.partial(self._count, transport, workers),
            )
            for workers in self._args.workers
        ]

    def slowest(self, form: Form) -> float:
        """Return the smallest share of a worker, relative to the mean."""
        measured = self._done[form.name][1:]  # without the warm-up run
        shares = np.sum(measured, axis=0)
        return round(float(shares.min() / shares.mean()), 3)

    def _count(self, transport: str, workers: int) -> float:
        done = self._crew.work(transport, workers, self._args.window)
        self._done.setdefault(name_of(transport, workers), []).append(done)
        return self._args.window / sum(done)


def name_of(transport: str, workers: int) -> str:
    return f"{transport}, {workers} workers"


def main() -> None:
    parser = argparse.ArgumentParser(description="Many workers at one center.")
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--megabytes", type=float, default=4, help="of the model")
    add("--leaves", type=int, default=4)
    add("--processes", type=int, default=4, help="that the workers are threads of")
    add("--transports", nargs="+", default=centers.TRANSPORTS)
    add("--window", type=float, default=3.0, help="seconds in which they are counted")
    add("--repeats", type=int, default=3)
    args = parse(
        parser, workers=[1, 2], megabytes=0.1, processes=1, window=0.1, repeats=1
    )
    report = Report(args.json)
    size = 1e6 * args.megabytes
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(Process())
        addresses = {
            transport: stack.enter_context(centers.served(process, size, args.leaves))
            for transport in args.transports
        }
        fan_in = FanIn(stack.enter_context(centers.Crew(args.processes)), args)
        forms = {RAW: fan_in.raw(stack.enter_context(Process()))}
        for transport, address in addresses.items():
            forms[transport] = fan_in.exchanging(transport, address)
        seconds = side_by_side.take_turns(
            [form for team in forms.values() for form in team],
            args.repeats,
            report.console,
        )
    for transport, team in forms.items():
        best = side_by_side.fastest(seconds, [form.name for form in team])
        rows = []
        for workers, form in zip(args.workers, team, strict=True):
            row = side_by_side.compare(seconds, form.name, form.peer)
            row = side_by_side.speed(row)
            of_peak = side_by_side.compare(seconds, form.name, best)
            rows.append(
                {
                    "workers": workers,
                    "a_second": 1 / row["seconds"],
                    "GB/s": 2e-9 * size / row["seconds"],
                    "speed": row["ratio"],
                    "quartiles": row["quartiles"],
                    "of_peak": side_by_side.speed(of_peak)["ratio"],
                    "slowest": fan_in.slowest(form),
                }
            )
        title = (
            f"{args.megabytes:g} MB over {transport}: exchanges of all workers, "
            f"threads of {args.processes} processes"
        )
        report.add(transport, title, rows)
    report.write()


if __name__ == "__main__":
    main()
