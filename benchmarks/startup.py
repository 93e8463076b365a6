"""Time of `import agn_optax` and of `import optax`, in fresh interpreters in turns.

The service, which needs gRPC, is a separate row; jax is imported by optax itself.

    python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys

import side_by_side
from report import Report, parse
from side_by_side import Form

PROGRAM = """
import time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""
# Bytecode files are written, as usual, also if this runs under ``python -B``.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def seconds(module: str) -> float:
    """Return the seconds of an import, without the interpreter's start."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    said = subprocess.run(  # noqa: S603 our own program
        command, env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    return float(said.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to import.")
    parser.add_argument("--repeats", type=int, default=15)
    args = parse(parser, repeats=1)
    report = Report(args.json)
    forms = [
        Form(module, "optax", functools.partial(seconds, module))
        for module in ("jax", "optax", "agn_optax", "agn_optax.service")
    ]
    rows = []
    for row in side_by_side.measure(forms, args.repeats, report.console).values():
        row["milliseconds"] = 1e3 * row.pop("seconds")
        rows.append(row)
    report.add("startup", "import, in a fresh interpreter", rows)
    report.write()


if __name__ == "__main__":
    main()
