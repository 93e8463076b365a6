"""Exchanges of a few leaves at a time, where that saves memory and its traffic.

A loop over the whole model carries what it changes: updates that would otherwise never
be written down, or the difference by which two arrays move. That is memory of the
model's size, which the operating system gives anew at every call, and it takes longer
to be given memory than to fill it. With a loop for every few leaves, one after the
other, there is never more than these leaves need.
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

LEAST = 16 << 20  # bytes that a group changes; the allocator keeps less for the next
_MOST_GROUPS = 64  # every one is a loop to compile


def owners_in(initializes: Any, state: PyTree, numbers: PyTree) -> PyTree:
    """To which leaf each array in the state of an optimizer or codec belongs.

    As `Parts.cut` takes it.
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
    """``act(carry, params)`` where ``due``, else ``carry``, by groups of leaves or all.

    By groups on a CPU, for large trees, if what ``act`` makes of a leaf depends on that
    leaf alone. On accelerators a loop waits for the host, and memory costs nothing.

    Args:
      due: whether to act; None always does, and needs no loop for the whole.
      act: makes a new carry, also of trees that have None in place of some leaves.
      carry: what it changes: a tree like the parameters (where ``due`` is given, one
        that nobody has written down yet), and a state.
      params: what it reads besides; the tree whose leaves are grouped.
      owners: of a tree of the leaves' numbers: to which leaf each array in the state
        belongs, as `Parts.cut` takes it.
      count: an int32 that is never negative, which XLA does not know.
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

        # Each loop counts on from the one before. Without that, XLA would first compute
        # what all of them are given, and keep it until they are done.
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
    """What moves together."""

    groups: Parts
    owners: PyTree  # to which leaf each array of the carry belongs


def _plan(
    act: Callable[[PyTree, PyTree], PyTree],
    carry: tuple[PyTree, PyTree],
    params: PyTree,
    owners: Callable[[PyTree], PyTree],
) -> _Plan | None:
    """How an act may be done by groups of leaves; None where it may not."""
    if jax.default_backend() != "cpu":
        return None
    size = sum(
        int(jnp.size(x) * jnp.result_type(x).itemsize) for x in jax.tree.leaves(carry)
    )
    count = min(_MOST_GROUPS, size // LEAST)
    parts = _parts.balanced(params, max(count, 1), rows=False)
    groups = Parts(sorted(part for part in parts if part))  # the first leaf comes first
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
                raise tracing.UnfitError("what it makes of a leaf without the others")
        return _Plan(groups, of_carry)

    return tracing.unless_unfit("an exchange by groups of leaves", plan)


def _made(
    act: Callable[[PyTree, PyTree], PyTree], trees: tuple[PyTree, PyTree], owners: Any
) -> dict[str, tracing.Value]:
    """How ``act`` makes each array of a new carry, which is of one leaf alone.

    Raises:
      tracing.UnfitError: it is not, or the new carry has other shapes or dtypes than
        the old one, as no loop allows.
    """
    of = jax.tree.leaves(owners)
    given = [
        tracing.Value(keystr(path), _leaves(owner))
        for (path, _), owner in zip(tree_leaves_with_path(trees), of, strict=True)
    ]
    reading = tracing.read(act, *trees, given=given)
    if any(tracing.calls_back(operation) for operation, _ in reading.across):
        raise tracing.UnfitError("a callback, which may look at anything")
    count = len(jax.tree.leaves(trees[0]))
    old, new = (
        [(aval.shape, aval.dtype) for aval in avals]
        for avals in (reading.program.in_avals[:count], reading.program.out_avals)
    )
    if old != new:
        raise tracing.UnfitError("an exchange that changes shapes or dtypes")
    for (path, made), owner in zip(reading.made.items(), of[:count], strict=True):
        if not made.leaves <= _leaves(owner):
            raise tracing.UnfitError(f"result{path}, which is made of several leaves")
    return reading.made


def _leaves(owner: int) -> frozenset[int]:
    return frozenset() if owner == _parts.SHARED else frozenset({owner})
