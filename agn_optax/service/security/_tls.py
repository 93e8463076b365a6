"""TLS settings: one set of certificates for gRPC and for sockets."""

from __future__ import annotations

import contextlib
import os
import pathlib
import ssl
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc

from agn_optax import errors
from agn_optax.service import _address
from agn_optax.service.security._files import Path

Pem = bytes | Path
# Environment variables that name the files of a worker without TLS settings.
TLS_CA, CERTIFICATE = "AGN_OPTAX_TLS_CA", "AGN_OPTAX_TLS_CERTIFICATE"
KEY = "AGN_OPTAX_TLS_KEY"


class Tls(NamedTuple):
    """The TLS settings of one end: `Security(tls=...)`, `connect(tls=...)`.

    Each field is the path of a PEM file, or the bytes of one. With all three at both
    ends, workers must have certificates, too (mutual TLS). `tls` makes a `Tls` and
    checks it.

    Args:
      ca: CA certificates to verify the other end with; workers of a center that has
        them must have certificates. A worker without them uses those of its operating
        system.
      certificate: this end's certificate, with any intermediate certificates. A center
        needs one.
      key: the certificate's private key.

    Example:
      >>> import agn_optax.service
      >>> agn_optax.service.Tls(ca="center.pem").ca
      'center.pem'
    """

    ca: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = None

    def client_credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials for a client."""
        self.context(serves=False)
        return grpc.ssl_channel_credentials(_read(self.ca), *self._pair())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return gRPC credentials for a server."""
        self.context(serves=True)
        pair: Any = self._pair(is_needed=True)
        ca = _read(self.ca)
        return grpc.ssl_server_credentials([pair], ca, ca is not None)

    def context(self, *, serves: bool) -> ssl.SSLContext:
        """Return the context of a socket's connections.

        A client's context also checks the server's host name.

        Args:
          serves: whether this end is the server.

        Raises:
          InvalidArgumentError: the files do not match.
        """
        self._pair(is_needed=serves)
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT
        )
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if (ca := _read(self.ca)) is not None:
                context.verify_mode = ssl.CERT_REQUIRED  # the default for clients
                context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
            elif not serves:
                context.load_default_certs()
            if self.certificate is not None and self.key is not None:
                with _file(self.certificate) as certificate, _file(self.key) as key:
                    # Never prompt for a password: perhaps nobody is at the terminal.
                    context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            reason = str(error)
            if error.reason == "KEY_VALUES_MISMATCH":
                reason = "the key is not that of the certificate"
            raise errors.InvalidArgumentError(
                f"these certificates cannot be used: {reason} ({self._describe()})"
            ) from None
        return context

    def _pair(self, *, is_needed: bool = False) -> tuple[bytes | None, bytes | None]:
        """Return the key and the certificate.

        Raises:
          InvalidArgumentError: one is missing, or both if ``is_needed``.
        """
        if (self.certificate is None) != (self.key is None):
            raise errors.InvalidArgumentError(
                "a certificate and its key go together: give both"
            )
        if is_needed and self.certificate is None:
            raise errors.InvalidArgumentError(
                "a center that speaks TLS needs a certificate and its key"
            )
        return _read(self.key), _read(self.certificate)

    def _describe(self) -> str:
        given = {name: pem for name, pem in self._asdict().items() if pem is not None}
        return ", ".join(f"{name} {_description(pem)}" for name, pem in given.items())

    def __repr__(self) -> str:  # without the key itself: it may be logged
        return f"Tls({self._describe()})"


def tls(
    ca: Pem | None = None, certificate: Pem | None = None, key: Pem | None = None
) -> Tls:
    """Make a `Tls`, and check that its files exist and match.

    Args:
      ca: certificate authorities that the other end's certificate is checked against:
        the path of a PEM file, or the bytes of one.
      certificate: this end's certificate, with any intermediate certificates.
      key: the certificate's private key.

    Returns:
      The settings, for `Security(tls=...)` and `connect(tls=...)`. They are checked
      again when they are used.

    Raises:
      InvalidArgumentError: a file cannot be read, or is not a PEM file;
        the key belongs to another certificate, or one of the two is missing.

    Example:
      >>> import agn_optax, agn_optax.service
      >>> try:
      ...     agn_optax.service.tls(ca=b"not a certificate")
      ... except agn_optax.errors.InvalidArgumentError as error:
      ...     print(error)
      the given value is no PEM file: it has no BEGIN
    """
    settings = Tls(ca, certificate, key)
    settings.context(serves=False)
    return settings


def of_environment() -> Tls | None:
    """Return the `Tls` of the files that environment variables name; None if none.

    Raises:
      InvalidArgumentError: see `tls`.
    """
    files = [os.environ.get(name) or None for name in (TLS_CA, CERTIFICATE, KEY)]
    return tls(*files) if any(files) else None


def check(tls: Any, insecure: bool, *addresses: str) -> None:
    """Check the security settings of one end.

    Args:
      tls: the TLS settings or None.
      insecure: whether plain text may leave this machine.
      *addresses: the addresses that are listened at or connected to.

    Raises:
      InvalidArgumentError: plain text would leave this machine without ``insecure``.
      InvalidTypeError: ``tls`` is not a `Tls`.
    """
    if tls is not None and not isinstance(tls, Tls):
        raise errors.InvalidTypeError(f"tls must be a Tls, got {tls!r}")
    if tls is not None or insecure:
        return
    for address in addresses:
        if not _address.is_local(address):
            raise errors.InvalidArgumentError(
                f"{address} is not for this machine only, and without tls "
                "everything would travel in plain text, which can be read and changed "
                "on the network: give tls= (--tls-...), or insecure=True (--insecure) "
                "in a network that you trust"
            )


def _read(pem: Pem | None) -> bytes | None:
    """Return the bytes of a PEM file; None for None.

    Raises:
      InvalidArgumentError: the file cannot be read, or is not a PEM file.
    """
    if pem is None:
        return None
    name = _description(pem)
    if not isinstance(pem, bytes):
        try:
            pem = pathlib.Path(pem).read_bytes()
        except OSError as error:
            raise errors.InvalidArgumentError(f"cannot read {name}: {error}") from None
    if b"-----BEGIN" not in pem:
        raise errors.InvalidArgumentError(f"{name} is no PEM file: it has no BEGIN")
    return pem


def _description(pem: Pem) -> str:
    return "the given value" if isinstance(pem, bytes) else str(pem)


@contextlib.contextmanager
def _file(pem: Pem) -> Iterator[str]:
    """Yield the path of a PEM file; bytes are written to a temporary file.

    Python's ssl loads a certificate and its key only from files.
    """
    if not isinstance(pem, bytes):
        yield os.fspath(pem)
        return
    with tempfile.TemporaryDirectory() as folder:  # readable by this user only
        path = pathlib.Path(folder, "pem")
        path.write_bytes(pem)
        yield str(path)
