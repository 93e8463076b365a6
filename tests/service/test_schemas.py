"""Schemas of trees: both ends of a connection see the same leaves in the same order."""

import io
import json
import tracemalloc
from collections import OrderedDict
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from google.protobuf import proto
from helpers import shared
from hypothesis import example, given
from hypothesis import strategies as st

import agn_optax
from agn_optax import errors
from agn_optax.service import connect, serve
from agn_optax.service.wire import _trees
from agn_optax.service.wire._schema import Leaf, Schema


class Layer(NamedTuple):
    """A NamedTuple whose fields are not in the order of their names."""

    w: object
    b: object = None


@flax.struct.dataclass
class Model:
    second: object
    first: object


@jax.tree_util.register_pytree_with_keys_class
class UnusualNode:
    """A node whose children have keys of two kinds, or the same name twice."""

    def __init__(self, keys, *children):
        self.keys, self.children = keys, children

    def __repr__(self):
        return f"UnusualNode{self.keys}"

    def tree_flatten_with_keys(self):
        return tuple(zip(self.keys, self.children, strict=True)), self.keys

    @classmethod
    def tree_unflatten(cls, keys, children):
        return cls(keys, *children)


NAME, FIELD = jax.tree_util.DictKey("x"), jax.tree_util.GetAttrKey("x")
NUMBER = jax.tree_util.SequenceKey(1)

# A tree, and its form for programs without its types, where that differs.
TREES = [
    (1.0, None),
    ({}, None),
    (None, None),
    ({"b": 1.0, "a": {"c": 2.0}}, None),
    ([1.0, [], (), [2.0, None]], None),
    ((1.0, (2.0,), {"x": None}), None),
    ({10: 1.0, 9: 2.0, -1: 3.0}, None),
    ({"10": 1.0, "9": 2.0}, None),
    ({"'": 1.0, '"': 2.0, "ä\n[0]": 3.0, "": 4.0}, None),
    (Layer(1.0, 2.0), {"w": 1.0, "b": 2.0}),
    (Layer(Layer(1.0, [2.0])), {"w": {"w": 1.0, "b": [2.0]}, "b": None}),
    (FrozenDict({"b": {"d": 1.0}, "a": 2.0}), {"b": {"d": 1.0}, "a": 2.0}),
    (OrderedDict(z=1.0, y=2.0), {"z": 1.0, "y": 2.0}),
    (Model(1.0, (2.0, None)), {"second": 1.0, "first": (2.0, None)}),
    ([optax.EmptyState(), 1.0], [{}, 1.0]),
    ({True: 1.0, False: 2.0}, None),
    ({0.5: 1.0, 10.0: 2.0, 9.0: 3.0}, {"[0.5]": 1.0, "[10.0]": 2.0, "[9.0]": 3.0}),
    (UnusualNode((NAME, FIELD), 1.0, 2.0), {0: 1.0, 1: 2.0}),
    (
        UnusualNode((NAME, NUMBER), 1.0, Layer(2.0, 3.0)),
        {0: 1.0, 1: {"w": 2.0, "b": 3.0}},
    ),
]


def travelled(tree):
    """Return the schema and the leaves after a round trip through bytes."""
    sent = _trees.schema_of(tree)
    schema = _trees.from_bytes(_trees.to_bytes(sent))
    assert schema.difference(sent, "here", "there") is None
    received = np.frombuffer(b"".join(sent.pieces(_trees.host_arrays(tree))), np.uint8)
    return schema, schema.views(received)


def assert_same(built, expected):
    assert jax.tree.structure(built) == jax.tree.structure(expected)
    for one, other in zip(
        jax.tree.leaves(built), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("tree", "plain"), TREES, ids=repr)
def test_tree_round_trips_with_and_without_its_types(tree, plain):
    schema, leaves = travelled(tree)
    assert_same(_trees.build(schema, leaves), tree if plain is None else plain)
    assert_same(_trees.build(schema, leaves, like=tree), tree)
    assert_same(
        _trees.build(schema, leaves, like={"quite": [0, "other"]}), plain or tree
    )


@pytest.mark.parametrize(("tree", "plain"), TREES, ids=repr)
def test_schema_is_the_same_without_the_types(tree, plain):
    schema, leaves = travelled(tree)
    again = _trees.schema_of(_trees.build(schema, leaves))
    assert again.difference(schema, "here", "there") is None
    assert again.structure == schema.structure
    assert again.hash == schema.hash


numbers = st.integers(0, 1000).map(float)
trees = st.recursive(
    numbers | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(FrozenDict)
        | st.builds(Layer, inner, inner)
        | st.builds(Model, inner, inner)
    ),
    max_leaves=8,
)


