"""Losses of towers: their mean and its gradient are those of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agn_optax
from agn_optax import errors

VALUES = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
WEIGHTS = np.array([1, 0, 2, 0, 0, 0, 0.5, 1], np.float32)  # tower 2 has no weight

WHOLE = {
    "mean": lambda loss, w: (loss * w).sum() / (w * jnp.ones_like(loss)).sum(),
    "sum": lambda loss, w: (loss * w).sum(),
    "sum_over_batch_size": lambda loss, w: (loss * w).sum() / loss.size,
    "sum_by_nonzero_weights": lambda loss, w: (
        (loss * w).sum() / jnp.count_nonzero(w * jnp.ones_like(loss))
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("reduction", WHOLE)
@pytest.mark.parametrize("weighted", [None, "rows", "tokens"])
def test_loss_reductions_equal_those_of_the_whole_batch(reduction, weighted):
    weights = {
        None: np.ones(8, np.float32),
        "rows": WEIGHTS,
        "tokens": np.arange(24, dtype=np.float32).reshape(8, 3) % 3,
    }[weighted]

    def loss(x, values, weights, axis_name):
        return agn_optax.reduce_loss(
            (x * values) ** 2,
            None if weighted is None else weights,
            reduction=reduction,
            axis_name=axis_name,
        )

    def whole(x):
        w = weights if weights.ndim == 2 else weights[:, None]
        return WHOLE[reduction]((x * VALUES) ** 2, w)

    expected = jax.value_and_grad(whole)(2.0)
    share = jax.vmap(
        lambda v, w: jax.value_and_grad(loss)(2.0, v, w, "towers"), axis_name="towers"
    )
    split = share(VALUES.reshape(4, 2, 3), weights.reshape(4, 2, *weights.shape[1:]))
    alone = jax.value_and_grad(loss)(2.0, VALUES, weights, None)
    for i in range(2):
        np.testing.assert_allclose(split[i].mean(), expected[i], rtol=1e-5)
        np.testing.assert_allclose(alone[i], expected[i], rtol=1e-5)


def test_infinite_loss_without_weight_is_ignored_and_zero_weight_is_0():
    losses, weights = jnp.array([1.0, jnp.inf]), jnp.array([1.0, 0.0])
    assert agn_optax.reduce_loss(losses, weights) == 1.0
    assert agn_optax.reduce_loss(losses, jnp.zeros(2)) == 0.0
    assert agn_optax.reduce_loss(losses.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_no_gradient_flows_into_weights():
    gradient = jax.grad(lambda w: agn_optax.reduce_loss(jnp.array([1.0, 4.0]), w))
    np.testing.assert_array_equal(gradient(jnp.array([1.0, 2.0])), [0.0, 0.0])


def test_invalid_losses_are_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="one number"):
        agn_optax.reduce_loss(jnp.ones(3), reduction="none")
    with pytest.raises(errors.InvalidArgumentError, match=r"weights has shape \[2\]"):
        agn_optax.reduce_loss(jnp.ones(3), jnp.ones(2))
    with pytest.raises(errors.UnboundAxisError):
        agn_optax.reduce_loss(jnp.ones(3), axis_name="towers")
    with pytest.raises(errors.TreeMismatchError, match="int32"):
        agn_optax.reduce_loss(jnp.ones(3, jnp.int32))


def test_float16_losses_are_summed_in_float32():
    many = jnp.full(8192, 10.0, jnp.float16)
    assert agn_optax.reduce_loss(many) == 10.0
    few = jnp.array([1.0, 3.0], jnp.float16)
    assert agn_optax.reduce_loss(few, jnp.array([1e5, 1e5])) == 2.0
    assert agn_optax.reduce_loss(few, jnp.array([1e-9, 1e-9])) == 2.0


def test_weights_may_be_negative_but_not_complex():
    assert agn_optax.reduce_loss(jnp.array([1.0, 3.0]), jnp.array([-2.0, 1.0])) == -1.0
    with pytest.raises(errors.InvalidArgumentError, match="complex64"):
        agn_optax.reduce_loss(jnp.ones(2), jnp.ones(2) * 1j)
