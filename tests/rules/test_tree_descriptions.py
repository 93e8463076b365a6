"""Descriptions of trees, and the first difference between two of them."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.support import assert_identical

from agn_optax import errors
from agn_optax._internal import check, description, trees
from agn_optax._internal.description import Description, Leaf

A, B = Leaf("['a']", "float32", (2, 3)), Leaf("['b']", "int32", ())


class Pair(NamedTuple):
    a: object
    b: object


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ([A, B], [A, B], None),
        ([], [], None),
        ([A], [A._replace(shape=(6,))], "I have {}[2, 3], where you have {}[6]"),
        ([B, A], [A, B], "I have ['b'] int32[], where you have {}[2, 3]"),
        ([A, B], [A], "I have ['b'] int32[], which you have not"),
        ([A], [A, B], "you have ['b'] int32[], which I have not"),
        ([A._replace(path="")], [], "I have the only leaf float32[2, 3], which"),
    ],
)
@pytest.mark.parametrize("dtypes", [True, False])
def test_difference_describes_the_first_differing_leaf(mine, theirs, words, dtypes):
    found = Description(mine).difference(
        Description(theirs), "I have", "you have", dtypes=dtypes
    )
    if words is None:
        assert found is None
    else:
        assert found.startswith(words.replace("{}", "['a'] float32"))


def test_dtypes_differ_only_if_compared():
    mine, theirs = Description([A]), Description([A._replace(dtype="bfloat16")])
    words = mine.difference(theirs, "it has", "center has")
    assert words == "it has ['a'] float32[2, 3], where center has ['a'] bfloat16[2, 3]"
    assert mine.difference(theirs, "it has", "center has", dtypes=False) is None


@pytest.mark.parametrize(
    "tree",
    [
        {"a": [jnp.ones(2), (np.ones((3, 1)), None)], "b": {}},
        {0: jnp.ones(2, "bfloat16"), 1: {"x": jnp.ones((), jnp.int32)}},
        jnp.ones(2),
        [],
        None,
    ],
)
def test_tree_of_plain_containers_can_be_rebuilt(tree):
    described = trees.describe(tree)
    again = description.rebuild(described.structure, iter(jax.tree.leaves(tree)))
    assert_identical(again, tree)
    assert trees.describe(again).hash == described.hash
    assert [leaf.shape for leaf in described.leaves] == [
        leaf.shape for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize(
    "tree", [Pair(jnp.ones(1), None), collections.OrderedDict(a=jnp.ones(1))]
)
def test_custom_containers_have_no_structure(tree):
    assert trees.describe(tree).structure is None


def test_leaf_of_non_numpy_dtype_is_described():
    (leaf,) = trees.describe({"key": jax.random.key(0)}).leaves
    assert str(leaf) == "['key'] key<fry>[]"


def test_same_tree_ignores_dtypes():
    check.same_tree({"a": jnp.ones(2)}, {"a": np.ones(2, np.int8)}, "one", "other")
    with pytest.raises(
        errors.TreeMismatchError,
        match="one and other are different trees: the same leaves",
    ):
        check.same_tree([jnp.ones(2)], (jnp.ones(2),), "one", "other")
