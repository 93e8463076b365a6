"""Descriptions of trees (paths, dtypes, shapes) that can be stored and compared.

This module handles no arrays; `trees.describe` returns the description of a tree.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Leaf(NamedTuple):
    """One array of a tree."""

    path: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.path or 'the only leaf'} {self.dtype}{list(self.shape)}"


class Description:
    """The leaves of a tree, and the containers around them.

    Args:
      leaves: the leaves in the order of ``jax.tree.leaves``.
      structure: the containers as JSON values, see `structure`; stored as it is.
    """

    def __init__(self, leaves: Sequence[Leaf], structure: Any = None) -> None:
        self.leaves = tuple(leaves)
        self.structure = structure

    @functools.cached_property
    def hash(self) -> bytes:
        """A hash of the leaves (16 bytes), which ignores their containers."""
        text = json.dumps(self.leaves)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def difference(
        self,
        other: Description,
        subject: str,
        other_subject: str,
        *,
        dtypes: bool = True,
    ) -> str | None:
        """Return a text that names the first leaf that differs; None if none does.

        Args:
          other: the description to compare this one with.
          subject: subject and verb of the text for this tree, such as "params has".
          other_subject: subject and verb of the text for the other tree.
          dtypes: whether leaves of different dtypes differ.
        """
        for leaf, other_leaf in itertools.zip_longest(self.leaves, other.leaves):
            if other_leaf is None:
                return f"{subject} {leaf}, which {other_subject} not"
            if leaf is None:
                return f"{other_subject} {other_leaf}, which {subject} not"
            same_dtype = other_leaf._replace(dtype=leaf.dtype)
            if leaf != (other_leaf if dtypes else same_dtype):
                return f"{subject} {leaf}, where {other_subject} {other_leaf}"
        return None


def structure(tree: Any) -> Any:
    """Return the dicts, lists, tuples and Nones of a tree as JSON; a leaf is 0."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {"dict": [[key, structure(tree[key])] for key in sorted(tree)]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [structure(child) for child in tree]}
    return 0


def rebuild(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return the tree that has the containers of a `structure`, and ``leaves``.

    An invalid structure raises a builtin exception, such as a KeyError.
    """
    if structure is None:
        return None
    if structure == 0:
        return next(leaves)
    ((kind, children),) = structure.items()
    if kind == "dict":
        return {key: rebuild(child, leaves) for key, child in children}
    rebuilt = [rebuild(child, leaves) for child in children]
    return {"list": list, "tuple": tuple}[kind](rebuilt)
