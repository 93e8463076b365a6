"""The contents of a lock file, and the opening of files with errors that name them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from agn_optax import errors
from agn_optax.center.durability import _records

RESTORE_BACKUP = (
    "Put back a copy of the whole directory without its lock, or begin with an empty "
    "one"
)
RESTORE_OR_REMOVE_LOCK = (
    "Put back a copy of the whole directory without its lock; or remove the lock here, "
    "and the center continues from the remaining records. In both cases it has a new "
    "id, so that its workers start again"
)
_OTHER_RELEASE = (
    "Continue with the release that wrote it; or save the center's parameters with "
    "that release, and begin with them in an empty directory"
)
_LOCK_SIZE = 64  # bytes

# The guarantee for records beyond the number in the lock. "new": there are none, and
# perhaps no snapshot yet. "closed": there are none. "journal": a record is on disk
# before its exchange is answered.
Kind = Literal["new", "closed", "journal"]


class Lock(NamedTuple):
    """The contents of a lock file."""

    kind: Kind
    num_records: int  # number of records that were on disk

    def to_bytes(self) -> bytes:
        """Return the contents of the file."""
        text = " ".join(map(str, self))
        checksum = f"{zlib.crc32(text.encode()):08x}"
        return f"{text} {checksum}".ljust(_LOCK_SIZE - 1).encode() + b"\n"


def read_lock(path: pathlib.Path) -> Lock | None:
    """Return the contents of a lock file; None if it is missing or empty.

    Raises:
      DurabilityError: the lock cannot be read, or is damaged.
    """
    with disk_errors(f"cannot read {path}"):
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raw = b""
    # The file was created, but its contents were lost in a power failure.
    if not raw.strip(b"\0"):
        return None
    words = raw.decode("ascii", "replace").split()
    if len(words) == 3 and words[0] in get_args(Kind) and words[1].isdecimal():
        lock = Lock(words[0], int(words[1]))  # type: ignore[arg-type]
        if lock.to_bytes() == raw:
            return lock
    raise errors.DurabilityError(f"{path} is damaged. {RESTORE_OR_REMOVE_LOCK}")


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a file for reading; name it in errors."""
    try:
        with (
            disk_errors(f"cannot read {path}"),
            open_file(path, os.O_RDONLY) as file,
        ):
            yield file
    except _records.FormatError as error:
        raise errors.DurabilityError(f"{path}: {error}. {_OTHER_RELEASE}") from None
    except _records.DamagedError as error:
        raise errors.DurabilityError(f"{path}: {error}. {RESTORE_BACKUP}") from None


@contextlib.contextmanager
def open_file(path: str | os.PathLike[str], flags: int) -> Iterator[int]:
    """Open a file for the duration of the context."""
    file = os.open(path, flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise errors of the operating system as `DurabilityError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, errors.DurabilityError):
            raise
        raise errors.DurabilityError(f"{what}: {error}") from error
