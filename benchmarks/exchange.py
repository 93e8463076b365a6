"""Exchanges with a center in another process, and bare transports of the same bytes.

Each transport of `agn_optax.service.connect`, over TCP loopback and over a Unix socket,
takes turns with

    gRPC stream      raw bytes there and back in chunks of 1 MiB, without an addition;
                     by the synchronous and by the asyncio client; the one with the
                     smaller median is the peer
    raw socket       send, add, send back, 4 MiB at a time; over TLS by Python's ssl
    shared memory    the worker writes, the other process adds, the worker reads
    torch rpc        push, add, pull by torch.distributed.rpc, if `--torch-python` names
                     a Python that has torch

and so do contributions in bfloat16 and in float32. "speed" is relative to the peer's,
the median of neighbors in time with its quartiles; "of gRPC" is the same relative to
the bare gRPC stream. GB/s count both directions.

    python benchmarks/exchange.py --megabytes 4 40 400
    python benchmarks/exchange.py --torch-python ~/torch/bin/python
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import centers
import peers
import side_by_side
from processes import Process
from report import Report, Row, parse
from side_by_side import Form

from agn_optax.service import Tls

STREAM = "gRPC stream"
CLIENTS = {
    f"{STREAM}, sync": peers.grpc_sync,
    f"{STREAM}, asyncio": peers.grpc_asyncio,
}
SHARED_MEMORY = "shared memory"
RAW = {"TCP": "raw TCP", "Unix socket": "raw Unix socket"}
RAW_TLS = "raw TLS"

# Exchanges/s of TensorFlow 1.14's AGNOptimizer with a parameter server process, at
# 40 KB, by number of workers: from ANOTHER run, on a 2-core machine.
TENSORFLOW = {1: 525.0, 4: 856.0}


@dataclasses.dataclass
class Sides:
    """The other ends, in separate processes."""

    center: Process
    peer: Process


def forms(
    network: str,
    size: int,
    sides: Sides,
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> list[Form]:
    """Return all ways to exchange ``size`` bytes over TCP or a Unix socket."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())

    def address(name: str) -> str:
        return f"unix:{folder}/{name}" if network == "Unix socket" else "127.0.0.1:0"

    made: list[Form] = []

    def add(name: str, peer: str, run: Callable[[], Any]) -> None:
        made.append(Form(name, peer, run))

    bare = stack.enter_context(peers.grpc_server(sides.peer, size, address("grpc")))
    for name, client in CLIENTS.items():
        add(name, name, client(bare, size))
    raw = f"{folder}/raw" if network == "Unix socket" else ""
    run = stack.enter_context(peers.raw_socket(sides.peer, size, raw))
    add(RAW[network], STREAM, run)
    run = stack.enter_context(peers.shared_memory(sides.peer, size))
    add(SHARED_MEMORY, STREAM, run)
    if args.torch_python and network == "TCP":
        for name, tcp in (("torch rpc", False), ("torch rpc, TCP only", True)):
            torch = peers.torch_rpc(args.torch_python, size, tcp=tcp)
            add(name, STREAM, stack.enter_context(torch))

    bounds = {"grpc": STREAM, "socket": RAW[network], "memory": SHARED_MEMORY}
    served = stack.enter_context(
        centers.served(sides.center, size, args.leaves, address("center"))
    )
    contribution = centers.tree(size, args.leaves, 1e-6)
    for transport in args.transports:
        wide = f"agn_optax, {transport}"
        add_center = functools.partial(_connected, stack, served, transport)
        add(wide, bounds[transport], add_center(wide, contribution))
        if size == peers.bytes_of(max(args.megabytes)):
            narrow = f"{wide}, bfloat16"
            served_narrow = stack.enter_context(
                centers.served(
                    sides.center,
                    size,
                    args.leaves,
                    address(f"narrow-{transport}"),
                    codec="bfloat16",
                )
            )
            run = _connected(
                stack, served_narrow, transport, narrow, contribution, codec="bfloat16"
            )
            add(narrow, wide, run)
    if network == "TCP":  # data that leaves a machine may have to be encrypted
        pem = peers.certificates(pathlib.Path(folder))
        run = stack.enter_context(peers.raw_socket(sides.peer, size, pem=pem))
        add(RAW_TLS, RAW["TCP"], run)
        served = stack.enter_context(
            centers.served(sides.center, size, args.leaves, tls=Tls(None, *pem))
        )
        for transport in [each for each in args.transports if each != "memory"]:
            name = f"agn_optax, {transport}, TLS"
            run = _connected(
                stack, served, transport, name, contribution, tls=Tls(pem[0])
            )
            add(name, RAW_TLS, run)
    return made


