"""Traffic on a mesh, and cost and savings of a center in shards.

Collectives and bytes are counted in the compiled programs. The exchanges run in turns
within one process, and every ratio is of two neighbors in time.

    python benchmarks/towers.py --millions 40 --towers 4
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import side_by_side
from report import Report, Row, parse
from traffic import traffic

import agn_optax
from agn_optax import codecs, rules

PyTree = Any
GRADIENTS = {
    "all-reduce": {},
    "reduce-scatter": {"algorithm": "reduce_scatter"},
    "buckets of 4 MiB": {"bucket_bytes": 2**22},
    "bfloat16, summed in float32": {
        "codec": codecs.cast("bfloat16"),
        "sum_dtype": "float32",
    },
    "8 bits, error feedback": {"codec": codecs.error_feedback(codecs.quantize(8))},
    "4 bits, error feedback": {"codec": codecs.error_feedback(codecs.quantize(4))},
    "1 bit, error feedback": {"codec": codecs.error_feedback(codecs.sign())},
    "8 bits in buckets of 4 MiB": {
        "codec": codecs.quantize(8),
        "bucket_bytes": 2**22,
    },
}
RULES: dict[str, Callable[[], rules.Rule]] = {
    "agn": lambda: rules.agn(optax.adam(1e-3)),
    "diloco": rules.diloco,
    "easgd": lambda: rules.easgd(0.1),
}


class Model:
    """Parameters in equal leaves; a gradient without any work, to see the rest."""

    def __init__(self, size: int, leaf: int) -> None:
        self.leaves = max(1, round(size / leaf))
        self.shape = (size // self.leaves,)
        self.bytes = 4 * self.leaves * self.shape[0]

    def params(self) -> PyTree:
        """Make new parameters."""
        return [jnp.full(self.shape, 0.5) for _ in range(self.leaves)]

    def step(self, tx: Any) -> Callable[..., Any]:
        """Return a train step of ``tx``."""

        def train_step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
            params, opt_state = state
            grads = jax.tree.map(lambda p: p * batch.mean(), params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), batch.mean()

        return train_step


def count(model: Model, towers: int, period: int) -> list[Row]:
    """Return collectives and bytes per step in every mode, averaged over a round."""
    rows = []
    minimum = 2 * (towers - 1) / towers * model.bytes  # all-reduce, per device

    def add(name: str, collectives: float, sent: float) -> None:
        rows.append(
            {
                "mode": name,
                "collectives": collectives,
                "megabytes": round(sent / 1e6, 3),
                "of_minimum": round(sent / minimum, 4),
            }
        )

    for name, options in GRADIENTS.items():
        mesh = agn_optax.Towers(towers)
        batch = mesh.shard(np.ones(towers, np.float32))
        reduce: Any = agn_optax.all_reduce("towers", **options)  # type: ignore[arg-type]
        tx = optax.chain(reduce, optax.sgd(0.1))
        seen = of_program(mesh, mesh.step(model.step(tx)), tx, model, batch)
        add(f"data parallel, {name}", seen.collectives, seen.bytes_sent)
    for workers in (towers, 2):
        mesh = agn_optax.Towers(towers, workers=workers)
        batch = mesh.shard(np.ones(towers, np.float32))
        split = agn_optax.phases(optax.sgd(0.1), rules.average(), axis_name="workers")
        tx = optax.chain(agn_optax.all_reduce("towers"), split)
        local = of_program(mesh, mesh.step(model.step(tx)), tx, model, batch)
        ending = mesh.apply(lambda s, split=split: split.exchange(*s))  # type: ignore[misc]
        exchange = of_program(mesh, ending, tx, model)
        mode = "independent" if workers == towers else f"{workers} islands"
        add(
            f"{mode}, period {period}",
            local.collectives + exchange.collectives / period,
            local.bytes_sent + exchange.bytes_sent / period,
        )
    return rows


def of_program(mesh: Any, program: Any, tx: Any, model: Model, *batch: Any) -> Any:
    """Return the traffic of one execution of a program on the mesh."""
    state = mesh.create(lambda p: (p, tx.init(p)), model.params())
    return traffic(program.lower(state, *batch).compile())


@dataclasses.dataclass
class Exchange(side_by_side.Form):
    """An exchange with one placement of the center."""

    rule: str
    mode: str
    center: str
    held: float  # bytes per tower: center, center optimizer's state, record
    temporary: float  # bytes per tower, allocated by the program


def exchanges(model: Model, towers: int, name: str, rule: rules.Rule) -> list[Exchange]:
    """Return the exchange of independent towers and of one data-parallel worker."""
    forms = []
    for mode, workers, axis in (
        ("independent", towers, "workers"),
        ("data parallel", 1, "towers"),
    ):
        mesh = agn_optax.Towers(towers, workers=workers)
        for label, shards in (("whole", None), ("in shards", axis)):
            tx = agn_optax.phases(
                optax.sgd(0.1),
                rule,
                axis_name="workers",
                placement=agn_optax.Placement(shard_axis=shards),
            )
            state = mesh.create(lambda p, tx=tx: (p, tx.init(p)), model.params())
            opt_state = state[1]
            kept = (
                opt_state.center,
                opt_state.center_state,
                opt_state.local.record,
                opt_state.local.anchor,
            )
            held = sum(
                leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(kept)
            )
            ending: Any = mesh.apply(lambda s, tx=tx: tx.exchange(*s))  # type: ignore[misc]
            program = ending.lower(state).compile()
            loop = [state]

            def run(loop: list[PyTree] = loop, program: Any = program) -> None:
                loop[0] = jax.block_until_ready(program(loop[0]))

            memory = program.memory_analysis()
            forms.append(
                Exchange(
                    name=f"{mode}, {label}",
                    peer=f"{mode}, whole",
                    run=run,
                    rule=name,
                    mode=mode,
                    center=label,
                    held=held,
                    temporary=memory.temp_size_in_bytes if memory else float("nan"),
                )
            )
    return forms


def main() -> None:
    parser = argparse.ArgumentParser(description="What a mesh sends and keeps.")
    add = parser.add_argument
    add("--millions", type=float, default=40, help="of parameters")
    add("--leaf", type=float, default=1, help="millions of parameters in a leaf")
    add("--towers", type=int, default=4, help="CPU devices where there are no others")
    add("--period", type=int, default=10)
    add("--repeats", type=int, default=15, help="exchanges measured of every form")
    args = parse(parser, millions=0.1, leaf=0.05, repeats=1)
    jax.config.update("jax_num_cpu_devices", args.towers)
    report = Report(args.json)
    model = Model(int(args.millions * 1e6), int(args.leaf * 1e6))
    size = f"{args.millions:g} M float32 parameters in {model.leaves} leaves"
    traffic_rows = count(model, args.towers, args.period)
    report.add("traffic", f"a step of {args.towers} towers sends, {size}", traffic_rows)
    exchange_rows = []
    for name, rule in RULES.items():
        forms = exchanges(model, args.towers, name, rule())
        rows = side_by_side.measure(forms, args.repeats, report.console)
        for form in forms:
            row = rows[form.name]
            exchange_rows.append(
                {
                    "rule": form.rule,
                    "mode": form.mode,
                    "center": form.center,
                    "ratio": row["ratio"],
                    "quartiles": row["quartiles"],
                    "milliseconds": round(1e3 * row["seconds"], 1),
                    "held": round(form.held / model.bytes, 3),
                    "temporary": round(form.temporary / model.bytes, 3),
                }
            )
        del forms, form  # frees their states
    title = f"an exchange of {args.towers} towers, {size}; memory of a tower in models"
    report.add("exchanges", title, exchange_rows)
    report.write()


if __name__ == "__main__":
    main()
