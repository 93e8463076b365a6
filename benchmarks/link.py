"""Exchanges over a link that is slower than loopback: transports and codecs.

The kernel paces the sockets of both ends (SO_MAX_PACING_RATE), which limits the rate at
which bytes are sent; nothing is lost, and there is no further latency. A raw socket
that sends, adds and sends back is paced the same way.

"of link" is the part of the exchange's time that the link takes at that rate, one
direction after the other. "speed" is relative to the peer's, the median of neighbors in
time with its quartiles.

Codecs are compared over sockets, including encoding and decoding, with contributions of
normal random numbers. "planned" is the prediction of `agn_optax.planning` from this
machine's constants and the codec's speed, which are measured first. "pays below" is the
rate of a link at which, by that plan, an exchange takes as long as one in float32.

    python benchmarks/link.py --gigabits 1 10 --megabytes 400
    python benchmarks/link.py --only codecs --codec-gigabits 0.1 1 10
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import sys

import centers
import jax.numpy as jnp
import numpy as np
import optax
import peers
import side_by_side
from processes import Process
from report import Report, Row, parse
from side_by_side import Form

from agn_optax import planning, rules
from agn_optax.ops.cli import _calibrate
from agn_optax.ops.planning import Cluster, Machine

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from examples.pacing import pace

RAW = "raw TCP"
# By name: the peer, the transport and the codec.
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
    """Return one row for each form, at one rate of the link."""
    size = peers.bytes_of(args.megabytes)
    rate = 1e9 * gigabits / 8  # bytes/s
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
            form.run()  # opens all connections
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


AS_IT_IS = "float32"  # name of contributions without a codec


def compare_codecs(
    gigabits: float,
    center: Process,
    machines: dict[str, Machine],
    args: argparse.Namespace,
    report: Report,
) -> list[Row]:
    """Return one row for each codec, at one rate of the link."""
    size = peers.bytes_of(args.codec_megabytes)
    rate = 1e9 * gigabits / 8  # bytes/s
    rng = np.random.default_rng(0)
    like = centers.tree(size, args.leaves)
    contribution = [
        jnp.asarray(1e-3 * rng.standard_normal(leaf.shape, np.float32)) for leaf in like
    ]
    costs = {
        name: planning.plan(
            centers.rule(_codec(name)),
            like,
            Cluster(step_time=1.0, bandwidth=rate, machine=machine),
            inner=optax.sgd(1.0),
        )
        for name, machine in machines.items()
    }
    with contextlib.ExitStack() as stack:
        made = []
        for name in machines:
            codec = _codec(name)
            served = centers.served(center, size, args.leaves, codec=codec)
            connection = centers.connect(stack.enter_context(served), "socket", codec)
            stack.enter_context(connection)
            encode = centers.encoding(codec, contribution)
            run = centers.exchanging(connection, contribution, name, encode=encode)
            made.append(Form(name, AS_IT_IS, run))
        for form in made:
            form.run()  # opens all connections
        pace(rate)
        center.call(pace, rate)
        rows = side_by_side.measure(made, args.repeats, report.console)
    return [
        {
            "Gbit/s": gigabits,
            "codec": name,
            "message_MB": costs[name].message / 1e6,
            "a_second": 1 / row["seconds"],
            "planned": 1 / costs[name].exchange,
            "peer": row["peer"],
            "speed": row["ratio"],
            "quartiles": row["quartiles"],
            "pays_below": _below(costs[name].coding),
        }
        for name, row in zip(rows, map(side_by_side.speed, rows.values()), strict=True)
    ]


def _codec(name: str) -> str:
    return "" if name == AS_IT_IS else name


def _below(coding: planning.Coding | None) -> str:
    if coding is None:
        return ""
    rate = coding.pays_below
    return "any rate" if rate is None else f"{8e-9 * rate:.3g} Gbit/s"


def main() -> None:
    parser = argparse.ArgumentParser(description="Exchanges over a slower link.")
    add = parser.add_argument
    add("--gigabits", type=float, nargs="+", default=[1, 10], help="a second")
    add("--megabytes", type=float, default=400, help="of a model")
    add("--leaves", type=int, default=4)
    add("--repeats", type=int, default=5)
    add("--codecs", nargs="+", default=["bfloat16", "int8", "int4"], metavar="NAME")
    add("--codec-gigabits", type=float, nargs="+", default=[0.1, 1, 10])
    add("--codec-megabytes", type=float, default=40, help="of a model")
    parts = ("transports", "codecs")
    add("--only", nargs="+", choices=parts, default=parts)
    quick = {"gigabits": [10], "codec_gigabits": [10], "codecs": ["int4"]}
    args = parse(parser, **quick, megabytes=1, codec_megabytes=1, repeats=1)
    unknown = set(args.codecs) - set(rules.CODECS)
    if unknown:
        parser.error(f"no codec: {', '.join(unknown)}; {', '.join(rules.CODECS)} are")
    report = Report(args.json)
    with Process() as center, Process() as peer:
        if "transports" in args.only:
            rows = [
                row
                for gigabits in args.gigabits
                for row in compare(gigabits, center, peer, args, report)
            ]
            size = f"{args.megabytes:g} MB in {args.leaves} leaves"
            report.add("link", f"{size}, over TCP paced to a rate", rows)
        if "codecs" in args.only:
            machines = _machines(args.codecs)
            rows = [
                row
                for gigabits in args.codec_gigabits
                for row in compare_codecs(gigabits, center, machines, args, report)
            ]
            size = f"{args.codec_megabytes:g} MB in {args.leaves} leaves"
            report.add("codecs", f"{size}, over sockets paced to a rate", rows)
    report.write()


def _machines(codecs: list[str]) -> dict[str, Machine]:
    """Measure this machine without a codec, and with each codec."""
    machine = _calibrate.calibrate()
    rates = {name: _calibrate.coding_rates(rules.CODECS[name]) for name in codecs}
    of_codecs = {
        name: dataclasses.replace(machine, **own) for name, own in rates.items()
    }
    return {AS_IT_IS: machine, **of_codecs}


if __name__ == "__main__":
    main()
