"""TLS: options of both ends, and the credentials made of them."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import grpc
import typer

from agn_optax import errors

_TLS = "TLS"


def _file(help_: str) -> Any:
    return typer.Option(help=help_, metavar="FILE.pem", rich_help_panel=_TLS)


Certificate = Annotated[
    pathlib.Path | None, _file("This end's certificate, with those that vouch for it.")
]
Key = Annotated[pathlib.Path | None, _file("The certificate's private key.")]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure",
        help="Allow plain text beyond this machine, in a network that you trust.",
        rich_help_panel=_TLS,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientTls:
    """How a center is reached."""

    tls_ca: Annotated[
        pathlib.Path | None,
        _file("Who vouches for the center; plain text is spoken without it."),
    ] = None
    tls_certificate: Certificate = None
    tls_key: Key = None
    insecure: Insecure = None


def client_credentials(
    ca: pathlib.Path | None, certificate: pathlib.Path | None, key: pathlib.Path | None
) -> grpc.ChannelCredentials | None:
    """Credentials of whoever calls; None for plain text.

    Raises:
      InvalidArgumentError: options do not go together, or a file cannot be read.
    """
    _check_pair(certificate, key)
    if ca is None:
        if certificate is not None:
            raise errors.InvalidArgumentError("--tls-certificate needs --tls-ca")
        return None
    return grpc.ssl_channel_credentials(
        _read(ca), _read_given(key), _read_given(certificate)
    )


def server_credentials(
    certificate: pathlib.Path | None,
    key: pathlib.Path | None,
    client_ca: pathlib.Path | None,
) -> grpc.ServerCredentials | None:
    """Credentials of a center; None for plain text.

    Raises:
      InvalidArgumentError: options do not go together, or a file cannot be read.
    """
    _check_pair(certificate, key)
    if certificate is None or key is None:
        if client_ca is not None:
            raise errors.InvalidArgumentError(
                "--tls-client-ca needs --tls-certificate and --tls-key"
            )
        return None
    return grpc.ssl_server_credentials(
        [(_read(key), _read(certificate))],
        _read_given(client_ca),
        client_ca is not None,
    )


def _check_pair(certificate: pathlib.Path | None, key: pathlib.Path | None) -> None:
    if (certificate is None) != (key is None):
        raise errors.InvalidArgumentError(
            "--tls-certificate and --tls-key go together: give both"
        )


def _read(path: pathlib.Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise errors.InvalidArgumentError(f"cannot read {path}: {error}") from None
    if b"-----BEGIN" not in data:
        raise errors.InvalidArgumentError(f"{path} is no PEM file: it has no BEGIN")
    return data


def _read_given(path: pathlib.Path | None) -> bytes | None:
    return None if path is None else _read(path)
