"""The files that a process left of its center, and the check that they are complete.

    lock            the guarantee for the records, and the number that were on disk
    snapshot-N      the center after its first N records: one record
    journal-N       records N, N + 1, ...: the changes that follow

A restarted center consists of the newest snapshot and the records that follow it. A
journal may begin before that snapshot, if no new file could be created at the time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar, get_args

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._records import Record

_log = logging.getLogger("agn_optax")
_ADVICE = "Put back a copy of the whole directory, or begin with an empty one"
_WAY_OUT = (
    "Put back a copy of the whole directory; or remove its lock, and the center "
    "continues from the remaining records with a new id, so that its workers start "
    "again"
)
_LINE = 64  # size of a lock in bytes
_TRIES = 20  # attempts to read files that another process changes meanwhile
T = TypeVar("T")

# The guarantee for later records. "whole": there are none. "journal": a record is on
# disk before its exchange is answered. "interval": the operating system has the record
# before the exchange is answered, and the disk some time later. "memory": no guarantee.
# "backup": this is a copy, and the original may have had later records.
Kind = Literal["whole", "journal", "interval", "memory", "backup"]


class Promise(NamedTuple):
    """The contents of a lock."""

    kind: Kind
    kept: int  # number of records that were on disk
    boot: str  # boot id of the system that wrote the lock

    def line(self) -> bytes:
        """Return the contents of the lock file."""
        text = " ".join(map(str, self))
        return f"{text} {_checksum(text)}".ljust(_LINE - 1).encode() + b"\n"


class Found:
    """The files of a center, to which another process may be writing.

    Args:
      path: path of the directory.

    Attributes:
      path: path of the directory.
      promise: contents of the lock; None if there is no lock, or if it is empty.

    Raises:
      DurabilityError: the lock cannot be read, or is damaged.
    """

    promise: Promise | None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self._missing = ""  # description of a missing journal, or of a missing part
        self._cut = ""  # description of an incomplete write at the end
        self._end = ""  # file and byte at which the found records end
        self.read_promise()

    def read_promise(self) -> None:
        """Read the lock."""
        path = self.path / "lock"
        self.promise = None
        with explained(f"cannot read {path}"):
            raw = path.read_bytes() if path.exists() else b""
        if not raw.strip(b"\0"):  # created before a power failure, and never written
            return
        words = raw.decode("ascii", "replace").split()
        if len(words) == 4 and words[0] in get_args(Kind) and words[1].isdecimal():
            promise = Promise(words[0], int(words[1]), words[2])  # type: ignore[arg-type]
            if promise.line() == raw:
                self.promise = promise
                return
        raise errors.DurabilityError(f"{path}: it is damaged. {_WAY_OUT}")

    def newest(self) -> int | None:
        """Return the number of the newest snapshot; None if there is none."""
        return max(self.numbers("snapshot"), default=None)

    def load(self) -> Record | None:
        """Read the newest snapshot; None if the directory never had a center.

        Raises:
          DurabilityError: the snapshot cannot be read, or was removed.
        """
        newest = self.newest()
        if newest is None:
            if self.promise is not None or self.numbers("journal"):
                raise errors.DurabilityError(
                    f"{self.path} had a center, but its snapshot is missing. {_ADVICE}"
                )
            return None
        path = self.file("snapshot", newest)
        with self._reading(path) as file:
            size = os.fstat(file).st_size
            record = _records.read(file, 0, size)
            if record is None or record.number != newest:
                raise _records.DamagedError(
                    f"record {newest} is damaged: {size} bytes are not a complete "
                    "snapshot"
                )
        self._end = f"{path} at byte {record.size}"
        return record

    def load_center(self) -> Record:
        """Read the newest snapshot of a directory that must have a center.

        Raises:
          DurabilityError: there is no center, or its snapshot cannot be read.
        """
        snapshot = self.load()
        if snapshot is None:
            raise errors.DurabilityError(f"there is no center in {self.path}")
        return snapshot

    def replay_kept(self, number: int) -> Iterator[Record]:
        """Yield the records after a snapshot that the lock guarantees to be on disk.

        Another process may be writing further records.

        Raises:
          DurabilityError: a guaranteed record is missing.
        """
        kept: float = math.inf
        if self.promise is not None and self.promise.boot == this_boot():
            # Records beyond these may still be written by another process.
            kept = self.promise.kept
        if number < kept:
            for record in self.replay(number):
                number = record.number + 1
                yield record
                if number >= kept:
                    break
        self.lost(number)

    def replay(self, number: int) -> Iterator[Record]:
        """Yield the records after snapshot ``number``, in order.

        Raises:
          DurabilityError: a record is missing before one that was found.
        """
        begins = self.numbers("journal")
        earlier = [begin for begin in begins if begin <= number]
        begins = earlier[-1:] + [begin for begin in begins if begin > number]
        has_journal = self.promise and self.promise.kind in ("journal", "interval")
        if has_journal and not earlier:
            self._missing = f"{self.file('journal', number)} is missing"
        for begin in begins:
            path, position = self.file("journal", begin), 0
            is_last = begin == begins[-1]
            with self._reading(path) as file:
                if begin > number:
                    raise _records.DamagedError(f"record {number} is missing before it")
                self._end = f"{path} at byte 0"
                size = os.fstat(file).st_size
                cut_off = functools.partial(self._cut_off, path, is_last)
                for record in _records.read_all(file, begin, cut_off):
                    if record.file_size > size:
                        self._missing = f"{path} was truncated"
                    position += record.size
                    self._end = f"{path} at byte {position}"
                    if record.number == number:
                        number += 1
                        yield record

    def lost(self, number: int) -> str:
        """Return why updates may be lost, so that the center gets a new id; else "".

        Args:
          number: number of records that were found, including those of the snapshot.

        Raises:
          DurabilityError: more records were on disk than were found.
        """
        if self.promise is None:
            return (
                f"{self.path / 'lock'} is missing, which holds the number of records "
                "that were on disk"
            )
        kind, kept, boot = self.promise
        if kind == "interval" and boot != this_boot():
            return (
                "the machine has restarted, and the last records may not have been on "
                "disk"
            )
        if number < kept:
            raise errors.DurabilityError(
                f"{self._end}: record {number} is damaged or missing, but records "
                f"up to {kept - 1} were on disk. {_WAY_OUT}"
            )
        if self._missing:
            raise errors.DurabilityError(
                f"{self._missing}: it may have had record {number} and later ones. "
                f"{_WAY_OUT}"
            )
        if self._cut:  # the exchange of this record was never answered
            _log.warning("%s, which are ignored", self._cut)
        if kind == "memory":
            return "it was not closed, and its last changes were in memory only"
        if kind == "backup":
            return "it is a backup, and the original may have had later records"
        return ""

    def file(self, kind: str, number: int) -> pathlib.Path:
        """Return the path of a snapshot or a journal."""
        return self.path / f"{kind}-{number:012}"

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of all snapshots or journals, sorted."""
        with explained(f"cannot read {self.path}"):
            names = [each.name for each in self.path.iterdir()]
        found = (re.fullmatch(rf"{kind}-(\d+)", name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def _cut_off(self, path: pathlib.Path, is_last: bool, size: int) -> None:
        """Record that a journal ends with an incomplete record."""
        if not is_last:  # a journal is on disk before the next one is begun
            raise _records.DamagedError("its end is damaged")
        self._cut = f"{path} ends with {size} bytes of an incomplete write"

    @contextlib.contextmanager
    def _reading(self, path: pathlib.Path) -> Iterator[int]:
        try:
            with explained(f"cannot read {path}"), opening(path, os.O_RDONLY) as file:
                yield file
        except _records.DamagedError as error:
            raise errors.DurabilityError(f"{path}: {error}. {_ADVICE}") from None


def settled(directory: str | os.PathLike[str], read: Callable[[], T]) -> T:
    """Call ``read`` again while another process changes the directory's files."""
    for tries in itertools.count(1):
        before = _state(directory)
        try:
            return read()
        except errors.DurabilityError:
            # Another process may have replaced the files meanwhile.
            if tries == _TRIES or _state(directory) == before:
                raise
    raise AssertionError


def _state(directory: str | os.PathLike[str]) -> object:
    """Return a value that changes whenever the files do."""
    try:
        found = Found(directory)
        return found.newest(), found.promise
    except errors.DurabilityError as error:  # the lock is being written
        return str(error)


@functools.cache
def this_boot() -> str:
    """Return the id of this boot of the machine; unique to the process if unknown."""
    try:
        text = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return f"process-{os.getpid()}"
    return text.replace("-", "")[:16]


@contextlib.contextmanager
def opening(path: pathlib.Path, flags: int) -> Iterator[int]:
    """Open a file for the duration of the context."""
    file = os.open(path, flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise errors of the operating system as `DurabilityError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.DurabilityError):
            raise
        raise errors.DurabilityError(f"{what}: {error}") from error


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
