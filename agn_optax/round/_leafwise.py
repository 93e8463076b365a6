"""Exchanges of a few leaves at a time, where that saves memory and memory traffic.

An exchange of the whole model in one loop (`_collectives.when`) keeps intermediate
results in memory: updates that would otherwise be fused with their addition to the
parameters, or the difference by which both worker and center move. They have the
model's size. The operating system allocates that memory anew at every call, which takes
longer than filling it. With a loop for each group of leaves, one after the other, only
one group needs memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax._internal import attempt, trees
from agn_optax.round import _collectives, _parts
from agn_optax.round._parts import Parts

PyTree = Any

LEAST = 16 << 20  # bytes per group at least; the allocator reuses smaller buffers
_MOST_GROUPS = 64  # each group is a loop to compile


def when(
    due: jax.Array | None,
    act: Callable[[PyTree, PyTree], PyTree],
    carry: tuple[PyTree, PyTree],
    params: PyTree,
    count: jax.Array,
    is_leafwise: Callable[[], bool],
) -> PyTree:
    """Return ``act(carry, params)`` where ``due``, else ``carry``.

    The act runs by groups of leaves on a CPU, for large trees, if its result for a leaf
    depends on that leaf alone. Otherwise it runs on the whole tree: on accelerators a
    loop waits for the host, and memory allocation is cheap.

    Args:
      due: whether to act; None means always, without a loop for the whole tree.
      act: makes a new carry, also from trees with None in place of some leaves.
      carry: the values that ``act`` changes: a tree like the parameters, and a state.
        If ``due`` is given, the tree should be an intermediate result of the program,
        such as updates, which need not be written to memory as a whole.
      params: a tree that ``act`` reads as well; its leaves are grouped.
      count: an int32 scalar that is never negative, which XLA cannot know.
      is_leafwise: returns whether the result for a leaf depends on that leaf alone.
    """
    groups = _groups(carry, params)

    cut = None
    if len(groups) > 1 and is_leafwise():
        cut = attempt(
            "an exchange by groups of leaves",
            lambda: _pieces(act, carry, params, groups),
            logging.WARNING,  # all its transformations are known to work leaf by leaf
        )
    if cut is None:
        if due is None:
            return act(carry, params)
        return _collectives.when(due, lambda carry: act(carry, params), carry)
    moved = carry
    for (tree, state), reads in cut:

        def body(state: Any, reads: PyTree = reads) -> Any:
            return act(state[0], reads), state[1] + 1

        # Each loop's counter continues that of the loop before. Without this
        # dependency, XLA would first compute the inputs of all loops, and keep them
        # until all loops are done.
        always = count >= 0
        if due is not None:
            tree = jax.tree.map(lambda x, now=always: jnp.where(now, x, 0), tree)
        own, count = _collectives.when(
            always if due is None else due, body, ((tree, state), count)
        )
        moved = jax.tree.map(
            lambda made, old: old if made is None else made,
            own,
            moved,
            is_leaf=lambda node: node is None,
        )
    return moved


def _groups(carry: PyTree, params: PyTree) -> Parts:
    """Divide the leaves of ``params`` into groups: one group if few or small."""
    count = 1
    if jax.default_backend() == "cpu":
        size = trees.nbytes(jax.eval_shape(lambda: carry))
        count = min(_MOST_GROUPS, size // LEAST)
    parts = _parts.balanced(params, max(count, 1), rows=False)
    return Parts(sorted(part for part in parts if part))  # in leaf order


def _pieces(
    act: Callable[[PyTree, PyTree], PyTree],
    carry: PyTree,
    params: PyTree,
    groups: Parts,
) -> list[tuple[PyTree, PyTree]]:
    """Return the carry and the parameters of each group.

    Trees like the parameters are divided. Other arrays, such as counts, go to every
    group.

    Raises:
      TypeError: the new carry has other shapes or dtypes than the old one,
        which a loop does not allow.
    """
    treedef: Any = jax.tree.structure(params)

    def is_divided(node: PyTree) -> bool:
        return bool(jax.tree.structure(node) == treedef)

    numbers = _parts.numbers(params)
    owners = jax.tree.map(
        lambda node: numbers if is_divided(node) else _parts.SHARED,
        (carry, params),
        is_leaf=is_divided,
    )
    cut = groups.cut((carry, params), owners)
    for each in cut:
        if trees.kinds(jax.eval_shape(act, *each)) != trees.kinds(each[0]):
            raise TypeError("an exchange that changes shapes or dtypes")
    return cut
