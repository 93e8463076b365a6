"""Cost of codecs in quality: bits per parameter, and loss at the end of training.

Four workers make local steps with AdamW and average their displacements (`rules.
average`; `--rule diloco` has momentum at the center, `--rule sgd` has none), or do so
in pairs without a common center ("pairs"; "NoLoCo", next to "momentum" with a center).
There are two problems: scikit-learn's digits with a perceptron, and characters of
Python's source with the transformer of examples/towers.py. Workers are rows of `vmap`,
each round is one program (`scan_round`), and for each seed every codec gets the same
first parameters and batches. "above" is the loss on held-out data minus that of float32
with the same seed: mean, minimum and maximum of the seeds. With pairs, the mean of
their centers is tested.

    python benchmarks/quality.py
    python benchmarks/quality.py --only text --codecs top_k --rounds 400 --period 5
    python benchmarks/quality.py --only digits --codecs top_k --rule diloco
    python benchmarks/quality.py --codecs pairs momentum NoLoCo --workers 8
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import Report, Row, parse
from rich.progress import track

import agn_optax
from agn_optax import codecs, rules

sys.path.append(str(pathlib.Path(__file__).parents[1]))
sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
from examples import datasets
from examples.towers import Transformer

PyTree = Any

AS_IT_IS = "float32"
# By the names of this table; rules.CODECS has the names of the command line's --codec.
CODECS = {
    AS_IT_IS: codecs.identity(),
    **rules.CODECS,
    "int4 alone": codecs.quantize(4),
    "codebook4": codecs.error_feedback(codecs.quantize(4, format="codebook")),
    "codebook2": codecs.error_feedback(codecs.quantize(2, format="codebook")),
}
COMPARED = ("int8", "int4", "codebook2", "top_k")


class Method(NamedTuple):
    """A rule, and the placement of its center."""

    rule: rules.Rule
    placement: agn_optax.Placement | None = None


PAIRS = agn_optax.Placement(gossip=1.0)
MOMENTUM = rules.diloco(optax.sgd(0.7, momentum=0.5))
# Rules with which the codecs are compared: SparseLoCo's center step with a rate of 1,
# DiLoCo's with momentum, and DiLoCo's with SparseLoCo's rate of 0.8, without momentum.
RULES: dict[str, Callable[..., rules.Rule]] = {
    "average": rules.average,
    "diloco": rules.diloco,
    "sgd": functools.partial(rules.diloco, optax.sgd(0.8)),
}
METHODS = {
    "pairs": Method(rules.average(), PAIRS),
    "momentum": Method(MOMENTUM),
    "NoLoCo": Method(MOMENTUM, PAIRS),
}


def method_of(name: str, rule: str) -> Method:
    """Return a method by its name; a codec's name applies it to a rule."""
    if name in CODECS:
        return Method(RULES[rule](codec=CODECS[name]))
    return METHODS[name]


class Problem(NamedTuple):
    """A learning problem."""

    init: Callable[[jax.Array], PyTree]  # key -> parameters
    # Logits and labels of a batch: [..., classes] and [...].
    predict: Callable[[PyTree, PyTree], tuple[jax.Array, jax.Array]]
    # Batches of all workers: leaves [workers, period, rows, ...].
    draw: Callable[[np.random.Generator], PyTree]
    test: PyTree  # a batch
    inner: optax.GradientTransformation


