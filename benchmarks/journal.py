"""What durability costs: exchanges with a journal, without one, and the disk alone.

All forms take turns, in a new order each time (a disk may be slower after much was
written), with the same bytes, and ratios are of neighbors in time:

- disk: a write to the end of a file, and a sync.
- journal: a record in a journal, with checksum and sync.
- none, always: exchanges of all workers over gRPC with a center in another process, one
  that is in memory, and one whose journal is on disk before it answers. The latter also
  next to what it does: an exchange, and then the disk.

    python benchmarks/journal.py --millions 10 --directory .
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import side_by_side
from rich.console import Console
from rich.table import Table
from side_by_side import Form

from agn_optax import center, rules, service
from agn_optax.center import _journal
from agn_optax.center._directory import Directory

RULE = rules.downpour()
_LEAVES = 10


def serve(pipe: Any, durability: Any) -> None:
    """A center, until the pipe says or shows that it is over."""
    with service.serve(RULE, durability=durability) as server:
        pipe.send(server.address)
        with contextlib.suppress(EOFError):
            pipe.recv()


class Workers:
    """Workers that exchange with a center in another process, all at once.

    Args:
      count: of them, each with a connection of its own.
      size: elements of the center.
      durability: of the center.
    """

    def __init__(self, count: int, size: int, durability: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, durability))
        self._process.start()
        theirs.close()
        address = self._pipe.recv()
        leaf = np.full(size // _LEAVES, 1e-3, np.float32)
        self._message = [leaf] * _LEAVES
        self._centers = [service.connect(address, RULE) for _ in range(count)]
        self._centers[0].initialize(self._message, worker="worker-0")
        self._versions = [0] * count
        self._threads = ThreadPoolExecutor(count)

    def run(self) -> None:
        """One exchange of each worker."""
        list(self._threads.map(self._exchange, range(len(self._centers))))

    def close(self) -> None:
        """Ends the center as well."""
        self._threads.shutdown()
        for connection in self._centers:
            connection.close()
        self._pipe.send(None)
        self._process.join()

    def _exchange(self, rank: int) -> None:
        answer = self._centers[rank].exchange(
            self._message,
            anchor_version=self._versions[rank],
            worker=f"worker-{rank}",
        )
        self._versions[rank] = answer.version


class Disk:
    """A file that grows, and is on disk after each write.

    Args:
      directory: where it is.
      size: bytes of a write.
    """

    def __init__(self, directory: pathlib.Path, size: int) -> None:
        self._path = directory / "disk"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._bytes = np.random.default_rng(0).bytes(size)

    def run(self) -> None:
        """One write."""
        left = memoryview(self._bytes)
        while left:
            left = left[os.write(self._file, left) :]
        os.fdatasync(self._file)

    def close(self) -> None:
        """Removes the file."""
        os.close(self._file)
        self._path.unlink()


class Journal:
    """A journal alone, without a center.

    Args:
      directory: where it is.
      messages: in each record.
      size: elements of a message.
    """

    def __init__(self, directory: pathlib.Path, messages: int, size: int) -> None:
        self._messages = [np.full(size, 1e-3, np.float32)] * messages
        self._written = threading.Semaphore(0)
        self._error: Exception | None = None
        self._directory = Directory(directory)
        self._journal = _journal.Journal(
            self._directory, 0, lambda _: self._written.release(), self._fail
        )

    def run(self) -> None:
        """One record."""
        self._journal.append({}, self._messages)
        self._written.acquire()
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._written.release()

    def close(self) -> None:
        """Ends its thread."""
        self._journal.close()
        self._directory.close()


@contextlib.contextmanager
def forms(directory: pathlib.Path, workers: int, size: int) -> Iterator[list[Form]]:
    """Each writes or exchanges the same bytes; what a form is compared to is there."""
    nbytes = 4 * size * workers
    with contextlib.ExitStack() as stack:
        journal = center.Journal(directory / "center", size=1 << 40)
        parts: dict[str, Any] = {
            "disk": Disk(directory, nbytes),
            "journal": Journal(directory / "journal", workers, size),
            "none": Workers(workers, size, None),
            "always": Workers(workers, size, journal),
        }
        for part in parts.values():
            stack.callback(part.close)
        peers = {"always": "none"}
        yield [Form(name, peers.get(name, "disk"), p.run) for name, p in parts.items()]


def measure(
    directory: pathlib.Path, workers: int, size: int, repeats: int, console: Console
) -> list[dict[str, Any]]:
    """A row for every form, and one for an exchange and the disk together."""
    seconds: dict[str, list[float]] = {}
    with forms(directory, workers, size) as made:
        for form in made:
            form.run = timed(form, seconds.setdefault(form.name, []))
        order = np.random.default_rng(0)
        rows = side_by_side.measure(made, repeats, console, order)
    megabytes = 4e-6 * size * workers
    for row in rows.values():
        row["megabytes_a_second"] = round(megabytes / row.pop("seconds"), 1)
    none, always, disk = (
        np.array(seconds[name][1:]) for name in ("none", "always", "disk")
    )
    low, middle, high = np.percentile(always / (none + disk), [25, 50, 75])
    both = {
        "form": "always",
        "peer": "none, then disk",
        "ratio": round(float(middle), 3),
        "quartiles": [round(float(low), 3), round(float(high), 3)],
        "megabytes_a_second": rows["always"]["megabytes_a_second"],
    }
    return [*rows.values(), both]


def timed(form: Form, seconds: list[float]) -> Any:
    """The form's `run`, which also writes down how long it takes."""
    run = form.run

    def timed_run() -> None:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)

    return timed_run


def show(rows: list[dict[str, Any]], title: str, console: Console) -> None:
    table = Table(title=title)
    table.add_column("form")
    for column in ("time of", "ratio", "quartiles", "MB/s"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["form"],
            row["peer"],
            f"{row['ratio']:.2f}",
            side_by_side.spread(row),
            f"{row['megabytes_a_second']:.0f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="What durability costs.")
    add = parser.add_argument
    add("--millions", type=float, default=10, help="of parameters")
    add("--workers", type=int, nargs="+", default=[1, 2])
    add("--repeats", type=int, default=15, help="exchanges measured of every worker")
    add("--directory", type=pathlib.Path, default=pathlib.Path(), help="on the disk")
    add("--json", type=pathlib.Path, help="also write the numbers here")
    args = parser.parse_args()
    console = Console()
    machine = side_by_side.machine()
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    results = []
    size = int(args.millions * 1e6)
    for workers in args.workers:
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            rows = measure(pathlib.Path(folder), workers, size, args.repeats, console)
        title = f"{4 * args.millions:g} MB, workers: {workers}"
        show(rows, title, console)
        results.append({"millions": args.millions, "workers": workers, "rows": rows})
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
