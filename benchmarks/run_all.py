"""Run every benchmark and collect the results: `make bench`.

Each benchmark runs in a separate process. After that, bench-output/ has results.json,
results.md with all tables, and plots.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --only exchange fan_in --quick
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import plots
import report
from rich.console import Console

HERE = pathlib.Path(__file__).parent
BENCHMARKS = (
    "optimizer_overhead",
    "train_step",
    "towers",
    "exchange",
    "fan_in",
    "bad_peers",
    "trust",
    "link",
    "overlap",
    "size",
    "memory",
    "journal",
    "encoding",
    "streaming",
    "quality",
    "scale",
    "startup",
)


def run(name: str, options: list[str], *, quick: bool) -> dict[str, Any]:
    """Run one benchmark and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder, "found.json")
        small = ["--quick"] if quick else []
        command = [sys.executable, "-B", str(HERE / f"{name}.py"), *small, *options]
        subprocess.run([*command, "--json", str(found)], check=True)  # noqa: S603
        results = json.loads(found.read_text())
    return {
        "benchmark": name,
        "command": " ".join(["python", f"benchmarks/{name}.py", *small, *options]),
        "machine": results["machine"],
        "tables": results["tables"],
    }


def page(found: list[dict[str, Any]]) -> str:
    """Format all tables, each benchmark with its command and its machine."""
    parts = ["# Benchmarks\n"]
    for each in found:
        machine = ", ".join(f"{key} {value}" for key, value in each["machine"].items())
        parts.append(f"## {each['benchmark']}\n\n`{each['command']}`: {machine}.\n")
        parts += [report.markdown(table) for table in each["tables"]]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs all benchmarks.")
    add = parser.add_argument
    add("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    add("--quick", action="store_true", help="tiny sizes: does everything work?")
    add("--torch-python", help="a Python that has torch, for its peer in exchange.py")
    add("--output", type=pathlib.Path, default=pathlib.Path("bench-output"))
    args = parser.parse_args()
    console = Console()
    found, failed = [], []
    for name in args.only:
        console.rule(name)
        options = []
        if name == "exchange" and args.torch_python:
            options = ["--torch-python", args.torch_python]
        try:
            found.append(run(name, options, quick=args.quick))
        except subprocess.CalledProcessError:  # run the others all the same
            failed.append(name)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(found, indent=1))
    (args.output / "results.md").write_text(page(found))
    drawn = plots.draw(found, args.output)
    written = ["results.json", "results.md", *(path.name for path in drawn)]
    console.print(f"{args.output}: {', '.join(written)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
