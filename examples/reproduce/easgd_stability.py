"""Stability of EASGD on a quadratic, with workers in turn, by its moving rate.

Zhang, Choromanska and LeCun (2015) find that it is stable if

    alpha <= (4 - 2 eta) / (4 - eta),    0 <= eta <= 2,

for any number of workers, if each worker in its turn takes gradient and elastic force
at the same point. This is a worker that exchanges before it applies its gradient. In
the usual order of a loop, step and then exchange, the force includes the step, and all
moving rates up to 1 are stable.

    python examples/reproduce/easgd_stability.py
"""

from __future__ import annotations

import argparse

import jax.numpy as jnp
import optax

import agn_optax
from agn_optax import rules


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


def main(arguments: list[str] | None = None) -> int:
    """Print a table of distances just below and above the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--etas", default="0.5,1.0,1.5", help="learning rates (default 0.5,1.0,1.5)")
    add("--turns", type=int, default=300, help="turns of all workers (default 300)")
    args = parser.parse_args(arguments)
    print("eta  workers  bound   0.05 below  0.05 above  step first, 0.05 above")
    for eta in map(float, args.etas.split(",")):
        for workers in (1, 3):
            edge = bound(eta)
            found = [
                distance(eta, edge + by, workers, args.turns, late=late)
                for by, late in ((-0.05, True), (0.05, True), (0.05, False))
            ]
            below, above, first = (f"{each:.1e}" for each in found)
            print(
                f"{eta:<4} {workers:7}  {edge:.3f} {below:>12}{above:>12}{first:>16}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
