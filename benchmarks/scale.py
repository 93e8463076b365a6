"""Predictions of `agn-optax plan`, and measurements: many, trees, shards, size.

"predicted" is the prediction of `agn_optax.planning` from this machine's constants,
which are measured first, and "ratio" is the measurement relative to it: the median of
the repeats, with quartiles. All processes share this machine, but the plan assumes
separate hosts.

- crowd: workers as threads of a few processes, with a connection each, that exchange as
  fast as they can, and with pauses in place of local steps: exchanges/s, and bytes.
- tree: workers, and centers that are workers of other centers, up to a root. At the end
  the root must have applied every message of every worker once.
- shards: an exchange with a center in several parts, with each connection paced to a
  rate, like connections to hosts with separate links; and without pacing.
- restart: a center with a journal is killed; seconds until another one continues.
- large: one exchange of a model that takes most of the memory, and the memory used. It
  is left out if the memory is not free.

    python benchmarks/scale.py
    python benchmarks/scale.py --only large --gigabytes 4
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import centers
import journal
import memory
import numpy as np
import optax
from processes import Process
from report import Report, Row, parse

from agn_optax import planning, service
from agn_optax.center import Journal
from agn_optax.ops.cli import _calibrate
from agn_optax.ops.planning import Cluster, Cost, Disk, Machine, Tree

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from examples.pacing import pace

LOOPBACK = 1e15  # bytes/s of an infinitely fast link: only the ends take time
TRANSPORT = "socket"


def plan(size: float, machine: Machine, pause: float, **cluster: Any) -> Cost:
    """Plan ``size`` bytes of float32 parameters, with a message after every pause."""
    cluster = {"step_time": pause, "bandwidth": LOOPBACK, **cluster}
    return planning.plan(
        centers.rule(),
        planning.abstract(size // 4),
        Cluster(machine=machine, **cluster),
        inner=optax.sgd(0.1),
        period=1,
    )


def against(what: str, predicted: float, measured: Sequence[float]) -> Row:
    """Return a table row of a prediction and its measurements."""
    ratios = np.array(measured) / predicted
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "what": what,
        "predicted": float(predicted),
        "measured": float(statistics.median(measured)),
        "ratio": round(float(middle), 3),
        "quartiles": [round(float(low), 3), round(float(high), 3)],
    }


# In the processes of workers.

_pause = 0.0  # s, in place of local steps


def set_pause(seconds: float) -> None:
    """Set the pause of all workers of this process."""
    global _pause
    _pause = seconds


def paced(
    address: str, size: float, leaves: int, name: str, value: float
) -> Callable[[], None]:
    """Return an exchange with a pause before it, from the second one on."""
    connection = centers.connect(address, TRANSPORT)
    contribution = centers.tree(size, leaves, value)
    exchange = centers.exchanging(connection, contribution, name)
    has_begun = False

    def run() -> None:
        nonlocal has_begun
        if has_begun and _pause:
            time.sleep(_pause)
        has_begun = True
        exchange()

    return run


# In the processes of centers.

_servers: dict[str, tuple[Any, contextlib.ExitStack]] = {}


def serve(parent: str = "", period: int = 1, name: str = "", **options: Any) -> str:
    """Serve a center without parameters, optionally as a worker of another one."""
    stack = contextlib.ExitStack()
    if parent:
        upwards = stack.enter_context(centers.connect(parent, TRANSPORT))
        options["parent"] = service.Parent(upwards, period, name)
    limits = service.Limits(calls=None)
    server = service.serve(centers.rule(), limits=limits, **options)
    _servers[server.address] = server, stack
    return server.address


def stop(address: str) -> None:
    """Stop a center, which sends its remaining progress to its parent."""
    server, stack = _servers.pop(address)
    with stack:
        server.stop(grace=10.0)


def seconds_to_serve(**options: Any) -> tuple[str, float]:
    """Serve a center, and measure the time."""
    begin = time.perf_counter()
    address = serve(**options)
    return address, time.perf_counter() - begin


# In this process.


def look(connections: Sequence[Any]) -> np.ndarray:
    """Return the time, exchanges and traffic of each center."""
    found = []
    for connection in connections:
        said = connection.status()
        exchanges = sum(worker["exchanges"] for worker in said["workers"])
        moved = said["bytes_received"], said["bytes_sent"]
        found.append([time.monotonic(), exchanges, *moved])
    return np.array(found, float)


def watching(stack: contextlib.ExitStack, addresses: Sequence[str]) -> list[Any]:
    """Open connections to centers for observation only."""
    return [
        stack.enter_context(centers.connect(address, TRANSPORT))
        for address in addresses
    ]


def crowd(args: argparse.Namespace, machine: Machine, report: Report) -> None:
    """Measure many workers at one center."""
    size = 1e3 * args.kilobytes
    rows = []
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(Process())
        served = centers.served(process, size, args.leaves, max_workers=args.workers)
        address = stack.enter_context(served)
        crew = stack.enter_context(centers.Crew(args.processes))
        names = [f"worker-{i}" for i in range(args.workers)]
        made = functools.partial(paced, address, size, args.leaves, value=1e-6)
        crew.hire("all", [functools.partial(made, name=name) for name in names])
        seen = watching(stack, [address])
        for pause in args.pauses:
            crew.everywhere(set_pause, pause)
            cost = plan(size, machine, pause or 1e-9, workers=args.workers)
            crew.work("all", args.workers, 2 * pause)  # spreads the workers in time
            before = look(seen)
            measured = [
                sum(crew.work("all", args.workers, args.window)) / args.window
                for _ in range(args.repeats)
            ]
            _, done, *moved = (look(seen) - before)[0]
            predicted = args.workers * cost.utilization / (pause or 1e-9)
            what = f"pauses of {pause:g} s: exchanges a second"
            rows.append(against(what, predicted, measured))
        rows.append(against("bytes of a message", cost.message, [moved[0] / done]))
        rows.append(against("bytes of an answer", cost.answer, [moved[1] / done]))
    title = (
        f"{args.workers} workers, threads of {args.processes} processes, at one center "
        f"of {args.kilobytes:g} KB in {args.leaves} leaves"
    )
    report.add("crowd", title, rows)


@contextlib.contextmanager
def grown(
    root: str, tree: Tree, workers: int, period: int, processes: Sequence[Process]
) -> Iterator[list[list[str]]]:
    """Yield the addresses of a tree's centers, by levels from below."""
    levels = [[root]]
    with contextlib.ExitStack() as stack:
        for count, _ in reversed(tree.centers(workers)[:-1]):
            level = []
            for i in range(count):
                process = processes[i % len(processes)]
                parent = levels[-1][i % len(levels[-1])]
                name = f"level-{len(levels)}-{i}"
                address = process.call(serve, parent, period, name)
                stack.callback(process.call, stop, address)
                level.append(address)
            levels.append(level)
        yield levels[::-1]


