"""Effect of streaming on training: fragments, delays, mixing and eager updates.

Workers with equal shares of the data train a small network on scikit-learn's digits
with DiLoCo, as rows of a vmap. The center's loss and accuracy on the test half are
those after the last local step, when the last fragment has been exchanged. "most at
once" is the largest fraction of the model that a worker sends at a time.

    python benchmarks/streaming.py --rounds 20 --period 20 --momentum 0.5
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import Report, Row, parse
from rich.console import Console
from sklearn.datasets import load_digits

import agn_optax
from agn_optax import Fragments

PyTree = Any

WIDTHS = (64, 96, 96, 96, 96, 10)
BATCH = 32


def settings(count: int, delay: int, period: int) -> dict[str, Fragments | None]:
    """Return the compared settings by name."""
    late = min(round(0.9 * period), period - 1)
    return {
        "all at once": None,
        f"{count} fragments": Fragments(count),
        f"{count}, delay {delay}, mixing 0": Fragments(count, delay=delay),
        f"{count}, delay {delay}, mixing 0.5": Fragments(
            count, delay=delay, mixing=0.5
        ),
        f"{count}, delay {delay}, eager": Fragments(count, delay=delay, eager=True),
        f"1, delay {late}, mixing 0": Fragments(1, delay=late),
        f"1, delay {late}, eager": Fragments(1, delay=late, eager=True),
    }


def init(key: jax.Array) -> PyTree:
    """Initialize a network, with a leaf for each matrix and each bias."""
    sizes = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(key, len(sizes))
    return [
        {
            "w": jax.random.normal(k, size) * np.sqrt(2 / size[0]),
            "b": jnp.zeros(size[1]),
        }
        for k, size in zip(keys, sizes, strict=True)
    ]


def logits(params: PyTree, x: jax.Array) -> jax.Array:
    for i, layer in enumerate(params):
        x = (jax.nn.relu(x) if i else x) @ layer["w"] + layer["b"]
    return x


def loss(params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def program(fragments: Fragments | None, args: Any, data: Any) -> Any:
    """Return ``seed -> (loss, accuracy)`` of the center on the test half."""
    tx = agn_optax.diloco(
        optax.adamw(1e-3),
        args.period,
        center=optax.sgd(0.7, momentum=args.momentum, nesterov=True),
        axis_name="workers",
        fragments=fragments,
    )
    x, y, test_x, test_y = data
    share = len(x) // args.workers

    def worker(params: PyTree, key: jax.Array, number: jax.Array) -> PyTree:
        def step(carry: Any, key: jax.Array) -> Any:
            params, state = carry
            rows = number * share + jax.random.randint(key, (BATCH,), 0, share)
            grads = jax.grad(loss)(params, x[rows], y[rows])
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), ()

        keys = jax.random.split(key, args.rounds * args.period)
        (_, state), _ = jax.lax.scan(step, (params, tx.init(params)), keys)
        return agn_optax.center_params(state)

    def run(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, key = jax.random.split(jax.random.key(seed))
        params, keys = init(first), jax.random.split(key, args.workers)
        numbers = jnp.arange(args.workers)
        all_of = jax.vmap(worker, in_axes=(None, 0, 0), axis_name="workers")
        center = jax.tree.map(lambda c: c[0], all_of(params, keys, numbers))
        right = logits(center, test_x).argmax(-1) == test_y
        return loss(center, test_x, test_y), right.mean()

    return jax.jit(run)


def most_at_once(fragments: Fragments | None, params: PyTree) -> float:
    parts = [params] if fragments is None else fragments.divide(params).cut(params)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(part)) for part in parts]
    return max(sizes) / sum(sizes)


def measure(name: str, fragments: Fragments | None, args: Any, data: Any) -> Row:
    run = program(fragments, args, data)
    found = np.array([run(seed) for seed in range(args.seeds)])
    (test_loss, accuracy), spread = found.mean(axis=0), found[:, 0].std()
    return {
        "setting": name,
        "most_at_once": most_at_once(fragments, init(jax.random.key(0))),
        "loss": float(test_loss),
        "spread": float(spread),
        "accuracy": float(accuracy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What streaming does to training.")
    add = parser.add_argument
    add("--rounds", type=int, default=20)
    add("--period", type=int, default=20)
    add("--workers", type=int, default=4)
    add("--fragments", type=int, default=4)
    add("--delay", type=int, default=5)
    add("--momentum", type=float, default=0.9, help="of the center optimizer")
    add("--seeds", type=int, default=3)
    args = parse(parser, rounds=2, period=4, workers=2, delay=1, seeds=1)
    report = Report(args.json)
    bunch = load_digits()
    x = jnp.asarray(bunch.data / 16, jnp.float32)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], jnp.asarray(bunch.target)[order]
    half = len(x) // 2
    data = x[:half], y[:half], x[half:], y[half:]
    compared = settings(args.fragments, args.delay, args.period)
    rows = []
    with Console(stderr=True).status("training") as status:
        for name, fragments in compared.items():
            status.update(f"training: {name}")
            rows.append(measure(name, fragments, args, data))
    title = (
        f"DiLoCo with momentum {args.momentum:g}, {args.workers} workers, "
        f"{args.rounds} rounds of {args.period} steps, {args.seeds} seeds: the center "
        "on the test half of the digits"
    )
    report.add("streaming", title, rows)
    report.write()


if __name__ == "__main__":
    main()
