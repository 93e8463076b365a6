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

# The guarantee for records beyond the number in the lock. "new": there are none, and
# perhaps no snapshot yet. "closed": there are none. "journal": a record is on disk
# before its exchange is answered.
Kind = Literal["new", "closed", "journal"]


class Lock(NamedTuple):
    """The contents of a lock file."""

    kind: Kind
    num_records: int  # number of records that were on disk

    def to_bytes(self) -> bytes:
        """Return the contents of the file."""
        text = " ".join(map(str, self))
        checksum = f"{zlib.crc32(text.encode()):08x}"
        return f"{text} {checksum}".ljust(_LOCK_SIZE - 1).encode() + b"\n"


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

    @property
    def new_id_reason(self) -> str:
        """The reason why updates may be lost, so that the center gets a new id."""
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
        newest = max(self.numbers("snapshot"), default=None)
        if newest is None:
            is_new = self.lock is None or self.lock.kind == "new"
            if not is_new or self.numbers("journal"):
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


def replay(files: CenterFiles, snapshot: Record) -> Iterator[Record]:
    """Yield the records after a snapshot, and check at the end that none is missing.

    Raises:
      DurabilityError: a record is missing that was on disk.
    """
    number, lock = snapshot.number, files.lock  # number of the next record
    end = f"{files.file('snapshot', number)} at byte {snapshot.size}"
    missing = ""  # description of a missing journal, or of a missing part
    starts = files.numbers("journal")
    earlier = [start for start in starts if start <= number]
    starts = earlier[-1:] + [start for start in starts if start > number]
    if lock is not None and lock.kind == "journal" and not earlier:
        missing = f"{files.file('journal', number)} is missing"
    cut_off: list[int] = []  # bytes of an incomplete write at the end of a journal
    for start in starts:
        path, position = files.file("journal", start), 0
        with _reading(path) as file:
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
                    number += 1
                    yield record
            # A journal is on disk before the next one is begun.
            if cut_off and start != starts[-1]:
                raise _records.DamagedError("its end is damaged")
    if lock is None:  # see `CenterFiles.new_id_reason`
        return
    if number < lock.num_records:
        raise errors.DurabilityError(
            f"{end}: record {number} is damaged or missing, but records up to "
            f"{lock.num_records - 1} were on disk. {_RESTORE_OR_REMOVE_LOCK}"
        )
    if missing:
        raise errors.DurabilityError(
            f"{missing}: it may have had record {number} and later ones. "
            f"{_RESTORE_OR_REMOVE_LOCK}"
        )
    if cut_off:  # harmless: its exchange was never answered
        _log.warning(
            "%s ends with %d bytes of an incomplete write: these bytes are ignored",
            path,
            *cut_off,
        )


def _read_lock(path: pathlib.Path) -> Lock | None:
    with disk_errors(f"cannot read {path}"):
        raw = path.read_bytes() if path.exists() else b""
    # The file was created, but its contents were lost in a power failure.
    if not raw.strip(b"\0"):
        return None
    words = raw.decode("ascii", "replace").split()
    if len(words) == 3 and words[0] in get_args(Kind) and words[1].isdecimal():
        lock = Lock(words[0], int(words[1]))  # type: ignore[arg-type]
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