def tree(
    args: argparse.Namespace, machine: Machine, period: int, report: Report
) -> None:
    """Measure a tree of centers, with a worker for each of its leaves."""
    size = 1e3 * args.kilobytes
    shape = Tree(levels=args.levels, period=period)
    cost = plan(size, machine, args.step, workers=args.leaf_workers, tree=shape)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(Process())
        root = stack.enter_context(centers.served(process, size, args.leaves))
        sites = [stack.enter_context(Process()) for _ in range(args.processes)]
        crew = stack.enter_context(centers.Crew(args.processes))
        # The tree's servers are stopped first, from below, because they were made last.
        made = grown(root, shape, args.leaf_workers, period, sites)
        with made as levels:
            makers = [
                functools.partial(
                    paced,
                    levels[0][i % len(levels[0])],
                    size,
                    args.leaves,
                    f"w{i}",
                    1.0,
                )
                for i in range(args.leaf_workers)
            ]
            crew.hire("leaves", makers)
            crew.everywhere(set_pause, args.step)
            seen = [watching(stack, level) for level in levels]
            with ThreadPoolExecutor(1) as thread:
                all_of_it = 2 * (args.repeats + 2) * args.window
                working = thread.submit(
                    crew.work, "leaves", args.leaf_workers, all_of_it
                )
                looks = []
                for _ in range(1 + args.repeats):  # all work at the first look
                    time.sleep(2 * args.window)
                    looks.append([look(level) for level in seen])
                working.result()
            sent = sum(look(seen[0])[:, 1])
        with centers.connect(root, TRANSPORT) as connection:
            found = connection.pull().params
    arrived = {-float(value) for leaf in found for value in np.unique(leaf)}
    if arrived != {sent}:
        raise AssertionError(f"of {sent} messages the root has {arrived}")
    rows = []
    for i, level in enumerate(cost.levels):
        where = f"level {i + 1}: {level.centers} of {level.children}"
        steps = np.diff([of_all[i] for of_all in looks], axis=0)  # look, center, what
        rates = np.mean(steps[:, :, 1:] / steps[:, :, :1], axis=1).T.tolist()
        rows += [
            against(f"{where}, exchanges a second", level.exchanges, rates[0]),
            against(f"{where}, bytes/s received", level.received, rates[1]),
        ]
    title = (
        f"{args.leaf_workers} workers with steps of {args.step:g} s below "
        f"{args.levels} levels of centers, which meet their parents once in {period} "
        f"exchanges; the root had all {sent:g} messages, once each"
    )
    report.add(f"tree, {period}", title, rows)


