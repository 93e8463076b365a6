"""Asynchronous SGD: its rate depends on the number of workers, not on the delays.

Mishchenko, Bach, Even, Woodworth, *Asynchronous SGD Beats Minibatch SGD Under Arbitrary
Delays*, 2022, arXiv 2206.07638: after T gradients, the guarantee for asynchronous SGD
has the number n of workers where older ones had the largest delay. A slow worker
therefore costs nothing but its own gradients, while rounds wait for it.

Here n workers minimize the quadratic of `optimal_asynchronous.py` in 200 dimensions,
with noise of 0.005 in each element, until |grad f|^2 <= 0.0005. Their gradients take 1
to k seconds, spread evenly on a logarithmic scale; first k is changed, and then n at
equal speeds. The rate is the best of 3/2, 3/4, 3/8, ... for each setting (of seed 0),
as in the paper's tests, whose data (a regression in 400 dimensions with 40 processes)
is not repeated here. The paper's other method divides a gradient by max(1, delay / n);
it is measured, too.

The whole program takes about two minutes of one core.

    python examples/reproduce/delays.py
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from optimal_asynchronous import Method, run, tuned
from report import Report, arguments, spread

from agn_optax import rules
from agn_optax.center import Synchronous

PROBLEM: dict[str, Any] = {"dimension": 200, "noise": 0.005, "goal": 0.0005}
PLAIN, ADAPTIVE, ROUNDS = "asynchronous SGD", "delay-adaptive", "rounds"


def adaptive(workers: int) -> optax.GradientTransformationExtraArgs:
    """Divide updates by max(1, (staleness + 1) / n).

    The staleness of workers of equal speed is n - 1.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, staleness: Any, **extra: Any
    ) -> tuple[Any, Any]:
        scale = jnp.minimum(1.0, workers / (staleness + 1))
        return optax.tree.scale(scale, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def methods(workers: int) -> list[Method]:
    center = optax.chain(adaptive(workers), optax.sgd(1.0))
    rule = dataclasses.replace(rules.downpour(), name="adaptive", center=center)
    average = rules.average()
    return [
        Method(PLAIN, rules.downpour()),
        Method(ADAPTIVE, rule),
        Method(ROUNDS, average, Synchronous(), versions_per_gradient=False),
    ]


@dataclasses.dataclass(frozen=True)
class Row:
    """A method in a setting, with a number for each seed."""

    workers: int
    slow: int  # seconds of the slowest worker's gradient
    method: str
    rate: float
    gradients: list[float]  # until epsilon
    seconds: list[float]
    delay: int  # the largest

    @property
    def cost(self) -> float:
        """The median number of gradients."""
        return float(np.median(self.gradients))


def measured(workers: int, slow: int, method: Method, seeds: int) -> Row:
    """Return the cost of a method with its best rate."""
    times = slow ** np.linspace(0.0, 1.0, workers)
    rate = tuned(method, times, **PROBLEM)
    if rate is None:
        raise SystemExit(f"no rate reaches epsilon with {method.name}")
    runs = [run(method, times, rate, seed=seed, **PROBLEM) for seed in range(seeds)]
    return Row(
        workers,
        slow,
        method.name,
        rate,
        [float(len(each.traces)) for each in runs],
        [each.seconds for each in runs],
        max(int(each.traces.staleness.max()) for each in runs),
    )


def listed(numbers: Sequence[float]) -> str:
    """Return numbers as text."""
    return ", ".join(f"{each:.0f}" for each in numbers)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(__doc__ or "", given)
    report = Report(
        "delays",
        "Delays: the number of workers counts",
        "Mishchenko, Bach, Even, Woodworth, *Asynchronous SGD Beats Minibatch SGD "
        "Under Arbitrary Delays*, 2022, arXiv 2206.07638",
        options,
    )
    count = 20
    slows = (1, 16) if options.quick else (1, 4, 16, 64)
    counts = (5, 20) if options.quick else (5, 10, 20, 40, 80)
    rows = []
    compared = methods(count)
    for slow in slows:
        for method in compared:
            rows.append(measured(count, slow, method, options.seeds))
            report.progress(f"{slow} s, {method.name}: {rows[-1].cost:.0f} gradients")
    for workers in counts:
        if workers != count:  # its row is there
            rows.append(measured(workers, 1, compared[0], options.seeds))
            report.progress(f"{workers} workers: {rows[-1].cost:.0f} gradients")
    report.table(
        "Gradients and simulated seconds until the squared norm of the gradient is at "
        "most 0.0005; median and range of the seeds",
        [
            *("workers", "seconds of the slowest", "method", "learning rate"),
            *("largest delay", "gradients", "seconds"),
        ],
        [
            [
                *(
                    row.workers,
                    row.slow,
                    row.method,
                    f"{row.rate:.3g}",
                    row.delay,
                ),
                *(spread(row.gradients, 0), spread(row.seconds, 1)),
            ]
            for row in rows
        ],
    )

    of_slow = {
        method.name: [
            row for row in rows if row.workers == count and row.method == method.name
        ]
        for method in compared
    }
    of_count = sorted(
        (row for row in rows if row.slow == 1 and row.method == PLAIN),
        key=lambda row: row.workers,
    )
    left, right = report.figure.subplots(1, 2)
    for name, some in of_slow.items():
        seconds = [float(np.median(row.seconds)) for row in some]
        left.loglog([row.slow for row in some], seconds, "o-", label=name)
    left.set(xlabel="seconds of the slowest worker's gradient", ylabel="seconds")
    left.legend(frameon=False)
    right.loglog(
        *zip(*((row.workers, row.cost) for row in of_count), strict=True), "o-"
    )
    right.set(xlabel="workers of equal speed", ylabel="gradients")

    for name in (PLAIN, ADAPTIVE):
        costs = [row.cost for row in of_slow[name]]
        delays = [row.delay for row in of_slow[name]]
        ratio = max(costs) / min(costs)
        good = ratio <= 2 and max(delays) >= 4 * min(delays)
        report.claim(
            f"The number of gradients that {name} needs does not depend on the delays",
            "the guarantee has n, and no delay",
            f"with largest delays of {listed(delays)}: {listed(costs)} gradients",
            "reproduced" if good else "not reproduced",
            "" if good else "the factor is more than 2",
        )
    first, last = of_count[0], of_count[-1]
    slope = math.log(last.cost / first.cost) / math.log(last.workers / first.workers)
    good = 0.6 <= slope <= 1.2
    report.claim(
        "It depends on the number of workers",
        "a term with n, which dominates here if n is large",
        f"{first.cost:.0f} gradients with {first.workers} workers, {last.cost:.0f} "
        f"with {last.workers}: n to the power {slope:.2f}",
        "reproduced" if good else "in part",
        "" if good else "the power is not near 1",
    )
    ratios = [
        float(np.median(rounds.seconds) / np.median(plain.seconds))
        for plain, rounds in zip(of_slow[PLAIN], of_slow[ROUNDS], strict=True)
    ]
    beats = all(each >= 1 for each in ratios)
    shown = ", ".join(
        f"{row.slow}: {each:.1f}"
        for row, each in zip(of_slow[PLAIN], ratios, strict=True)
    )
    report.claim(
        "Asynchronous SGD beats minibatch SGD (rounds), for any delays",
        "at least as fast at all delays",
        f"time of rounds, in units of asynchronous SGD's, by k: {shown}",
        "reproduced" if beats else "in part",
        "" if beats else "rounds are faster where all workers are about equally fast",
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
