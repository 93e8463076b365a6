"""The records and snapshots of a center on disk, for readers without its lock."""

from __future__ import annotations

import bisect
import os
import pathlib
from collections.abc import Iterator

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._directory import Files, Segment
from agn_optax.center.durability._files import RESTORE_BACKUP, read_lock, reading
from agn_optax.center.durability._records import Record


class History:
    """The records and snapshots in a directory; a center may write it meanwhile.

    Args:
      path: path of the directory.

    Attributes:
      path: path of the directory.
      segments: the files of records, sorted.
      snapshots: numbers of the snapshots, sorted: the center after as many records.

    Raises:
      DurabilityError: the directory has no center, or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._files = Files(path)
        self.path = self._files.path
        lock = read_lock(self.path / "lock") if self.path.is_dir() else None
        # Read first: records that are written from now on need not be found.
        self._num_records = 0 if lock is None else lock.num_records
        self.segments: list[Segment] = []
        self.snapshots: list[int] = []
        if self.path.is_dir():
            self.segments = self._files.segments()
            self.snapshots = self._files.numbers("snapshot")
        if not self.segments and not self.snapshots:
            raise errors.DurabilityError(
                f"{self.path} has no tape: a center with durability=Journal(...), or "
                "agn-optax serve --journal, writes one"
            )
        if not self.snapshots:
            raise errors.DurabilityError(
                f"{self.path} has records, but no snapshot. {RESTORE_BACKUP}"
            )
        self._places: dict[int, tuple[Segment, int]] = {}  # by number; see `record`

    def records(self, begin: int = 0, *, with_arrays: bool = True) -> Iterator[Record]:
        """Yield the records from a number on, checked against the chain.

        Args:
          begin: number of the first record.
          with_arrays: whether contributions are read and checked, where they are kept.

        Raises:
          DurabilityError: a record is damaged or missing.
        """
        starts = [segment.number for segment in self.segments]
        first = max(bisect.bisect_right(starts, begin) - 1, 0)
        number = min(starts[first], begin) if starts else begin
        parent = None
        for segment in self.segments[first:]:
            with reading(segment.path):  # which names the file in errors
                if segment.number > number:
                    raise _records.DamagedError(f"record {number} is missing before it")
            position, is_first = 0, True
            for record in self._files.read_segment(segment, with_arrays=with_arrays):
                self._places[record.number] = segment, position
                position += record.size
                if record.number < number:  # also in the segment before
                    continue
                if is_first:  # `read_segment` checks the others
                    with reading(segment.path):
                        _records.check_parent(record, parent)
                is_first = False
                number, parent = record.number + 1, record.digest
                if record.number >= begin:
                    yield record
        if number < self._num_records:
            newest = self.segments[-1].path if self.segments else self.path
            raise errors.DurabilityError(
                f"{newest}: record {number} is damaged or missing, but records up to "
                f"{self._num_records - 1} were on disk. {RESTORE_BACKUP}"
            )

    def record(self, number: int) -> Record:
        """Return a record that `records` has yielded, with its arrays."""
        segment, position = self._places[number]
        with reading(segment.path) as file:
            found = _records.read(
                file,
                position,
                os.fstat(file).st_size,
                is_chain=not segment.is_kept,
            )
            if found is None or found.number != number:
                raise _records.DamagedError(f"record {number} is damaged")
        return found

    def is_kept(self, number: int) -> bool:
        """Return whether the contributions of a record that was yielded are kept."""
        return self._places[number][0].is_kept

    def snapshot_file(self, number: int) -> pathlib.Path:
        """Return the path of a snapshot."""
        return pathlib.Path(self._files.file("snapshot", number))

    def snapshot(self, number: int, *, with_arrays: bool = True) -> Record:
        """Return a snapshot, perhaps without its arrays.

        Raises:
          DurabilityError: the snapshot cannot be read.
        """
        return self._files.read_snapshot(number, with_arrays=with_arrays)
