"""The directory of a durability: locking, snapshots, journals and free space.

The process that keeps its center in the directory holds the lock. `_files` describes
the files, and reads them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._files import (
    CenterFiles,
    Kind,
    Lock,
    disk_errors,
    open_file,
)

if sys.platform != "win32":
    import fcntl

# Bytes to reserve for a journal at a time: its current size, within these limits.
_MIN_RESERVED, _MAX_RESERVED = 64 << 10, 64 << 20


class DiskSpace(NamedTuple):
    """Space on the disk of a durability.

    Attributes:
      free: bytes available to the process's user.
      needed: bytes of the next snapshot, and of the journal that begins after it.
    """

    free: int
    needed: int


class Directory(CenterFiles):
    """The files of one center, locked and written by this process.

    Args:
      path: path of the directory, which is created if necessary.

    Raises:
      DurabilityError: another process holds the lock, or the directory cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = pathlib.Path(path)
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
            super().__init__(path)
            with disk_errors(f"cannot keep a center in {path}"):
                self.check_paths()  # the directory may have been replaced meanwhile
                for left in path.glob("*.tmp"):  # left by a process that was killed
                    left.unlink()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Release the lock."""
        self._opened.close()

    def check_paths(self, journal: int | None = None, begin: int = 0) -> None:
        """Check that open files are still found at their paths.

        An open file can be written after it was moved or removed, and by any process
        that still has it open.

        Args:
          journal: file descriptor of the journal; None checks only the lock.
          begin: number of the journal's first record.

        Raises:
          OSError: a file was moved, removed or replaced.
        """
        _check_path(self._lock_file, self.path / "lock")
        if journal is not None:
            _check_path(journal, self.file("journal", begin))

    def disk_space(self, snapshot: int) -> DiskSpace:
        """Return the free and the needed disk space.

        Args:
          snapshot: size of a snapshot in bytes.

        Raises:
          OSError: the directory is gone.
        """
        free = shutil.disk_usage(self.path).free
        # A record is about as large as the parameters.
        reserved = max(_MIN_RESERVED, min(snapshot, _MAX_RESERVED))
        return DiskSpace(free, snapshot + reserved)

    def write_lock(self, kind: Kind, number: int) -> None:
        """Write the guarantee for newer records to the lock, and sync it to disk.

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
        self, number: int, about: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> int:
        """Write a snapshot atomically; return its size in bytes once it is on disk.

        Raises:
          OSError: the snapshot could not be written.
        """
        self.check_paths()
        path = self.file("snapshot", number)
        temporary = path.with_name(path.name + ".tmp")
        pieces, size = _records.encode(number, about, arrays)
        try:
            with open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                _records.write(file, pieces, 0)
                os.fsync(file)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        os.fsync(self._folder)
        return size

    def begin_journal(self, number: int) -> tuple[int, int]:
        """Create a journal on disk; return its file descriptor and its reserved size.

        Raises:
          OSError: the journal could not be created.
        """
        self.check_paths()
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

    def remove_old(self, journals: int) -> None:
        """Remove the journals that begin before a record, and all but one snapshot."""
        for number in self.numbers("journal"):
            if number < journals:
                self.file("journal", number).unlink()
        for number in self.numbers("snapshot")[:-1]:
            self.file("snapshot", number).unlink()


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
        with open_file(path.parent, os.O_RDONLY) as parent:
            os.fsync(parent)


def _check_path(file: int, path: pathlib.Path) -> None:
    try:
        is_same = os.path.samestat(os.stat(path), os.fstat(file))  # noqa: PTH116 quick
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise OSError(f"{path} was removed, moved or replaced while it was in use")
