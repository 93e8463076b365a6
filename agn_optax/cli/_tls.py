"""TLS: options of both ends."""

from __future__ import annotations

import pathlib

from agn_optax import errors, service
from agn_optax.cli import _options


@_options.record()
class ClientTls:
    """How a center is reached.

    TLS:
      tls_ca FILE.pem: Who vouches for the center; plain text is spoken without it.
      tls_certificate FILE.pem: This end's certificate, with those that vouch for it.
      tls_key FILE.pem: The certificate's private key.
      insecure: Allow plain text beyond this machine, in a network that you trust.
    """

    tls_ca: pathlib.Path | None = None
    tls_certificate: pathlib.Path | None = None
    tls_key: pathlib.Path | None = None
    insecure: bool | None = _options.switch()


def client(options: ClientTls) -> service.Tls | None:
    """What encrypts calls; None for plain text.

    Raises:
      InvalidArgumentError: options do not go together, or a file cannot be read.
    """
    check_pair(options.tls_certificate, options.tls_key)
    if options.tls_ca is None:
        _options.refuse(options, "needs --tls-ca", only=("tls_certificate",))
        return None
    tls = service.Tls(options.tls_ca, options.tls_certificate, options.tls_key)
    tls.client_credentials()  # what is wrong is said before anything is started
    return tls


def check_pair(certificate: pathlib.Path | None, key: pathlib.Path | None) -> None:
    """Both are there, or none is.

    Raises:
      InvalidArgumentError: one is missing.
    """
    if (certificate is None) != (key is None):
        raise errors.InvalidArgumentError(
            "--tls-certificate and --tls-key go together: give both"
        )