def shards(args: argparse.Namespace, machine: Machine, report: Report) -> None:
    """Measure one worker, and a center in parts."""
    size = 1e6 * args.megabytes
    contribution = centers.tree(size, args.leaves, 1e-6)
    rows = []
    for count in args.shards:
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(Process()) for _ in range(count)]
            addresses = [process.call(serve) for process in processes]
            connection = centers.connect(addresses, TRANSPORT)
            stack.enter_context(connection)
            version = connection.initialize(contribution, worker="worker-0").version
            exchange = centers.exchanging(connection, contribution, "worker-0", version)
            exchange()  # opens all connections
            for rate in (None, args.rate):
                if rate is not None:
                    pace(rate)
                    for process in processes:
                        process.call(pace, rate)
                    exchange()
                cost = plan(
                    size,
                    machine,
                    1.0,
                    shards=count,
                    center_bandwidth=rate or LOOPBACK,
                )
                seconds = [timed(exchange) for _ in range(args.repeats)]
                link = f"{rate / 1e6:g} MB/s each" if rate else "not paced"
                what = f"in {count}, {link}: seconds"
                rows.append(against(what, cost.exchange, seconds))
            _, done, received, _ = look(watching(stack, addresses)).T
            fullest = (received / done).max()
            what = f"in {count}: MB received by the fullest"
            rows.append(against(what, cost.message / count / 1e6, [fullest / 1e6]))
    title = (
        f"exchanges of one worker, {args.megabytes:g} MB in {args.leaves} leaves, with "
        "a center in shards, a process each"
    )
    report.add("shards", title, rows)


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def restart(args: argparse.Namespace, machine: Machine, report: Report) -> None:
    """Measure the restart of a killed center with a journal."""
    size, number = 1e6 * args.megabytes, args.records
    found: dict[str, list[float]] = {"exchange": [], "serve": [], "rejoin": []}
    for _ in range(args.repeats):
        with (
            tempfile.TemporaryDirectory(dir=args.directory) as folder,
            contextlib.ExitStack() as stack,
        ):
            kept = Journal(pathlib.Path(folder, "center"), size=1 << 40)
            first, second = (stack.enter_context(Process()) for _ in range(2))
            second.call(memory.warm_up)
            address = first.call(serve, durability=kept)
            connection = centers.connect(address, TRANSPORT)
            stack.enter_context(connection)
            contribution = centers.tree(size, args.leaves, 1e-6)
            connection.initialize(contribution, worker="worker-0")
            exchange = centers.exchanging(connection, contribution, "worker-0")
            took = [timed(exchange) for _ in range(number)]
            found["exchange"].append(statistics.median(took))
            os.kill(first.pid, signal.SIGKILL)
            first.close()  # wait for its end, which frees the center
            _, seconds = second.call(seconds_to_serve, durability=kept, address=address)
            found["serve"].append(seconds)
            found["rejoin"].append(timed(exchange))
            disk = journal.Disk(pathlib.Path(folder), round(size))
            stack.callback(disk.close)
            disk.run()
            writes = [timed(disk.run) for _ in range(number)]
            found.setdefault("disk", []).append(statistics.median(writes))
    bandwidth = size / statistics.median(found["disk"])
    planned = Disk(bandwidth=bandwidth, size=number * size)
    cost = plan(size, machine, 1.0, disk=planned)
    assert cost.kept is not None
    rows = [
        against(
            "an exchange with a journal: seconds", cost.exchange, found["exchange"]
        ),
        against(
            "until it serves again: seconds",
            cost.kept.read + cost.kept.replay,
            found["serve"],
        ),
        against("the first exchange then: seconds", cost.exchange, found["rejoin"]),
    ]
    title = (
        f"a center of {args.megabytes:g} MB with {number} exchanges in its journal, on "
        f"a disk that takes {bandwidth / 1e6:.0f} MB/s"
    )
    report.add("restart", title, rows)


