"""Cost of a token and of TLS in an exchange, relative to an open center.

Every form has its own center in a second process, and one worker that exchanges with it
for a while. "speed" is relative to the same transport in plain text and without a
token: the median of neighbors in time with its quartiles.

    python benchmarks/trust.py
    python benchmarks/trust.py --megabytes 40 --repeats 9
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import tempfile
from typing import Any

import centers
import peers
import side_by_side
from processes import Process
from report import Report, parse
from side_by_side import Form

from agn_optax.service import Tls

TOKEN = "0123456789abcdef0123456789abcdef"  # noqa: S105 opens nothing else


def main() -> None:
    parser = argparse.ArgumentParser(description="What a token and TLS cost.")
    add = parser.add_argument
    add("--megabytes", type=float, nargs="+", default=[0.04, 40.0], help="of the model")
    add("--leaves", type=int, default=4)
    add("--window", type=float, default=0.5, help="seconds in which are counted")
    add("--repeats", type=int, default=9)
    args = parse(parser, megabytes=[0.04], window=0.1, repeats=1)
    report = Report(args.json)
    with Process() as process, tempfile.TemporaryDirectory() as folder:
        pem = peers.certificates(pathlib.Path(folder))
        for megabytes in args.megabytes:
            size = 1e6 * megabytes
            with contextlib.ExitStack() as stack:
                forms = _forms(stack, process, size, args.leaves, pem, args.window)
                found = side_by_side.measure(forms, args.repeats, report.console)
            rows = []
            for name, row in found.items():
                row = side_by_side.speed(row)
                rows.append(
                    {
                        "form": name,
                        "a_second": 1 / row["seconds"],
                        "gigabytes_a_second": 2 * size / 1e9 / row["seconds"],
                        "speed": row["ratio"],
                        "quartiles": row["quartiles"],
                    }
                )
            report.add("trust", f"{megabytes:g} MB, both ways", rows)
    report.write()


def _forms(
    stack: contextlib.ExitStack,
    process: Process,
    size: float,
    leaves: int,
    pem: peers.Pem,
    window: float,
) -> list[Form]:
    """Return all forms, each with its own center."""
    secret = {"tls": Tls(None, *pem)}, {"tls": Tls(pem[0])}
    token = {"tokens": f"worker * {TOKEN}"}, {"token": TOKEN}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "open": ({}, {}),
        "a token": token,
        "TLS": secret,
        "TLS, a token": (secret[0] | token[0], secret[1] | token[1]),
    }
    contribution = centers.tree(size, leaves, 1e-6)
    forms = []
    for transport in ("socket", "grpc"):
        for way, (theirs, own) in ways.items():
            served = centers.served(process, size, leaves, **theirs)
            address = stack.enter_context(served)
            center = stack.enter_context(centers.connect(address, transport, **own))
            exchange = centers.exchanging(center, contribution, "anna")
            name = f"{transport}, {way}"
            run = functools.partial(centers.seconds_of_one, exchange, window)
            forms.append(Form(name, f"{transport}, open", run))
    return forms


if __name__ == "__main__":
    main()
