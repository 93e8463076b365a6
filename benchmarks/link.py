"""Exchanges over a link that is slower than loopback: each transport, and dtypes.

Both ends' sockets are paced by the kernel (SO_MAX_PACING_RATE), so that the bytes leave
at so many bits a second; nothing is lost, or takes longer than that on its way.
A raw socket that sends, adds and sends back is paced the same way.

"of link" is how much of the exchange the link itself takes at that rate, one direction
after the other; "speed" is relative to the peer's, the median of neighbors in time with
its quartiles.

    python benchmarks/link.py --gigabits 1 10 --megabytes 400
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys

import centers
import peers
import side_by_side
from processes import Process
from report import Report, Row, parse
from side_by_side import Form

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from examples.pacing import pace

RAW = "raw TCP"
# By their names: the peer, the transport and the codec.
FORMS = {
    "agn_optax, socket": (RAW, "socket", ""),
    "agn_optax, socket, bfloat16": ("agn_optax, socket", "socket", "bfloat16"),
    "agn_optax, grpc": (RAW, "grpc", ""),
    "agn_optax, grpc, bfloat16": ("agn_optax, grpc", "grpc", "bfloat16"),
}


def compare(
    gigabits: float,
    center: Process,
    peer: Process,
    args: argparse.Namespace,
    report: Report,
) -> list[Row]:
    """One row for each form, at one rate of the link."""
    size = peers.bytes_of(args.megabytes)
    rate = 1e9 * gigabits / 8  # bytes a second
    contribution = centers.tree(size, args.leaves, 1e-6)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(peers.raw_socket(peer, size))
        served = {
            codec: stack.enter_context(
                centers.served(center, size, args.leaves, codec=codec)
            )
            for codec in {codec for _, _, codec in FORMS.values()}
        }
        made = [Form(RAW, RAW, raw)]
        for name, (of, transport, codec) in FORMS.items():
            connection = centers.connect(served[codec], transport, codec)
            stack.enter_context(connection)
            exchange = centers.exchanging(connection, contribution, name)
            made.append(Form(name, of, exchange))
        for form in made:
            form.run()  # so that all connections are there
        pace(rate)
        for process in (center, peer):
            process.call(pace, rate)
        rows = side_by_side.measure(made, args.repeats, report.console)
    sent = {name: size / 2 if "bfloat16" in name else size for name in rows}
    return [
        {
            "Gbit/s": gigabits,
            "form": name,
            "milliseconds": 1e3 * row["seconds"],
            "of_link": 2 * sent[name] / rate / row["seconds"],
            "peer": row["peer"],
            "speed": row["ratio"],
            "quartiles": row["quartiles"],
        }
        for name, row in zip(rows, map(side_by_side.speed, rows.values()), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Exchanges over a slower link.")
    add = parser.add_argument
    add("--gigabits", type=float, nargs="+", default=[1, 10], help="a second")
    add("--megabytes", type=float, default=400, help="of a model")
    add("--leaves", type=int, default=4)
    add("--repeats", type=int, default=5)
    args = parse(parser, gigabits=[10], megabytes=1, repeats=1)
    report = Report(args.json)
    with Process() as center, Process() as peer:
        rows = [
            row
            for gigabits in args.gigabits
            for row in compare(gigabits, center, peer, args, report)
        ]
    title = f"{args.megabytes:g} MB in {args.leaves} leaves, over TCP paced to a rate"
    report.add("link", title, rows)
    report.write()


if __name__ == "__main__":
    main()
