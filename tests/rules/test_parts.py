"""Parts of a tree: cutting, joining and balancing them."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.support import assert_identical

from agn_optax import Fragments
from agn_optax import round as rounds

SHAPES = st.lists(
    st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=8
)


def arrays(shapes):
    """Return a tree of these shapes, with distinct elements and a None as a leaf."""
    ends = np.cumsum([0, *(np.prod(shape, dtype=int) for shape in shapes)])
    leaves = [
        np.arange(begin, end, dtype=np.float32).reshape(shape)
        for begin, end, shape in zip(ends, ends[1:], shapes, strict=False)
    ]
    return {"a": leaves[::2], "nothing": None, "b": tuple(leaves[1::2])}


@hypothesis.settings(max_examples=40)
@hypothesis.given(SHAPES, st.integers(1, 6), st.booleans())
def test_join_undoes_cut(shapes, count, rows):
    tree = arrays(shapes)
    parts = rounds.parts.balanced(tree, count, rows=rows)
    pieces = parts.cut(tree)
    assert len(pieces) == len(parts) == count
    assert_identical(rounds.parts.join(pieces), tree)
    elements = sum(leaf.size for piece in pieces for leaf in jax.tree.leaves(piece))
    assert elements == sum(leaf.size for leaf in jax.tree.leaves(tree))


@hypothesis.settings(max_examples=40)
@hypothesis.given(SHAPES, st.integers(1, 6), st.integers(0, 2))
def test_join_undoes_cut_into_random_elements(shapes, count, seed):
    tree = arrays(shapes)
    parts = rounds.parts.of_random_elements(tree, count, seed)
    pieces = parts.cut(tree)
    assert_identical(rounds.parts.join(pieces), tree)
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    for leaf in leaves:
        sizes = [np.isin(elements_of(piece), leaf).sum() for piece in pieces]
        assert max(sizes) - min(sizes) <= 1


def elements_of(tree):
    return np.concatenate([np.zeros(0), *map(np.ravel, jax.tree.leaves(tree))])


def test_random_elements_are_the_same_in_programs_and_of_abstract_arrays():
    tree = arrays([(5, 7), (3,), (), (0, 2), (64,)])
    parts = rounds.parts.of_random_elements(tree, 4, 3)
    pieces = parts.cut(tree)
    assert_identical(jax.jit(parts.cut)(tree), jax.tree.map(jnp.asarray, pieces))
    assert_identical(
        jax.jit(rounds.parts.join)(pieces), jax.tree.map(jnp.asarray, tree)
    )
    abstract = parts.cut(jax.eval_shape(lambda: tree))
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, pieces)


@pytest.mark.parametrize("seed", [None, 3])
def test_put_changes_one_part_and_no_other(seed):
    tree = arrays([(5, 7), (3,), (64,), (2, 3), (0, 2), ()])
    parts = Fragments(4, seed=seed).divide(tree)
    put = jax.jit(parts.put, static_argnums=0)
    changed = jax.tree.map(lambda x: -x - 1, tree)
    now = jax.tree.map(jnp.asarray, tree)
    for part in range(4):
        before, now = now, put(part, now, parts.take(part, changed))
        for other in range(4):
            expected = changed if other == part else before
            assert_identical(
                parts.take(other, now),
                jax.tree.map(jnp.asarray, parts.take(other, expected)),
            )
    assert_identical(now, jax.tree.map(jnp.asarray, changed))


def test_random_elements_of_several_workers_are_joined():
    tree = arrays([(5, 7), (3,), ()])
    parts = rounds.parts.of_random_elements(tree, 4, 3)
    workers = jax.tree.map(lambda x: np.stack([x, -x]), tree)
    each = jax.vmap(parts.cut)(workers)
    assert_identical(rounds.parts.join(each), jax.tree.map(jnp.asarray, workers))


def test_seeds_choose_other_elements_evenly_over_rows():
    leaf = np.arange(40000.0)
    first, second = (
        rounds.parts.of_random_elements(leaf, 4, seed).cut(leaf) for seed in (0, 1)
    )
    (a,), (b,) = first[0].values(), second[0].values()
    assert 0.2 < np.isin(a, b).mean() < 0.3
    columns = np.bincount(a.astype(int) % 4) / 10000
    assert np.abs(columns - 0.25).max() < 0.02


@hypothesis.given(SHAPES, st.integers(1, 6), st.booleans())
def test_parts_are_balanced_and_depend_only_on_shapes(shapes, count, rows):
    tree = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    parts = rounds.parts.balanced(tree, count, rows=rows)
    numpy = [np.empty(shape, "float16") for shape in shapes]  # only shapes count
    assert parts == rounds.parts.balanced(numpy, count, rows=rows)
    loads = [
        sum(
            (rows.stop - rows.start) * int(np.prod(shapes[leaf][1:], dtype=int))
            if rows
            else int(np.prod(shapes[leaf], dtype=int))
            for leaf, rows in part
        )
        for part in parts
    ]
    total = sum(int(np.prod(shape, dtype=int)) for shape in shapes)
    assert sum(loads) == total
    # The largest unit that cannot be cut further: a row, or a leaf.
    least = [shape[rows:] for shape in shapes if shape]
    uncut = max((int(np.prod(shape, dtype=int)) for shape in least), default=1)
    assert max(loads) <= 2 * (total / count) + max(uncut, 1)


@hypothesis.given(SHAPES, st.integers(1, 6))
def test_pieces_of_a_leaf_are_in_the_order_of_its_rows(shapes, count):
    tree = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    pieces = [piece for part in rounds.parts.balanced(tree, count) for piece in part]
    for leaf, shape in enumerate(shapes):
        own = [piece.rows for piece in pieces if piece.leaf == leaf]
        if own[0] is None:
            assert len(own) == 1
            continue
        ends = [0, *(rows.stop for rows in own)]
        assert [rows.start for rows in own] == ends[:-1]
        assert ends[-1] == shape[0]
        assert len(own) <= count


def test_leaves_stay_whole_without_row_cuts():
    tree = {"large": jnp.ones((100, 10)), "small": jnp.ones(3)}
    cut = rounds.parts.balanced(tree, 3).cut(tree)
    assert [jnp.shape(part["large"]) for part in cut] == [(33, 10), (33, 10), (34, 10)]
    whole = rounds.parts.balanced(tree, 3, rows=False).cut(tree)
    assert [part["large"] is None for part in whole] == [False, True, True]


def test_state_is_cut_like_the_tree_it_belongs_to():
    parts = rounds.parts.balanced([jnp.ones(4), jnp.ones(3)], 2)
    state = {"count": jnp.ones(()), "mu": [jnp.arange(4.0), jnp.arange(3.0)]}
    owners = {"count": rounds.parts.SHARED, "mu": rounds.parts.numbers(state["mu"])}
    first, second = parts.cut(state, owners)
    assert_identical(first, {"count": jnp.ones(()), "mu": [jnp.arange(4.0), None]})
    assert_identical(second, {"count": jnp.ones(()), "mu": [None, jnp.arange(3.0)]})
