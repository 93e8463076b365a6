"""torch.distributed.rpc as a peer: push, add, pull between two processes.

exchange.py runs this program with a Python that has torch (`--torch-python`), and with
the bytes of a message. For every input line it makes one exchange and prints the
seconds.
"""

import multiprocessing
import os
import socket
import sys
import time

import torch
from torch.distributed import rpc

_centers: dict[int, torch.Tensor] = {}  # by size


def exchange(message: torch.Tensor) -> torch.Tensor:
    """Add to the parameters; runs in the center's process."""
    return _centers.setdefault(len(message), torch.zeros_like(message)).add_(message)


def run(name: str, rank: int, size: int) -> None:
    """Exchange, or hold the center until the worker has left."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    message = torch.full((size // 4,), 1e-6)
    for _ in sys.stdin if name == "worker" else ():
        start = time.perf_counter()
        rpc.rpc_sync("center", exchange, args=(message,))
        print(time.perf_counter() - start, flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=run, args=("center", 0, 0)).start()
    run("worker", 1, int(sys.argv[1]))
