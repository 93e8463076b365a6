"""Exchanges of a few leaves at a time, where that saves memory and its traffic.

A loop over the whole model carries what it changes: updates that would otherwise never
be written down, or the difference by which two arrays move. That is memory of the
model's size, fresh at every call, and its pages take longer to make than to fill. Loops
over a few leaves, one after the other, need it for these leaves only.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from agn_optax.round import _collectives, _elementwise

PyTree = Any

LEAST = 16 << 20  # bytes that a group changes; memory for less is not made anew
_MOST_GROUPS = 64  # every one is a loop to compile
_SHARED = -1  # in place of a leaf's number: what belongs to all


def numbers_of(params: PyTree) -> PyTree:
    """The leaves of a tree, numbered."""
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(treedef, range(len(leaves)))


def shared(tree: PyTree) -> PyTree:
    """A tree that belongs to all leaves, as `when` wants to know it."""
    return jax.tree.map(lambda _: _SHARED, tree)


def numbers_in(
    optimizer: optax.GradientTransformation, state: PyTree, numbers: PyTree
) -> PyTree:
    """To which leaf each array in an optimizer's state belongs."""
    return optax.tree.map_params(
        optimizer,
        lambda _, number: number,
        state,
        numbers,
        transform_non_params=lambda _: _SHARED,
    )


def when(
    due: jax.Array | None,
    act: Callable[[PyTree, PyTree], PyTree],
    carry: PyTree,
    fixed: PyTree,
    numbers: Callable[[], tuple[PyTree, PyTree]],
    count: jax.Array,
    gate: Callable[[PyTree, jax.Array], PyTree] = lambda carry, _: carry,
) -> PyTree:
    """``act(carry, fixed)`` where ``due``, else ``carry``: by groups of leaves or all.

    By groups on a CPU, for large trees, if what ``act`` makes of a leaf depends on that
    leaf alone. On accelerators a loop waits for the host, and memory is not made anew.

    Args:
      due: whether to act; None always does, and needs no loop for the whole.
      act: makes a new carry, also of trees that have None in place of some leaves.
      carry: what it changes.
      fixed: what it reads besides.
      numbers: of all arrays in carry and in fixed: to which leaf of the model each of
        them belongs, or that it is `shared`.
      count: an int32 that is never negative, which XLA does not know.
      gate: ``(carry, ready)``: the same carry, to be computed from a scalar that is
        always true.
    """
    plan = _plan(act, carry, fixed, numbers)
    if plan is None:
        if due is None:
            return act(carry, fixed)
        return _collectives.when(due, lambda carry: act(carry, fixed), carry)
    if due is None:
        due = count >= 0
    leaves, treedef = jax.tree.flatten(carry)
    places = jax.tree.leaves(plan.of_carry)
    for group in plan.groups:
        reads = _only(fixed, plan.of_fixed, group)

        def body(state: Any, reads: PyTree = reads) -> Any:
            return act(state[0], reads), state[1] + 1

        # The next loop counts on from this one, so that XLA cannot begin with what it
        # is given, and keep that, before this one is done.
        own = gate(_only(carry, plan.of_carry, group), count >= 0)
        own, count = _collectives.when(due, body, (own, count))
        made = iter(jax.tree.leaves(own))
        for i, place in enumerate(places):
            if place == _SHARED or place in group:
                leaves[i] = next(made)
    return jax.tree.unflatten(treedef, leaves)


class _Plan(NamedTuple):
    """What moves together: groups of leaves, and to which leaf each array belongs."""

    groups: list[frozenset[int]]
    of_carry: PyTree
    of_fixed: PyTree


def _plan(
    act: Callable[[PyTree, PyTree], PyTree],
    carry: PyTree,
    fixed: PyTree,
    numbers: Callable[[], tuple[PyTree, PyTree]],
) -> _Plan | None:
    """How an act may be done by groups of leaves; None where it may not."""
    if jax.default_backend() != "cpu":
        return None
    size = sum(map(_nbytes, jax.tree.leaves(carry)))
    if size < 2 * LEAST:
        return None
    try:
        of_carry, of_fixed = numbers()
        groups = list(_cut(carry, of_carry, max(LEAST, size // _MOST_GROUPS)))
        whole = _meanings(act, (carry, fixed), (of_carry, of_fixed))
        for group in groups:
            own, of_own = (
                _only(trees, (of_carry, of_fixed), group)
                for trees in ((carry, fixed), (of_carry, of_fixed))
            )
            if not _meanings(act, own, of_own).items() <= whole.items():
                return None
    except Exception:  # it looks further, or cannot be traced without the other leaves
        return None
    return _Plan(groups, of_carry, of_fixed) if len(groups) > 1 else None


def _cut(carry: PyTree, numbers: PyTree, size: int) -> Iterator[frozenset[int]]:
    """Groups of leaves, in order, of about ``size`` bytes each."""
    sizes: collections.Counter[int] = collections.Counter()
    leaves, places = jax.tree.leaves(carry), jax.tree.leaves(numbers)
    for leaf, place in zip(leaves, places, strict=True):
        sizes[place] += _nbytes(leaf)
    del sizes[_SHARED]
    group: list[int] = []
    filled = 0
    for place in sorted(sizes):
        group.append(place)
        filled += sizes[place]
        if filled >= size:
            yield frozenset(group)
            group, filled = [], 0
    if group:
        yield frozenset(group)


def _nbytes(leaf: Any) -> int:
    return int(jnp.size(leaf) * jnp.result_type(leaf).itemsize)


def _only(tree: PyTree, numbers: PyTree, group: frozenset[int]) -> PyTree:
    """``tree`` with None in place of the leaves that belong to other groups."""
    return jax.tree.map(
        lambda leaf, place: leaf if place == _SHARED or place in group else None,
        tree,
        numbers,
    )


def _meanings(
    act: Callable[[PyTree, PyTree], PyTree], trees: Any, numbers: Any
) -> dict[str, Any]:
    """What ``act`` makes of every leaf, which is of that leaf alone.

    Raises:
      ValueError: it is not, or it is of another type than before, as no loop allows.
    """
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), trees
    )
    program, out = jax.make_jaxpr(act, return_shape=True)(*abstract)
    kinds = [
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
        for tree in (abstract[0], out)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError("an exchange that changes shapes or dtypes")
    given = [
        _elementwise.Meaning(keystr(path), None if place == _SHARED else place)
        for (path, _), place in zip(
            tree_leaves_with_path(abstract), jax.tree.leaves(numbers), strict=True
        )
    ]
    made = _elementwise.follow(program.jaxpr, program.consts, given)
    paths = [keystr(path) for path, _ in tree_leaves_with_path(out)]
    places = jax.tree.leaves(numbers[0])
    if made is None or any(
        meaning.leaf not in (None, place)
        for meaning, place in zip(made, places, strict=True)
    ):
        raise ValueError("an exchange that looks further than one leaf")
    return {path: each.what for path, each in zip(paths, made, strict=True)}
