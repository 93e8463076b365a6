"""Peak memory of a center's server and of its workers, in models.

Each has its own process, and each worker has the whole loop: parameters, and the center
as last adopted. "held" is the memory that a process keeps between exchanges, and
"above" the memory beyond that at its peak during several exchanges, both in units of
the model's size, without the interpreter and its libraries. The peak is the kernel's
(VmHWM in /proc, reset before the first exchange). "private" and "shared" are the peaks
of the process's own pages and of pages shared with others; these are sampled, so they
may miss a short peak, and the peak need not be their sum.

    python benchmarks/memory.py --megabytes 400 --workers 1 4
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import centers
import jax.numpy as jnp
import optax
from processes import Process
from report import Report, Row, parse

import agn_optax


class Memory:
    """Memory of a process as reported by the kernel, in bytes."""

    def __init__(self, process: Process) -> None:
        self._folder = pathlib.Path(f"/proc/{process.pid}")
        self.base = self._now("VmRSS")
        self.idle = 0
        self._private = self._shared = 0
        self._least = 0

    def settle(self) -> None:
        """Reset the peaks; called while the process is idle."""
        self.idle = self._now("VmRSS")
        self._private = self._shared = 0
        self._least = self._now("RssAnon")
        (self._folder / "clear_refs").write_text("5")  # resets the peak

    def sample(self) -> None:
        """Sample private and shared pages, whose peaks the kernel does not keep."""
        self._private = max(self._private, self._now("RssAnon"))
        self._shared = max(self._shared, self._now("RssShmem"))

    def row(self, size: float) -> Row:
        """Return a table row, in units of ``size``."""
        peak = self._now("VmHWM")
        return {
            "held": (self.idle - self.base) / size,
            "above": (peak - self.idle) / size,
            "peak": (peak - self.base) / size,
            "private_above": (self._private - self._least) / size,
            "shared": self._shared / size,
        }

    def _now(self, field: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return 1024 * int(value.split()[0])
        raise KeyError(f"{self._folder}/status has no {field}")


@contextlib.contextmanager
def sampling(memories: Sequence[Memory]) -> Iterator[None]:
    """Sample memories continuously."""
    end = threading.Event()

    def sample() -> None:
        while not end.wait(0.002):
            for memory in memories:
                memory.sample()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


# In the processes of workers.

_worker: dict[str, Any] = {}


def warm_up() -> None:
    jnp.zeros(()).block_until_ready()


def start(address: str, transport: str, name: str) -> None:
    center = centers.connect(address, transport)
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=1, name=name)
    params, state = worker.start()
    _worker.update(worker=worker, params=params, state=state)


def exchange(times: int) -> None:
    for _ in range(times):
        loop = _worker.pop("params"), _worker.pop("state")  # to be donated
        _worker["params"], _worker["state"] = _worker["worker"].exchange(*loop)
        del loop


# In this one.


def peaks(transport: str, workers: int, args: argparse.Namespace) -> list[Row]:
    """Measure the server, and the worker with the largest peak."""
    size = 1e6 * args.megabytes
    with contextlib.ExitStack() as stack:
        server, *clients = (stack.enter_context(Process()) for _ in range(1 + workers))
        for process in (server, *clients):
            process.call(warm_up)
        memories = [Memory(process) for process in (server, *clients)]
        served = centers.served(server, size, args.leaves)
        address = stack.enter_context(served)
        for i, client in enumerate(clients):
            client.call(start, address, transport, f"worker-{i}")
        time.sleep(0.2)  # freed memory goes back to the kernel
        for memory in memories:
            memory.settle()
        with sampling(memories):
            for client in clients:
                client.ask(exchange, args.exchanges)
            for client in clients:
                client.answer()
        of_server, *of_workers = (memory.row(size) for memory in memories)
        for client in clients:
            client.close()  # before the center, which a client would look for
    most = max(of_workers, key=lambda row: row["peak"])
    return [
        {"process": name, "workers": workers, "transport": transport, **row}
        for name, row in (("server", of_server), ("worker", most))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of server and workers.")
    add = parser.add_argument
    add("--megabytes", type=float, default=400, help="of the model")
    add("--leaves", type=int, default=4)
    add("--workers", type=int, nargs="+", default=[1, 4])
    add("--exchanges", type=int, default=5, help="of every worker")
    add("--transports", nargs="+", default=centers.TRANSPORTS)
    small = {"megabytes": 20, "workers": [1], "exchanges": 2}
    args = parse(parser, transports=["memory"], **small)
    report = Report(args.json)
    rows = [
        row
        for transport in args.transports
        for workers in args.workers
        for row in peaks(transport, workers, args)
    ]
    title = (
        f"memory in models of {args.megabytes:g} MB, {args.exchanges} exchanges of "
        "every worker"
    )
    report.add("memory", title, rows)
    report.write()


if __name__ == "__main__":
    main()
