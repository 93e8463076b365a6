"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import pathlib
import tempfile


def write_whole(path: pathlib.Path, text: str, mode: int = 0o600) -> None:
    """Writes a file in one step: who reads meanwhile reads what was there before.

    Args:
      path: of the file, whose folder is there.
      text: what is to be in it, on the disk when this returns.
      mode: who may read it; nobody else ever can.

    Raises:
      OSError: it cannot be written; nothing is left behind.
    """
    descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    new = pathlib.Path(made)
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
