"""Atomic writes of files."""

from __future__ import annotations

import os
import pathlib
import tempfile


def write_whole(path: pathlib.Path, text: str, mode: int = 0o600) -> None:
    """Write a file atomically: readers see the old text or the whole new one.

    Args:
      path: path of the file, in an existing folder.
      text: the new text; it is synced to disk before it replaces the old one.
      mode: permission bits of the file. No other user can read it before they are set.

    Raises:
      OSError: the file cannot be written. No temporary file is left behind.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    new = pathlib.Path(temporary)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.chmod(mode)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
