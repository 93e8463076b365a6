"""Offsets of leaves in one flat buffer, the same in a packed center and on the wire."""

from __future__ import annotations

from collections.abc import Sequence

# In elements: each leaf begins at a multiple of it, which aligns any dtype for XLA.
ALIGNMENT = 64


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each leaf begins and where the last one ends, in elements.

    Args:
      sizes: the number of elements of each leaf.
    """
    begins, end = [], 0
    for size in sizes:
        begins.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = begins[-1] + size
    return begins, end


def middle(begins: Sequence[int], end: int) -> int:
    """Return the leaf boundary that splits the buffer most evenly, in elements."""
    return min(begins[1:], key=lambda begin: abs(2 * begin - end))
