"""The format of records on disk; each is numbered and names the record before it.

A file is a sequence of records, each at a multiple of 64 bytes. A record consists of a
`Head`, JSON that describes the record, and arrays, each at a multiple of 64 bytes. A
snapshot is a file of one record, a journal is a file of many.

The digest of a record is over its head and its JSON. The head has the digest of the
record before, so that the records are a chain: a digest stands for a record and for all
that come before it. The JSON has a digest of each `Content`, which is a group of arrays
such as a contribution. A record without its arrays can therefore still be checked: the
records of a chain file are those of a journal, without arrays.

A record that cannot be read is either an incomplete write, which was never confirmed to
a worker, or damage to data that was on disk. Every record has the number of bytes of
its file that were on disk when it was written. A later record therefore tells the two
cases apart.

This module depends on NumPy, and neither on JAX nor on the meaning of the records.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

_MAGIC = b"agnoptax"
FORMAT = 2
_DIGEST_SIZE = 16  # bytes
_ALIGNMENT = 64  # bytes, of records and arrays
_PAGE = 4096  # bytes that are summed as one page for a digest
_SMALL = 1 << 16  # bytes; smaller records are written in one piece
_SEARCHED = 1 << 20  # bytes that are searched at a time
_ZEROS = memoryview(bytes(_ALIGNMENT))
# Numbers may be those of NumPy, or on a device.
_ENCODER = json.JSONEncoder(separators=(",", ":"), default=float, check_circular=False)


class Head(NamedTuple):
    """The header of a record."""

    magic: bytes
    format: int
    about: int  # size of the JSON, bytes
    size: int  # size of the record with its arrays, bytes
    number: int
    on_disk: int  # bytes of earlier records that were on disk when this was written
    file_size: int  # bytes of the file then, including space reserved for more records
    # Digest of the record before; for a snapshot, of the last record that it has.
    # Before record 0: the center id.
    parent: bytes
    digest: bytes  # of the head without this field, and of the JSON


_HEAD = struct.Struct("<8sIIQQQQ16s16s")
_FORMAT_OF = struct.Struct("<8sI")


class Content(NamedTuple):
    """Arrays that have a digest together, such as those of a contribution."""

    digest: bytes
    leaves: list[tuple[str, tuple[int, ...]]]  # dtype and shape of each array
    arrays: list[np.ndarray] | None  # None if they were not kept, or not read


class Record(NamedTuple):
    """A record that was read."""

    number: int
    about: dict[str, Any]
    contents: list[Content | None]  # None for one that was never written
    parent: bytes
    digest: bytes
    size: int  # bytes in its file
    file_size: int
    head_and_about: bytes  # the record without its arrays

    @property
    def arrays(self) -> list[np.ndarray]:
        """The arrays of all contents."""
        groups = [content.arrays or [] for content in self.contents if content]
        return list(itertools.chain.from_iterable(groups))


class Written(NamedTuple):
    """A record as bytes."""

    pieces: list[memoryview]  # to be written in order
    size: int  # bytes
    digest: bytes


class DamagedError(Exception):
    """A file differs from what was written; the message says where."""


class FormatError(DamagedError):
    """A record has the format of another release; the message says which."""


def encode(
    number: int,
    about: dict[str, Any],
    contents: Sequence[Sequence[np.ndarray] | None],
    parent: bytes,
    on_disk: int = 0,
    file_size: int = 0,
) -> Written:
    """Encode a record as pieces to be written in order.

    The pieces of a large record are views of the arrays.

    Args:
      number: number of the record.
      about: its description, for JSON.
      contents: its arrays in groups; None for a group that is not written.
      parent: digest of the record before.
      on_disk: see `Head`.
      file_size: see `Head`.
    """
    flat: list[np.ndarray] = []
    described: list[tuple[str, Any] | None] = []
    for content in contents:
        if content is None:
            described.append(None)
            continue
        leaves = [[array.dtype.name, array.shape] for array in content]
        arrays = [_flat(array) for array in content]
        described.append((content_digest(leaves, arrays).hex(), leaves))
        flat += arrays
    text = _json([about, described])
    pieces = [memoryview(text)]
    end = _pad(pieces, _HEAD.size + len(text))
    for array in flat:
        pieces.append(array.data)
        end = _pad(pieces, end + array.nbytes)
    head = Head(_MAGIC, FORMAT, len(text), end, number, on_disk, file_size, parent, b"")
    digest = _digest(head, text)
    pieces.insert(0, memoryview(_HEAD.pack(*head._replace(digest=digest))))
    if end <= _SMALL:
        pieces = [memoryview(b"".join(pieces))]
    return Written(pieces, end, digest)


def read(
    file: int,
    position: int,
    end: int,
    *,
    is_chain: bool = False,
    with_arrays: bool = True,
) -> Record | None:
    """Read the record at a position of an open file; None if it is not complete.

    Args:
      file: file descriptor.
      position: position of the record, in bytes.
      end: size of the file, in bytes.
      is_chain: whether the records of the file have no arrays.
      with_arrays: whether the arrays are read and checked.

    Raises:
      FormatError: another release wrote the record.
    """
    head = _head(os.pread(file, _HEAD.size, position), f" at byte {position}")
    if head is None:
        return None
    without_arrays = _aligned(_HEAD.size + head.about)
    size = without_arrays if is_chain else head.size
    if head.size < without_arrays or size > end - position:
        return None
    wanted = size if with_arrays else without_arrays
    raw = np.empty(wanted - _HEAD.size + _ALIGNMENT, np.uint8)
    begin = (_HEAD.size - raw.ctypes.data) % _ALIGNMENT
    raw = raw[begin : begin + wanted - _HEAD.size]
    if not _fill(file, raw.data, position + _HEAD.size):
        return None
    text = raw[: head.about].tobytes()
    if head.digest != _digest(head, text):
        return None
    gaps = [slice(head.about, without_arrays - _HEAD.size)]
    try:
        about, described = json.loads(text)
        contents = [_content(each) for each in described]
        if with_arrays and not is_chain:
            contents = _with_arrays(contents, raw, gaps)
    except (TypeError, ValueError):  # not of this format, or damaged
        return None
    if any(raw[gap].any() for gap in gaps):
        return None
    head_and_about = _HEAD.pack(*head) + text
    return Record(
        head.number,
        about,
        contents,
        head.parent,
        head.digest,
        size,
        head.file_size,
        head_and_about.ljust(without_arrays, b"\0"),
    )


def read_all(
    file: int,
    number: int,
    cut_off: Callable[[int], None],
    *,
    is_chain: bool = False,
    with_arrays: bool = True,
) -> Iterator[Record]:
    """Yield the records of an open file, each of which names the one before.

    Args:
      file: file descriptor.
      number: number of the first record.
      cut_off: called with the number of bytes after the last complete record, if an
        incomplete write follows it.
      is_chain: see `read`.
      with_arrays: see `read`.

    Raises:
      DamagedError: a record that was on disk cannot be read, and later ones can; or a
        record does not name the one before.
      FormatError: another release wrote the file.
    """
    position, parent = 0, None
    how = {"is_chain": is_chain, "with_arrays": with_arrays}
    while True:
        end = os.fstat(file).st_size
        while (record := read(file, position, end, **how)) is not None:
            if record.number != number:
                raise DamagedError(
                    f"record {number} is missing at byte {position}, which has record "
                    f"{record.number}"
                )
            check_parent(record, parent)
            yield record
            parent = record.digest
            number += 1
            position += record.size
        left, later = _search(file, position, end)
        if later is None:
            break
        # A center may have written the record since it was looked for.
        if read(file, position, end, **how) is None:
            raise DamagedError(
                f"record {number} at byte {position} is damaged, but record {later} "
                "after it is complete"
            )
    if left:
        cut_off(left)


def _search(file: int, position: int, end: int) -> tuple[int, int | None]:
    """Look for records after a position where none can be read.

    Returns:
      The number of bytes that were written after the position; and the number of a
      later, complete record that says that the position was on disk, or None.
    """
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
                return left, later.number
    return left, None


def heads(file: int, *, is_chain: bool) -> Iterator[Head]:
    """Yield the heads of an open file's records, without checking the records.

    Raises:
      FormatError: another release wrote the file.
    """
    position = 0
    while True:
        raw = os.pread(file, _HEAD.size, position)
        head = _head(raw, f" at byte {position}")
        if head is None:
            return
        yield head
        without_arrays = _aligned(_HEAD.size + head.about)
        position += without_arrays if is_chain else max(head.size, without_arrays)


def check_parent(record: Record, parent: bytes | None) -> None:
    """Check that a record names the one before it, whose digest may be unknown (None).

    Raises:
      DamagedError: it names another one.
    """
    if parent is not None and record.parent != parent:
        raise DamagedError(
            f"record {record.number} does not continue the chain: it follows a record "
            f"with digest {record.parent.hex()}, but record {record.number - 1} has "
            f"{parent.hex()}"
        )


def content_digest(leaves: Sequence[Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Return a digest of arrays that uses sums, ten times as fast as CRC-32.

    The 64-bit sums are over pages and over columns of pages. They always detect changes
    of up to three words, lost pages and reordered pages; other random damage is missed
    with a probability of 2**-64. They are no protection against forged arrays.

    Args:
      leaves: dtype and shape of each array.
      arrays: the arrays as bytes: flat, contiguous and of dtype uint8.
    """
    digest = hashlib.blake2b(_json(leaves), digest_size=_DIGEST_SIZE)
    for array in arrays:
        paged = len(array) // _PAGE * _PAGE  # bytes in complete pages
        if paged:
            pages = array[:paged].view(np.uint64).reshape(-1, _PAGE // 8)
            digest.update(pages.sum(axis=1).data)
            digest.update(pages.sum(axis=0).data)
        digest.update(array[paged:].data)
    return digest.digest()


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


def _head(raw: bytes, where: str | None = None) -> Head | None:
    """Return the head of a record; None if there is none.

    Args:
      raw: the first bytes of the record.
      where: its place, for the error of a record of another format; None if a record
        of another format counts as none.
    """
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        return None
    _, found = _FORMAT_OF.unpack_from(raw)
    if found != FORMAT:
        if where is None:
            return None
        raise FormatError(
            f"the record{where} has format {found}, and this release reads {FORMAT}; "
            "or the record is damaged"
        )
    return Head(*_HEAD.unpack(raw))


def _content(described: Any) -> Content | None:
    """Return what the JSON of a record says of a content."""
    if described is None:
        return None
    digest, leaves = described
    return Content(bytes.fromhex(digest), [(d, tuple(s)) for d, s in leaves], None)


def _with_arrays(
    contents: Sequence[Content | None], raw: np.ndarray, gaps: list[slice]
) -> list[Content | None]:
    """Return contents with their arrays, which are views; add the gaps between them.

    Args:
      contents: the contents without arrays.
      raw: the record after its head.
      gaps: the gap after the JSON.

    Raises:
      ValueError: the arrays differ from those that were written.
    """
    at, found = gaps[0].stop, list[Content | None]()
    for content in contents:
        if content is None:
            found.append(None)
            continue
        flat, arrays = [], []
        for name, shape in content.leaves:
            dtype = np.dtype(name)  # including bfloat16, which importing JAX registers
            end = at + math.prod(shape) * dtype.itemsize
            flat.append(raw[at:end])
            arrays.append(flat[-1].view(dtype).reshape(shape))
            gaps.append(slice(end, at := end + -(end + _HEAD.size) % _ALIGNMENT))
        leaves = [[name, list(shape)] for name, shape in content.leaves]
        if content_digest(leaves, flat) != content.digest:
            raise ValueError("the digest of the arrays is another one")
        found.append(content._replace(arrays=arrays))
    if at != len(raw):
        raise ValueError("the record has another size than its arrays")
    return found


def _json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def _fill(file: int, buffer: memoryview, position: int) -> bool:
    while len(buffer):
        read = os.preadv(file, [buffer], position)
        if not read:
            return False
        buffer, position = buffer[read:], position + read
    return True


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT


def _pad(pieces: list[memoryview], end: int) -> int:
    gap = -end % _ALIGNMENT
    if gap:
        pieces.append(_ZEROS[:gap])
    return end + gap


def _flat(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digest(head: Head, text: bytes) -> bytes:
    without_digest = _HEAD.pack(*head)[:-_DIGEST_SIZE]
    return hashlib.blake2b(without_digest + text, digest_size=_DIGEST_SIZE).digest()
