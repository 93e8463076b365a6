"""One process of a worker whose parameters are sharded over several processes.

python sharded_worker.py COORDINATOR PROCESSES PROCESS LAYOUT NAME SCENARIO=ADDRESS ...

It runs the scenarios one after another, each at the center at its address, and prints a
line of JSON for each. The tests run the same scenarios in one process.
"""

import dataclasses
import json
import logging
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import agn_optax
from agn_optax import codecs, rules, service

# Encoded in blocks of 8, the rows of "u" on two devices have the shape of "u" again.
SHAPES = {"w": (8, 16), "v": (4, 8), "u": (2, 4, 8), "b": (3,), "s": ()}
# Specs of the leaves, by the name of a layout.
LAYOUTS = {
    "fsdp": {"w": P("a"), "v": P("a")},
    "stacked": {"w": P("a"), "v": P("a"), "u": P("a")},
    "tensor": {"w": P(None, "a"), "v": P(None, "a"), "u": P(None, None, "a")},
    "both": {"w": P("a", "b"), "v": P("b", "a"), "u": P("b")},
    "replicated": {},
}
LAYOUTS = {
    name: {**dict.fromkeys(SHAPES, P()), **specs} for name, specs in LAYOUTS.items()
}
TIMEOUT = 20.0  # s
# Added to the gradients, by the name of the worker. The first is the chief.
WORKERS = {"anna": 0.0, "bert": 0.25, "carl": -0.5}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The actions of a worker at a center."""

    rule: Any
    shards: int = 1  # of the center
    settings: Any = None  # keyword arguments of Worker, but for its name
    steps: int = 12
    weight: Any = None
    flush: bool = False
    returns: bool = False  # whether the worker leaves and starts again
    together: bool = False  # whether all of WORKERS run it, in rounds
    timed: bool = False  # whether results depend on the times at which answers arrive


def _scenarios():
    feedback = codecs.error_feedback
    by_rule = {
        "agn": rules.agn(optax.adam(0.1)),
        "agn_window": rules.agn_window(),
        "downpour": rules.downpour(),
        "dynsgd": rules.dynsgd(),
        "easgd": rules.easgd(0.25),
        "easgd_rho": rules.easgd(0.25, rho=0.125),
        "average": rules.average(),
        "diloco": rules.diloco(),
    }
    by_codec = {
        "cast": codecs.cast("bfloat16"),
        "quantize": feedback(codecs.quantize(4, block=8)),
        "top_k": feedback(codecs.top_k(2, block=8)),
        "sign": feedback(codecs.sign(block=8)),
        "chain": feedback(
            codecs.chain_codecs(codecs.top_k(4, block=8), codecs.quantize(8, block=8))
        ),
    }
    made = {name: Scenario(rule) for name, rule in by_rule.items()}
    for name, codec in by_codec.items():
        made[name] = Scenario(rules.agn(optax.sgd(0.5), codec=codec))
    overlaps = {"settings": {"overlap": True}, "flush": True, "timed": True}
    made["overlap"] = Scenario(by_rule["agn"], **overlaps)
    made["overlap_downpour"] = Scenario(
        rules.downpour(codec=by_codec["quantize"]), **overlaps
    )
    made["weights"] = Scenario(by_rule["diloco"], weight=2.5, flush=True, steps=13)
    made["dynamic"] = Scenario(
        by_rule["agn"], settings={"period": agn_optax.dynamic_period(4)}
    )
    made["returns"] = Scenario(by_rule["downpour"], returns=True)
    made["shards"] = Scenario(by_rule["agn"], shards=3)
    made["shards_quantize"] = Scenario(
        rules.downpour(codec=by_codec["quantize"]), shards=2
    )
    made["fragments"] = Scenario(
        by_rule["diloco"],
        shards=2,
        settings={"fragments": agn_optax.Fragments(2), "period": 4},
        flush=True,
    )
    made["fragments_delay"] = Scenario(
        by_rule["diloco"],
        shards=2,
        settings={
            "fragments": agn_optax.Fragments(2, delay=1, mixing=0.5),
            "period": 4,
        },
        flush=True,
    )
    made["rounds"] = Scenario(by_rule["diloco"], together=True)
    return made


SCENARIOS = _scenarios()


def params():
    """Return the first parameters, as NumPy arrays."""
    rng = np.random.default_rng(3)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def sharded(layout, mesh):
    """Return the first parameters as global arrays."""
    specs = LAYOUTS[layout]
    return {
        name: jax.make_array_from_callback(
            array.shape,
            NamedSharding(mesh, specs[name]),
            lambda index, array=array: array[index],
        )
        for name, array in params().items()
    }


def run(scenario, center, name, first):
    """Run a scenario, whose gradients treat each element by itself.

    All factors are powers of two, so that a product and its sum are rounded once, no
    matter whether the compiler fuses them; so are periods, by which AGN divides.
    """
    settings = {"period": 4, **(scenario.settings or {})}
    worker = agn_optax.Worker(
        center, optax.sgd(0.125, momentum=0.5), name=name, give_up=TIMEOUT, **settings
    )

    @jax.jit
    def step(loop):
        params, state = loop
        grads = jax.tree.map(
            lambda x: jnp.where(x > 0.1, 0.25 * x, -0.5) + WORKERS[name], params
        )
        updates, state = worker.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with worker:
        for _ in range(1 + scenario.returns):
            loop = worker.start(first, chief=name == "anna")
            for _ in range(scenario.steps):
                loop = worker.exchange(*step(loop), weight=scenario.weight)
            if scenario.flush:
                loop = worker.flush(*loop)
            loop = worker.receive(*loop)
    return worker, loop[0]


def pieces(tree):
    """Return the pieces that this process has, as nested lists with their starts."""
    found = {}
    for name, leaf in sorted(tree.items()):
        for shard in leaf.addressable_shards:
            begin = [part.indices(n)[0] for part, n in zip(shard.index, leaf.shape)]  # noqa: B905
            found[f"{name} {begin}"] = np.asarray(shard.data).tolist()
    return found


def main():
    coordinator, processes, process, layout, name, *scenarios = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING)
    jax.config.update("jax_num_cpu_devices", 2 if layout == "both" else 1)
    jax.distributed.initialize(coordinator, int(processes), int(process))
    shape, axes = (int(processes),), ("a",)
    if layout == "both":
        shape, axes = (int(processes), 2), ("a", "b")
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(shape, axes, axis_types=auto)
    for given in scenarios:
        key, _, address = given.partition("=")
        scenario = SCENARIOS[key]
        with service.connect(
            address,
            scenario.rule,
            timeout=TIMEOUT,
            fragments=(scenario.settings or {}).get("fragments"),
        ) as center:
            worker, last = run(scenario, center, name, sharded(layout, mesh))
            said = {
                "scenario": key,
                "exchanges": worker.exchanges,
                "specs": [str(x.sharding.spec) for x in jax.tree.leaves(last)],
                "pieces": pieces(last),
            }
            sys.stdout.write(f"\nRESULT {json.dumps(said)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
