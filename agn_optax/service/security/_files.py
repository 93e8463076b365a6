"""Files with secrets."""

from __future__ import annotations

import logging
import os
import pathlib
import stat

Path = str | os.PathLike[str]

_log = logging.getLogger("agn_optax")


def warn_if_public(file: Path, what: str) -> None:
    """Log a warning if every user of this machine can read a file with secrets.

    Args:
      file: the file.
      what: description of the secrets for the message, such as "the tokens in".
    """
    try:
        mode = os.stat(file).st_mode  # noqa: PTH116 file may be a str
        is_public = mode & stat.S_IROTH and _can_be_reached(file)
    except OSError:  # reported when the file is read
        return
    if is_public:
        _log.warning(
            "every user of this machine can read %s %s: chmod 600 it, or set the mode "
            "where it is mounted (defaultMode: 0400 of a secret)",
            what,
            file,
        )


def _can_be_reached(file: Path) -> bool:
    """Return whether every user may enter the folders above a file."""
    folders = pathlib.Path(os.path.realpath(file)).parents
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)
