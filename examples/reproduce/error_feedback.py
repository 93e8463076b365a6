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

    python examples/reproduce/error_feedback.py                # 1 minute

Karimireddy, Rebjock, Stich and Jaggi, Error Feedback Fixes SignSGD and other Gradient
Compression Schemes, 2019, arXiv 1901.09847. A seed draws the terms of the second
problem; nothing in the first is random.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report as reports

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


def trained(
    problem: str, codec: codecs.Codec, steps: int, seed: int = 0
) -> Iterator[jax.Array]:
    """Yield the center after each of a number of steps, each with an exchange."""
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
        yield center.pull().params


def value(problem: str, x: jax.Array) -> float:
    """Return the value of a problem at ``x``."""
    loss, _ = PROBLEMS[problem]
    terms = 1 if problem == "not smooth" else 2
    return float(sum(loss(x, term) for term in range(terms)))


def main(given: list[str] | None = None) -> int:
    """Measure both problems with each codec."""
    options = reports.arguments(__doc__ or "", given, steps=400)
    report = reports.Report(
        "error_feedback",
        "Signs and error feedback",
        "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient "
        "Compression Schemes, 2019, arXiv 1901.09847",
        options,
    )
    found = {}  # (problem, codec) -> values of f, [seeds, steps]
    for problem in PROBLEMS:
        for name, codec in CODECS.items():
            report.progress(f"{problem}: {name}")
            found[problem, name] = np.array(
                [
                    [
                        value(problem, x)
                        for x in trained(problem, codec, options.steps, seed)
                    ]
                    for seed in range(options.seeds)
                ]
            )
    report.table(
        f"Value of f after {options.steps} steps",
        ["problem", "at the start", *CODECS],
        [
            [
                problem,
                value(problem, jnp.ones(2)),
                *(reports.spread(found[problem, name][:, -1], 4) for name in CODECS),
            ]
            for problem in PROBLEMS
        ],
    )
    for problem in PROBLEMS:
        start = value(problem, jnp.ones(2))
        exact, signs, repaired = (found[problem, name] for name in CODECS)
        never = bool((signs >= start - 1e-4).all())
        fixed = bool((repaired[:, -1] < 0.01 * start).all())
        report.claim(
            f"Signs never fall below the start on the problem '{problem}', and error "
            "feedback converges",
            "f >= f(start) for signs in every step; f -> 0 with error feedback",
            f"f(start) = {start:g}; signs at least {signs.min():.4f}; after "
            f"{options.steps} steps {reports.spread(repaired[:, -1], 4)} with error "
            f"feedback, {reports.spread(exact[:, -1], 4)} without a codec",
            "reproduced" if never and fixed else "not reproduced",
            "" if never and fixed else "the values do not part",
        )
    for axes, problem in zip(report.figure.subplots(1, 2), PROBLEMS, strict=True):
        for name in CODECS:
            steps = np.arange(0, options.steps, 4)  # the picture has every fourth
            values = found[problem, name][:, steps]
            middle = np.maximum(np.median(values, 0), 1e-6)
            (line,) = axes.semilogy(steps, middle, label=name)
            low, high = np.maximum([values.min(0), values.max(0)], 1e-6)
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
        axes.set(title=problem, xlabel="steps", ylabel="f")
    axes.legend()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
