"""Run scenarios, and print the outcome of each: ``make chaos``."""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import subprocess
import sys
import time

from chaos import growth, runner, scenario
from chaos.processes import ProcessPool


def main():
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario")
    parser.add_argument("--count", type=int, default=1, help="of scenarios")
    parser.add_argument("--jobs", type=int, default=1, help="scenarios at a time")
    parser.add_argument(
        "--recovers",
        type=float,
        default=scenario.PLAIN.recovers,
        help="seconds in which survivors must go on: more on a machine that is busy",
    )
    parser.add_argument(
        "--simulated",
        type=float,
        default=60.0,
        help="seconds of simulated faults beside the scenarios: see make faults",
    )
    parser.add_argument(
        "--growth", type=int, help="instead, so many exchanges of one scenario"
    )
    options = parser.parse_args()
    if options.growth is not None:
        with ProcessPool(3, 1) as spares:
            outcome = growth.run(options.growth, spares)
        _print(outcome)
        _write(f"      {outcome.details}")
        return bool(outcome.broken)
    seeds = range(options.seed, options.seed + options.count)
    begin = time.monotonic()
    with (
        _simulated(options.simulated) as simulated,
        ProcessPool(4 * options.jobs, 1 + options.jobs) as spares,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        outcomes = []
        drawn = (
            dataclasses.replace(scenario.drawn(seed), recovers=options.recovers)
            for seed in seeds
        )
        for outcome in pool.map(lambda each: runner.run(each, spares), drawn):
            outcomes.append(outcome)
            _print(outcome)
        is_simulation_broken = simulated.wait()
    broken = [each.scenario.seed for each in outcomes if each.broken]
    kinds = collections.Counter(
        fault.kind for each in outcomes for fault in each.scenario.faults
    )
    _write()
    _write("faults: " + ", ".join(f"{n} x {kind}" for kind, n in kinds.most_common()))
    _write(
        f"{len(outcomes)} scenarios in {time.monotonic() - begin:.0f} s: "
        f"{sum(each.steps for each in outcomes)} steps, "
        f"{sum(each.exchanges for each in outcomes)} exchanges, all survivors on after "
        f"{max(each.recovered for each in outcomes):.1f} s at most; "
        f"broken: {broken or 'none'}"
    )
    return bool(broken or is_simulation_broken)


@contextlib.contextmanager
def _simulated(seconds):
    """Run simulated faults in another process, which ends with the context."""
    command = [sys.executable, "-B", "-m", "faults", "--seconds", f"{seconds}"]
    with subprocess.Popen(command) as process:  # noqa: S603 our own
        try:
            yield process
        finally:
            process.kill()


def _print(outcome):
    verdict = "BROKEN" if outcome.broken else "held"
    _write(
        f"{outcome.scenario.seed:5} {verdict} {outcome.seconds:5.1f} s, "
        f"{outcome.exchanges:5} exchanges, on after {outcome.recovered:4.1f} s: "
        f"{outcome.scenario}; " + ", ".join(map(str, outcome.scenario.faults))
    )
    for each in outcome.broken:
        _write(f"      {each}")


def _write(text=""):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
