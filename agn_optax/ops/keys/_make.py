"""A small certificate authority: certificates, keys and tokens in one directory."""

from __future__ import annotations

import datetime
import ipaddress
import os
import pathlib
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509 import oid

from agn_optax import errors
from agn_optax.service import tokens

_CLOCK_TOLERANCE = datetime.timedelta(minutes=5)  # clocks may differ by this much


def make(
    directory: pathlib.Path,
    hosts: Sequence[str],
    roles: dict[str, list[str]],
    days: int,
) -> list[pathlib.Path]:
    """Make the files, and return their paths.

    Raises:
      InvalidArgumentError: a name is not allowed, or one of the files exists already.
    """
    _check(directory, hosts, [name for names in roles.values() for name in names])
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _Authority(directory, days)
    if hosts:
        authority.issue("center", hosts=hosts)
    for role, names in roles.items():
        for name in names:
            token = tokens.generate()
            line = f"{role} {name} {token}\n"
            authority.write("tokens", line.encode(), adds=True)
            authority.write(f"{name}.token", f"{token}\n".encode())
            authority.issue(name)
    return list(dict.fromkeys(authority.written))


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
    files = ["center.pem", "center.key"] * bool(hosts)
    files += [f"{name}.{kind}" for name in names for kind in ("pem", "key", "token")]
    existing = [str(directory / file) for file in files if (directory / file).exists()]
    if existing:
        raise errors.InvalidArgumentError(
            f"files exist already; remove them to make others: {', '.join(existing)}"
        )


class _Authority:
    """The certificate authority in a directory; it is made if the directory has none.

    Args:
      directory: directory of the files.
      days: number of days for which certificates are valid.

    Attributes:
      written: paths of the files that were written, in order.
    """

    def __init__(self, directory: pathlib.Path, days: int) -> None:
        self._directory = directory
        self._days = datetime.timedelta(days=days)
        self.written: list[pathlib.Path] = []
        pem, key = directory / "ca.pem", directory / "ca.key"
        if pem.exists() != key.exists():
            found, lost = (pem, key) if pem.exists() else (key, pem)
            raise errors.InvalidArgumentError(
                f"{found} exists without {lost.name}: bring it back; or remove "
                f"{found.name} for a new authority, and give its ca.pem to the center "
                "and to all workers"
            )
        if pem.exists():
            self._subject = x509.load_pem_x509_certificate(pem.read_bytes()).subject
            try:
                loaded = serialization.load_pem_private_key(key.read_bytes(), None)
                if not isinstance(
                    loaded, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
                ):
                    raise TypeError(f"it is of RSA or EC, got {type(loaded).__name__}")
            except (TypeError, ValueError) as error:  # TypeError: it has a password
                raise errors.InvalidArgumentError(
                    f"cannot read {key}: {error}"
                ) from None
            self._key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey = loaded
        else:
            self._subject = _subject("ca")
            own = self._key = ec.generate_private_key(ec.SECP256R1())
            # The authority must outlive the certificates that it signs.
            self._sign("ca", own, self._subject, 10 * self._days, is_ca=True)

    def issue(self, name: str, *, hosts: Sequence[str] = ()) -> None:
        """Make a certificate and its key, in two files."""
        use = oid.ExtendedKeyUsageOID
        purpose = use.SERVER_AUTH if hosts else use.CLIENT_AUTH
        extensions: list[x509.ExtensionType] = [x509.ExtendedKeyUsage([purpose])]
        if hosts:
            extensions.append(x509.SubjectAlternativeName(map(_host, hosts)))
        key = ec.generate_private_key(ec.SECP256R1())
        self._sign(name, key, _subject(name), self._days, *extensions)

    def write(
        self, name: str, content: bytes, mode: int = 0o600, *, adds: bool = False
    ) -> None:
        """Write a new file, or append to one that may exist."""
        path = self._directory / name
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if adds else os.O_EXCL)
        with os.fdopen(os.open(path, flags, mode), "wb") as file:
            file.write(content)
        self.written.append(path)

    def _sign(
        self,
        file: str,
        key: ec.EllipticCurvePrivateKey,
        subject: x509.Name,
        valid: datetime.timedelta,
        *extensions: x509.ExtensionType,
        is_ca: bool = False,
    ) -> None:
        """Write a key and its certificate, which the authority signs."""
        now = datetime.datetime.now(datetime.UTC)
        public, authority = key.public_key(), self._key.public_key()
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=is_ca,
            crl_sign=is_ca,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_TOLERANCE)
            .not_valid_after(now + valid)
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
            .add_extension(usage, critical=True)
        )
        for extension in (
            x509.SubjectKeyIdentifier.from_public_key(public),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority),
            *extensions,
        ):
            builder = builder.add_extension(extension, critical=False)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        self.write(f"{file}.key", private)
        certificate = builder.sign(self._key, hashes.SHA256())
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.write(f"{file}.pem", pem, mode=0o644)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid.NameOID.COMMON_NAME, name)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
