"""A small certificate authority: certificates, keys and tokens in one directory."""

from __future__ import annotations

import datetime
import ipaddress
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.service import tokens

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_SINCE = datetime.timedelta(minutes=5)  # clocks may differ by this much


def make(
    directory: pathlib.Path,
    hosts: Sequence[str],
    roles: dict[str, list[str]],
    days: int,
) -> list[pathlib.Path]:
    """Make the files, and return their paths.

    Raises:
      InvalidArgumentError: a name is not allowed, or one of the files exists already.
      MissingExtraError: the package that makes certificates is not installed.
    """
    names = [name for each in roles.values() for name in each]
    _check(directory, hosts, names)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _Authority(directory, days)
    if hosts:
        authority.issue("center", hosts=hosts)
    for role, each in roles.items():
        for name in each:
            token = tokens.generated()
            line = f"{role} {name} {token}\n"
            authority.write("tokens", line.encode(), adds=True)
            authority.write(f"{name}.token", f"{token}\n".encode())
            authority.issue(name, role=role)
    return list(dict.fromkeys(authority.made))


def _check(directory: pathlib.Path, hosts: Sequence[str], names: list[str]) -> None:
    for name in names:
        if not name or len(name) > 64 or set(name) & set("/#*, \t\n\0"):
            raise errors.InvalidArgumentError(
                "a name must have 1 to 64 characters, none of them a space or one of "
                f"/ # * and comma, got {name!r}"
            )
    if len(set(names)) < len(names) or {"ca", "center"} & set(names):
        raise errors.InvalidArgumentError(
            f"names must differ, also from ca and center, got {', '.join(names)}"
        )
    if not (hosts or names):
        raise errors.InvalidArgumentError(
            "nothing to make: give --host for the center, and --chief, --worker and "
            "--operator for its callers"
        )
    files = ["center.pem", "center.key"] * bool(hosts) + [
        f"{name}.{kind}" for name in names for kind in ("pem", "key", "token")
    ]
    there = [str(directory / file) for file in files if (directory / file).exists()]
    if there:
        raise errors.InvalidArgumentError(
            f"{', '.join(there)} {'exists' if len(there) == 1 else 'exist'} already; "
            f"remove {'it' if len(there) == 1 else 'them'} to make another one"
        )
    extras.require("keys", "cryptography")


class _Authority:
    """The certificate authority of a directory, which is made if there is none.

    Args:
      directory: directory of the files.
      days: number of days for which certificates are valid.

    Attributes:
      made: paths of the files that were written, in order.
    """

    def __init__(self, directory: pathlib.Path, days: int) -> None:
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

        self._directory = directory
        self._days = datetime.timedelta(days=days)
        self.made: list[pathlib.Path] = []
        pem, key = directory / "ca.pem", directory / "ca.key"
        if pem.exists() and key.exists():
            self._certificate = x509.load_pem_x509_certificate(pem.read_bytes())
            self._key: Any = serialization.load_pem_private_key(key.read_bytes(), None)
        else:
            self._certificate, self._key = self._issued("ca", "ca", "", [], None)

    def issue(self, name: str, *, role: str = "", hosts: Sequence[str] = ()) -> None:
        """Make a certificate and its key, in two files."""
        self._issued(name, name, role, hosts, self._certificate)

    def write(
        self, name: str, content: bytes, mode: int = 0o600, *, adds: bool = False
    ) -> None:
        """Write a new file, or append to one that may exist."""
        path = self._directory / name
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if adds else os.O_EXCL)
        with os.fdopen(os.open(path, flags, mode), "wb") as file:
            file.write(content)
        self.made.append(path)

    def _issued(
        self,
        file: str,
        name: str,
        role: str,
        hosts: Sequence[str],
        issuer: x509.Certificate | None,
    ) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509 import oid  # noqa: PLC0415

        key = ec.generate_private_key(ec.SECP256R1())
        said = [x509.NameAttribute(oid.NameOID.COMMON_NAME, name)]
        if role:
            said.append(x509.NameAttribute(oid.NameOID.ORGANIZATIONAL_UNIT_NAME, role))
        subject = x509.Name(said)
        now = datetime.datetime.now(datetime.UTC)
        is_ca = issuer is None
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if issuer is None else issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SINCE)
            # The authority must outlive the certificates that it signs.
            .not_valid_after(now + (10 if is_ca else 1) * self._days)
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
            .add_extension(own, critical=False)
            .add_extension(_usage(is_ca=is_ca), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(
                    (key if issuer is None else self._key).public_key()
                ),
                critical=False,
            )
        )
        if not is_ca:
            use = oid.ExtendedKeyUsageOID
            uses = [use.SERVER_AUTH if hosts else use.CLIENT_AUTH]
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_host(each) for each in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(key if is_ca else self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        self.write(f"{file}.key", private)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.write(f"{file}.pem", pem, mode=0o644)
        return certificate, key


def _usage(*, is_ca: bool) -> Any:
    from cryptography import x509  # noqa: PLC0415

    never = ("content_commitment", "key_encipherment", "data_encipherment")
    more = ("key_agreement", "encipher_only", "decipher_only")
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        **dict.fromkeys((*never, *more), False),
    )


def _host(name: str) -> Any:
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
