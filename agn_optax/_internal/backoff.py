"""Pauses between attempts; for how long to go on is the caller's decision."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Pauses between the attempts of a call that may succeed later.

    Args:
      first: first pause in seconds.
      factor: factor from each pause to the next one.
      longest: longest pause in seconds; None repeats the first one.
    """

    first: float
    factor: float = 2.0
    longest: float | None = None

    def pauses(self) -> Iterator[float]:
        """Yield the pauses in seconds, without end."""
        longest = self.first if self.longest is None else self.longest
        pause = min(self.first, longest)
        while pause < longest:
            yield pause
            pause = min(pause * self.factor, longest)
        yield from itertools.repeat(longest)
