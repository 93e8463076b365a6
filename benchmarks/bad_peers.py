"""Exchanges of a worker next to a badly behaved peer, and without one.

The peer is a separate process that acts as often as the center permits, up to a bound
of acts per second, at the lowest priority: on this machine it takes time from the
worker and the center that a peer on another host would not take. The calls that are
free for every caller are used up. "speed" is relative to the worker alone, the median
of neighbors in time with its quartiles. "processor" is the center's CPU time, which is
more reliable on a machine that is busy with other work.

    python benchmarks/bad_peers.py
    python benchmarks/bad_peers.py --megabytes 4 --calls 0
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import pathlib
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import centers
import grpc
import peers
import side_by_side
from processes import Process
from report import Report, parse
from side_by_side import Form

from agn_optax import errors, service
from agn_optax.center import Submission
from agn_optax.service import Tls
from agn_optax.service._address import SERVICE
from agn_optax.service.security._access import KEY_SIZE
from agn_optax.service.server import _servicer
from agn_optax.service.transports import _socket
from agn_optax.service.wire._packets import HEAD

ALONE = "nobody"
ALONE_TLS = "nobody, over TLS"


class BadPeer:
    """A badly behaved peer on its own thread; each public method is one act."""

    def __init__(
        self,
        act: str,
        rate: float,
        address: str,
        size: float,
        leaves: int,
        tls: Tls | None = None,
    ) -> None:
        self._address = address
        self._contribution = centers.tree(size, leaves, 1e-6)
        self._numbers = itertools.count()
        self._center = centers.connect(address, "socket", tls=tls)
        self._observer = service.Observer(address, tls=tls)
        self._context = None if tls is None else tls.context(serves=False)
        status = self._observer.status()
        ports = (address, status["direct_address"])
        self._ports = [int(each.rpartition(":")[2]) for each in ports]
        self._direct = "127.0.0.1", self._ports[1]
        self._held: list[socket.socket] = []
        self._done = 0
        self._ended = threading.Event()
        work = functools.partial(self._work, getattr(self, act), rate)
        self._thread = threading.Thread(target=work)
        self._thread.start()

    def _work(self, act: Callable[[], None], rate: float) -> None:
        start = time.monotonic()
        while not self._ended.wait(
            max(0.0, start + self._done / rate - time.monotonic())
        ):
            with contextlib.suppress(errors.AgnOptaxError, OSError):
                act()
            self._done += 1

    def _end(self) -> int:
        """Stop, and return the number of acts."""
        done = self._done
        self._ended.set()
        self._thread.join()
        for each in self._held:
            each.close()
        self._center.close()
        self._observer.close()
        return done

    def connects(self) -> None:
        """Connect to each port in turn, and close the connection."""
        for port in self._ports:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()

    def says_nothing(self) -> None:
        """Open silent connections, at most 200 at a time."""
        if len(self._held) >= 200:
            self._held.pop(0).close()
        port = self._ports[next(self._numbers) % 2]
        self._held.append(socket.create_connection(("127.0.0.1", port), timeout=5))

    def asks(self) -> None:
        """Ask for the center's status."""
        self._observer.status()

    def pulls(self) -> None:
        """Pull the whole center."""
        self._center.pull()

    def joins(self) -> None:
        """Join under a new name, and leave."""
        self._center.join(f"eve {next(self._numbers)}").leave()

    def does_not_read(self) -> None:
        """Send a message, and do not read the answer."""
        session = self._center.join("eve")
        session.submit(Submission(1, self._contribution, anchor_version=0))
        session.disconnect()

    def reconnects(self) -> None:
        """Replace a silent connection by a new one."""
        for each in self._held:
            each.close()
        self._held = [socket.create_connection(self._direct, timeout=5)]

    def wrong_key(self) -> None:
        """Greet with a key that is not known."""
        with socket.create_connection(self._direct, timeout=5) as end:
            end.sendall(_socket.GREETING + bytes(KEY_SIZE))
            end.recv(1)

    def handshakes(self) -> None:
        """Make a TLS handshake, and send nothing after it."""
        self._handshake(self._ports[1])

    def handshakes_of_gRPC(self) -> None:  # noqa: N802 gRPC is its name
        """Make a TLS handshake at the port of gRPC."""
        self._handshake(self._ports[0])

    def _handshake(self, port: int) -> None:
        assert self._context is not None
        end = socket.create_connection(("127.0.0.1", port), timeout=5)
        with end, self._context.wrap_socket(end, server_hostname="localhost"):
            pass

    def trickles(self) -> None:
        """Announce a frame and never send it, in a gRPC call."""
        with grpc.insecure_channel(self._address) as channel:
            pieces = [HEAD.pack(1000, 0), *[b"x"] * 10]
            call: Any = channel.stream_stream(f"/{SERVICE}/Exchange")

            def slowly() -> Any:
                for piece in pieces:
                    yield piece
                    time.sleep(0.1)

            with contextlib.suppress(grpc.RpcError):
                for _ in call(slowly()):
                    pass


