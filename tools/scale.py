"""Plan large runs: print the tables of docs/scale.md, computed by the planner.

For every number of parameters and of workers, the tables have the load of one center on
one host, and the shards needed instead.
`agn-optax plan` gives the whole plan of a single run.

    python tools/scale.py                  # print the tables
    python tools/scale.py --write          # write them to docs/scale.md
    python tools/scale.py --codec bfloat16 --workers 64 --parameters 7e9 70e9
"""

from __future__ import annotations

import argparse
import bisect
import pathlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import optax

from agn_optax import rules
from agn_optax.ops import planning
from agn_optax.ops.planning import Cluster, Cost, Machine
from agn_optax.ops.units import rate

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "scale.md"
MOST_SHARDS = 1 << 20
BEGIN, END = "<!-- python tools/scale.py -->\n", "<!-- end -->"


class Runs:
    """The planned runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        # One leaf each: a plan's time grows with the number of leaves, bytes do not.
        self._models = {
            count: [jax.ShapeDtypeStruct((round(count) // 1000, 1000), jnp.float32)]
            for count in args.parameters
        }
        self._rule = rules.diloco(codec=rules.CODECS.get(args.codec))

    def __iter__(self) -> Iterator[tuple[float, int]]:
        """Yield numbers of parameters and of workers."""
        for parameters in self.args.parameters:
            for workers in self.args.workers:
                yield parameters, workers

    def cost(
        self, parameters: float, workers: int, period: int, shards: int = 1
    ) -> Cost:
        """Plan one run."""
        args = self.args
        return planning.plan(
            self._rule,
            self._models[parameters],
            Cluster(
                step_time=args.step_time,
                bandwidth=rate(args.bandwidth, "--bandwidth"),
                center_bandwidth=rate(args.center_bandwidth, "--center-bandwidth"),
                latency=args.latency,
                workers=workers,
                machine=Machine(
                    overhead=args.overhead,
                    endpoint_rate=rate(args.endpoint_rate, "--endpoint-rate"),
                    apply_rate=rate(args.apply_rate, "--apply-rate"),
                ),
                shards=shards,
            ),
            inner=optax.adamw(1e-3),
            period=period,
        )

    def enough(self, parameters: float, workers: int) -> tuple[int, int]:
        """Return the period that hides a worker's exchange, and the shards needed."""
        alone = self.cost(parameters, 1, self.args.period)
        period = max(self.args.period, alone.hidden_period or 1)

        def fits(shards: int) -> bool:
            cost = self.cost(parameters, workers, period, shards)
            return workers * cost.service <= period * self.args.step_time

        while not fits(MOST_SHARDS):
            period *= 2  # no number of shards suffices, as with many small exchanges
        counts = range(1, MOST_SHARDS + 1)
        return period, counts[bisect.bisect_left(counts, True, key=fits)]


def one_center(runs: Runs) -> list[str]:
    """Tabulate one center on one host, and its load."""
    rows = []
    for parameters, workers in runs:
        cost = runs.cost(parameters, workers, runs.args.period)
        asked = workers / (cost.period * runs.args.step_time)  # exchanges/s
        rows.append(
            [
                f"{parameters:.0e}".replace("e+", "e"),
                f"{workers:,}",
                size(cost.message),
                seconds(cost.exchange),
                f"{size(asked * (cost.message + cost.answer))}/s",
                seconds(cost.service),
                share(asked * cost.service),
                f"{cost.utilization_overlapping:.0%}",
                cost.bottleneck,
                number(cost.hidden_period),
                size(cost.center.total),
            ]
        )
    head = (
        "parameters, workers, message, exchange, center traffic, center time, "
        "center load, busy, bottleneck, shortest period, memory"
    )
    return table(head.split(", "), rows)


def enough(runs: Runs) -> list[str]:
    """Tabulate the shards needed."""
    rows = []
    for parameters, workers in runs:
        period, shards = runs.enough(parameters, workers)
        cost = runs.cost(parameters, workers, period, shards)
        interval = period * runs.args.step_time / cost.utilization_overlapping
        rows.append(
            [
                f"{parameters:.0e}".replace("e+", "e"),
                f"{workers:,}",
                number(period),
                f"{cost.utilization:.0%}",
                number(shards),
                size(cost.center.total / shards),
                size(spread(cost, interval) / shards),
            ]
        )
    head = "parameters, workers, period, busy, shards, memory per shard, if spread"
    return table(head.split(", "), rows)


def spread(cost: Cost, interval: float) -> float:
    """Return the bytes of a center if its workers' exchanges are evenly spread."""
    there = min(1.0, cost.exchange / interval)
    return cost.center.total - cost.center.messages * (1 - there)


def page(args: argparse.Namespace) -> str:
    """Make all tables, with their assumptions."""
    runs = Runs(args)
    codec = f", contributions in {args.codec}" if args.codec else ""
    assumed = (
        f"DiLoCo with {args.step_time:g} s per step{codec}; links of {args.bandwidth} "
        f"at each worker and {args.center_bandwidth}\nat each host of a center; round "
        f"trips of {1e3 * args.latency:g} ms. An empty exchange takes "
        f"{1e3 * args.overhead:g} ms.\nMessages and answers pass "
        f"through both ends at {args.endpoint_rate}/s, and the center's arithmetic\n"
        f"reads and writes {args.apply_rate}/s."
    )
    parts = [
        [assumed],
        [f"### One center on one host, period {args.period}"],
        one_center(runs),
        ["### As many hosts as needed"],
        enough(runs),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table in Markdown."""
    lines = [head, ["---:"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def size(value: float) -> str:
    """Format bytes, with two or three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} EB"


def seconds(value: float) -> str:
    """Format a duration with a readable unit."""
    if value < 0.9995:
        return f"{1e3 * value:.3g} ms"
    for unit, many in (("s", 1), ("min", 60), ("h", 3600)):
        if value < 200 * many:
            return f"{value / many:.3g} {unit}"
    return f"{value / 86400:,.3g} days"


def share(value: float) -> str:
    """Format a fraction in percent, or a multiple."""
    if value < 1:
        return f"{value:.1%}"
    return f"{value:,.1f} times" if value < 100 else f"{value:,.0f} times"


def number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def written(text: str, args: argparse.Namespace) -> str:
    """Return the page's text with new tables."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{page(args)}\n{text[end:]}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Plan large runs; the defaults give the tables of docs/scale.md."
    )
    add = parser.add_argument
    add("--parameters", type=float, nargs="+", default=[1e8, 1e10])
    add("--workers", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    add(
        "--period",
        type=int,
        default=500,
        help="local steps per exchange, at least; more if exchanges need them",
    )
    add("--step-time", type=float, default=1.0, help="seconds per local step")
    add("--codec", choices=rules.CODECS, help="codec of contributions")
    add("--bandwidth", default="10Gbit", help="rate of each worker's link")
    add("--center-bandwidth", default="10Gbit", help="rate of a center host's link")
    add("--latency", type=float, default=0.001, help="seconds of a round trip")
    add("--overhead", type=float, default=0.002, help="seconds of an empty exchange")
    add(
        "--endpoint-rate",
        default="2.5GB",
        help="rate of message and answer through both ends",
    )
    add(
        "--apply-rate",
        default="30GB",
        help="rate at which the center's arithmetic reads and writes",
    )
    add("--write", action="store_true", help="write the tables to docs/scale.md")
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    if args.write:
        PAGE.write_text(written(PAGE.read_text(), args))
    else:
        print(page(args))


if __name__ == "__main__":
    main()
