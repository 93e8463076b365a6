"""Metrics and predictions over rows that do not divide evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import problem, support

import agn_optax
from agn_optax import errors


def metrics(params, batch):
    losses = problem.losses(params, batch)
    return {
        "loss": losses,
        "small": losses < 0.1,
        "by side": jnp.stack([losses, -losses], axis=1),
        "nested": {"rows": jnp.ones_like(losses, jnp.int32)},
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [[13], [8, 3], [1], [5, 5, 5, 1]])
def test_evaluate_reduces_metrics_over_all_rows(rows):
    towers, params = agn_optax.Towers(), problem.params()
    (data,) = problem.batches(1, rows=sum(rows))
    ends = np.cumsum(rows)
    parts = [
        jax.tree.map(lambda x, e=end, n=n: x[e - n : e], data)
        for end, n in zip(ends, rows, strict=True)
    ]
    whole = metrics(params, data)
    for _ in range(2):  # idempotent
        found = towers.evaluate(metrics, params, iter(parts))
        assert isinstance(found["loss"], float)
        np.testing.assert_allclose(found["loss"], whole["loss"].mean(), rtol=1e-5)
        np.testing.assert_allclose(found["small"], whole["small"].mean())
        np.testing.assert_allclose(
            found["by side"], whole["by side"].mean(axis=0), rtol=1e-5
        )
    if len(rows) == 1:
        support.assert_close(towers.evaluate(metrics, params, data), found)
    assert found["nested"]["rows"] == 1


def test_padding_rows_may_give_non_finite_metrics():
    towers = agn_optax.Towers(4)
    found = towers.evaluate(lambda x: 1 / x, np.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(found, 1.75 / 3)


def test_invalid_metrics_are_rejected():
    towers = agn_optax.Towers(4)
    with pytest.raises(errors.InvalidArgumentError, match=r"\['m'\] of shape \[\]"):
        towers.evaluate(lambda x: {"m": x.mean()}, np.ones(4))
    with pytest.raises(errors.InvalidArgumentError, match="no batches"):
        towers.evaluate(lambda x: x, iter([]))
    with pytest.raises(errors.InvalidArgumentError, match="the last argument must be"):
        towers.evaluate(lambda x: x)


@pytest.mark.parametrize("rows", [16, 13, 3])
def test_predictions_are_in_order_and_without_padding(rows):
    towers, params = agn_optax.Towers(), problem.params()
    (batch,) = problem.batches(1, rows=rows)

    def predict(params, batch):
        scores = problem.predict(params, batch["x"])
        return {"scores": scores, "classes": {"positive": scores[:, 0] > 0}}

    found = towers.predict(predict, params, batch)
    expected = jax.tree.map(np.asarray, predict(params, batch))
    assert found["scores"].shape == (rows, 1)
    support.assert_close(found["scores"], expected["scores"])
    np.testing.assert_array_equal(
        found["classes"]["positive"], expected["classes"]["positive"]
    )


def test_predict_accepts_unreplicated_params_and_rejects_bad_outputs():
    towers = agn_optax.Towers(4)
    state = towers.replicate(jnp.full(3, 2.0))
    # The result of unreplicate is on one device, which predict accepts.
    np.testing.assert_array_equal(
        towers.predict(lambda w, x: x @ w, towers.unreplicate(state), np.eye(3)),
        [2.0, 2.0, 2.0],
    )
    with pytest.raises(errors.InvalidArgumentError, match=r"fn gave an array of shape"):
        towers.predict(lambda x: x.sum(), np.ones(4))
    with pytest.raises(errors.InvalidArgumentError, match="no rows"):
        towers.predict(lambda x: x, np.ones((0, 2)))


def test_predict_compiles_a_function_once():
    towers, traced = agn_optax.Towers(4), []

    def double(x):
        traced.append(x.shape)
        return 2 * x

    for _ in range(3):
        towers.predict(double, np.ones(7))
    assert traced == [(2,)]


def test_evaluate_distinguishes_loaders_from_batches():
    class Loader:
        def __iter__(self):
            return iter([np.array([1.0, 2.0]), np.array([6.0])])

    assert agn_optax.Towers(2).evaluate(lambda x: x, Loader()) == 3.0
    pair = [np.array([1.0, 2.0]), np.array([3.0, 5.0])]  # a batch, not two
    assert agn_optax.Towers(2).evaluate(lambda b: b[1] - b[0], pair) == 2.5
