"""Exchanges of a worker of several processes: seconds and peak memory.

The processes of a worker join by `jax.distributed`, with one CPU device each, and have
parameters that are sharded over all of them (FSDP). The center has another process.

    in pieces    each process exchanges its own pieces, by `worker.exchange`
    gathered     all processes gather one leaf after another; the first one exchanges
                 them, and broadcasts one leaf of the answer after another

Each form is a job of new processes, which exchange once more than is measured. Jobs run
one at a time, in turns. "seconds" are from the call of the last process until the last
one has its parameters: the median, and the [least, most] of all jobs; "ratio" is the
median relative to one process's. "CPU" is the median of the seconds of all cores, also
those of the center, which depend less on other load. "above" is how much the memory of
a process grows during an exchange (VmHWM, reset before it, without VmRSS, which has
freed memory that the process keeps), "peak" the memory without that of the interpreter
before the model: the most of all processes and exchanges, in sizes of the process's own
pieces, which are the model divided by the processes. On a CPU, the peak has parameters
and anchor, and in their place the contribution and the answer, which would all be in
the memory of an accelerator, and in shared memory the message. "center" is the center's
peak in models.

    python benchmarks/processes.py --megabytes 1000 --transports memory socket
"""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import centers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measuring import CONSOLE, Benchmark, Process, Row
from memory import begin, settle, status
from rich.progress import track

import agn_optax

LEAVES = 16
SPECS = {"rows": PartitionSpec("fsdp"), "columns": PartitionSpec(None, "fsdp")}
QUICK = "--megabytes 1 --processes 1 2 --transports memory --exchanges 1"
PIECES, GATHERED = "in pieces", "gathered"

_job: dict[str, Any] = {}  # in each process of a job


class InPieces:
    """A worker that exchanges its own pieces."""

    def __init__(self, worker: agn_optax.Worker, params: Any) -> None:
        self.worker = worker
        self.params, self.state = worker.start(params, chief=True)

    def exchange(self) -> None:
        """Exchange in every process."""
        self.params, self.state = self.worker.exchange(self.params, self.state)


class Gathered:
    """A worker whose first process exchanges for all; the others have none."""

    def __init__(self, worker: agn_optax.Worker, params: Any) -> None:
        self.worker = worker if jax.process_index() == 0 else None
        self.params = params
        self.state: Any = None
        full = self.gather()
        if self.worker is not None:
            full, self.state = self.worker.start(full, chief=True)
        self.broadcast(full)

    def exchange(self) -> None:
        """Gather, exchange in the first process, and broadcast."""
        full = self.gather()
        if self.worker is not None:
            full, self.state = self.worker.exchange(full, self.state)
        self.broadcast(full)

    def gather(self) -> list[Any]:
        """Return the parameters in the first process, and no arrays in the others."""
        full = []
        for leaf in self.params:
            array = multihost_utils.process_allgather(leaf, tiled=True)
            full.append(jnp.asarray(array) if self.worker else None)
        return full

    def broadcast(self, full: list[Any]) -> None:
        """Set the parameters of all processes to those of the first one."""
        for i, leaf in enumerate(self.params):
            sent = full[i] if self.worker else np.zeros(leaf.shape, leaf.dtype)
            got = multihost_utils.broadcast_one_to_all(sent)
            take = np.asarray(got).__getitem__
            self.params[i] = jax.make_array_from_callback(
                leaf.shape, leaf.sharding, take
            )
            full[i] = None


def join(
    form: str, address: str, transport: str, size: float, spec: str, *part: Any
) -> None:
    """Join the processes of a job, and start its worker.

    Args:
      form: the form.
      address: the center's address.
      transport: the transport; "" takes the best one.
      size: bytes of the model.
      spec: name of the dimension that is sharded.
      part: the coordinator's address, the number of processes, and of this process.
    """
    if part[1] > 1:
        jax.distributed.initialize(*part)
    _job["base"] = begin()
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    sharding = NamedSharding(mesh, SPECS[spec])
    shape = 64, max(1, round(size / 4 / LEAVES / 64 / 4)) * 4
    step = jax.jit(
        lambda params: [x - 1 for x in params], out_shardings=sharding, donate_argnums=0
    )
    params = jax.jit(
        lambda: [jnp.zeros(shape) for _ in range(LEAVES)], out_shardings=sharding
    )()
    center = centers.connect(address, transport)
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=1, name="anna")
    loop = (InPieces if form == PIECES else Gathered)(worker, params)
    _job.update(loop=loop, step=step)


def local_step() -> None:
    """Move the parameters; the rule has no record of the step."""
    _job["loop"].params = jax.block_until_ready(_job["step"](_job["loop"].params))


