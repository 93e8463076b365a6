"""A copy of a center on disk, also while a process keeps it there."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._directory import Directory, reserve
from agn_optax.center.durability._found import Found, explained, this_boot
from agn_optax.center.durability._records import Record

T = TypeVar("T")
_TRIES = 20


def backup(directory: str | os.PathLike[str], to: str | os.PathLike[str]) -> int:
    """Copies the center that is kept in a directory into another one.

    Whoever keeps it there may go on: the copy has at least what had been answered when
    this was called, as far as its durability had promised that. All of it is read, and
    the copy is read again. For its workers a center that goes on from a copy is another
    one, as there may have been more.

    Args:
      directory: of a `Journal` or of `Snapshots`.
      to: where the copy goes: a directory that is empty, or not there yet.

    Returns:
      The version of the center in the copy.

    Raises:
      InvalidArgumentError: there is something in ``to``.
      DurabilityError: there is no center, it is damaged, or the copy cannot be written.

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kept, copy = pathlib.Path(folder, "kept"), pathlib.Path(folder, "copy")
      ...     durability = agn_optax.center.Journal(kept)
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=durability)
      ...     _ = center.join("w").exchange(1, jnp.ones(2), anchor_version=0)
      ...     version = agn_optax.center.backup(kept, copy)
      ...     center.close()
      ...     durability = agn_optax.center.Journal(copy)
      ...     center = agn_optax.LocalCenter(rule, durability=durability)
      ...     print(version, center.pull().params)
      ...     center.close()
      1 [0. 0.]
    """
    to = pathlib.Path(to)
    with explained(f"cannot write to {to}"):
        if to.is_dir() and any(to.iterdir()):
            raise errors.InvalidArgumentError(
                f"{to} is not empty: back up into a directory of its own"
            )
    return settled(directory, lambda: _try(directory, to))


def settled(directory: str | os.PathLike[str], read: Callable[[], T]) -> T:
    """What ``read`` makes of a directory that somebody may be writing to meanwhile."""
    for tries in itertools.count(1):
        before = _state(directory)
        try:
            return read()
        except errors.DurabilityError:
            # What was read may have been replaced by something newer meanwhile.
            if tries == _TRIES or _state(directory) == before:
                raise
    raise AssertionError


def kept_records(source: Found, snapshot: Record) -> Iterator[Record]:
    """What happened after a snapshot, as far as that was promised to be there.

    Raises:
      DurabilityError: some of it is not.
    """
    number, kept, promise = snapshot.number, math.inf, source.promise
    if promise is not None and promise.boot == this_boot():
        # There are exactly so many, or somebody is in the middle of writing the rest.
        kept = promise.kept
    if number < kept:
        for record in source.replay(number):
            number = record.number + 1
            yield record
            if number >= kept:
                break
    source.lost(number)


def _try(directory: str | os.PathLike[str], to: pathlib.Path) -> int:
    """Copies all or nothing; returns the version."""
    source = Found(directory)
    if source.newest() is None:
        raise errors.DurabilityError(f"there is no center in {source.path}")
    with (
        explained(f"cannot write to {to}"),
        contextlib.closing(Directory(to)) as target,
    ):
        try:
            _copy(source, target)
            return _version(Found(to))
        except BaseException:
            for each in to.iterdir():
                each.unlink()
            raise


def _copy(source: Found, target: Directory) -> None:
    """The snapshot, by which the copy is known to be whole, comes last."""
    snapshot = source.load()
    assert snapshot is not None
    number = snapshot.number
    records = kept_records(source, snapshot)
    if (first := next(records, None)) is not None:
        file, size = target.begin_journal(number)
        try:
            end = 0
            for record in itertools.chain([first], records):
                pieces, more = _records.encode(*record[:3], on_disk=end, file_size=size)
                if end + more > size:
                    size = reserve(file, size, end + more)
                _records.write(file, pieces, end)
                end, number = end + more, record.number + 1
            os.fsync(file)
        finally:
            os.close(file)
    target.make_promise("backup", number)
    target.save(*snapshot[:3])


def _version(copy: Found) -> int:
    """Of the center in a copy, all of which is read."""
    snapshot = copy.load()
    assert snapshot is not None
    version, number = snapshot.about["version"], snapshot.number
    for record in copy.replay(number):
        version += bool(record.about["staleness"])
        number = record.number + 1
    copy.lost(number)
    return version


def _state(directory: str | os.PathLike[str]) -> object:
    """What changes whenever files do."""
    try:
        found = Found(directory)
        return found.newest(), found.promise
    except errors.DurabilityError as error:  # the lock is being written
        return str(error)
