"""Sign descent that does not converge, and converges with error feedback.

The two counterexamples of Karimireddy, Rebjock, Stich and Jaggi (2019) have two
parameters that start at (1, 1). Both are convex, with their minimum at 0:

    not smooth       f = eps |x1 + x2| + |x1 - x2|
    least squares    f = <a1, x>^2 + <a2, x>^2, of which each step sees one random term;
                     a1, a2 = +-(1, -1) + eps (1, 1)

The sign of every (sub)gradient is +-(1, -1), so steps along signs leave x1 + x2
unchanged, and f never falls below its value at the start. Error feedback sends later
the part of a gradient that its sign has lost. Here both are contributions of DOWNPOUR,
with one bit per parameter.

    python examples/reproduce/error_feedback.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import agn_optax
from agn_optax import codecs, rules

EPS = 0.5
A = jnp.array([[1.0, -1.0], [-1.0, 1.0]]) + EPS
CODECS = {
    "exact": codecs.identity(),
    "signs": codecs.sign(),
    "signs, error feedback": codecs.error_feedback(codecs.sign()),
}
# (parameters, index of a term) -> loss.
Loss = Callable[[jax.Array, Any], jax.Array]


def not_smooth(x: jax.Array, term: Any) -> jax.Array:
    """Return the value of the first problem."""
    del term
    return EPS * jnp.abs(x[0] + x[1]) + jnp.abs(x[0] - x[1])


def least_squares(x: jax.Array, term: Any) -> jax.Array:
    """Return one term of the second problem."""
    return (A[term] @ x) ** 2


# Loss and learning rate of each problem. The first needs a schedule, because its
# subgradients do not get smaller near the minimum.
PROBLEMS: dict[str, tuple[Loss, optax.ScalarOrSchedule]] = {
    "not smooth": (not_smooth, lambda step: 0.2 / jnp.sqrt(step + 1)),
    "least squares": (least_squares, 0.05),
}


def trained(problem: str, codec: codecs.Codec, steps: int, seed: int = 0) -> jax.Array:
    """Return the center after a number of steps, each with an exchange."""
    loss, rate = PROBLEMS[problem]
    center = agn_optax.LocalCenter(rules.downpour(codec=codec), jnp.ones(2))
    worker = agn_optax.Worker(center, optax.sgd(rate), period=1)
    rng = np.random.default_rng(seed)

    @jax.jit
    def local_step(params: Any, state: Any, term: Any) -> Any:
        gradient = jax.grad(loss)(params, term)
        updates, state = worker.tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params, state = worker.start()
    for term in rng.integers(0, 2, steps):
        params, state = worker.exchange(*local_step(params, state, term))
    return center.pull().params


def value(problem: str, x: jax.Array) -> float:
    """Return the value of a problem at ``x``."""
    loss, _ = PROBLEMS[problem]
    terms = 1 if problem == "not smooth" else 2
    return float(sum(loss(x, term) for term in range(terms)))


def main(arguments: list[str] | None = None) -> int:
    """Print a table of both problems."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="steps (default 400)")
    args = parser.parse_args(arguments)
    print(f"{'f':16}{'at the start':>14}" + "".join(f"{name:>24}" for name in CODECS))
    for problem in PROBLEMS:
        first = value(problem, jnp.ones(2))
        found = [
            value(problem, trained(problem, codec, args.steps))
            for codec in CODECS.values()
        ]
        cells = "".join(f"{each:24.6f}" for each in found)
        print(f"{problem:16}{first:14.6f}{cells}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