def exchange() -> tuple[float, float, float, int, int]:
    """Exchange; return times of begin and end, CPU seconds, bytes above, and of all."""
    loop = _job["loop"]
    held = settle()[1]
    cpu, begun = time.process_time(), time.monotonic()
    loop.exchange()
    jax.block_until_ready(loop.params)
    ended = time.monotonic()
    cpu, peak = time.process_time() - cpu, status("VmHWM")
    return begun, ended, cpu, peak - held, peak - _job["base"]


def moved() -> float:
    """Return by how much the parameters have moved, which must be equal everywhere.

    Raises:
      ValueError: they are not.
    """
    pieces = [np.asarray(x.addressable_data(0)) for x in _job["loop"].params]
    low, high = min(x.min() for x in pieces), max(x.max() for x in pieces)
    if low != high:
        raise ValueError(f"the parameters are from {low} to {high}")
    return float(low)


class Processes(Benchmark, quick=QUICK):
    """Workers of several processes.

    Args:
      megabytes: size of the model.
      processes: numbers of processes.
      transports: transports of the exchanges; "" takes the best one.
      spec: which dimension is sharded, "rows" or "columns".
      exchanges: exchanges of a job that are measured.
    """

    megabytes: float = 200.0
    processes: Sequence[int] = (1, 2, 4)
    transports: Sequence[str] = ("memory", "socket")
    spec: str = "rows"
    exchanges: int = 3
    repeats = 5

    def run(self) -> None:
        """Measure all jobs in turns, with each transport."""
        for transport in self.transports:
            forms = [(PIECES, n) for n in self.processes]
            forms += [(GATHERED, n) for n in self.processes if n > 1]
            found: dict[Any, list[Any]] = {form: [] for form in forms}
            order = np.random.default_rng(0)
            for _ in track(range(self.repeats), console=CONSOLE, transient=True):
                for i in order.permutation(len(forms)):
                    found[forms[i]].append(self.job(transport, *forms[i]))
            one = np.median([seconds for seconds, *_ in found[forms[0]]])
            rows = [self.row(*form, found[form], float(one)) for form in forms]
            title = f"{self.megabytes:g} MB by {transport}, {self.spec} sharded"
            self.add(f"{transport} {self.megabytes:g}", title, rows)

    def row(self, form: str, processes: int, jobs: list[Any], one: float) -> Row:
        """Return the table row of a form, from the results of its jobs."""
        seconds, cpu = (np.concatenate([job[i] for job in jobs]) for i in (0, 1))
        above, peak, center = (max(job[i] for job in jobs) for i in (2, 3, 4))
        own = 1e6 * self.megabytes / processes
        return {
            "form": form,
            "processes": processes,
            "seconds": float(np.median(seconds)),
            "least, most": [float(seconds.min()), float(seconds.max())],
            "ratio": float(np.median(seconds)) / one,
            "CPU": float(np.median(cpu)),
            "above": above / own,
            "peak": peak / own,
            "center": center / 1e6 / self.megabytes,
        }

    def job(self, transport: str, form: str, processes: int) -> list[Any]:
        """Run a job; return seconds, CPU, bytes above and of all, and the center's."""
        server, *clients = [self.use(Process()) for _ in range(1 + processes)]
        size = 1e6 * self.megabytes
        base = server.call(begin)
        address = server.call(centers.serve)
        with socket.create_server(("127.0.0.1", 0)) as free:
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"

        def together(function: Callable[..., Any], *args: Any) -> list[Any]:
            answers = [client.submit(function, *args) for client in clients]
            return [answer.result() for answer in answers]

        arguments = form, address, transport, size, self.spec, coordinator, processes
        joined = [
            client.submit(join, *arguments, i) for i, client in enumerate(clients)
        ]
        for each in joined:
            each.result()
        seconds, cpu, above, peak = [], [], 0, 0
        for i in range(1 + self.exchanges):
            together(local_step)
            if i == 1:
                server.call(settle)
            before = server.call(time.process_time)
            begun, ended, spent, grown, used = zip(*together(exchange), strict=True)
            if i:  # the first one compiles
                seconds.append(max(ended) - max(begun))
                cpu.append(sum(spent) + server.call(time.process_time) - before)
                above, peak = max(above, *grown), max(peak, *used)
        if set(together(moved)) != {-1.0 - self.exchanges}:
            raise ValueError(f"{form}, {processes} processes: the center is elsewhere")
        center = server.call(status, "VmHWM") - base
        self.stack.close()
        return [seconds, cpu, above, peak, center]


if __name__ == "__main__":
    Processes.main()
