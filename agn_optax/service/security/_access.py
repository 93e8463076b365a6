"""Authentication and authorization: tokens and roles.

A server has one `Authenticator` for all transports. It turns the credentials of a call
into a `Caller`, and the servicer checks the `Caller` before it does anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools
import os
import pathlib
import secrets
from collections.abc import Hashable

from agn_optax import errors

_OBSERVER = frozenset({"Describe", "Status", "Health"})
_READER = _OBSERVER | {"Pull"}
_WORKER = _READER | {"Exchange", "Alive", "Leave"}
# Calls that each role may make.
ROLES = {
    "observer": _OBSERVER,
    "reader": _READER,
    "worker": _WORKER,
    "chief": _WORKER | {"Initialize"},
    "operator": _READER | {"Drain"},
}
ANY_NAME = "*"
KEY_SIZE = 16  # bytes
_MIN_TOKEN = 16  # characters


@dataclasses.dataclass(frozen=True)
class Caller:
    """A caller's identity and permissions.

    Attributes:
      description: text for error messages; contains no secret.
      calls: names of the calls that the caller may make.
      name: name of the only worker that the caller may act for; None for any.
      token: token of the caller; b"" for none.
      host: network address of the caller.
    """

    description: str
    calls: frozenset[str]
    name: str | None = None
    token: bytes = dataclasses.field(default=b"", repr=False)
    host: str = ""

    @property
    def key(self) -> Hashable:
        """The caller's token; its host if it has none."""
        return self.token or self.host

    def check(self, call: str, worker: str | None = None) -> None:
        """Check that the caller may make a call on behalf of a worker.

        Raises:
          NotAllowedError: the caller may not; the message says what is missing.
        """
        if call not in self.calls:
            roles = [role for role, calls in ROLES.items() if call in calls]
            raise errors.NotAllowedError(
                f"{call} needs the role {' or '.join(roles)}, and the caller is "
                f"{self.description}"
            )
        if worker is not None and self.name not in (None, worker):
            raise errors.NotAllowedError(
                f"only worker {worker!r} itself may make this call, and the caller is "
                f"{self.description}: give the worker the caller's name, Worker(..., "
                f"name={self.name!r}), which is service.environment().worker if "
                "agn-optax launch has started it"
            )


EVERYBODY = Caller("anybody", frozenset().union(*ROLES.values()))


class Access:
    """Access control of a center: `agn_optax.service.Security(access=...)`.

    A caller is authenticated by a token, which stands in a line of a file,

        # roles         name      token
        chief           worker-0  8c1f...
        worker          worker-1  90ab...
        worker          worker-1  d2e7...   # a second token of this worker
        observer,reader *         77d0...   # * is any name

    | role | may |
    | --- | --- |
    | observer | see status and health |
    | reader | also pull the parameters |
    | worker | also join, exchange and leave, in its own name |
    | chief | also give the center its first parameters |
    | operator | do what a reader may, and drain the center |

    Args:
      *tokens: files with such lines, or such lines as bytes. The files are read once.

    Raises:
      InvalidArgumentError: a file cannot be read, or a line is not valid.

    Example:
      >>> import agn_optax, agn_optax.service
      >>> access = agn_optax.service.Access(b"reader * 0123456789abcdef")
      >>> rule = agn_optax.rules.downpour()
      >>> security = agn_optax.service.Security(access=access)
      >>> with agn_optax.service.serve(rule, security=security) as server:
      ...     center = agn_optax.service.connect(
      ...         server.address, rule, token="0123456789abcdef"
      ...     )
      ...     try:
      ...         center.join("worker-0")
      ...     except agn_optax.errors.NotAllowedError as error:
      ...         print(error)
      ...     center.close()
      Exchange needs the role worker or chief, and the caller is reader under any name
    """

    def __init__(self, *tokens: bytes | str | os.PathLike[str]) -> None:
        for source in tokens:
            if not isinstance(source, bytes | str | os.PathLike):
                raise errors.InvalidTypeError(
                    f"tokens must be files, or bytes, got {type(source).__name__}"
                )
        self._tokens = tokens
        self._callers: dict[bytes, Caller] = {}  # by the hashes of their tokens
        for source in tokens:
            _add_callers(source, self._callers)

    def caller(self, token: bytes, host: str = "") -> Caller:
        """Return the caller with a token.

        Args:
          token: the caller's token; b"" for none.
          host: network address of the caller.

        Raises:
          NotAllowedError: no token was given, or it is unknown.
        """
        if not token:
            raise _unknown(
                "this center requires a token: give connect(token=...), "
                "AGN_OPTAX_TOKEN or AGN_OPTAX_TOKEN_FILE (--token-file)"
            )
        # The time that it takes to look up a hash reveals nothing about the token.
        found = self._callers.get(_hash(token))
        if found is None:
            raise _unknown("this center does not know that token")
        return dataclasses.replace(found, token=token, host=host)

    def __repr__(self) -> str:  # without the tokens themselves: it may be logged
        names = ["bytes" if isinstance(t, bytes) else str(t) for t in self._tokens]
        return f"Access({', '.join(names)})"


