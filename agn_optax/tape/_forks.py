"""A center that goes on from a recorded version."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax.center import Asynchronous, Ledger, Limits, Origin, write_fork
from agn_optax.rules import Rule
from agn_optax.tape._tape import Tape

PyTree = Any


class Fork(NamedTuple):
    """A center that was written to a directory."""

    path: pathlib.Path
    center_id: str  # new, so workers of the recorded center start again
    version: int
    parent: tuple[int, str]  # as `Tape.parent`


def check_new(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Return the path of a directory that is missing or empty.

    Raises:
      InvalidArgumentError: it has files, or is a file.
    """
    path = pathlib.Path(directory)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise errors.InvalidArgumentError(
            f"{path} must be a new or an empty directory, and it has files"
        )
    return path


def fork(
    tape: Tape,
    rule: Rule,
    directory: str | os.PathLike[str],
    version: int | None = None,
    seconds: float | None = None,
    *,
    params: PyTree = None,
    progress: Callable[[int], None] | None = None,
) -> Fork:
    """Write a center that goes on from a recorded version, for a `Journal`.

    The center has a new id, and no worker is registered. Its chain begins with the last
    record that both have. The first process that continues it may have another center
    optimizer, whose state is then new, and other modes and limits.

    Args:
      tape: the tape.
      rule: the rule of the recorded center.
      directory: directory for the center, new or empty.
      version: the version; None for the newest one.
      seconds: seconds since the center began, instead of a version.
      params: parameters with the containers to use, see `Tape.replay`.
      progress: called with the number of each record.

    Raises:
      InvalidArgumentError: the tape does not have the version, or the directory has
        files.
      RuleMismatchError: the center has another rule.
      DurabilityError: the version cannot be computed, or the directory cannot be
        written.

    Example:
      >>> import tempfile, jax.numpy as jnp, agn_optax
      >>> Journal = agn_optax.center.Journal
      >>> rule = agn_optax.rules.downpour()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     journal = Journal(f"{folder}/a", keep="contributions")
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=journal)
      ...     sent = agn_optax.center.Submission(1, jnp.ones(2), anchor_version=0)
      ...     _ = center.join("worker-0").exchange(sent)
      ...     center.close()
      ...     tape = agn_optax.tape.read(f"{folder}/a")
      ...     _ = agn_optax.tape.fork(tape, rule, f"{folder}/b", version=0)
      ...     center = agn_optax.LocalCenter(rule, durability=Journal(f"{folder}/b"))
      ...     print(center.pull().params, center.version)
      ...     center.close()
      [1. 1.] 0
    """
    path = check_new(directory)
    found = tape.find(version, seconds, progress=progress)
    state = tape.replay(rule, found.version, params=params, progress=progress)
    ledger = Ledger(Asynchronous(), limits=Limits(max_workers=None), barrier=0)
    for saved in tape.ledgers(found.number):
        ledger.restore(saved, time.monotonic(), is_new_id=True)
    origin = Origin(found.number, found.digest, found.time)
    center_id = write_fork(path, rule, state, ledger.state_to_save(), origin)
    parent = found.number, found.digest.hex()
    return Fork(path, center_id, found.version, parent)
