"""The files in which a center outlives its process.

    lock            held by the process that keeps its center here; what it promised
    snapshot-N      the center after its first N records: one record, written whole
    journal-N       records N, N + 1, ...: what happened next

What a center is after a restart: the newest snapshot, and the records from there on. A
journal may begin before that snapshot, where no new file could be had at the time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._records import Record

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger("agn_optax")
_RESERVED = 64 << 20  # bytes of a journal that are reserved at a time
_ADVICE = "Put back a copy of the whole directory, or begin with an empty one"

# What is promised of the records that are made: "whole" that there will be no more of
# them, "journal" that each is on disk before it is answered, and "memory" nothing.
Promise = Literal["whole", "journal", "memory"]


class Directory:
    """The files of one center, which this process alone may touch.

    Args:
      path: of the directory, which is made if need be.

    Raises:
      DurabilityError: another process has it, or it cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        if sys.platform == "win32":
            raise errors.DurabilityError("a center on disk needs a POSIX system")
        with contextlib.ExitStack() as opened:
            with explained(f"cannot keep a center in {self.path}"):
                _make(self.path)
                self._folder = opened.enter_context(_opening(self.path, os.O_RDONLY))
                lock = _opening(self.path / "lock", os.O_RDWR | os.O_CREAT)
                self._lock = opened.enter_context(lock)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise errors.DurabilityError(
                    f"another process keeps its center in {self.path}; give each "
                    "center a directory of its own"
                ) from None
            for each in self.path.glob("*.tmp"):  # of a process that was killed
                each.unlink()
            self._promise, self._kept = _read_promise(self._lock)
            self._missing = ""  # what was noticed to be missing
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Lets another process have it."""
        self._opened.close()

    def promise(self, promise: Promise, number: int) -> None:
        """What the next process may rely on; it is on disk when this returns.

        Args:
          promise: of the records that follow.
          number: of records that are on disk.

        Raises:
          OSError: it could not be written.
        """
        self._promise = promise
        self.note(number)
        os.fsync(self._lock)

    def note(self, number: int) -> None:
        """So many records are on disk.

        That is not synced, for it would cost as much as the records themselves. A
        process that is killed leaves it behind nevertheless, and after a power failure
        it is what was true some seconds before: never too much.
        """
        text = f"{self._promise} {number}"
        line = f"{text} {_checksum(text)}"
        os.pwrite(self._lock, f"{line:<63}\n".encode(), 0)

    def load(self) -> Record | None:
        """The newest snapshot; None if no center was ever kept here.

        Raises:
          DurabilityError: it cannot be read, or there is none any more.
        """
        found = self._numbers("snapshot")
        if not found:
            if self._promise is not None or self._numbers("journal"):
                raise errors.DurabilityError(
                    f"{self.path} has kept a center, but has no snapshot of it any "
                    f"more. {_ADVICE}"
                )
            return None
        path = self._file("snapshot", found[-1])
        with self._reading(path) as file:
            record = _records.read(file, 0, os.fstat(file).st_size)
            if record is None or record.number != found[-1]:
                raise _records.DamagedError("it is damaged")
            return record

    def replay(self, number: int) -> Iterator[Record]:
        """What happened after snapshot ``number``, in order.

        Raises:
          DurabilityError: something is missing before what is there.
        """
        begins = self._numbers("journal")
        earlier = [begin for begin in begins if begin <= number]
        begins = earlier[-1:] + [begin for begin in begins if begin > number]
        if self._promise == "journal" and not earlier:
            self._missing = f"{self._file('journal', number)} is gone"
        for begin in begins:
            path = self._file("journal", begin)
            is_last = begin == begins[-1]
            with self._reading(path) as file:
                if begin > number:
                    raise _records.DamagedError(f"record {number} is missing before it")
                size = os.fstat(file).st_size
                cut_off = functools.partial(_cut_off, path, is_last)
                for record in _records.read_all(file, begin, cut_off):
                    if record.file_size > size:
                        self._missing = f"{path} is shorter than it was"
                    if record.number == number:
                        number += 1
                        yield record

    def lost(self, number: int) -> str:
        """Why what was found is not all that there was; "" if it is.

        Args:
          number: of records that were found by `replay`.
        """
        if self._promise is None:
            return f"{self.path / 'lock'} does not say how much there was"
        if self._promise == "memory":
            return "it was not closed, and changes were in memory only"
        if number < self._kept:
            return f"records {number} to {self._kept - 1} were on disk and are not"
        return self._missing

    def save(
        self, number: int, about: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> int:
        """Writes a snapshot, whole or not at all; returns its bytes once on disk.

        Raises:
          OSError: it could not be written.
        """
        path = self._file("snapshot", number)
        temporary = path.with_name(path.name + ".tmp")
        pieces, size = _records.encode(number, about, arrays)
        try:
            with _opening(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                _records.write(file, pieces, 0)
                os.fsync(file)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        os.fsync(self._folder)
        return size

    def begin_journal(self, number: int) -> tuple[int, int]:
        """A new journal, open and on disk, and its size: all of it is reserved.

        Raises:
          OSError: there can be none.
        """
        path = self._file("journal", number)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            size = reserve(file, 0, 0)
            os.fsync(file)
            os.fsync(self._folder)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        return file, size

    def forget(self, journals: int, keep: int) -> None:
        """Removes what nobody needs any more.

        Args:
          journals: those that begin before this record are removed.
          keep: snapshots that stay, the last ones.
        """
        for each in self._numbers("journal"):
            if each < journals:
                self._file("journal", each).unlink()
        for each in self._numbers("snapshot")[:-keep]:
            self._file("snapshot", each).unlink()

    def _file(self, kind: str, number: int) -> pathlib.Path:
        return self.path / f"{kind}-{number:012}"

    def _numbers(self, kind: str) -> list[int]:
        names = (each.name for each in self.path.iterdir())
        found = (re.fullmatch(rf"{kind}-(\d+)", name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    @contextlib.contextmanager
    def _reading(self, path: pathlib.Path) -> Iterator[int]:
        try:
            with explained(f"cannot read {path}"), _opening(path, os.O_RDONLY) as file:
                yield file
        except _records.DamagedError as error:
            raise errors.DurabilityError(f"{path}: {error}. {_ADVICE}") from None


@contextlib.contextmanager
def _opening(path: pathlib.Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Around what an operating system may refuse."""
    try:
        yield
    except OSError as error:
        raise errors.DurabilityError(f"{what}: {error}") from error


