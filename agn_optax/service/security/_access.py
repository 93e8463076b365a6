"""Authentication and authorization: roles, tokens and certificates.

A server has one `Authenticator` for all transports. It turns the credentials of a call
into a `Caller`, and the servicer checks the `Caller` before it does anything.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import itertools
import logging
import os
import pathlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.x509.oid import NameOID

from agn_optax import errors
from agn_optax.service.security._files import Path, warn_if_public

_OBSERVER = frozenset({"Describe", "Status", "Health"})
_READER = _OBSERVER | {"Pull", "Probe"}
_WORKER = _READER | {"Exchange", "Alive", "Leave"}
# Calls that each role may make.
ROLES = {
    "observer": _OBSERVER,
    "reader": _READER,
    "worker": _WORKER,
    "chief": _WORKER | {"Initialize"},
    "operator": _READER | {"Drain", "Save"},
}
ANY_NAME = "*"
KEY_SIZE = 16  # bytes
_MIN_TOKEN = 16  # characters
_MAX_KEYS = 1024
# Seconds between two checks of the token files, and after one that could not be read:
_CHECK_INTERVAL, _RETRY_INTERVAL = 0.5, 10.0

_log = logging.getLogger("agn_optax")


@dataclasses.dataclass(frozen=True)
class Caller:
    """A caller's identity and permissions.

    Attributes:
      description: text for error messages; contains no secret.
      calls: names of the calls that the caller may make.
      name: name of the only worker that the caller may act for; None for any.
      token, certificate: credentials of the caller; b"" for none.
      host: network address of the caller.
    """

    description: str
    calls: frozenset[str]
    name: str | None = None
    token: bytes = dataclasses.field(default=b"", repr=False)
    certificate: bytes = dataclasses.field(default=b"", repr=False)
    host: str = ""

    @property
    def key(self) -> Hashable:
        """The caller's credentials; its host if it has none."""
        has_credentials = self.token or self.certificate
        return (self.token, self.certificate) if has_credentials else self.host

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


class _Grant(NamedTuple):
    """The roles and the worker's name that a token or a certificate grants."""

    roles: frozenset[str]
    name: str | None

    @property
    def calls(self) -> frozenset[str]:
        return frozenset().union(*(ROLES[role] for role in self.roles))

    def __str__(self) -> str:
        roles = ", ".join(role for role in ROLES if role in self.roles)
        return f"{roles} {'under any name' if self.name is None else repr(self.name)}"


# Callers are looked up again at each message, so they are kept.
@functools.lru_cache(maxsize=1024)
def _caller_by(
    by_token: _Grant | None,
    by_certificate: _Grant | None,
    token: bytes,
    certificate: bytes,
    host: str,
) -> Caller:
    """Return the caller with one or two grants; it may do what all of them allow."""
    grants = {"by token": by_token, "by certificate": by_certificate}
    found = {source: grant for source, grant in grants.items() if grant is not None}
    names = {grant.name for grant in found.values()} - {None}
    description = " and ".join(f"{grant} ({how})" for how, grant in found.items())
    if len(names) > 1:
        raise errors.NotAllowedError(
            "token and certificate belong to different workers: the caller is "
            f"{description}"
        )
    calls = frozenset.intersection(*(grant.calls for grant in found.values()))
    name = names.pop() if names else None
    return Caller(description, calls, name, token, certificate, host)


