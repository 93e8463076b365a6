"""What the compiled programs do with memory: nothing of the model's size too much."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support import RULES

import agn_optax

SIZE = 1 << 18
MODEL = SIZE * 4  # bytes


def compiled(function, *args):
    return jax.jit(function, donate_argnums=(0, 1)).lower(*args).compile()


@pytest.fixture
def params():
    return {"w": jnp.ones(SIZE // 2), "v": jnp.ones(SIZE // 2)}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_the_local_phase_has_no_temporary_of_the_models_size(rule, inner, params):
    split = agn_optax.phases(getattr(optax, inner)(1e-3), RULES[rule]())

    def local(params, state, grads):
        updates, state = split.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    memory = compiled(local, params, split.init(params), params).memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * MODEL
    # Everything is updated in place: all outputs live in donated arguments.
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024


@pytest.mark.parametrize("rule", RULES)
def test_the_exchange_writes_into_donated_buffers(rule, params):
    split = agn_optax.phases(optax.adam(1e-3), RULES[rule]())
    memory = compiled(split.exchange, params, split.init(params)).memory_analysis()
    # The elastic rules mix two arrays into each other: one has to step aside.
    assert memory.temp_size_in_bytes <= (1.6 if "easgd" in rule else 0.01) * MODEL
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024


def test_the_drop_in_agn_has_no_branch_and_no_temporary(params):
    tx = agn_optax.agn(optax.adam(1e-3), 10)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = compiled(step, params, tx.init(params), params)
    assert "conditional" not in program.as_text()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - 1024
    assert memory.temp_size_in_bytes < 0.01 * MODEL
