"""The table: combinations of rules, codecs, placements, dtypes and fragments.

Every combination converges to the known minimum of a convex function, keeps the types
of its state, compiles once, and continues bit for bit from a saved state. A new method
is a new line of `RULES` or of `CODECS`. There would be thousands of combinations: the
rows here have every value once and, among the slow tests, every pair of values.
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, shared
from helpers.support import assert_identical, nothing_compiles

import agn_optax
from agn_optax import center_optimizers as outer
from agn_optax import codecs, errors, robust, service
from agn_optax.center import Journal, ShardedCenter

PERIOD = 2
WORKERS = 2
INNER = shared.sgd(0.25)
MOMENTUM = shared.sgd(0.5, momentum=0.5)

RULES = {
    "agn": functools.partial(shared.agn, shared.sgd(0.5)),
    "agn_window": shared.agn_window,
    "average": shared.average,
    "diloco": functools.partial(shared.diloco, MOMENTUM),
    "downpour": shared.downpour,
    "dynsgd": shared.dynsgd,
    "easgd": functools.partial(shared.easgd, 0.4),
    "easgd_rho": functools.partial(shared.easgd, 0.4, rho=0.2),
    **{
        name: functools.partial(shared.diloco, center)
        for name, center in {
            "buffered": outer.buffered(shared.sgd(1.0), 2),
            "delayed": outer.delayed_nesterov(1.0, 0.5, delay=2),
            "drift": optax.chain(outer.scale_by_drift(1.0, history=2), shared.sgd(0.8)),
            "heloco": outer.heloco(0.8, 0.5),
            "isoloco": outer.isoloco(0.5, 0.5),
            "lookahead": outer.momentum_lookahead(0.8, 0.5),
            "ordered": outer.ordered_momentum(0.5, 0.5, messages=2),
            "rennala": outer.rennala(shared.sgd(1.0), 2),
            "restarts": outer.restart_momentum(MOMENTUM, 5),
            "ringleader": outer.ringleader(MOMENTUM, 1),
        }.items()
    },
    "median": lambda codec: dataclasses.replace(
        shared.average(codec=codec), combine=robust.median()
    ),
    "decoupled": functools.partial(shared.decoupled_diloco, MOMENTUM),
}
IN_ROUNDS = ("median", "decoupled")
# These read whole leaves, or have several models in their state.
ACROSS = ("drift", "heloco", "isoloco", "ringleader")
CODECS = {
    "identity": codecs.identity(),
    "cast": codecs.cast("bfloat16"),
    "quantize": codecs.quantize(8, block=4),
    "feedback": codecs.error_feedback(codecs.quantize(4, block=4)),
    "e3m0": codecs.error_feedback(codecs.quantize(4, block=4, format="e3m0")),
    # With the codebook of 2 bits, the sum of several workers' messages overshoots.
    "top_k": codecs.error_feedback(
        codecs.chain_codecs(codecs.top_k(2, block=4), codecs.quantize(4)),
        decay=0.95,
    ),
    "sign": codecs.error_feedback(codecs.sign(block=4)),
    "two_way": codecs.two_way(
        codecs.error_feedback(codecs.quantize(8, block=4)),
        answers="bfloat16",
    ),
}
DTYPES = ["float32", "bfloat16"]
FRAGMENTS = {
    "whole": None,
    "fragments": agn_optax.Fragments(2),
    "delayed": agn_optax.Fragments(2, delay=1, mixing=0.25),
    "random": agn_optax.Fragments(2, seed=1),
}
# The largest distance to the minimum after this many rounds.
ROUNDS = 70
LEFT = {"float32": 0.02, "bfloat16": 0.05}

BEST = {"w": np.linspace(-1, 1, 12).reshape(3, 4), "b": np.array(0.5)}
STEEP = {"w": np.linspace(0.5, 1, 12).reshape(3, 4), "b": np.array(1.0)}


def first_params(dtype):
    return jax.tree.map(lambda x: jnp.asarray(x + 1, dtype), BEST)


def local_step(tx, params, state):
    """Make a step towards the minimum."""
    grads = jax.tree.map(
        lambda x, best, steep: (x - best.astype(x.dtype)) * steep.astype(x.dtype),
        *(params, BEST, STEEP),
    )
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@dataclasses.dataclass
class Run:
    """A training loop in some placement."""

    loop: Any
    round: Callable[[Any], Any]  # a period with its exchange
    center: Callable[[Any], Any]
    again: Callable[
        [Any], Any
    ]  # return a new run that starts from a saved state of this one
    # Wait for an exchange in flight.
    flush: Callable[[Any], Any] = lambda loop: loop


# Every placement is a context manager, because some have servers.


def in_program(loop, one_round, center):
    """Return a run whose loop state is its only state."""

    def again(loop):
        saved = jax.device_get(loop)
        like = jax.tree.map(lambda x: x.sharding, loop)
        return dataclasses.replace(run, loop=jax.device_put(saved, like))

    run = Run(loop, one_round, center, again)
    return run


donated = functools.partial(jax.jit, donate_argnums=(0, 1))


@contextlib.contextmanager
def drop_in(rule, params, fragments):
    tx = agn_optax.exchange_every(INNER, rule, PERIOD, fragments=fragments)
    local = donated(functools.partial(local_step, tx))

    def one_round(loop):
        for _ in range(PERIOD):
            loop = local(*loop)
        return loop

    loop = (params, tx.init(params))
    yield in_program(loop, one_round, lambda loop: agn_optax.center_params(loop[1]))


@contextlib.contextmanager
def split(rule, params, fragments):
    tx = agn_optax.phases(INNER, rule, fragments=fragments)
    local = donated(functools.partial(local_step, tx))
    exchange = donated(tx.exchange, static_argnames=("fragment", "receive"))

    def due(step):
        if fragments is None:
            return [{}] if step == PERIOD else []
        return fragments.due(PERIOD + step, PERIOD)  # as in every round after the first

    def one_round(loop):
        for step in range(1, PERIOD + 1):
            loop = local(*loop)
            for which in due(step):
                loop = exchange(*loop, **which)
        return loop

    loop = (params, tx.init(params))
    yield in_program(loop, one_round, lambda loop: agn_optax.center_params(loop[1]))


def scan(tx, fragments):
    """Return a round as one program."""
    return agn_optax.scan_round(
        lambda params, state, _: (*local_step(tx, params, state), ()),
        tx.exchange,
        fragments=fragments,
    )


@contextlib.contextmanager
def scanned(rule, params, fragments):
    tx = agn_optax.phases(INNER, rule, fragments=fragments)
    feed = jnp.zeros(PERIOD)
    run = donated(scan(tx, fragments))
    loop = (params, tx.init(params))
    yield in_program(
        loop,
        lambda loop: run(*loop, feed)[:2],
        lambda loop: agn_optax.center_params(loop[1]),
    )


def of_first(tree):
    return jax.tree.map(lambda x: x[0], tree)


@contextlib.contextmanager
def over_vmap(rule, params, fragments):
    tx = agn_optax.phases(INNER, rule, axis_name="workers", fragments=fragments)
    run = donated(
        jax.vmap(scan(tx, fragments), in_axes=(0, 0, None), axis_name="workers"),
    )
    feed = jnp.zeros(PERIOD)
    params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params)
    loop = (params, jax.vmap(tx.init, axis_name="workers")(params))
    yield in_program(
        loop,
        lambda loop: run(*loop, feed)[:2],
        lambda loop: of_first(agn_optax.center_params(loop[1])),
    )


@contextlib.contextmanager
def on_towers(rule, params, fragments, placement=None):
    towers = agn_optax.Towers(WORKERS, workers=WORKERS)
    tx = agn_optax.phases(
        INNER, rule, axis_name="workers", placement=placement, fragments=fragments
    )
    run = towers.step(
        problem.whole_round(
            lambda state, _: (local_step(tx, *state), ()), tx.exchange, fragments
        )
    )
    feed = towers.shard(np.zeros((WORKERS, PERIOD)))
    loop = towers.create(lambda params: (params, tx.init(params)), params)
    yield in_program(
        loop,
        lambda loop: run(loop, feed)[0],
        lambda loop: towers.center_params(loop[1]),
    )


@functools.lru_cache(maxsize=32)
def step_of(tx):
    """Compile a step once for workers of all kinds of centers."""
    return donated(functools.partial(local_step, tx))


def with_worker(center, **settings):
    worker = agn_optax.Worker(center, INNER, period=PERIOD, name="anna", **settings)
    local = step_of(worker.tx)

    def one_round(loop):
        for _ in range(PERIOD):
            loop = worker.exchange(*local(*loop))
        return loop

    def flush(loop):
        return worker.flush(*loop)

    def of_center(_):
        return worker.center.pull().params

    parts = {"round": one_round, "center": of_center, "flush": flush}
    return worker, parts


@contextlib.contextmanager
def embedded(rule, params, fragments, **settings):
    if fragments is not None:
        settings["fragments"] = fragments

    def around(shards, begin):
        center = shards[0] if fragments is None else ShardedCenter(shards)
        worker, parts = with_worker(center, **settings)

        def again(loop):
            saved = [jax.device_get(shard.save()) for shard in shards]
            its_own = jax.device_get(worker.save(*loop))
            others = [agn_optax.LocalCenter.restore(rule, each) for each in saved]
            return around(others, lambda other: other.restore(its_own))

        return Run(begin(worker), again=again, **parts)

    count = 1 if fragments is None else len(fragments)
    shards = [agn_optax.LocalCenter(rule) for _ in range(count)]
    yield around(shards, lambda worker: worker.start(params, chief=True))


overlapping = functools.partial(embedded, overlap=True, patience=1)


@contextlib.contextmanager
def served(rule, params, fragments, shards=1):
    """Serve centers with journals; a resumed run starts servers on copies of these."""
    shards = shards if fragments is None else len(fragments)
    with contextlib.ExitStack() as stack:
        journals = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def around(folders, begin):
            servers = [
                stack.enter_context(service.serve(rule, durability=Journal(folder)))
                for folder in folders
            ]
            addresses = [server.address for server in servers]
            where = addresses if shards > 1 else addresses[0]
            center = stack.enter_context(
                contextlib.closing(service.connect(where, rule, timeout=60))
            )
            worker, parts = with_worker(center, fragments=fragments)
            stack.enter_context(worker)

            def again(loop):
                its_own = jax.device_get(worker.save(*loop))
                others = [
                    folder.with_name(f"{folder.name} again") for folder in folders
                ]
                for folder, other in zip(folders, others, strict=True):
                    shutil.copytree(folder, other)
                return around(others, lambda other: other.restore(its_own))

            return Run(begin(worker), again=again, **parts)

        folders = [journals / str(shard) for shard in range(shards)]
        yield around(folders, lambda worker: worker.start(params, chief=True))


PLACES = {
    "drop-in": drop_in,
    "split": split,
    "scanned": scanned,
    "vmap": over_vmap,
    "towers": on_towers,
    "shards of towers": functools.partial(
        on_towers, placement=agn_optax.Placement(shard_axis="workers")
    ),
    "in pairs": functools.partial(on_towers, placement=agn_optax.Placement(gossip=0.5)),
    "embedded": embedded,
    "overlapping": overlapping,
    "served": served,
    "in shards": functools.partial(served, shards=2),
}


def distance_to_minimum(center):
    """Return the largest distance to the minimum; it is 1 at first."""
    pairs = zip(jax.tree.leaves(center), jax.tree.leaves(BEST), strict=True)
    return max(np.abs(np.asarray(x, np.float64) - best).max() for x, best in pairs)


def types(loop):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.aval.weak_type), loop)


def check(rule, codec, place, dtype, fragments):
    made = RULES[rule](codec=CODECS[codec])
    with PLACES[place](made, first_params(dtype), FRAGMENTS[fragments]) as run:
        loop = run.loop
        for _ in range(4):  # overlap begins with the second exchange
            loop = run.round(loop)
        loop = run.flush(loop)
        saved = types(loop)
        with nothing_compiles():
            loop = run.round(loop)
        assert types(loop) == saved
        loop = run.flush(loop)
        resumed = run.again(loop)
        loop = run.round(loop)
        assert_identical(resumed.round(resumed.loop), loop)
        for _ in range(ROUNDS - 6):
            loop = run.round(loop)
        run.flush(loop)
        assert distance_to_minimum(run.center(loop)) <= LEFT[dtype] + unseen(
            rule, codec
        )


def unseen(rule, codec):
    """Return how far the params that a rule sends may be from those it decodes to.

    Gradients and displacements go to zero, and so do the losses of their codecs.
    """
    if not rule.startswith("easgd"):
        return 0.0
    codec, params = CODECS[codec], jax.tree.map(jnp.float32, BEST)
    sent, _ = codec.encode(params, codec.init(params))
    lost = distance_to_minimum(codec.decode(sent, params))
    # Error feedback adds the loss of a message to the next one.
    return lost if codec.returned is None else 2 * lost


def rejection(rule, codec, place, dtype, fragments):
    """Return the pattern of the error for an unsupported row; None if supported."""
    del dtype
    outside = ("embedded", "overlapping", "served", "in shards")
    if rule.startswith("easgd") and CODECS[codec].of_differences:
        return "must send all elements"
    if rule in IN_ROUNDS and place in outside:
        return "one by one"
    if fragments == "random" and rule in (*ACROSS, "decoupled"):
        return "fragments of random elements and"
    if fragments == "delayed":
        if place in ("shards of towers", "in pairs"):
            return "a message in flight needs one center"
        if rule.startswith("easgd"):
            return "mixing would reduce"
        if place == "overlapping":
            return "an answer is adopted when it arrives"
    # heloco and isoloco read whole leaves. A fragment has whole leaves, and so has a
    # shard here if the codec works by blocks.
    is_blockwise = codec not in ("identity", "cast")
    has_whole_leaves = rule in ("heloco", "isoloco") and is_blockwise
    if rule in ACROSS and (
        place == "shards of towers"
        or ((place, fragments) == ("in shards", "whole") and not has_whole_leaves)
    ):
        return "a center in shards and"
    if place == "in pairs" and codec != "identity":
        return "sends centers along"
    if place == "in pairs" and rule in IN_ROUNDS:
        return "it must be 'sum' or 'mean'"
    if place == "shards of towers" and codec not in ("identity", "cast"):
        return "a center in shards and"
    return None


def check_or_expect_rejection(row):
    reason = rejection(*row)
    if reason is None:
        check(*row)
    else:
        with pytest.raises(errors.InvalidArgumentError, match=reason):
            check(*row)


def each_once(*axes):
    """Return rows that contain every value at least once."""
    longest = max(map(len, axes))
    return [tuple(values[i % len(values)] for values in axes) for i in range(longest)]


def every_two(*axes):
    """Return rows in which every two values of different axes meet, found greedily."""

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    found = [(row, pairs(row)) for row in itertools.product(*axes)]
    missing, rows = set().union(*(meetings for _, meetings in found)), []
    # The pairs that a row adds only decrease, so they are counted when it is first.
    queue = [(-len(meetings), place) for place, (_, meetings) in enumerate(found)]
    while missing:
        promised, place = heapq.heappop(queue)
        row, meetings = found[place]
        adds = len(meetings & missing)
        if adds < -promised:
            heapq.heappush(queue, (-adds, place))
        else:
            rows.append(row)
            missing -= meetings
    return rows


AXES = [list(RULES), list(CODECS), list(PLACES), DTYPES, list(FRAGMENTS)]
SOME = each_once(*AXES)


@pytest.mark.parametrize("row", SOME, ids=", ".join)
@pytest.mark.few(8)
def test_every_value_in_one_combination(row):
    check_or_expect_rejection(row)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in every_two(*AXES) if row not in SOME], ids=", ".join
)
def test_every_two_values_in_one_combination(row):
    check_or_expect_rejection(row)
