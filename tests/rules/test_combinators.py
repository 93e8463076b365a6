"""The combinators, alone and in chains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.support import assert_close, assert_identical, tree
from hypothesis import given
from hypothesis import strategies as st

import agn_optax

finite = st.floats(-100, 100, width=32)


def test_accumulate_sums_and_counts():
    tx = agn_optax.accumulate()
    params = tree()
    state = tx.init(params)
    for step in range(1, 4):
        total, state = jax.jit(tx.update)(params, state)
        assert_close(total, jax.tree.map(lambda x: step * x, params))  # noqa: B023
        assert_identical(total, state.sum)
        assert int(state.steps) == step


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", jnp.float32])
def test_accumulate_keeps_the_given_dtype(dtype):
    tx = agn_optax.accumulate(dtype=dtype)
    params = jnp.ones(2, jnp.bfloat16)
    total, state = tx.update(params, tx.init(params))
    assert total.dtype == state.sum.dtype == jnp.dtype(dtype or jnp.bfloat16)


def test_float32_sum_of_bfloat16_gradients_is_exact():
    gradient = jnp.asarray(1.0, jnp.bfloat16)
    sums = {}
    for dtype in ("bfloat16", "float32"):
        tx = agn_optax.accumulate(dtype=dtype)
        update = jax.jit(tx.update)
        state = tx.init(gradient)
        for _ in range(300):
            total, state = update(gradient, state)
        sums[dtype] = float(total)
    assert sums == {"float32": 300.0, "bfloat16": 256.0}


@given(st.lists(finite, min_size=1, max_size=8))
def test_accumulate_then_normalize_is_the_running_mean(values):
    tx = optax.chain(agn_optax.accumulate(), agn_optax.normalize())
    state = tx.init(jnp.zeros(()))
    for value in values:
        mean, state = tx.update(jnp.float32(value), state)
    np.testing.assert_allclose(mean, np.mean(values), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("steps", [1, 3, 257, 1001])
def test_normalize_divides_by_steps_in_any_dtype(dtype, steps):
    # bfloat16 has no 257: dividing in it would divide by 256.
    tx = agn_optax.normalize()
    updates = jnp.asarray(514.0, dtype)
    for given_steps in (steps, jnp.int32(steps)):
        scaled, _ = tx.update(updates, tx.init(updates), steps=given_steps)
        assert scaled.dtype == updates.dtype
        expected = np.float32(updates) / steps
        assert float(scaled) == float(jnp.asarray(expected, dtype))


def test_normalize_of_zero_steps_is_zero():
    tx = agn_optax.normalize()
    zero = jnp.zeros(2)
    assert_identical(tx.update(zero, tx.init(zero), steps=0)[0], zero)


@given(st.floats(0, 2, width=32), finite, finite, finite)
def test_elastic_pull_is_the_gradient_of_a_spring(rate, u, x, c):
    def spring(x):
        return 0.5 * rate * (x - c) ** 2

    tx = agn_optax.elastic_pull(rate)
    pulled, _ = tx.update(
        jnp.float32(u), tx.init(None), jnp.float32(x), center=jnp.float32(c)
    )
    expected = u + float(jax.grad(spring)(x))
    np.testing.assert_allclose(pulled, expected, rtol=1e-4, atol=1e-3)


def test_elastic_pull_in_a_chain_converges_to_the_center():
    tx = optax.chain(agn_optax.elastic_pull(1.0), optax.sgd(0.5))
    params, center = jnp.array([4.0]), jnp.array([1.0])
    state = tx.init(params)
    for _ in range(20):
        updates, state = tx.update(jnp.zeros(1), state, params, center=center)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, center, atol=1e-4)


def test_elastic_pull_takes_the_difference_in_the_wider_dtype():
    tx = agn_optax.elastic_pull(1.0)
    params, center = jnp.asarray(1.0, jnp.bfloat16), jnp.float32(1.0 + 2**-12)
    pulled, _ = tx.update(
        jnp.zeros((), jnp.float32), tx.init(None), params, center=center
    )
    assert float(pulled) == -(2**-12)


@pytest.mark.parametrize("staleness", [0, 1, 7])
def test_scale_by_staleness_divides_by_staleness_plus_one(staleness):
    tx = optax.chain(agn_optax.scale_by_staleness(), optax.sgd(1.0))
    message = tree()
    updates, _ = tx.update(message, tx.init(message), staleness=staleness)
    assert_close(updates, jax.tree.map(lambda m: -m / (staleness + 1), message))


@pytest.mark.parametrize(
    ("tx", "extra"),
    [
        (agn_optax.accumulate(dtype="float32"), {}),
        (agn_optax.normalize(), {"steps": 3}),
        (agn_optax.elastic_pull(0.3), {"center": jnp.ones(2, jnp.float32)}),
        (agn_optax.scale_by_staleness(), {"staleness": 3}),
    ],
    ids=["accumulate", "normalize", "elastic_pull", "scale_by_staleness"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_combinators_work_under_strict_promotion(tx, extra, dtype):
    params = jnp.ones(2, dtype)
    with jax.numpy_dtype_promotion("strict"):
        tx.update(params, tx.init(params), params, unknown=1, **extra)
