"""Time and memory of an optimizer step with a rule, relative to one without.

Gradients are given, buffers are donated, and adam is the inner optimizer. All forms run
in turns within one process, period after period, and every ratio is of two neighbors in
time, because on a shared machine only such ratios are meaningful. The median is
printed, with the quartiles in brackets.

    python benchmarks/optimizer_overhead.py --millions 10 40
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from measuring import Benchmark, Form, Run

import agn_optax
from agn_optax import rules

PyTree = Any


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-3)


RULES = {
    "agn": rules.agn(adam()),
    "downpour": rules.downpour(),
    "agn_window": rules.agn_window(),
    "diloco": rules.diloco(),
    "easgd": rules.easgd(0.1),
}


def compiled(function: Callable[..., Any], *args: PyTree) -> Any:
    """Compile a program that donates its first two arguments."""
    return jax.jit(function, donate_argnums=(0, 1)).lower(*args).compile()


def stepping(
    tx: Any, params: PyTree, batch: PyTree, gradient: Any, period: int, exchange: Any
) -> tuple[Run, list[Any]]:
    """Return a function that makes a period of steps, and its programs.

    Args:
      tx: the optimizer.
      params: the first parameters, which are donated.
      batch: the batch of all steps.
      gradient: (params, batch) -> gradient.
      period: steps.
      exchange: (params, state) -> (params, state), after the steps; None for none.
    """

    def step(params: PyTree, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    loop = [params, tx.init(params)]
    local = compiled(step, *loop, batch)
    ending = [compiled(exchange, *loop)] if exchange else []

    def run() -> None:
        for _ in range(period):
            loop[:] = local(*loop, batch)
        for program in ending:
            loop[:] = program(*loop)
        jax.block_until_ready(loop)

    return run, [local, *ending]


def scanned(
    tx: Any, params: PyTree, grads: PyTree, period: int
) -> tuple[Run, list[Any]]:
    """Return what `stepping` does, in one program for the whole period."""
    exchange = getattr(tx, "exchange", lambda *loop: loop)

    def whole(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        def step(params: PyTree, state: PyTree, _: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, ()

        whole_round = agn_optax.scan_round(step, exchange)
        return whole_round(params, state, jnp.arange(period))[:2]

    loop = [params, tx.init(params)]
    program = compiled(whole, *loop, grads)

    def run() -> None:
        loop[:] = jax.block_until_ready(program(*loop, grads))

    return run, [program]


class Overhead(Benchmark, quick="--millions 0.1 --leaf 0.05"):
    """Overhead of the optimizers.

    Args:
      millions: parameters.
      leaf: millions of parameters in a leaf.
      period: steps between exchanges.
    """

    millions: Sequence[float] = (10.0, 40.0)
    leaf: float = 1.0
    period: int = 10

    def run(self) -> None:
        """Add a table for each number of parameters."""
        for millions in self.millions:
            self.table(millions, max(1, round(millions / self.leaf)))

    def table(self, millions: float, leaves: int) -> None:
        """Measure all forms in turns."""
        shape = (int(1e6 * millions) // leaves,)
        grads = [jnp.full(shape, 0.1) for _ in range(leaves)]
        forms, temporary = [], {}
        for name, tx in self.optimizers().items():
            # In separate buffers, to be donated.
            params = [jnp.full(shape, 0.5 + i) for i in range(leaves)]
            if "round" in name or "scanned" in name:
                run, programs = scanned(tx, params, grads, self.period)
            else:
                given = lambda _, grads: grads  # noqa: E731
                exchange = tx.exchange if "split" in name else None
                run, programs = stepping(
                    tx, params, grads, given, self.period, exchange
                )
            peer = "plain, scanned" if "round" in name else "plain"
            forms.append(Form(name, peer, run))
            used = [each.memory_analysis().temp_size_in_bytes for each in programs]
            temporary[name] = max(used) / sum(leaf.nbytes for leaf in grads)
        rows = self.turns(forms).rows(forms)
        for row in rows:
            row["ms_a_step"] = row["milliseconds"] / self.period
            row["temporary,_models"] = round(temporary[row["form"]], 2)
        title = f"{millions:g} M float32 parameters in {leaves} leaves, adam"
        self.add(f"{millions:g} M", f"{title}, period {self.period}", rows)

    def optimizers(self) -> dict[str, Any]:
        """Return an optimizer for each form, the peers first."""
        made: dict[str, Any] = {"plain": adam(), "plain, scanned": adam()}
        made["MultiSteps"] = optax.MultiSteps(adam(), self.period)
        for name, rule in RULES.items():
            drop_in = agn_optax.exchange_every(adam(), rule, self.period)
            split = agn_optax.phases(adam(), rule)
            made |= {f"{name}, drop-in": drop_in, f"{name}, split": split}
            made |= {f"{name}, local phase alone": split, f"{name}, round": split}
        return made


if __name__ == "__main__":
    Overhead.main()
