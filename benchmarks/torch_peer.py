"""torch.distributed.rpc as a peer: push, add, pull between two processes.

exchange.py runs this program with a Python that has torch (`--torch-python`). Its
arguments are the bytes of a message, and "tcp" to use nothing but TCP; without that
torch picks the transport. For every input line it makes one exchange and prints the
seconds.
"""

import multiprocessing
import os
import socket
import sys
import time

import torch
from torch.distributed import rpc

_center = torch.zeros(0)


def exchange(message: torch.Tensor) -> torch.Tensor:
    """Add to the parameters; runs in the center's process."""
    global _center
    if _center.shape != message.shape:
        _center = torch.zeros_like(message)
    return _center.add_(message)


def join(name: str, rank: int) -> None:
    only = {"_transports": ["uv"], "_channels": ["basic"]} if "tcp" in sys.argv else {}
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, **only)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def hold_center() -> None:
    join("center", 0)
    rpc.shutdown()  # waits until the worker has left


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    other = multiprocessing.get_context("spawn").Process(target=hold_center)
    other.start()
    join("worker", 1)
    message = torch.full((int(sys.argv[1]) // 4,), 1e-6)
    for _ in sys.stdin:
        start = time.perf_counter()
        rpc.rpc_sync("center", exchange, args=(message,))
        print(time.perf_counter() - start, flush=True)
    rpc.shutdown()
    other.join()


if __name__ == "__main__":
    main()
