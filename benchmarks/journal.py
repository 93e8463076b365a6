"""Cost of durability: exchanges with and without a journal, and the disk alone.

All forms take turns with the same bytes, in a new order each time (a disk may be slower
after large writes), and ratios are of neighbors in time:

- disk: a write to the end of a file, and a sync.
- none, always: exchanges of all workers with a center in another process: one in
  memory, and one whose journal is on disk before it answers. The latter is also
  compared with the sum of its work: an exchange, and then the disk.
- replaced, kept, hashes: the same with a journal that a snapshot replaces every ten
  exchanges; of what is replaced, nothing is kept, or contributions, or hashes.

At the end the center "always" is killed, and another one serves from it, whose
seconds are in the title.

    python benchmarks/journal.py --millions 10 --directory .
"""

import contextlib
import functools
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import centers
import numpy as np
from measuring import Benchmark, Form, Process, Run

from agn_optax.center import Journal

LEAVES = 10
REPLACED = 10  # exchanges of all workers after which a snapshot replaces a journal
BOTH = "none, then disk"
PEERS = (
    ("disk", "disk"),
    ("none", "disk"),
    ("always", "none"),
    ("always", BOTH),
    ("replaced", "always"),
    ("kept", "replaced"),
    ("hashes", "replaced"),
)


@contextlib.contextmanager
def disk(file: pathlib.Path, size: int) -> Iterator[Run]:
    """Open a file that grows, and yield a function that writes and syncs once."""
    content = np.random.default_rng(0).bytes(size)
    with file.open("wb") as opened:

        def run() -> None:
            opened.write(content)
            opened.flush()
            os.fdatasync(opened.fileno())

        yield run


def together(threads: ThreadPoolExecutor, exchanges: list[Run]) -> None:
    list(threads.map(lambda exchange: exchange(), exchanges))


class Durability(Benchmark, quick="--millions 0.1"):
    """Cost of durability.

    Args:
      millions: parameters.
      workers: workers.
      directory: a directory on the disk.
    """

    millions: float = 10.0
    workers: int = 1
    directory: str = "."

    def run(self) -> None:
        """Measure all forms in turns, and then a restart."""
        size, workers = 4 * int(1e6 * self.millions), self.workers
        folder = pathlib.Path(self.use(tempfile.TemporaryDirectory(dir=self.directory)))
        second = self.use(Process())
        journal = Journal(folder / "center", size=1 << 40)
        small = REPLACED * workers * size
        journals = {
            "none": None,
            "always": journal,
            "replaced": Journal(folder / "replaced", size=small),
            "kept": Journal(folder / "kept", size=small, keep="contributions"),
            "hashes": Journal(folder / "hashes", size=small, keep="hashes"),
        }
        processes: dict[str, Process] = {}
        runs: dict[str, Run] = {"disk": self.use(disk(folder / "disk", workers * size))}
        for name, durability in journals.items():
            process = processes[name] = self.use(Process())
            address = process.call(centers.serve, size, LEAVES, durability=durability)
            if name == "always":
                killed = address
            exchanges = [
                centers.worker(address, "", size, LEAVES, name=f"{i}", stack=self.stack)
                for i in range(workers)
            ]
            threads = self.use(ThreadPoolExecutor(workers))
            runs[name] = functools.partial(together, threads, exchanges)
        times = self.turns([Form(name, "disk", run) for name, run in runs.items()])
        both = zip(times["none"], times["disk"], strict=True)
        times[BOTH] = [exchange + write for exchange, write in both]
        rows = times.rows(Form(name, peer, runs[name]) for name, peer in PEERS)
        for row in rows:
            row["MB/s"] = 1e-3 * size * workers / row["milliseconds"]
        second.call(centers.tree, 4.0)  # loads JAX
        # Killed, and waited for, which frees the center.
        processes["always"].__exit__()
        begin = time.perf_counter()
        second.call(centers.serve, durability=journal, address=killed)
        took = time.perf_counter() - begin
        title = f"{4 * self.millions:g} MB, workers: {workers}; "
        title += f"restart of {self.repeats + 1} records: {took:g} s"
        self.add(f"{workers} workers", title, rows)


if __name__ == "__main__":
    Durability.main()
