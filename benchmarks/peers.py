"""Baselines for an exchange: the bare minimum over each kind of transport.

All of them send float32 numbers to another process and as many back, without protocol,
model or recovery. Each is a context that yields, or a function that returns, a function
for one exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import pathlib
import queue
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import grpc
import grpc.aio
import numpy as np
from processes import Process

CHUNK = 1 << 20  # bytes of one gRPC message, the fastest size
BUFFER = 4 << 20  # bytes of one call of a socket
METHOD = "/benchmark.Peer/ThereAndBack"
Run = Callable[[], Any]
Pem = tuple[pathlib.Path, pathlib.Path]  # a certificate, and its key


def bytes_of(megabytes: float) -> int:
    """Return the bytes of whole float32 numbers."""
    return int(1e6 * megabytes) // 4 * 4


# A bare stream of gRPC: raw bytes there, and as many back.


@contextlib.contextmanager
def grpc_server(process: Process, size: int, address: str) -> Iterator[str]:
    """Serve streams of ``size`` bytes, echoed when complete; yield the address."""
    address = process.call(_serve_grpc, size, address)
    try:
        yield address
    finally:
        process.call(_stop_grpc, address)


_servers: dict[str, grpc.Server] = {}  # in the process that serves


def _serve_grpc(size: int, address: str) -> str:
    count = math.ceil(size / CHUNK)

    def there_and_back(chunks: Iterator[bytes], _: Any) -> Iterator[bytes]:
        received = []
        for chunk in chunks:
            received.append(chunk)
            if len(received) == count:
                yield from received
                received.clear()

    server = grpc.server(ThreadPoolExecutor(64))
    handler: Any = grpc.stream_stream_rpc_method_handler(there_and_back)
    service, method = METHOD.strip("/").split("/")
    handlers = grpc.method_handlers_generic_handler(service, {method: handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port(address)
    server.start()
    if not address.startswith("unix:"):
        address = f"127.0.0.1:{port}"
    _servers[address] = server
    return address


def _stop_grpc(address: str) -> None:
    _servers.pop(address).stop(grace=0.5).wait()


def _chunks(size: int) -> list[bytes]:
    # Not zeros, which would be one page of the kernel, always in the cache.
    return [b"1" * min(CHUNK, size - i) for i in range(0, size, CHUNK)]


def grpc_sync(address: str, size: int) -> Run:
    """Return an exchange on one open stream of the synchronous client."""
    chunks = _chunks(size)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    channel = grpc.insecure_channel(address)
    call: Any = channel.stream_stream(METHOD)
    answers = call(iter(requests.get, None))

    def run() -> None:
        for chunk in chunks:
            requests.put(chunk)
        received = [next(answers) for _ in chunks]
        assert len(received[-1]) == len(chunks[-1])

    return run


def grpc_asyncio(address: str, size: int) -> Run:
    """Return an exchange on one open stream of the asyncio client."""
    chunks = _chunks(size)
    loop = asyncio.new_event_loop()

    async def begin() -> Any:
        return grpc.aio.insecure_channel(address).stream_stream(METHOD)()

    async def talk(call: Any) -> None:
        for chunk in chunks:
            await call.write(chunk)
        received = [await call.read() for _ in chunks]
        assert len(received[-1]) == len(chunks[-1])

    call = loop.run_until_complete(begin())
    return lambda: loop.run_until_complete(talk(call))


# Raw sockets: send, add, send back.


def _listen(path: str) -> socket.socket:
    """Open a listening socket at a path, or at any TCP port if the path is empty."""
    if path:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    listener.listen()
    return listener


def _serve_one(
    path: str, talk: Callable[[socket.socket], None], pem: Pem | None = None
) -> Any:
    """Serve the first connection in a thread, and return the address."""
    listener = _listen(path)

    def serve() -> None:
        peer, _ = listener.accept()
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*pem)
            peer = context.wrap_socket(peer, server_side=True)
        with listener, peer, contextlib.suppress(OSError):
            talk(peer)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()


def _connect(address: Any) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    connection = socket.socket(family)
    connection.connect(address)
    if family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def certificates(folder: pathlib.Path) -> Pem:
    """Make a self-signed certificate and its key, with openssl."""
    made = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(  # noqa: S603 a tool of the system
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", made[1], "-out", made[0]),
        ],
        check=True,
        capture_output=True,
    )
    return made


def _send(to: socket.socket, array: np.ndarray[Any, Any]) -> None:
    view = memoryview(array.data).cast("B")
    for i in range(0, len(view), BUFFER):
        to.sendall(view[i : i + BUFFER])


def _receive(source: socket.socket, array: np.ndarray[Any, Any]) -> None:
    """Fill an array from a socket; raise if the other end has closed."""
    view = memoryview(array.data).cast("B")
    while view:
        count = source.recv_into(view, min(BUFFER, len(view)))
        if not count:
            raise ConnectionResetError
        view = view[count:]


@contextlib.contextmanager
def raw_socket(
    process: Process, size: int, path: str = "", pem: Pem | None = None
) -> Iterator[Run]:
    """Send, add, send back: over the Unix socket at ``path``, or over TCP.

    With a certificate and its key in ``pem``, over TLS by Python's ssl.
    """
    address = process.call(_serve_one, path, _Adder(size), pem)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(_connect(address))
        if pem is not None:
            context = ssl.create_default_context(cafile=str(pem[0]))
            connection = stack.enter_context(
                context.wrap_socket(connection, server_hostname="127.0.0.1")
            )
        yield _there_and_back(connection, size)


def raw_worker(process: Process, size: int) -> Callable[[], Run]:
    """Return the same over TCP for any process, with its own center."""
    address = process.call(_serve_one, "", _Adder(size))
    return functools.partial(_raw_worker, address, size)


def _raw_worker(address: Any, size: int) -> Run:
    return _there_and_back(_connect(address), size)


def _there_and_back(connection: socket.socket, size: int) -> Run:
    message, center = _floats(size, 1e-6), _floats(size)

    def run() -> None:
        _send(connection, message)
        _receive(connection, center)

    return run


class _Adder:
    """The other end of a raw socket, in a form that can be pickled."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, peer: socket.socket) -> None:
        center = _floats(self._size)
        piece = _floats(BUFFER)
        while True:
            for i in range(0, len(center), len(piece)):
                part = center[i : i + len(piece)]  # added while still in the cache
                _receive(peer, piece[: len(part)])
                part += piece[: len(part)]
            _send(peer, center)


