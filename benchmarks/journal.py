"""Cost of durability: exchanges with and without a journal, and the disk alone.

All forms take turns with the same bytes, in a new order each time (a disk may be slower
after large writes), and ratios are of neighbors in time:

- disk: a write to the end of a file, and a sync.
- none, always: exchanges of all workers with a center in another process: one in
  memory, and one whose journal is on disk before it answers. The latter is also
  compared with the sum of its work: an exchange, and then the disk.

At the end the center with a journal is killed, and another one serves from it, whose
seconds are compared with the prediction of `agn_optax.planning`, from this machine's
constants and the disk's measured rate.

    python benchmarks/journal.py --millions 10 --directory .
"""

import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import centers
import memory
import numpy as np
from measuring import Benchmark, Form, Process, Run

from agn_optax.center import Journal
from agn_optax.ops.cli import _calibrate
from agn_optax.ops.planning import Disk

LEAVES = 10
BOTH = "none, then disk"


@contextlib.contextmanager
def disk(file: pathlib.Path, size: int) -> Iterator[Run]:
    """Open a file that grows, and yield a function that writes and syncs once."""
    content = np.random.default_rng(0).bytes(size)
    with file.open("wb", buffering=0) as opened:

        def run() -> None:
            left = memoryview(content)
            while left:
                left = left[opened.write(left) :]
            os.fdatasync(opened.fileno())

        yield run


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
        name = self.use(tempfile.TemporaryDirectory(dir=self.directory))
        folder = pathlib.Path(name)
        kept = Journal(folder / "center", size=1 << 40)
        first, second = self.use(Process()), self.use(Process())
        write = self.use(disk(folder / "disk", workers * size))
        plain, _ = self.exchanges(self.use(Process()), size)
        always, address = self.exchanges(first, size, durability=kept)
        runs = {"disk": write, "none": plain, "always": always}
        forms = [Form(name, "disk", run) for name, run in runs.items()]
        times = self.turns(forms, shuffled=True)
        both = zip(times["none"], times["disk"], strict=True)
        times[BOTH] = [exchange + write for exchange, write in both]
        forms = forms[:2] + [forms[2]._replace(peer=peer) for peer in ("none", BOTH)]
        rows = times.rows(forms)
        for row in rows:
            row["MB/s"] = 1e-3 * size * workers / row["milliseconds"]
        second.call(memory.begin)
        first.__exit__()  # kills it, and waits for its end, which frees the center
        begin = time.perf_counter()
        second.call(centers.serve, durability=kept, address=address)
        took = time.perf_counter() - begin
        rate, records = workers * size / times.median("disk"), self.repeats + 1
        planned = Disk(bandwidth=rate, size=workers * records * size)
        cost = centers.plan(size, _calibrate.calibrate(), disk=planned)
        assert cost.kept is not None
        until = cost.kept.read + cost.kept.replay
        title = (
            f"{4 * self.millions:g} MB, workers: {workers}, planned {cost.exchange:g}"
        )
        title += f" s; restart after {records} exchanges: {took:g} s, planned {until:g}"
        self.add(f"{workers} workers", title, rows)

    def exchanges(self, process: Process, size: int, **how: Any) -> tuple[Run, str]:
        """Return an exchange of all workers at once with a new center; its address."""
        address = process.call(centers.serve, size, LEAVES, **how)
        threads = self.use(ThreadPoolExecutor(self.workers))
        runs = [
            centers.worker(address, "", size, LEAVES, f"worker-{i}", self.stack)
            for i in range(self.workers)
        ]

        def run() -> None:
            list(threads.map(lambda exchange: exchange(), runs))

        return run, address


if __name__ == "__main__":
    Durability.main()
