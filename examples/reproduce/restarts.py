"""Restarts of the center's momentum: which learning rates and momenta are stable?

Topollai, Ma, Dimlioglu, Tay and Choromanska, *Outer-Momentum Restarting in
High-Dimensional Two-Phase Optimization*, 2026 (arXiv 2605.28585), reset the momentum of
DiLoCo's center periodically. On a squared loss each mode of the data goes on by itself.
With the curvature k, h local steps of gradient descent at rate r go a part s of the way
to the solution, s = 1 - (1 - r k)^h, and a round of a center with the rate e and
Nesterov momentum m is linear in the error x and the momentum v:

    v' = m v + s x,    x' = x - e (s x + m v')

Between two restarts the error is thus multiplied by a number that depends on s, e, m
and the number of rounds. The first part of this program measures these numbers with a
real center. The second part trains linear regression on noisy data with all pairs of 8
learning rates and 9 momenta, with periods 5, 20 and 80, four workers and 4,000 local
steps of each. The rates and momenta of the center optimizer are arrays, so that one run
trains all pairs.

The source saw wider ranges in language models, which are not trained here.
Takes about one and a half minutes on one core.

    python examples/reproduce/restarts.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import Report, arguments, spread

from agn_optax import center_optimizers, rules, simulate
from agn_optax.center import Synchronous

ETAS = np.array([0.1, 0.2, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0], np.float32)
MOMENTA = np.array([0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0, 1.02], np.float32)
PERIODS: tuple[int, ...] = (5, 20, 80)
RESTARTS: tuple[int | None, ...] = (None, 20, 10, 5)  # rounds
WORKERS, BATCH = 4, 4
CURVATURES = 1 / np.arange(1, 33, dtype=np.float32)  # eigenvalues of the covariance
RATE = 0.1  # of local steps
NOISE = 0.5  # standard deviation of the labels around their mean
STEPS = 4000  # local steps of each worker
GOOD = 0.01  # a pair is good if this share of the excess loss is left
EVERY = 10  # rounds between restarts, in the claims and the picture
DIVERGED = 1e6  # a pair whose loss is above this gets no more gradients

Loss = Callable[[jax.Array, Any], jax.Array]
Data = Callable[[Any, Any], Any]


def outer(etas: Any, momenta: Any, every: int | None) -> optax.GradientTransformation:
    """Return Nesterov momentum for the center, with restarts or without."""
    nesterov = optax.sgd(etas, momenta, nesterov=True)
    if every is None:
        return nesterov
    return center_optimizers.restart_momentum(nesterov, every)


def trained(
    center: optax.GradientTransformation,
    loss: Loss,
    data: Data,
    params: jax.Array,
    *,
    period: int,
    rounds: int,
    workers: int = WORKERS,
) -> np.ndarray:
    """Return the center's parameters after a number of rounds."""
    found = simulate.run(
        rules.diloco(center),
        optax.sgd(RATE),
        loss,
        data,
        params,
        cluster=simulate.Cluster(workers=workers, speed=simulate.Fixed(0.01)),
        mode=Synchronous(),
        period=period,
        exchanges=workers * rounds,
    )
    return np.asarray(found.params)


def steps_to_solution(period: int) -> np.ndarray:
    """Return for each mode which part of the way the local steps of a round go."""
    return 1 - (1 - RATE * CURVATURES.astype(float)) ** period


def matrix(x: float, momentum: float) -> np.ndarray:
    """Return the matrix of a round, for the error and for e times the momentum.

    Args:
      x: e s, the learning rate times the part of the way.
      momentum: the momentum.
    """
    return np.array([[1 - x * (1 + momentum), -(momentum**2)], [x, momentum]])


def contraction(x: float, momentum: float, every: int | None) -> float:
    """Return by what a mode's error is multiplied in a round, on average, at last."""
    one = matrix(x, momentum)
    if every is None:
        return float(np.abs(np.linalg.eigvals(one)).max())
    return float(abs(np.linalg.matrix_power(one, every)[0, 0]) ** (1 / every))


def largest(momentum: float, every: int | None) -> float:
    """Return the e s below which all modes become smaller."""
    grid = np.arange(0.005, 4, 0.005)
    unstable = [contraction(x, momentum, every) >= 1 for x in grid]
    return float(grid[np.argmax(unstable)]) if any(unstable) else float("inf")


