"""Parts of random elements: which elements of a leaf a part has.

The elements of a leaf are in rows of as many as there are parts. Each part has one
element of each row, and a random number of the row says which. Both ends compute these
numbers from the seed, so no indices are kept or sent, and every part has the same
number of elements, up to one.

A part has a dict with one entry in place of a leaf. Its key names the elements, so all
comparisons of trees compare seeds, too: at the start of a worker, in messages, in
checkpoints and on disk.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_NAME = re.compile(
    r"elements\(leaf=(\d+), part=(\d+), parts=(\d+), seed=(\d+), shape=\(([\d, ]*)\)\)"
)


class Elements(NamedTuple):
    """The elements of a leaf that a part has."""

    leaf: int  # index among the tree's leaves
    part: int
    parts: int  # number of parts
    seed: int
    shape: tuple[int, ...]  # of the leaf

    @property
    def name(self) -> str:
        """The key under which a part has them."""
        fields = (f"{name}={value}" for name, value in self._asdict().items())
        return f"elements({', '.join(fields)})"

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._rows + (self._column_of_rest() < self._rest)

    @property
    def _rows(self) -> int:
        return math.prod(self.shape) // self.parts

    @property
    def _rest(self) -> int:
        """The number of elements after the last full row."""
        return math.prod(self.shape) % self.parts

    def take(self, leaf: Any) -> Any:
        """Return the elements of a leaf as [size], also of an abstract one."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((self.size,), leaf.dtype)
        xp = _module_of(leaf)
        leaf = xp.asarray(leaf)
        flat, end = leaf.reshape(-1), self._rows * self.parts
        columns = (self._offsets(xp) + self.part) % self.parts
        table = flat[:end].reshape(self._rows, self.parts)
        found = xp.take_along_axis(table, columns[:, None], 1)[:, 0]
        if (column := self._column_of_rest()) < self._rest:
            found = xp.concatenate([found, flat[end + column : end + column + 1]])
        return found

    def put(self, leaf: Any, taken: Any) -> Any:
        """Return the leaf with these elements replaced by ``taken``, [size]."""
        rows = self._rows
        flat, end = jnp.reshape(leaf, -1), rows * self.parts
        places = jnp.arange(rows), (self._offsets(jnp) + self.part) % self.parts
        table = flat[:end].reshape(rows, self.parts)
        table = table.at[places].set(
            taken[:rows],
            indices_are_sorted=True,
            unique_indices=True,
            mode="promise_in_bounds",
        )
        if not self._rest:
            return table.reshape(self.shape)
        last, column = flat[end:], self._column_of_rest()
        if column < self._rest:
            last = last.at[column].set(taken[rows])
        return jnp.concatenate([table.reshape(-1), last]).reshape(self.shape)

    def join(self, arrays: Mapping[int, Any]) -> Any:
        """Return the leaf from the results of `take` for all parts, by part.

        They may have leading axes, such as one for the workers of a mesh.
        """
        if jnp.ndim(next(iter(arrays.values()))) > 1:
            return jax.vmap(self.join)(dict(arrays))
        xp, rows, pieces = _module_of(*arrays.values()), self._rows, []
        if rows:
            table = xp.stack([arrays[p][:rows] for p in range(self.parts)], axis=1)
            columns = xp.arange(self.parts, dtype=xp.int32)
            columns = (columns - self._offsets(xp)[:, None]) % self.parts
            pieces.append(xp.take_along_axis(table, columns, 1).reshape(-1))
        for column in range(self._rest):
            part = (column - self._offset_of(rows, np)) % self.parts
            pieces.append(arrays[part][rows:])
        return xp.concatenate(pieces).reshape(self.shape)

    def _column_of_rest(self) -> int:
        """Return this part's column in the last row, which is not full."""
        return (self._offset_of(self._rows, np) + self.part) % self.parts

    def _offsets(self, xp: Any) -> Any:
        """Return the column of part 0 in each full row, as int32."""
        return self._offset_of(xp.arange(self._rows, dtype=xp.uint32), xp)

    def _offset_of(self, row: Any, xp: Any) -> Any:
        # A row's random number: the mixing function of MurmurHash3.
        key = hashlib.blake2b(f"{self.seed} {self.leaf}".encode(), digest_size=4)
        x = xp.asarray(row, xp.uint32) ^ xp.uint32(int.from_bytes(key.digest()))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = x ^ (x >> xp.uint32(shift))
            with np.errstate(over="ignore"):
                x = x * xp.uint32(factor)
        x = x ^ (x >> xp.uint32(16))
        offset = x % xp.uint32(self.parts)
        return int(offset) if isinstance(row, int) else offset.astype(xp.int32)


def named(node: Any) -> Elements | None:
    """Return which elements a node of a part has; None if it is another node."""
    if not isinstance(node, Mapping) or len(node) != 1:
        return None
    (name,) = node
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return None
    leaf, part, parts, seed = map(int, found.groups()[:4])
    shape = tuple(map(int, re.findall(r"\d+", found[5])))
    return Elements(leaf, part, parts, seed, shape)


def join(nodes: list[Mapping[str, Any]]) -> Any:
    """Return the leaf whose elements all these nodes have together."""
    taken = {
        elements: node[elements.name] for node in nodes if (elements := named(node))
    }
    arrays = {elements.part: array for elements, array in taken.items()}
    return next(iter(taken)).join(arrays)


def _module_of(*arrays: Any) -> Any:
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
