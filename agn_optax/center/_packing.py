"""Parameters as two arrays, for rules that treat all elements alike.

A program then has two arguments for the center instead of one for every leaf, and what
comes over a wire, whose buffer has the same layout, are these arguments as it is.

Two, because the numbers must be those of the tree, bit for bit. What the leaves share,
such as Adam's bias correction, XLA computes once and apart; but where there is only one
array, it does so within the loop over it, with other instructions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from agn_optax._internal import layout
from agn_optax.round import elementwise
from agn_optax.rules import Rule

PyTree = Any


class Packing:
    """How the leaves of a tree lie in two arrays.

    Args:
      params: a tree of two leaves or more, all of one dtype.
    """

    def __init__(self, params: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(params)
        self._dtype = np.dtype(leaves[0].dtype)
        self._shapes = [leaf.shape for leaf in leaves]
        sizes = [math.prod(shape) for shape in self._shapes]
        offsets, end = layout.offsets(sizes)
        middle = layout.middle(offsets, end)
        self.shapes = ((middle,), (end - middle,))
        # Of every leaf: in which part it lies, and where there.
        self._places = [
            (1, slice(offset - middle, offset - middle + size))
            if offset >= middle
            else (0, slice(offset, offset + size))
            for offset, size in zip(offsets, sizes, strict=True)
        ]

    def is_packed(self, tree: PyTree) -> bool:
        """Whether ``tree`` is a packed one, rather than one to be packed."""
        is_pair = isinstance(tree, Packed)
        return is_pair and tuple(part.shape for part in tree) == self.shapes

    def pack(self, tree: PyTree) -> Packed:
        """The leaves of a tree in host memory, with zeros between them."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        dtypes = {leaf.dtype for leaf in leaves}
        dtype = dtypes.pop() if len(dtypes) == 1 else self._dtype
        return Packed(*self.parts(leaves, dtype))

    def parts(self, leaves: Sequence[Any], dtype: Any = None) -> Iterator[np.ndarray]:
        """What `pack` returns, one part after the other, of which it keeps none.

        Args:
          leaves: of a tree.
          dtype: of the parts; None takes the packing's.
        """
        for number, shape in enumerate(self.shapes):
            part = np.zeros(shape, dtype or self._dtype)
            for leaf, (own, place) in zip(leaves, self._places, strict=True):
                if own == number:
                    part[place] = np.asarray(leaf).reshape(-1)
            yield part
            del part

    def unpack(self, packed: Packed) -> PyTree:
        """The tree of a packed one, whose leaves lie in it."""
        parts = [np.asarray(part) for part in packed]
        leaves = [
            parts[own][place].reshape(shape)
            for (own, place), shape in zip(self._places, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def unpack_state(self, rule: Rule, state: PyTree) -> PyTree:
        """The state of the center optimizer, as it is of the tree."""
        return _map_params(rule, self.unpack, state)

    def pack_state(self, rule: Rule, state: PyTree) -> PyTree:
        """The state of the center optimizer, as it is of the packed tree."""
        return _map_params(rule, self.pack, state)


class Packed(NamedTuple):
    """All leaves of a tree, in two arrays."""

    first: Any
    second: Any


def _map_params(rule: Rule, of: Callable[[PyTree], PyTree], state: PyTree) -> PyTree:
    return optax.tree.map_params(rule.center, of, state, is_leaf=lambda _: True)


def packing_of(rule: Rule, params: PyTree) -> Packing | None:
    """The packing of ``params``, if ``rule`` moves a packed center the same way."""
    leaves, treedef = jax.tree.flatten(params)
    if len(leaves) < 2 or len({leaf.dtype for leaf in leaves}) > 1:
        return None
    abstract = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _packing_of(rule, treedef, abstract)


@functools.lru_cache(maxsize=16)
def _packing_of(rule: Rule, treedef: Any, leaves: tuple[Any, ...]) -> Packing | None:
    tree = jax.tree.unflatten(treedef, leaves)
    packing = Packing(tree)
    if (0,) in packing.shapes:
        return None
    parts = Packed(*(jax.ShapeDtypeStruct(s, leaves[0].dtype) for s in packing.shapes))
    if not elementwise.is_uniform(rule, tree, parts):
        return None
    # And the optimizer's state can be taken apart, and put together, for a checkpoint.
    try:
        state = rule.center.init(
            Packed(*(np.zeros(part.shape, part.dtype) for part in parts))
        )
        apart = packing.unpack_state(rule, state)
        expected = jax.eval_shape(rule.center.init, tree)
        together = packing.pack_state(rule, apart)
    except Exception:  # whatever an optimizer makes of trees that it does not expect
        return None
    same = _kind(apart) == _kind(expected) and _kind(together) == _kind(state)
    return packing if same else None


def _kind(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(np.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves]
