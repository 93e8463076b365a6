"""The files in which a center outlives its process.

    lock            held by the process that keeps its center here
    snapshot-N      the center after its first N records: one record, written whole
    journal-N       records N, N + 1, ...: what happened after snapshot-N

A journal begins with each snapshot, and ends where the next one begins. A snapshot that
could not be written is a gap that journals close: journal-N goes on in the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._records import Record

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger("agn_optax")
_RISKED = b"changes since the last snapshot are in memory only\n"


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
        with explained(f"cannot keep a center in {self.path}"):
            if not self.path.is_dir():
                self.path.mkdir(parents=True)
                _sync_directory(self.path.parent)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise errors.DurabilityError(
                f"another process keeps its center in {self.path}; give each center a "
                "directory of its own"
            ) from None
        for each in self.path.glob("*.tmp"):  # of a process that was killed
            each.unlink()

    def close(self) -> None:
        """Lets another process have it."""
        os.close(self._lock)

    @property
    def is_behind(self) -> bool:
        """Whether the process that ended may have taken something along."""
        return os.pread(self._lock, len(_RISKED), 0) == _RISKED

    def set_risked(self, risked: bool) -> None:
        """Whether, from now on, a process that is killed takes something along."""
        os.ftruncate(self._lock, 0)
        if risked:
            os.pwrite(self._lock, _RISKED, 0)
        os.fsync(self._lock)

    def load(self) -> Record | None:
        """The newest snapshot; None if there is none.

        Raises:
          DurabilityError: it cannot be read, or there are journals without it.
        """
        found = self._numbers("snapshot")
        if not found:
            if journals := self._numbers("journal"):
                raise errors.DurabilityError(
                    f"{self._file('journal', journals[0])} has no snapshot to begin "
                    "with"
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
          DurabilityError: something that was on disk is not any more.
        """
        names = [each for each in self._numbers("journal") if each >= number]
        for begin in names:
            path = self._file("journal", begin)
            is_last = begin == names[-1]

            def cut_off(size: int, path: Any = path, is_last: bool = is_last) -> None:
                if not is_last:  # it was on disk before the next one was begun
                    raise _records.DamagedError("its end is damaged")
                _log.warning(
                    "%s ends with %d bytes of a write that was cut off. Nobody was "
                    "told that it had been applied, and it is left out",
                    path,
                    size,
                )

            with self._reading(path) as file:
                if begin != number:
                    raise _records.DamagedError(f"record {number} is missing before it")
                for record in _records.read_all(file, number, cut_off):
                    number = record.number + 1
                    yield record

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
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                _records.write(file, pieces, 0)
                os.fsync(file)
            finally:
                os.close(file)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_directory(self.path)
        return size

    def begin_journal(self, number: int) -> int:
        """An open journal, empty; it is on disk that there is one."""
        path = self._file("journal", number)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        _sync_directory(self.path)
        return file

    def forget(self, number: int, keep: int) -> None:
        """Removes what snapshot ``number`` replaces, but for the last snapshots."""
        for each in self._numbers("journal"):
            if each < number:
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
        with explained(f"cannot read {path}"):
            file = os.open(path, os.O_RDONLY)
            try:
                yield file
            except _records.DamagedError as error:
                raise errors.DurabilityError(
                    f"{path}: {error}. Put back a copy of the whole directory, or "
                    "begin with an empty one"
                ) from None
            finally:
                os.close(file)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Around what an operating system may refuse."""
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.AgnOptaxError):
            raise
        raise errors.DurabilityError(f"{what}: {error}") from error


def allocate(file: int, begin: int, size: int) -> None:
    """Reserves a part of a file, where that can be had: it makes writes quicker."""
    if hasattr(os, "posix_fallocate"):
        with contextlib.suppress(OSError):
            os.posix_fallocate(file, begin, size)


def _sync_directory(path: pathlib.Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
