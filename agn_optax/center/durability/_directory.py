"""The directory of a durability: its files, and the check that they are complete.

    lock            how many records were on disk, and what holds for later ones
    snapshot-N      the center after its first N records: one record
    journal-N       records N, N + 1, ...: the changes that follow
    chain-N         the same records without their arrays, in place of a journal

The process that keeps its center in the directory holds the lock. A restarted center
consists of the newest snapshot and the records that follow it. The journal may begin
before the newest snapshot, if no journal could be created when the snapshot was
written. `Files` reads a directory without the lock.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._files import (
    RESTORE_BACKUP,
    RESTORE_OR_REMOVE_LOCK,
    Kind,
    Lock,
    disk_errors,
    open_file,
    read_lock,
    reading,
)
from agn_optax.center.durability._records import Record, Written

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger("agn_optax")

_NAME = re.compile(r"(snapshot|journal|chain)-(\d+)")

# Bytes to reserve for a journal at a time: its current size, within these limits.
_MIN_RESERVED, _MAX_RESERVED = 64 << 10, 64 << 20
_COPIED = 1024  # records of a journal that are copied to a chain at a time


class Segment(NamedTuple):
    """A file of consecutive records."""

    number: int  # of its first record
    kind: Literal["journal", "chain"]
    path: str

    @property
    def is_kept(self) -> bool:
        """True if the file has the contributions, and False if they were dropped."""
        return self.kind == "journal"


class Files:
    """The files of one center, to be read.

    Args:
      path: path of the directory.

    Attributes:
      path: path of the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def file(self, kind: str, number: int) -> str:
        """Return the path of a snapshot or a segment; a text is made quickly."""
        return f"{self.path}{os.sep}{kind}-{number:012}"

    def all_numbers(self) -> dict[str, list[int]]:
        """Return the numbers of all files by their kind, sorted."""
        with disk_errors(f"cannot read {self.path}"):
            names = os.listdir(self.path)  # noqa: PTH208 quick
        found: dict[str, list[int]] = {"snapshot": [], "journal": [], "chain": []}
        for match in filter(None, map(_NAME.fullmatch, names)):
            found[match[1]].append(int(match[2]))
        return {kind: sorted(numbers) for kind, numbers in found.items()}

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of all files of a kind, sorted."""
        return self.all_numbers()[kind]

    def segments(self) -> list[Segment]:
        """Return the files of records, sorted; a journal comes instead of its copy."""
        return self._segments(self.all_numbers())

    def _segments(self, numbers: dict[str, list[int]]) -> list[Segment]:
        found: dict[int, Segment] = {}
        kinds: tuple[Literal["chain", "journal"], ...] = ("chain", "journal")
        for kind in kinds:
            for number in numbers[kind]:
                found[number] = Segment(number, kind, self.file(kind, number))
        return [found[number] for number in sorted(found)]

    def read_segment(
        self,
        segment: Segment,
        *,
        with_arrays: bool = True,
        cut_off: Callable[[int], None] = lambda _: None,
    ) -> Iterator[Record]:
        """Yield the records of a segment.

        Args:
          segment: the segment.
          with_arrays: whether the arrays of a journal are read and checked.
          cut_off: see `read_all` of `_records`; a chain is never cut off.

        Raises:
          DurabilityError: the file is damaged, or another release wrote it.
        """

        def reject(size: int) -> None:
            raise _records.DamagedError(f"its last {size} bytes are damaged")

        with reading(segment.path) as file:
            yield from _records.read_all(
                file,
                segment.number,
                cut_off if segment.is_kept else reject,
                is_chain=not segment.is_kept,
                with_arrays=with_arrays,
            )

    def find_digest(self, number: int) -> bytes | None:
        """Return the digest of a record as its head says it; None if it is not kept."""
        segments = [s for s in self.segments() if s.number <= number]
        for kind in ("journal", "chain") if segments else ():
            # Another thread may just replace the journal by a chain.
            path = self.file(kind, segments[-1].number)
            with (
                contextlib.suppress(FileNotFoundError),
                open_file(path, os.O_RDONLY) as file,
            ):
                for head in _records.heads(file, is_chain=kind == "chain"):
                    if head.number == number:
                        return head.digest
        return None

    def read_snapshot(self, number: int, *, with_arrays: bool = True) -> Record:
        """Read a snapshot.

        Args:
          number: number of the snapshot.
          with_arrays: whether its arrays are read and checked.

        Raises:
          DurabilityError: the snapshot cannot be read.
        """
        with reading(self.file("snapshot", number)) as file:
            size = os.fstat(file).st_size
            record = _records.read(file, 0, size, with_arrays=with_arrays)
            if record is None or record.number != number or record.size != size:
                raise _records.DamagedError(
                    f"record {number} is damaged: the file has {size} bytes, which are "
                    "not a complete snapshot"
                )
        return record


class Directory(Files):
    """The files of one center, locked and written by this process.

    Args:
      path: path of the directory, which is created if necessary.

    Attributes:
      lock: contents of the lock; None if there was no lock, or if it was empty.

    Raises:
      DurabilityError: another process holds the lock, or the directory cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        path = self.path
        # Position of an incomplete write in the newest journal; None if there is none.
        self._cut_off_at: int | None = None
        if sys.platform == "win32":
            raise errors.DurabilityError("a center on disk needs a POSIX system")
        with contextlib.ExitStack() as opened:
            with disk_errors(f"cannot keep a center in {path}"):
                _make_synced(path)
                self._folder = opened.enter_context(open_file(path, os.O_RDONLY))
                lock = open_file(path / "lock", os.O_RDWR | os.O_CREAT)
                self._lock_file = opened.enter_context(lock)
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise errors.DurabilityError(
                    f"another process keeps its center in {path}; give each "
                    "center a directory of its own"
                ) from None
            self.lock = read_lock(path / "lock")
            with disk_errors(f"cannot keep a center in {path}"):
                self.check_paths()  # the directory may have been replaced meanwhile
                for name in os.listdir(path):  # noqa: PTH208 quick
                    if name.endswith(".tmp"):  # left by a process that was killed
                        (path / name).unlink()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Release the lock."""
        self._opened.close()

    @property
    def new_id_reason(self) -> str:
        """The reason why updates may be lost, and the id is new; "" if none are."""
        if self.lock is not None:
            return ""
        return (
            f"{self.path / 'lock'} is missing or empty, so the number of records that "
            "were on disk is unknown"
        )

    def load(self) -> Record | None:
        """Read the newest snapshot; None if the directory never had a center.

        Raises:
          DurabilityError: the snapshot cannot be read, or was removed.
        """
        numbers = self.all_numbers()
        if not numbers["snapshot"]:
            is_new = self.lock is None or self.lock.kind == "new"
            if not is_new or numbers["journal"]:
                raise errors.DurabilityError(
                    f"{self.path} had a center, but its snapshot is missing. "
                    f"{RESTORE_BACKUP}"
                )
            return None
        return self.read_snapshot(numbers["snapshot"][-1])

    def replay(self, snapshot: Record) -> Iterator[Record]:
        """Yield the records after a snapshot; check at the end that none is missing.

        Raises:
          DurabilityError: a record is missing that was on disk.
        """
        number, lock = snapshot.number, self.lock  # number of the next record
        parent = snapshot.parent  # digest of the record before it
        end = f"{self.file('snapshot', number)} at byte {snapshot.size}"
        missing = ""  # description of a missing journal, or of a missing part
        starts = self.numbers("journal")
        earlier = [start for start in starts if start <= number]
        if lock is not None and lock == ("closed", number):
            earlier = []  # all records of earlier journals are in the snapshot
        starts = earlier[-1:] + [start for start in starts if start > number]
        if lock is not None and lock.kind == "journal" and not earlier:
            missing = f"{self.file('journal', number)} is missing"
        cut_off: list[int] = []  # bytes of an incomplete write at the end of a journal
        for start in starts:
            path, position = self.file("journal", start), 0
            with reading(path) as file:
                if start > number:
                    raise _records.DamagedError(f"record {number} is missing before it")
                end = f"{path} at byte 0"
                size = os.fstat(file).st_size
                for record in _records.read_all(file, start, cut_off.append):
                    if record.file_size > size:
                        missing = f"{path} was truncated"
                    position += record.size
                    end = f"{path} at byte {position}"
                    if record.number == number:
                        _records.check_parent(record, parent)
                        number, parent = number + 1, record.digest
                        yield record
                if cut_off:
                    self._cut_off_at = position
                # A journal is on disk before the next one is begun.
                if cut_off and start != starts[-1]:
                    raise _records.DamagedError("its end is damaged")
        if lock is None:  # see `new_id_reason`
            return
        if number < lock.num_records:
            raise errors.DurabilityError(
                f"{end}: record {number} is damaged or missing, but records up to "
                f"{lock.num_records - 1} were on disk. {RESTORE_OR_REMOVE_LOCK}"
            )
        if missing:
            raise errors.DurabilityError(
                f"{missing}: it may have had record {number} and later ones. "
                f"{RESTORE_OR_REMOVE_LOCK}"
            )
        if cut_off:  # harmless: its exchange was never answered
            _log.warning(
                "%s ends with %d bytes of an incomplete write: these bytes are ignored",
                path,
                *cut_off,
            )

    def check_paths(self, journal: int | None = None, begin: int = 0) -> None:
        """Check that open files are still found at their paths.

        A process can still write a file that it has open after the file was moved or
        removed.

        Args:
          journal: file descriptor of the journal; None checks only the lock.
          begin: number of the journal's first record.

        Raises:
          OSError: a file was moved, removed or replaced.
        """
        _check_path(self._lock_file, f"{self.path}{os.sep}lock")
        if journal is not None:
            _check_path(journal, self.file("journal", begin))

    def write_lock(self, kind: Kind, number: int) -> None:
        """Write what holds for newer records to the lock, and sync it to disk.

        Args:
          kind: kind of the guarantee.
          number: number of records that are on disk.

        Raises:
          OSError: the lock could not be written.
        """
        self.lock = Lock(kind, number)
        self.write_num_records(number)
        os.fsync(self._lock_file)

    def write_num_records(self, number: int) -> None:
        """Write the number of records on disk to the lock.

        The lock is not synced, which would take as long as syncing the records. If the
        process is killed, the number is preserved. After a power failure it may be some
        seconds old.
        """
        assert self.lock is not None
        self.lock = self.lock._replace(num_records=number)
        os.pwrite(self._lock_file, self.lock.to_bytes(), 0)

    def save(
        self,
        number: int,
        about: dict[str, Any],
        arrays: Sequence[np.ndarray],
        parent: bytes,
    ) -> Written:
        """Write a snapshot atomically; return once it is on disk.

        Raises:
          OSError: the snapshot could not be written.
        """
        self.check_paths()
        written = _records.encode(number, about, [arrays], parent)
        with self._new_file(self.file("snapshot", number)) as file:
            _records.write(file, written.pieces, 0)
        return written

    @contextlib.contextmanager
    def _new_file(self, path: str) -> Iterator[int]:
        """Write a file atomically; it is on disk at the end of the context."""
        temporary = pathlib.Path(path + ".tmp")
        try:
            with open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                yield file
                os.fsync(file)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        os.fsync(self._folder)

    def begin_journal(self, number: int) -> tuple[int, int]:
        """Create a journal on disk; return its file descriptor and its reserved size.

        Raises:
          OSError: the journal could not be created.
        """
        self.check_paths()
        path = pathlib.Path(self.file("journal", number))
        is_new = not path.exists()  # else an earlier process has written no record
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            size = reserve(file, 0, 0)
            os.fsync(file)
            os.fsync(self._folder)
        except BaseException:
            os.close(file)
            if is_new:
                path.unlink(missing_ok=True)
            raise
        return file, size

    def sync_newest(self) -> None:
        """Sync the newest journal, which a process that was killed may not have synced.

        The head of a record that was written in part is removed: without its arrays,
        the record would be read as a complete one.

        Raises:
          OSError: the journal could not be synced.
        """
        for number in self.numbers("journal")[-1:]:
            with open_file(self.file("journal", number), os.O_RDWR) as file:
                if self._cut_off_at is not None:
                    os.pwrite(file, bytes(64), self._cut_off_at)
                os.fsync(file)

    def remove_old(self, journals: int) -> None:
        """Remove journals that begin before a record, and older snapshots."""
        numbers = self.all_numbers()
        for number in numbers["journal"]:
            if number < journals:
                _remove(self.file("journal", number))
        self._remove_snapshots(numbers["snapshot"][:-1])

    def trim(self, journal: int, size: int) -> None:
        """Free the reserved space of a journal that gets no more records."""
        path = self.file("journal", journal)
        with contextlib.suppress(FileNotFoundError), open_file(path, os.O_RDWR) as file:
            os.ftruncate(file, size)

    def drop_contributions(self, journals: int, limit: int) -> None:
        """Drop the contributions of the oldest journals until the rest fits.

        Snapshots of these journals are removed, but for the newest one.

        Args:
          journals: number of a record; only journals that begin before it are complete.
          limit: bytes that journals and snapshots may have.

        Raises:
          DurabilityError: a journal is damaged.
          OSError: a file could not be written.
        """
        self.check_paths()
        numbers = self.all_numbers()
        kept = [each for each in self._segments(numbers) if each.is_kept]
        snapshots = numbers["snapshot"]
        while True:
            first = kept[0].number if kept else journals
            old = [number for number in snapshots[:-1] if number < first]
            self._remove_snapshots(old)
            snapshots = snapshots[len(old) :]
            if first >= journals or self._size(kept, snapshots) <= limit:
                return
            self._drop_arrays(kept.pop(0))

    def _remove_snapshots(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            _remove(self.file("snapshot", number))

    def _size(self, journals: Sequence[Segment], snapshots: Sequence[int]) -> int:
        """Return the size of journals and snapshots, in bytes."""
        paths = [each.path for each in journals]
        paths += [self.file("snapshot", number) for number in snapshots]
        return sum(os.stat(path).st_size for path in paths)  # noqa: PTH116 quick

    def _drop_arrays(self, journal: Segment) -> None:
        """Replace a journal by a chain, which has its records without arrays."""
        records = self.read_segment(journal, with_arrays=False)
        position = 0
        with self._new_file(self.file("chain", journal.number)) as file:
            while some := list(itertools.islice(records, _COPIED)):
                pieces = [memoryview(record.head_and_about) for record in some]
                _records.write(file, pieces, position)
                position += sum(map(len, pieces))
        _remove(journal.path)


def reserve(file: int, size: int, needed: int) -> int:
    """Extend a file to more than ``needed`` bytes; return its new size.

    Small files grow in small steps, and large files seldom. Writing to reserved space
    is faster, and the reserved size reveals a file that was truncated.
    """
    more = max(_MIN_RESERVED, min(size, _MAX_RESERVED), needed - size)
    try:
        os.posix_fallocate(file, size, more)
    except (AttributeError, OSError):  # not supported by the system or the file system
        os.ftruncate(file, size + more)
    return size + more


def _make_synced(path: pathlib.Path) -> None:
    """Create a directory and its parents so that they survive a power failure."""
    if not path.is_dir():
        _make_synced(path.parent)
        path.mkdir(exist_ok=True)
    # A process that was killed may have made the directory without syncing it.
    with (
        contextlib.suppress(PermissionError),
        open_file(path.parent, os.O_RDONLY) as parent,
    ):
        os.fsync(parent)


def _remove(path: str) -> None:
    pathlib.Path(path).unlink()


def _check_path(file: int, path: str) -> None:
    try:
        is_same = os.path.samestat(os.stat(path), os.fstat(file))  # noqa: PTH116 quick
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise OSError(f"{path} was removed, moved or replaced while it was in use")
