"""Measure and draw the curves of docs/choosing.md: every rule on digits, many settings.

    PYTHONPATH=examples python docs/figures/choosing.py           # measure and draw
    PYTHONPATH=examples python docs/figures/choosing.py --draw    # draw again

The workers of a mesh, and the seeds, are rows of ``vmap`` on one device. Asynchronous
workers share an `agn_optax.LocalCenter`: each trains for a period, and then they
exchange one after the other, so with n workers every message is n - 1 versions stale.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from rich.progress import track

import agn_optax
from agn_optax import rules

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
MEASURED = HERE / "choosing.json"
BATCH, HIDDEN, RATE = 32, 64, 1e-3
COLORS = {
    "agn": "tab:red",
    "agn_window": "tab:pink",
    "downpour": "tab:green",
    "dynsgd": "tab:olive",
    "average": "tab:cyan",
    "diloco": "tab:purple",
    "easgd": "tab:blue",
}
MESH_RULES = [name for name in COLORS if name != "dynsgd"]  # equals downpour on a mesh


def inner() -> optax.GradientTransformation:
    """Return the inner optimizer, the same for all workers and rules."""
    return optax.adam(RATE)


def rule_of(name: str, workers: int, *, one_by_one: bool = False) -> rules.Rule:
    """Return a rule with the settings that the page names.

    A center that applies messages ``one_by_one`` makes a step for each of them instead
    of one step for all, so center learning rates are divided by the number of workers.
    """
    parts = workers if one_by_one else 1
    if name == "agn":
        return rules.agn(optax.adam(1e-2 / parts))
    if name == "diloco":
        return rules.diloco(optax.sgd(0.7 / parts, momentum=0.9, nesterov=True))
    if name == "easgd":
        return rules.easgd(0.9 / max(workers, 2))
    return getattr(rules, name)()


def init(key: jax.Array) -> Any:
    """Return the first parameters of a perceptron with one hidden layer."""
    keys = jax.random.split(key)
    return {
        "hidden": jax.random.normal(keys[0], (64, HIDDEN)) / 8.0,
        "bias": jnp.zeros(HIDDEN),
        "out": jax.random.normal(keys[1], (HIDDEN, 10)) / np.sqrt(HIDDEN),
    }


def logits(params: Any, images: jax.Array) -> jax.Array:
    """Return the logits [n, 10] of images [n, 64]."""
    hidden = jax.nn.relu(images @ params["hidden"] + params["bias"])
    return hidden @ params["out"]


def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    out = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(out, labels).mean()


class Problem:
    """The digits data, with another split into training and test data for each seed."""

    def __init__(self, seeds: int) -> None:
        splits = [datasets.digits(seed=seed) for seed in range(seeds)]
        flat = [
            jax.tree.map(np.asarray, (s.train.images.reshape(-1, 64), s.train.labels))
            for s in splits
        ]
        test = [(s.test.images.reshape(-1, 64), s.test.labels) for s in splits]
        self.train = jax.tree.map(lambda *x: jnp.stack(x), *flat)
        self.test = jax.tree.map(lambda *x: jnp.stack(x), *test)
        self.keys = jax.random.split(jax.random.key(0), seeds)
        self.seeds = seeds
        self.errors = jax.jit(jax.vmap(self._error))

    @staticmethod
    def _error(params: Any, test: Any) -> jax.Array:
        return jnp.mean(logits(params, test[0]).argmax(-1) != test[1])

    def rows(self, workers: int, steps: int) -> np.ndarray:
        """Draw the indices of training images: [seeds, workers, steps, batch]."""
        rng = np.random.default_rng(0)
        shape = (self.seeds, workers, steps, BATCH)
        return rng.integers(0, self.train[1].shape[1], shape, np.int32)

    def measure(self, params: Any) -> list[float]:
        """Return the test error of each seed's parameters, in percent."""
        found = 100 * np.asarray(self.errors(params, self.test), np.float64)
        return [round(float(x), 3) for x in found]

    def mesh(self, rule: rules.Rule, period: int, workers: int, steps: int) -> Any:
        """Return the errors of the center of ``workers`` rows of a mesh."""
        split = agn_optax.phases(inner(), rule, axis_name="workers")

        def train(key: jax.Array, data: Any, rows: jax.Array) -> Any:
            def local_step(params: Any, state: Any, batch: jax.Array) -> Any:
                grads = jax.grad(loss)(params, data[0][batch], data[1][batch])
                updates, state = split.update(grads, state, params)
                return optax.apply_updates(params, updates), state, None

            whole_round = agn_optax.scan_round(local_step, split.exchange)

            def one(carry: Any, batches: jax.Array) -> Any:
                return whole_round(*carry, batches)[:2], None

            params = init(key)
            carry = (params, split.init(params))
            (_, state), _ = jax.lax.scan(one, carry, rows)
            return agn_optax.center_params(state)

        workers_of_seed = jax.vmap(train, (None, None, 0), axis_name="workers")
        rows = self.rows(workers, steps)
        rows = rows.reshape(self.seeds, workers, steps // period, period, BATCH)
        centers = jax.jit(jax.vmap(workers_of_seed))(self.keys, self.train, rows)
        return self.measure(jax.tree.map(lambda x: x[:, 0], centers))

    def alone(self, steps: int, batch: int = 1) -> Any:
        """Return the errors after steps of the inner optimizer alone.

        Each step takes ``batch`` batches.
        """
        tx = inner()

        def train(key: jax.Array, data: Any, rows: jax.Array) -> Any:
            def one(carry: Any, batch: jax.Array) -> Any:
                params, state = carry
                grads = jax.grad(loss)(params, data[0][batch], data[1][batch])
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), None

            params = init(key)
            return jax.lax.scan(one, (params, tx.init(params)), rows)[0][0]

        rows = self.rows(batch, steps).swapaxes(1, 2)
        rows = rows.reshape(self.seeds, steps, batch * BATCH)
        return self.measure(jax.jit(jax.vmap(train))(self.keys, self.train, rows))

    def in_turns(self, rule: rules.Rule, period: int, workers: int, steps: int) -> Any:
        """Return the errors of a center outside the program, with workers in turn."""
        local = None
        centers = []
        rows = self.rows(workers, steps)
        for seed in range(self.seeds):
            data = jax.tree.map(lambda x, seed=seed: x[seed], self.train)
            center = agn_optax.LocalCenter(rule, init(self.keys[seed]))
            members = [
                agn_optax.Worker(center, inner(), period=period, name=f"worker-{i}")
                for i in range(workers)
            ]
            if local is None:
                local = self._local_phase(members[0].tx)
            loops = [member.start() for member in members]
            for begin in range(0, steps, period):
                for i, loop in enumerate(loops):
                    batches = rows[seed, i, begin : begin + period]
                    loops[i] = local(*loop, data, batches)
                for i, member in enumerate(members):
                    loops[i] = member.exchange(*loops[i], steps=period)
            for member in members:
                member.leave()
            centers.append(center.pull().params)
        return self.measure(jax.tree.map(lambda *x: jnp.stack(x), *centers))

    @staticmethod
    def _local_phase(tx: Any) -> Callable[..., Any]:
        @jax.jit
        def local(params: Any, state: Any, data: Any, rows: jax.Array) -> Any:
            def one(carry: Any, batch: jax.Array) -> Any:
                params, state = carry
                grads = jax.grad(loss)(params, data[0][batch], data[1][batch])
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(one, (params, state), rows)[0]

        return local


