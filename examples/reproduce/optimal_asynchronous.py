"""Time-optimal asynchronous SGD: four methods and rounds on a noisy quadratic.

The function is that of these papers, f(x) = x^T A x / 2 - b^T x in 1,000 dimensions,
with A = tridiag(-1, 2, -1) / 4 and b = (-1, 0, ..., 0) / 4. A gradient has normal noise
of 0.03 in each element, so its variance is sigma^2 = 0.9. 100 workers with the same
data send one gradient per exchange, and the goal is |grad f|^2 <= epsilon = 0.045.
Noise and goal are this program's.

Ringmaster (Maranjyan, Tyurin, Richtárik, 2025, arXiv 2501.16168) and Rennala (Tyurin,
Richtárik, 2023, arXiv 2305.12387) take a time that is optimal up to a constant,

    K u,  u = min over m of (1/m sum_{i <= m} 1/tau_i)^-1 (1 + R/m),  R = sigma^2 / eps,

whatever the seconds tau_1 <= ... <= tau_n of the workers' gradients: equal,
sqrt(i + 1), or heavy-tailed, (n / i)^(1 / 0.7) for the i-th slowest. K depends on the
function and epsilon alone. Ringleader (Maranjyan, Richtárik, 2025, arXiv 2509.22860) is
optimal for unlike data, for which every worker must be heard, and is here beside them
on data that is alike.

R (also Rennala's batch) is 20, ceil(sigma^2 / epsilon). Each method has the best of the
learning rates 3/2, 3/4, 3/8, ... of seed 0, for each of the speeds; then three seeds of
noise are run with it, for at most 8,000 gradients. Times are those of every 20th
version of the center. The full program takes about two minutes of one core. Only
abstracts and the bound on time were read of the sources, so the claims are those of
their theorems, and their plots are not compared.

    python examples/reproduce/optimal_asynchronous.py
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import Report, arguments, spread

from agn_optax import center_optimizers, rules, simulate
from agn_optax.center import Asynchronous, BoundedStaleness, Mode, Synchronous

NOISE, EPSILON = 0.03, 0.045
DIVERGED = 2.0  # |grad f|^2, relative to the first one
RATES = [1.5 * 2.0**-i for i in range(12)]
INNER = optax.sgd(1.0)  # the rate is a factor of the loss
LIMIT = 8_000  # exchanges, after which a run ends


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of the comparison."""

    name: str
    rule: rules.Rule
    mode: Mode = Asynchronous()  # noqa: RUF009 it is immutable
    versions_per_gradient: bool = True  # False: a version is a round of all workers


def methods(workers: int, dimension: int) -> list[Method]:
    """Return the methods, Ringmaster first."""
    size = math.ceil(dimension * NOISE**2 / EPSILON)

    def rule(name: str, optimizer: Any) -> rules.Rule:
        return dataclasses.replace(rules.downpour(), name=name, center=optimizer)

    sgd = optax.sgd(1.0)
    rennala = center_optimizers.rennala(sgd, size)
    ringleader = center_optimizers.ringleader(sgd, workers)
    return [
        Method("Ringmaster", rules.downpour(), BoundedStaleness(versions=size - 1)),
        Method("Rennala", rule("rennala", rennala)),
        Method("asynchronous SGD", rules.downpour()),
        Method("rounds", rules.average(), Synchronous(), versions_per_gradient=False),
        Method("Ringleader", rule("ringleader", ringleader)),
    ]


def speeds(workers: int) -> dict[str, np.ndarray]:
    """Return the seconds of a gradient, [workers] in increasing order, by name."""
    i = np.arange(workers)
    return {
        "equal": np.ones(workers),
        "sqrt(i + 1)": np.sqrt(i + 1),
        "heavy-tailed": (workers / (workers - i)) ** (1 / 0.7),
    }


def beginning(dimension: int) -> jax.Array:
    """Return the first parameters."""
    return jnp.zeros(dimension).at[0].set(math.sqrt(dimension))


def gradient(x: jax.Array) -> jax.Array:
    """Return the exact gradient of f."""
    padded = jnp.pad(x, 1)
    return ((2 * x - padded[:-2] - padded[2:]).at[0].add(1.0)) / 4


