"""The thread that writes the records of a journal in order."""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from agn_optax._internal import trees
from agn_optax.center._runtime import Runtime
from agn_optax.center.durability import _records
from agn_optax.center.durability._directory import Directory, reserve

PyTree = Any

_log = logging.getLogger("agn_optax")
_sync = getattr(os, "fdatasync", os.fsync)


class Writer:
    """Appends records to a journal, on its own thread.

    Records that arrive while the disk is busy are written together, so that many
    workers share one sync. A batch is written only after the previous one is on
    disk.

    Args:
      directory: directory of the files.
      number: number of the first record.
      digest: digest of the record before it.
      on_written: called with the number of written records, and with the digests of
        those since the last call, each time that the number grows, and when a request
        for a new file has been handled.
      on_failed: called with the exception after which nothing more is written.
      runtime: has the thread.

    Attributes:
      begin: number of the first record of the current file.
      digest: digest of the newest record; another thread may read it after `close`.
      end: bytes of the current file that are records on disk.
      full: the number of the first record, and the bytes, of the file before; None if
        there is none.
      before: digest of the last record before the newest request for a new file.
      is_switching: whether a request for a new file is pending.

    Raises:
      OSError: the file could not be created.
    """

    begin: int
    end: int
    _file: int
    _size: int  # size of the file, bytes
    _counted: int  # bytes of the file that the property `size` does not count

    def __init__(
        self,
        directory: Directory,
        number: int,
        digest: bytes,
        on_written: Callable[[int, list[bytes]], None],
        on_failed: Callable[[Exception], None],
        runtime: Runtime,
    ) -> None:
        self._directory = directory
        self._number = number
        self.digest = self.before = digest
        self._digests: list[bytes] = []  # of records since the last call of on_written
        self._on_written = on_written
        self._on_failed = on_failed
        # Contents of records; "new file" begins a new file, and "end" ends the thread.
        self._queue: queue.SimpleQueue[
            tuple[dict[str, Any], Sequence[PyTree | None]] | Literal["new file", "end"]
        ] = queue.SimpleQueue()
        self.is_switching = False
        self.full: tuple[int, int] | None = None
        self._begin_file()
        self._ended = runtime.in_background(
            self._run, "agn-optax journal", lasting=True
        )

    @property
    def size(self) -> int:
        """Bytes written since a new file was last requested."""
        return 0 if self.is_switching else self.end - self._counted

    def append(
        self, about: dict[str, Any], contents: Sequence[PyTree | None] = ()
    ) -> None:
        """Queue the next record, without waiting until it is written.

        Args:
          about: description of the record.
          contents: trees of arrays; None for a content that is not written.
        """
        self._queue.put((about, contents))

    def begin_file(self) -> None:
        """Request that the next record begins a new file, if one can be created."""
        self.is_switching = True
        self._queue.put("new file")

    def close(self) -> None:
        """Wait until all records are on disk, or writing has failed."""
        self._queue.put("end")
        self._ended.result()

    def _run(self) -> None:
        try:
            while self.write_next():
                pass
        except Exception as error:  # of any kind, or workers would wait forever
            self._on_failed(error)
        finally:
            os.close(self._file)

    @property
    def is_idle(self) -> bool:
        """True if nothing is queued, so that `write_next` would wait."""
        return self._queue.empty()

    def write_next(self) -> bool:
        """Write the queued records, of which there may be none yet; False at the end.

        The thread calls this again and again. It refers to no arrays while it waits for
        records.
        """
        batch = [self._queue.get()]
        while not self.is_idle:
            batch.append(self._queue.get())
        pieces: list[memoryview] = []
        end = self.end
        for queued in batch:
            if queued == "end" or queued == "new file":
                self._write(pieces, end)
                if queued == "end":
                    return False
                self._switch_file()
                pieces, end = [], self.end
                continue
            about, contents = queued
            arrays = [tree if tree is None else _host(tree) for tree in contents]
            record = _records.encode(
                self._number, about, arrays, self.digest, self.end, self._size
            )
            pieces += record.pieces
            end += record.size
            self._number, self.digest = self._number + 1, record.digest
            self._digests.append(record.digest)
        self._write(pieces, end)
        return True

    def _write(self, pieces: Sequence[memoryview], end: int) -> None:
        if not pieces:
            return
        size = self._size
        if end > size:  # extend first, or each sync would also write the new file size
            size = reserve(self._file, size, end)
        _records.write(self._file, pieces, self.end)
        _sync(self._file)
        self.end, self._size = end, size
        self._directory.check_paths(self._file, self.begin)
        self._directory.write_num_records(self._number)
        self._report()

    def _report(self) -> None:
        digests, self._digests = self._digests, []
        self._on_written(self._number, digests)

    def _switch_file(self) -> None:
        """Continue in a new file, or in the current one if none can be created."""
        before, self.before = self._file, self.digest
        full = self.begin, self.end
        try:
            self._begin_file()
        except OSError as error:
            _log.error("the journal continues in its old file: %s", error)
            self._counted = self.end
        else:
            self.full = full
            os.close(before)
        self.is_switching = False
        self._report()

    def _begin_file(self) -> None:
        self._file, self._size = self._directory.begin_journal(self._number)
        self.begin = self._number
        self.end = self._counted = 0


def _host(tree: PyTree) -> list[np.ndarray]:
    return trees.on_host(jax.tree.leaves(tree))
