"""Centers packed into two arrays: equal bit for bit, with equal checkpoints."""

import tracemalloc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.support import (
    RULES,
    assert_identical,
    feeds,
    run_worker,
    submissions,
)

import agn_optax
from agn_optax import service
from agn_optax.center import Journal, LocalCenter, PackedCenter, Store
from agn_optax.service import wire

SHAPES = [(25, 20), (13,), (7,), (3, 2, 4), (1000,), (64,), (0, 3)]
OPTIMIZERS = {
    "sgd": lambda: shared.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: shared.adam(1e-2),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "narrow": lambda: shared.adam(1e-2, mu_dtype=jnp.bfloat16),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=0.01,
        b2=0.98,  # bfloat16 does not round it to 1
    ),
}


class Layer(NamedTuple):
    w: object
    b: object


def arrays(seed, shapes=SHAPES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        str(i): rng.normal(size=shape).astype(dtype) for i, shape in enumerate(shapes)
    }


def stores(rule, params):
    params = jax.tree.map(jnp.asarray, params)
    as_tree = Store(rule, params, None, None)
    packed = Store(rule, params, None, None, flatten=True)
    assert packed.packing is not None
    return as_tree, packed


def packing_of(rule, params):
    """Return the layout of a flattened center; None if it is kept as a tree."""
    return Store(rule, params, None, None, flatten=True).packing


def everything(store):
    return jax.tree.map(np.asarray, store.save())


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_packed_center_is_equal_with_any_optimizer(optimizer, dtype):
    rule = shared.agn(OPTIMIZERS[optimizer]())
    both = stores(rule, arrays(0, dtype=dtype))
    for i in range(1, 6):
        for store in both:
            store.apply(submissions(store.place(arrays(i, dtype=dtype))), [i])
    assert_identical(*map(everything, both))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", RULES)
def test_packed_center_is_equal_with_any_rule(name):
    both = stores(RULES[name](), arrays(0))
    for i in range(1, 5):
        messages = [arrays(10 * i + j) for j in range(i % 2 + 1)]  # rounds, too
        norms = []
        for store in both:
            placed = [store.place(message) for message in messages]
            norms.append(store.measure(placed[0], store.current.params)[0])
            counts = [0.5] * len(placed)
            store.apply(submissions(*placed), [i] * len(placed), counts)
        np.testing.assert_allclose(*norms, rtol=1e-6)
    assert_identical(*map(everything, both))


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_packed_center_is_equal_with_any_shapes(seed):
    rng = np.random.default_rng(seed)
    shapes = [
        tuple(rng.integers(1, 70, size=rng.integers(1, 3)))
        for _ in range(rng.integers(2, 9))
    ]
    both = stores(shared.agn(shared.adam(0.1)), arrays(seed, shapes))
    for i in range(3):
        for store in both:
            store.apply(submissions(store.place(arrays(i, shapes))), [i])
    assert_identical(*map(everything, both))


def by_shape(params):
    return jax.tree.map(lambda leaf: "vector" if jnp.ndim(leaf) < 2 else "", params)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), shared.sgd(0.1)),
        optax.lars(0.1),
        optax.adafactor(0.1),
        optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p)),
        optax.multi_transform(
            {"": shared.sgd(1.0), "vector": shared.sgd(2.0)}, by_shape
        ),
        optax.masked(
            shared.adam(0.1), {str(i): i % 2 == 0 for i in range(len(SHAPES))}
        ),
        optax.multi_transform(
            {"0": shared.sgd(0.1), "1": shared.sgd(0.2)},
            {str(i): str(i % 2) for i in range(len(SHAPES))},
        ),
        optax.multi_transform(
            {
                "": shared.sgd(optax.linear_schedule(0.1, 0.2, 5)),
                "vector": shared.sgd(optax.cosine_decay_schedule(0.1, 5)),
            },
            by_shape,
        ),
        optax.add_noise(0.1, 0.1, 0),
    ],
)
def test_optimizer_that_depends_on_leaves_is_not_packed(optimizer):
    assert packing_of(shared.agn(optimizer), arrays(0)) is None


def test_settings_of_a_shape_prevent_packing():
    params = {"a": np.zeros(3, np.float32), "b": np.zeros((2, 3), np.float32)}
    rule = agn_optax.rules.diloco(optax.sgd(np.array([0.1, 0.2, 0.3], np.float32)))
    assert packing_of(rule, params) is None
    center = PackedCenter(rule, params)
    ones = jax.tree.map(np.ones_like, params)
    answer = sessions.exchange(center, ones, anchor_version=0, worker="anna")
    np.testing.assert_allclose(answer.params["b"][1], [-0.1, -0.2, -0.3], rtol=1e-6)


def test_mask_by_path_prevents_packing():
    """The mask's paths also match the names of the two packed arrays."""

    def first(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "first" in jax.tree_util.keystr(path), params
        )

    params = {"first": jnp.ones(64), "second": jnp.ones(64)}
    rule = shared.agn(optax.adamw(0.1, mask=first))
    assert packing_of(rule, params) is None