def digits(args: argparse.Namespace) -> Problem:
    """Return a problem in which each worker has a share of the training digits."""
    data = datasets.digits()
    shape = (args.workers, args.period, args.rows)
    share = len(data.train.labels) // args.workers
    first = share * np.arange(args.workers)[:, None, None]
    model = nn.Sequential(
        [nn.Dense(256), nn.relu, nn.Dense(256), nn.relu, nn.Dense(10)]
    )

    def flat(split: datasets.Split, rows: Any = slice(None)) -> PyTree:
        images = split.images.reshape(len(split.images), -1)
        return images[rows], split.labels[rows]

    def predict(params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        images, labels = batch
        return jnp.asarray(model.apply(params, images)), labels

    return Problem(
        init=lambda key: model.init(key, jnp.zeros((1, 64))),
        predict=predict,
        draw=lambda rng: flat(data.train, first + rng.integers(0, share, shape)),
        test=flat(data.test),
        inner=optax.adamw(1e-3),
    )


def text(args: argparse.Namespace) -> Problem:
    """Return a problem of predicting the characters of Python's source."""
    data = datasets.python_source(args.megabytes)
    model = Transformer(args.layers, args.width, args.context)
    window = np.arange(args.context + 1)

    def windows(characters: Any, rng: np.random.Generator, *shape: int) -> PyTree:
        starts = rng.integers(0, len(characters) - len(window), size=shape)
        return characters[starts[..., None] + window]

    def predict(params: PyTree, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = rows.astype(jnp.int32)
        return jnp.asarray(model.apply(params, rows[:, :-1])), rows[:, 1:]

    shape = (args.workers, args.period, args.rows)
    return Problem(
        init=lambda key: model.init(key, jnp.zeros((1, args.context), jnp.int32)),
        predict=predict,
        draw=lambda rng: windows(data.train, rng, *shape),
        test=windows(data.test, np.random.default_rng(0), args.tested),
        inner=optax.adamw(3e-3),
    )


PROBLEMS = {"digits": digits, "text": text}


class Trained(NamedTuple):
    """Results of one seed, on held-out data."""

    loss: float  # nats
    accuracy: float  # in [0, 1]


def training(
    problem: Problem, method: Method, args: argparse.Namespace
) -> Callable[[int], Trained]:
    """Return a function that trains with a seed; programs are compiled once."""
    tx = agn_optax.phases(
        problem.inner, method.rule, axis_name="workers", placement=method.placement
    )

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        logits, labels = problem.predict(params, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    def step(params: PyTree, state: Any, batch: PyTree) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    whole_round = agn_optax.scan_round(step, tx.exchange)
    run = jax.jit(jax.vmap(whole_round, axis_name="workers"), donate_argnums=(0, 1))

    @jax.jit
    def start(key: jax.Array) -> tuple[PyTree, Any]:
        params = problem.init(key)
        rows = jax.tree.map(lambda x: jnp.stack([x] * args.workers), params)
        return rows, jax.vmap(tx.init)(rows)

    @jax.jit
    def measured(params: PyTree) -> tuple[jax.Array, jax.Array]:
        logits, labels = problem.predict(params, problem.test)
        right = jnp.argmax(logits, axis=-1) == labels
        return loss(params, problem.test), right.mean()

    def train(seed: int) -> Trained:
        params, state = start(jax.random.key(seed))
        rng = np.random.default_rng(seed)
        for _ in range(args.rounds):
            params, state, _ = run(params, state, problem.draw(rng))
        centers = agn_optax.center_params(state)
        if method.placement is None:  # all workers have the same center
            center = jax.tree.map(lambda x: x[0], centers)
        else:
            center = jax.tree.map(lambda x: x.mean(axis=0), centers)
        return Trained(*map(float, measured(center)))

    return train


def bits_of(codec: codecs.Codec, params: PyTree) -> float:
    """Return the bits per parameter that are sent."""
    sent = jax.eval_shape(lambda x: codec.encode(x, codec.init(x))[0], params)

    def bytes_of(tree: PyTree) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    return 32 * bytes_of(sent) / bytes_of(params)


def rows_of(
    problem: Problem, args: argparse.Namespace, report: Report
) -> Iterator[Row]:
    """Yield one row for each codec; the first has none."""
    params = jax.eval_shape(problem.init, jax.random.key(0))
    plain: list[Trained] = []
    for name in (AS_IT_IS, *args.codecs):
        method = method_of(name, args.rule)
        train = training(problem, method, args)
        seeds = track(range(args.seeds), name, console=report.console, transient=True)
        found = [train(seed) for seed in seeds]
        plain = plain or found
        losses = [one.loss for one in found]
        more = [
            100 * (one.loss / other.loss - 1)
            for one, other in zip(found, plain, strict=True)
        ]
        yield {
            "codec": name,
            "bits": round(bits_of(method.rule.codec, params), 3),
            "loss": float(np.mean(losses)),
            "of_seeds": [min(losses), max(losses)],
            "above_%": float(np.mean(more)),
            "of_seeds_%": [min(more), max(more)],
            "accuracy_%": 100 * float(np.mean([one.accuracy for one in found])),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss at the end, for each codec.")
    add = functools.partial(parser.add_argument, type=int)
    add("--only", nargs="+", type=str, choices=PROBLEMS, default=tuple(PROBLEMS))
    add("--codecs", nargs="+", type=str, choices=(*CODECS, *METHODS), default=COMPARED)
    add("--rule", type=str, choices=RULES, default="average", help="around codecs")
    add("--seeds", default=3)
    add("--workers", default=4)
    add("--period", default=10, help="local steps of a round")
    add("--rounds", default=100, help="of training")
    add("--rows", default=4, help="of a worker's batch")
    add("--context", default=32, help="characters of a row of text")
    add("--width", default=64, help="of the transformer, in sixteens")
    add("--layers", default=2, help="of the transformer")
    add("--tested", default=256, help="rows of text")
    add("--megabytes", type=float, default=8.0, help="of text")
    tiny = {"context": 16, "width": 16, "layers": 1, "tested": 4, "megabytes": 0.5}
    quick = {"codecs": ["int4"], "seeds": 1, "workers": 2, "period": 2, "rounds": 2}
    args = parse(parser, **quick, **tiny)
    report = Report(args.json)
    for name in args.only:
        problem, rows = PROBLEMS[name](args), []
        for row in rows_of(problem, args, report):
            report.say(f"{name}, {row['codec']}: {row['loss']:.4f} nats")
            rows.append(row)
        params = jax.eval_shape(problem.init, jax.random.key(0))
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        title = (
            f"{name}: {size:,} parameters, {args.workers} workers, {args.rounds} rounds"
            f" of {args.period} steps, {args.seeds} seeds"
        )
        report.add(name, title, rows)
    report.write()


if __name__ == "__main__":
    main()
