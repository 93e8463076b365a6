"""Files that change while a process runs: what is made of them is made again."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from agn_optax import errors

T = TypeVar("T")
Path = str | os.PathLike[str]

_LOOK = 0.5  # seconds between two looks
_log = logging.getLogger("agn_optax")


class Reread(Generic[T]):
    """What ``read`` makes of some files, again whenever one of them has changed.

    New files that cannot be read are logged, and what there was before stays.

    Args:
      files: whose changes count.
      read: raises `InvalidArgumentError` if they make no sense.
    """

    def __init__(self, files: Iterable[Path], read: Callable[[], T]) -> None:
        self._files = tuple(files)
        self._read = read
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._made = read()
        self._next = time.monotonic() + _LOOK

    def __call__(self) -> T:
        """The same object as long as no file has changed."""
        if self._files and time.monotonic() >= self._next:
            with self._lock:
                self._read_if_changed()
        return self._made

    def _read_if_changed(self) -> None:
        self._next = time.monotonic() + _LOOK
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        names = ", ".join(map(str, self._files))
        try:
            self._made = self._read()
        except errors.InvalidArgumentError as error:
            _log.error("%s changed, and is not used as it is now: %s", names, error)
        else:
            _log.info("%s changed, and was read again", names)

    def _look(self) -> list[Any]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> Any:
    """Another one once the file is another one."""
    try:
        found = os.stat(file)  # noqa: PTH116 also of what is no Path
    except OSError as error:
        return error.errno
    return found.st_ino, found.st_mtime_ns, found.st_size
