"""Exchanges of a worker next to a badly behaved peer, and without one.

The peer is a separate process that acts as often as the center permits, up to a bound
of acts per second (100, or 2,000 where an act costs it next to nothing), at the lowest
priority: on this machine it takes time from the worker and the center that a peer on
another host would not take. The calls that are free for every caller are used up.
"speed" is relative to the worker alone, the median of neighbors in time with its
quartiles. "processor" is the center's CPU time, which is more reliable on a machine
that is busy with other work.

    python benchmarks/bad_peers.py
"""

import contextlib
import functools
import itertools
import os
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import centers
import grpc
import numpy as np
from measuring import Benchmark, Form, Process, Run

from agn_optax import errors, service
from agn_optax.center import Submission
from agn_optax.service._address import SERVICE
from agn_optax.service.security import _call_limits
from agn_optax.service.security._access import KEY_SIZE
from agn_optax.service.transports import _socket
from agn_optax.service.wire._frames import SIZES

SIZE = 40e3  # bytes of the model


@functools.cache
def acts_of(address: str, tls: service.Tls | None) -> dict[str, Callable[[], Any]]:
    """Return the acts of a badly behaved peer by name; "" closes what is open."""
    numbers = itertools.count()
    center = centers.connect(address, "socket", tls=tls)
    observer = service.Observer(address, tls=tls)
    context: Any = None if tls is None else tls.context(serves=False)
    direct = observer.status()["direct_address"]
    ports = [int(end.rpartition(":")[2]) for end in (address, direct)]
    held: list[socket.socket] = []

    def dial(port: int = 1) -> socket.socket:
        """Connect to the port of gRPC, 0, or to the one of sockets, 1."""
        return socket.create_connection(("127.0.0.1", ports[port]), timeout=5)

    def connect() -> None:
        for port in (0, 1):
            dial(port).close()

    def hold(most: int, port: int = 1) -> None:
        """Open a silent connection, in place of the oldest if there are ``most``."""
        if len(held) >= most:
            held.pop(0).close()
        held.append(dial(port))

    def send() -> None:
        session = center.join("eve")
        session.submit(Submission(1, centers.tree(SIZE), anchor_version=0))
        session.disconnect()

    def greet() -> None:
        with dial() as end:
            end.sendall(_socket.GREETING + bytes(KEY_SIZE))
            end.recv(1)

    def shake_hands(port: int) -> None:
        with dial(port) as end:
            context.wrap_socket(end, server_hostname="localhost").close()

    def trickle() -> None:
        """Announce a frame and never send it, in a gRPC call."""

        def slowly() -> Any:
            for piece in [SIZES.pack(1000, 0), *[b"x"] * 10]:
                yield piece
                time.sleep(0.1)

        with grpc.insecure_channel(address) as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/Exchange")
            with contextlib.suppress(grpc.RpcError):
                list(call(slowly()))

    return {
        "": held.clear,
        "connects, and ends the connection": connect,
        "says nothing over 200 connections": lambda: hold(200, next(numbers) % 2),
        "asks for the status": observer.status,
        "pulls": center.pull,
        "joins, and leaves": lambda: center.join(f"eve {next(numbers)}").leave(),
        "joins, sends, and does not read": send,
        "reconnects, and says nothing": lambda: hold(1),
        "greets with a wrong key": greet,
        "announces a frame that does not come": trickle,
        "TLS handshakes": lambda: shake_hands(1),
        "TLS handshakes at the port of gRPC": lambda: shake_hands(0),
    }


def names_of(address: str, tls: service.Tls | None) -> list[str]:
    """Connect a peer, and return the names of its acts."""
    return [name for name in acts_of(address, tls) if name]


def misbehave(address: str, tls: service.Tls | None, name: str, end: float) -> int:
    """Act until ``end``, and return the number of acts."""
    acts = acts_of(address, tls)
    # Acts that cost the peer next to nothing are made more often a second, at most.
    rate = 2000 if name.startswith(("reconnects", "greets", "TLS")) else 100
    start, done = time.monotonic(), 0
    while time.monotonic() < end:
        with contextlib.suppress(errors.AgnOptaxError, OSError):
            acts[name]()
        done += 1
        time.sleep(max(0.0, start + done / rate - time.monotonic()))
    acts[""]()
    return done


def spare_nothing() -> None:
    _call_limits.BURST = 0.0
    _call_limits.HANDSHAKE_BURST = 2.0


class BadPeers(Benchmark, quick="--window 0.1"):
    """Exchanges beside a bad peer.

    Args:
      window: seconds in which exchanges are counted.
    """

    window: float = 2.0

    def run(self) -> None:
        """Measure the worker alone, and beside every act."""
        self.center, self.bad = self.use(Process()), self.use(Process())
        # A peer on another host would take no time from the worker and the center.
        self.bad.call(os.nice, 19)
        # By form: ms of the center's CPU an exchange, and the peer's acts a second.
        self.results: dict[str, list[Any]] = defaultdict(list)
        server_tls, worker_tls = centers.certificates(
            self.use(tempfile.TemporaryDirectory())
        )
        forms = [*self.forms(None, None), *self.forms(server_tls, worker_tls)]
        self.center.call(spare_nothing)
        rows = self.turns(forms).rows(forms, SIZE)
        for row in rows:
            spent, acts = np.median(self.results[row["form"]][1:], axis=0).tolist()
            row |= {"processor_ms_an_exchange": spent, "its_acts_a_second": acts}
        self.add("bad peers", "40 KB over a socket, beside a bad peer", rows)

    def forms(
        self, server_tls: service.Tls | None, worker_tls: service.Tls | None
    ) -> Iterator[Form]:
        """Yield the forms at a center with or without TLS."""
        limits = service.Limits(max_workers=4)
        at = self.center.call(centers.serve, SIZE, tls=server_tls, limits=limits)
        run = centers.worker(at, "socket", SIZE, stack=self.stack, tls=worker_tls)
        measured = functools.partial(self.measured, run, at, worker_tls)
        alone = "nobody, over TLS" if worker_tls else "nobody"
        yield Form(alone, alone, functools.partial(measured, alone))
        for name in self.bad.call(names_of, at, worker_tls):
            if name.startswith("TLS") == (worker_tls is not None):
                yield Form(name, alone, functools.partial(measured, name))

    def measured(
        self, run: Run, at: str, worker_tls: service.Tls | None, name: str
    ) -> float:
        """Return the seconds of an exchange beside an act, or beside nobody."""
        done: Callable[[], int] = int  # no acts
        if not name.startswith("nobody"):
            end = time.monotonic() + self.window
            done = self.bad.submit(misbehave, at, worker_tls, name, end).result
        before = self.center.call(time.process_time)
        seconds = centers.seconds_of_one(run, self.window)
        spent = self.center.call(time.process_time) - before
        self.results[name].append(
            np.array([1e3 * spent * seconds, done()]) / self.window
        )
        return seconds


if __name__ == "__main__":
    BadPeers.main()