def measurements(steps: int) -> list[tuple[str, str, Any, Callable[[Problem], Any]]]:
    """List the measurements: figure, curve, value on the x-axis, and function."""
    found: list[tuple[str, str, Any, Callable[[Problem], Any]]] = []

    def add(figure: str, curve: str, x: Any, how: Callable[[Problem], Any]) -> None:
        found.append((figure, curve, x, how))

    def mesh(rule: rules.Rule, period: int, workers: int, steps: int) -> Any:
        return lambda problem: problem.mesh(rule, period, workers, steps)

    workers = 4
    add("period", "one worker", 0, lambda p: p.alone(steps))
    add("period", "data parallel", 0, lambda p: p.alone(steps, workers))
    for period in (1, 2, 5, 10, 20, 40, 80, 200):
        for name in MESH_RULES:
            add("period", name, period, mesh(rule_of(name, workers), period, 4, steps))

    centers: dict[str, tuple[Any, Any]] = {
        "agn, adam": (
            (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
            lambda r: rules.agn(optax.adam(r)),
        ),
        "agn, sgd": (
            (1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0),
            lambda r: rules.agn(optax.sgd(r)),
        ),
        "diloco, momentum 0.9": (
            (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4),
            lambda r: rules.diloco(optax.sgd(r, 0.9, nesterov=True)),
        ),
        "diloco, no momentum": (
            (0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 2.0, 3.0),
            lambda r: rules.diloco(optax.sgd(r)),
        ),
        "easgd": ((0.01, 0.03, 0.1, 0.225, 0.4, 0.7, 1.0), rules.easgd),
    }
    for curve, (settings, make) in centers.items():
        for rate in settings:
            add("center", curve, rate, mesh(make(rate), 10, workers, steps))

    def turns(rule: rules.Rule, count: int) -> Any:
        return lambda problem: problem.in_turns(rule, 10, count, 4 * steps // count)

    for count in (1, 2, 4, 8, 16):
        for name in MESH_RULES:
            how = mesh(rule_of(name, count), 10, count, 4 * steps // count)
            add("workers, mesh", name, count, how)
        for name in COLORS:
            rule = rule_of(name, count, one_by_one=True)
            add("workers, in turns", name, count, turns(rule, count))
    return found


def draw(measured: dict[str, Any]) -> None:
    """Draw each figure: the median over the seeds, and the middle half as a band."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agn", "font.size": 9})
    found = measured["figures"]
    few = [1, 2, 3, 5, 10, 20, 50, 90]

    def curves(axis: Any, figure: str, colors: dict[str, str], **texts: Any) -> None:
        for curve, points in found[figure].items():
            if curve not in colors:
                continue
            xs = [float(x) for x in points]
            errors = np.array(list(points.values()))
            middle = np.median(errors, axis=1)
            low, high = np.quantile(errors, (0.25, 0.75), axis=1)
            axis.plot(xs, middle, "o-", ms=3, label=curve, color=colors[curve])
            axis.fill_between(xs, low, high, color=colors[curve], alpha=0.12, lw=0)
        axis.set(xscale="log", yscale="log", ylim=(1.5, 95), **texts)
        axis.set_yticks(few, [f"{x}%" for x in few])
        axis.yaxis.set_minor_locator(mpl.ticker.NullLocator())
        axis.grid(alpha=0.25)

    def ticks(axis: Any, values: Any) -> None:
        axis.set_xticks(values, [f"{x:g}" for x in values])
        axis.xaxis.set_minor_locator(mpl.ticker.NullLocator())

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        path = HERE / f"choosing-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)

    figure, axis = plt.subplots(figsize=(7.2, 3.9))
    curves(axis, "period", COLORS, xlabel="period, local steps", ylabel="test error")
    for name, style in (("one worker", ":"), ("data parallel", "--")):
        error = np.median(found["period"][name]["0"])
        axis.axhline(error, ls=style, color="gray", label=name, lw=1)
    ticks(axis, [1, 2, 5, 10, 20, 40, 80, 200])
    axis.legend(ncols=1, bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False)
    save(figure, "period")

    figure, axes = plt.subplots(1, 3, figsize=(8, 3.2), sharey=True)
    panels: list[dict[str, str]] = [
        {"agn, adam": "tab:red", "agn, sgd": "tab:orange"},
        {"diloco, momentum 0.9": "tab:purple", "diloco, no momentum": "tab:cyan"},
        {"easgd": "tab:blue"},
    ]
    labels = ("center learning rate", "center learning rate", r"moving rate $\alpha$")
    for axis, colors, label in zip(axes, panels, labels, strict=True):
        curves(axis, "center", colors, xlabel=label)
        axis.legend(frameon=False, loc="lower left")
    ticks(axes[0], [1e-4, 1e-3, 1e-2, 0.1, 1])
    ticks(axes[1], [0.05, 0.1, 0.2, 0.4, 0.7, 1.4, 3])
    ticks(axes[2], [0.01, 0.03, 0.1, 0.3, 1])
    axes[0].set_ylabel("test error")
    save(figure, "center")

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True)
    titles = {
        "workers, mesh": "on a mesh, or in synchronous rounds",
        "workers, in turns": "asynchronous, n - 1 versions stale",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        curves(axis, name, COLORS, title=title, xlabel="workers")
        ticks(axis, [1, 2, 4, 8, 16])
    axes[0].set_ylabel("test error")
    axes[1].legend(bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False)
    save(figure, "workers")


def main() -> None:
    """Measure, unless ``--draw`` is given, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="only draw: do not measure")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, default=400, help="steps of each of 4 workers"
    )
    args = parser.parse_args()
    if not args.draw:
        problem = Problem(args.seeds)
        figures: dict[str, dict[str, dict[str, Any]]] = {}
        for figure, curve, x, how in track(measurements(args.steps), "measuring"):
            figures.setdefault(figure, {}).setdefault(curve, {})[f"{x:g}"] = how(
                problem
            )
        measured = {"seeds": args.seeds, "steps": args.steps, "figures": figures}
        MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
    draw(json.loads(MEASURED.read_text()))


if __name__ == "__main__":
    main()