def _cut_off(path: pathlib.Path, is_last: bool, size: int) -> None:
    """A journal ends with bytes that are no whole record."""
    if not is_last:  # it was on disk before the next one was begun
        raise _records.DamagedError("its end is damaged")
    _log.warning(
        "%s ends with %d bytes of a write that was cut off, which are left out",
        path,
        size,
    )


def reserve(file: int, size: int, needed: int) -> int:
    """Makes a file larger than ``needed`` bytes, and gives its new size.

    Writes are quicker where that has been done, and a file that was cut off is known
    by its size.
    """
    more = max(_RESERVED, needed - size)
    try:
        os.posix_fallocate(file, size, more)
    except (AttributeError, OSError):  # no such call here, or not for these files
        os.ftruncate(file, size + more)
    return size + more


def _make(path: pathlib.Path) -> None:
    """A directory that is there after a power failure, with all that it lies in."""
    if not path.is_dir():
        _make(path.parent)
        path.mkdir(exist_ok=True)
        with _opening(path.parent, os.O_RDONLY) as parent:
            os.fsync(parent)


def _read_promise(lock: int) -> tuple[Promise | None, int]:
    """What an earlier process has promised, and of how many records."""
    words = os.pread(lock, 64, 0).decode("ascii", "replace").split()
    text = " ".join(words[:2])
    for promise in get_args(Promise):
        if words[:1] == [promise] and words[2:] == [_checksum(text)]:
            return promise, int(words[1])
    return None, 0


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