def loss(params: Any, batch: jax.Array) -> jax.Array:
    """Return a function whose gradient is the noisy one of f, times the learning rate.

    Rate, noise and seed are leaves without a gradient: one program serves all runs.
    """
    fixed = jax.lax.stop_gradient(params)
    key = jax.random.key(fixed["seed"].astype(jnp.int32))
    key = jax.random.fold_in(jax.random.fold_in(key, batch[0]), batch[1])
    noise = fixed["noise"] * jax.random.normal(key, params["x"].shape)
    return fixed["rate"] * params["x"] @ (gradient(fixed["x"]) + noise)


def data(worker: Any, step: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(worker, jnp.int32), jnp.asarray(step, jnp.int32)])


def distance(params: Any) -> jax.Array:
    """Return |grad f|^2, or -1 if the run has diverged, which ends it."""
    x = params["x"]
    found = jnp.sum(gradient(x) ** 2)
    first = jnp.sum(gradient(beginning(len(x))) ** 2)
    return jnp.where(found < DIVERGED * first, found, -1.0)  # False for NaN, too


class Found(NamedTuple):
    """A run."""

    seconds: float  # until epsilon; infinite if it was not reached
    traces: simulate.Traces

    @property
    def has_diverged(self) -> bool:
        """True if the rate is too large."""
        values = self.traces.evaluations
        return bool(len(values) and (values[-1] < 0 or values[-1] > values[0]))