def test_unsuitable_trees_are_not_packed():
    rule = shared.downpour()
    assert packing_of(rule, {"w": jnp.ones(3)}) is None
    assert packing_of(rule, {}) is None
    assert packing_of(rule, {"w": jnp.ones(()), "v": jnp.ones(3)}) is None
    mixed = {"w": jnp.ones(3), "v": jnp.ones(3, jnp.bfloat16)}
    assert packing_of(rule, mixed) is None
    assert packing_of(rule, {"w": jnp.ones(0), "v": jnp.ones(3)}) is None


def test_packed_layout_is_that_of_the_wire():
    params = arrays(0)
    with (
        service.serve(shared.downpour(), params) as server,
        service.Observer(server.address) as observer,
    ):
        schema = wire.from_bytes(observer.describe().schema)
        packing = server.center.core.store.packing
    packed = packing.pack(params)
    assert_identical(packing.unpack(packed), params)
    for dtype in ("float32", "bfloat16"):
        cast = schema.cast(dtype)
        assert cast.packed.size == cast.size
        assert tuple(leaf.shape for leaf in cast.packed.leaves) == packing.shapes
        assert cast.packed.offsets[1] in cast.offsets
    assert schema.paths == tuple(f"['{name}']" for name in params)
    sent = b"".join(map(bytes, schema.pieces(list(params.values()))))
    assert sent == b"".join(map(bytes, schema.packed.pieces(packed)))


def test_packing_uses_memory_for_one_part_at_a_time():
    params = [np.ones(1000, np.float32) for _ in range(200)]
    packing = packing_of(shared.downpour(), params)
    size = sum(leaf.nbytes for leaf in params)
    packing.keep(params)  # compiles
    tracemalloc.start()
    try:
        sums = list(map(np.sum, packing.keep(params)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(sums) == 200_000
    assert 0.5 * size < most < 0.7 * size


@pytest.mark.parametrize("then", [True, False])
def test_checkpoint_does_not_depend_on_packing(then):
    rule = shared.agn(shared.adam(1e-2))
    for first in stores(rule, arrays(0)):
        first.apply(submissions(first.place(arrays(1))), [0])
        saved = everything(first)
        second = Store.restore(rule, jax.tree.map(jnp.asarray, saved), flatten=then)
        assert (second.packing is not None) == then
        for store in (first, second):
            store.apply(submissions(store.place(arrays(2))), [0])
        assert_identical(everything(first), everything(second))


@pytest.mark.parametrize(
    "kinds", [(PackedCenter, LocalCenter), (LocalCenter, PackedCenter)]
)
def test_journal_does_not_depend_on_packing(tmp_path, kinds):
    rule = shared.agn(shared.adam(1e-2))
    settings = {"durability": Journal(tmp_path)}
    center = kinds[0](rule, arrays(0), **settings)
    for version in range(3):
        sessions.exchange(
            center, arrays(version), anchor_version=version, worker="anna"
        )
    there = jax.tree.map(np.asarray, center.pull().params)
    (tmp_path / "copy").mkdir()
    for file in tmp_path.glob("*-*"):  # as after a crash, without a last snapshot
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    center.close()
    settings = {"durability": Journal(tmp_path / "copy")}
    again = kinds[1](rule, arrays(0), **settings)
    assert again.version == 3
    assert_identical(jax.tree.map(np.asarray, again.pull().params), there)
    again.close()


def test_worker_of_an_embedded_packed_center_gets_equal_numbers():
    ends = []
    for kind in (PackedCenter, LocalCenter):
        center = kind(shared.easgd(0.3))
        worker = agn_optax.Worker(center, shared.adam(0.1), period=2, name="anna")
        loop = worker.start(arrays(0), chief=True)
        assert (center.core.store.packing is not None) == (kind is PackedCenter)
        loop = run_worker(worker, *loop, feeds(loop[0], 6))
        ends.append((loop, center.pull().params))
    assert_identical(*ends)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["agn", "easgd_rho", "diloco"])
def test_law_7_holds_for_a_packed_server(name):
    ends = []
    with service.serve(RULES[name](), jax.tree.map(jnp.asarray, arrays(0))) as server:
        assert server.center.core.store.packing is not None
        with service.connect(server.address, RULES[name]()) as remote:
            for center in (remote, agn_optax.LocalCenter(RULES[name](), arrays(0))):
                worker = agn_optax.Worker(center, shared.adam(0.1), period=2, name="a")
                loop = worker.start()
                loop = run_worker(worker, *loop, feeds(loop[0], 8))
                ends.append((loop, center.pull().params))
    assert_identical(*ends)


def test_packed_server_orders_leaves_by_name_on_the_wire():
    """The center orders leaves by the fields of their container instead."""
    params = Layer(jnp.arange(100.0).reshape(4, 25), jnp.ones(3))
    rule = shared.downpour()
    with (
        service.serve(rule, params) as server,
        service.connect(server.address, rule, like=params) as center,
    ):
        answer = sessions.exchange(center, params, anchor_version=0, worker="anna")
        assert_identical(answer.params, jax.tree.map(jnp.zeros_like, params))
