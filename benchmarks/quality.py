"""Quality of training: bits per parameter, and loss at the end.

Four workers make local steps with AdamW and average their displacements (`rules.
average`; other rules have momentum at the center, or none there), with a codec, in
pairs without a common center ("pairs"; NoLoCo with `--rule momentum`), or in fragments.
There are three problems: scikit-learn's digits with a perceptron, half of them with a
deeper one ("halves"), and characters of Python's source with the transformer of
examples/towers.py. Workers are rows of `vmap`, each round is one program
(`scan_round`), and for each seed every method gets the same first parameters and
batches. "above" is the loss on held-out data relative to that of float32 with the same
seed: mean, minimum and maximum of the seeds. "most at once" is the largest fraction of
the model that a worker sends at a time. The mean of the centers of pairs is tested.

    python benchmarks/quality.py
    python benchmarks/quality.py --only text --methods top_k --rounds 400 --period 5
    python benchmarks/quality.py --only digits --methods top_k --rule diloco
    python benchmarks/quality.py --rule momentum --methods pairs --workers 8
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
from agn_optax import Fragments, codecs, rules
from examples import datasets
from examples.towers import Transformer

PyTree = Any

PLAIN = "float32"
# By the names of this table; rules.CODECS has the names of the command line's --codec.
CODECS = {
    PLAIN: codecs.identity(),
    **rules.CODECS,
    "int4_alone": codecs.quantize(4),
    "codebook2": codecs.error_feedback(codecs.quantize(2, format="codebook")),
}
FRAGMENTS = {
    "4_fragments": Fragments(4),
    "4_delay_5": Fragments(4, delay=5),
    "4_delay_5_mixing": Fragments(4, delay=5, mixing=0.5),
    "1_delay_18": Fragments(1, delay=18),
}
# Codecs, and settings of `agn_optax.phases`.
METHODS: dict[str, tuple[codecs.Codec, Row]] = {
    **{name: (codec, {}) for name, codec in CODECS.items()},
    **{name: (CODECS[PLAIN], {"fragments": f}) for name, f in FRAGMENTS.items()},
    "pairs": (CODECS[PLAIN], {"placement": agn_optax.Placement(gossip=1.0)}),
}
# SparseLoCo's center step with a rate of 1, DiLoCo's with momentum, DiLoCo's with
# SparseLoCo's rate of 0.8 and without momentum, and with less momentum.
RULES: dict[str, Callable[..., rules.Rule]] = {
    "average": rules.average,
    "diloco": rules.diloco,
    "sgd": functools.partial(rules.diloco, optax.sgd(0.8)),
    "momentum": functools.partial(rules.diloco, optax.sgd(0.7, momentum=0.5)),
    "nesterov": functools.partial(rules.diloco, optax.sgd(0.7, 0.5, nesterov=True)),
}
CONTEXT = 32  # characters of a row of text
HE, LECUN = nn.initializers.he_normal(), nn.initializers.lecun_normal()


class Problem(NamedTuple):
    """A learning problem; batches are pairs of inputs and labels."""

    model: Any
    # Draws the batches of all workers: [workers, period, rows, ...].
    draw: Callable[[np.random.Generator], PyTree]
    test: PyTree
    rate: float

    def init(self, key: jax.Array) -> PyTree:
        """Return the first parameters."""
        return self.model.init(key, self.test[0][:1])

    def loss(self, params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        """Return loss and accuracy."""
        logits = self.model.apply(params, batch[0])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return losses.mean(), (jnp.argmax(logits, axis=-1) == batch[1]).mean()


def digits(
    workers: int, period: int, rows: int = 4, test: float = 0.2, deep: bool = False
) -> Problem:
    """Return a problem in which each worker has a share of the training digits."""
    data = datasets.digits(test_fraction=test)
    share = len(data.train.labels) // workers
    first = share * np.arange(workers)[:, None, None]
    width, count, init = (96, 4, HE) if deep else (256, 2, LECUN)
    dense = functools.partial(nn.Dense, kernel_init=init)
    layers: list[Any] = [f for _ in range(count) for f in (dense(width), nn.relu)]

    def flat(split: datasets.Split, rows: Any = slice(None)) -> PyTree:
        images = split.images.reshape(len(split.images), -1)
        return images[rows], split.labels[rows]

    def draw(rng: np.random.Generator) -> PyTree:
        return flat(data.train, first + rng.integers(0, share, (workers, period, rows)))

    return Problem(nn.Sequential([*layers, dense(10)]), draw, flat(data.test), 1e-3)


def text(workers: int, period: int) -> Problem:
    """Return a problem of predicting the characters of Python's source."""
    data, window = datasets.python_source(), np.arange(CONTEXT + 1)

    def windows(characters: Any, rng: np.random.Generator, *shape: int) -> PyTree:
        starts = rng.integers(0, len(characters) - len(window), size=shape)
        rows = characters[starts[..., None] + window].astype(np.int32)
        return rows[..., :-1], rows[..., 1:]

    model = Transformer(layers=2, width=64, context=CONTEXT)
    test, shape = windows(data.test, np.random.default_rng(0), 256), (workers, period)
    return Problem(model, lambda rng: windows(data.train, rng, *shape, 4), test, 3e-3)


