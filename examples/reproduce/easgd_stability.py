"""Stability of EASGD on a quadratic, with workers in turn, by its moving rate.

Zhang, Choromanska and LeCun (2015) find that it is stable if

    alpha <= (4 - 2 eta) / (4 - eta),    0 <= eta <= 2,

for any number of workers, if each worker in its turn takes gradient and elastic force
at the same point. This is a worker that exchanges before it applies its gradient. In
the usual order of a loop, step and then exchange, the force includes the step, and all
moving rates up to 1 are stable.

    python examples/reproduce/easgd_stability.py               # 1 minute

Zhang, Choromanska and LeCun, Deep learning with Elastic Averaging SGD, 2015, arXiv
1412.6651. Nothing is random, so there are no seeds.
"""

from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np
import optax
import report as reports

import agn_optax
from agn_optax import rules

BY = (-0.1, -0.05, -0.02, 0.02, 0.05)  # moving rates, from the bound


def distance(
    eta: float, alpha: float, workers: int, turns: int, *, late: bool
) -> float:
    """Return the center's distance from the minimum of x^2 / 2, after starting at 1.

    Args:
      eta: learning rate of the local steps.
      alpha: moving rate.
      workers: number of workers, which take turns, with an exchange in each turn.
      turns: total number of turns.
      late: whether the gradient is taken before the exchange and applied after it.
    """
    center = agn_optax.LocalCenter(rules.easgd(alpha), jnp.ones(1))
    crew = [agn_optax.Worker(center, optax.sgd(eta), period=1) for _ in range(workers)]
    loops = [worker.start() for worker in crew]
    for turn in range(turns):
        worker, (params, state) = crew[turn % workers], loops[turn % workers]
        gradient = params + 0.0  # a separate buffer, because exchanges donate params
        if late:
            params, state = worker.exchange(params, state)
        updates, state = worker.tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        if not late:
            params, state = worker.exchange(params, state)
        loops[turn % workers] = params, state
    return float(jnp.abs(center.pull().params[0]))


def bound(eta: float) -> float:
    """Return the largest stable moving rate."""
    return (4 - 2 * eta) / (4 - eta)


def main(given: list[str] | None = None) -> int:
    """Measure distances just below and above the bound."""
    options = reports.arguments(
        __doc__ or "",
        given,
        etas="0.5,1.0,1.5",  # learning rates
        turns=300,  # turns of all workers together
    )
    options.seeds = 0
    if options.quick:
        options.etas = "1.0"
    report = reports.Report(
        "easgd_stability",
        "Stability of EASGD",
        "Zhang, Choromanska and LeCun, Deep learning with Elastic Averaging SGD, 2015, "
        "arXiv 1412.6651",
        options,
    )
    found = {}  # (eta, workers, late) -> distances, for each of BY
    for eta in map(float, options.etas.split(",")):
        for workers in (1, 3):
            for late in (True, False):
                report.progress(f"eta {eta}, {workers} workers, late {late}")
                rates = [bound(eta) + by for by in BY]
                found[eta, workers, late] = np.array(
                    [distance(eta, a, workers, options.turns, late=late) for a in rates]
                )
    report.table(
        f"Distance of the center from the minimum after {options.turns} turns, from 1, "
        "by the moving rate",
        ["η", "workers", "bound", "order", *(f"bound {by:+.2f}" for by in BY)],
        [
            [
                eta,
                workers,
                f"{bound(eta):.3f}",
                "gradient, exchange, step" if late else "step, exchange",
                *(f"{each:.1e}" for each in distances),
            ]
            for (eta, workers, late), distances in found.items()
        ],
    )
    below = max(d[BY.index(-0.05)] for (_, _, late), d in found.items() if late)
    above = min(d[BY.index(0.05)] for (_, _, late), d in found.items() if late)
    holds = below < 1e-3 and above > 1e2
    report.claim(
        "Workers in turn are stable up to this moving rate, however many they are",
        "(4 - 2η) / (4 - η)",
        f"for 1 and 3 workers and η = {options.etas}: 0.05 below, all distances fall "
        f"from 1 to at most {below:.0e}; 0.05 above, all grow to at least {above:.0e}",
        "reproduced" if holds else "not reproduced",
        "" if holds else "the distances do not part at the bound",
    )
    axes = report.figure.subplots()
    for (eta, workers, late), distances in found.items():
        if workers == 3:
            label = f"η = {eta}, " + ("exchange, then step" if late else "step first")
            shown = np.maximum(distances, 1e-12)
            axes.semilogy(BY, shown, "o-" if late else "x--", label=label)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(
        xlabel="moving rate, from (4 - 2η) / (4 - η)",
        ylabel=f"distance after {options.turns} turns",
        title="3 workers",
    )
    report.figure.legend(loc="outside right center", fontsize="small")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