@given(trees)
def test_any_tree_round_trips(tree):
    schema, leaves = travelled(tree)
    assert_same(_trees.build(schema, leaves, like=tree), tree)
    plain = _trees.build(schema, leaves)
    assert_same(_trees.build(*travelled(plain)), plain)
    assert_same(_trees.build(*travelled(plain), like=tree), tree)


@pytest.mark.parametrize(
    ("leaf", "dtype", "shape"),
    [
        (1.5, "float32", []),
        (np.float64(1.5), "float32", []),
        (np.ones((2, 0)), "float32", [2, 0]),
        (np.ones(3, np.float16), "float16", [3]),
        (jnp.ones(3, jnp.bfloat16), "bfloat16", [3]),
        (
            np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
            "float32",
            [2, 3],
        ),
    ],
)
def test_leaves_are_sent_in_the_dtype_of_jax(leaf, dtype, shape):
    schema, (received,) = travelled([leaf])
    assert str(schema.leaves[0]) == f"[0] {dtype}{shape}"
    assert received.dtype.name == dtype
    np.testing.assert_array_equal(received, jnp.asarray(leaf))


def test_arrays_of_this_host_are_not_copied():
    leaf = jax.device_put(jnp.ones(1000), jax.devices("cpu")[0])
    (first,), (second,) = _trees.host_arrays([leaf]), _trees.host_arrays([leaf])
    assert np.shares_memory(first, second)


def test_cast_keeps_containers_and_the_places_of_leaves():
    tree = Layer([jnp.ones(2), jnp.arange(2)], jnp.full(3, 2.0))
    schema = _trees.schema_of(tree).cast("bfloat16")
    cast = _trees.cast(tree, schema)
    assert_same(cast, tree)
    assert [leaf.dtype.name for leaf in jax.tree.leaves(cast)] == [
        "bfloat16",
        "int32",
        "bfloat16",
    ]


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ({"path": "a", "dtype": "object"}, "leaf a has dtype 'object'"),
        ({"path": "a", "dtype": ""}, "leaf a has dtype ''"),
        ({"path": "a", "dtype": "float32", "shape": [2**64 - 1]}, "leaf a has shape"),
        ({"path": "a", "dtype": "float32", "shape": [1] * 65}, "leaf a has 65 dimens"),
    ],
)
def test_schema_with_a_bad_leaf_is_rejected(leaf, message):
    with pytest.raises(errors.ProtocolError, match=message):
        _trees.from_bytes(as_bytes([leaf]))


def as_bytes(leaves, structure=""):
    """Return the bytes of a schema, valid or not."""
    packed = io.BytesIO()
    for leaf in leaves:
        proto.serialize_length_prefixed(_trees.pb.Leaf(**leaf), packed)
    schema = _trees.pb.Schema(leaves=packed.getvalue(), structure=structure)
    return schema.SerializeToString()


LEAF = {"path": "a", "dtype": "float32"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: _trees.pb.Schema(leaves=bytes(8 << 20)), "most 8192 leaves, got 8193"),
        (lambda: _trees.pb.Schema(leaves=bytes(33 << 20)), "most 33554432 bytes, got"),
        (lambda: _trees.pb.Schema(structure="[]," * (4 << 20)), "brackets and commas"),
    ],
)
def test_schema_bombs_are_rejected_before_they_take_memory(data, message, monkeypatch):
    monkeypatch.setattr(_trees, "MAX_LEAVES", 1 << 13)
    data = data().SerializeToString()
    tracemalloc.start()
    try:
        with pytest.raises(errors.ProtocolError, match=message):
            _trees.from_bytes(data)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * len(data) + (32 << 20)


def test_bytes_that_are_no_schema_are_rejected():
    cut = _trees.pb.Schema(leaves=as_bytes([LEAF])[:-3]).SerializeToString()
    for data in (b"\xff" * 9, cut):
        with pytest.raises(errors.ProtocolError, match="not a schema"):
            _trees.from_bytes(data)


def test_tree_of_too_many_leaves_is_rejected_before_it_is_sent(monkeypatch):
    monkeypatch.setattr(_trees, "MAX_LEAVES", 3)
    assert _trees.to_bytes(_trees.schema_of([0.0] * 3))
    with pytest.raises(errors.InvalidArgumentError, match="at most 3 leaves, got 4"):
        _trees.to_bytes(_trees.schema_of([0.0] * 4))


def schema_for(paths, structure):
    leaves = [Leaf(path, "float32", ()) for path in paths]
    return Schema(leaves, structure), [np.float32(i) for i in range(len(leaves))]


