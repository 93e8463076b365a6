"""Objects made from files that are read again when a file changes."""

from __future__ import annotations

import logging
import math
import os
import pathlib
import stat
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from agn_optax import errors

T = TypeVar("T")
Path = str | os.PathLike[str]

_CHECK_INTERVAL = 0.5  # seconds between two checks for changes
MAX_AGE = 300.0  # seconds for which the old content of unreadable files may be used
_log = logging.getLogger("agn_optax")


class Reread(Generic[T]):
    """The result of ``read``, which is called again when one of the files has changed.

    If changed files cannot be read, an error is logged once, the old result stays, and
    each check reads them again.

    Args:
      files: the files whose changes are noticed.
      read: reads the files; raises `InvalidArgumentError` if they are not valid.
    """

    def __init__(self, files: Iterable[Path], read: Callable[[], T]) -> None:
        self._files = tuple(files)
        self._read = read
        self._failed_since = math.inf  # when reading failed first; monotonic seconds
        self._lock = threading.Lock()
        self._stamps = self._stat_files()
        self._failed_stamps: list[Any] | None = None  # None if the last read succeeded
        self._result = read()
        self._next_check = time.monotonic() + _CHECK_INTERVAL

    def __call__(self) -> T:
        """Return the current result; the same object as long as no file has changed."""
        if self._files and time.monotonic() >= self._next_check:
            with self._lock:
                self._read_if_changed()
        return self._result

    @property
    def is_outdated(self) -> bool:
        """True if reading has failed for more than `MAX_AGE` seconds."""
        return time.monotonic() - self._failed_since > MAX_AGE

    def _read_if_changed(self) -> None:
        self._next_check = time.monotonic() + _CHECK_INTERVAL
        stamps, names = self._stat_files(), ", ".join(map(str, self._files))
        if stamps == self._stamps and self._failed_stamps is None:
            return
        try:
            self._result = self._read()
        except errors.InvalidArgumentError as error:
            self._failed_since = min(self._failed_since, time.monotonic())
            if stamps != self._failed_stamps:
                _log.error(
                    "%s changed, and cannot be used: %s; its previous content stays "
                    "valid (a center's tokens: for %g s)",
                    *(names, error, MAX_AGE),
                )
            self._failed_stamps = stamps
        else:
            self._stamps, self._failed_stamps = stamps, None
            self._failed_since = math.inf
            _log.info("%s changed, and was read again", names)

    def _stat_files(self) -> list[Any]:
        return [_stamp(file) for file in self._files]


def warn_if_public(file: Path, what: str) -> None:
    """Log a warning if every user of this machine can read a file with secrets.

    Args:
      file: the file.
      what: description of the secrets for the message, such as "the tokens in".
    """
    try:
        mode = os.stat(file).st_mode  # noqa: PTH116 file may be a str
        is_public = mode & stat.S_IROTH and _can_be_reached(file)
    except OSError:  # reported when the file is read
        return
    if is_public:
        _log.warning(
            "every user of this machine can read %s %s: chmod 600 it, or set the mode "
            "where it is mounted (defaultMode: 0400 of a secret)",
            what,
            file,
        )


def _can_be_reached(file: Path) -> bool:
    """Return whether every user may enter the folders above a file."""
    folders = pathlib.Path(os.path.realpath(file)).parents
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)


def _stamp(file: Path) -> Any:
    """Return a value that changes with the file's content, identity or permissions."""
    try:
        status = os.stat(file)  # noqa: PTH116 file may be a str
    except OSError as error:
        return error.errno
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
