"""Time and memory of an optimizer step with a rule, relative to one without.

Gradients are given, buffers are donated, and adam is the inner optimizer. All forms run
in turns within one process, period after period, and every ratio is of two neighbors in
time, because on a shared machine only such ratios are meaningful. The median is
printed, with the quartiles in brackets.

The last table has a whole training step of a multilayer perceptron, gradient included.
(In another run, the same step with TensorFlow 1.14's AGNOptimizer took 1.15 times as
long as with its plain optimizer.)

    python benchmarks/optimizer_overhead.py --millions 10 40
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from measuring import Benchmark, Form

import agn_optax
from agn_optax import rules

PyTree = Any

ADAM = optax.adam(1e-3)
RULES = {
    "agn": rules.agn(ADAM),
    "downpour": rules.downpour(),
    "agn_window": rules.agn_window(),
    "diloco": rules.diloco(),
    "easgd": rules.easgd(0.1),
}


def form_of(
    name: str, tx: Any, params: PyTree, batch: PyTree, gradient: Any, period: int
) -> tuple[Form, float]:
    """Return a form of a period of steps, and the temporary bytes of its programs.

    By its name, it has a program for all of it ("round", "scanned"), or one for a step
    and one for the exchange ("split"), or no exchange beside the steps.

    Args:
      name: name of the form.
      tx: the optimizer.
      params: the first parameters, which are donated.
      batch: the batch of all steps.
      gradient: (params, batch) -> gradient.
      period: steps.
    """

    def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    def ending(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        return tx.exchange(params, state)

    def whole(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def local(params: PyTree, state: PyTree, _: Any) -> Any:
            return *step(params, state, batch), ()

        exchange = getattr(tx, "exchange", lambda *loop: loop)
        whole_round = agn_optax.scan_round(local, exchange)
        return whole_round(params, state, jnp.arange(period))[:2]

    parts = [(step, period), (ending, 1)] if "split" in name else [(step, period)]
    if "round" in name or "scanned" in name:
        parts = [(whole, 1)]
    loop = [params, tx.init(params)]
    programs: list[tuple[Any, int]] = [
        (jax.jit(part, donate_argnums=(0, 1)).lower(*loop, batch).compile(), times)
        for part, times in parts
    ]

    def run() -> None:
        for program, times in programs:
            for _ in range(times):
                loop[:] = program(*loop, batch)
        jax.block_until_ready(loop)

    used = [program.memory_analysis().temp_size_in_bytes for program, _ in programs]
    return Form(name, "plain, scanned" if "round" in name else "plain", run), max(used)


def loss(params: PyTree, inputs: jax.Array) -> jax.Array:
    """Return the loss of an autoencoder."""
    hidden = inputs
    for weights in params:
        hidden = jnp.tanh(hidden @ weights)
    return jnp.mean((hidden - inputs) ** 2)


class Overhead(Benchmark, quick="--millions 0.1 --leaf 0.05 --width 50"):
    """Overhead of the optimizers.

    Args:
      millions: parameters.
      leaf: millions of parameters in a leaf.
      width: width of the four layers of the whole step.
      period: steps between exchanges.
    """

    millions: Sequence[float] = (10.0, 40.0)
    leaf: float = 1.0
    width: int = 1581  # 10 M
    period: int = 10

    def run(self) -> None:
        """Add a table for each number of parameters, and one of whole steps."""
        for millions in self.millions:
            leaves = max(1, round(millions / self.leaf))
            shape = (int(1e6 * millions) // leaves,)
            grads = [jnp.full(shape, 0.1) for _ in range(leaves)]
            title = f"{millions:g} M float32 parameters in {leaves} leaves"
            self.table(f"{millions:g} M", title, grads, grads, lambda _, grads: grads)
        keys, width = jax.random.split(jax.random.key(0), 5), self.width
        like = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]
        inputs = jax.random.normal(keys[0], (64, width))
        title = f"training step of 4 layers of {width} by {width}, batch 64"
        self.table("train_step", title, like, inputs, jax.grad(loss))

    def table(
        self, key: str, title: str, like: PyTree, batch: PyTree, gradient: Any
    ) -> None:
        """Measure all forms in turns, or of whole steps those of adam and AGN."""
        forms, temporary = [], []
        for name, tx in self.optimizers().items():
            if key != "train_step" or name in ("plain", "agn, drop-in", "agn, split"):
                params = jax.tree.map(jnp.copy, like)  # to be donated
                form, used = form_of(name, tx, params, batch, gradient, self.period)
                forms.append(form)
                temporary.append(used / sum(leaf.nbytes for leaf in like))
        rows = self.turns(forms).rows(forms)
        for row, models in zip(rows, temporary, strict=True):
            row["ms_a_step"] = row["milliseconds"] / self.period
            row["temporary,_models"] = round(models, 2)
        self.add(key, f"{title}, adam, period {self.period}", rows)

    def optimizers(self) -> dict[str, Any]:
        """Return an optimizer for each form."""
        optimizers: dict[str, Any] = {"plain": ADAM, "plain, scanned": ADAM}
        optimizers["MultiSteps"] = optax.MultiSteps(ADAM, self.period)
        optimizers["agn, local phase alone"] = agn_optax.phases(ADAM, RULES["agn"])
        for name, rule in RULES.items():
            drop_in = agn_optax.exchange_every(ADAM, rule, self.period)
            split = agn_optax.phases(ADAM, rule)
            optimizers |= {f"{name}, drop-in": drop_in, f"{name}, split": split}
            optimizers[f"{name}, round"] = split
        return optimizers


if __name__ == "__main__":
    Overhead.main()
