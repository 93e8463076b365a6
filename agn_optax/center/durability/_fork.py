"""The directory of a center that goes on from a version of another one."""

from __future__ import annotations

import os
import uuid
from typing import Any, NamedTuple

from agn_optax.center._store import CenterState
from agn_optax.center.durability._directory import Directory
from agn_optax.center.durability._files import disk_errors
from agn_optax.center.durability._replay import snapshot_of
from agn_optax.rules import Rule


class Origin(NamedTuple):
    """The beginning of a fork: after a record of its parent."""

    number: int  # number of the parent's records up to it
    digest: bytes  # of the last of them; the parent's center id if there are none
    time: float  # s, since the parent began


def write_fork(
    path: str | os.PathLike[str],
    rule: Rule,
    state: CenterState,
    ledger: dict[str, Any],
    origin: Origin,
) -> str:
    """Write a center with a new id to a directory; return the id.

    The process that first continues it may have another rule, if workers do the same
    under both.

    Args:
      path: path of the directory.
      rule: the parent's rule.
      state: the center's state.
      ledger: the ledger's state, in which all sessions have ended.
      origin: where the fork begins.

    Raises:
      DurabilityError: the directory cannot be written.
    """
    center_id = uuid.uuid4().hex
    about, arrays = snapshot_of(
        state,
        rule,
        center_id=center_id,
        time=origin.time,
        keep=None,
        ledger=ledger,
        chief=None,
        is_fork=True,
        parent=[origin.number, origin.digest.hex()],
    )
    directory = Directory(path)
    try:
        with disk_errors(f"cannot write to {path}"):
            directory.save(origin.number, about, arrays, origin.digest)
            directory.write_lock("closed", origin.number)
    finally:
        directory.close()
    return center_id
