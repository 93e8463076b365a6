"""Training loops do not block, transfer data, or compile after the second call."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import shared, support
from helpers.support import DROP_INS, RULES, held, nothing_compiles

import agn_optax
from agn_optax import service

PERIOD = 3
TARGET = jnp.zeros(3)
step = functools.partial(jax.jit, donate_argnums=(0, 1))


# Each context yields the first state of a loop and a function: a step for the drop-in
# optimizers, a period for the others.


@contextlib.contextmanager
def drop_in(name):
    tx = DROP_INS[name](shared.adam(0.1), PERIOD)
    params = jnp.ones(3)
    local = step(functools.partial(support.step, tx))
    yield (params, tx.init(params)), lambda loop: local(*loop, TARGET)


@contextlib.contextmanager
def split(name):
    tx = agn_optax.phases(shared.adam(0.1), RULES[name]())
    params = jnp.ones(3)
    local, exchange = step(functools.partial(support.step, tx)), step(tx.exchange)

    def period(loop):
        for _ in range(PERIOD):
            loop = local(*loop, TARGET)
        return exchange(*loop)

    yield (params, tx.init(params)), period


@contextlib.contextmanager
def scanned(name):
    tx = agn_optax.phases(shared.adam(0.1), RULES[name]())
    params, targets = jnp.ones(3), jnp.zeros((PERIOD, 3))
    run = step(
        agn_optax.scan_round(
            lambda *loop_and_feed: (*support.step(tx, *loop_and_feed), None),
            tx.exchange,
        )
    )
    yield (params, tx.init(params)), lambda loop: run(*loop, targets)[:2]


@functools.cache
def local_step(tx):
    """Compile a step once for the workers of all kinds of centers."""
    return step(functools.partial(support.step, tx))


@contextlib.contextmanager
def with_worker(center, **settings):
    worker = agn_optax.Worker(center, shared.adam(0.1), period=PERIOD, **settings)
    local = local_step(worker.tx)

    def period(loop):
        for _ in range(PERIOD):
            loop = worker.exchange(*local(*loop, TARGET))
        return loop

    with worker:
        yield worker.start(), period


@contextlib.contextmanager
def embedded(name):
    center = agn_optax.LocalCenter(RULES[name](), jnp.ones(3))
    with with_worker(center) as loop:
        yield loop


@contextlib.contextmanager
def served(name, **settings):
    rule = RULES[name]()
    with (
        service.serve(rule, jnp.ones(3)) as server,
        service.connect(server.address, rule, timeout=60) as center,
        with_worker(center, **settings) as loop,
    ):
        yield loop


@contextlib.contextmanager
def towers(name):
    mesh = agn_optax.Towers(4, workers=2)
    tx = agn_optax.exchange_every(
        shared.adam(0.1), RULES[name](), PERIOD, axis_name="workers"
    )
    tx = optax.chain(agn_optax.all_reduce("towers"), tx)

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: ((p - batch) ** 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    local = mesh.step(train_step)
    params, batch = jnp.ones(3), mesh.shard(jnp.zeros((4, 3)))

    def period(state):
        for _ in range(PERIOD):
            state, _ = local(state, batch)
        return state

    yield mesh.replicate((params, tx.init(params))), period


overlapping = functools.partial(served, overlap=True)
FORMS = {
    form.__name__: form for form in (drop_in, split, scanned, embedded, served, towers)
} | {"overlapping": overlapping}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_loop_neither_compiles_nor_transfers_after_the_second_call(form, name):
    # Overlap begins with the second exchange, and its response comes a round later.
    first = 4 if form == "overlapping" else 2
    with FORMS[form](name) as (loop, call):
        for _ in range(first):
            loop = call(loop)
        with nothing_compiles(), jax.transfer_guard("disallow"):
            for _ in range(2 * PERIOD):
                loop = call(loop)


@pytest.mark.few(3)
# The loop of an embedded center is tested in tests/center/test_worker.py; that of a
# served center must wait for the device.
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *itertools.product(["drop_in", "split", "scanned"], ["agn", "easgd_rho"]),
        ("towers", "agn"),
    ],
)
def test_loop_does_not_block_on_the_device(form, name):
    """A whole period and its exchange are dispatched while the first step computes."""
    calls = PERIOD if form == "drop_in" else 1
    with FORMS[form](name) as (loop, call):
        for _ in range(2 * calls):
            loop = call(loop)
        with held() as hold:
            loop = (hold(loop[0]), loop[1])
            for _ in range(calls):
                loop = call(loop)
            assert not any(leaf.is_ready() for leaf in jax.tree.leaves(loop[0]))
        jax.block_until_ready(loop)
