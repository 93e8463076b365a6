"""A center's address in a file, for workers of one that may come back elsewhere.

What runs a center on some host or other (SLURM, say) has a disk that all hosts share.
A server leaves its address there, and whoever is given ``file:PATH`` reads it again
whenever a call begins, so that a center that was moved is found.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
from collections.abc import Iterator

from agn_optax import errors
from agn_optax._internal import write_whole
from agn_optax.service import _address


def path_of(address: str) -> pathlib.Path | None:
    """The file that an address names; None if it is where the center itself is."""
    path = address.removeprefix("file:")
    return None if path == address else pathlib.Path(path)


def check_reachable(address: object) -> str:
    """``address`` if a center can be reached by it: one of `_address`, or a file's.

    Raises:
      InvalidTypeError, InvalidArgumentError: it is none.
    """
    if isinstance(address, str) and address.startswith("file:"):
        if not address.removeprefix("file:"):
            raise errors.InvalidArgumentError(
                f'"file:" needs the path of a file with an address, got {address!r}'
            )
        return address
    return _address.check(address)


def read(path: pathlib.Path) -> str:
    """The address that a center has left there.

    Raises:
      CenterUnreachableError: there is none, or not yet.
    """
    try:
        said = path.read_text().strip()
        return _address.check(said)
    except OSError as error:
        problem = error.strerror or str(error)
    except (UnicodeDecodeError, errors.InvalidArgumentError) as error:
        problem = str(error)
    raise errors.CenterUnreachableError(f"no center has left its address: {problem}")


@contextlib.contextmanager
def published(address: str, path: pathlib.Path) -> Iterator[None]:
    """Meanwhile, and until another one is there, workers find a center by a file.

    Args:
      address: at which the center listens; of one that listens everywhere, the name of
        this host is left.
      path: of the file, which is written whole or not at all.

    Raises:
      InvalidArgumentError: it cannot be written.
    """
    host, _, port = address.rpartition(":")
    if host in _address.EVERYWHERE:
        address = f"{socket.gethostname()}:{port}"
    elif address.startswith("unix:"):
        address = f"unix:{pathlib.Path(_address.path(address)).absolute()}"
    try:
        write_whole(path, address + "\n", mode=0o644)  # it is no secret
    except OSError as error:
        raise errors.InvalidArgumentError(
            f"the center's address cannot be written to {path}: {error.strerror}"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text().strip() == address:  # or the next center's is there
                path.unlink()
