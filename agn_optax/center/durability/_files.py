"""The files of a center on disk, and the check that they are complete.

    lock            the guarantee for the records, and how many were on disk
    snapshot-N      the center after its first N records: one record
    journal-N       records N, N + 1, ...: the changes that follow

A restarted center consists of the newest snapshot and the records that follow it. The
journal may begin before the newest snapshot, if no journal could be created when the
snapshot was written.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._records import Record

_log = logging.getLogger("agn_optax")
_RESTORE_BACKUP = "Put back a copy of the whole directory, or begin with an empty one"
_RESTORE_OR_REMOVE_LOCK = (
    "Put back a copy of the whole directory; or remove its lock, and the center "
    "continues from the remaining records with a new id, so that its workers start "
    "again"
)
_LOCK_SIZE = 64  # bytes

# The guarantee for records beyond the number in the lock. "closed": there are none.
# "journal": a record is on disk before its exchange is answered. "interval": the
# operating system has the record before its exchange is answered, and the disk has it
# some time later.
Kind = Literal["closed", "journal", "interval"]


class Lock(NamedTuple):
    """The contents of a lock file."""

    kind: Kind
    num_records: int  # number of records that were on disk
    boot_id: str  # boot id of the system that wrote the lock

    def to_bytes(self) -> bytes:
        """Return the contents of the file."""
        text = " ".join(map(str, self))
        return f"{text} {_checksum(text)}".ljust(_LOCK_SIZE - 1).encode() + b"\n"


class CenterFiles:
    """The files of a center, which `Directory` also locks and writes.

    Args:
      path: path of the directory.

    Attributes:
      path: path of the directory.
      lock: contents of the lock; None if there is no lock, or if it is empty.

    Raises:
      DurabilityError: the lock cannot be read, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.lock = _read_lock(self.path / "lock")

    def load(self) -> Record | None:
        """Read the newest snapshot; None if the directory never had a center.

        Raises:
          DurabilityError: the snapshot cannot be read, or was removed.
        """
        newest = max(self.numbers("snapshot"), default=None)
        if newest is None:
            if self.lock is not None or self.numbers("journal"):
                raise errors.DurabilityError(
                    f"{self.path} had a center, but its snapshot is missing. "
                    f"{_RESTORE_BACKUP}"
                )
            return None
        with _reading(self.file("snapshot", newest)) as file:
            size = os.fstat(file).st_size
            record = _records.read(file, 0, size)
            if record is None or record.number != newest:
                raise _records.DamagedError(
                    f"record {newest} is damaged: the file has {size} bytes, which are "
                    "not a complete snapshot"
                )
        return record

    def file(self, kind: str, number: int) -> pathlib.Path:
        """Return the path of a snapshot or a journal."""
        return self.path / f"{kind}-{number:012}"

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of all snapshots or journals, sorted."""
        with disk_errors(f"cannot read {self.path}"):
            names = [path.name for path in self.path.iterdir()]
        matches = (re.fullmatch(rf"{kind}-(\d+)", name) for name in names)
        return sorted(int(match[1]) for match in matches if match)


class Replay:
    """The records after a snapshot, in order, to be iterated over once.

    The iteration ends with the check that no record is missing.

    Args:
      files: the files of the center.
      snapshot: the snapshot.

    Attributes:
      new_id_reason: reason why updates may be lost, so that the center gets a new id;
        "" without one. Known once the iteration has ended.

    Raises:
      DurabilityError: a record is missing that was on disk.
    """

    new_id_reason: str

    def __init__(self, files: CenterFiles, snapshot: Record) -> None:
        self._files = files
        self._number = snapshot.number  # of the next record
        # File and byte at which the records end.
        self._end = f"{files.file('snapshot', self._number)} at byte {snapshot.size}"
        self._missing = ""  # description of a missing journal, or of a missing part
        self._incomplete = ""  # description of an incomplete write at the end

    def __iter__(self) -> Iterator[Record]:
        yield from self._read_journals()
        self.new_id_reason = self._check_complete()

    def _read_journals(self) -> Iterator[Record]:
        files, lock = self._files, self._files.lock
        starts = files.numbers("journal")
        earlier = [start for start in starts if start <= self._number]
        starts = earlier[-1:] + [start for start in starts if start > self._number]
        if lock is not None and lock.kind != "closed" and not earlier:
            self._missing = f"{files.file('journal', self._number)} is missing"
        for start in starts:
            path, position = files.file("journal", start), 0
            is_last = start == starts[-1]
            with _reading(path) as file:
                if start > self._number:
                    raise _records.DamagedError(
                        f"record {self._number} is missing before it"
                    )
                self._end = f"{path} at byte 0"
                size = os.fstat(file).st_size
                cut_off = functools.partial(self._cut_off, path, is_last)
                for record in _records.read_all(file, start, cut_off):
                    if record.file_size > size:
                        self._missing = f"{path} was truncated"
                    position += record.size
                    self._end = f"{path} at byte {position}"
                    if record.number == self._number:
                        self._number += 1
                        yield record

    def _cut_off(self, path: pathlib.Path, is_last: bool, size: int) -> None:
        """Record that a journal ends with an incomplete record."""
        if not is_last:  # a journal is on disk before the next one is begun
            raise _records.DamagedError("its end is damaged")
        self._incomplete = f"{path} ends with {size} bytes of an incomplete write"

    def _check_complete(self) -> str:
        """Return the reason for a new id; raise if records are missing."""
        files, number = self._files, self._number
        if files.lock is None:
            return (
                f"{files.path / 'lock'} is missing, so the number of records that were "
                "on disk is unknown"
            )
        kind, num_records, boot = files.lock
        if kind == "interval" and boot != boot_id():
            return (
                "the machine has restarted, and the last records may not have been on "
                "disk"
            )
        if number < num_records:
            raise errors.DurabilityError(
                f"{self._end}: record {number} is damaged or missing, but records "
                f"up to {num_records - 1} were on disk. {_RESTORE_OR_REMOVE_LOCK}"
            )
        if self._missing:
            raise errors.DurabilityError(
                f"{self._missing}: it may have had record {number} and later ones. "
                f"{_RESTORE_OR_REMOVE_LOCK}"
            )
        if self._incomplete:  # harmless: its exchange was never answered
            _log.warning("%s: these bytes are ignored", self._incomplete)
        return ""


def _read_lock(path: pathlib.Path) -> Lock | None:
    with disk_errors(f"cannot read {path}"):
        raw = path.read_bytes() if path.exists() else b""
    # The file was created, but its contents were lost in a power failure.
    if not raw.strip(b"\0"):
        return None
    words = raw.decode("ascii", "replace").split()
    if len(words) == 4 and words[0] in get_args(Kind) and words[1].isdecimal():
        lock = Lock(words[0], int(words[1]), words[2])  # type: ignore[arg-type]
        if lock.to_bytes() == raw:
            return lock
    raise errors.DurabilityError(f"{path} is damaged. {_RESTORE_OR_REMOVE_LOCK}")


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[int]:
    """Open a file for reading; name it in errors."""
    try:
        with (
            disk_errors(f"cannot read {path}"),
            open_file(path, os.O_RDONLY) as file,
        ):
            yield file
    except _records.DamagedError as error:
        raise errors.DurabilityError(f"{path}: {error}. {_RESTORE_BACKUP}") from None


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of the machine; if unknown, one for this process."""
    try:
        text = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return f"process-{os.getpid()}"
    return text.replace("-", "")[:16]


@contextlib.contextmanager
def open_file(path: pathlib.Path, flags: int) -> Iterator[int]:
    """Open a file for the duration of the context."""
    file = os.open(path, flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise errors of the operating system as `DurabilityError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.DurabilityError):
            raise
        raise errors.DurabilityError(f"{what}: {error}") from error


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
