"""A center whose parameters are flattened into two arrays.

A store flattens them if the rule treats all elements alike. A program then has two
arguments for the center instead of one per leaf. A message from a transport, whose
buffer has the same layout, needs no copy to become such arguments.

There are two arrays because the numbers must be those of the tree, bit for bit. XLA
computes a value that the leaves share, such as Adam's bias correction, once and
separately. With a single array XLA computes it within the loop over the array, by other
instructions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax._internal import layout
from agn_optax.round import contribution_like, elementwise, steps
from agn_optax.rules import Rule

PyTree = Any


class Packing:
    """The layout of a tree's leaves in two arrays.

    Args:
      params: a tree with at least two leaves of one dtype, in host memory.
    """

    def __init__(self, params: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(params)
        self._dtype = np.dtype(leaves[0].dtype)
        self._shapes = [leaf.shape for leaf in leaves]
        sizes = [math.prod(shape) for shape in self._shapes]
        offsets, end = layout.offsets(sizes)
        middle = layout.middle(offsets, end)
        self.shapes = ((middle,), (end - middle,))
        # For each leaf, the index of its array, and its slice there.
        self._places = [
            (1, slice(offset - middle, offset - middle + size))
            if offset >= middle
            else (0, slice(offset, offset + size))
            for offset, size in zip(offsets, sizes, strict=True)
        ]

    def keep(self, params: PyTree) -> Packed:
        """Return a flattened copy of parameters, as JAX arrays."""
        leaves, dtype = jax.tree.leaves(params), self._dtype
        return Packed(*(_owned(self._part(n, leaves, dtype)) for n in (0, 1)))

    def holds(self, contribution: PyTree) -> bool:
        """Return whether a contribution is flattened in this layout."""
        is_pair = isinstance(contribution, Packed)
        return is_pair and tuple(part.shape for part in contribution) == self.shapes

    def pack(self, tree: PyTree) -> Packed:
        """Flatten a tree in host memory, with zeros in the gaps between leaves."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        dtypes = {leaf.dtype for leaf in leaves}
        dtype = dtypes.pop() if len(dtypes) == 1 else self._dtype
        return Packed(*(self._part(n, leaves, dtype) for n in (0, 1)))

    def _part(self, number: int, leaves: Sequence[Any], dtype: Any) -> np.ndarray:
        """Return one of the two arrays, by its index."""
        part = np.zeros(self.shapes[number], dtype)
        for leaf, (own, place) in zip(leaves, self._places, strict=True):
            if own == number:
                part[place] = np.asarray(leaf).reshape(-1)
        return part

    def unpack(self, packed: Packed) -> PyTree:
        """Return two flattened arrays as a tree, whose leaves are views of them."""
        parts = [np.asarray(part) for part in packed]
        leaves = [
            parts[own][place].reshape(shape)
            for (own, place), shape in zip(self._places, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def pack_state(self, rule: Rule, state: PyTree) -> PyTree:
        """Flatten the trees of parameters in a state of the center optimizer."""
        return jax.tree.map(jnp.asarray, steps.map_center_state(rule, self.pack, state))

    def unpack_state(self, rule: Rule, state: PyTree) -> PyTree:
        """Unpack the flattened trees in a state of the center optimizer."""
        return steps.map_center_state(rule, self.unpack, state)


class Packed(NamedTuple):
    """All leaves of a tree, in two arrays."""

    first: Any
    second: Any


def packing_of(rule: Rule, params: PyTree) -> Packing | None:
    """Return a layout for ``params`` if ``rule`` computes the same in it; else None."""
    leaves, treedef = jax.tree.flatten(params)
    if len(leaves) < 2 or len({leaf.dtype for leaf in leaves}) > 1:
        return None
    tree = jax.eval_shape(lambda: params)
    packing = Packing(tree)
    # Contributions are flattened, too: the codec must keep one array per leaf.
    sent: Any = jax.tree.structure(contribution_like(rule, tree))
    if (0,) in packing.shapes or sent != treedef:
        return None
    parts = Packed(*(jax.ShapeDtypeStruct(s, leaves[0].dtype) for s in packing.shapes))
    fits = elementwise.is_uniform(rule, tree) and elementwise.keeps_shapes(rule, parts)
    return packing if fits else None


def _owned(part: np.ndarray) -> jax.Array:
    """Return a copy that may be donated; JAX no longer refers to ``part``."""
    copy = jnp.array(part).block_until_ready()
    release_arguments()
    return copy


def release_arguments() -> None:
    """Make JAX release the arguments of finished programs, such as a message.

    JAX releases them when it starts to run a program, no matter which one.
    """
    _nothing(_nowhere())


_nothing = jax.jit(lambda nowhere: nowhere)


_nowhere = functools.cache(lambda: jnp.zeros((), jnp.bool))
