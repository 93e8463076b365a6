"""Parameters and a center of different dtypes: what is rounded, and when."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.support import assert_identical

import agn_optax
from agn_optax import rules

PAIRS = [
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float16"),
    ("float16", "bfloat16"),
    ("bfloat16", "float32"),
]

pairs = pytest.mark.parametrize(("dtype", "center_dtype"), PAIRS)


def numbers(dtype, seed=0):
    """Return numbers near 1 with all the digits of their dtype."""
    values = np.random.default_rng(seed).uniform(0.5, 2.0, 257)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def exchanged(form, rule, params, center):
    """Return parameters and center after an exchange with zero gradients."""
    still = jnp.zeros_like(params)
    if form == "worker":
        kept = agn_optax.LocalCenter(rule, center)
        worker = agn_optax.Worker(kept, optax.sgd(0.1), period=1)
        _, state = worker.start(params)
        _, state = worker.tx.update(still, state, params)
        params, _ = worker.exchange(jnp.copy(params), state)
        return params, kept.pull().params
    settings = {"center_dtype": center.dtype.name}
    if form == "drop_in":
        tx = agn_optax.exchange_every(optax.sgd(0.1), rule, 1, **settings)
        state = tx.init(params)._replace(center=center)
        updates, state = jax.jit(tx.update)(still, state, params)
        return optax.apply_updates(params, updates), state.center
    split = agn_optax.phases(optax.sgd(0.1), rule, **settings)
    params, state = split.exchange(params, split.init(params)._replace(center=center))
    return params, state.center


@pytest.mark.few(3)
@pairs
@pytest.mark.parametrize("form", ["worker", "drop_in", "split"])
def test_negligible_elastic_force_changes_nothing(form, dtype, center_dtype):
    params, center = numbers(dtype), numbers(center_dtype, seed=1)
    rule = rules.easgd(1e-30)
    assert_identical(exchanged(form, rule, params, center), (params, center))


@pairs
@pytest.mark.parametrize("form", ["worker", "drop_in", "split"])
def test_elastic_exchange_preserves_the_sum_up_to_rounding(form, dtype, center_dtype):
    # Close to each other, so that the force is far smaller than the values.
    params = numbers(dtype)
    center = (params.astype("float32") * 1.03).astype(center_dtype)
    total = np.float64(params) + np.float64(center)
    params, center = exchanged(form, rules.easgd(0.3), params, center)
    ulps = sum(
        np.spacing(np.abs(np.float64(x).astype("float32")))
        * 2.0 ** (23 - jnp.finfo(x.dtype).nmant)
        for x in (params, center)
    )
    drift = np.abs(np.float64(params) + np.float64(center) - total)
    assert (drift <= 0.6 * ulps).all()


@pytest.mark.few(3)
@pairs
@pytest.mark.parametrize("form", ["worker", "split"])
def test_elastic_force_larger_than_the_params_is_rounded_once(
    form, dtype, center_dtype
):
    params, center = numbers(dtype), 50 * numbers(center_dtype, seed=1)
    expected = 0.7 * np.float64(params) + 0.3 * np.float64(center)
    moved, _ = exchanged(form, rules.easgd(0.3), params, center)
    assert moved.dtype == dtype
    half = 0.5 * float(jnp.finfo(dtype).eps) + 4 * np.finfo(np.float32).eps
    np.testing.assert_allclose(np.float64(moved), expected, rtol=half)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("steps", [1, 257, 70_000])
@pytest.mark.parametrize("name", ["downpour", "agn_window", "easgd"])
def test_params_are_recovered_from_a_contribution(name, steps, dtype):
    """The steps may exceed the dtype: float16 has no 70,000, and bfloat16 no 257."""
    rule = {"easgd": rules.easgd(0.5)}.get(name) or getattr(rules, name)()
    anchor, params, steps = numbers(dtype), numbers(dtype, seed=1), jnp.int32(steps)
    params = params.at[0].set(anchor[0])
    with jax.debug_nans(True):
        sent = jax.jit(rule.contribution)((), params, anchor, steps)
        recover = jax.jit(rule.contribution.recover)
        found = recover(sent, jnp.zeros_like(params), anchor, steps)
    # The tolerance allows for a contribution that is rounded or subnormal.
    rounding = 2 * float(jnp.finfo(dtype).eps) + float(steps) * float(
        jnp.finfo(dtype).smallest_subnormal
    )
    np.testing.assert_allclose(np.float64(found), np.float64(params), atol=2 * rounding)
