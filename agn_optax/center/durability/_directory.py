"""The directory in which a center outlives its process, and what is written there.

Its lock is held by the process that keeps its center here. What the files are is said
in `_found`, which reads them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._found import (
    Found,
    Kind,
    Promise,
    explained,
    opening,
    this_boot,
)

if sys.platform != "win32":
    import fcntl

# Bytes of a journal that are reserved at a time: as many as it has, within these.
_LEAST_RESERVED, _MOST_RESERVED = 64 << 10, 64 << 20


class Room(NamedTuple):
    """On the disk where a center is kept.

    Attributes:
      free: bytes that are left to its user.
      needed: bytes of the next snapshot, and of the journal that begins after it.
    """

    free: int
    needed: int


class Directory(Found):
    """The files of one center, which this process alone may touch.

    Args:
      path: of the directory, which is made if need be.

    Raises:
      DurabilityError: another process has it, or it cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = pathlib.Path(path)
        if sys.platform == "win32":
            raise errors.DurabilityError("a center on disk needs a POSIX system")
        with contextlib.ExitStack() as opened:
            with explained(f"cannot keep a center in {path}"):
                _make(path)
                self._folder = opened.enter_context(opening(path, os.O_RDONLY))
                lock = opening(path / "lock", os.O_RDWR | os.O_CREAT)
                self._lock = opened.enter_context(lock)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise errors.DurabilityError(
                    f"another process keeps its center in {path}; give each "
                    "center a directory of its own"
                ) from None
            super().__init__(path)
            with explained(f"cannot keep a center in {path}"):
                self.check_place()  # it may have been replaced before it was locked
                for each in path.glob("*.tmp"):  # of a process that was killed
                    each.unlink()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Lets another process have it."""
        self._opened.close()

    def check_place(self, journal: int | None = None, begin: int = 0) -> None:
        """That what is written can be found here.

        An open file can be written to wherever it went, and by whoever still has it.

        Args:
          journal: one that is open.
          begin: its first record.

        Raises:
          OSError: it cannot.
        """
        _check_place(self._lock, self.path / "lock")
        if journal is not None:
            _check_place(journal, self.file("journal", begin))

    def room(self, snapshot: int, *, journal: bool) -> Room:
        """What there is for what comes next.

        Args:
          snapshot: bytes of one.
          journal: whether one begins after it.

        Raises:
          OSError: the directory is gone.
        """
        free = shutil.disk_usage(self.path).free
        # A record has about as many bytes as the parameters.
        begins = max(_LEAST_RESERVED, min(snapshot, _MOST_RESERVED))
        return Room(free, snapshot + (begins if journal else 0))

    def make_promise(self, kind: Kind, number: int) -> None:
        """What the next process may rely on; it is on disk when this returns.

        Args:
          kind: of the promise, for the records that follow.
          number: of records that are on disk.

        Raises:
          OSError: it could not be written.
        """
        self.promise = Promise(kind, number, this_boot())
        self.note(number)
        os.fsync(self._lock)

    def note(self, number: int) -> None:
        """So many records are on disk.

        That is not synced, for it would cost as much as the records themselves. A
        process that is killed leaves it behind nevertheless, and after a power failure
        it is what was true some seconds before: never too much.
        """
        assert self.promise is not None
        self.promise = self.promise._replace(kept=number)
        os.pwrite(self._lock, self.promise.line(), 0)

    def save(
        self, number: int, about: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> int:
        """Writes a snapshot, whole or not at all; returns its bytes once on disk.

        Raises:
          OSError: it could not be written.
        """
        self.check_place()
        path = self.file("snapshot", number)
        temporary = path.with_name(path.name + ".tmp")
        pieces, size = _records.encode(number, about, arrays)
        try:
            with opening(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
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
        self.check_place()
        path = self.file("journal", number)
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

    def forget(self, journals: int, keep: int, seconds: float = 0.0) -> None:
        """Removes what nobody needs any more.

        Args:
          journals: those that begin before this record are removed.
          keep: snapshots that stay, the last ones.
          seconds: ... and those that are younger.
        """
        for each in self.numbers("journal"):
            if each < journals:
                self.file("journal", each).unlink()
        before = time.time() - seconds
        for each in self.numbers("snapshot")[:-keep]:
            path = self.file("snapshot", each)
            if path.stat().st_mtime <= before:
                path.unlink()


def reserve(file: int, size: int, needed: int) -> int:
    """Makes a file larger than ``needed`` bytes, and gives its new size.

    A small file grows by little, and a large one seldom. Writes are quicker where that
    has been done, and a file that was cut off is known by its size.
    """
    more = max(_LEAST_RESERVED, min(size, _MOST_RESERVED), needed - size)
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
        with opening(path.parent, os.O_RDONLY) as parent:
            os.fsync(parent)


def _check_place(file: int, path: pathlib.Path) -> None:
    try:
        is_there = os.path.samestat(os.stat(path), os.fstat(file))  # noqa: PTH116 quick
    except FileNotFoundError:
        is_there = False
    if not is_there:
        raise OSError(f"{path} was removed, moved or replaced while it was in use")
