"""Checks that a rule may move parts of a center, or all its leaves as one array.

This is declared: for the rule's functions by `Rule.elementwise`, for its codec by
`Codec.reads`, and for its transformations by the table in `agn_optax.rules._declared`.
Nothing is computed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax._internal import combinations
from agn_optax.round import _round
from agn_optax.rules import Reads, Rule, codecs, parts_of, widest

PyTree = Any

_log = logging.getLogger("agn_optax")


def check(rule: Rule, params: PyTree, parts: Sequence[PyTree]) -> None:
    """Check that the exchange of ``rule`` may run on each part of a tree by itself.

    Args:
      rule: the rule.
      params: the whole tree, which may be abstract.
      parts: trees like ``params``, with pieces of some leaves and None for others;
        abstract.

    Raises:
      InvalidArgumentError: the exchange may not run on parts.
    """
    is_cut = _shapes(parts) != _shapes(params)
    if len(parts) == 1 and not is_cut:
        return
    unfit = _wider(rule, "element" if is_cut else "leaf")
    if unfit is None and not all(keeps_shapes(rule, part) for part in parts):
        unfit = f"rule {rule.name!r}, whose center optimizer does not accept each part"
    if unfit is not None:
        combinations.reject(
            "a center in shards", "a rule that is not elementwise", unfit
        )


def keeps_shapes(rule: Rule, center: PyTree) -> bool:
    """Return whether a center optimizer accepts a tree, and keeps all shapes.

    An elementwise optimizer with arrays as settings, such as a learning rate for each
    element, accepts only trees whose leaves have the shapes of these arrays.

    Args:
      rule: the rule.
      center: a center, or a part of it, which may be abstract.
    """

    def move(center: PyTree) -> tuple[PyTree, PyTree]:
        state = _round.init_center_state(rule, center)
        return (center, state), _round.descend(rule, center, center, state, {})

    try:
        before, after = jax.eval_shape(move, center)
    except Exception as error:  # an optimizer may raise anything
        _log.info("the center optimizer of rule %r raised %r", rule.name, error)
        return False
    return _shapes(before) == _shapes(after)


def is_leafwise(rule: Rule) -> bool:
    """Return whether ``rule`` moves each leaf by itself."""
    if unfit := _wider(rule, "leaf"):
        _log.debug("not done: an exchange by groups of leaves, because of %s", unfit)
        return False
    return rule.combine_reads != "tree"


def is_uniform(rule: Rule, params: PyTree) -> bool:
    """Return whether ``rule`` moves all elements of a center in the same way."""
    if unfit := _wider(rule, "element", of_center=True):
        _log.debug("not done: a center in two arrays, because of %s", unfit)
        return False
    return rule.combine_reads == "element" and () not in _shapes(params)


def reads_more_than_elements(rule: Rule) -> str | None:
    """Return the first part of a rule that reads more than one element, or None.

    The codec may read more.
    """
    if rule.combine_reads != "element":
        return f"rule {rule.name!r} with {rule.combine}"
    return _wider(dataclasses.replace(rule, codec=codecs.identity()), "element")


def _wider(rule: Rule, allowed: Reads, *, of_center: bool = False) -> str | None:
    """Return the first part of a rule that reads more than is allowed, or None.

    Args:
      rule: the rule.
      allowed: how much a part may read.
      of_center: whether to look only at the parts that run at a center outside the
        program. For these a declaration by `elementwise` does not count, because it
        allows masks.
    """
    reads = {f"codec {rule.codec}": rule.codec.reads}
    if rule.message is not None or not of_center:
        own: Reads = "element" if rule.elementwise else "tree"
        reads["contribution, message or adopt"] = own
    optimizers = {"center optimizer": rule.center, "discount": rule.discount}
    if not of_center:
        optimizers["record"] = rule.record
    for what, optimizer in optimizers.items():
        for part in parts_of(optimizer, trusting=not of_center) if optimizer else ():
            reads[f"{what} with {part.maker}(...)"] = part.reads
    unfit = [what for what, read in reads.items() if widest(read, allowed) != allowed]
    if not unfit:
        return None
    return (
        f"rule {rule.name!r}, whose {unfit[0]} is not known to work {allowed} by "
        f"{allowed}"
    )


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return sorted(jnp.shape(leaf) for leaf in jax.tree.leaves(tree))