def _floats(size: int, value: float = 0.0) -> np.ndarray[Any, Any]:
    return np.full(size // 4, value, np.float32)


# Shared memory: the worker writes, the other process adds, the worker reads.


@contextlib.contextmanager
def shared_memory(process: Process, size: int) -> Iterator[Run]:
    """Exchange by copies alone; a byte over a Unix socket passes the turn."""
    message, center = _floats(size, 1e-6), _floats(size)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        there, back = (SharedMemory(create=True, size=size) for _ in range(2))
        for block in (there, back):
            stack.callback(block.unlink)
            stack.callback(block.close)
        path = str(pathlib.Path(folder, "turns"))
        adder = _SharedAdder(there.name, back.name)
        turns = stack.enter_context(_connect(process.call(_serve_one, path, adder)))

        def run() -> None:
            np.copyto(_view(there), message)
            turns.sendall(b"t")
            turns.recv(1)
            np.copyto(center, _view(back))

        yield run


def _view(block: SharedMemory) -> np.ndarray[Any, Any]:
    """View a block as an array; drop the view, because it keeps the block open."""
    return np.ndarray(block.size // 4, np.float32, block.buf)


class _SharedAdder:
    """The process that adds in shared memory, in a form that can be pickled."""

    def __init__(self, there: str, back: str) -> None:
        self._names = there, back

    def __call__(self, peer: socket.socket) -> None:
        there, back = (SharedMemory(name) for name in self._names)
        with contextlib.closing(there), contextlib.closing(back):
            while peer.recv(1):
                center = _view(back)
                center += _view(there)
                del center
                peer.sendall(b"t")


# torch.distributed.rpc, in a Python that has it.


@contextlib.contextmanager
def torch_rpc(
    python: pathlib.Path, size: int, *, tcp: bool
) -> Iterator[Callable[[], float]]:
    """Push, add, pull between two processes of torch; see torch_peer.py."""
    program = pathlib.Path(__file__).with_name("torch_peer.py")
    command = [str(python), "-W", "ignore", str(program), "--bytes", str(size)]
    command += ["--tcp"] if tcp else []
    peer = subprocess.Popen(  # noqa: S603 our own program
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # That Python cannot use a PYTHONPATH with this one's packages.
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    go, said = peer.stdin, peer.stdout

    def run() -> float:
        go.write("go\n")
        go.flush()
        answer = said.readline()
        if not answer:
            raise ChildProcessError(f"{python} torch_peer.py ended; it says why above")
        return float(answer)

    try:
        yield run
    finally:
        go.close()  # the peer ends at the end of its input
        try:
            peer.wait(20.0)
        except subprocess.TimeoutExpired:
            peer.kill()
            peer.wait()
        said.close()
