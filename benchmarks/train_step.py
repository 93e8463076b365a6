"""Time of a whole training step, gradient included, with AGN and without.

The model is a multilayer perceptron, adam is the inner optimizer, and buffers are
donated. A run is a period of steps, so its exchange is included; "ratio" is the time
relative to plain adam's. (In another run, the same step with TensorFlow 1.14's
AGNOptimizer took 1.15 times as long as with its plain optimizer.)

    python benchmarks/train_step.py --millions 10 --batch 64
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
import side_by_side
from report import Report, parse
from side_by_side import Form

import agn_optax

PyTree = Any


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-3)


def perceptron(size: float, layers: int) -> list[jax.Array]:
    """Make square layers with about ``size`` parameters in total."""
    width = round((size / layers) ** 0.5)
    keys = jax.random.split(jax.random.key(0), layers)
    return [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]


def loss(params: PyTree, inputs: jax.Array) -> jax.Array:
    """Return the loss of an autoencoder."""
    hidden = inputs
    for weights in params:
        hidden = jnp.tanh(hidden @ weights)
    return jnp.mean((hidden - inputs) ** 2)


def training(name: str, tx: Any, args: argparse.Namespace) -> Form:
    """Return a form of a period of steps, with its exchange if that is separate."""

    def step(params: PyTree, state: PyTree, inputs: jax.Array) -> PyTree:
        grads = jax.grad(loss)(params, inputs)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = perceptron(1e6 * args.millions, args.layers)
    inputs = jax.random.normal(jax.random.key(1), (args.batch, params[0].shape[0]))
    loop: PyTree = (params, tx.init(params))
    local = jax.jit(step, donate_argnums=(0, 1)).lower(*loop, inputs).compile()
    finish = getattr(tx, "exchange", None)
    ending: Any = (
        finish and jax.jit(finish, donate_argnums=(0, 1)).lower(*loop).compile()
    )

    def run() -> None:
        nonlocal loop
        for _ in range(args.period):
            loop = local(*loop, inputs)
        if ending is not None:
            loop = ending(*loop)
        jax.block_until_ready(loop)

    return Form(name, "adam", run)


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole training steps.")
    add = parser.add_argument
    add("--millions", type=float, default=10, help="of parameters")
    add("--layers", type=int, default=4)
    add("--batch", type=int, default=64)
    add("--period", type=int, default=10)
    add("--repeats", type=int, default=15, help="periods measured of every form")
    args = parse(parser, millions=0.01, repeats=1)
    report = Report(args.json)
    rule = agn_optax.rules.agn(adam())
    forms = [
        training("adam", adam(), args),
        training("agn, drop-in", agn_optax.agn(adam(), args.period), args),
        training("agn, split", agn_optax.phases(adam(), rule), args),
    ]
    rows = []
    for row in side_by_side.measure(forms, args.repeats, report.console).values():
        row["milliseconds_a_step"] = 1e3 * row.pop("seconds") / args.period
        rows.append(row)
    title = (
        f"training step of {args.millions:g} M parameters, batch {args.batch}, "
        f"period {args.period}"
    )
    report.add("train_step", title, rows)
    report.write()


if __name__ == "__main__":
    main()
