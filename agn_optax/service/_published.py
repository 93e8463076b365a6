"""Address files, by which workers find a center that may restart on another host.

Engines that choose the center's host, such as SLURM, have a disk that all hosts share.
A server writes its address to a file there. A worker that is given ``file:PATH`` reads
the file at the beginning of every call, and so finds a center that has moved.
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
    """Return the path in a ``file:PATH`` address; None for any other address."""
    path = address.removeprefix("file:")
    return None if path == address else pathlib.Path(path)


def check_reachable(address: object) -> str:
    """Return ``address`` if it is an address of a center or a ``file:PATH``.

    Raises:
      InvalidTypeError, InvalidArgumentError: it is neither.
    """
    if isinstance(address, str) and address.startswith("file:"):
        if not address.removeprefix("file:"):
            raise errors.InvalidArgumentError(
                f'"file:" needs the path of a file with an address, got {address!r}'
            )
        return address
    return _address.check(address)


def read(path: pathlib.Path) -> str:
    """Read the address that a center has written to a file.

    Raises:
      CenterUnreachableError: the file is missing, or holds no valid address yet.
    """
    try:
        address = path.read_text().strip()
        return _address.check(address)
    except OSError as error:
        problem = error.strerror or str(error)
    except (UnicodeDecodeError, errors.InvalidArgumentError) as error:
        problem = str(error)
    raise errors.CenterUnreachableError(
        f"no center has published its address: {problem}"
    )


@contextlib.contextmanager
def published(address: str, path: pathlib.Path) -> Iterator[None]:
    """Write a center's address to a file, and remove it at the end of the block.

    The file stays if another center has written its address to it meanwhile.

    Args:
      address: the address at which the center listens. If it listens on all networks,
        this host's name is written instead.
      path: path of the file, which is written atomically.

    Raises:
      InvalidArgumentError: the file cannot be written.
    """
    host, _, port = address.rpartition(":")
    if host in _address.EVERYWHERE:
        address = f"{socket.gethostname()}:{port}"
    elif address.startswith("unix:"):
        address = f"unix:{pathlib.Path(_address.path(address)).absolute()}"
    try:
        write_whole(path, address + "\n", mode=0o644)  # not a secret
    except OSError as error:
        raise errors.InvalidArgumentError(
            f"the center's address cannot be written to {path}: {error.strerror}"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text().strip() == address:  # not that of another center
                path.unlink()
