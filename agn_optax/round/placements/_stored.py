"""Centers as optimizer states store them: wrapped, unless whole on the device."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from agn_optax.round import _collectives

PyTree = Any


class StoredCenter(abc.ABC):
    """A center in the form in which an optimizer state stores it."""

    kind: ClassVar[str]  # such as "in shards", for errors
    leading: ClassVar[tuple[int, ...]] = ()  # dimensions before each leaf's own

    @property
    def place(self) -> str:
        """Description of the place of the center, as `Layout.place`."""
        return f"{self.kind}, on the device"

    @property
    def unwrapped(self) -> StoredCenter:
        """The same center without its host wrapper; arrays stay in their memory."""
        return self

    @property
    @abc.abstractmethod
    def arrays(self) -> PyTree:
        """The arrays, as a tree like the parameters; in shards, this tower's pieces."""

    @property
    def leaf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the whole leaves."""
        return tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(self.arrays))

    def whole(self) -> PyTree:
        """Return the center as a tree like the parameters, on the device."""
        return self.arrays

    @abc.abstractmethod
    def mark_differing(
        self,
        state: Any,
        pieces: Callable[[PyTree, _collectives.Axes], PyTree],
        own: Callable[[PyTree], PyTree],
    ) -> Any:
        """Mark the parts of this center's `ExchangeState` that differ between towers.

        ``pieces(tree, axes)`` marks a tree of which the towers of ``axes`` have
        different pieces, and ``own(tree)`` one of which each worker has its own.
        """


@dataclasses.dataclass(frozen=True)
class WholeCenter(StoredCenter):
    """A whole center, which states store without a wrapper."""

    tree: PyTree

    kind: ClassVar[str] = "whole"

    @property
    def arrays(self) -> PyTree:
        return self.tree

    def mark_differing(self, state: Any, pieces: Any, own: Any) -> Any:
        return state._replace(center=self.tree)


def as_stored(center: PyTree) -> StoredCenter:
    """Return the center of a state with the methods of its form."""
    return center if isinstance(center, StoredCenter) else WholeCenter(center)


def center_arrays(stored: PyTree) -> PyTree:
    """Return the arrays of a stored center, or of its optimizer's state."""
    return as_stored(stored).arrays
