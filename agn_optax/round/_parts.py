"""Division of a tree into parts, which are kept or computed separately.

A part is a tree with the structure of the whole, with None in place of the leaves of
other parts, so paths and dimensions keep their meaning. It holds whole leaves, or rows
of leaves: a leaf may be cut along its first dimension. Parts of random elements have
these in place of leaves, see `_elements`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from agn_optax import errors
from agn_optax.round import _elements
from agn_optax.round._elements import Elements

PyTree = Any

SHARED: Any = -1  # owner of an array that belongs to all leaves, see `Parts.cut`


class Piece(NamedTuple):
    """Rows or elements of one leaf, or a whole leaf."""

    leaf: int  # index among the tree's leaves
    rows: slice | Elements | None = None  # None for the whole leaf


class Parts(tuple[tuple[Piece, ...], ...]):
    """The pieces of every part of a tree."""

    __slots__ = ()

    def cut(self, tree: PyTree, owners: PyTree = None) -> list[PyTree]:
        """Divide a tree into its parts.

        Args:
          tree: a tree with the structure of the one that was divided, or with another
            structure and ``owners``.
          owners: a tree like ``tree`` that has, for each array, the index of the leaf
            to which it belongs, or `SHARED` for an array that all parts get.
        """
        return [self.take(part, tree, owners) for part in range(len(self))]

    def take(self, part: int, tree: PyTree, owners: PyTree = None) -> PyTree:
        """Return one part of a tree, see `cut`."""
        rows = {piece.leaf: piece.rows for piece in self[part]}

        def piece(leaf: Any, owner: int) -> Any:
            if owner == SHARED or rows.get(owner, ()) is None:
                return leaf
            of_leaf = rows.get(owner)
            if isinstance(of_leaf, Elements):
                return {of_leaf.name: of_leaf.take(leaf)}
            return None if of_leaf is None else leaf[of_leaf]

        return jax.tree.map(piece, tree, numbers(tree) if owners is None else owners)

    def put(self, part: int, tree: PyTree, changed: PyTree) -> PyTree:
        """Return the tree with one part replaced by ``changed``.

        The part must have whole leaves or elements, not rows.
        """
        rows = {piece.leaf: piece.rows for piece in self[part]}

        def leaf(number: int, leaf: Any, new: Any) -> Any:
            if number not in rows:
                return leaf
            elements = rows[number]
            if isinstance(elements, Elements):
                return elements.put(leaf, new[elements.name])
            assert elements is None, elements
            return new

        return jax.tree.map(leaf, numbers(tree), tree, changed)


def join(parts: Sequence[PyTree]) -> PyTree:
    """Join the parts of a tree: the reverse of `Parts.cut`."""

    def join_leaf(*pieces: Any) -> Any:
        pieces = tuple(piece for piece in pieces if piece is not None)
        if pieces and _elements.named(pieces[0]):
            return _elements.join([*pieces])
        return jnp.concatenate(pieces) if len(pieces) > 1 else (pieces or (None,))[0]

    def is_leaf(node: Any) -> bool:
        return node is None or _elements.named(node) is not None

    # Structures differ where one part has elements and another one has none.
    trees = [jax.tree.flatten(part, is_leaf=is_leaf) for part in parts]
    leaves = map(join_leaf, *(leaves for leaves, _ in trees))
    return jax.tree.unflatten(trees[0][1], leaves)


def numbers(tree: PyTree) -> PyTree:
    """Replace each leaf of a tree by its index."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, range(len(leaves)))


def balanced(tree: PyTree, count: int, *, rows: bool = True) -> Parts:
    """Divide a tree into parts with about the same number of elements each.

    The result depends on the shapes only. A leaf larger than a fair share is cut into
    as many pieces as needed, with about the same number of rows each. Leaves are
    assigned from the largest to the smallest, each to the parts with the fewest
    elements so far. The pieces of one leaf go to parts in the order of their rows.

    Args:
      tree: the tree to divide; its leaves may be abstract.
      count: number of parts, some of which may be empty.
      rows: whether leaves may be cut.
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    sizes = [math.prod(shape) for shape in shapes]
    fair_size = -(-sum(sizes) // count) or 1
    load = [0] * count
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for leaf in sorted(range(len(sizes)), key=lambda leaf: -sizes[leaf]):
        length = shapes[leaf][0] if shapes[leaf] else 1
        cuts = min(-(-sizes[leaf] // fair_size), length, count) if rows else 1
        cuts = cuts or 1  # 0 for a leaf without elements
        emptiest = sorted(range(count), key=lambda part: load[part])[:cuts]
        bounds = [length * i // cuts for i in range(cuts + 1)]
        for i, part in enumerate(sorted(emptiest)):
            cut = slice(bounds[i], bounds[i + 1]) if cuts > 1 else None
            parts[part].append(Piece(leaf, cut))
            load[part] += sizes[leaf] * (bounds[i + 1] - bounds[i]) // max(length, 1)
    return Parts(tuple(sorted(part, key=lambda piece: piece.leaf)) for part in parts)


def patterns(given: Sequence[str], argument: str) -> tuple[str, ...]:
    """Check that ``given`` has only regular expressions, and return it as a tuple.

    Raises:
      InvalidArgumentError: ``given`` is empty, or has another element.
    """
    if not given:
        raise errors.InvalidArgumentError(
            f"{argument} must have at least one pattern, got none"
        )
    for pattern in given:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise errors.InvalidArgumentError(
                f"{argument} must be regular expressions, got {pattern!r}: {error}"
            ) from error
    return tuple(given)


def of_random_elements(tree: PyTree, count: int, seed: int) -> Parts:
    """Divide the elements of every leaf at random among parts.

    The result depends on the shapes and the seed only. Each part has the same number of
    elements of a leaf, up to one.
    """
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for leaf, array in enumerate(jax.tree.leaves(tree)):
        shape = jnp.shape(array)
        if not math.prod(shape):
            parts[0].append(Piece(leaf))
            continue
        for part in range(count):
            elements = Elements(leaf, part, count, seed, shape)
            if elements.size:
                parts[part].append(Piece(leaf, elements))
    return Parts(map(tuple, parts))


def by_path(tree: PyTree, patterns: Sequence[str]) -> Parts:
    """Divide a tree by paths: each leaf goes to the part of the first matching pattern.

    Raises:
      InvalidArgumentError: a path matches no pattern, or a pattern gets no leaf.
    """
    parts: list[list[Piece]] = [[] for _ in patterns]
    text = ""
    for leaf, (path, _) in enumerate(tree_leaves_with_path(tree)):
        text = keystr(path, simple=True, separator="/")
        found = [i for i, pattern in enumerate(patterns) if re.search(pattern, text)]
        if not found:
            raise errors.InvalidArgumentError(
                f"no pattern of {list(patterns)} is found in the path {text!r}: add "
                "a pattern for this path, or '.' at the end for all remaining paths"
            )
        parts[found[0]].append(Piece(leaf))
    if not all(parts):
        empty = [p for p, part in zip(patterns, parts, strict=True) if not part]
        raise errors.InvalidArgumentError(
            f"no leaf is left for {empty}; one of the paths is {text!r}"
        )
    return Parts(map(tuple, parts))
