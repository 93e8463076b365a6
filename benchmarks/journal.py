"""Cost of durability: exchanges with and without a journal, and the disk alone.

All forms take turns with the same bytes, in a new order each time (a disk may be slower
after large writes), and ratios are of neighbors in time:

- disk: a write to the end of a file, and a sync.
- journal: a record in a journal, with checksum and sync.
- none, always: exchanges of all workers over gRPC with a center in another process: one
  in memory, and one whose journal is on disk before it answers. The latter is also
  compared with the sum of its work: an exchange, and then the disk.

    python benchmarks/journal.py --millions 10 --directory .
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import centers
import numpy as np
import side_by_side
from report import Report, Row, parse
from side_by_side import Form

from agn_optax import center, rules, service
from agn_optax.center.durability import _writer
from agn_optax.center.durability._directory import Directory

RULE = rules.downpour()
_LEAVES = 10
BOTH = "none, then disk"


def serve(pipe: Any, durability: Any) -> None:
    """Serve a center until the pipe sends or closes."""
    with service.serve(RULE, durability=durability) as server:
        pipe.send(server.address)
        with contextlib.suppress(EOFError):
            pipe.recv()


class Workers:
    """Workers that exchange with a center in another process, all at once.

    Args:
      count: number of workers, each with its own connection.
      size: elements of the center.
      durability: durability of the center.
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
        self._workers = [
            centers.exchanging(center, self._message, f"worker-{rank}")
            for rank, center in enumerate(self._centers)
        ]
        self._threads = ThreadPoolExecutor(count)

    def run(self) -> None:
        """Make one exchange of each worker."""
        list(self._threads.map(lambda exchange: exchange(), self._workers))

    def close(self) -> None:
        """Close the connections and end the center."""
        self._threads.shutdown()
        for connection in self._centers:
            connection.close()
        self._pipe.send(None)
        self._process.join()


class Disk:
    """A file that grows and is synced after each write.

    Args:
      directory: directory of the file.
      size: bytes of a write.
    """

    def __init__(self, directory: pathlib.Path, size: int) -> None:
        self._path = directory / "disk"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._bytes = np.random.default_rng(0).bytes(size)

    def run(self) -> None:
        """Write and sync once."""
        left = memoryview(self._bytes)
        while left:
            left = left[os.write(self._file, left) :]
        os.fdatasync(self._file)

    def close(self) -> None:
        """Remove the file."""
        os.close(self._file)
        self._path.unlink()


class Journal:
    """A journal without a center.

    Args:
      directory: directory of the journal.
      messages: messages in each record.
      size: elements of a message.
    """

    def __init__(self, directory: pathlib.Path, messages: int, size: int) -> None:
        self._messages = [np.full(size, 1e-3, np.float32)] * messages
        self._written = threading.Semaphore(0)
        self._error: Exception | None = None
        self._directory = Directory(directory)
        self._directory.make_promise("journal", 0)
        self._writer = _writer.Writer(
            self._directory, 0, None, lambda _: self._written.release(), self._fail
        )

    def run(self) -> None:
        """Write one record."""
        self._writer.append({}, self._messages)
        self._written.acquire()
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._written.release()

    def close(self) -> None:
        """End the journal's thread."""
        self._writer.close()
        self._directory.close()


@contextlib.contextmanager
def forms(directory: pathlib.Path, workers: int, size: int) -> Iterator[list[Form]]:
    """Yield the forms together; each writes or exchanges the same bytes."""
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
    directory: pathlib.Path, workers: int, size: int, repeats: int, report: Report
) -> list[Row]:
    """Return a row for every form, and one for an exchange and the disk together."""
    with forms(directory, workers, size) as made:
        order = np.random.default_rng(0)
        seconds = side_by_side.take_turns(made, repeats, report.console, order)
    seconds[BOTH] = [
        none + disk for none, disk in zip(seconds["none"], seconds["disk"], strict=True)
    ]
    peers = [(form.name, form.peer) for form in made] + [("always", BOTH)]
    rows = []
    for name, peer in peers:
        row = side_by_side.compare(seconds, name, peer)
        row["MB/s"] = 4e-6 * size * workers / row.pop("seconds")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="What durability costs.")
    add = parser.add_argument
    add("--millions", type=float, default=10, help="of parameters")
    add("--workers", type=int, nargs="+", default=[1, 2])
    add("--repeats", type=int, default=15, help="exchanges measured of every worker")
    add("--directory", type=pathlib.Path, default=pathlib.Path(), help="on the disk")
    args = parse(parser, millions=0.1, workers=[1], repeats=2)
    report = Report(args.json)
    size = int(args.millions * 1e6)
    for workers in args.workers:
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            rows = measure(pathlib.Path(folder), workers, size, args.repeats, report)
        title = f"{4 * args.millions:g} MB, workers: {workers}"
        report.add(f"{workers} workers", title, rows)
    report.write()


if __name__ == "__main__":
    main()
