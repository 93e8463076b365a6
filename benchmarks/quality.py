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

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import CONSOLE, Benchmark, Row
from rich.progress import track

import agn_optax
from agn_optax import codecs, rules
from examples import datasets
from examples.towers import Transformer

PyTree = Any

PLAIN = "float32"
# By the names of this table; rules.CODECS has the names of the command line's --codec.
CODECS = {
    PLAIN: codecs.identity(),
    **rules.CODECS,
    "int4 alone": codecs.quantize(4),
    "codebook4": codecs.error_feedback(codecs.quantize(4, format="codebook")),
    "codebook2": codecs.error_feedback(codecs.quantize(2, format="codebook")),
}
# SparseLoCo's center step with a rate of 1, DiLoCo's with momentum, and DiLoCo's with
# SparseLoCo's rate of 0.8, without momentum; NoLoCo's, and two without a common center.
PAIRS = agn_optax.Placement(gossip=1.0)
NOLOCO = functools.partial(rules.diloco, optax.sgd(0.7, momentum=0.5))
RULES: dict[str, tuple[Callable[..., rules.Rule], agn_optax.Placement | None]] = {
    "average": (rules.average, None),
    "diloco": (rules.diloco, None),
    "sgd": (functools.partial(rules.diloco, optax.sgd(0.8)), None),
    "momentum": (NOLOCO, None),
    "pairs": (rules.average, PAIRS),
    "NoLoCo": (NOLOCO, PAIRS),
}
CONTEXT = 32  # characters of a row of text


class Problem(NamedTuple):
    """A learning problem; batches are pairs of inputs and labels."""

    init: Callable[[jax.Array], PyTree]  # key -> parameters
    predict: Any  # (parameters, inputs) -> logits
    # Of all workers: [workers, period, rows, ...].
    draw: Callable[[np.random.Generator], PyTree]
    test: PyTree
    inner: optax.GradientTransformation