def run(
    method: Method,
    times: np.ndarray,
    rate: float,
    *,
    dimension: int,
    seed: int,
    seconds: float | None = None,
    noise: float = NOISE,
    goal: float = EPSILON,
    exchanges: int = LIMIT,
) -> Found:
    """Run a method until a goal, or for some simulated seconds or exchanges."""
    workers = len(times)
    found = simulate.run(
        method.rule,
        INNER,
        loss,
        data,
        {
            "x": beginning(dimension),
            "rate": jnp.float32(rate),
            "noise": jnp.float32(noise),
            "seed": jnp.float32(seed),
        },
        cluster=simulate.Cluster(
            workers=workers, speed=[simulate.Fixed(each) for each in times]
        ),
        period=1,
        mode=method.mode,
        exchanges=exchanges,
        seconds=seconds,
        evaluate=distance,
        every=max(1, workers // 5) if method.versions_per_gradient else 1,
        target=goal,
    )
    values = found.evaluations
    reached = bool(len(values)) and 0 <= values[-1] <= goal
    return Found(found.evaluation_seconds[-1] if reached else math.inf, found)


def tuned(method: Method, times: np.ndarray, **settings: Any) -> float | None:
    """Return the rate with the shortest time of seed 0, None if none reaches the goal.

    From the largest rate on, the next one is tried for as long as the best one took,
    until one is slower, or until two are too slow.
    """
    best, seconds, slow = None, None, 0
    for rate in RATES:
        found = run(method, times, rate, seconds=seconds, seed=0, **settings)
        if found.seconds < math.inf:
            best, seconds = rate, found.seconds
        elif best is not None:
            break
        elif not found.has_diverged:
            slow += 1
            if slow == 2:
                break
    return best


def unit(times: np.ndarray, threshold: int) -> float:
    """Return u, the unit of the optimal time."""
    m = np.arange(1, len(times) + 1)
    return float(np.min((m + threshold) / np.cumsum(1 / np.sort(times))))


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(__doc__ or "", given)
    report = Report(
        "optimal_asynchronous",
        "Optimal asynchronous SGD: time to a small gradient",
        "Maranjyan, Tyurin, Richtárik, *Ringmaster ASGD*, 2025, arXiv 2501.16168; "
        "Tyurin, Richtárik, *Optimal Time Complexities of Parallel Stochastic "
        "Optimization Methods Under a Fixed Computation Model*, 2023, arXiv "
        "2305.12387; "
        "Maranjyan, Richtárik, *Ringleader ASGD*, 2025, arXiv 2509.22860",
        options,
    )
    workers, dimension = (20, 200) if options.quick else (100, 1000)
    limit = 1500 if options.quick else LIMIT
    settings: dict[str, Any] = {"dimension": dimension, "exchanges": limit}
    threshold = math.ceil(dimension * NOISE**2 / EPSILON)
    compared = methods(workers, dimension)
    times_of = speeds(workers)
    found: dict[tuple[str, str], list[float]] = {}
    rows = []
    all_axes = report.figure.subplots(1, len(times_of), sharey=True)
    for axes, (name, times) in zip(all_axes, times_of.items(), strict=True):
        for method in compared:
            rate = tuned(method, times, **settings)
            seen = found[name, method.name] = []
            if rate is None:
                seen.append(math.inf)
                rows.append([name, method.name, "none", "not reached", f"{limit:,}"])
                report.progress(f"{name}, {method.name}: not reached")
                continue
            runs = [
                run(method, times, rate, seed=seed, **settings)
                for seed in range(options.seeds)
            ]
            seen.extend(each.seconds for each in runs)
            last = runs[0].traces
            axes.loglog(last.evaluation_seconds, last.evaluations, label=method.name)
            gradients = spread([float(len(each.traces)) for each in runs], 0)
            rows.append([name, method.name, f"{rate:.3g}", spread(seen, 1), gradients])
            report.progress(f"{name}, {method.name}: {spread(seen, 1)} s")
        axes.axhline(EPSILON, color="black", lw=0.8, ls=":")
        axes.set(title=name, xlabel="simulated seconds")
    all_axes[0].set_ylabel("squared norm of the gradient")
    lines = all_axes[0].get_legend_handles_labels()
    report.figure.legend(*lines, loc="outside lower center", ncols=5, frameon=False)
    report.table(
        f"Time until the squared norm of the gradient is at most {EPSILON}; "
        f"{workers} workers, median and range of {options.seeds} seeds",
        [
            "seconds of a gradient",
            "method",
            "learning rate",
            "seconds",
            "gradients sent",
        ],
        rows,
    )
    _judge(report, found, times_of, threshold)
    return report.finish()


def _judge(
    report: Report,
    found: dict[tuple[str, str], list[float]],
    times_of: dict[str, np.ndarray],
    threshold: int,
) -> None:
    """Add the claims."""

    def median(speed: str, method: str) -> float:
        return float(np.median(found[speed, method]))

    def shown(values: dict[str, float], digits: int) -> str:
        return ", ".join(
            f"{speed} {'not reached' if math.isinf(each) else f'{each:.{digits}f}'}"
            for speed, each in values.items()
        )

    for method in ("Ringmaster", "Rennala"):
        multiples = {
            speed: median(speed, method) / unit(times, threshold)
            for speed, times in times_of.items()
        }
        ratio = max(multiples.values()) / min(multiples.values())
        good = ratio <= 3
        report.claim(
            f"{method}'s time is optimal up to a constant: the same multiple of u for "
            "all speeds",
            "a constant K that the speeds do not change",
            f"multiples of u: {shown(multiples, 0)}; they differ by a factor of "
            f"{ratio:.2f}",
            "reproduced" if good else "not reproduced",
            "" if good else "the factor is more than 3",
        )
    for method, says in (
        (
            "asynchronous SGD",
            "Plain asynchronous SGD is not optimal: slow workers hold it up",
        ),
        ("rounds", "Rounds are not, because they wait for the slowest worker"),
    ):
        ratios = {
            speed: median(speed, method) / median(speed, "Ringmaster")
            for speed in times_of
        }
        grows = ratios["heavy-tailed"] > 2 * ratios["equal"]
        report.claim(
            says,
            "slower by a factor that grows with the spread of speeds",
            f"time, in units of Ringmaster's: {shown(ratios, 2)}",
            "reproduced" if grows else "not reproduced",
            ""
            if grows
            else "its late gradients are few and cost little, with a rate that is "
            "tuned for each of the speeds",
        )
    ratios = {
        speed: median(speed, "Ringleader") / float(np.max(times))
        for speed, times in times_of.items()
    }
    finite = [each for each in ratios.values() if math.isfinite(each)]
    good = len(finite) == len(ratios) and max(finite) <= 2 * min(finite)
    report.claim(
        "Ringleader needs every worker: its time is a number of gradients of the "
        "slowest one",
        "optimal for unlike data, for which every worker must be heard",
        f"gradients of the slowest worker: {shown(ratios, 0)}",
        "reproduced" if good else "in part",
        "" if good else "a run without a time was ended before its goal",
    )


if __name__ == "__main__":
    sys.exit(main())
