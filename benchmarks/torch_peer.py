"""torch.distributed.rpc as a peer: push, add, pull between two processes.

exchange.py runs this program with a Python that has torch (`--torch-python`). For every
input line it makes one exchange and prints the seconds.
"""

from __future__ import annotations

import argparse
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


def join(name: str, rank: int, *, tcp: bool) -> None:
    """Join the processes; without ``tcp`` torch picks the transport, as by default."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)
    if tcp:
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=4, _transports=["uv"], _channels=["basic"]
        )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def hold_center(*, tcp: bool) -> None:
    join("center", 0, tcp=tcp)
    rpc.shutdown()  # waits until the worker has left


def main() -> None:
    parser = argparse.ArgumentParser(description="torch.distributed.rpc as a peer.")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--tcp", action="store_true", help="nothing but TCP")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=hold_center, kwargs={"tcp": args.tcp})
    other.start()
    join("worker", 1, tcp=args.tcp)
    message = torch.full((args.bytes // 4,), 1e-6)
    for _ in sys.stdin:
        start = time.perf_counter()
        rpc.rpc_sync("center", exchange, args=(message,))
        print(time.perf_counter() - start, flush=True)
    rpc.shutdown()
    other.join()


if __name__ == "__main__":
    main()
