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


def failure_reason(address: str, tls: Tls | None, timeout: float = _TIMEOUT) -> str:
    """Return why a TLS handshake with a center fails.

    Args:
      address: the center's address.
      tls: TLS settings of this end; None for plain text.
      timeout: seconds that each step may take.

    Returns:
      The reason as text; "" if the handshake succeeds, or the center does not answer.
    """
    host = host_name(address)
    is_greeted = False
    try:
        context = _any_certificate() if tls is None else tls.context(serves=False)
        context.set_alpn_protocols(["h2"])
        with (
            connect(address, timeout) as plain_sock,
            context.wrap_socket(plain_sock, server_hostname=host) as sock,
        ):
            if tls is None:
                return "the center speaks TLS: give --tls-ca FILE.pem (tls= in Python)"
            is_greeted = True
            sock.sendall(_PREFACE)
            if sock.recv(1):
                return ""
    except errors.InvalidArgumentError as error:  # files have changed meanwhile
        return str(error)
    except OSError as error:
        is_tls = isinstance(error, ssl.SSLError)
        if not is_greeted and tls is not None and is_tls:
            return (
                f"the TLS handshake with the center, as {host!r}, failed: {error}. "
                "Give the authority of its certificate as --tls-ca (ca= of Tls); if it "
                "does not speak TLS, leave --tls-ca out"
            )
        if not (is_greeted and (is_tls or isinstance(error, ConnectionError))):
            return ""
    return (
        "the center requires a certificate of this end, issued by an authority that "
        f"the center trusts (its ca), got {tls}: give --tls-certificate and "
        "--tls-key (certificate= and key= of Tls)"
    )


def host_name(address: str) -> str:
    """Return the host name that a center's certificate must have."""
    # gRPC expects this name at a Unix socket.
    return "localhost" if address.startswith("unix:") else _address.host(address)


def connect(address: str, timeout: float) -> socket.socket:
    """Return a socket that is connected to an address.

    Raises:
      OSError: no connection can be made.
    """
    if not address.startswith("unix:"):
        port = int(address.rpartition(":")[2])
        return socket.create_connection((_address.host(address), port), timeout)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout)
    try:
        sock.connect(_address.path(address))
    except BaseException:
        sock.close()
        raise
    return sock


def _any_certificate() -> ssl.SSLContext:
    """Return a context that accepts any certificate, to find out if TLS is spoken."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