ONE, TWO = ["['a']"], ["['a']", "['b']"]


@pytest.mark.parametrize(
    ("paths", "structure"),
    [
        ([], ""),
        ([], "0"),
        ([], "[]"),
        ([], "7"),
        ([], '"x"'),
        ([], "{}"),
        ([], '{"set": []}'),
        ([], '{"list": [], "tuple": []}'),
        ([], '{"dict": [["a", 0]]}'),
        ([""], "null"),
        ([""], "[0]"),
        ([""], "1"),
        ([""], '{"list": [0]}'),
        (["[0]"], '{"list": 0}'),
        (["[0]"], '{"list": "0"}'),
        (["[0]"], '{"list": {"0": 0}}'),
        (["[0]"], '{"list": [0, 0]}'),
        (["[0]", "[1]"], '{"list": [0]}'),
        (["[1]", "[0]"], '{"list": [0, 0]}'),
        (ONE, "{"),
        (ONE, '{"dict": ["a"]}'),
        (ONE, '{"dict": [["a"]]}'),
        (ONE, '{"dict": [["a", 0, 0]]}'),
        (ONE, '{"dict": [[["a"], 0]]}'),
        (ONE, '{"dict": [[{}, 0]]}'),
        (ONE, '{"dict": [["b", 0]]}'),
        (ONE, '{"dict": {"a": 0}}'),
        (TWO, '{"dict": [["a", 0], ["a", 0]]}'),
        (TWO, '{"dict": [["a", 0], [1, 0]]}'),
        (TWO, '{"dict": [["a", 0], [null, 0]]}'),
        (TWO, '{"dict": [["a", 0], ["c", 0]]}'),
        ([""], "9" * 10_000),
        ([""], "[" * 100_000),
        ([""], '{"list":[' * 100_000 + "0" + "]}" * 100_000),
        ([""], '{"dict":[["a",' * 100_000 + "0" + "]]}" * 100_000),
    ],
    ids=lambda value: str(value)[:40],
)
def test_structure_that_does_not_match_the_leaves_is_rejected(paths, structure):
    schema, leaves = schema_for(paths, structure)
    for like in (None, {"quite": [0, "other"]}):
        with pytest.raises(errors.ProtocolError, match="structure of a tree"):
            _trees.build(schema, leaves, like)


@pytest.mark.parametrize("depth", [1, 100, *range(440, 520, 4), 900, 1000, 5000])
def test_structures_of_any_depth_are_built_or_rejected(depth):
    structure = '{"list":[' * depth + "0" + "]}" * depth
    schema, leaves = schema_for(["[0]" * depth], structure)
    try:
        tree = _trees.build(schema, leaves)
    except errors.ProtocolError:
        assert depth > 100
        return
    for _ in range(depth):
        (tree,) = tree
    assert tree == 0.0


values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.fixed_dictionaries({"list": st.lists(inner, max_size=2)})
        | st.fixed_dictionaries(
            {"dict": st.lists(st.tuples(inner, inner) | inner, max_size=2)}
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from([[], [""], ["[0]"], ["[0]", "[1]"], ONE, TWO]), values)
@example(TWO, {"dict": [["b", 0], ["a", 0]]})
@example(["[0]"], {"dict": [[0, 0]]})
def test_any_structure_matches_the_leaves_or_is_rejected(paths, structure):
    schema, leaves = schema_for(paths, json.dumps(structure))
    try:
        tree = _trees.build(schema, leaves)
    except errors.ProtocolError:
        return
    assert [leaf.path for leaf in _trees.schema_of(tree).leaves] == paths


@pytest.mark.parametrize(
    "params",
    [
        Layer(jnp.ones(3), jnp.zeros(2)),
        FrozenDict({"w": jnp.ones(3), "b": jnp.zeros(2)}),
        {"w": np.ones(3), "b": np.zeros(2)},  # float64, which JAX converts to float32
    ],
    ids=lambda params: type(params).__name__,
)
@pytest.mark.parametrize("who", ["chief", "service"])
def test_service_accepts_the_same_trees_as_a_local_center(params, who):
    rule = shared.downpour()
    with (
        serve(rule, params if who == "service" else None) as server,
        connect(server.address, rule, timeout=20.0) as center,
    ):
        worker = agn_optax.Worker(center, shared.sgd(1.0), period=1)
        own, state = worker.start(params, chief=who == "chief")
        grads = jax.tree.map(jnp.ones_like, own)
        updates, state = worker.tx.update(grads, state, own)
        own, state = worker.exchange(optax.apply_updates(own, updates), state)
        assert_same(own, jax.tree.map(lambda x: x - 1.0, params))
        assert_same(center.pull().params, own)
