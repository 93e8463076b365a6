"""Random shares of the parameters: a partition that stays, or shares drawn anew.

Matt Beton et al., *Improving the efficiency of distributed training using sparse
parameter averaging* (SPARTA), 2025, the abstract and the authors' code: after each
step, workers average a small random share p of the parameters, and each keeps its own
values of the others. With p = 1/H as many bytes travel as with local SGD, which
averages all parameters every H steps. Four workers go on with training a small language
model after steps of one worker alone:

    local SGD       all parameters, every H steps
    one partition   H random parts, each averaged once in H steps: this package's
                    `Fragments(H, seed=...)`
    new partitions  the same, with new random parts in each period, as the authors'
                    code does it in one of its two ways
    new shares      each element with probability 1/H, at every step: its other way
    alone           nothing; workers are averaged at the end only

Workers draw a new share from a seed and the number of the step. This package does not:
a part has a center and a record of its own, so it keeps its elements. Does that matter?
The first two methods are `agn_optax.exchange_every`, and the others are in this file;
local SGD is done both ways, with the same losses. The program takes about eight minutes
of one core.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import language
import numpy as np
import optax
from report import Report, arguments, spread

import agn_optax
from agn_optax import rules

PyTree = Any

WORKERS, PERIOD = 4, 32
BEFORE = 20  # rounds of one worker alone, before the methods begin
RATE = 3e-3
PACKAGE, HERE = ("local SGD", "one partition"), ("new partitions", "new shares")
BATCHES = language.Batches()


def masks(method: str, params: PyTree, seed: int, step: jax.Array) -> PyTree:
    """Return which elements of the parameters are averaged after a step.

    Args:
      method: "local SGD", "new partitions", "new shares" or "alone".
      params: the parameters of one worker.
      seed: seed of the shares.
      step: number of the step, from 1.

    Returns:
      A tree of bool arrays, shaped as the parameters.
    """
    leaves, structure = jax.tree.flatten(params)
    if method in ("local SGD", "alone"):
        is_due = (step % PERIOD == 0) & (method == "local SGD")
        found = [jnp.full(leaf.shape, is_due) for leaf in leaves]
        return jax.tree.unflatten(structure, found)
    period = (step - 1) // PERIOD
    drawn = jax.random.fold_in(
        jax.random.key(seed), period if method == "new partitions" else step
    )
    found = []
    for leaf, key in zip(leaves, jax.random.split(drawn, len(leaves)), strict=True):
        if method == "new shares":
            found.append(jax.random.bernoulli(key, 1 / PERIOD, leaf.shape))
        else:
            parts = jax.random.permutation(key, leaf.size) % PERIOD
            found.append((parts == (step - 1) % PERIOD).reshape(leaf.shape))
    return jax.tree.unflatten(structure, found)


def with_masks(
    method: str, params: PyTree, batches: Any, seed: int
) -> tuple[PyTree, PyTree]:
    """Train with a method of this file.

    Args:
      method: see `masks`.
      params: first parameters of all workers.
      batches: uint8 ``[steps, WORKERS, rows, context + 1]``.
      seed: seed of the shares.

    Returns:
      The parameters of each worker after half of the steps, and at the end, each
      ``[WORKERS, ...]``.
    """
    inner = adamw(len(batches))

    def step(carry: Any, item: Any) -> Any:
        x, state = carry
        number, batch = item
        grads = jax.vmap(jax.grad(language.loss))(x, batch)
        updates, state = jax.vmap(inner.update)(grads, state, x)
        x = optax.apply_updates(x, updates)
        averaged = masks(method, params, seed, number)
        x = jax.tree.map(lambda x, m: jnp.where(m, x.mean(0), x), x, averaged)
        return (x, state), None

    x = replicated(params)
    steps = 1 + jnp.arange(len(batches))
    return halves(step, (x, jax.vmap(inner.init)(x)), (steps, batches))


def with_package(
    method: str, params: PyTree, batches: Any, seed: int
) -> tuple[PyTree, PyTree]:
    """Train with a method of the package; arguments and result as in `with_masks`."""
    fragments = None
    if method == "one partition":
        fragments = agn_optax.Fragments(PERIOD, seed=seed)
    tx = agn_optax.exchange_every(
        adamw(len(batches)),
        rules.average(),
        PERIOD,
        fragments=fragments,
        axis_name="workers",
    )

    def step(carry: Any, batch: Any) -> Any:
        x, state = carry
        updates, state = tx.update(jax.grad(language.loss)(x, batch), state, x)
        return (optax.apply_updates(x, updates), state), None

    def worker(x: PyTree, batches: Any) -> tuple[PyTree, PyTree]:
        return halves(step, (x, tx.init(x)), batches)

    return jax.vmap(worker, in_axes=(0, 1), axis_name="workers")(
        replicated(params), batches
    )


def halves(step: Any, carry: Any, items: Any) -> tuple[PyTree, PyTree]:
    """Scan over all items; return the parameters after half of them, and at the end."""
    middle = len(jax.tree.leaves(items)[0]) // 2
    half, _ = jax.lax.scan(step, carry, jax.tree.map(lambda x: x[:middle], items))
    end, _ = jax.lax.scan(step, half, jax.tree.map(lambda x: x[middle:], items))
    return half[0], end[0]


def adamw(steps: int) -> optax.GradientTransformation:
    """Return AdamW, whose learning rate falls to 0 in a number of steps."""
    return optax.adamw(optax.linear_schedule(RATE, 0.0, steps))


def replicated(params: PyTree) -> PyTree:
    """Return the parameters once for each worker: ``[WORKERS, ...]``."""
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params)


def batches_of(seed: int, steps: int) -> np.ndarray:
    """Return the batches of all workers, as `with_masks` takes them."""
    BATCHES.seed = seed
    return np.stack([[BATCHES(w, i) for w in range(WORKERS)] for i in range(steps)])


def mean_of(x: PyTree) -> PyTree:
    """Return the mean of the workers' parameters."""
    return jax.tree.map(lambda x: x.mean(0), x)


