"""Memory of the compiled programs: no needless temporary of the model's size."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.support import DROP_INS, RULES

import agn_optax

SIZE = 1 << 18
MODEL = SIZE * 4  # bytes


def compiled(function, *args):
    return jax.jit(function, donate_argnums=(0, 1)).lower(*args).compile()


@pytest.fixture
def params():
    return {"w": jnp.ones(SIZE // 2), "v": jnp.ones(SIZE // 2)}


def compiled_step(tx, params, state):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return compiled(step, params, state, params)


def split(inner, rule, params):
    tx = agn_optax.phases(inner, rule)
    return tx, params, tx.init(params)


def worker(inner, rule, params):
    center = agn_optax.LocalCenter(rule, params)
    made = agn_optax.Worker(center, inner, period=10)
    return made.tx, *made.start()


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("inner", ["sgd", "adam"])
@pytest.mark.parametrize("form", [split, worker])
def test_local_step_has_no_temporary_of_model_size(form, rule, inner, params):
    tx_and_loop = form(getattr(optax, inner)(1e-3), RULES[rule](), params)
    memory = compiled_step(*tx_and_loop).memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * MODEL
    # Everything is updated in place: all outputs live in donated arguments.
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024


@pytest.mark.parametrize("rule", RULES)
def test_exchange_writes_into_donated_buffers(rule, params):
    split = agn_optax.phases(optax.adam(1e-3), RULES[rule]())
    memory = compiled(split.exchange, params, split.init(params)).memory_analysis()
    # The elastic rules compute both new arrays from both old ones: one is copied.
    assert memory.temp_size_in_bytes <= (1.6 if "easgd" in rule else 0.01) * MODEL
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024


@pytest.mark.parametrize("rule", DROP_INS)
def test_drop_in_step_has_no_branch_and_writes_in_place(rule, params):
    tx = DROP_INS[rule](optax.adam(1e-3), 10)
    program = compiled_step(tx, params, tx.init(params))
    assert "conditional" not in program.as_text()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024
    # A message that needs the parameters needs the updates in memory; the elastic rules
    # compute both new arrays from both old ones. Other temporaries hold one leaf at a
    # time.
    models = 0 if rule == "agn" else 2 if "easgd" in rule else 1
    leaf = 0.5 if models else 0.0
    assert memory.temp_size_in_bytes <= (models + leaf + 0.01) * MODEL


LEAVES = 4
FRAGMENTS = agn_optax.Fragments(LEAVES)


@pytest.fixture
def leaves():
    return {f"leaf {i}": jnp.ones(SIZE // LEAVES) for i in range(LEAVES)}


@pytest.mark.parametrize("rule", ["agn", "diloco"])
def test_fragment_exchange_accesses_only_its_fragment(rule, leaves):
    whole, split = (
        agn_optax.phases(optax.adam(1e-3), RULES[rule](), fragments=fragments)
        for fragments in (None, FRAGMENTS)
    )
    exchange = functools.partial(split.exchange, fragment=1)
    one = compiled(exchange, leaves, split.init(leaves))
    memory = one.memory_analysis()
    assert memory.temp_size_in_bytes <= 0.01 * MODEL
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024
    every = compiled(whole.exchange, leaves, whole.init(leaves))
    share = accessed(one) / accessed(every)
    assert 0.9 / LEAVES < share < 1.1 / LEAVES


def accessed(program):
    return program.cost_analysis()["bytes accessed"]


@pytest.mark.parametrize("rule", ["agn", "diloco", "easgd"])
@pytest.mark.parametrize("delay", [0, 2])
def test_drop_in_step_with_fragments_has_no_branch_and_writes_in_place(
    rule, delay, leaves
):
    tx = agn_optax.exchange_every(
        optax.adam(1e-3),
        RULES[rule](),
        10,
        fragments=agn_optax.Fragments(LEAVES, delay=delay),
    )
    program = compiled_step(tx, leaves, tx.init(leaves))
    assert "conditional" not in program.as_text()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024
    models = 0 if rule == "agn" else 1
    assert memory.temp_size_in_bytes <= (models + 2 / LEAVES + 0.01) * MODEL
