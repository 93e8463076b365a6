"""Baselines for an exchange: the bare minimum over each kind of transport.

All of them send float32 numbers to another process and as many back, without protocol,
model or recovery.
"""

import asyncio
import contextlib
import functools
import itertools
import math
import os
import pathlib
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import grpc
import grpc.aio
import numpy as np
from measuring import Process, Run

CHUNK = 1 << 20  # bytes of one gRPC message, the fastest size
PIECE = 1 << 20  # numbers that a socket's other end adds at once
SERVICE, METHOD = "benchmark.Peer", "ThereAndBack"
Array = np.ndarray[Any, Any]


# A bare stream of gRPC: raw bytes there, and as many back.


_servers: list[grpc.Server] = []  # in the process that serves


def serve_grpc(size: int, address: str = "127.0.0.1:0") -> str:
    """Serve streams of ``size`` bytes, echoed when complete; return the address."""
    count = math.ceil(size / CHUNK)

    def there_and_back(chunks: Iterator[bytes], _: Any) -> Iterator[bytes]:
        while received := list(itertools.islice(chunks, count)):
            yield from received

    server = grpc.server(ThreadPoolExecutor(64))
    handlers: Any = {METHOD: grpc.stream_stream_rpc_method_handler(there_and_back)}
    service = grpc.method_handlers_generic_handler(SERVICE, handlers)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port(address)
    server.start()
    _servers.append(server)
    return address if address.startswith("unix:") else f"127.0.0.1:{port}"


def _chunks(size: int) -> list[bytes]:
    # Not zeros, which would be one page of the kernel, always in the cache.
    return [b"1" * min(CHUNK, size - i) for i in range(0, size, CHUNK)]


def grpc_sync(address: str, size: int) -> Run:
    """Return an exchange on one open stream of the synchronous client."""
    chunks = _chunks(size)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    call: Any = grpc.insecure_channel(address).stream_stream(f"/{SERVICE}/{METHOD}")
    answers = call(iter(requests.get, None))

    def run() -> None:
        for chunk in chunks:
            requests.put(chunk)
        received = [next(answers) for _ in chunks]
        assert len(received[-1]) == len(chunks[-1])

    return run


def grpc_asyncio(address: str, size: int) -> Run:
    """Return an exchange on one open stream of the asyncio client."""
    chunks, loop = _chunks(size), asyncio.new_event_loop()

    async def begin() -> Any:
        channel = grpc.aio.insecure_channel(address)
        return channel.stream_stream(f"/{SERVICE}/{METHOD}")()

    async def talk(call: Any) -> None:
        for chunk in chunks:
            await call.write(chunk)
        received = [await call.read() for _ in chunks]
        assert len(received[-1]) == len(chunks[-1])

    call = loop.run_until_complete(begin())
    return lambda: loop.run_until_complete(talk(call))


CLIENTS = {"gRPC stream, sync": grpc_sync, "gRPC stream, asyncio": grpc_asyncio}


# Raw sockets: send, add, send back.


def raw_socket(process: Process, size: int, path: str = "") -> Callable[..., Run]:
    """Begin to serve one worker over TCP, or over the Unix socket at ``path``.

    Returns:
      A function that connects, in any process, and returns an exchange. Its argument is
      a stack that closes the connection; None leaves it open.
    """
    address = process.call(_serve_one, path, functools.partial(_add, size))
    return functools.partial(_there_and_back, address, size)


def _serve_one(path: str, talk: Callable[[socket.socket], None]) -> Any:
    """Serve the first connection in a thread, and return the address."""
    listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    listener.bind(path or ("127.0.0.1", 0))
    listener.listen()

    def serve() -> None:
        peer, _ = listener.accept()
        with listener, peer, contextlib.suppress(OSError):
            talk(peer)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()


def _connect(address: Any) -> socket.socket:
    is_path = isinstance(address, str)
    connection = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
    connection.connect(address)
    if not is_path:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(source: socket.socket, array: Array) -> None:
    """Fill an array from a socket; raise if the other end has closed."""
    view = array.data.cast("B")
    if source.recv_into(view, 0, socket.MSG_WAITALL) < len(view):
        raise ConnectionResetError


def _there_and_back(address: Any, size: int, stack: Any = None) -> Run:
    connection = _connect(address)
    if stack is not None:
        stack.enter_context(connection)
    message, center = _floats(size), _floats(size)

    def run() -> None:
        connection.sendall(message.data)
        _receive(connection, center)

    return run


def _add(size: int, peer: socket.socket) -> None:
    """Be the other end of a raw socket."""
    center, piece = _floats(size), _floats(4 * PIECE)
    while True:
        for i in range(0, len(center), PIECE):
            part = center[i : i + PIECE]  # added while still in the cache
            _receive(peer, piece[: len(part)])
            part += piece[: len(part)]
        peer.sendall(center.data)


def _floats(size: int) -> Array:
    return np.full(size // 4, 1e-6, np.float32)


# Shared memory: the worker writes, the other process adds, the worker reads.


@contextlib.contextmanager
def shared_memory(process: Process, size: int, path: str) -> Iterator[Run]:
    """Exchange by copies alone; a byte over a Unix socket passes the turn."""
    message, center = _floats(size), _floats(size)
    blocks = [SharedMemory(create=True, size=size) for _ in range(2)]
    add = functools.partial(_add_shared, [block.name for block in blocks])
    turns = _connect(process.call(_serve_one, path, add))

    def run() -> None:
        np.copyto(_view(blocks[0]), message)
        turns.sendall(b"t")
        turns.recv(1)
        np.copyto(center, _view(blocks[1]))

    try:
        yield run
    finally:
        turns.close()
        for block in blocks:
            block.close()
            block.unlink()


def _view(block: SharedMemory) -> Array:
    """View a block as an array; drop the view, because it keeps the block open."""
    return np.ndarray(block.size // 4, np.float32, block.buf)


def _add_shared(names: list[str], peer: socket.socket) -> None:
    """Be the process that adds in shared memory."""
    there, back = map(SharedMemory, names)
    with contextlib.closing(there), contextlib.closing(back):
        while peer.recv(1):
            np.add(_view(back), _view(there), out=_view(back))
            peer.sendall(b"t")


# torch.distributed.rpc, in a Python that has it.


@contextlib.contextmanager
def torch_rpc(python: str, size: int) -> Iterator[Run]:
    """Push, add, pull between two processes of torch; see torch_peer.py."""
    program = pathlib.Path(__file__).with_name("torch_peer.py")
    with subprocess.Popen(  # noqa: S603 our own program
        [python, "-W", "ignore", str(program), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # That Python cannot use a PYTHONPATH with this one's packages.
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    ) as peer:  # which ends at the end of its input, when that is closed here
        pipes: Any = peer

        def run() -> float:
            print("go", file=pipes.stdin, flush=True)
            return float(pipes.stdout.readline())  # not a number if it has failed

        yield run
