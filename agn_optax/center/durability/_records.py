"""The format of records on disk; each is numbered and has a checksum.

A file is a sequence of records, each at a multiple of 64 bytes. A record consists of a
`Head`, JSON that describes the record, and arrays, each at a multiple of 64 bytes. A
snapshot is a file of one record, a journal is a file of many.

A record that cannot be read is either an incomplete write, which was never confirmed to
a worker, or damage to data that was on disk. Every record has the number of bytes of
its file that were on disk when it was written. A later record therefore tells the two
cases apart.

This module depends on NumPy, and neither on JAX nor on the meaning of the records.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_MAGIC = b"agnoptax"
_FORMAT = 1
_ALIGNMENT = 64  # bytes, of records and arrays
_PAGE = 4096  # bytes that are summed as one page for a digest
_SMALL = 1 << 16  # bytes; smaller records are written in one piece
_SEARCHED = 1 << 20  # bytes that are searched at a time
_ZEROS = memoryview(bytes(_ALIGNMENT))


class Head(NamedTuple):
    """The header of a record."""

    magic: bytes
    format: int
    about: int  # size of the JSON, bytes
    size: int  # size of the record, bytes
    number: int
    on_disk: int  # bytes of earlier records that were on disk when this was written
    file_size: int  # bytes of the file then, including space reserved for more records
    digest: bytes  # of the record without the digest itself and the zeros in gaps


_HEAD = struct.Struct("<8sIIQQQQ16s")


class Record(NamedTuple):
    """A record that was read."""

    number: int
    about: dict[str, Any]
    arrays: list[np.ndarray]
    size: int  # bytes in its file
    file_size: int


class DamagedError(Exception):
    """A file differs from what was written; the message says where."""


def encode(
    number: int,
    about: dict[str, Any],
    arrays: Sequence[np.ndarray],
    on_disk: int = 0,
    file_size: int = 0,
) -> tuple[list[memoryview], int]:
    """Encode a record as pieces to be written in order; return them and their size.

    The pieces of a large record are views of the arrays.
    """
    leaves = [[array.dtype.name, array.shape] for array in arrays]
    text = json.dumps([about, leaves], separators=(",", ":")).encode()
    flat = [_flat(array) for array in arrays]
    pieces = [memoryview(text)]
    end = _pad(pieces, _HEAD.size + len(text))
    for array in flat:
        pieces.append(array.data)
        end = _pad(pieces, end + array.nbytes)
    head = Head(_MAGIC, _FORMAT, len(text), end, number, on_disk, file_size, b"")
    head = head._replace(digest=_digest(head, text, flat))
    pieces.insert(0, memoryview(_HEAD.pack(*head)))
    if end <= _SMALL:
        pieces = [memoryview(b"".join(pieces))]
    return pieces, end


def read(file: int, position: int, end: int) -> Record | None:
    """Read the record at a position of an open file; None if it is not complete."""
    head = _head(os.pread(file, _HEAD.size, position))
    if head is None or not head.about < head.size <= end - position:
        return None
    if head.format != _FORMAT:
        raise DamagedError(
            f"record {head.number} at byte {position} has format {head.format}, and "
            f"this release reads {_FORMAT}; or the record is damaged"
        )
    raw = np.empty(head.size - _HEAD.size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    raw = raw[begin : begin + head.size - _HEAD.size]
    if not _fill(file, raw.data, position + _HEAD.size):
        return None
    text = raw[: head.about].tobytes()
    try:
        about, leaves = json.loads(text)
        arrays = []
        at, gaps = head.about, []
        for name, shape in leaves:
            dtype = np.dtype(name)  # including bfloat16, which importing JAX registers
            gaps.append(slice(at, at := at + -(at + _HEAD.size) % _ALIGNMENT))
            nbytes = math.prod(shape) * dtype.itemsize
            arrays.append(raw[at : at + nbytes].view(dtype).reshape(shape))
            at += nbytes
        gaps.append(slice(at, None))
    except (TypeError, ValueError):  # not JSON, or of another format
        return None
    expected = _digest(head, text, [_flat(array) for array in arrays])
    if head.digest != expected or any(raw[gap].any() for gap in gaps):
        return None
    return Record(head.number, about, arrays, head.size, head.file_size)


def read_all(
    file: int, number: int, cut_off: Callable[[int], None]
) -> Iterator[Record]:
    """Yield the records of an open file.

    Args:
      file: file descriptor.
      number: number of the first record.
      cut_off: called with the number of bytes after the last complete record, if an
        incomplete write follows it.

    Raises:
      DamagedError: a record that was on disk cannot be read, and later ones can.
    """
    end, position = os.fstat(file).st_size, 0
    while (record := read(file, position, end)) is not None:
        if record.number != number:
            raise DamagedError(
                f"record {number} is missing at byte {position}, which has record "
                f"{record.number}"
            )
        yield record
        number += 1
        position += record.size
    left = 0
    for start in range(position, end, _SEARCHED):
        block = os.pread(file, _SEARCHED, start)
        if block.count(0) == len(block):  # reserved space without records
            continue
        left = start + len(block) - position
        for match in re.finditer(_MAGIC, block):
            at = match.start()
            head = None if at % _ALIGNMENT else _head(block[at : at + _HEAD.size])
            if head is None or not position < head.on_disk <= start + at:
                continue
            later = read(file, start + at, end)
            if later is not None:
                raise DamagedError(
                    f"record {number} at byte {position} is damaged, but record "
                    f"{later.number} after it is complete"
                )
    if left:
        cut_off(left)


def write(file: int, pieces: Sequence[memoryview], position: int) -> None:
    """Write all pieces in order."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        written = os.pwritev(file, left[: os.sysconf("SC_IOV_MAX")], position)
        position += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def _head(raw: bytes) -> Head | None:
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        return None
    return Head(*_HEAD.unpack(raw))


def _fill(file: int, buffer: memoryview, position: int) -> bool:
    while len(buffer):
        read = os.preadv(file, [buffer], position)
        if not read:
            return False
        buffer, position = buffer[read:], position + read
    return True


def _pad(pieces: list[memoryview], end: int) -> int:
    gap = -end % _ALIGNMENT
    if gap:
        pieces.append(_ZEROS[:gap])
    return end + gap


def _flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digest(head: Head, text: bytes, arrays: Sequence[np.ndarray]) -> bytes:
    """Return a digest that uses sums over the arrays, ten times as fast as CRC-32.

    The 64-bit sums are over pages and over columns of pages. They always detect changes
    of up to three words, lost pages and reordered pages; other random damage is missed
    with a probability of 2**-64.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(_HEAD.pack(*head._replace(digest=b"")))
    digest.update(text)
    for array in arrays:
        paged = len(array) // _PAGE * _PAGE  # bytes in complete pages
        if paged:
            pages = array[:paged].view(np.uint64).reshape(-1, _PAGE // 8)
            digest.update(pages.sum(axis=1).data)
            digest.update(pages.sum(axis=0).data)
        digest.update(array[paged:].data)
    return digest.digest()
