"""The norm of a message shows if it is finite and not far too large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import sessions, shared

from agn_optax.center import LocalCenter, PackedCenter, Store

SIZES = [0.0, 1e-15, 1e-12, 1.0, 1e4, 1e15]
HUGE = [2e19, 1e30, 3e38]


def message(size, dtype="float32"):
    # There are enough elements that their sum overflows where single squares do not.
    values = np.random.default_rng(0).uniform(0.1, 1.0, (50, 41)) * size
    return {"a": values[:3].astype(dtype), "b": values[3:].astype(dtype)}


def make_store(flatten, dtype="float32"):
    center = jax.tree.map(np.zeros_like, message(1.0, dtype))
    store = Store(shared.downpour(), center, None, None, flatten=flatten)
    assert (store.packing is not None) == flatten
    return store


def norm_of(store, sent):
    return float(store.measure(store.place(sent), store.current.params)[0])


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_norm_is_right_if_its_square_is_in_the_range_of_float32(size, flatten):
    sent = message(size)
    exact = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in sent.values()))
    found = norm_of(make_store(flatten), sent)
    np.testing.assert_allclose(found, exact, rtol=1e-5)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("size", HUGE)
def test_norm_of_a_huge_message_is_infinite(size, flatten):
    """NumPy must not warn, because the warning as an error would fail the exchange."""
    assert norm_of(make_store(flatten), message(size)) == np.inf


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_norm_is_right_in_other_dtypes(dtype):
    with jax.enable_x64(True):
        for size in (1e-3, 1.0, 6e4):
            sent = message(size, jnp.dtype(dtype))
            exact = np.sqrt(
                sum((x.astype(np.float64) ** 2).sum() for x in sent.values())
            )
            found = norm_of(make_store(flatten=False, dtype=jnp.dtype(dtype)), sent)
            np.testing.assert_allclose(found, exact, rtol=1e-5)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("size", SIZES + HUGE)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_norm_is_not_finite_if_the_message_is_not(size, wrong, flatten):
    sent = message(size)
    sent["b"][-1, 7] = wrong
    assert not np.isfinite(norm_of(make_store(flatten), sent))


def test_norm_is_that_of_the_message_and_not_the_contribution():
    center = jax.tree.map(np.ones_like, message(1.0))
    store = Store(shared.easgd(0.5), center, None, None, flatten=True)
    sent = jax.tree.map(lambda c: c + 2, center)
    np.testing.assert_allclose(norm_of(store, sent), 2 * np.sqrt(50 * 41), rtol=1e-6)


@pytest.mark.parametrize("flatten", [True, False])
def test_large_message_is_applied_and_non_finite_one_is_rejected(flatten):
    center = (PackedCenter if flatten else LocalCenter)(shared.downpour(), message(0.0))
    assert (center.core.store.packing is not None) == flatten
    sent = message(1e15)
    answer = sessions.exchange(center, sent, anchor_version=0, worker="a")
    assert answer.applied
    np.testing.assert_array_equal(answer.params["b"], -sent["b"])
    sent["a"][0, 0] = np.inf
    answer = sessions.exchange(center, sent, anchor_version=1, worker="a")
    assert "not finite" in answer.rejected
    assert center.version == 1


@pytest.mark.parametrize("size", [1e-80, 1e-60, 1e-20, 1e-13, 1e30])
def test_norm_is_right_for_float64_messages(size):
    with jax.enable_x64(True):
        sent = message(size, jnp.dtype("float64"))
        found = norm_of(make_store(flatten=False, dtype=jnp.dtype("float64")), sent)
    exact = np.sqrt(sum(((x / size) ** 2).sum() for x in sent.values())) * size
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-44)