PROBLEMS: dict[str, Callable[[int, int], Problem]] = {
    "digits": digits,
    "text": text,
    "halves": functools.partial(digits, rows=32, test=0.5, deep=True),
}


class Quality(Benchmark, quick="--methods int4 --seeds 1 --period 2 --rounds 2"):
    """Loss at the end of training, for each method.

    Args:
      only: the problems.
      methods: names of methods.
      rule: the rule of all methods.
      seeds: runs of each.
      workers: workers.
      period: local steps of a round.
      rounds: rounds of training.
    """

    only: Sequence[str] = tuple(PROBLEMS)
    methods: Sequence[str] = ("int8", "int4", "codebook2", "top_k")
    rule: str = "average"
    seeds: int = 3
    workers: int = 4
    period: int = 10
    rounds: int = 100

    def run(self) -> None:
        """Add a table for each problem."""
        for name in self.only:
            problem, rows = PROBLEMS[name](self.workers, self.period), []
            params, plain = problem.init(jax.random.key(0)), np.ones(self.seeds)
            methods = (PLAIN, *self.methods)
            for method in track(methods, name, console=CONSOLE, transient=True):
                codec, settings = METHODS[method]
                parts = [params]
                if fragments := settings.get("fragments"):
                    parts = fragments.divide(params).cut(params)
                train = self.training(problem, codec, settings)
                found = np.array([train(seed) for seed in range(self.seeds)], float)
                losses = found[:, 0]
                plain = losses if method == PLAIN else plain
                more = 100 * (losses / plain - 1)
                row: Row = {"method": method, "bits": bits_of(codec, params)}
                row |= {"most_at_once": max(map(size_of, parts)) / size_of(params)}
                row |= {"loss": losses.mean(), "deviation": losses.std()}
                row |= {"of_seeds": [losses.min(), losses.max()]}
                row |= {"above_%": more.mean(), "of_seeds_%": [more.min(), more.max()]}
                rows.append(row | {"accuracy_%": 100 * found[:, 1].mean()})
            title = f"{size_of(params):,} parameters, {self.workers} workers, "
            title += f"{self.rounds} rounds of {self.period} steps, {self.seeds} seeds"
            self.add(name, f"{name}, {self.rule}: {title}", rows)

    def training(self, problem: Problem, codec: codecs.Codec, settings: Row) -> Any:
        """Return ``seed -> (loss, accuracy)`` of the center, with compiled programs."""
        rule, inner = RULES[self.rule](codec=codec), optax.adamw(problem.rate)
        tx = agn_optax.phases(inner, rule, axis_name="workers", **settings)

        def step(params: PyTree, state: Any, batch: PyTree) -> Any:
            grads, _ = jax.grad(problem.loss, has_aux=True)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, ()

        fragments = settings.get("fragments")
        whole_round = agn_optax.scan_round(step, tx.exchange, fragments=fragments)
        run = jax.jit(jax.vmap(whole_round, axis_name="workers"), donate_argnums=(0, 1))
        measured = jax.jit(problem.loss)

        @jax.jit
        def start(key: jax.Array) -> tuple[PyTree, Any]:
            params = problem.init(key)
            rows = jax.tree.map(lambda x: jnp.stack([x] * self.workers), params)
            return rows, jax.vmap(tx.init)(rows)

        def train(seed: int) -> tuple[jax.Array, jax.Array]:
            params, state = start(jax.random.key(seed))
            rng = np.random.default_rng(seed)
            for _ in range(self.rounds):
                params, state, _ = run(params, state, problem.draw(rng))
            # With pairs, all workers have centers of their own, else the same.
            each = agn_optax.center_params(state)
            return measured(jax.tree.map(lambda x: x.mean(axis=0), each), problem.test)

        return train


def size_of(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def bits_of(codec: codecs.Codec, params: PyTree) -> float:
    """Return the bits per parameter that are sent."""
    sent = jax.eval_shape(lambda x: codec.encode(x, codec.init(x))[0], params)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sent)]
    return round(8 * sum(sizes) / size_of(params), 3)


if __name__ == "__main__":
    Quality.main()
