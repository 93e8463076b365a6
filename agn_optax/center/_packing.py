"""A center whose parameters are packed in two arrays.

A store packs them where the rule treats all elements alike. A program then has two
arguments for the center instead of one for every leaf, and what comes over a wire,
whose buffer has the same layout, are these arguments as it is.

Two, because the numbers must be those of the tree, bit for bit. What the leaves share,
such as Adam's bias correction, XLA computes once and apart; but where there is only one
array, it does so within the loop over it, with other instructions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax._internal import layout, tracing, trees
from agn_optax.round import contribution_like, elementwise
from agn_optax.rules import Rule, told

PyTree = Any


class Packing:
    """How the leaves of a tree lie in two arrays.

    Args:
      params: a tree of two leaves or more, all of one dtype, in the host's memory.
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

    def keep(self, params: PyTree) -> Packed:
        """A packed copy of parameters, in arrays of JAX."""
        leaves, dtype = jax.tree.leaves(params), self._dtype
        return Packed(*(_owned(self._part(n, leaves, dtype)) for n in (0, 1)))

    def holds(self, contribution: PyTree) -> bool:
        """Whether it came packed, as the center is, and not as a tree."""
        is_pair = isinstance(contribution, Packed)
        return is_pair and tuple(part.shape for part in contribution) == self.shapes

    def pack(self, tree: PyTree) -> Packed:
        """The leaves of a tree in host memory, with zeros between them."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        dtypes = {leaf.dtype for leaf in leaves}
        dtype = dtypes.pop() if len(dtypes) == 1 else self._dtype
        return Packed(*(self._part(n, leaves, dtype) for n in (0, 1)))

    def _part(self, number: int, leaves: Sequence[Any], dtype: Any) -> np.ndarray:
        """One of the two arrays, by its number."""
        part = np.zeros(self.shapes[number], dtype)
        for leaf, (own, place) in zip(leaves, self._places, strict=True):
            if own == number:
                part[place] = np.asarray(leaf).reshape(-1)
        return part

    def unpack(self, packed: Packed) -> PyTree:
        """The tree of a packed one, whose leaves lie in it."""
        parts = [np.asarray(part) for part in packed]
        leaves = [
            parts[own][place].reshape(shape)
            for (own, place), shape in zip(self._places, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def pack_state(self, rule: Rule, state: PyTree) -> PyTree:
        """The state of the center optimizer as it is of the packed center."""
        return jax.tree.map(jnp.asarray, _map_params(rule, self.pack, state))

    def unpack_state(self, rule: Rule, state: PyTree) -> PyTree:
        """The state of the center optimizer as it is of the tree."""
        return _map_params(rule, self.unpack, state)


class Packed(NamedTuple):
    """All leaves of a tree, in two arrays."""

    first: Any
    second: Any


def _map_params(rule: Rule, of: Callable[[PyTree], PyTree], state: PyTree) -> PyTree:
    return optax.tree.map_params(rule.center, of, state, is_leaf=lambda _: True)


def packing_of(rule: Rule, params: PyTree) -> Packing | None:
    """The packing of ``params``, if ``rule`` moves a packed center the same way."""
    tree = jax.eval_shape(lambda: params)
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) < 2 or len({leaf.dtype for leaf in leaves}) > 1:
        return None
    if rule.codec.answer_codec is not None:  # differences are encoded leaf by leaf
        return None
    packing = Packing(tree)
    # What workers send is packed, too: one array for each leaf, which few codecs make.
    sent: Any = jax.tree.structure(contribution_like(rule, tree))
    if (0,) in packing.shapes or sent != treedef:
        return None
    parts = Packed(*(jax.ShapeDtypeStruct(s, leaves[0].dtype) for s in packing.shapes))
    if not elementwise.is_uniform(rule, tree, parts):
        return None

    def of_state() -> bool:
        """The state can be taken apart, and put together again; zeros stay finite."""
        state = rule.center.init(
            Packed(*(np.zeros(part.shape, part.dtype) for part in parts))
        )
        apart = packing.unpack_state(rule, state)
        together = packing.pack_state(rule, apart)
        expected = jax.eval_shape(rule.center.init, tree)
        zeros = Packed(*(np.zeros(1, part.dtype) for part in parts))
        moved = rule.center.update(zeros, rule.center.init(zeros), zeros, **told({}))
        if not all(np.isfinite(np.float64(x)).all() for x in jax.tree.leaves(moved)):
            raise tracing.UnfitError("zeros, which lie between leaves, become others")
        if [*map(trees.kinds, (apart, together))] != [
            *map(trees.kinds, (expected, state))
        ]:
            raise tracing.UnfitError("a state that cannot be packed")
        return True

    what = f"a center of rule {rule.name!r} in two arrays"
    return packing if tracing.unless_unfit(what, of_state) else None


def _owned(part: np.ndarray) -> jax.Array:
    """A copy that may be donated, after which JAX has let go of ``part``."""
    copy = jnp.array(part).block_until_ready()
    let_go()
    return copy


def let_go() -> None:
    """Has JAX let go of what programs that are over have read, such as a message.

    It does so when it begins to run a program, whichever that is.
    """
    _nothing(_nowhere())


_nothing = jax.jit(lambda nowhere: nowhere)


_nowhere = functools.cache(lambda: jnp.zeros((), jnp.bool))
