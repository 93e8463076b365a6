"""What happens to a center, on disk in the order in which it happened."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from agn_optax.center.durability import _records
from agn_optax.center.durability._directory import Directory, allocate

PyTree = Any

_RESERVED = 64 << 20  # bytes of a file that are reserved at a time
_sync = getattr(os, "fdatasync", os.fsync)


class Journal:
    """Appends records to a file, on a thread of its own.

    Whatever has come by the time that the disk is ready for more is written together,
    and is on disk together: many workers share one sync. Nothing is written before
    what came before it is on disk.

    Args:
      directory: where the files are.
      number: of the first record.
      written: told the number of records that are on disk, each time that it grows.
      failed: told what went wrong; nothing is written after that.
    """

    def __init__(
        self,
        directory: Directory,
        number: int,
        written: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._directory = directory
        self._number = number
        self._written = written
        self._failed = failed
        self._file = directory.begin_journal(number)
        self._end = 0  # bytes of the file that have been written
        self._reserved = 0
        self._changed = threading.Condition()
        # A record's contents, or None where another file begins.
        self._waiting: list[tuple[dict[str, Any], Sequence[PyTree]] | None] = []
        self._closed = False
        self.size = 0  # bytes of arrays since the file began, written or waiting
        self._thread = threading.Thread(
            target=self._run, name="agn-optax journal", daemon=True
        )
        self._thread.start()

    def append(self, about: dict[str, Any], trees: Sequence[PyTree] = ()) -> None:
        """Takes the next record, and does not wait for it to be written."""
        with self._changed:
            self.size += sum(leaf.nbytes for leaf in jax.tree.leaves(trees))
            self._waiting.append((about, trees))
            self._changed.notify()

    def begin_file(self) -> None:
        """The next record goes into a file of its own."""
        with self._changed:
            self.size = 0
            self._waiting.append(None)
            self._changed.notify()

    def close(self) -> None:
        """Returns when everything is on disk, or failed to be."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
        except Exception as error:  # whatever it is, nobody must wait for ever
            self._failed(error)
        finally:
            os.close(self._file)

    def _write_next(self) -> bool:
        """Whether there was anything to write; nobody holds it afterwards."""
        batch = self._take()
        if batch:
            self._write(batch)
        return bool(batch)

    def _take(self) -> list[tuple[dict[str, Any], Sequence[PyTree]] | None]:
        """What waits; nothing once there is no more to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch, self._waiting = self._waiting, []
            return batch

    def _write(self, batch: Sequence[Any]) -> None:
        pieces: list[memoryview] = []
        end = self._end
        for each in batch:
            if each is None:
                self._put(pieces, end)
                os.close(self._file)
                self._file = self._directory.begin_journal(self._number)
                pieces, end, self._end, self._reserved = [], 0, 0, 0
                continue
            about, trees = each
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]
            more, size = _records.encode(self._number, about, arrays, self._end)
            pieces += more
            end += size
            self._number += 1
        self._put(pieces, end)

    def _put(self, pieces: Sequence[memoryview], end: int) -> None:
        if not pieces:
            return
        if end > self._reserved:  # or the sync would also write the file's new size
            more = max(_RESERVED, end - self._reserved)
            allocate(self._file, self._reserved, more)
            self._reserved += more
        _records.write(self._file, pieces, self._end)
        _sync(self._file)
        self._end = end
        self._written(self._number)