def correlation(x: PyTree, start: PyTree) -> float:
    """Return the mean correlation of the changes of two workers since the start."""
    changes = jax.tree.map(lambda x, first: (x - first).reshape(WORKERS, -1), x, start)
    found = np.corrcoef(np.concatenate(jax.tree.leaves(changes), axis=1))
    return float(found[np.triu_indices(WORKERS, 1)].mean())


def main(given: Sequence[str] | None = None) -> int:
    """Train with all methods, and report."""
    options = arguments(__doc__, given, steps=960)
    report = Report(
        "random_shares",
        "Random shares of the parameters",
        "Matt Beton, Mohamed Baioumy, Tycho van der Ouderaa, Matthew Reed, Seth Howes, "
        "Alex Cheema, *Improving the efficiency of distributed training using sparse "
        "parameter averaging*, 2025, the abstract and the authors' code",
        options,
    )
    steps = 96 if options.quick else options.steps
    program: dict[str, Callable[..., PyTree]] = {
        name: jax.jit(functools.partial(function, name), static_argnums=static)
        for function, names, static in (
            (with_package, PACKAGE, 2),
            (with_masks, (*HERE, "alone"), ()),
        )
        for name in names
    }
    again = jax.jit(functools.partial(with_masks, "local SGD"))
    losses: dict[str, list[float]] = {name: [] for name in program}
    alike: dict[str, list[float]] = {name: [] for name in program}
    apart = []  # differences between the two programs of local SGD
    for seed in range(options.seeds):
        start = language.trained_alone(
            optax.adamw(RATE), BATCHES, seed, period=PERIOD, rounds=BEFORE
        )
        batches = batches_of(seed, steps)
        for name, train in program.items():
            half, x = train(start, batches, seed)
            losses[name].append(float(language.held_out_loss(mean_of(x))))
            alike[name].append(correlation(half, start))
            report.progress(f"{name}: loss {losses[name][-1]:.4f}")
            if name == "local SGD":
                _, same = again(start, batches, seed)
                first, second = (language.held_out_loss(mean_of(p)) for p in (x, same))
                apart.append(abs(float(first - second)))
    claim(report, losses, alike, apart)
    report.table(
        f"Held-out loss of the mean of {WORKERS} workers after {steps} steps, nats per "
        "character, and, after half of them, the correlation of two workers' changes",
        ["method", "loss", "correlation", "program"],
        (
            [
                name,
                spread(losses[name], 4),
                spread(alike[name], 2),
                "`exchange_every`" if name in PACKAGE else "this example",
            ]
            for name in program
        ),
    )
    axes = report.figure.subplots()
    for i, values in enumerate(losses.values()):
        axes.plot(values, [i] * len(values), "o", color="#0072B2")
    axes.set_yticks(range(len(losses)), [*losses])
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss, nats per character; a point is a seed")
    return report.finish()


def claim(
    report: Report,
    losses: dict[str, list[float]],
    alike: dict[str, list[float]],
    apart: Sequence[float],
) -> None:
    """Add the claims."""
    loss = {name: np.array(values) for name, values in losses.items()}
    least = {name: min(alike[name]) for name in ("new shares", "one partition")}
    both = min(least.values()) > 0.9
    report.claim(
        "Models that average a share of their parameters at each step stay alike",
        "parameters have a correlation above 0.9, with shares of 0.1 %",
        f"with shares of {100 / PERIOD:.1f} %, the changes after half of the steps "
        f"have a correlation of at least {least['new shares']:.2f} with new shares, "
        f"and {least['one partition']:.2f} with one partition; of workers alone, "
        f"{spread(alike['alone'], 2)}",
        "in part" if both else "not reproduced",
        "a share is 31 times as large as in the source, and the start is common",
    )
    better = loss["alone"] - loss["new shares"]
    report.claim(
        "Training with random shares is better than training alone",
        "not given as one number",
        f"loss lower by {spread(better)} nats than that of the mean of models that "
        "were trained alone",
        "reproduced" if better.min() > 0 else "not reproduced",
        "" if better.min() > 0 else "the workers were still alike when they were alone",
    )
    more = {name: loss[name] - loss["one partition"] for name in HERE}
    most = max(float(np.abs(each).max()) for each in more.values())
    small = most < 0.1 * float(np.min(better))
    report.claim(
        "Shares may be drawn by elements at each step, or as parts of a partition",
        "the authors' code has both ways; they are not compared",
        f"loss above that of one partition that stays: {spread(more['new shares'], 4)} "
        f"with new shares, {spread(more['new partitions'], 4)} with new partitions; "
        f"the two programs of local SGD differ by at most {max(apart):.1g}",
        "reproduced" if small else "not reproduced",
        "" if small else "more than a tenth of what shares gain over training alone",
    )


if __name__ == "__main__":
    sys.exit(main())
