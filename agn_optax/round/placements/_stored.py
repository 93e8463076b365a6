"""The protocol of stored centers: wrapped, unless whole on the device."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

PyTree = Any


@dataclasses.dataclass(frozen=True)
class StoredCenter:
    """A center in the form in which an optimizer state stores it.

    The first field of each form has the arrays.
    """

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
    def arrays(self) -> PyTree:
        """The arrays, as a tree like the parameters; in shards, this tower's pieces."""
        return getattr(self, dataclasses.fields(self)[0].name)

    def whole(self) -> PyTree:
        """Return the center as a tree like the parameters, on the device."""
        return self.arrays

    def mark_differing(self, state: Any, pieces: Any, own: Any) -> Any:
        """Mark the parts of this center's `ExchangeState` that differ between towers.

        ``pieces(tree, axes)`` marks a tree of which the towers of ``axes`` have
        different pieces, and ``own(tree)`` one of which each worker has its own.
        """
        return state._replace(center=self.arrays)


@dataclasses.dataclass(frozen=True)
class WholeCenter(StoredCenter):
    """A whole center, which states store without a wrapper."""

    tree: PyTree

    kind: ClassVar[str] = "whole"


def as_stored(center: PyTree) -> StoredCenter:
    """Return the center of a state with the methods of its form."""
    return center if isinstance(center, StoredCenter) else WholeCenter(center)


def center_arrays(stored: PyTree) -> PyTree:
    """Return the arrays of a stored center, or of its optimizer's state."""
    return as_stored(stored).arrays
