"""Laws 11 to 13: codecs that lose nothing, and those that keep what they lose.

Gradients are multiples of a power of two, and so is all that is made of them: sums are
exact, whatever the program, and numbers can be compared bit for bit.
"""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import assert_identical, tree

import agn_optax
from agn_optax import codecs, rules
from agn_optax.center import Synchronous

PERIOD = 2
WORKERS = 2
INNER = optax.sgd(0.25)

RULES = {
    "agn": functools.partial(rules.agn, optax.sgd(0.5)),
    "agn_window": rules.agn_window,
    "downpour": rules.downpour,
    "diloco": functools.partial(rules.diloco, optax.sgd(0.5, momentum=0.5)),
    "easgd": functools.partial(rules.easgd, 0.5, rho=0.5),
}


def as_bytes():
    """Loses nothing, and sends arrays of other shapes and of another dtype."""

    def encode(leaf):
        data = jax.lax.bitcast_convert_type(leaf, jnp.uint8)  # [..., itemsize]
        half = data.shape[-1] // 2
        return {"low": data[..., :half], "high": data[..., half:].reshape(-1, half)}

    def decode(leaf, sent):
        high = sent["high"].reshape(sent["low"].shape)
        data = jnp.concatenate([sent["low"], high], axis=-1)
        return jax.lax.bitcast_convert_type(data, leaf.dtype)

    return codecs.Codec(
        lambda params: optax.EmptyState(),
        lambda contribution, state: (jax.tree.map(encode, contribution), state),
        lambda encoded, like: jax.tree.map(decode, like, encoded),
        name="bytes",
    )


def dyadic(like, *shape, seed=1):
    """Multiples of 1/4, as leaves of ``like`` with dimensions before theirs."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: rng.integers(-8, 9, (*shape, *jnp.shape(x))).astype(x.dtype) / 4,
        like,
    )


PARAMS = jax.tree.map(jnp.asarray, dyadic(tree(), seed=0))
GRADS = dyadic(tree(), 3 * PERIOD, WORKERS)  # [steps, workers, ...]


def step(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train(tx):
    """A drop-in's loop, for any way of having workers."""

    def one(params, grads):
        def body(carry, grads):
            return step(tx, *carry, grads), ()

        (params, state), _ = jax.lax.scan(body, (params, tx.init(params)), grads)
        return params, state.local.codec_state, state.center

    return one


# Every placement returns parameters, the codec's state and the center: of one worker,
# or of several, on the first dimension.


def drop_in(rule, params, grads):
    tx = agn_optax.exchange_every(INNER, rule, PERIOD)
    return jax.jit(train(tx))(params, of_worker(grads, 0))


def split(rule, params, grads):
    tx = agn_optax.phases(INNER, rule)
    local = jax.jit(functools.partial(step, tx))
    exchange = jax.jit(tx.exchange)
    state = tx.init(params)
    for i, each in enumerate(steps(of_worker(grads, 0))):
        params, state = local(params, state, each)
        if (i + 1) % PERIOD == 0:
            params, state = exchange(params, state)
    return params, state.local.codec_state, state.center


def scanned(rule, params, grads):
    tx = agn_optax.phases(INNER, rule)
    one_round = jax.jit(
        agn_optax.scan_round(
            lambda params, state, grads: (*step(tx, params, state, grads), ()),
            tx.exchange,
        )
    )
    state = tx.init(params)
    every = list(steps(of_worker(grads, 0)))
    for i in range(0, len(every), PERIOD):
        batches = jax.tree.map(lambda *g: np.stack(g), *every[i : i + PERIOD])
        params, state, _ = one_round(params, state, batches)
    return params, state.local.codec_state, state.center


def train_worker(worker, loop, grads):
    local = jax.jit(functools.partial(step, worker.tx))
    for each in steps(grads):
        loop = worker.exchange(*local(*loop, each))
    return loop


def embedded(rule, params, grads, **settings):
    center = agn_optax.LocalCenter(rule, params)
    worker = agn_optax.Worker(center, INNER, period=PERIOD, **settings)
    loop = train_worker(worker, worker.start(), of_worker(grads, 0))
    params, state = worker.flush(*loop)
    return params, state.codec_state, center.pull().params


# The answer is there after one local step, or is waited for: at any speed the same.
overlapping = functools.partial(embedded, overlap=True, patience=1)


def over_vmap(rule, params, grads):
    tx = agn_optax.exchange_every(INNER, rule, PERIOD, axis_name="workers")
    run = jax.vmap(train(tx), in_axes=(None, 1), axis_name="workers")
    return jax.jit(run)(params, grads)


def over_shard_map(rule, params, grads, placement=None):
    tx = agn_optax.exchange_every(
        INNER, rule, PERIOD, axis_name="workers", placement=placement
    )
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh(
        (WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def one(params, grads):
        first = jax.tree.map(lambda x: x[0], params)
        params, state, center = train(tx)(first, of_worker(grads, 0))
        center = agn_optax.center_params(center) if placement else center
        return jax.tree.map(lambda x: x[None], (params, state, center))

    run = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(P("workers"), P(None, "workers")),
        out_specs=P("workers"),
    )
    params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params)
    return jax.jit(run)(params, grads)


def synchronous(rule, params, grads):
    center = agn_optax.LocalCenter(rule, params, mode=Synchronous(), barrier=WORKERS)
    workers = [
        agn_optax.Worker(center, INNER, period=PERIOD, name=f"worker-{i}")
        for i in range(WORKERS)
    ]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as threads:
        ends = threads.map(
            lambda i: train_worker(workers[i], workers[i].start(), of_worker(grads, i)),
            range(WORKERS),
        )
        ends = [
            (params, state.codec_state, center.pull().params) for params, state in ends
        ]
    return jax.tree.map(lambda *x: np.stack(x), *ends)


ONE = [drop_in, split, scanned, embedded, overlapping]
MANY = [over_vmap, over_shard_map, synchronous]
placements = pytest.mark.parametrize("place", [*ONE, *MANY], ids=lambda p: name_of(p))


def name_of(place):
    return getattr(place, "__name__", "overlapping")


def of_worker(grads, worker):
    return jax.tree.map(lambda g: g[:, worker], grads)


def steps(grads):
    for i in range(jax.tree.leaves(grads)[0].shape[0]):
        yield jax.tree.map(lambda g: g[i], grads)  # noqa: B023


@pytest.mark.parametrize("rule", RULES)
@placements
def test_11_a_codec_that_loses_nothing_changes_nothing(place, rule):
    params, _, center = place(RULES[rule](), PARAMS, GRADS)
    coded = place(RULES[rule](codec=as_bytes()), PARAMS, GRADS)
    assert_identical((coded[0], coded[2]), (params, center))
