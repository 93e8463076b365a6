"""Peak memory of a center's server and of its workers, in models.

Each has its own process, and each worker has the whole loop: parameters, and the center
as last adopted. "initializing" is the peak until the first exchange, "held" the memory
that a process keeps between exchanges, and "above" the memory beyond that at its peak
during several exchanges, all in units of the model's size, without the interpreter and
its libraries. The peak is the kernel's (VmHWM in /proc, reset before the first
exchange), and in shared memory it counts the segments in both processes. A worker is
the one with the largest peak.

    python benchmarks/memory.py --megabytes 400 --workers 1 4
"""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

import centers
import jax.numpy as jnp
import numpy as np
import optax
from measuring import Benchmark, Process

import agn_optax

EXCHANGES = 5  # of every worker


def status(field: str) -> int:
    """Return the bytes in a field of this process's status in /proc."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(value)


def begin() -> int:
    """Load JAX in this process, and return the memory that it takes without a model."""
    jnp.zeros(()).block_until_ready()
    return status("VmRSS")


def settle() -> tuple[int, int]:
    """Reset the peak of this process; return the peak until now, and the memory."""
    before = status("VmHWM"), status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return before


_worker: dict[str, Any] = {}  # in the processes of workers


def start(address: str, transport: str, name: str) -> None:
    center = centers.connect(address, transport)
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=1, name=name)
    _worker.update(loop=worker.start(), exchange=worker.exchange)


def exchange() -> None:
    for _ in range(EXCHANGES):
        _worker["loop"] = _worker["exchange"](*_worker.pop("loop"))  # donated


class Memory(Benchmark, quick="--megabytes 20 --workers 1 --transports memory"):
    """Peak memory of server and workers.

    Args:
      megabytes: size of the model.
      workers: numbers of workers.
      transports: transports of the workers.
    """

    megabytes: float = 400.0
    workers: Sequence[int] = (1, 4)
    transports: Sequence[str] = centers.TRANSPORTS

    def run(self) -> None:
        """Measure each transport with each number of workers."""
        rows = [
            {"process": process, "workers": n, "transport": transport, **models}
            for transport in self.transports
            for n in self.workers
            for process, models in self.peaks(transport, n).items()
        ]
        title = f"{self.megabytes:g} MB, {EXCHANGES} exchanges of every worker"
        self.add("memory", f"memory in models of {title}", rows)

    def peaks(self, transport: str, workers: int) -> dict[str, dict[str, float]]:
        """Measure the server, and the worker with the largest peak."""
        processes = [self.use(Process()) for _ in range(1 + workers)]
        server, *clients = processes
        base = [process.call(begin) for process in processes]
        address = server.call(centers.serve, 1e6 * self.megabytes)
        for i, client in enumerate(clients):
            client.call(start, address, transport, f"{i}")
        time.sleep(0.2)  # freed memory goes back to the kernel
        initial, held = np.array([process.call(settle) for process in processes]).T
        for answer in [client.submit(exchange) for client in clients]:
            answer.result()
        peak = np.array([process.call(status, "VmHWM") for process in processes])
        self.stack.close()
        most = 1 + int(np.argmax(peak[1:] - base[1:]))
        columns = {"initializing": initial - base, "held": held - base}
        columns |= {"above": peak - held, "peak": peak - base}
        return {
            name: {
                key: float(x[i] / 1e6 / self.megabytes) for key, x in columns.items()
            }
            for name, i in (("server", 0), ("worker", most))
        }


if __name__ == "__main__":
    Memory.main()
