"""Centers in other processes, and workers that exchange with them."""

import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax
from measuring import Process, Run

from agn_optax import planning, rules, service
from agn_optax.center import Submission
from agn_optax.ops import keys

PyTree = Any

TRANSPORTS = ("grpc", "socket", "memory")
LEAVES = 4  # of a model, if nothing else is given
LOOPBACK = 1e15  # bytes/s of an infinitely fast link: only the ends take time
UNLIMITED = service.Limits(max_workers=256, calls=None)


def connect(address: Any, transport: str = "", codec: str = "", **options: Any) -> Any:
    """Connect to a center of `serve`; "" takes the best transport."""
    options["transports"] = [transport] if transport else None
    return service.connect(address, rule(codec), **options)


@functools.cache  # the same object, so it is compared with the other side's only once
def rule(codec: str = "") -> rules.Rule:
    """Return the rule of all centers, with a codec by name; "" is the identity."""
    return rules.downpour(codec=rules.CODECS[codec] if codec else None)


def tree(size: float, leaves: int = LEAVES, value: float = 0.0) -> PyTree:
    """Make about ``size`` bytes of float32 parameters, in equal leaves."""
    shape = (max(1, round(size / 4 / leaves)),)
    return [jnp.full(shape, value) for _ in range(leaves)]


def message_bytes(size: float, codec: str = "") -> int:
    """Return the bytes of a message about ``size`` bytes of parameters."""
    like, inner = jax.eval_shape(lambda: tree(size)), optax.sgd(0.1)
    cluster = planning.Cluster(step_time=1.0, bandwidth=LOOPBACK)
    return planning.plan(rule(codec), like, cluster, inner=inner).message


_servers: dict[str, Any] = {}  # in the process that serves


def serve(
    size: float = 0.0, leaves: int = LEAVES, codec: str = "", **options: Any
) -> str:
    """Serve a center in this process, and return its address.

    Args:
      size: bytes of its parameters; 0 leaves them to a chief or a disk.
      leaves: leaves of its parameters.
      codec: name of its codec.
      options: of `agn_optax.service.serve`, but ``tls`` and ``tokens`` (the text of a
        token file) instead of ``security``.
    """
    tls, tokens = options.pop("tls", None), options.pop("tokens", "")
    access = service.Access(tokens.encode()) if tokens else None
    options["security"] = service.Security(tls=tls, access=access)
    params = tree(size, leaves) if size else None
    server = service.serve(rule(codec), params, **{"limits": UNLIMITED, **options})
    _servers[server.address] = server
    return server.address


def stop(address: str) -> None:
    """Stop a center."""
    _servers.pop(address).stop(grace=10.0)


def certificates(folder: str) -> tuple[service.Tls, service.Tls]:
    """Make certificates in a folder; return the settings of a center and of workers."""
    path = pathlib.Path(folder)
    keys.make(path, ["localhost", "127.0.0.1"], {}, days=2)
    center = service.Tls(None, path / "center.pem", path / "center.key")
    return center, service.Tls(path / "ca.pem")


def seconds_of_one(exchange: Run, window: float) -> float:
    """Return the mean time of one exchange, over a window in seconds."""
    begin, done = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + window:
        exchange()
        done += 1
    return (now - begin) / done


def exchanging(
    center: Any, numbers: PyTree, name: str = "anna", version: Any = 0, codec: str = ""
) -> Run:
    """Return a function that makes one exchange, always up to date.

    With the name of a codec, it encodes the numbers, with the codec's state.
    """
    session, sequences = center.join(name), itertools.count(1)
    state = rule(codec).codec.init(numbers)
    encode = jax.jit(rule(codec).codec.encode, donate_argnums=1)

    def run() -> None:
        nonlocal version, state
        sent = numbers
        if codec:
            sent, state = encode(numbers, state)
        answer = session.exchange(Submission(next(sequences), sent, version))
        jax.block_until_ready(answer.params)
        version = answer.version

    return run


def worker(
    address: str, transport: str, size: float, leaves: int = LEAVES, **options: Any
) -> Run:
    """Return a function that exchanges over its own connection, which stays open.

    Contributions are ones. The name of the worker, and a stack that closes the
    connection, may be among the options.
    """
    name, stack = options.pop("name", "anna"), options.pop("stack", None)
    center = connect(address, transport, **options)
    if stack is not None:
        stack.enter_context(center)
    return exchanging(center, tree(size, leaves, 1.0), name)


def workers(
    addresses: Sequence[str], transport: str, size: float, count: int
) -> list[Callable[[], Run]]:
    """Return functions that make workers in any process, round robin."""
    each = zip(range(count), itertools.cycle(addresses), strict=False)
    make = functools.partial(worker, transport=transport, size=size)
    return [functools.partial(make, address, name=f"worker-{i}") for i, address in each]


# A crew: processes with teams of workers, which are threads of theirs.


def everywhere(crew: list[Process], function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in each process, with the slice of all that is its own."""
    answers = [
        process.submit(function, slice(i, None, len(crew)), *args)
        for i, process in enumerate(crew)
    ]
    return [answer.result() for answer in answers]


def work(
    crew: list[Process], team: str, workers: int, window: float, pause: float = 0.0
) -> list[float]:
    """Return how often each of the first workers ran in ``window`` seconds.

    A run that begins before the window or ends after it counts in part. Every run
    begins with a pause in seconds, in place of local steps.
    """
    start = time.monotonic() + 0.05 + 0.1 * window  # one clock for all processes
    done = everywhere(crew, _work, team, workers, start, start + window, pause)
    return list(itertools.chain.from_iterable(done))


_teams: dict[str, list[Run]] = {}  # in a process of a crew


def hire(own: slice, team: str, makers: Sequence[Callable[[], Run]]) -> None:
    """Make the functions of a team, round robin; called `everywhere`."""
    _teams[team] = [make() for make in makers[own]]
    for run in _teams[team]:
        run()


def _work(
    own: slice, team: str, workers: int, start: float, end: float, pause: float
) -> list[float]:
    def work(run: Run) -> float:
        done = 0.0
        while (begun := time.monotonic()) < end:
            if pause:
                time.sleep(pause)
            run()
            ended = time.monotonic()
            within = min(ended, end) - max(begun, start)
            done += max(0.0, within) / (ended - begun)
        return done

    chosen = _teams[team][: len(range(workers)[own])]
    with ThreadPoolExecutor(max(1, len(chosen))) as threads:
        return list(threads.map(work, chosen))
