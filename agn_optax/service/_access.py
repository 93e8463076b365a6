"""Who may do what: roles, and how a caller is known by a token or a certificate.

A server has a `Door`, which every way in goes through: it makes a `Caller` of what came
with a call, and the servicer asks that before it does anything.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import operator
import os
import pathlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from agn_optax import errors
from agn_optax.service import _x509
from agn_optax.service._files import Path, Reread, warn_if_public

_WATCHES = frozenset({"Describe", "Status", "Health"})
_READS = _WATCHES | {"Pull", "Probe"}
_WORKS = _READS | {"Exchange", "Alive", "Leave"}
# Which calls each role may make.
ROLES = {
    "observer": _WATCHES,
    "reader": _READS,
    "worker": _WORKS,
    "chief": _WORKS | {"Initialize"},
    "operator": _READS | {"Drain", "Save"},
}
ANY_NAME = "*"
KEY_SIZE = 16  # bytes
_LEAST_TOKEN = 16  # characters
_MOST_TICKETS = 1024
_log = logging.getLogger("agn_optax")


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who calls, and what it may do.

    Attributes:
      said: how it is called in errors; says nothing secret.
      calls: that it may make.
      name: of the only worker that it may speak for; None for any.
      token, certificate: by which it is known; b"" without.
      host: where it is.
    """

    said: str
    calls: frozenset[str]
    name: str | None = None
    token: bytes = dataclasses.field(default=b"", repr=False)
    certificate: bytes = dataclasses.field(default=b"", repr=False)
    host: str = ""
    # Of whom it was found among, to see whether these have changed.
    among: object = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def key(self) -> Hashable:
        """Who it is, among all: for somebody unknown, whoever is at that host."""
        known = self.token or self.certificate
        return (self.token, self.certificate) if known else self.host

    def check(self, call: str, worker: str | None = None) -> None:
        """Whether it may make a call, for a worker.

        Raises:
          NotAllowedError: it may not; says what is missing.
        """
        if call not in self.calls:
            able = [role for role, calls in ROLES.items() if call in calls]
            raise errors.NotAllowedError(
                f"{call} needs the role {' or '.join(able)}, and here calls {self.said}"
            )
        if worker is not None and self.name not in (None, worker):
            raise errors.NotAllowedError(
                f"nobody may speak for worker {worker!r} but itself, and here calls "
                f"{self.said}: give it that name, Worker(..., name={self.name!r}); "
                "where agn-optax launch has started it, that is "
                "service.environment().worker"
            )


EVERYBODY = Caller("anybody", frozenset().union(*ROLES.values()))


class _Grant(NamedTuple):
    """What a token or a certificate stands for."""

    roles: frozenset[str]
    name: str | None

    @property
    def calls(self) -> frozenset[str]:
        return frozenset().union(*(ROLES[role] for role in self.roles))

    def __str__(self) -> str:
        roles = ", ".join(role for role in ROLES if role in self.roles)
        return f"{roles} {'under any name' if self.name is None else repr(self.name)}"