def _connected(
    stack: contextlib.ExitStack,
    address: str,
    transport: str,
    worker: str,
    contribution: centers.PyTree,
    **options: Any,
) -> Callable[[], None]:
    center = stack.enter_context(centers.connect(address, transport, **options))
    return centers.exchanging(center, contribution, worker)


def compare(
    made: list[Form], size: int, repeats: int, report: Report
) -> tuple[list[Row], str]:
    """Measure the forms in turns; return rows, and gRPC's faster client."""
    seconds = side_by_side.take_turns(made, repeats, report.console)
    best = side_by_side.fastest(seconds, CLIENTS)
    seconds[STREAM] = seconds[best]  # the peer of the other forms
    rows = []
    for form in made:
        row = side_by_side.speed(side_by_side.compare(seconds, form.name, form.peer))
        of_stream = side_by_side.compare(seconds, form.name, STREAM)
        rows.append(
            {
                "form": form.name,
                "milliseconds": 1e3 * row["seconds"],
                "GB/s": 2e-9 * size / row["seconds"],
                "peer": form.peer,
                "speed": row["ratio"],
                "quartiles": row["quartiles"],
                "of_gRPC": side_by_side.speed(of_stream)["ratio"],
            }
        )
    return rows, best


def small(sides: Sides, args: argparse.Namespace, report: Report) -> list[Row]:
    """Measure exchanges/s of small models, by one worker and by several."""
    size = int(1e3 * args.kilobytes)
    made: list[Form] = []
    most = max(args.workers)
    with (
        centers.served(sides.center, size, args.leaves) as served,
        peers.grpc_server(sides.peer, size, "127.0.0.1:0") as bare,
        centers.Crew(most) as crew,
    ):
        teams: dict[str, list[Callable[[], Any]]] = {
            name: [functools.partial(client, bare, size)] * most
            for name, client in CLIENTS.items()
        }
        for transport in args.transports:
            worker = functools.partial(
                centers.worker, served, transport, size, args.leaves
            )
            teams[f"agn_optax, {transport}"] = [
                functools.partial(worker, f"{transport} {i}") for i in range(most)
            ]
        for team, makers in teams.items():
            crew.hire(team, makers)
            for workers in args.workers:

                def run(team: str = team, workers: int = workers) -> float:
                    return args.window / sum(crew.work(team, workers, args.window))

                made.append(Form(f"{team}; {workers}", "", run))
        seconds = side_by_side.take_turns(made, args.repeats, report.console)
    rows: list[Row] = []
    for workers in args.workers:
        best = side_by_side.fastest(seconds, [f"{name}; {workers}" for name in CLIENTS])
        for team in teams:
            row = side_by_side.compare(seconds, f"{team}; {workers}", best)
            row = side_by_side.speed(row)
            rows.append(
                {
                    "form": team,
                    "workers": workers,
                    "a_second": 1 / row["seconds"],
                    "peer": best.partition(";")[0],
                    "speed": row["ratio"],
                    "quartiles": row["quartiles"],
                    "TensorFlow_(another_run)": TENSORFLOW.get(workers),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Exchanges beside bare transports.")
    add = parser.add_argument
    add("--megabytes", type=float, nargs="+", default=[4, 40, 400], help="of a model")
    add("--leaves", type=int, default=4)
    add("--transports", nargs="+", default=centers.TRANSPORTS)
    add("--networks", nargs="+", choices=RAW, default=list(RAW))
    add("--kilobytes", type=float, default=40, help="of the small model")
    add("--workers", type=int, nargs="+", default=list(TENSORFLOW), help="of that")
    add("--window", type=float, default=1.0, help="seconds in which those are counted")
    add("--repeats", type=int, default=7, help="turns at 400 MB")
    add("--more", type=int, default=8, help="times as many at smaller sizes, at most")
    add("--torch-python", type=pathlib.Path, help="a Python that has torch")
    args = parse(parser, megabytes=[0.1], repeats=1, more=1, window=0.1, workers=[1])
    report = Report(args.json)
    with Process() as center, Process() as peer:
        sides = Sides(center, peer)
        for megabytes in args.megabytes:
            size = peers.bytes_of(megabytes)
            repeats = args.repeats * max(1, min(args.more, round(400 / megabytes)))
            for network in args.networks:
                with contextlib.ExitStack() as stack:
                    made = forms(network, size, sides, args, stack)
                    rows, best = compare(made, size, repeats, report)
                title = f"{megabytes:g} MB in {args.leaves} leaves, {network}; {best}"
                report.add(f"{network}, {megabytes:g} MB", f"{title} is the peer", rows)
                del made  # frees their buffers
        title = f"{args.kilobytes:g} KB, TCP, a process for each worker"
        report.add("small", title, small(sides, args, report))
    report.write()


if __name__ == "__main__":
    main()
