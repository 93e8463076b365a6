"""Exchanges of a few leaves at a time, where that saves memory and memory traffic.

A loop over the whole model carries everything that it changes: updates that would
otherwise never be written to memory, or the difference by which two arrays move. These
need memory of the model's size, which the operating system allocates anew at every
call, and allocating it takes longer than filling it. With one loop for every few
leaves, one loop after the other, only the memory for these leaves is needed at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from agn_optax._internal import tracing
from agn_optax.round import _collectives, _parts
from agn_optax.round._parts import Parts

PyTree = Any

LEAST = 16 << 20  # bytes per group at least; the allocator reuses smaller buffers
_MOST_GROUPS = 64  # each group is a loop to compile


def owners_in(initializes: Any, state: PyTree, numbers: PyTree) -> PyTree:
    """Return the owner of each array in the state of an optimizer or codec.

    An owner is the index of a leaf, or `SHARED`, as `Parts.cut` takes it.
    """
    return optax.tree.map_params(
        initializes,
        lambda _, number: number,
        state,
        numbers,
        transform_non_params=lambda _: _parts.SHARED,
    )


def when(
    due: jax.Array | None,
    act: Callable[[PyTree, PyTree], PyTree],
    carry: tuple[PyTree, PyTree],
    params: PyTree,
    owners: Callable[[PyTree], PyTree],
    count: jax.Array,
) -> PyTree:
    """Return ``act(carry, params)`` where ``due``, else ``carry``.

    The act runs by groups of leaves on a CPU, for large trees, if its result for a leaf
    depends on that leaf alone. Otherwise it runs on the whole tree: on accelerators a
    loop waits for the host, and memory allocation is cheap.

    Args:
      due: whether to act; None acts always, without a loop for the whole tree.
      act: makes a new carry, also from trees with None in place of some leaves.
      carry: the values that ``act`` changes: a tree like the parameters (if ``due`` is
        given, one that has not been written to memory yet), and a state.
      params: a tree that ``act`` reads as well; its leaves are grouped.
      owners: function from a tree of the leaves' indices to the owners of the state's
        arrays, as `Parts.cut` takes them.
      count: an int32 scalar that is never negative, which XLA cannot know.
    """
    plan = _plan(act, carry, params, owners)
    if plan is None:
        if due is None:
            return act(carry, params)
        return _collectives.when(due, lambda carry: act(carry, params), carry)
    moved = carry
    for i in range(len(plan.groups)):
        reads = plan.groups.take(i, params)

        def body(state: Any, reads: PyTree = reads) -> Any:
            return act(state[0], reads), state[1] + 1

        # Each loop's counter continues that of the loop before. Without this
        # dependency, XLA would first compute the inputs of all loops, and keep them
        # until all loops are done.
        tree, state = plan.groups.take(i, carry, plan.owners)
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


class _Plan(NamedTuple):
    """Groups of leaves that are exchanged together."""

    groups: Parts
    owners: PyTree  # owner of each array of the carry


def _plan(
    act: Callable[[PyTree, PyTree], PyTree],
    carry: tuple[PyTree, PyTree],
    params: PyTree,
    owners: Callable[[PyTree], PyTree],
) -> _Plan | None:
    """Plan how to run an act by groups of leaves; None if it must run on all."""
    if jax.default_backend() != "cpu":
        return None
    size = sum(
        int(jnp.size(x) * jnp.result_type(x).itemsize) for x in jax.tree.leaves(carry)
    )
    count = min(_MOST_GROUPS, size // LEAST)
    parts = _parts.balanced(params, max(count, 1), rows=False)
    groups = Parts(sorted(part for part in parts if part))  # by their first leaves
    if len(groups) < 2:
        return None

    def plan() -> _Plan:
        numbers = _parts.numbers(params)
        of_carry = (numbers, owners(numbers))
        trees, of = (carry, params), (of_carry, numbers)
        whole = _made(act, trees, of)
        for i in range(len(groups)):
            made = _made(act, groups.take(i, trees, of), groups.take(i, of, of))
            if not made.items() <= whole.items():
                raise tracing.UnfitError(
                    "a result that differs without the other leaves"
                )
        return _Plan(groups, of_carry)

    return tracing.unless_unfit("an exchange by groups of leaves", plan)


def _made(
    act: Callable[[PyTree, PyTree], PyTree], trees: tuple[PyTree, PyTree], owners: Any
) -> dict[str, tracing.Value]:
    """Return how ``act`` computes each array of the new carry, by the array's path.

    Raises:
      tracing.UnfitError: an array depends on several leaves, or the new carry has other
        shapes or dtypes than the old one, which a loop does not allow.
    """
    of = jax.tree.leaves(owners)
    given = [
        tracing.Value(keystr(path), _leaves(owner))
        for (path, _), owner in zip(tree_leaves_with_path(trees), of, strict=True)
    ]
    reading = tracing.read(act, *trees, given=given)
    if any(tracing.calls_back(operation) for operation, _ in reading.across):
        raise tracing.UnfitError("a callback, which may read any leaf")
    count = len(jax.tree.leaves(trees[0]))
    old, new = (
        [(aval.shape, aval.dtype) for aval in avals]
        for avals in (reading.program.in_avals[:count], reading.program.out_avals)
    )
    if old != new:
        raise tracing.UnfitError("an exchange that changes shapes or dtypes")
    for (path, made), owner in zip(reading.made.items(), of[:count], strict=True):
        if not made.leaves <= _leaves(owner):
            raise tracing.UnfitError(f"result{path}, which depends on several leaves")
    return reading.made


def _leaves(owner: int) -> frozenset[int]:
    return frozenset() if owner == _parts.SHARED else frozenset({owner})