class Access:
    """Who may call a center: `agn_optax.service.serve(access=...)`.

    A caller is known by a token, by the certificate of mutual TLS, or by both, and then
    it may do what both allow. A certificate's subject has the worker's name (CN; * is
    any) and its roles (OU; worker without one). A token stands in a line of a file,

        # roles         name      token
        chief           worker-0  8c1f...
        worker          worker-1  90ab...
        worker          worker-1  d2e7...   # several are fine: change one at a time
        observer,reader *         77d0...   # * is any name

    | role | may |
    | --- | --- |
    | observer | see status and health |
    | reader | also pull the parameters, and measure the way |
    | worker | also join, exchange and leave, in its own name |
    | chief | also give the center its first parameters |
    | operator | do what a reader may, have a snapshot written, and drain the center |

    Args:
      *tokens: files of such lines, each of which is read again when it changes, or
        bytes of them. Without any, certificates alone count. A file that cannot be read
        any more counts as it was for 300 s at most, and then admits nobody; the others
        go on counting, and changing.

    Raises:
      InvalidArgumentError: a file cannot be read, or a line makes no sense.

    Example:
      >>> import agn_optax, agn_optax.service
      >>> access = agn_optax.service.Access(b"reader * 0123456789abcdef")
      >>> rule = agn_optax.rules.downpour()
      >>> with agn_optax.service.serve(rule, access=access) as server:
      ...     center = agn_optax.service.connect(
      ...         server.address, rule, token="0123456789abcdef"
      ...     )
      ...     try:
      ...         center.join("worker-0")
      ...     except agn_optax.errors.NotAllowedError as error:
      ...         print(error)
      ...     center.close()
      Exchange needs the role worker or chief, and here calls reader under any name (by
      token)
    """

    def __init__(self, *tokens: bytes | Path) -> None:
        for each in tokens:
            if not isinstance(each, bytes | str | os.PathLike):
                raise errors.InvalidTypeError(
                    f"tokens must be files, or bytes, got {type(each).__name__}"
                )
        self._tokens = tokens
        # Apart: what one file lost counts no more while another one is broken.
        self._parts: list[Reread[_Part]] = [
            Reread(
                () if isinstance(each, bytes) else (each,),
                functools.partial(_read, each),
                dict,
            )
            for each in tokens
        ]
        parts = [part() for part in self._parts]
        grants, twice = _together(parts)
        if twice:
            raise errors.InvalidArgumentError(_same_token(twice[0]))
        self._made = parts, grants

    def caller(self, token: bytes = b"", certificate: bytes = b"") -> Caller:
        """Who calls with a token and a certificate (DER); b"" for none.

        Raises:
          NotAllowedError: nobody knows them, or they are of different workers.
        """
        grants = self._grants()
        if not token and not certificate:
            raise _unknown(
                "this center is only for those who have a token: give "
                "connect(token=...), AGN_OPTAX_TOKEN or AGN_OPTAX_TOKEN_FILE "
                "(--token-file)"
                if self._tokens
                else "this center is only for those who have a certificate"
            )
        found = []
        if token:
            found.append((_of_token(token, grants), "by token"))
        if certificate:
            found.append((_of_certificate(certificate), "by certificate"))
        names = {grant.name for grant, _ in found} - {None}
        said = " and ".join(f"{grant} ({how})" for grant, how in found)
        if len(names) > 1:
            raise errors.NotAllowedError(
                f"token and certificate are of two workers: here calls {said}"
            )
        calls = frozenset.intersection(*(grant.calls for grant, _ in found))
        name = names.pop() if names else None
        return Caller(said, calls, name, token, certificate, among=grants)

    def again(self, caller: Caller) -> Caller:
        """Who that is by now; the same object if nothing has changed.

        Raises:
          NotAllowedError: its token is one no more.
        """
        if caller.among is self._grants():
            return caller
        return self.caller(caller.token, caller.certificate)

    def __repr__(self) -> str:  # a token is nothing for a log
        said = ["bytes" if isinstance(t, bytes) else str(t) for t in self._tokens]
        return f"Access({', '.join(said)})"

    def _grants(self) -> dict[bytes, _Grant]:
        """Return what the files say now; the same object while none has changed."""
        parts, (before, grants) = [part() for part in self._parts], self._made
        if any(map(operator.is_not, parts, before)):
            grants, twice = _together(parts)
            for where in twice:
                _log.error("%s; it counts for nobody", _same_token(where))
            self._made = parts, grants
        return grants


class Door:
    """What every way into a server goes through.

    Connections beside gRPC begin with a key. A key is a ticket: whoever called before,
    over gRPC, was given it, and is known by it.

    Args:
      access: who may call; None for everybody.
    """

    def __init__(self, access: Access | None = None) -> None:
        self.access = access
        self._lock = threading.Lock()
        self._tickets: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()
        self._holders: dict[bytes, tuple[bytes, bytes]] = {}  # by hashes of keys

    def caller(
        self, token: bytes = b"", certificate: bytes = b"", host: str = ""
    ) -> Caller:
        """As `Access.caller`, of somebody at a host."""
        known = EVERYBODY
        if self.access is not None:
            known = self.access.caller(token, certificate)
        return dataclasses.replace(known, host=host)

    def again(self, caller: Caller) -> Caller:
        """As `Access.again`."""
        return caller if self.access is None else self.access.again(caller)

    def ticket(self, caller: Caller) -> bytes:
        """The key by which a caller is known; the same one as long as it is used."""
        holder = caller.token, caller.certificate
        with self._lock:
            key = self._tickets.get(holder)
            if key is None:
                key = self._tickets[holder] = secrets.token_bytes(KEY_SIZE)
                self._holders[_hash(key)] = holder
            self._tickets.move_to_end(holder)
            if len(self._tickets) > _MOST_TICKETS:
                _, oldest = self._tickets.popitem(last=False)
                del self._holders[_hash(oldest)]
        return key

    def knows(self, key: bytes | None) -> bool:
        """Return whether a key was given to somebody; `holder` says whose it is now."""
        return key is not None and _hash(key) in self._holders

    def holder(
        self, key: bytes, certificate: bytes | None = None, host: str = ""
    ) -> Caller:
        """Who has a key.

        Args:
          key: as it came.
          certificate: of the connection, where that is encrypted: it must be one of the
            same caller. None where it is not.
          host: whence it came.

        Raises:
          NotAllowedError: nobody has that key, or not any more, or it is another's.
        """
        # How long a look for a hash takes says nothing of the key.
        holder = self._holders.get(_hash(key))
        if holder is None:
            raise _unknown("this center has given that key to nobody")
        caller = self.caller(*holder, host)
        if certificate is not None and self.access is not None:
            other = self.caller(holder[0], certificate)
            if (other.name, other.calls) != (caller.name, caller.calls):
                raise errors.NotAllowedError(
                    f"the key is one of {caller.said}, and here calls {other.said}"
                )
        return caller


