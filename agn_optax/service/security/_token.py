"""The token of this end: given, from the environment, or from this machine.

A center that generates its own token leaves it in a file. The user who started the
center can therefore connect on the same machine without giving a token.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import urllib.parse
from collections.abc import Callable, Iterator

from agn_optax import errors
from agn_optax._internal import write_whole
from agn_optax.service import _address
from agn_optax.service.security._access import token_problem

Token = str | os.PathLike[str] | None
# Environment variables: a client's token, a file with it, and a server's tokens, in
# lines as in `Access`.
TOKEN, TOKEN_FILE = "AGN_OPTAX_TOKEN", "AGN_OPTAX_TOKEN_FILE"
TOKENS = "AGN_OPTAX_TOKENS"


def source(given: Token, address: Callable[[], str]) -> Callable[[], str | None]:
    """Return a callable that returns the current token for a center.

    Args:
      given: a token, or the path of a file with one; None looks in the environment and
        then on this machine.
      address: returns the current address of the center.

    Raises:
      InvalidArgumentError: the token is not valid, or the file cannot be read.
    """
    if given is None and (token := os.environ.get(TOKEN)):
        return _make_constant(token.strip(), f"the token in {TOKEN}")
    if given is None and (path_of_variable := os.environ.get(TOKEN_FILE)):
        given = pathlib.Path(path_of_variable)
    if isinstance(given, os.PathLike):
        read = _read_file(pathlib.Path(given))
        return lambda: read
    if given is not None:
        if not isinstance(given, str):
            raise errors.InvalidTypeError(
                "token must be a str, or the path of a file as a pathlib.Path, got "
                f"{type(given).__name__}"
            )
        return _make_constant(given, "the token that was given")
    return lambda: _left_on_this_machine(address())


def generate() -> str:
    """Return a new token."""
    return secrets.token_hex(32)


def for_address(address: str) -> str:
    """Return the token for a center that is about to listen at an address.

    If the last center at that address left its token, this one uses it again, because
    the workers reconnect with it, perhaps before they could read a new one.
    """
    if _address.is_fixed(address):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            previous = (_folder() / _file_name(address)).read_text()
            if not token_problem(previous):
                return previous
    return generate()


@contextlib.contextmanager
def token_file(
    address: str, token: str, *, stays: bool = False
) -> Iterator[pathlib.Path]:
    """Keep a center's token in a file for this user's programs, within the block.

    Args:
      address: address of the center.
      token: token of the center.
      stays: whether the file stays after the block, for the next process at that
        address.

    Raises:
      OSError: no folder that only this user can read could be made.
    """
    path = _folder() / _file_name(address)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)  # fails if the folder belongs to another user
    write_whole(path, token)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            # The next center at that address may have left another token.
            if not stays and path.read_text() == token:
                path.unlink()


def _make_constant(token: str, description: str) -> Callable[[], str]:
    if problem := token_problem(token):
        raise errors.InvalidArgumentError(f"{description} {problem}")
    return lambda: token


def _read_file(path: pathlib.Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise errors.InvalidArgumentError(
            f"cannot read the token in {path}: {reason}"
        ) from None
    _make_constant(token, f"the token in {path}")
    return token


def _left_on_this_machine(address: str) -> str | None:
    """Return the token that a center on this machine has left; None if none."""
    if not _address.is_local(address):
        return None
    candidates = [address]
    if not address.startswith("unix:"):
        port = address.rpartition(":")[2]
        candidates += [f"{host}:{port}" for host in _address.EVERYWHERE]
    for candidate in candidates:
        with contextlib.suppress(OSError):
            return (_folder() / _file_name(candidate)).read_text()
    return None


def _folder() -> pathlib.Path:
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        return pathlib.Path(folder, "agn-optax")
    return pathlib.Path.home() / ".local/state/agn-optax"


def _file_name(address: str) -> str:
    """Return the name of the token file of a center at an address."""
    if address.startswith("unix:"):
        address = f"unix:{pathlib.Path(_address.path(address)).absolute()}"
    host, _, port = address.rpartition(":")
    if host == "localhost":
        address = f"127.0.0.1:{port}"
    return urllib.parse.quote(address, safe="")