def measured_contractions(
    etas: np.ndarray, momentum: float, every: int, period: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Return e s of all modes and rates, and what is left of the error at a restart."""

    def loss(params: jax.Array, batch: Any) -> jax.Array:
        return 0.5 * jnp.sum(CURVATURES * params**2) + 0 * jnp.sum(batch)

    params = jnp.ones((len(etas), len(CURVATURES)))
    left = trained(
        outer(etas[:, None], momentum, every),
        loss,
        lambda worker, step: jnp.zeros(1),
        params,
        period=period,
        rounds=every,
        workers=1,
    )
    return etas[:, None] * steps_to_solution(period), left


def regression(seeds: int) -> tuple[Loss, Data, Callable[[Any], np.ndarray]]:
    """Return the loss, the batches and the excess loss of linear regression.

    Parameters have the axes seed, pair of a rate and a momentum, feature.
    """
    scales = jnp.sqrt(CURVATURES)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    solution = jax.vmap(lambda key: jax.random.normal(key, scales.shape))(keys)

    def data(worker: Any, step: Any) -> tuple[jax.Array, jax.Array]:
        def of_seed(key: jax.Array, solution: jax.Array) -> Any:
            key = jax.random.fold_in(jax.random.fold_in(key, 1 + worker), step)
            x = scales * jax.random.normal(key, (BATCH, len(scales)))
            noise = jax.random.normal(jax.random.fold_in(key, 1), (BATCH,))
            return x, x @ solution + NOISE * noise

        return jax.vmap(of_seed)(keys, solution)

    def loss(params: jax.Array, batch: Any) -> jax.Array:
        x, y = batch
        error = jnp.einsum("spf,sbf->spb", params, x) - y[:, None]
        each = 0.5 * jnp.mean(error**2, -1)
        return jnp.sum(jnp.where(each < DIVERGED, each, 0.0))

    def excess(params: Any) -> np.ndarray:
        error = np.asarray(params, float) - np.asarray(solution)[:, None]
        return 0.5 * (CURVATURES * error**2).sum(-1)

    return loss, data, excess


def compare_contractions(report: Report, quick: bool) -> None:
    """Measure what is left of each mode at a restart, beside the matrix's power."""
    worst = 0.0
    points = []
    for every in (5,) if quick else (5, 10, 20):
        x, left = measured_contractions(ETAS, 0.9, every)
        wanted = np.vectorize(
            lambda x, every=every: np.linalg.matrix_power(matrix(x, 0.9), every)[0, 0]
        )(x)
        error = np.abs(left - wanted) / np.maximum(1, np.abs(wanted))
        worst = max(worst, float(error.max()))
        points.append((every, x.ravel(), np.abs(left.ravel()) ** (1 / every)))
    report.claim(
        "Between two restarts each mode of a squared loss is multiplied by a number "
        "that the effective spectrum, the rate and the momentum give",
        "a formula for each mode; toy experiments agree with it",
        f"the upper left element of the matrix of a round, to the power of the rounds; "
        f"a real center differs by at most {worst:.0e}",
        "reproduced" if worst < 1e-4 else "not reproduced",
        "" if worst < 1e-4 else "the center does not follow the matrix",
    )
    axis = report.figure.add_subplot(1, 3, 3)
    xs = np.linspace(0.01, 1.6, 200)
    for color, (every, x, left) in enumerate(points):
        axis.plot(
            xs, [contraction(x, 0.9, every) for x in xs], f"C{color}", label=f"{every}"
        )
        axis.plot(x, left, f"C{color}.", markersize=3)
    axis.plot(xs, [contraction(x, 0.9, None) for x in xs], "k", label="never")
    axis.set(xlim=(0, 1.5), ylim=(0, 1.2))
    axis.set_xlabel("rate times part of the way", fontsize=9)
    axis.set_title("error left in a round,\nmomentum 0.9", fontsize=9)
    axis.legend(title="restart", fontsize=7, title_fontsize=7)


def compare_ranges(report: Report, options: Any) -> None:
    """Train all pairs of rates and momenta, with restarts and without."""
    periods, restarts = (PERIODS, RESTARTS)
    if options.quick:
        periods, restarts = (20,), (None, EVERY)
    loss, data, excess = regression(options.seeds)
    etas, momenta = (
        np.asarray(each).ravel() for each in np.meshgrid(ETAS, MOMENTA, indexing="ij")
    )
    start = jnp.zeros((options.seeds, len(etas), len(CURVATURES)))
    first = excess(start)[:, 0]
    found = {}
    for period in periods:
        for every in restarts:
            center = outer(etas[:, None], momenta[:, None], every)
            rounds = STEPS // period
            params = trained(center, loss, data, start, period=period, rounds=rounds)
            last = excess(params)
            found[period, every] = last.reshape(len(last), len(ETAS), len(MOMENTA))
            report.progress(f"period {period}, restarts every {every} rounds")
    describe(report, found, first, periods, restarts)


def describe(
    report: Report,
    found: dict[Any, np.ndarray],
    first: np.ndarray,
    periods: Sequence[int],
    restarts: Sequence[int | None],
) -> None:
    """Add the tables, the claims and the picture of the second part."""
    pairs = len(ETAS) * len(MOMENTA)
    share = {key: last / first[:, None, None] for key, last in found.items()}
    good = {key: (each < GOOD).sum((1, 2)) for key, each in share.items()}
    lost = {
        key: (each[:, :, MOMENTA < 1] > 1).sum((1, 2)) for key, each in share.items()
    }
    report.table(
        f"Linear regression, {STEPS} local steps of each worker: excess loss at the "
        f"end, relative to the first, of {pairs} pairs of a learning rate and a "
        "momentum of the center",
        [
            "period",
            "restarts, rounds",
            "best pair, %",
            "median pair, %",
            f"pairs below {100 * GOOD:.0f} %",
            "pairs above 100 %, momentum below 1",
        ],
        [
            [
                period,
                every or "never",
                spread(100 * share[period, every].min((1, 2))),
                spread(100 * np.median(share[period, every], (1, 2))),
                spread(good[period, every], 0),
                spread(lost[period, every], 0),
            ]
            for period in periods
            for every in restarts
        ],
    )
    wider = [(good[p, EVERY] > good[p, None]).all() for p in periods]
    report.claim(
        "Restarts widen the stable range of momenta, whatever the period",
        "seen in language models at all periods",
        f"of {pairs} pairs end below {100 * GOOD:.0f} % of the first loss: "
        + "; ".join(
            f"period {p}: {spread(good[p, None], 0)}, with restarts every {EVERY} "
            f"rounds {spread(good[p, EVERY], 0)}"
            for p in periods
        ),
        "reproduced" if all(wider) else "in part" if any(wider) else "not reproduced",
        "" if all(wider) else f"for all seeds at {sum(wider)} of {len(wider)} periods",
    )
    fewer = [(lost[p, EVERY] < lost[p, None]).all() for p in periods]
    limits = [largest(0.9, every) for every in (None, EVERY)]
    report.claim(
        "Restarts widen the stable range of learning rates, whatever the period",
        "seen in language models at all periods",
        f"of {len(ETAS) * (MOMENTA < 1).sum()} pairs with a momentum below 1 diverge: "
        + "; ".join(
            f"period {p}: {spread(lost[p, None], 0)}, with restarts every {EVERY} "
            f"rounds {spread(lost[p, EVERY], 0)}"
            for p in periods
        ),
        "reproduced" if all(fewer) else "in part" if any(fewer) else "not reproduced",
        ""
        if all(fewer)
        else "a squared loss has another limit: with momentum 0.9 the learning rate "
        f"times the part of the way may be {limits[0]:.2f}, and {limits[1]:.2f} with "
        "restarts",
    )
    draw(report, found, periods[len(periods) // 2], EVERY)


def draw(report: Report, found: dict[Any, np.ndarray], period: int, every: int) -> None:
    """Draw the last losses of all pairs without restarts and with them."""
    for place, restart in enumerate((None, every)):
        axis = report.figure.add_subplot(1, 3, 1 + place)
        last = np.median(found[period, restart], 0)
        image = axis.imshow(
            np.log10(last), origin="lower", aspect="auto", vmin=-3.5, vmax=0.5
        )
        axis.set_xticks(range(len(MOMENTA)), [f"{m:g}" for m in MOMENTA], rotation=90)
        axis.set_yticks(range(len(ETAS)), [f"{e:g}" for e in ETAS])
        axis.tick_params(labelsize=7)
        words = f"every {restart} rounds" if restart else "never"
        axis.set_title(f"restarts {words},\nperiod {period}", fontsize=9)
        axis.set(xlabel="momentum", ylabel="learning rate" if not place else "")
    bar = report.figure.colorbar(image, ax=report.figure.axes[-2:], shrink=0.8)
    bar.set_label("log10 of the excess loss", fontsize=8)


def main(given: Sequence[str] | None = None) -> int:
    """Measure contractions and stable ranges."""
    options = arguments(__doc__ or "", given)
    report = Report(
        "restarts",
        "Restarts of the center's momentum",
        "Topollai, Ma, Dimlioglu, Tay, Choromanska, *Outer-Momentum Restarting in "
        "High-Dimensional Two-Phase Optimization*, 2026 (arXiv 2605.28585), the "
        "abstract",
        options,
    )
    compare_ranges(report, options)
    compare_contractions(report, options.quick)
    report.table(
        "Largest stable product of learning rate and part of the way, by the formula",
        ["momentum", *(f"restarts {e or 'never'}" for e in RESTARTS)],
        [
            [f"{m:g}", *(f"{largest(float(m), e):.2f}" for e in RESTARTS)]
            for m in MOMENTA
        ],
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