# What one source of tokens says: what each stands for, and where that is written.
_Part = dict[bytes, tuple[_Grant, str]]


def _read(source: bytes | Path) -> _Part:
    """Return what a source says.

    Raises:
      InvalidArgumentError: it cannot be read, or makes no sense.
    """
    if not isinstance(source, bytes):
        warn_if_public(source, "the tokens in")
    part: _Part = {}
    for token, grant, where in _lines(source):
        if token in part:
            raise errors.InvalidArgumentError(_same_token(where))
        part[token] = grant, where
    return part


def _together(parts: Sequence[_Part]) -> tuple[dict[bytes, _Grant], list[str]]:
    """Return what all sources say, and where a token is that another one has, too.

    A token of two different lines stands for nothing; one that moves from a file to
    another may be in both for a while.
    """
    grants: dict[bytes, _Grant] = {}
    twice: list[str] = []
    differ: set[bytes] = set()
    for part in parts:
        for token, (grant, where) in part.items():
            if token in grants:
                twice.append(where)
            if grants.setdefault(token, grant) != grant:
                differ.add(token)
    return {token: g for token, g in grants.items() if token not in differ}, twice


def _same_token(where: str) -> str:
    return (
        f"{where}: another line has the same token; make one for each, and give "
        "several roles as in chief,operator"
    )


def _lines(source: bytes | Path) -> list[tuple[bytes, _Grant, str]]:
    """Tokens, what they stand for, and where that is written."""
    name = "the tokens" if isinstance(source, bytes) else str(source)
    try:
        text = (
            source if isinstance(source, bytes) else pathlib.Path(source).read_bytes()
        ).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise errors.InvalidArgumentError(f"cannot read {name}: {reason}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        comment = next((i for i, w in enumerate(words) if w.startswith("#")), None)
        words = words[:comment]
        where = f"line {number} of {name}"
        if not words:
            continue
        if len(words) != 3:
            raise errors.InvalidArgumentError(
                f"{where} must have roles, a name and a token, got {len(words)} words"
            )
        roles, worker, token = words
        if problem := why_no_token(token):
            raise errors.InvalidArgumentError(f"the token in {where} {problem}")
        grant = _grant(roles.split(","), worker, where)
        found.append((token.encode(), grant, where))
    if not found:  # perhaps it is being written
        raise errors.InvalidArgumentError(
            f"{name} must have a token at least, got none"
        )
    return found


def why_no_token(token: str) -> str:
    """What is wrong with a token; "" if nothing is."""
    if not (token.isascii() and token.isprintable()) or " " in token:
        return "must be of printable characters of ASCII without spaces"
    if len(token) < _LEAST_TOKEN:
        return (
            f"must have {_LEAST_TOKEN} characters at least, got {len(token)}; `openssl "
            "rand -hex 32` makes one"
        )
    return ""


def _grant(roles: list[str], name: str, where: str) -> _Grant:
    if not set(roles) <= set(ROLES):
        raise errors.InvalidArgumentError(
            f"the roles in {where} must be some of {', '.join(ROLES)}, got "
            f"{','.join(roles)!r}"
        )
    return _Grant(frozenset(roles), None if name == ANY_NAME else name)


def _of_token(token: bytes, grants: dict[bytes, _Grant]) -> _Grant:
    """Compared with all of them, in a time that says nothing of either."""
    found = [
        grant for known, grant in grants.items() if secrets.compare_digest(known, token)
    ]
    if not found:
        raise _unknown("this center does not know that token")
    return found[0]


def _of_certificate(der: bytes) -> _Grant:
    try:
        said = _x509.read(der)
        if len(said.names) != 1:
            raise errors.InvalidArgumentError(
                f"its subject must have one CN, the worker's name, got {said.names}"
            )
        return _grant(list(said.units or ("worker",)), said.names[0], "its OU")
    except errors.InvalidArgumentError as error:
        raise _unknown(f"this certificate is nobody's here: {error}") from None


def _unknown(said: str) -> errors.NotAllowedError:
    error = errors.NotAllowedError(said)
    error.is_known = False
    return error


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
