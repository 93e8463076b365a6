"""Certificates for tests of TLS, made with openssl."""

import pathlib
import shutil
import subprocess

import pytest

from agn_optax.service import Tls

HERE = "DNS:localhost,IP:127.0.0.1"
_KEY = ("-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make(folder, names=HERE, subject="/CN=*/OU=chief"):
    """Make a self-signed certificate and its key: two PEM files."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    _openssl(
        *("req", "-x509", *_KEY, "-days", "2", "-subj", subject),
        *("-addext", f"subjectAltName={names}"),
        *("-keyout", key, "-out", certificate),
    )
    return certificate, key


class Authority:
    """A certificate authority; ``ca`` is the path of its certificate."""

    def __init__(self, folder, name="authority"):
        self._folder = pathlib.Path(folder, name)
        self._folder.mkdir()
        self.ca, self._key = self._folder / "ca.pem", self._folder / "ca.key"
        _openssl(
            *("req", "-x509", *_KEY, "-days", "9", "-subj", f"/CN={name}"),
            *("-addext", "basicConstraints=critical,CA:true"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-keyout", self._key, "-out", self.ca),
        )

    def issue(self, subject, names=HERE, days=2, ca=None):
        """Return a `Tls` with a new certificate for either end; days < 0: expired."""
        made = self._folder / f"{len(list(self._folder.iterdir()))}"
        key, request, certificate, extra = (
            made.with_suffix(suffix) for suffix in (".key", ".csr", ".pem", ".ext")
        )
        # With the extensions that Python 3.13 and newer require.
        extra.write_text(
            f"subjectAltName={names}\nsubjectKeyIdentifier=hash\n"
            "authorityKeyIdentifier=keyid\n"
        )
        _openssl("req", *_KEY, "-subj", subject, "-keyout", key, "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-days", days, "-extfile", extra),
            *("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial"),
            *("-out", certificate),
        )
        return Tls(ca or self.ca, certificate, key)


def _openssl(*arguments):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl, which makes its certificates")
    subprocess.run(  # noqa: S603 a tool that the system has
        [openssl, *map(str, arguments)], check=True, capture_output=True
    )
