"""Batches of arrays, trees, dataclasses and sparse matrices, split over towers."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import problem, support
from jax.experimental import sparse

import agn_optax
from agn_optax import errors


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    image: object
    label: object = None


@flax.struct.dataclass
class Struct:
    image: object


@dataclasses.dataclass
class Plain:
    image: object


def bcoo_from_dense(matrix):
    """Convert as `sparse.BCOO.fromdense`, which compiles a program for each step."""
    places = np.argwhere(matrix)
    values = matrix[tuple(places.T)].astype(np.float32)
    return sparse.BCOO((values, places.astype(np.int32)), shape=matrix.shape)


def sums(towers, batch):
    """Return the sums of the rows that each tower receives, in order."""

    def step(state, batch):
        return state, jax.tree.map(lambda x: x.sum(axis=0), batch)

    workers = agn_optax.Towers(towers.size, workers=towers.size)
    return workers.step(step)(workers.replicate(0), batch)[1]


def test_shard_splits_arrays_trees_and_dataclasses():
    towers = agn_optax.Towers(4)
    images = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    expected = images.reshape(4, 2, 3).sum(axis=1)
    for batch in (
        images,
        jnp.asarray(images),
        {"features": {"image": images}, "labels": None},
        (images, None),
        Registered(images),
        Struct(images),
    ):
        seen = sums(towers, towers.shard(batch))
        assert jax.tree.structure(seen) == jax.tree.structure(batch)
        (leaf,) = jax.tree.leaves(seen)
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": {"y": np.zeros((6, 2))}},
            r"batch\['x'\]\['y'\] of shape \[6, 2\] has 6 rows.*towers, 4",
        ),
        (
            {"x": np.zeros((8, 2)), "z": np.zeros(4)},
            r"batch\['z'\] has 4 rows, but batch\['x'\] has 8",
        ),
        ({"x": np.zeros(())}, r"batch\['x'\] is a scalar"),
        ({"x": None}, "no arrays"),
        ({"x": Plain(np.zeros(4))}, r"batch\['x'\] is a dataclass.*register_dataclass"),
    ],
)
def test_invalid_batches_are_rejected(batch, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        agn_optax.Towers(4).shard(batch)


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [1, 9, 15])
def test_padding_does_not_change_the_gradient(rows):
    """The gradient is right even if a tower has fewer real rows or none."""
    towers = agn_optax.Towers()
    (batch,) = problem.batches(1, rows=rows)
    padded, mask = towers.shard_padded(batch)
    assert mask.shape == (16 if rows > 8 else 8,)
    params = problem.params()
    tx = agn_optax.all_reduce("towers")

    def step(state, batch):
        data, mask = batch

        def loss(params):
            losses = problem.losses(params, data)
            return agn_optax.reduce_loss(losses, mask, axis_name="towers")

        value, grads = jax.value_and_grad(loss)(state)
        return tx.update(grads, tx.init(state))[0], value

    grads, values = towers.step(step)(towers.replicate(params), (padded, mask))
    whole = jax.value_and_grad(problem.loss)(params, batch)
    support.assert_close(towers.unreplicate(grads), whole[1], tolerance=1e-5)
    np.testing.assert_allclose(towers.mean(values), whole[0], rtol=1e-5)


def test_sparse_rows_are_split_over_towers():
    """Rows are unequal, stored out of order, with duplicates and with padding."""
    rng = np.random.default_rng(0)
    rows = np.array([7, 0, 0, 3, 7, 7, 2, 8])  # 8 is out of range: BCOO's padding
    columns = np.array([1, 4, 4, 0, 3, 2, 2, 5])
    values = rng.normal(size=8).astype(np.float32)
    matrix = sparse.BCOO((values, np.stack([rows, columns], 1)), shape=(8, 5))
    dense = np.asarray(matrix.todense())
    weights = rng.normal(size=(5, 2)).astype(np.float32)

    def step(state, batch):
        assert batch["features"].shape == (2, 5)
        return state, batch["features"] @ weights + batch["bias"]

    bias = np.arange(8.0, dtype=np.float32)[:, None]
    workers = agn_optax.Towers(4, workers=4)
    sharded = workers.shard({"features": matrix, "bias": bias})
    # Each tower stores three elements, as many as the fullest (row 7) needs.
    assert sharded["features"].data.shape == (4, 3)
    _, products = workers.step(step)(workers.replicate(0), sharded)
    np.testing.assert_allclose(
        products.reshape(8, 2), dense @ weights + bias, rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_sparse_rows_work_in_predictions():
    workers = agn_optax.Towers(2, workers=2)
    weights = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    odd = bcoo_from_dense(np.tri(3, 4, dtype=np.float32))
    out = workers.predict(lambda rows: rows @ weights, odd)
    np.testing.assert_allclose(out, np.tri(3, 4) @ weights)

    batched = sparse.BCOO.fromdense(np.eye(4), n_batch=1)
    with pytest.raises(errors.InvalidTypeError, match="n_batch=0"):
        workers.shard(batched)


def test_random_keys_can_be_rows():
    towers = agn_optax.Towers(2)
    keys = jax.random.split(jax.random.key(0), 3)
    padded, mask = towers.shard_padded(keys)
    assert (padded[:3] == keys).all()
    assert mask.sum() == 3
    out = towers.predict(lambda keys: {"keys": keys}, keys)
    assert (out["keys"] == keys).all()


def test_shard_copies_the_loader_s_buffer():
    towers = agn_optax.Towers(4)
    for _ in range(8):
        buffer = np.zeros(4096, np.float32)
        batch = jax.block_until_ready(towers.shard(buffer))
        buffer[:] = 7.0
        assert float(jnp.max(batch)) == 0.0
