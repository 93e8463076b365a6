"""Time and memory of an optimizer step with a rule, relative to one without.

Gradients are given, buffers are donated, and adam is the inner optimizer. All forms run
in turns within one process, period after period, and every ratio is of two neighbors in
time, because on a shared machine only such ratios are meaningful. The median is
printed, with the quartiles in brackets.

    python benchmarks/optimizer_overhead.py --millions 10 40
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import side_by_side
from report import Report, Row, parse

import agn_optax
from agn_optax import rules

PyTree = Any

# Rules that keep no record; agn has separate rows.
RECORDLESS: dict[str, Callable[[], rules.Rule]] = {
    "downpour": rules.downpour,
    "agn_window": rules.agn_window,
    "diloco": rules.diloco,
    "easgd": functools.partial(rules.easgd, 0.1),
}


def adam() -> optax.GradientTransformation:
    return optax.adam(1e-3)


@dataclasses.dataclass
class Form(side_by_side.Form):
    """One way to make a period of steps."""

    temporary: float  # bytes that its programs allocate besides their arguments


class Bench:
    """All forms for parameters of one size, in equal leaves."""

    def __init__(self, size: int, leaf: int, period: int) -> None:
        self.leaves = max(1, round(size / leaf))
        self.shape = (size // self.leaves,)
        self.bytes = 4 * self.leaves * self.shape[0]
        self.period = period
        self.grads = [jnp.full(self.shape, 0.1) for _ in range(self.leaves)]

    def params(self) -> PyTree:
        """Make parameters in separate buffers, to be donated."""
        return [jnp.full(self.shape, 0.5 + i) for i in range(self.leaves)]

    def stepping(
        self, name: str, tx: Any, *, exchange: bool = False, peer: str = "plain"
    ) -> Form:
        """Make a form with a program for a step, and one for the exchange if asked."""

        def step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = self.params()
        loop = [params, tx.init(params)]
        local = self._compile(step, *loop, self.grads)
        ending = self._compile(tx.exchange, *loop) if exchange else None

        def run() -> None:
            params, state = loop
            for _ in range(self.period):
                params, state = local(params, state, self.grads)
            if ending is not None:
                params, state = ending(params, state)
            loop[:] = jax.block_until_ready((params, state))

        return Form(name, peer, run, self._temporary(local, ending))

    def scanned(self, name: str, tx: Any, *, peer: str) -> Form:
        """Make a form with one program for the whole period."""

        def nothing(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            return params, state

        finish = getattr(tx, "exchange", nothing)

        def period(
            params: PyTree, state: PyTree, grads: PyTree
        ) -> tuple[PyTree, PyTree]:
            def local_step(params: PyTree, state: PyTree, _: Any) -> Any:
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state, ()

            whole = agn_optax.scan_round(local_step, finish)
            return whole(params, state, jnp.arange(self.period))[:2]

        params = self.params()
        loop = [params, tx.init(params)]
        program = self._compile(period, *loop, self.grads)

        def run() -> None:
            loop[:] = jax.block_until_ready(program(*loop, self.grads))

        return Form(name, peer, run, self._temporary(program))

    def forms(self) -> list[Form]:
        """Every form, its peer before it."""
        agn = agn_optax.phases(adam(), rules.agn(adam()))
        forms = [
            self.stepping("plain", adam()),
            self.stepping("MultiSteps", optax.MultiSteps(adam(), self.period)),
            self.stepping("agn, drop-in", agn_optax.agn(adam(), self.period)),
            self.stepping("agn, local phase alone", agn),
            self.stepping("agn, split", agn, exchange=True),
            self.scanned("plain, scanned", adam(), peer="plain"),
            self.scanned("agn, round", agn, peer="plain, scanned"),
        ]
        for name, rule in RECORDLESS.items():
            tx = agn_optax.phases(adam(), rule())
            drop_in = agn_optax.exchange_every(adam(), rule(), self.period)
            forms += [
                self.stepping(f"{name}, drop-in", drop_in),
                self.stepping(f"{name}, split", tx, exchange=True),
                self.scanned(f"{name}, round", tx, peer="plain, scanned"),
            ]
        return forms

    @staticmethod
    def _compile(function: Callable[..., Any], *args: PyTree) -> Any:
        return jax.jit(function, donate_argnums=(0, 1)).lower(*args).compile()

    @staticmethod
    def _temporary(*programs: Any) -> float:
        return max(
            program.memory_analysis().temp_size_in_bytes
            for program in programs
            if program
        )


def measure(bench: Bench, repeats: int, report: Report) -> list[Row]:
    """One row per form: its time per step, and relative to its peer's."""
    forms = bench.forms()
    rows = side_by_side.measure(forms, repeats, report.console)
    for form in forms:
        row = rows[form.name]
        row["ms_a_step"] = 1e3 * row.pop("seconds") / bench.period
        row["temporary,_models"] = round(form.temporary / bench.bytes, 2)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of the optimizers.")
    add = parser.add_argument
    add("--millions", type=float, nargs="+", default=[10, 40], help="of parameters")
    add("--leaf", type=float, default=1, help="millions of parameters in a leaf")
    add("--period", type=int, default=10)
    add("--repeats", type=int, default=15, help="periods measured of every form")
    args = parse(parser, millions=[0.1], leaf=0.05, repeats=1)
    report = Report(args.json)
    for millions in args.millions:
        bench = Bench(int(millions * 1e6), int(args.leaf * 1e6), args.period)
        rows = measure(bench, args.repeats, report)
        title = (
            f"{millions:g} M float32 parameters in {bench.leaves} leaves, adam, "
            f"period {args.period}"
        )
        report.add(f"{millions:g} M", title, rows)
    report.write()


if __name__ == "__main__":
    main()
