"""Certificates for tests of TLS."""

import shutil
import subprocess

import pytest


def make(folder, names="DNS:localhost,IP:127.0.0.1"):
    """A certificate that vouches for itself, and its key: two files of PEM."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with openssl")
    subprocess.run(  # noqa: S603 a tool that the system has
        [
            *(openssl, "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"),
            *("-addext", f"subjectAltName={names}"),
            *("-keyout", folder / "key.pem", "-out", folder / "certificate.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return folder / "certificate.pem", folder / "key.pem"
