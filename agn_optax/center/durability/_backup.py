"""A backup of a center on disk, which may be in use."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib

from agn_optax import errors
from agn_optax.center.durability import _records
from agn_optax.center.durability._directory import Directory, reserve
from agn_optax.center.durability._files import (
    CenterFiles,
    disk_errors,
    retry_if_changed,
)
from agn_optax.center.durability._records import Record


def backup(directory: str | os.PathLike[str], to: str | os.PathLike[str]) -> int:
    """Copy the center on disk from one directory to another.

    Another process may use the center meanwhile. The copy has at least the exchanges
    that were answered before this call, as far as the durability guarantees that they
    were on disk. Original and copy are read completely, to find damage. A center that
    continues from the copy has a new center id, because the original may have had later
    exchanges.

    Args:
      directory: directory of a `Journal` or of `Snapshots`.
      to: directory of the copy, which must be empty or not exist.

    Returns:
      The version of the center in the copy.

    Raises:
      InvalidArgumentError: ``to`` is not empty.
      DurabilityError: there is no center, its files are damaged, or the copy cannot be
        written.

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     original = pathlib.Path(folder, "original")
      ...     copy = pathlib.Path(folder, "copy")
      ...     durability = agn_optax.center.Journal(original)
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=durability)
      ...     sent = agn_optax.center.Submission(1, jnp.ones(2), anchor_version=0)
      ...     _ = center.join("w").exchange(sent)
      ...     version = agn_optax.center.backup(original, copy)
      ...     center.close()
      ...     durability = agn_optax.center.Journal(copy)
      ...     center = agn_optax.LocalCenter(rule, durability=durability)
      ...     print(version, center.pull().params)
      ...     center.close()
      1 [0. 0.]
    """
    to = pathlib.Path(to)
    with disk_errors(f"cannot write to {to}"):
        if to.is_dir() and any(to.iterdir()):
            raise errors.InvalidArgumentError(
                f"{to} is not empty: back up into a directory of its own"
            )
    return retry_if_changed(directory, lambda: _copy_or_clean_up(directory, to))


def _copy_or_clean_up(directory: str | os.PathLike[str], to: pathlib.Path) -> int:
    """Copy the center and return its version; remove the copy if that fails."""
    source = CenterFiles(directory)
    snapshot = source.load_center()
    with (
        disk_errors(f"cannot write to {to}"),
        contextlib.closing(Directory(to)) as target,
    ):
        try:
            _copy(source, snapshot, target)
            return _version(CenterFiles(to))
        except BaseException:
            for path in to.iterdir():
                path.unlink()
            raise


def _copy(source: CenterFiles, snapshot: Record, target: Directory) -> None:
    """Copy the records, then the snapshot, whose presence marks a complete copy."""
    number = snapshot.number
    records = iter(source.replay_on_disk(snapshot))
    if (first := next(records, None)) is not None:
        file, size = target.begin_journal(number)
        try:
            end = 0
            for record in itertools.chain([first], records):
                pieces, added = _records.encode(*record[:3], end, size)
                if end + added > size:
                    size = reserve(file, size, end + added)
                _records.write(file, pieces, end)
                end, number = end + added, record.number + 1
            os.fsync(file)
        finally:
            os.close(file)
    target.write_lock("backup", number)
    target.save(*snapshot[:3])


def _version(copy: CenterFiles) -> int:
    """Read all of a copy; return the version of its center."""
    snapshot = copy.load_center()
    version: int = snapshot.about["version"]
    for record in copy.replay(snapshot):  # raises if a record is missing
        version += bool(record.about["staleness"])
    return version
