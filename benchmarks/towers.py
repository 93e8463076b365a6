"""Traffic on a mesh, and cost and savings of a center in shards.

Collectives and bytes are counted in the compiled programs. The exchanges run in turns
within one process, and every ratio is of two neighbors in time.

    python benchmarks/towers.py --millions 40 --towers 4
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import Benchmark, Form, Row, Run
from traffic import Traffic, traffic

import agn_optax
from agn_optax import codecs, rules

PyTree = Any


def feedback(codec: codecs.Codec) -> Row:
    return {"codec": codecs.error_feedback(codec)}


GRADIENTS: dict[str, Row] = {
    "all-reduce": {},
    "buckets of 4 MiB": {"bucket_bytes": 2**22},
    "bfloat16, summed in float32": {
        "codec": codecs.cast("bfloat16"),
        "sum_dtype": "float32",
    },
    "8 bits, error feedback": feedback(codecs.quantize(8)),
    "4 bits, error feedback": feedback(codecs.quantize(4)),
    "1 bit, error feedback": feedback(codecs.sign()),
}
RULES = {
    "agn": rules.agn(optax.adam(1e-3)),
    "diloco": rules.diloco(),
    "easgd": rules.easgd(0.1),
}


class Mesh(Benchmark, quick="--millions 0.1 --leaf 0.05"):
    """What a mesh sends and keeps.

    Args:
      millions: parameters.
      leaf: millions of parameters in a leaf.
      towers: CPU devices where there are no others.
      period: steps between exchanges.
    """

    millions: float = 40.0
    leaf: float = 1.0
    towers: int = 4
    period: int = 10

    def run(self) -> None:
        """Add a table of the traffic, and one of the exchanges."""
        jax.config.update("jax_num_cpu_devices", self.towers)
        leaves = max(1, round(self.millions / self.leaf))
        shape = (int(1e6 * self.millions) // leaves,)
        self.params = [jnp.full(shape, 0.5) for _ in range(leaves)]
        self.bytes = sum(leaf.nbytes for leaf in self.params)
        title = f"{self.millions:g} M float32 parameters in {leaves} leaves"
        rows = self.traffic()
        self.add("traffic", f"a step of {self.towers} towers sends, {title}", rows)
        rows = [row for name in RULES for row in self.exchanges(name)]
        title = f"{self.towers} towers, {title}; memory of a tower in models"
        self.add("exchanges", f"an exchange of {title}", rows)

    def traffic(self) -> list[Row]:
        """Return collectives and bytes of a step in every mode, the mean of a round."""
        least = 2 * (self.towers - 1) / self.towers * self.bytes  # all-reduce, a device
        sent: dict[str, tuple[float, float]] = {}
        for name, options in GRADIENTS.items():
            reduce = agn_optax.all_reduce("towers", **options)
            tx = optax.chain(reduce, optax.sgd(0.1))
            step = self.step(agn_optax.Towers(self.towers), tx)
            sent[f"data parallel, {name}"] = step.collectives, step.bytes_sent
        for mode, workers in {"independent": self.towers, "2 islands": 2}.items():
            mesh = agn_optax.Towers(self.towers, workers=workers)
            split = agn_optax.phases(
                optax.sgd(0.1), rules.average(), axis_name="workers"
            )
            tx = optax.chain(agn_optax.all_reduce("towers"), split)
            step = self.step(mesh, tx)
            exchange = traffic(compiled(mesh, split, self.state(mesh, tx)))
            sent[f"{mode}, period {self.period}"] = (
                step.collectives + exchange.collectives / self.period,
                step.bytes_sent + exchange.bytes_sent / self.period,
            )
        return [
            {
                "mode": name,
                "collectives": collectives,
                "megabytes": round(each / 1e6, 3),
                "of_minimum": round(each / least, 4),
            }
            for name, (collectives, each) in sent.items()
        ]

    def state(self, mesh: Any, tx: Any) -> Any:
        """Make parameters and optimizer state on a mesh."""
        return mesh.create(lambda params: (params, tx.init(params)), self.params)

    def step(self, mesh: Any, tx: Any) -> Traffic:
        """Return the traffic of a train step, whose gradient needs no work."""

        def train_step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
            params, opt_state = state
            grads = jax.tree.map(lambda p: p * batch.mean(), params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), batch.mean()

        batch = mesh.shard(np.ones(self.towers, np.float32))
        lowered = mesh.step(train_step).lower(self.state(mesh, tx), batch)
        return traffic(lowered.compile())

    def exchanges(self, rule: str) -> list[Row]:
        """Measure exchanges of independent towers and of one data-parallel worker."""
        forms, held = [], []
        for mode, workers, axis in (
            ("independent", self.towers, "workers"),
            ("data parallel", 1, "towers"),
        ):
            mesh = agn_optax.Towers(self.towers, workers=workers)
            for name, shard_axis in (("whole", None), ("in shards", axis)):
                placement = agn_optax.Placement(shard_axis=shard_axis)
                tx = agn_optax.phases(
                    optax.sgd(0.1),
                    RULES[rule],
                    axis_name="workers",
                    placement=placement,
                )
                state = self.state(mesh, tx)
                kept = jax.tree.leaves(
                    (state[1].center, state[1].center_state, state[1].local)
                )
                own = sum(leaf.addressable_shards[0].data.nbytes for leaf in kept)
                held.append(round(own / self.bytes, 3))
                run = repeated(compiled(mesh, tx, state), state)
                forms.append(Form(f"{mode}, {name}", f"{mode}, whole", run))
        rows = self.turns(forms).rows(forms)
        return [
            {"rule": rule, **row, "held": models}
            for row, models in zip(rows, held, strict=True)
        ]


def compiled(mesh: Any, tx: Any, state: PyTree) -> Any:
    """Compile an exchange on a mesh."""
    return mesh.apply(lambda state: tx.exchange(*state)).lower(state).compile()


def repeated(program: Any, state: PyTree) -> Run:
    def run() -> None:
        nonlocal state
        state = jax.block_until_ready(program(state))

    return run


if __name__ == "__main__":
    Mesh.main()
