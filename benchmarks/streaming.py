"""Effect of streaming on training: fragments, delays, mixing and eager updates.

Workers with equal shares of the data train a small network on scikit-learn's digits
with DiLoCo, as rows of a vmap. The center's loss and accuracy on the test half are
those after the last local step, when the last fragment has been exchanged. "most at
once" is the largest fraction of the model that a worker sends at a time.

    python benchmarks/streaming.py --rounds 20 --period 20 --momentum 0.5
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import CONSOLE, Benchmark
from quality import Problem, trained
from rich.progress import track
from sklearn.datasets import load_digits

from agn_optax import Fragments, rules

PyTree = Any
WIDTHS = (64, 96, 96, 96, 96, 10)
BATCH = 32


def init(key: jax.Array) -> PyTree:
    """Initialize a network, with a leaf for each matrix and each bias."""
    sizes = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(key, len(sizes))
    normal = [jax.random.normal(*each) for each in zip(keys, sizes, strict=True)]
    return [{"w": w * np.sqrt(2 / len(w)), "b": jnp.zeros(w.shape[1])} for w in normal]


def logits(params: PyTree, x: jax.Array) -> jax.Array:
    for i, layer in enumerate(params):
        x = (jax.nn.relu(x) if i else x) @ layer["w"] + layer["b"]
    return x


def problem(workers: int, period: int) -> Problem:
    """Return a problem in which each worker has a share of half of the digits."""
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    x, y = np.float32(bunch.data[order] / 16), bunch.target[order]
    half = len(x) // 2
    share = half // workers

    def draw(rng: np.random.Generator) -> PyTree:
        rows = rng.integers(0, share, (workers, period, BATCH))
        rows += share * np.arange(workers)[:, None, None]
        return x[rows], y[rows]

    return Problem(init, logits, draw, (x[half:], y[half:]), optax.adamw(1e-3))


class Streaming(
    Benchmark, quick="--rounds 2 --period 4 --workers 2 --delay 1 --seeds 1"
):
    """Effect of streaming on training.

    Args:
      rounds: rounds of training.
      period: local steps of a round.
      workers: workers.
      delay: local steps for which a fragment is in flight.
      momentum: momentum of the center optimizer.
      seeds: runs of each setting.
    """

    rounds: int = 20
    period: int = 20
    workers: int = 4
    delay: int = 5
    momentum: float = 0.9
    seeds: int = 3

    def run(self) -> None:
        """Add the table."""
        d, late = self.delay, min(round(0.9 * self.period), self.period - 1)
        settings: dict[str, Fragments | None] = {
            "all at once": None,
            "4 fragments": Fragments(4),
            f"4, delay {d}, mixing 0": Fragments(4, delay=d),
            f"4, delay {d}, mixing 0.5": Fragments(4, delay=d, mixing=0.5),
            f"4, delay {d}, eager": Fragments(4, delay=d, eager=True),
            f"1, delay {late}, mixing 0": Fragments(1, delay=late),
            f"1, delay {late}, eager": Fragments(1, delay=late, eager=True),
        }
        center = optax.sgd(0.7, momentum=self.momentum, nesterov=True)
        task, rule = problem(self.workers, self.period), rules.diloco(center)
        params, rows = init(jax.random.key(0)), []
        for name in track(settings, "training", console=CONSOLE, transient=True):
            fragments, parts = settings[name], [params]
            if fragments is not None:
                parts = fragments.divide(params).cut(params)
            sizes = [sum(x.size for x in jax.tree.leaves(part)) for part in parts]
            train = trained(task, rule, self.rounds, self.workers, fragments=fragments)
            losses, accuracies = np.array([train(seed) for seed in range(self.seeds)]).T
            rows.append(
                {
                    "setting": name,
                    "most_at_once": max(sizes) / sum(sizes),
                    "loss": losses.mean(),
                    "spread": losses.std(),
                    "accuracy": accuracies.mean(),
                }
            )
        title = f"DiLoCo with momentum {self.momentum:g}, {self.workers} workers, "
        title += f"{self.rounds} rounds of {self.period} steps, {self.seeds} seeds"
        self.add("streaming", f"{title}: the center on half of the digits", rows)


if __name__ == "__main__":
    Streaming.main()
