"""Goodput under failures: synchronous, with a quorum, asynchronous, Decoupled DiLoCo.

Decoupled DiLoCo (Douillard et al., *Decoupled DiLoCo for Resilient Distributed
Pre-training*, 2026, arXiv 2604.21428) divides a cluster into learners that fail by
themselves. Under many failures it reports a goodput of 88 %, where data parallel
training has 27 %.

By schedules alone, without training:

- 64 workers whose mean time between failures goes from ten minutes to a day: rounds
  of all workers, of a quorum, and no rounds. Goodput is the fraction of all local
  steps that could be made that are in the center.
- A cluster that one failure stops, divided into 1 to 32 learners, with the rounds of
  Decoupled DiLoCo. Restarts take the time for which one learner alone has 27 %.
- 64 workers whose center fails, with a journal and without: schedules have no failures
  of the center, so these are put into one afterwards.

    python examples/reproduce/goodput.py

It takes about two minutes of one core. Not repeated here: the real restart times, which
the abstract and summaries that were read do not give; learners that shrink when they
lose a part of their chips; and the losses of trained models.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from report import Report, arguments, spread

import agn_optax
from agn_optax import simulate
from agn_optax.center import Asynchronous, Limits, Mode, Synchronous, decoupled_diloco

# Values of an axis, and the goodput there by name: [values, seeds].
Curves = tuple[Sequence[float], dict[str, np.ndarray]]

NO_FAILURES = simulate.Failures()
STEP = 1.0  # s, median of a local step
SIGMA = 0.1  # of its logarithm
PERIOD = 24  # local steps
DELAY = 4  # local steps between sending a fragment and adopting it
DOWN = 120.0  # s from a failure until the worker joins again
LEASE = 10.0  # s until the center takes a silent worker for gone
MINUTES = (10, 30, 100, 300, 1440)  # mean time between the failures of a worker
LEARNERS = (1, 2, 4, 8, 16, 32)
MONOLITHIC = 0.27  # goodput of data parallel training in the source
DECOUPLED = 0.88  # of Decoupled DiLoCo
BETWEEN = 100.0  # s between two failures anywhere in the divided cluster
CENTER_MINUTES = (30, 60, 240, 1440)  # mean time between the failures of a center
CENTER_DOWN = 60.0  # s from the failure of a center until it serves again
SNAPSHOTS = 600.0  # s between two checkpoints of a center without a journal


def cluster(
    workers: int, failures: simulate.Failures = NO_FAILURES
) -> simulate.Cluster:
    """Return workers with steps of about `STEP` seconds."""
    speed = simulate.LogNormal(STEP, sigma=SIGMA)
    return simulate.Cluster(workers=workers, speed=speed, failures=failures)


def possible(workers: int) -> float:
    """Return the local steps that workers can make in a second."""
    return workers / (STEP * math.exp(SIGMA**2 / 2))


def goodput(
    workers: int,
    mode: Mode,
    *,
    every: float,
    down: float,
    seconds: float,
    seed: int,
    period: int = PERIOD,
    **settings: Any,
) -> float:
    """Return the fraction of all possible local steps that the center got.

    Args:
      workers: number of workers.
      mode: mode of the center.
      every: mean seconds between the failures of a worker.
      down: seconds until a failed worker joins again.
      seconds: simulated seconds.
      seed: seed of the simulation.
      period: local steps between two exchanges.
      **settings: further arguments of `agn_optax.simulate.schedule`.
    """
    found = simulate.schedule(
        cluster(workers, simulate.Failures(every=every, down=down)),
        period=period,
        mode=mode,
        limits=Limits(lease=LEASE),
        seconds=seconds,
        seed=seed,
        **settings,
    )
    return found.goodput / possible(workers)


def by_failures(
    minutes: Sequence[float], workers: int, seconds: float, seeds: int
) -> dict[str, np.ndarray]:
    """Return the goodput by mode: [minutes, seeds]."""
    # More than the difference between the rounds of a fast and of a slow worker.
    quorum = Synchronous(quorum=workers * 3 // 4, grace=0.5 * PERIOD * STEP)
    modes: dict[str, Mode] = {
        "rounds of all": Synchronous(),
        "rounds of a quorum of 75 %": quorum,
        "asynchronous": Asynchronous(),
    }
    return {
        name: np.array(
            [
                [
                    goodput(
                        workers,
                        mode,
                        every=60.0 * each,
                        down=DOWN,
                        seconds=seconds,
                        seed=seed,
                    )
                    for seed in range(seeds)
                ]
                for each in minutes
            ]
        )
        for name, mode in modes.items()
    }


def restart_time() -> float:
    """Return the seconds of a restart with which one learner has `MONOLITHIC`.

    It works for `BETWEEN` seconds on average, and then the round in progress is lost.
    """
    round_time = PERIOD * STEP
    delivered = round_time / math.expm1(round_time / BETWEEN)
    return delivered / MONOLITHIC - BETWEEN


def by_learners(
    learners: Sequence[int], seconds: float, seeds: int
) -> dict[str, np.ndarray]:
    """Return the goodput of Decoupled DiLoCo, and without rounds: [learners, seeds]."""
    fragments = agn_optax.Fragments(2, delay=DELAY)
    rounds = decoupled_diloco(fragments, quorum=1).mode
    parts: dict[str, Any] = {"fragments": fragments, "patience": PERIOD}
    return {
        name: np.array(
            [
                [
                    goodput(
                        count,
                        mode,
                        every=BETWEEN * count,
                        down=restart_time(),
                        seconds=seconds,
                        seed=seed,
                        **settings,
                    )
                    for seed in range(seeds)
                ]
                for count in learners
            ]
        )
        for name, mode, settings in (
            ("Decoupled DiLoCo", rounds, parts),
            ("without rounds", Asynchronous(), {}),
        )
    }


def with_failing_center(
    found: simulate.Schedule, failures: Sequence[float] | np.ndarray, snapshots: float
) -> tuple[float, float]:
    """Return the local steps per second with a journal, and without.

    The times of the schedule are those in which the center is there. All workers wait
    for a center that is down. With a journal it goes on where it was. Without one it
    goes on from its last snapshot: messages since then are lost, and so are those of
    rounds in progress, whose anchor is not there any more.

    Args:
      found: a schedule without failures of the center.
      failures: times of its failures, s.
      snapshots: seconds between two snapshots of a center without a journal.
    """
    applied = found.applied
    steps, began = found.steps[applied], found.began[applied] / 1e9
    settled = found.settled[applied] / 1e9
    is_lost = np.zeros(len(applied), bool)
    for failure in failures:
        snapshot = failure // snapshots * snapshots
        is_lost |= (settled > snapshot) & (began <= failure)
    seconds = found.duration + CENTER_DOWN * len(failures)
    return steps.sum() / seconds, steps[~is_lost].sum() / seconds


def by_center_failures(
    minutes: Sequence[float], workers: int, seconds: float, seeds: int
) -> dict[str, np.ndarray]:
    """Return the goodput with a journal and without: [minutes, seeds]."""
    journal, none = np.zeros((2, len(minutes), seeds))
    for seed in range(seeds):
        found = simulate.schedule(
            cluster(workers), period=PERIOD, seconds=seconds, seed=seed
        )
        for i, each in enumerate(minutes):
            times = np.cumsum(
                np.random.default_rng(seed).exponential(60.0 * each, size=10_000)
            )
            both = with_failing_center(found, times[times < seconds], SNAPSHOTS)
            journal[i, seed], none[i, seed] = np.array(both) / possible(workers)
    return {"with a journal": journal, "without": none}


def main(given: Sequence[str] | None = None) -> int:
    """Simulate the schedules, and report the goodput."""
    options = arguments(__doc__, given)
    report = Report(
        "goodput",
        "Goodput under failures",
        "Arthur Douillard et al., *Decoupled DiLoCo for Resilient Distributed "
        "Pre-training*, 2026, arXiv 2604.21428",
        options,
    )
    minutes = MINUTES[::2] if options.quick else MINUTES
    workers, hours = (16, 1) if options.quick else (64, 8)
    learners = LEARNERS[::3] if options.quick else LEARNERS
    report.progress("workers that fail, by mode")
    modes = by_failures(minutes, workers, 3600.0 * hours, options.seeds)
    report.progress("a cluster in learners")
    divided = by_learners(learners, 3600.0 * hours, options.seeds)
    report.progress("a center that fails")
    of_center = CENTER_MINUTES[::2] if options.quick else CENTER_MINUTES
    centers = by_center_failures(of_center, workers, 3600.0 * hours, options.seeds)

    draw(report, (minutes, modes), (learners, divided))
    report.table(
        f"Goodput of {workers} workers with restarts of {DOWN:g} s",
        ["minutes between failures", *modes],
        (
            [each, *(spread(values[i]) for values in modes.values())]
            for i, each in enumerate(minutes)
        ),
    )
    report.table(
        f"Goodput of a cluster with a failure every {BETWEEN:g} s and restarts of "
        f"{restart_time():.0f} s, by its number of learners",
        ["learners", *divided],
        (
            [count, *(spread(values[i]) for values in divided.values())]
            for i, count in enumerate(learners)
        ),
    )
    report.table(
        f"Goodput of {workers} asynchronous workers whose center fails and is back "
        f"{CENTER_DOWN:g} s later, without a journal from a snapshot of every "
        f"{SNAPSHOTS / 60:g} minutes",
        ["minutes between failures", *centers],
        (
            [each, *(spread(values[i]) for values in centers.values())]
            for i, each in enumerate(of_center)
        ),
    )
    claim_goodput(report, learners, divided["Decoupled DiLoCo"])
    return report.finish()


def draw(report: Report, by_minutes: Curves, by_learners: Curves) -> None:
    """Draw the curves of both clusters: medians, with the range of the seeds."""
    left, right = report.figure.subplots(1, 2)
    for axes, (x, found) in ((left, by_minutes), (right, by_learners)):
        for name, values in found.items():
            axes.plot(x, np.median(values, axis=1), marker="o", label=name)
            axes.fill_between(x, values.min(axis=1), values.max(axis=1), alpha=0.2)
        axes.set(xscale="log", ylim=(0, 1), ylabel="goodput")
        axes.legend()
    left.set_xlabel("minutes between failures of a worker")
    right.set_xlabel("learners")
    right.set_xticks(by_learners[0], map(str, by_learners[0]))
    right.minorticks_off()
    for level in (MONOLITHIC, DECOUPLED):
        right.axhline(level, color="grey", linestyle=":")


def claim_goodput(report: Report, learners: Sequence[int], found: np.ndarray) -> None:
    """Compare the curve over the number of learners with the source."""
    middle = np.median(found, axis=1)
    grows = bool((np.diff(middle) > 0).all())
    report.claim(
        "More learners lose less to the same failures",
        "goodput grows with the number of learners",
        ", ".join(
            f"{n}: {spread(each, 2)}" for n, each in zip(learners, found, strict=True)
        ),
        "reproduced" if grows else "not reproduced",
        "" if grows else "the medians do not grow",
    )
    reached = [n for n, each in zip(learners, middle, strict=True) if each >= DECOUPLED]
    report.claim(
        "Under failures that leave data parallel training 27 %, Decoupled DiLoCo has "
        "88 %",
        "0.27 and 0.88",
        f"{spread(found[0], 2)} with {learners[0]} learner; 0.88 is reached with "
        f"{reached[0] if reached else 'none of these numbers of'} learners",
        "in part" if reached else "not reproduced",
        "the restart time is chosen for the 27 %, and local steps since the last "
        "message are lost with a failure; the source's restart times, and its number "
        "of learners, could not be read",
    )


if __name__ == "__main__":
    sys.exit(main())
