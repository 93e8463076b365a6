"""Which leaves a tree has, in words and numbers that can be written down and compared.

Knows no arrays; `trees.describe` makes descriptions of trees.
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
      leaves: in order.
      structure: the containers, in terms of JSON; not looked at here.
    """

    def __init__(self, leaves: Sequence[Leaf], structure: Any = None) -> None:
        self.leaves = tuple(leaves)
        self.structure = structure

    @functools.cached_property
    def hash(self) -> bytes:
        """Equal for equal leaves, whatever contains them."""
        text = json.dumps(self.leaves)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def difference(
        self, other: Description, own: str, others: str, *, dtypes: bool = True
    ) -> str | None:
        """The first leaf that differs, in words; None if none does.

        Args:
          other: what this is compared with.
          own: the subject of what this has, such as "it".
          others: the subject of what the other one has.
          dtypes: whether leaves of different dtypes differ.
        """
        for mine, theirs in itertools.zip_longest(self.leaves, other.leaves):
            if theirs is None:
                return f"{own} {mine}, which {others} not"
            if mine is None:
                return f"{others} {theirs}, which {own} not"
            seen = theirs if dtypes else theirs._replace(dtype=mine.dtype)
            if mine != seen:
                return f"{own} {mine}, where {others} {theirs}"
        return None


def structure(tree: Any) -> Any:
    """Containers in terms of JSON: dicts, lists, tuples and None; a leaf is 0."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {"dict": [[key, structure(tree[key])] for key in sorted(tree)]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [structure(child) for child in tree]}
    return 0


def rebuild(structure: Any, leaves: Iterator[Any]) -> Any:
    """The tree of a `structure`, with ``leaves`` in it.

    Raises whatever comes of it if that is none.
    """
    if structure is None:
        return None
    if structure == 0:
        return next(leaves)
    ((kind, children),) = structure.items()
    if kind == "dict":
        return {key: rebuild(child, leaves) for key, child in children}
    made = [rebuild(child, leaves) for child in children]
    return {"list": list, "tuple": tuple}[kind](made)
