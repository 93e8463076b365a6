"""Time of a whole training step, gradient included, with AGN and without.

The model is a multilayer perceptron, adam is the inner optimizer, and buffers are
donated. A run is a period of steps, so its exchange is included; "ratio" is the time
relative to plain adam's. (In another run, the same step with TensorFlow 1.14's
AGNOptimizer took 1.15 times as long as with its plain optimizer.)

    python benchmarks/train_step.py --millions 10 --batch 64
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from measuring import Benchmark, Form
from optimizer_overhead import PyTree, adam, stepping

import agn_optax

LAYERS = 4


def loss(params: PyTree, inputs: jax.Array) -> jax.Array:
    """Return the loss of an autoencoder."""
    layer = lambda hidden, weights: jnp.tanh(hidden @ weights)  # noqa: E731
    return jnp.mean((functools.reduce(layer, params, inputs) - inputs) ** 2)


class TrainStep(Benchmark, quick="--millions 0.01"):
    """Whole training steps.

    Args:
      millions: parameters.
      batch: rows of a batch.
      period: steps between exchanges.
    """

    millions: float = 10.0
    batch: int = 64
    period: int = 10

    def run(self) -> None:
        """Add the table."""
        split: Any = agn_optax.phases(adam(), agn_optax.rules.agn(adam()))
        forms = [
            self.form("adam", adam(), None),
            self.form("agn, drop-in", agn_optax.agn(adam(), self.period), None),
            self.form("agn, split", split, split.exchange),
        ]
        rows = self.turns(forms).rows(forms)
        for row in rows:
            row["milliseconds_a_step"] = row["milliseconds"] / self.period
        title = f"{self.millions:g} M parameters, batch {self.batch}"
        self.add("train_step", f"training step of {title}, period {self.period}", rows)

    def form(self, name: str, tx: Any, exchange: Any) -> Form:
        """Return a form of a period of steps."""
        width = round((1e6 * self.millions / LAYERS) ** 0.5)
        keys = jax.random.split(jax.random.key(0), LAYERS)
        layers = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
        inputs = jax.random.normal(jax.random.key(1), (self.batch, width))
        run, _ = stepping(tx, layers, inputs, jax.grad(loss), self.period, exchange)
        return Form(name, "adam", run)


if __name__ == "__main__":
    TrainStep.main()