ACTS = [name for name in vars(BadPeer) if not name.startswith("_")]
# Acts at a center with TLS, and acts that cost the peer next to nothing.
ENCRYPTED = ["handshakes", "handshakes_of_gRPC"]
CHURN = ["reconnects", "wrong_key", *ENCRYPTED]

WORKERS = 4

_peers: list[BadPeer] = []  # in the peer's process, one at a time


def _begin(*args: Any) -> None:
    _peers.append(BadPeer(*args))


def _end() -> int:
    return _peers.pop()._end()


def _spare_nothing() -> None:
    _servicer.SPARE = 0.0  # type: ignore[attr-defined]
    _servicer.NEWCOMERS = 2.0  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a bad peer costs the others.")
    add = parser.add_argument
    add("--megabytes", type=float, default=0.04, help="of the model")
    add("--leaves", type=int, default=4)
    add("--transport", choices=centers.TRANSPORTS, default="socket")
    add("--rate", type=float, default=100.0, help="acts a second, at most")
    add("--churn", type=float, default=2000.0, help="the same, of those that reconnect")
    add("--calls", type=float, default=20.0, help="a second of a caller; 0 for any")
    add("--nice", type=int, default=19, help="of its process")
    add("--only", choices=ACTS, nargs="+", help="of what it does")
    add("--window", type=float, default=2.0, help="seconds in which are counted")
    add("--repeats", type=int, default=7)
    args = parse(parser, window=0.1, repeats=1)
    report = Report(args.json)
    size = 1e6 * args.megabytes
    acts: dict[str, list[int]] = {act: [] for act in ACTS}
    limits: dict[str, Any] = {"max_workers": WORKERS, "calls": args.calls or None}
    with (
        tempfile.TemporaryDirectory() as folder,
        Process() as process,
        Process() as bad,
        contextlib.ExitStack() as stack,
    ):
        # A peer on another host would take no time from the worker and the center.
        bad.call(os.nice, args.nice)
        pem = peers.certificates(pathlib.Path(folder))
        served = functools.partial(centers.served, process, size, args.leaves)
        address = stack.enter_context(served(**limits))
        secret = stack.enter_context(served(tls=Tls(None, *pem), **limits))
        process.call(_spare_nothing)

        def counting(address: str, tls: Tls | None) -> Callable[[], float]:
            center = centers.connect(address, args.transport, tls=tls)
            stack.enter_context(center)
            exchange = centers.exchanging(
                center, centers.tree(size, args.leaves, 1e-6), "anna"
            )
            return functools.partial(centers.seconds_of_one, exchange, args.window)

        there = {ALONE: (address, None), ALONE_TLS: (secret, Tls(pem[0]))}
        count = {alone: counting(*at) for alone, at in there.items()}

        def beside(act: str, alone: str) -> float:
            rate = args.churn if act in CHURN else args.rate
            at, tls = there[alone]
            bad.call(_begin, act, rate, at, size, args.leaves, tls)
            try:
                return count[alone]()
            finally:
                acts[act].append(bad.call(_end))

        used: dict[str, list[float]] = {form: [] for form in (*there, *ACTS)}

        def metered(form: str, run: Callable[[], float]) -> Callable[[], float]:
            def measured() -> float:
                before = process.call(time.process_time)
                seconds = run()
                spent = process.call(time.process_time) - before
                used[form].append(spent * seconds / args.window)
                return seconds

            return measured

        forms = [Form(alone, alone, metered(alone, count[alone])) for alone in there]
        for act in ACTS if not args.only else args.only:
            alone = ALONE_TLS if act in ENCRYPTED else ALONE
            run = functools.partial(beside, act, alone)
            forms.append(Form(act, alone, metered(act, run)))
        found = side_by_side.measure(forms, args.repeats, report.console)
    rows = []
    for name, row in found.items():
        own = acts.get(name, [0])
        row = side_by_side.speed(row)
        rows.append(
            {
                "peer": name.replace("_", " "),
                "a_second": 1 / row["seconds"],
                "speed": row["ratio"],
                "quartiles": row["quartiles"],
                "processor_ms_an_exchange": 1e3 * statistics.median(used[name]),
                "its_acts_a_second": sum(own) / len(own) / args.window,
            }
        )
    title = f"{args.megabytes:g} MB over {args.transport}, beside a bad peer"
    report.add("bad peers", title, rows)
    report.write()


if __name__ == "__main__":
    main()
