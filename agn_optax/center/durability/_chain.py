"""The digests of a center's records, compared with those that its workers have seen.

Each answer of a center with a journal has a *witness*: the center id, and the number
and the digest of a record that was on disk. A worker sends its newest witness whenever
it joins. A center that has another record of that number, or none yet, has another
history: its directory is an old copy, or another center has continued from a copy.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from agn_optax import errors

_SIZE = 16  # bytes of a digest
_MAX_DIGESTS = 1 << 20  # newest digests in memory
_FORM = re.compile(r"([0-9a-f]{32}):([0-9]{1,18}):([0-9a-f]{32})")


class Witness(NamedTuple):
    """A record that a worker has seen."""

    center_id: str
    number: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.center_id}:{self.number}:{self.digest.hex()}"


def read_witness(text: str) -> Witness:
    """Return the witness in a text.

    Raises:
      InvalidArgumentError: the text is none.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise errors.InvalidArgumentError(
            "a witness must be a center id, a number and a digest, separated by "
            f"colons, got {text[:200]!r}"
        )
    return Witness(match[1], int(match[2]), bytes.fromhex(match[3]))


def newest(first: str, second: str) -> str:
    """Return the newer witness of two; that of another center is older than the second.

    An empty text is none.
    """
    if not (first and second):
        return first or second
    a, b = read_witness(first), read_witness(second)
    is_older = a.center_id == b.center_id and b.number < a.number
    return first if is_older else second


class Digests:
    """The digests of the newest records, in memory.

    Args:
      first: number of the first record.

    Attributes:
      first: number of the first record that is in memory.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._digests = bytearray()

    @property
    def end(self) -> int:
        """Number of the next record."""
        return self.first + len(self._digests) // _SIZE

    def add(self, digest: bytes) -> None:
        """Add the next record; the oldest ones may be forgotten."""
        self._digests += digest
        if len(self._digests) > _MAX_DIGESTS * _SIZE:
            forgotten = _MAX_DIGESTS // 2
            del self._digests[: forgotten * _SIZE]
            self.first += forgotten

    def find(self, number: int) -> bytes | None:
        """Return the digest of a record; None if it is not in memory."""
        if not self.first <= number < self.end:
            return None
        begin = (number - self.first) * _SIZE
        return bytes(self._digests[begin : begin + _SIZE])
