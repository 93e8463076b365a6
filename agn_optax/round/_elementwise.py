"""Checks whether a rule may move parts of a center, or all its leaves as one array.

The checks read the traced program and need no list of known optimizers. Arrays may only
go through elementwise operations, and the program for a part must compute the same from
it as the program for the whole tree, with the same constants. (A division by the size
of a leaf fails the check.)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import combinations, tracing
from agn_optax.round import _round
from agn_optax.rules import Rule, codecs

PyTree = Any


def check(rule: Rule, params: PyTree, parts: Sequence[PyTree]) -> None:
    """Check that the exchange of ``rule`` may run on each part of a tree by itself.

    Args:
      rule: the rule.
      params: the whole tree, which may be abstract.
      parts: trees like ``params``, with pieces of some leaves and None for others;
        abstract.

    Raises:
      InvalidArgumentError: the exchange may not run on parts. The message names the
        optimizer that reads more than one element at a time.
    """
    cuts = _shapes(parts) != _shapes(params)  # whether leaves are cut
    if not cuts and _leaf_by_leaf(rule.codec, params):
        rule = dataclasses.replace(rule, codec=codecs.identity())
    exchange = functools.partial(_exchange, rule)
    whole = tracing.read(exchange, params)
    for operation, outermost in whole.across:
        combinations.refuse(
            "a center in shards",
            "a rule that is not elementwise",
            f"rule {rule.name!r}, where {tracing.origin(outermost)} reads more than "
            f"one element at a time ({operation.primitive.name})",
        )

    def same() -> bool:
        for part in parts:
            for path, value in tracing.read(exchange, part).made.items():
                if value.expression != whole.made[path].expression:
                    raise tracing.UnfitError(f"a part whose result{path} differs")
        return True

    if not tracing.unless_unfit(f"rule {rule.name!r} on parts", same):
        combinations.refuse(
            "a center in shards",
            "a rule that is not elementwise",
            f"rule {rule.name!r}, which treats leaves by their shape or their number",
        )


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return sorted(leaf.shape for leaf in jax.tree.leaves(tree))


def _leaf_by_leaf(codec: codecs.Codec, params: PyTree) -> bool:
    """Return whether a codec encodes and decodes each leaf by itself."""

    def travelled(tree: PyTree) -> PyTree:
        return codec.decode(codec.encode(tree, codec.init(tree))[0], tree)

    def alone() -> bool:
        for i, value in enumerate(tracing.read(travelled, params).made.values()):
            if not value.leaves <= {i}:
                raise tracing.UnfitError(f"leaf {i}, which depends on several leaves")
        return True

    return bool(tracing.unless_unfit(f"codec {codec} leaf by leaf", alone))


def is_uniform(rule: Rule, params: PyTree, parts: PyTree) -> bool:
    """Return whether ``rule`` moves each element in the same way in two trees.

    Args:
      rule: the rule.
      params: a tree, abstract.
      parts: another tree with the same elements, abstract.
    """

    def same() -> bool:
        if _of_each_leaf(rule, params) != _of_each_leaf(rule, parts):
            raise tracing.UnfitError("an optimizer that treats leaves by their shape")
        return True

    what = f"the center of rule {rule.name!r} in two arrays"
    return bool(tracing.unless_unfit(what, same))


def _of_each_leaf(rule: Rule, tree: PyTree) -> Any:
    """Return the expressions by which a center step computes each leaf's arrays.

    They must be the same for all leaves.

    Raises:
      tracing.UnfitError: they differ between leaves, or an operation reads more than
        one element or several leaves.
    """
    leaves = len(jax.tree.leaves(tree))
    given = [tracing.Value("the leaf", frozenset({leaf})) for leaf in range(leaves)]
    reading = tracing.read(lambda tree: _moved_by(rule, tree), tree, given=given)
    for operation, outermost in reading.across:
        raise tracing.UnfitError(
            f"{operation.primitive.name} in {tracing.origin(outermost)}, which reads "
            "more than one element"
        )
    made = list(reading.made.values())
    if any(len(value.leaves) > 1 for value in made):
        raise tracing.UnfitError("a result that depends on several leaves")
    # The center comes first, then the state. Every expression must occur equally often
    # for all leaves.
    counted = collections.Counter(v.expression for v in made if v.is_array)
    if len({value.expression for value in made[:leaves]}) > 1:
        raise tracing.UnfitError("leaves that are moved in different ways")
    if any(times % leaves for times in counted.values()):
        raise tracing.UnfitError("state that only some leaves have")
    shared = [value.expression for value in made if not value.is_array]
    return {what: times // leaves for what, times in counted.items()}, shared


def _exchange(rule: Rule, params: PyTree) -> PyTree:
    state = _round.init_local(rule, optax.identity(), params, None)
    record = _round.add_to_record(rule, state.record, params, params)
    state = state._replace(record=record, local_steps=jnp.ones((), jnp.int32))
    sent, _ = _round.contribute(rule, state, params, params)
    return _moved(rule, params, sent, steps=state.local_steps), record


def _moved_by(rule: Rule, tree: PyTree) -> PyTree:
    """Move a center by a contribution that equals it."""
    sent, _ = _round.encode(rule, tree, rule.codec.init(tree))
    return _moved(rule, tree, sent)


def _moved(rule: Rule, params: PyTree, sent: PyTree, **extra_args: Any) -> PyTree:
    state = rule.center.init(params)
    moved = _round.receive(rule, sent, params, state, extra_args=extra_args)
    return moved.center, moved.center_state
