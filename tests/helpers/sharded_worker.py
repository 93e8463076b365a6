"""One process of a worker whose parameters are sharded over several processes.

python sharded_worker.py COORDINATOR PROCESSES PROCESS OWN LAYOUT NAME
    SCENARIO=ADDRESS ...

PROCESSES is the number of processes of the job, of which the worker has those from the
first to the last number of OWN, such as 1-2. It runs the scenarios one after another,
each at the center at its address, and prints a line of JSON for each. The tests run the
same scenarios in one process.
"""

import dataclasses
import json
import logging
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import agn_optax
from agn_optax import codecs, robust, rules, service
from agn_optax.center import BoundedStaleness, MessageLimits, Submission

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
# Added to the gradients, by the name of the worker. The first is the chief, and the
# messages of the last are bad.
WORKERS = {"anna": 0.0, "bert": 0.25, "carl": -0.5, "dora": 0.125, "emil": 64.0}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The actions of a worker at a center."""

    rule: Any
    shards: int = 1  # of the center
    serving: Any = None  # further keyword arguments of `serve`
    settings: Any = None  # keyword arguments of Worker, but for its name
    steps: int = 12
    weight: Any = None
    flush: bool = False
    returns: bool = False  # whether the worker leaves and starts again
    together: bool = False  # whether all of WORKERS run it, in rounds
    overtaken_at: tuple[int, ...] = ()  # steps before which another worker exchanges
    timed: bool = False  # whether results depend on the times at which answers arrive
    # Whether the center has moved by the sum of the worker's updates and its residual.
    adds_up: bool = False


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
        rules.downpour(codec=by_codec["quantize"]), adds_up=True, **overlaps
    )
    made["weights"] = Scenario(by_rule["diloco"], weight=2.5, flush=True, steps=13)
    made["dynamic"] = Scenario(
        by_rule["agn"], settings={"period": agn_optax.dynamic_period(4)}
    )
    made["returns"] = Scenario(by_rule["downpour"], returns=True)
    made["shards"] = Scenario(by_rule["agn"], shards=3)
    made["shards_quantize"] = Scenario(
        rules.downpour(codec=by_codec["quantize"]), shards=2, adds_up=True
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
    for name, shards, norm in (("rejected", 1, 6.0), ("shards_rejected", 2, 4.25)):
        limits = service.Limits(messages=MessageLimits(norm=norm))
        made[name] = Scenario(
            rules.downpour(codec=by_codec["quantize"]),
            shards=shards,
            serving={"limits": limits},
            # Messages of more steps are larger, and some exceed the limit.
            settings={"period": lambda exchanges: 2 + 3 * (exchanges % 3)},
            steps=30,
        )
    made["dropped"] = Scenario(
        rules.downpour(codec=by_codec["quantize"]),
        serving={"mode": BoundedStaleness(versions=1)},
        overtaken_at=(4, 5),
    )
    made["rounds"] = Scenario(by_rule["diloco"], together=True)
    # Krum reads whole messages, which no shard of a center has.
    for name, combine, shards in (
        ("median", robust.median(), 2),
        ("krum", robust.krum(1), 1),
        ("krum_keep", robust.krum(1, keep=2), 1),
        ("radial", robust.radial(), 2),
    ):
        rule = dataclasses.replace(by_rule["diloco"], combine=combine)
        made[f"rounds_{name}"] = Scenario(rule, shards=shards, together=True)
    return made


SCENARIOS = _scenarios()


def params():
    """Return the first parameters, as NumPy arrays."""
    rng = np.random.default_rng(3)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def mesh_of(layout, processes, first=0):
    """Return the mesh of a layout, whose devices may also be those of one process.

    Args:
      layout: name of the layout.
      processes: number of the worker's processes.
      first: index of the first of them.
    """
    shape, axes = (processes,), ("a",)
    if layout == "both":
        shape, axes = (processes, 2), ("a", "b")
    size = math.prod(shape)
    begin = first * size // processes
    return jax.make_mesh(
        shape,
        axes,
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
        devices=jax.devices()[begin : begin + size],
    )


def by_pieces(scenario, layout, processes):
    """Return a scenario for one process that encodes each device's piece by itself."""
    codec, mesh = scenario.rule.codec, mesh_of(layout, processes)
    if codec.reads == "element":
        return scenario

    def indices(name, leaf):
        sharding = NamedSharding(mesh, LAYOUTS[layout][name])
        found = sharding.devices_indices_map(leaf.shape).values()
        return {str(index): index for index in found}.values()

    def cut(tree):  # a shard of a center has None in place of others' leaves
        return {
            name: leaf if leaf is None else [leaf[i] for i in indices(name, leaf)]
            for name, leaf in tree.items()
        }

    def decode(encoded, like):
        pieces, joined = codec.decode(encoded, cut(like)), dict(like)
        for name, leaf in like.items():
            if leaf is None:
                continue
            for index, piece in zip(indices(name, leaf), pieces[name], strict=True):
                joined[name] = joined[name].at[index].set(piece)
        return joined

    own = dataclasses.replace(
        codec,
        init=lambda params: codec.init(cut(params)),
        encode=lambda contribution, state: codec.encode(cut(contribution), state),
        decode=decode,
    )
    rule = dataclasses.replace(scenario.rule, codec=own)
    return dataclasses.replace(scenario, rule=rule)


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

    Returns:
      The worker, its parameters, and trees like these: the sum of all ``updates``, and
      the ``residual``, if the center's movement is the sum of both.
    """
    settings = {"period": 4, **(scenario.settings or {})}
    worker = agn_optax.Worker(
        center, optax.sgd(0.125, momentum=0.5), name=name, give_up=TIMEOUT, **settings
    )

    @jax.jit
    def step(params, state, total):
        grads = jax.tree.map(
            lambda x: jnp.where(x > 0.1, 0.25 * x, -0.5) + WORKERS[name], params
        )
        updates, state = worker.tx.update(grads, state, params)
        return (
            optax.apply_updates(params, updates),
            state,
            optax.tree.add(total, updates),
        )

    with worker:
        for _ in range(1 + scenario.returns):
            params, state = worker.start(first, chief=name == "anna")
            total = jax.tree.map(lambda x: 0 * x, params)
            for number in range(scenario.steps):
                # The message of a round is complete only with the first process's.
                if number in scenario.overtaken_at and jax.process_index() == 0:
                    move(center)
                params, state, total = step(params, state, total)
                params, state = worker.exchange(params, state, weight=scenario.weight)
            if scenario.flush:
                params, state = worker.flush(params, state)
            params, state = worker.receive(params, state)
    sums = {}
    if scenario.adds_up:
        sums = {"updates": total, "residual": state.codec_state.residual}
    return worker, params, sums


def move(center):
    """Make an exchange of another worker."""
    codec, session = center.rule.codec, center.join("other")
    message = {name: jnp.full(shape, 0.25) for name, shape in SHAPES.items()}
    encoded, _ = codec.encode(message, codec.init(message))
    session.exchange(Submission(1, encoded, center.describe().version))
    session.leave()


def numbers(worker):
    """Return what a worker says about its exchanges."""
    names = ("exchanges", "rejected", "dropped", "rejection")
    return {name: getattr(worker, name) for name in names}


def pieces(tree):
    """Return the pieces that this process has, as nested lists with their starts."""
    found = {}
    for name, leaf in sorted(tree.items()):
        for shard in leaf.addressable_shards:
            begin = [part.indices(n)[0] for part, n in zip(shard.index, leaf.shape)]  # noqa: B905
            found[f"{name} {begin}"] = np.asarray(shard.data).tolist()
    return found


def main():
    coordinator, processes, process, own, layout, name, *scenarios = sys.argv[1:]
    first, last = map(int, own.split("-"))
    logging.basicConfig(level=logging.WARNING)
    jax.config.update("jax_num_cpu_devices", 2 if layout == "both" else 1)
    jax.distributed.initialize(coordinator, int(processes), int(process))
    mesh = mesh_of(layout, last + 1 - first, first)
    for given in scenarios:
        key, _, address = given.partition("=")
        scenario = SCENARIOS[key]
        with service.connect(
            address,
            scenario.rule,
            timeout=TIMEOUT,
            fragments=(scenario.settings or {}).get("fragments"),
        ) as center:
            worker, adopted, sums = run(scenario, center, name, sharded(layout, mesh))
            said = {
                "scenario": key,
                "numbers": numbers(worker),
                "specs": [str(x.sharding.spec) for x in jax.tree.leaves(adopted)],
                "pieces": pieces(adopted),
                "sums": {key: pieces(tree) for key, tree in sums.items()},
            }
            sys.stdout.write(f"\nRESULT {json.dumps(said)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
