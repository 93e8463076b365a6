"""TLS settings: one set of certificates for gRPC and for sockets."""

from __future__ import annotations

import os
import pathlib
import ssl
from typing import Any, NamedTuple

import grpc

from agn_optax import errors
from agn_optax.service import _address

# Environment variables that name the files of a worker without TLS settings.
TLS_CA, CERTIFICATE = "AGN_OPTAX_TLS_CA", "AGN_OPTAX_TLS_CERTIFICATE"
KEY = "AGN_OPTAX_TLS_KEY"


class Tls(NamedTuple):
    """The TLS settings of one end: `Security(tls=...)`, `connect(tls=...)`.

    Each field is the path of a PEM file. With all three at both ends, workers must have
    certificates, too (mutual TLS). `tls` makes a `Tls` and checks it.

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

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    def client_credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials for a client."""
        self.context(serves=False)
        contents = map(_read, (self.ca, self.key, self.certificate))
        return grpc.ssl_channel_credentials(*contents)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return gRPC credentials for a server."""
        self.context(serves=True)
        ca, key, certificate = map(_read, (self.ca, self.key, self.certificate))
        assert key is not None
        assert certificate is not None
        return grpc.ssl_server_credentials([(key, certificate)], ca, ca is not None)

    def context(self, *, serves: bool) -> ssl.SSLContext:
        """Return the context of a socket's connections.

        A client's context also checks the server's host name.

        Args:
          serves: whether this end is the server.

        Raises:
          InvalidArgumentError: a file is missing or not valid, or they do not match.
          InvalidTypeError: a field is not a path.
        """
        for name, file in self._asdict().items():
            if not isinstance(file, str | os.PathLike | None):
                # The value is not shown: it may be the key itself.
                raise errors.InvalidTypeError(
                    f"{name} must be the path of a PEM file, got {type(file).__name__}"
                )
        has_pair = self.certificate is not None and self.key is not None
        if not has_pair and (serves or self.certificate != self.key):
            raise errors.InvalidArgumentError(
                "a certificate and its key go together, and a center that speaks TLS "
                f"needs both, got {self}"
            )
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT
        )
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            for file in self:
                _read(file)  # its errors name the file, unlike those of ssl
            if self.ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED  # the default for clients
                context.load_verify_locations(self.ca)
            elif not serves:
                context.load_default_certs()
            if self.certificate is not None:
                # Never prompt for a password: perhaps nobody is at the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:
            raise errors.InvalidArgumentError(
                f"these certificates cannot be used: {error} ({self})"
            ) from None
        return context


def tls(
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> Tls:
    """Make a `Tls`, and check that its files exist and match.

    Args:
      ca: certificate authorities that the other end's certificate is checked against:
        the path of a PEM file.
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
      ...     agn_optax.service.tls(certificate="center.pem")
      ... except agn_optax.errors.InvalidArgumentError as error:
      ...     print(error)
      a certificate and its key go together, and a center that speaks TLS needs both,
      got Tls(ca=None, certificate='center.pem', key=None)
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


def _read(file: str | os.PathLike[str] | None) -> bytes | None:
    return None if file is None else pathlib.Path(file).read_bytes()
