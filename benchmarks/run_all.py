"""Run every benchmark and collect the results: `make bench`.

Each benchmark runs in a separate process. After that, bench-output/ has results.json,
results.md with all tables, and plots.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --only exchange fan_in --quick
"""

import argparse
import json
import pathlib
import subprocess
import sys

import plots
from measuring import CONSOLE, Row, markdown

HERE = pathlib.Path(__file__).parent
RUNS = (
    *("optimizer_overhead", "towers", "startup", "encoding", "overlap", "memory"),
    "processes",
    *("exchange --megabytes 0.04", "exchange --megabytes 4", "exchange --repeats 27"),
    *("exchange --megabytes 400", "fan_in", "fan_in --megabytes 0.04 --workers 1 4"),
    "fan_in --megabytes 0.04 --workers 200 --transports socket --window 5",
    "fan_in --megabytes 0.04 --workers 200 --transports socket --window 5 --pause 0.5",
    *("bad_peers", "link", "link --megabytes 400 --gigabits 1 10 --codecs"),
    *("link --gigabits 0 0.32 --codecs --shards 8", "journal", "journal --workers 2"),
    *("simulate", "reality", "advised"),
    *("size", "size --leaves 10", "size --sizes 4e7 --leaves 10 100 1000"),
    *("size --sizes 4e8 --leaves 1 10 100 1000 10000", "quality --only digits text"),
    (
        "quality --only halves --rule nesterov --rounds 20 --period 20 --methods "
        "4_fragments 4_delay_5 4_delay_5_mixing 1_delay_18"
    ),
)


def run(name: str, options: list[str], file: pathlib.Path) -> Row:
    """Run one benchmark and return its results."""
    command = [sys.executable, "-B", str(HERE / f"{name}.py"), *options]
    subprocess.run([*command, "--json", str(file)], check=True)  # noqa: S603
    shown = " ".join(["python", f"benchmarks/{name}.py", *options])
    return {"benchmark": name, **json.loads(file.read_text()), "command": shown}


def page(found: list[Row]) -> str:
    """Format all tables, each benchmark with its command and its machine."""
    parts = ["# Benchmarks\n"]
    for each in found:
        machine = ", ".join(f"{key} {value}" for key, value in each["machine"].items())
        parts.append(f"## {each['benchmark']}\n\n`{each['command']}`: {machine}.\n")
        parts += map(markdown, each["tables"])
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs all benchmarks.")
    add = parser.add_argument
    names = list(dict.fromkeys(each.split()[0] for each in RUNS))
    add("--only", nargs="+", choices=names, default=names)
    add("--quick", action="store_true", help="each once, tiny: does everything work?")
    add("--output", type=pathlib.Path, default=pathlib.Path("bench-output"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "results.json"
    found, failed = [], []
    for line in [f"{name} --quick" for name in names] if args.quick else RUNS:
        name, *options = line.split()
        if name in args.only:
            CONSOLE.rule(line)
            try:
                found.append(run(name, options, file))
            except subprocess.CalledProcessError:  # run the others all the same
                failed.append(line)
    file.write_text(json.dumps(found, indent=1))
    (args.output / "results.md").write_text(page(found))
    drawn = [path.name for path in plots.draw(found, args.output)]
    CONSOLE.print(f"{args.output}: {', '.join(['results.json', 'results.md', *drawn])}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
