"""Gradient reduction: every method gives the same numbers in the stated messages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import support
from helpers.traffic import traffic
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding

import agn_optax
from agn_optax import errors

P = jax.P
SHAPES = [(7,), (3, 4), (), (5, 0), (130,), (2, 3)]


def mesh(shape=(8,), names=("towers",)):
    return Mesh(np.array(jax.devices())[: np.prod(shape)].reshape(shape), names)


def gradients(towers, dtype="float32", shapes=SHAPES):
    rng = np.random.default_rng(0)
    return {
        f"g{i}": jnp.asarray(rng.normal(size=(towers, *shape)), dtype)
        for i, shape in enumerate(shapes)
    }


def program(tx, mesh):
    """Return a program that applies ``tx`` to the gradients of every tower, as rows."""

    def update(grads):
        grads = jax.tree.map(lambda g: g[0], grads)
        return jax.tree.map(lambda g: g[None], tx.update(grads, tx.init(grads))[0])

    rows = P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(update, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )


def compiled(tx, mesh, grads):
    rows = NamedSharding(mesh, P(mesh.axis_names))
    grads = jax.tree.map(lambda g: jax.device_put(g, rows), grads)
    return program(tx, mesh).lower(grads).compile()


ALGORITHMS = {
    "all_reduce": {},
    "reduce_scatter": {"algorithm": "reduce_scatter"},
    "buckets": {"bucket_bytes": 100},
    "buckets of two": {"bucket_bytes": 4096, "bucket_leaves": 2},
    "scattered buckets": {"bucket_bytes": 100, "algorithm": "reduce_scatter"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "reduction"),
    [
        *((algorithm, "mean") for algorithm in ALGORITHMS),
        *((algorithm, "sum") for algorithm in ("buckets", "scattered buckets")),
    ],
)
def test_every_method_gives_the_same_numbers(algorithm, reduction):
    # With three towers, no size divides evenly.
    options, grads = ALGORITHMS[algorithm], gradients(3)
    tx = agn_optax.all_reduce("towers", reduction=reduction, **options)
    reduced = program(tx, mesh((3,)))(grads)
    for name, grad in grads.items():
        expected = getattr(np, reduction)(np.asarray(grad), axis=0)
        for row in np.asarray(reduced[name]):
            np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6)
            assert row.dtype == grad.dtype
        assert all((np.asarray(reduced[name]) == reduced[name][0]).ravel())


def test_hierarchical_reduction_equals_a_flat_one():
    both = ("hosts", "towers")
    grads = gradients(6)
    flat = program(agn_optax.all_reduce(both), mesh((2, 3), both))(grads)
    tx = agn_optax.all_reduce(both, algorithm="hierarchical", bucket_bytes=1000)
    tiered = program(tx, mesh((2, 3), both))(grads)
    support.assert_close(tiered, flat, tolerance=1e-6)


def test_hierarchical_reduction_sends_each_element_once_on_slow_links():
    both, n = ("hosts", "towers"), 1200
    grads = gradients(8, shapes=[(n,)])
    tx = agn_optax.all_reduce(both, algorithm="hierarchical")
    program = compiled(tx, mesh((2, 4), both), grads)
    kinds = traffic(program).kinds
    assert kinds == {"reduce-scatter": 1, "all-reduce": 1, "all-gather": 1}
    assert f"f32[{n // 4}]" in next(
        line for line in program.as_text().splitlines() if " all-reduce(" in line
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("shapes", "options", "collectives"),
    [
        # 12 small leaves of 40 bytes: three fit into 120 bytes.
        ([(10,)] * 12, {"bucket_bytes": 120}, 4),
        ([(10,)] * 12, {"bucket_bytes": 10**6}, 1),
        ([(10,)] * 12, {"bucket_bytes": 10**6, "bucket_leaves": 5}, 3),
        # A large leaf of 4000 bytes is cut into equal pieces; small leaves are
        # separate.
        ([(1000,)], {"bucket_bytes": 1000}, 4),
        ([(1000,)], {"bucket_bytes": 1001}, 4),
        ([(10,), (1000,), (10,)], {"bucket_bytes": 1000}, 6),
    ],
)
@pytest.mark.parametrize("algorithm", ["all_reduce", "reduce_scatter"])
def test_number_of_collectives_with_buckets(shapes, options, collectives, algorithm):
    tx = agn_optax.all_reduce("towers", algorithm=algorithm, **options)
    grads = gradients(8, shapes=shapes)
    sent = traffic(compiled(tx, mesh(), grads))
    kinds = {
        "all_reduce": {"all-reduce": collectives},
        "reduce_scatter": {"reduce-scatter": collectives, "all-gather": collectives},
    }[algorithm]
    assert sent.kinds == kinds


def test_pieces_of_a_bucketed_leaf_are_equal():
    grads = gradients(8, shapes=[(1024,)])
    tx = agn_optax.all_reduce(
        "towers", algorithm="reduce_scatter", bucket_bytes=1000
    )  # 5 pieces
    text = compiled(tx, mesh(), grads).as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) == 5
    assert (
        sum("f32[208]" in line for line in gathers) == 5
    )  # 205 or 204 elements, padded
    plain = traffic(compiled(agn_optax.all_reduce("towers"), mesh(), grads))
    assert plain.bytes_sent == 2 * 7 / 8 * 4 * 1024


def test_delayed_reduction_returns_the_previous_gradients():
    grads = gradients(8)
    later = jax.tree.map(lambda g: g + 1, grads)
    tx = agn_optax.all_reduce("towers", delay=1)

    @jax.jit
    @lambda f: jax.vmap(f, axis_name="towers")
    def two_steps(first, second):
        zeros, state = tx.update(first, tx.init(first))
        reduced, state = tx.update(second, state)
        return zeros, reduced, state

    zeros, reduced, state = two_steps(grads, later)
    for name, grad in grads.items():
        np.testing.assert_array_equal(zeros[name], 0.0)
        expected = np.broadcast_to(np.mean(grad, axis=0), grad.shape)
        np.testing.assert_allclose(reduced[name], expected, rtol=1e-5, atol=1e-6)
    support.assert_identical(state.in_flight, later)
    # Gradients in flight differ between towers and are not compared.
    towers = agn_optax.Towers()
    assert towers.towers_agree({"opt_state": state, "loss": jnp.zeros(8)})


def embedding_gradient(rng, towers, count, table):
    rows = rng.integers(0, table[0], size=(towers, count, 1)).astype(np.int32)
    rows[:, -1] = rows[:, 0]  # duplicates on every tower
    return rng.normal(size=(towers, count, table[1])).astype(np.float32), rows


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_row_sparse_embedding_gradients_are_gathered(reduction):
    table, count = (1000, 4), 6
    values, rows = embedding_gradient(np.random.default_rng(0), 8, count, table)
    dense = np.zeros((8, *table), np.float32)
    for tower in range(8):
        np.add.at(dense[tower], rows[tower, :, 0], values[tower])
    reduced_to = getattr(np, reduction)(dense, axis=0)
    tx = optax.chain(
        agn_optax.all_reduce("towers", reduction=reduction), agn_optax.densify()
    )

    def update(values, rows, bias):
        grads = {"table": sparse.BCOO((values[0], rows[0]), shape=table), "b": bias[0]}
        updates, _ = tx.update(grads, tx.init(grads))
        return jax.tree.map(lambda u: u[None], updates)

    split = P("towers")
    mapped = jax.jit(
        jax.shard_map(
            update, mesh=mesh(), in_specs=split, out_specs=split, check_vma=False
        )
    )
    bias = np.arange(8.0, dtype=np.float32)
    arguments = jax.device_put((values, rows, bias), NamedSharding(mesh(), split))
    reduced = mapped(*arguments)
    for row in reduced["table"]:
        np.testing.assert_allclose(row, reduced_to, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(reduced["b"], getattr(np, reduction)(bias))
    # No message has the size of the table.
    sent = traffic(mapped.lower(*arguments).compile())
    assert sent.kinds["all-gather"] == 2
    assert sent.bytes_sent < values.nbytes + rows.nbytes + 100 < dense[0].nbytes


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 12])
def test_reduced_sparse_rows_are_unique(towers):
    values, rows = embedding_gradient(np.random.default_rng(1), towers, 5, (50, 2))
    tx = agn_optax.all_reduce("towers")

    def update(values, rows):
        grad = sparse.BCOO((values, rows), shape=(50, 2))
        return tx.update(grad, tx.init(grad))[0].indices

    indices = jax.jit(jax.vmap(update, axis_name="towers"))(values, rows)[0, :, 0]
    assert len(indices) == min(
        5 * towers, 50
    )  # at most the number of rows of the table
    inside = [i for i in indices.tolist() if i < 50]
    assert sorted(inside) == sorted(set(rows.ravel().tolist()))
    other = sparse.BCOO.fromdense(jnp.eye(3))
    with pytest.raises(errors.TreeMismatchError, match="n_sparse=2; a row-sparse"):
        jax.vmap(lambda x: tx.update({"t": other}, tx.init(x)), axis_name="towers")(
            jnp.zeros(2)
        )


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("t",), {"reduction": "max"}, r"reduction must be one of \('mean', 'sum'\)"),
        (("t",), {"algorithm": "ring"}, "algorithm must be one of"),
        (("t",), {"algorithm": "hierarchical"}, "needs two axes"),
        (("t",), {"delay": 2}, r"delay must be one of \(0, 1\), got 2"),
        (("t",), {"delay": True}, "delay must be one of"),
        (("t",), {"bucket_bytes": 0}, "bucket_bytes must be a positive int"),
        (("t",), {"bucket_leaves": 3}, "give both"),
        ((None,), {}, "axis_name must name the axis"),
    ],
)
def test_invalid_all_reduce_options_are_rejected(arguments, options, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        agn_optax.all_reduce(*arguments, **options)


def test_invalid_gradients_are_rejected():
    tx = agn_optax.all_reduce("towers")
    with pytest.raises(errors.UnboundAxisError, match="'towers' is not bound"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))

    def update(grads):
        return jax.vmap(
            lambda x: tx.update(jax.tree.map(lambda g: g * x, grads), tx.init(grads)),
            axis_name="towers",
        )(jnp.ones(2, jnp.int32))

    with pytest.raises(errors.TreeMismatchError, match="no gradients"):
        update({"a": None})
    with pytest.raises(
        errors.TreeMismatchError, match=r"updates\['a'\] has dtype int32"
    ):
        update({"a": jnp.arange(3)})


def test_bucket_may_be_empty():
    grads = {"empty": jnp.zeros((4, 0)), "full": jnp.arange(4.0)}
    tx = agn_optax.all_reduce("towers", bucket_bytes=4)
    reduced = program(tx, mesh((4,)))(grads)
    np.testing.assert_array_equal(reduced["full"], 1.5)
    assert reduced["empty"].shape == (4, 0)


def test_mean_of_float16_gradients_does_not_overflow():
    grads = {"g": jnp.full((4, 8), 30000.0, jnp.float16)}
    reduced = program(agn_optax.all_reduce("towers"), mesh((4,)))(grads)
    np.testing.assert_array_equal(reduced["g"], 30000.0)


def test_constant_gradients_are_reduced_under_vmap():
    tx = agn_optax.all_reduce("towers", reduction="sum")

    def update(x):
        grads = {"used": x * jnp.ones(6), "unused": jnp.full((2, 3), 2.0)}
        return tx.update(grads, tx.init(grads))[0]

    reduced = jax.vmap(update, axis_name="towers")(jnp.arange(3.0))
    np.testing.assert_array_equal(reduced["used"], 3.0)
    np.testing.assert_array_equal(reduced["unused"], 6.0)


def test_delayed_gradients_are_kept_in_the_params_dtype():
    tx = agn_optax.all_reduce("towers", delay=1)
    params = jnp.zeros(3, jnp.bfloat16)

    def scanned(grads):
        def body(state, _):
            updates, state = tx.update(grads, state)
            return state, updates

        return jax.lax.scan(body, tx.init(params), None, length=2)[1]

    updates = jax.vmap(scanned, axis_name="towers")(jnp.ones((2, 3), jnp.float32))
    assert updates.dtype == jnp.float32
    np.testing.assert_array_equal(updates[:, 1], 1.0)
    rows = sparse.BCOO((jnp.ones((1, 2)), jnp.zeros((1, 1), int)), shape=(4, 2))
    with pytest.raises(
        errors.TreeMismatchError,
        match="row-sparse gradients and all_reduce with a delay",
    ):
        jax.vmap(
            lambda x: tx.update({"t": rows}, tx.init({"t": x})), axis_name="towers"
        )(jnp.zeros((2, 4, 2)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_in_flight_are_saved_reduced(reduction):
    towers = agn_optax.Towers(4)
    tx = optax.chain(
        agn_optax.all_reduce("towers", delay=1, reduction=reduction), optax.sgd(1.0)
    )

    def train_step(state, batch):
        params, opt_state = state
        updates, opt_state = tx.update(batch[0] * params, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    step, params = towers.step(train_step), jnp.ones(2)
    batch = towers.shard(np.arange(4, dtype=np.float32) / 8)
    state, _ = step(towers.replicate((params, tx.init(params))), batch)
    saved = towers.unreplicate(state)
    assert saved[1][0].in_flight.shape == (2,)
    again, _ = step(towers.replicate(saved), batch)
    through, _ = step(state, batch)
    support.assert_close(again[0], through[0])
    assert float(through[0][0, 0]) < 1.0


def test_reduced_loss_without_reduced_gradients_is_rejected():
    towers = agn_optax.Towers(4)
    tx = optax.sgd(0.1)

    def train_step(state, batch):
        def loss(p):
            return agn_optax.reduce_loss((p - batch) ** 2, axis_name="towers")

        updates, _ = tx.update(jax.grad(loss)(state), tx.init(state))
        return state + updates, None

    with pytest.raises(errors.InvalidArgumentError, match="never communicates"):
        towers.step(train_step)(towers.replicate(0.0), towers.shard(np.ones(4)))
