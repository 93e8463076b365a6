"""Centers in other processes, and workers that exchange with them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from processes import Process

import agn_optax
from agn_optax import rules
from agn_optax.center import Submission

PyTree = Any

TRANSPORTS = ("grpc", "socket", "memory")


def connect(
    address: str | list[str], transport: str = "", codec: str = "", **options: Any
) -> Any:
    """Connect to a center of `served`; "" takes the best transport."""
    if transport:
        options["transports"] = [transport]
    return agn_optax.service.connect(address, rule(codec), **options)


@functools.cache  # the same object, so it is compared with the other side's only once
def rule(codec: str = "") -> rules.Rule:
    """Return the rule of all centers, with a codec by name; "" is the identity."""
    return rules.downpour(codec=rules.CODECS[codec] if codec else None)


def tree(size: float, leaves: int, value: float = 0.0) -> PyTree:
    """Make about ``size`` bytes of float32 parameters, in equal leaves."""
    shape = (max(1, round(size / 4 / leaves)),)
    return [jnp.full(shape, value) for _ in range(leaves)]


@contextlib.contextmanager
def served(
    process: Process,
    size: float,
    leaves: int,
    address: str = "127.0.0.1:0",
    tls: Any = None,
    tokens: str = "",
    codec: str = "",
    **limits: Any,
) -> Iterator[str]:
    """Serve a center in another process; yield its address.

    ``tokens`` is the text of a token file; ``limits`` are arguments of
    `agn_optax.service.Limits`.
    """
    limits = {"max_workers": 256, "calls": None, **limits}
    address = process.call(_serve, size, leaves, address, tls, tokens, codec, limits)
    try:
        yield address
    finally:
        process.call(_stop, address)


_servers: dict[str, Any] = {}  # in the process that serves


def _serve(
    size: float,
    leaves: int,
    address: str,
    tls: Any,
    tokens: str,
    codec: str,
    limits: dict[str, Any],
) -> str:
    access = agn_optax.service.Access(tokens.encode()) if tokens else None
    server = agn_optax.service.serve(
        rule(codec),
        tree(size, leaves),
        address=address,
        limits=agn_optax.service.Limits(**limits),
        security=agn_optax.service.Security(tls=tls, access=access),
    )
    _servers[server.address] = server
    return server.address


def _stop(address: str) -> None:
    _servers.pop(address).stop(grace=1.0)


def seconds_of_one(exchange: Callable[[], None], window: float) -> float:
    """Return the mean time of one exchange, over a window in seconds."""
    begin, done = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + window:
        exchange()
        done += 1
    return (now - begin) / done


def exchanging(
    center: Any,
    contribution: PyTree,
    worker: str,
    version: Any = 0,
    encode: Callable[[PyTree], PyTree] = lambda contribution: contribution,
) -> Callable[[], None]:
    """Return a function that makes one exchange, always up to date."""
    session = center.join(worker)
    sequences = itertools.count(1)

    def run() -> None:
        nonlocal version
        sent = Submission(next(sequences), encode(contribution), version)
        answer = session.exchange(sent)
        jax.block_until_ready(answer.params)
        version = answer.version

    return run


def encoding(codec: str, like: PyTree) -> Callable[[PyTree], PyTree]:
    """Return a function that encodes contributions, with the codec's state."""
    its_own = rule(codec).codec
    encode, state = jax.jit(its_own.encode, donate_argnums=1), its_own.init(like)

    def encoded(contribution: PyTree) -> PyTree:
        nonlocal state
        sent, state = encode(contribution, state)
        return sent

    return encoded


def worker(
    address: str, transport: str, size: float, leaves: int, name: str
) -> Callable[[], None]:
    """Return a function that exchanges over its own connection."""
    center = connect(address, transport)
    return exchanging(center, tree(size, leaves, 1e-6), name)


class Crew:
    """Workers as threads of a few processes, which all do the same thing."""

    def __init__(self, processes: int) -> None:
        self._processes = [Process() for _ in range(processes)]

    def hire(self, team: str, makers: Sequence[Callable[[], Any]]) -> None:
        """Make the functions of a team in the processes, round robin."""
        count = len(self._processes)
        for i, process in enumerate(self._processes):
            process.ask(_hire, team, makers[i::count])
        for process in self._processes:
            process.answer()

    def everywhere(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function in each process, and return the results."""
        for process in self._processes:
            process.ask(function, *args)
        return [process.answer() for process in self._processes]

    def work(self, team: str, workers: int, window: float) -> list[float]:
        """Return how often each of the first workers ran in ``window`` seconds.

        A run that begins before the window or ends after it counts in part.
        """
        start = time.monotonic() + 0.05 + 0.1 * window  # one clock for all processes
        count = len(self._processes)
        for i, process in enumerate(self._processes):
            process.ask(_work, team, len(range(i, workers, count)), start, window)
        return [done for process in self._processes for done in process.answer()]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_teams: dict[str, list[Callable[[], Any]]] = {}  # in a process of a crew


def _hire(team: str, makers: Sequence[Callable[[], Any]]) -> None:
    _teams[team] = [make() for make in makers]
    for run in _teams[team]:
        run()


def _work(team: str, workers: int, start: float, window: float) -> list[float]:
    end = start + window

    def work(run: Callable[[], Any]) -> float:
        done = 0.0
        while (begun := time.monotonic()) < end:
            run()
            ended = time.monotonic()
            within = min(ended, end) - max(begun, start)
            done += max(0.0, within) / (ended - begun)
        return done

    if not workers:
        return []
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(work, _teams[team][:workers]))
