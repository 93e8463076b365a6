"""An exchange belongs to the life in which it began."""

from __future__ import annotations

import collections

from agn_optax import errors


class Departures:
    """How often workers have left, so that none comes back by what it left behind.

    An exchange may wait for the device before the center hears of it. Whoever leaves
    meanwhile, from another thread, must not be a member again by that.
    """

    def __init__(self) -> None:
        self._numbers: collections.Counter[str] = collections.Counter()

    def add(self, worker: str) -> None:
        """A worker leaves."""
        self._numbers[worker] += 1

    def number(self, worker: str) -> int:
        """Of a worker's departures: to be asked when an exchange begins."""
        return self._numbers[worker]

    def check(self, worker: str, number: int) -> None:
        """It has not left since.

        Raises:
          WorkerStateError: it has.
        """
        if self._numbers[worker] != number:
            raise errors.WorkerStateError(
                f"worker {worker!r} has left while its message was made, and so that "
                "is not sent; start() again"
            )
