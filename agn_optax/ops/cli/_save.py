"""``--save`` of ``serve`` and ``launch``: parameters as an Orbax checkpoint."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from typing import Any

from agn_optax import errors
from agn_optax._internal import extras

PyTree = Any


def check(to: pathlib.Path, *, is_here: bool = True) -> None:
    """Raise unless a checkpoint can be written at a path.

    Args:
      to: the path.
      is_here: whether the path is on this machine, where making a directory is tried.

    Raises:
      InvalidArgumentError: something exists at the path, or no directory can be made
        there.
      MissingExtraError: Orbax is not installed.
    """
    with contextlib.suppress(OSError):  # a path that cannot be read is reported below
        if to.exists():
            raise errors.InvalidArgumentError(
                f"{to} exists already: a checkpoint needs a directory of its own"
            )
    extras.require("flax", "orbax.checkpoint")
    try:
        if is_here:
            _make_directory_beside(to)
    except OSError as error:
        raise errors.InvalidArgumentError(
            "a checkpoint needs a directory that can be made, got "
            f"{str(to)!r} ({error.strerror}): give one in a folder that can be written"
        ) from None


def write(params: PyTree, to: pathlib.Path) -> None:
    """Write a checkpoint.

    Raises:
      DurabilityError: the checkpoint cannot be written.
    """
    from orbax.checkpoint import v1  # noqa: PLC0415 a heavy, optional dependency

    try:
        # Orbax's threads would wait forever for a directory that it cannot make.
        _make_directory_beside(to)
        v1.save(to.resolve(), params)
    except (OSError, ValueError) as error:
        raise errors.DurabilityError(f"cannot write {to}: {error}") from error


def _make_directory_beside(to: pathlib.Path) -> None:
    """Make the parent directory of a path, and try to make a directory in it.

    Raises:
      OSError: one of these directories cannot be made.
    """
    to = to.resolve()
    to.parent.mkdir(parents=True, exist_ok=True)
    # The name is as long as that of Orbax's own temporary directory.
    prefix = f"{to.name}.agn-optax-tmp-"
    pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=to.parent)).rmdir()
