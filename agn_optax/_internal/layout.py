"""Where leaves lie in one buffer: the same in a packed center and on the wire."""

from __future__ import annotations

from collections.abc import Sequence

# Elements: leaves begin at multiples of it, where any dtype is aligned for XLA.
ALIGNMENT = 64


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where leaves of so many elements begin, and where the last one ends."""
    begins, end = [], 0
    for size in sizes:
        begins.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = begins[-1] + size
    return begins, end


def middle(begins: Sequence[int], end: int) -> int:
    """Where to cut all leaves into two parts of about one size, between two of them."""
    return min(begins[1:], key=lambda begin: abs(2 * begin - end))