class Access:
    """Access control of a center: `agn_optax.service.Security(access=...)`.

    A caller is authenticated by a token, by its certificate of mutual TLS, or by both;
    with both, it may do only what both allow. A certificate's subject holds the
    worker's name (CN; * for any) and its roles (OU; worker if there is none). A token
    stands in a line of a file,

        # roles         name      token
        chief           worker-0  8c1f...
        worker          worker-1  90ab...
        worker          worker-1  d2e7...   # a second token, to change one at a time
        observer,reader *         77d0...   # * is any name

    | role | may |
    | --- | --- |
    | observer | see status and health |
    | reader | also pull the parameters, and measure the network path |
    | worker | also join, exchange and leave, in its own name |
    | chief | also give the center its first parameters |
    | operator | do what a reader may, have a snapshot written, and drain the center |

    Args:
      *tokens: files with such lines, or such lines as bytes. The files are read again
        when one changes; if one then cannot be read, an error is logged, and the old
        tokens remain valid. Without any tokens, only certificates are accepted.

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
      (by token)
    """

    def __init__(self, *tokens: bytes | Path) -> None:
        for source in tokens:
            if not isinstance(source, bytes | str | os.PathLike):
                raise errors.InvalidTypeError(
                    f"tokens must be files, or bytes, got {type(source).__name__}"
                )
        self._tokens = tokens
        self._lock = threading.Lock()
        self._stamps: list[Any] = self._stat_files()
        self._grants = _read_grants(tokens)
        self._next_check = time.monotonic() + _CHECK_INTERVAL

    def caller(
        self, token: bytes = b"", certificate: bytes = b"", host: str = ""
    ) -> Caller:
        """Return the caller with a token and a certificate (DER); b"" for none.

        Args:
          token: the caller's token.
          certificate: the caller's certificate.
          host: network address of the caller.

        Raises:
          NotAllowedError: neither was given, one of them is unknown, or they belong to
            different workers.
        """
        if not token and not certificate:
            raise _unknown(
                "this center requires a token: give connect(token=...), "
                "AGN_OPTAX_TOKEN or AGN_OPTAX_TOKEN_FILE (--token-file)"
                if self._tokens
                else "this center requires a certificate"
            )
        by_token = None
        if token:
            # The time that it takes to look up a hash reveals nothing about the token.
            by_token = self._current_grants().get(_hash(token))
            if by_token is None:
                raise _unknown("this center does not know that token")
        by_certificate = _grant_by(certificate) if certificate else None
        return _caller_by(by_token, by_certificate, token, certificate, host)

    def _current_grants(self) -> dict[bytes, _Grant]:
        """Return the grants by the hashes of their tokens, as the files are now."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_check:
                return self._grants
            self._next_check = now + _CHECK_INTERVAL
            stamps = self._stat_files()
            if stamps != self._stamps:
                try:
                    self._grants, self._stamps = _read_grants(self._tokens), stamps
                except errors.InvalidArgumentError as error:
                    self._next_check = now + _RETRY_INTERVAL
                    _log.error("%s; the old tokens remain valid", error)
            return self._grants

    def _stat_files(self) -> list[Any]:
        """Return a value for each file that changes with its content."""
        return [_stamp(file) for file in self._tokens if not isinstance(file, bytes)]

    def __repr__(self) -> str:  # without the tokens themselves: it may be logged
        names = ["bytes" if isinstance(t, bytes) else str(t) for t in self._tokens]
        return f"Access({', '.join(names)})"


class Authenticator:
    """The authenticator of a server, for all transports.

    A connection without gRPC begins with a key. A caller is given its key in an earlier
    call over gRPC, and the key stands for the credentials of that call.

    Args:
      access: the access control; None admits everybody.
    """

    def __init__(self, access: Access | None = None) -> None:
        self.access = access
        self._lock = threading.Lock()
        self._secret = secrets.token_bytes(32)
        # Tokens and certificates by hashes of their keys; the last requested one last.
        self._credentials: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()

    def caller(
        self, token: bytes = b"", certificate: bytes = b"", host: str = ""
    ) -> Caller:
        """Return the caller at a host: see `Access.caller`."""
        if self.access is None:
            return dataclasses.replace(EVERYBODY, host=host)
        return self.access.caller(token, certificate, host)

    def issue_key(self, caller: Caller) -> bytes:
        """Return the caller's key.

        If there are too many keys, the least recently requested one is dropped.
        """
        credentials = caller.token, caller.certificate
        text = b"".join(map(_hash, credentials))
        key = hmac.digest(self._secret, text, "sha256")[:KEY_SIZE]
        with self._lock:
            self._credentials[_hash(key)] = credentials
            self._credentials.move_to_end(_hash(key))
            if len(self._credentials) > _MAX_KEYS:
                self._credentials.popitem(last=False)
        return key

    def has_key(self, key: bytes | None) -> bool:
        """Return whether a key was issued; `caller_of_key` checks if it is valid."""
        return key is not None and _hash(key) in self._credentials

    def caller_of_key(
        self, key: bytes, certificate: bytes | None = None, host: str = ""
    ) -> Caller:
        """Return the caller that a key was issued to.

        Args:
          key: the key, as it was received.
          certificate: certificate of an encrypted connection (DER; b"" for none), which
            must belong to the same caller; None if the connection is not encrypted.
          host: network address that the key came from.

        Raises:
          NotAllowedError: the key is unknown, the credentials that it stands for are no
            longer valid, or the certificate belongs to another caller.
        """
        credentials = self._credentials.get(_hash(key))
        if credentials is None:
            raise _unknown("this center has not issued that key")
        caller = self.caller(*credentials, host)
        if certificate is not None and self.access is not None:
            sender = self.caller(credentials[0], certificate)
            if (sender.name, sender.calls) != (caller.name, caller.calls):
                raise errors.NotAllowedError(
                    f"the key was issued to {caller.description}, and the caller is "
                    f"{sender.description}"
                )
        return caller


def _read_grants(sources: Iterable[bytes | Path]) -> dict[bytes, _Grant]:
    """Return the grants of all sources, by the hashes of their tokens.

    Raises:
      InvalidArgumentError: a source cannot be read, or is not valid.
    """
    grants: dict[bytes, _Grant] = {}
    for source in sources:
        _add_grants(source, grants)
    return grants


def _add_grants(source: bytes | Path, grants: dict[bytes, _Grant]) -> None:
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
    before = len(grants)
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
        if key in grants:
            raise errors.InvalidArgumentError(
                f"{location}: another line has the same token; give each line its own "
                "token, and several roles as in chief,operator"
            )
        grants[key] = _grant(roles.split(","), worker, location)
    if len(grants) == before:  # the file may be half written
        raise errors.InvalidArgumentError(
            f"{name} must have at least one token, got none"
        )
    if not isinstance(source, bytes):
        warn_if_public(source, "the tokens in")


def _name(source: bytes | Path) -> str:
    return "the tokens" if isinstance(source, bytes) else str(source)


def _stamp(file: Path) -> Any:
    """Return a value that changes with a file's content."""
    try:
        status = os.stat(file)  # noqa: PTH116 file may be a str
    except OSError as error:
        return error.errno
    return status.st_ino, status.st_mtime_ns, status.st_size


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


def _grant(roles: list[str], name: str, location: str) -> _Grant:
    if not set(roles) <= set(ROLES):
        raise errors.InvalidArgumentError(
            f"the roles in {location} must be some of {', '.join(ROLES)}, got "
            f"{','.join(roles)!r}"
        )
    return _Grant(frozenset(roles), None if name == ANY_NAME else name)


@functools.lru_cache(maxsize=1024)
def _grant_by(der: bytes) -> _Grant:
    """Return the grant of a certificate, which TLS has already verified."""
    try:
        subject = x509.load_der_x509_certificate(der).subject
        names, units = (
            [str(found.value) for found in subject.get_attributes_for_oid(kind)]
            for kind in (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME)
        )
        if len(names) != 1:
            raise errors.InvalidArgumentError(
                f"its subject must have one CN, the worker's name, got {names}"
            )
        return _grant(units or ["worker"], names[0], "its OU")
    except ValueError as error:
        raise _unknown(
            f"this center does not accept that certificate: {error}"
        ) from None


def _unknown(reason: str) -> errors.NotAllowedError:
    error = errors.NotAllowedError(reason)
    error.is_known = False
    return error


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