_large: dict[str, Any] = {}  # in the worker's process


def join_large(address: str, size: float, leaves: int) -> None:
    connection = centers.connect(address, TRANSPORT, timeout=600.0)
    contribution = centers.tree(size, leaves, 1e-6)
    _large["exchange"] = centers.exchanging(connection, contribution, "worker-0")


def exchange_large() -> float:
    return timed(_large["exchange"])


def large(args: argparse.Namespace, machine: Machine, report: Report) -> None:
    """Measure one exchange of a model that takes most of the memory."""
    size = 1e9 * args.gigabytes
    available = memory_available()
    if available < 5 * size:
        report.say(
            f"large: left out, as {available / 1e9:.1f} GB are free, and a model of "
            f"{args.gigabytes:g} GB takes five times as much"
        )
        return
    cost = plan(size, machine, 1.0)
    with Process() as process, Process() as client:
        for each in (process, client):
            each.call(memory.warm_up)
        of_server, of_worker = memory.Memory(process), memory.Memory(client)
        with centers.served(process, size, args.leaves) as address:
            initial = of_server.row(size)["peak"]
            client.call(join_large, address, size, args.leaves)
            for _ in range(2):  # touches memory for the first time
                client.call(exchange_large)
            of_server.settle()
            of_worker.settle()
            seconds = [client.call(exchange_large) for _ in range(args.repeats)]
            peaks = [memory.row(size)["peak"] for memory in (of_server, of_worker)]
            client.close()
    # The center is not read meanwhile, so it moves in place. The worker has no loop: it
    # holds a message, the answer, and the answer before, which would be its anchor.
    center = cost.center.total - cost.center.version
    worker = cost.worker.staged + cost.worker.anchor
    rows = [
        against("an exchange: seconds", cost.exchange, seconds),
        against("the center: models", center / cost.message, [peaks[0]]),
        against("the worker: models", worker / cost.message, [peaks[1]]),
    ]
    title = (
        f"exchanges of {args.gigabytes:g} GB in {args.leaves} leaves (the center was "
        f"made of {initial:.2f} models at most)"
    )
    report.add("large", title, rows)


def memory_available() -> float:
    """Return the available memory in bytes, without swapping."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("MemAvail"))
    return 1024 * float(kilobytes)


PARTS = ("crowd", "tree", "shards", "restart", "large")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans beside what happens here.")
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS)
    add("--workers", type=int, default=200, help="of the crowd")
    add("--kilobytes", type=float, default=40, help="of the model of crowd and tree")
    add("--pauses", type=float, nargs="+", default=[0, 0.2, 0.5, 2], help="seconds")
    add("--leaf-workers", type=int, default=27, help="of the tree")
    add("--levels", type=int, default=3, help="of the tree")
    add("--periods", type=int, nargs="+", default=[5, 1], help="of its centers")
    add("--step", type=float, default=0.3, help="seconds, of its workers")
    add("--shards", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--rate", type=float, default=40e6, help="bytes a second of a shard's link")
    add(
        "--megabytes", type=float, default=40, help="of the model of shards and restart"
    )
    add("--records", type=int, default=20, help="in the journal")
    add("--directory", type=pathlib.Path, default=pathlib.Path(), help="on the disk")
    add("--gigabytes", type=float, default=4, help="of the large model")
    add("--leaves", type=int, default=4)
    add("--processes", type=int, default=4, help="of workers, and of a tree's centers")
    add("--window", type=float, default=5.0, help="seconds in which they are counted")
    add("--repeats", type=int, default=5)
    small = {"shards": [1, 2], "megabytes": 0.4, "records": 2, "gigabytes": 0.004}
    args = parse(
        parser,
        workers=4,
        pauses=[0, 0.05],
        leaf_workers=4,
        levels=2,
        periods=[2],
        step=0.05,
        processes=1,
        window=0.3,
        repeats=1,
        **small,
    )
    report = Report(args.json)
    machine = _calibrate.calibrate()
    report.add("machine", "what the ends take here", [dataclasses.asdict(machine)])
    if "crowd" in args.only:
        crowd(args, machine, report)
    if "tree" in args.only:
        for period in args.periods:
            tree(args, machine, period, report)
    for part in (shards, restart, large):
        if part.__name__ in args.only:
            part(args, machine, report)
    report.write()


if __name__ == "__main__":
    main()