class Authenticator:
    """The authenticator of a server, for all transports.

    A connection without gRPC begins with a key. A caller is given its key in an earlier
    call over gRPC, and the key stands for the token of that call.

    Args:
      access: the access control; None admits everybody.
    """

    def __init__(self, access: Access | None = None) -> None:
        self.access = access
        self._secret = secrets.token_bytes(32)
        self._tokens: dict[bytes, bytes] = {}  # by the hashes of their keys

    def caller(self, token: bytes = b"", host: str = "") -> Caller:
        """Return the caller at a host: see `Access.caller`."""
        if self.access is None:
            return dataclasses.replace(EVERYBODY, host=host)
        return self.access.caller(token, host)

    def issue_key(self, caller: Caller) -> bytes:
        """Return the caller's key."""
        key = hmac.digest(self._secret, caller.token, "sha256")[:KEY_SIZE]
        self._tokens[_hash(key)] = caller.token
        return key

    def caller_of_key(self, key: bytes, host: str = "") -> Caller:
        """Return the caller that a key was issued to.

        Args:
          key: the key, as it was received.
          host: network address that the key came from.

        Raises:
          NotAllowedError: the key is unknown.
        """
        token = self._tokens.get(_hash(key))
        if token is None:
            raise _unknown("this center has not issued that key")
        return self.caller(token, host)


def _add_callers(
    source: bytes | str | os.PathLike[str], callers: dict[bytes, Caller]
) -> None:
    """Add the callers of a source, by the hashes of their tokens.

    Raises:
      InvalidArgumentError: the source cannot be read, or is not valid.
    """
    name = _name(source)
    try:
        if isinstance(source, bytes):
            content = source
        else:
            content = pathlib.Path(source).read_bytes()
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise errors.InvalidArgumentError(f"cannot read {name}: {reason}") from None
    before = len(callers)
    for number, line in enumerate(lines, 1):
        location = f"line {number} of {name}"
        words = list(
            itertools.takewhile(lambda word: not word.startswith("#"), line.split())
        )
        if not words:
            continue
        if len(words) != 3:
            raise errors.InvalidArgumentError(
                f"{location} must have roles, a name and a token, got "
                f"{len(words)} words"
            )
        roles, worker, token = words
        if problem := token_problem(token):
            raise errors.InvalidArgumentError(f"the token in {location} {problem}")
        key = _hash(token.encode())
        if key in callers:
            raise errors.InvalidArgumentError(
                f"{location}: another line has the same token; give each line its own "
                "token, and several roles as in chief,operator"
            )
        callers[key] = _caller(roles.split(","), worker, location)
    if len(callers) == before:  # the file may be half written
        raise errors.InvalidArgumentError(
            f"{name} must have at least one token, got none"
        )


def _name(source: bytes | str | os.PathLike[str]) -> str:
    return "the tokens" if isinstance(source, bytes) else str(source)


def token_problem(token: str) -> str:
    """Return why a token is not valid; "" if it is valid."""
    if not (token.isascii() and token.isprintable()) or " " in token:
        return "must consist of printable ASCII characters without spaces"
    if len(token) < _MIN_TOKEN:
        return (
            f"must have at least {_MIN_TOKEN} characters, got {len(token)}; `openssl "
            "rand -hex 32` makes one"
        )
    return ""


def _caller(roles: list[str], name: str, location: str) -> Caller:
    if not set(roles) <= set(ROLES):
        raise errors.InvalidArgumentError(
            f"the roles in {location} must be some of {', '.join(ROLES)}, got "
            f"{','.join(roles)!r}"
        )
    calls = frozenset().union(*(ROLES[role] for role in roles))
    text = ", ".join(role for role in ROLES if role in roles)
    if name == ANY_NAME:
        return Caller(f"{text} under any name", calls)
    return Caller(f"{text} {name!r}", calls, name)


def _unknown(reason: str) -> errors.NotAllowedError:
    error = errors.NotAllowedError(reason)
    error.is_known = False
    return error


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
