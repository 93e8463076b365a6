"""Diagnosis of failed TLS handshakes, which gRPC reports without details.

A separate connection finds the reason. Python's ssl reports problems with the other
end's certificate. A gRPC server does not report problems with this end's certificate:
it closes the connection.
"""

from __future__ import annotations

import socket
import ssl

from agn_optax import errors
from agn_optax.service import _address
from agn_optax.service.security._tls import Tls

_TIMEOUT = 2.0  # seconds for each step
# The preface of an HTTP/2 connection, and an empty SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
# OpenSSL's codes of certificate errors.
_NOT_YET, _EXPIRED = 9, 10
_OTHER_NAMES = (62, 63, 64)
# OpenSSL's reasons if the received bytes are not TLS.
_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


def why_not(address: str, tls: Tls | None, timeout: float = _TIMEOUT) -> str:
    """Return why a TLS handshake with a center fails.

    Args:
      address: the center's address.
      tls: TLS settings of this end; None for plain text.
      timeout: seconds that each step may take.

    Returns:
      The reason as text; "" if the handshake succeeds, or the center does not answer.
    """
    try:
        if tls is None:
            return _why_not_plain(address, timeout)
        context = tls.context(serves=False)
        context.set_alpn_protocols(["h2"])
        is_greeted = False
        try:
            with (
                connected(address, timeout) as plain,
                context.wrap_socket(plain, server_hostname=name_of(address)) as end,
            ):
                is_greeted = True
                end.sendall(_PREFACE)
                return _why_closed(tls) if not end.recv(1) else ""
        except (ConnectionError, ssl.SSLError) as error:
            if is_greeted:
                return _why_closed(tls)
            return _in_words(error, address)
    except errors.InvalidArgumentError as error:
        return str(error)
    except OSError:
        return ""


def connected(address: str, timeout: float) -> socket.socket:
    """Return a socket that is connected to an address.

    Raises:
      OSError: no connection can be made.
    """
    if not address.startswith("unix:"):
        port = int(address.rpartition(":")[2])
        return socket.create_connection((_address.host(address), port), timeout)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(timeout)
    try:
        made.connect(_address.path(address))
    except BaseException:
        made.close()
        raise
    return made


def _why_not_plain(address: str, timeout: float) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with connected(address, timeout) as plain, context.wrap_socket(plain):
        return "the center speaks TLS: give --tls-ca FILE.pem (tls= in Python)"


def _why_closed(tls: Tls) -> str:
    """Return why the other end closed the connection after the handshake."""
    if tls.certificate is None:
        return (
            "the center requires a certificate of this end: give --tls-certificate and "
            "--tls-key (certificate= and key= of Tls)"
        )
    return (
        f"the center rejects this end's certificate ({tls}): none of the authorities "
        "that the center trusts (its own ca) has issued it"
    )


def _in_words(error: Exception, address: str) -> str:
    if not isinstance(error, ssl.SSLError):
        return ""
    if not isinstance(error, ssl.SSLCertVerificationError):
        if error.reason in _PLAIN:
            return "the center does not speak TLS: leave --tls-ca out (tls= in Python)"
        return f"no TLS with the center: {error.reason or error}"
    if error.verify_code == _EXPIRED:
        return "the center's certificate has expired"
    if error.verify_code == _NOT_YET:
        return "the center's certificate is not valid yet, by this machine's clock"
    if error.verify_code in _OTHER_NAMES:
        return (
            f"the center's certificate is not for {name_of(address)!r}: reach it by a "
            f"name that is in it ({error.verify_message})"
        )
    return (
        "no authority that this end trusts has issued the center's certificate: is "
        f"--tls-ca (ca= of Tls) the right one? ({error.verify_message})"
    )


def name_of(address: str) -> str:
    """Return the name that a center's certificate must have."""
    if address.startswith("unix:"):
        return "localhost"  # as gRPC does
    return _address.host(address)
