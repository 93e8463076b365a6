"""The thread that writes a journal, in the order in which things happened."""

from __future__ import annotations

import logging
import math
import os
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from agn_optax._internal import in_background
from agn_optax.center.durability import _records
from agn_optax.center.durability._directory import Directory, reserve

PyTree = Any

_log = logging.getLogger("agn_optax")
_sync = getattr(os, "fdatasync", os.fsync)


class Writer:
    """Appends records to a journal, on a thread of its own.

    Whatever has come by the time that the disk is ready for more is written together,
    and is on disk together: many workers share one sync. Nothing is written before
    what came before it is on disk.

    Args:
      directory: where the files are.
      number: of the first record.
      interval: seconds after which what was written is synced at the latest; None to
        sync all of it before it counts as written.
      written: told the number of records that have been written, each time that it
        grows, and when a file has been begun.
      failed: told what went wrong; nothing is written after that.

    Attributes:
      begin: number of the first record of the file.
      is_turning: whether another file is to be begun, and has not been yet.

    Raises:
      OSError: there can be no file.
    """

    begin: int
    _file: int
    _size: int  # bytes of the file
    _end: int  # ... of which so many are records, and written
    _synced: int  # ... and so many on disk
    _counted: int  # ... of which so many do not count for `size`

    def __init__(
        self,
        directory: Directory,
        number: int,
        interval: float | None,
        written: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._directory = directory
        self._number = number
        self._interval = interval
        self._due = math.inf  # when to sync at the latest
        self._written = written
        self._failed = failed
        # Contents of records; "turn" where another file begins, and "end" at the end.
        self._waiting: queue.SimpleQueue[
            tuple[dict[str, Any], Sequence[PyTree]] | Literal["turn", "end"]
        ] = queue.SimpleQueue()
        self.is_turning = self._closing = False
        self._begin_file()
        self._ended = in_background(self._run, "agn-optax journal", lasting=True)

    @property
    def size(self) -> int:
        """Bytes written since another file was last asked for."""
        return 0 if self.is_turning else self._end - self._counted

    def append(self, about: dict[str, Any], trees: Sequence[PyTree] = ()) -> None:
        """Takes the next record, and does not wait for it to be written."""
        self._waiting.put((about, trees))

    def begin_file(self) -> None:
        """The next record goes into another file, if one can be had."""
        self.is_turning = True
        self._waiting.put("turn")

    def close(self) -> None:
        """Returns when everything is on disk, or failed to be."""
        self._closing = True
        self._waiting.put("end")
        self._ended.result()

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
        except Exception as error:  # whatever it is, nobody must wait for ever
            self._failed(error)
            while not self._closing:  # records have the arrays of their messages
                self._waiting.get()
        finally:
            os.close(self._file)

    def _write_next(self) -> bool:
        """Writes what waits; False at the end. While it waits it holds no arrays."""
        left = None if self._due == math.inf else self._due - time.monotonic()
        try:
            batch = [self._waiting.get(timeout=left and max(left, 0.0))]
        except queue.Empty:
            self._sync()
            return True
        while not self._waiting.empty():
            batch.append(self._waiting.get())
        pieces: list[memoryview] = []
        end = self._end
        for each in batch:
            if each == "end" or each == "turn":
                self._put(pieces, end)
                self._sync()
                if each == "end":
                    return False
                self._turn()
                pieces, end = [], self._end
                continue
            about, trees = each
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]
            more, size = _records.encode(
                self._number, about, arrays, self._synced, self._size
            )
            pieces += more
            end += size
            self._number += 1
        self._put(pieces, end)
        return True

    def _put(self, pieces: Sequence[memoryview], end: int) -> None:
        if not pieces:
            return
        size = self._size
        if end > size:  # or the sync would also write the file's new size
            size = reserve(self._file, size, end)
        _records.write(self._file, pieces, self._end)
        self._end, self._size = end, size
        if self._interval is None or time.monotonic() >= self._due:
            self._sync()
        self._directory.check_place(self._file, self.begin)
        self._directory.note(self._number)
        self._written(self._number)
        if self._interval is not None:
            self._due = min(self._due, time.monotonic() + self._interval)

    def _sync(self) -> None:
        """All that was written is on disk."""
        if self._synced < self._end:
            _sync(self._file)
        self._synced, self._due = self._end, math.inf

    def _turn(self) -> None:
        """Goes on in another file, or in this one until one can be had."""
        before = self._file
        try:
            self._begin_file()
        except OSError as error:
            _log.error("the journal goes on in its old file: %s", error)
            self._counted = self._end
        else:
            os.close(before)
        self.is_turning = False
        self._written(self._number)

    def _begin_file(self) -> None:
        self._file, self._size = self._directory.begin_journal(self._number)
        self.begin = self._number
        self._end = self._synced = self._counted = 0
