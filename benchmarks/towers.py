"""Traffic on a mesh, and cost and savings of a center in shards.

Collectives and bytes are counted in the compiled programs. The exchanges run in turns
within one process, and every ratio is of two neighbors in time.

    python benchmarks/towers.py --millions 40
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import Benchmark, Form, Row, Run
from optimizer_overhead import RULES

import agn_optax
from agn_optax import rules
from tests.helpers.traffic import traffic

PyTree = Any
TOWERS = 4  # CPU devices where there are no others
PERIOD = 10  # steps between exchanges
GRADIENTS: dict[str, Row] = {
    "all-reduce": {},
    "buckets of 4 MiB": {"bucket_bytes": 2**22},
}


class Mesh(Benchmark, quick="--millions 0.1 --leaf 0.05"):
    """Bytes that a mesh sends and keeps.

    Args:
      millions: parameters.
      leaf: millions of parameters in a leaf.
    """

    millions: float = 40.0
    leaf: float = 1.0

    def run(self) -> None:
        """Add a table of the traffic, and one of the exchanges."""
        jax.config.update("jax_num_cpu_devices", TOWERS)
        leaves = max(1, round(self.millions / self.leaf))
        shape = (int(1e6 * self.millions) // leaves,)
        self.params = [jnp.full(shape, 0.5) for _ in range(leaves)]
        self.bytes = sum(leaf.nbytes for leaf in self.params)
        title = f"{TOWERS} towers, {self.millions:g} M parameters in {leaves} leaves"
        self.add("traffic", f"a step of {title} sends", list(self.traffic()))
        rows = [
            row for name in ("agn", "diloco", "easgd") for row in self.exchanges(name)
        ]
        self.add("exchanges", f"an exchange of {title}; memory in models", rows)

    def traffic(self) -> Iterator[Row]:
        """Yield collectives and bytes of a step in every mode, the mean of a round."""
        split = agn_optax.phases(optax.sgd(0.1), rules.average(), axis_name="workers")
        modes: dict[str, tuple[int, Row, Any]] = {
            f"data parallel, {name}": (1, options, optax.sgd(0.1))
            for name, options in GRADIENTS.items()
        }
        modes[f"independent, period {PERIOD}"] = TOWERS, {}, split
        modes[f"2 islands, period {PERIOD}"] = 2, {}, split
        for name, (workers, options, inner) in modes.items():
            mesh: Any = agn_optax.Towers(TOWERS, workers=workers)
            tx = optax.chain(agn_optax.all_reduce("towers", **options), inner)
            state = self.state(mesh, tx)
            batch = mesh.shard(np.ones(TOWERS, np.float32))
            step = traffic(mesh.step(train_step(tx)).lower(state, batch).compile())
            collectives, sent = float(step.collectives), float(step.bytes_sent)
            if inner is split:
                exchange = traffic(compiled(mesh, split, state))
                collectives += exchange.collectives / PERIOD
                sent += exchange.bytes_sent / PERIOD
            least = 2 * (TOWERS - 1) / TOWERS * self.bytes  # all-reduce
            yield {
                "mode": name,
                "collectives": collectives,
                "megabytes": round(sent / 1e6, 3),
                "of_minimum": round(sent / least, 4),
            }

    def state(self, mesh: Any, tx: Any) -> Any:
        """Make parameters and optimizer state on a mesh."""
        return mesh.create(lambda params: (params, tx.init(params)), self.params)

    def exchanges(self, rule: str) -> list[Row]:
        """Measure exchanges of independent towers and of one data-parallel worker."""
        forms, held = [], []
        for mode, workers, axis in (
            ("independent", TOWERS, "workers"),
            ("data parallel", 1, "towers"),
        ):
            mesh = agn_optax.Towers(TOWERS, workers=workers)
            for name, shard_axis in (("whole", None), ("in shards", axis)):
                at = agn_optax.Placement(shard_axis=shard_axis)
                how: Row = {"axis_name": "workers", "placement": at}
                tx = agn_optax.phases(optax.sgd(0.1), RULES[rule], **how)
                params, own = self.state(mesh, tx)
                kept = jax.tree.leaves((own.center, own.center_state, own.local))
                held.append(sum(x.addressable_shards[0].data.nbytes for x in kept))
                run = repeated(compiled(mesh, tx, (params, own)), (params, own))
                forms.append(Form(f"{mode}, {name}", f"{mode}, whole", run))
        rows = self.turns(forms).rows(forms)
        for row, each in zip(rows, held, strict=True):
            row |= {"rule": rule, "held": round(each / self.bytes, 3)}
        return rows


def train_step(tx: Any) -> Any:
    """Return a train step whose gradient needs no work."""

    def step(state: PyTree, batch: jax.Array) -> tuple[PyTree, jax.Array]:
        params, opt_state = state
        grads = jax.tree.map(lambda p: p * batch.mean(), params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), batch.mean()

    return step


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
