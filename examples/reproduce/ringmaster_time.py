"""Ringmaster ASGD's bound on time, as an exact inequality over random speeds.

Ringmaster ASGD applies gradients one by one, and drops those whose delay is R updates
or more. If worker i takes tau_i seconds for a gradient (tau_1 <= ... <= tau_n), then
any R consecutive updates take at most

    t(R) = 2 min over m of (1/m sum_{i <= m} 1/tau_i)^-1 (1 + R/m)

seconds: slow workers delay nothing, however slow they are. This is Lemma 4.1 of
Maranjyan, Tyurin, Richtárik, *Ringmaster ASGD: The First Asynchronous SGD with Optimal
Time Complexity*, 2025, arXiv 2501.16168 (read as a later draft of its authors states
it). The lemma is about schedules alone, so no gradient is computed: for each of 1,000
random clusters, `simulate.schedule` gives the times of all updates, in whole
nanoseconds, and every window of R updates is compared with t(R) as a fraction.

The whole program takes about a minute. It has no numbers of the source to compare
with, because the lemma has none but its 2.

    python examples/reproduce/ringmaster_time.py
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from report import Report, arguments, spread

from agn_optax import simulate
from agn_optax.center import BoundedStaleness
from agn_optax.simulate import Outcome

Draw = Callable[[np.random.Generator, int], np.ndarray]

SPEEDS: dict[str, Draw] = {  # seconds of a gradient, for each worker
    "uniform, 0.1 to 1": lambda random, n: random.uniform(0.1, 1.0, n),
    "lognormal, sigma 1.5": lambda random, n: random.lognormal(-1.5, 1.5, n),
    "heavy-tailed (Pareto, index 0.7)": lambda random, n: (
        0.1 * (1 + random.pareto(0.7, n))
    ),
}
MAX_WORKERS, MAX_RATIO = 64, 4  # the largest n, and the largest R / n
BOUNDS = 6  # length of a simulation, in times t(R)


@dataclasses.dataclass(frozen=True)
class Found:
    """A simulated cluster."""

    speeds: str
    ratio: float  # R / n
    windows: int  # windows of R consecutive updates
    longest: Fraction  # the longest of them, in units of t(R)
    delay: int  # largest delay of an applied gradient
    threshold: int  # R
    dropped: float  # fraction of gradients


def bound(times: Sequence[int], threshold: int) -> Fraction:
    """Return t(R), in the unit of the times."""
    total, found = Fraction(0), []
    for m, each in enumerate(sorted(times), start=1):
        total += Fraction(1, each)
        found.append(2 * (m + threshold) / total)
    return min(found)


def measured(speeds: str, random: np.random.Generator) -> Found:
    """Simulate a random cluster and return its windows."""
    n = int(np.exp(random.uniform(0, np.log(MAX_WORKERS + 1))))
    threshold = int(np.exp(random.uniform(0, np.log(MAX_RATIO * n + 1))))
    times = np.rint(1e9 * SPEEDS[speeds](random, n)).astype(int).tolist()  # ns
    limit = bound(times, threshold)
    schedule = simulate.schedule(
        simulate.Cluster(workers=n, speed=[simulate.Fixed(t / 1e9) for t in times]),
        period=1,
        mode=BoundedStaleness(versions=threshold - 1),
        seconds=float(BOUNDS * limit) / 1e9,
    )
    updates = np.concatenate([[0], np.sort(schedule.settled[schedule.applied])])
    windows = (updates[threshold:] - updates[:-threshold]).tolist()
    # The first window that the end cuts off is at least as long as it was until then.
    begin = updates[max(len(updates) - threshold, 0)]
    windows.append(round(schedule.duration * 1e9) - int(begin))
    return Found(
        speeds,
        threshold / n,
        len(windows),
        Fraction(max(windows)) / limit,
        int(schedule.staleness[schedule.applied].max()),
        threshold,
        float(np.mean(schedule.outcome[schedule.order >= 0] == Outcome.DROPPED)),
    )


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(__doc__ or "", given, clusters=1000)
    report = Report(
        "ringmaster_time",
        "Ringmaster ASGD's bound on time",
        "Maranjyan, Tyurin, Richtárik, *Ringmaster ASGD: The First Asynchronous SGD "
        "with Optimal Time Complexity*, 2025, arXiv 2501.16168, Lemma 4.1",
        options,
    )
    clusters = min(options.clusters, 60) if options.quick else options.clusters
    families = list(SPEEDS)
    found: list[Found] = []
    for seed in range(options.seeds):
        random = np.random.default_rng(seed)
        for i in range(clusters):
            found.append(measured(families[i % len(families)], random))
        report.progress(f"seed {seed}: {clusters} clusters")

    axes = report.figure.subplots()
    rows = []
    for speeds in families:
        some = [each for each in found if each.speeds == speeds]
        longest = [float(each.longest) for each in some]
        axes.semilogx(
            [each.ratio for each in some],
            longest,
            ".",
            ms=3,
            label=speeds,
            rasterized=True,
        )
        dropped = [100 * each.dropped for each in some]
        rows.append([speeds, len(some), spread(longest, 2), spread(dropped, 0)])
    axes.axhline(1.0, color="black", lw=1)
    axes.set(
        xlabel="delay threshold R / number of workers",
        ylabel="longest time of R updates / t(R)",
        ylim=(0, 1.05),
    )
    axes.legend(frameon=False)
    report.table(
        "Random clusters of 1 to 64 workers; median, smallest and largest of the "
        "clusters",
        ["seconds of a gradient", "clusters", "longest window / t(R)", "dropped, %"],
        rows,
    )

    windows = sum(each.windows for each in found)
    broken = sum(each.longest > 1 for each in found)
    worst = float(max(each.longest for each in found))
    report.claim(
        "Any R consecutive updates take at most t(R), for all speeds",
        "0 exceptions",
        f"{broken} exceptions in {len(found):,} clusters with {windows:,} windows; the "
        f"longest takes {worst:.3f} t(R)",
        "reproduced" if broken == 0 else "not reproduced",
        "" if broken == 0 else "some windows are longer",
    )
    late = sum(each.delay >= each.threshold for each in found)
    report.claim(
        "No applied gradient has a delay of R or more",
        "0 exceptions",
        f"{late} exceptions in {len(found):,} clusters",
        "reproduced" if late == 0 else "not reproduced",
        "" if late == 0 else "some gradients are older",
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