def trained(
    problem: Problem, rule: rules.Rule, rounds: int, workers: int, **settings: Any
) -> Callable[[int], np.ndarray]:
    """Return a function that trains with a seed; programs are compiled once.

    Args:
      problem: the problem.
      rule: the rule of the exchanges.
      rounds: rounds of training.
      workers: workers, which are rows of a vmap.
      settings: others of `agn_optax.phases`.

    Returns:
      ``seed -> [loss, accuracy]``, of the center on the test batch.
    """
    tx = agn_optax.phases(problem.inner, rule, axis_name="workers", **settings)

    def loss(params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        inputs, labels = batch
        logits = problem.predict(params, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (jnp.argmax(logits, axis=-1) == labels).mean()

    def step(params: PyTree, state: Any, batch: PyTree) -> Any:
        grads, _ = jax.grad(loss, has_aux=True)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, ()

    fragments = settings.get("fragments")
    whole_round = agn_optax.scan_round(step, tx.exchange, fragments=fragments)
    run = jax.jit(jax.vmap(whole_round, axis_name="workers"), donate_argnums=(0, 1))

    @jax.jit
    def start(key: jax.Array) -> tuple[PyTree, Any]:
        params = problem.init(key)
        rows = jax.tree.map(lambda x: jnp.stack([x] * workers), params)
        return rows, jax.vmap(tx.init)(rows)

    def train(seed: int) -> np.ndarray:
        params, state = start(jax.random.key(seed))
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            params, state, _ = run(params, state, problem.draw(rng))
        # With pairs, all workers have centers of their own, else the same.
        each = agn_optax.center_params(state)
        center = jax.tree.map(lambda x: x.mean(axis=0), each)
        return np.array(jax.jit(loss)(center, problem.test), float)

    return train


def digits(shape: tuple[int, ...], _: float) -> Problem:
    """Return a problem in which each worker has a share of the training digits."""
    data = datasets.digits()
    share = len(data.train.labels) // shape[0]
    first = share * np.arange(shape[0])[:, None, None]
    model = nn.Sequential(
        [nn.Dense(256), nn.relu, nn.Dense(256), nn.relu, nn.Dense(10)]
    )

    def flat(split: datasets.Split, rows: Any = slice(None)) -> PyTree:
        images = split.images.reshape(len(split.images), -1)
        return images[rows], split.labels[rows]

    return Problem(
        lambda key: model.init(key, jnp.zeros((1, 64))),
        model.apply,
        lambda rng: flat(data.train, first + rng.integers(0, share, shape)),
        flat(data.test),
        optax.adamw(1e-3),
    )


def text(shape: tuple[int, ...], megabytes: float) -> Problem:
    """Return a problem of predicting the characters of Python's source."""
    data = datasets.python_source(megabytes)
    model = Transformer(layers=2, width=64, context=CONTEXT)
    window = np.arange(CONTEXT + 1)

    def windows(characters: Any, rng: np.random.Generator, *shape: int) -> PyTree:
        starts = rng.integers(0, len(characters) - len(window), size=shape)
        rows = characters[starts[..., None] + window].astype(np.int32)
        return rows[..., :-1], rows[..., 1:]

    return Problem(
        lambda key: model.init(key, jnp.zeros((1, CONTEXT), jnp.int32)),
        model.apply,
        lambda rng: windows(data.train, rng, *shape),
        windows(data.test, np.random.default_rng(0), 256),
        optax.adamw(3e-3),
    )


PROBLEMS = {"digits": digits, "text": text}


def bits_of(codec: codecs.Codec, params: PyTree) -> float:
    """Return the bits per parameter that are sent."""
    sent = jax.eval_shape(lambda x: codec.encode(x, codec.init(x))[0], params)
    sent_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(sent))
    return round(8 * sent_bytes / sum(x.size for x in jax.tree.leaves(params)), 3)


class Quality(
    Benchmark,
    quick="--codecs int4 --seeds 1 --workers 2 --period 2 --rounds 2 --megabytes 0.5",
):
    """Loss at the end of training, for each codec.

    Args:
      only: the problems.
      codecs: names of codecs.
      rule: the rule around the codecs.
      seeds: runs of each.
      workers: workers.
      period: local steps of a round.
      rounds: rounds of training.
      megabytes: size of the text.
    """

    only: Sequence[str] = tuple(PROBLEMS)
    codecs: Sequence[str] = ("int8", "int4", "codebook2", "top_k")
    rule: str = "average"
    seeds: int = 3
    workers: int = 4
    period: int = 10
    rounds: int = 100
    megabytes: float = 8.0

    def run(self) -> None:
        """Add a table for each problem."""
        for name in self.only:
            shape = (self.workers, self.period, 4)  # rows of a batch
            problem = PROBLEMS[name](shape, self.megabytes)
            params = jax.eval_shape(problem.init, jax.random.key(0))
            rows = self.rows(problem, params)
            size = sum(leaf.size for leaf in jax.tree.leaves(params))
            title = f"{size:,} parameters, {self.workers} workers, {self.rounds} rounds"
            title += f" of {self.period} steps, {self.seeds} seeds, {self.rule}"
            self.add(name, f"{name}: {title}", rows)

    def rows(self, problem: Problem, params: PyTree) -> list[Row]:
        """Train with each codec, without one first."""
        rows, plain = [], np.ones(self.seeds)
        rule, place = RULES[self.rule]
        for name in track((PLAIN, *self.codecs), console=CONSOLE, transient=True):
            coded = rule(codec=CODECS[name])
            train = trained(problem, coded, self.rounds, self.workers, placement=place)
            losses, accuracies = np.array([train(seed) for seed in range(self.seeds)]).T
            plain = losses if name == PLAIN else plain
            more = 100 * (losses / plain - 1)
            rows.append(
                {
                    "codec": name,
                    "bits": bits_of(CODECS[name], params),
                    "loss": losses.mean(),
                    "of_seeds": [losses.min(), losses.max()],
                    "above_%": more.mean(),
                    "of_seeds_%": [more.min(), more.max()],
                    "accuracy_%": 100 * accuracies.mean(),
                }
            )
        return rows


if __name__ == "__main__":
    Quality.main()
