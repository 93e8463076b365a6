"""Failed TLS handshakes: a clear error at once, distinct from an unreachable center."""

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import time

import grpc
import jax.numpy as jnp
import pytest
from helpers import certificates, ports, shared

from agn_optax import errors, service
from agn_optax.service import Tls

RULE = shared.downpour()
LIMIT = 20  # s, generous: no test should come near it


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("other"), "other")


@contextlib.contextmanager
def center(tls):
    with service.serve(
        RULE, jnp.zeros(3), security=service.Security(tls=tls)
    ) as server:
        yield server.address


@contextlib.contextmanager
def out_of_date(tls):
    """Run a server whose certificate has expired, as it may while a center runs."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    server = grpc.server(pool)
    pair = tls.key.read_bytes(), tls.certificate.read_bytes()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
        pool.shutdown()


def cases(authority, other):
    """Return for each case a server, the worker's settings, and the message."""
    mutual = authority.issue("/CN=center")
    plain = mutual._replace(ca=None)
    mine = authority.issue("/CN=anna")
    elsewhere = authority.issue("/CN=c", "DNS:elsewhere.example.org")._replace(ca=None)
    old = authority.issue("/CN=c", days=-1)
    return {
        "wrong ca": (center(plain), Tls(other.ca), "verify failed"),
        "expired": (out_of_date(old), Tls(authority.ca), "certificate has expired"),
        "other host": (
            center(elsewhere),
            Tls(authority.ca),
            "as '127.0.0.1', failed.*mismatch",
        ),
        "no certificate": (
            center(mutual),
            Tls(authority.ca),
            "requires a certificate of",
        ),
        "unknown certificate": (
            center(mutual),
            other.issue("/CN=anna", ca=authority.ca),
            "requires a certificate of",
        ),
        "plain text to TLS": (center(plain), None, "center speaks TLS: give --tls-ca"),
        "plain text to mutual TLS": (center(mutual), None, "center speaks TLS"),
        "TLS to plain text": (center(None), mine, "not speak TLS, leave --tls-ca"),
    }


NAMES = [
    *("wrong ca", "expired", "other host", "no certificate", "unknown certificate"),
    *("plain text to TLS", "plain text to mutual TLS", "TLS to plain text"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_mismatch_of_tls_settings_raises_at_once(name, authority, other):
    there, tls, message = cases(authority, other)[name]
    with there as address:
        begin = time.monotonic()
        with pytest.raises(errors.EncryptionError, match=message):
            service.connect(address, RULE, tls=tls, timeout=LIMIT)
        with (
            pytest.raises(errors.EncryptionError, match=message),
            service.Observer(address, tls=tls, timeout=LIMIT) as observer,
        ):
            observer.status()
        assert time.monotonic() - begin < LIMIT / 2


def test_missing_tls_settings_raise_over_a_unix_socket(authority, unix_address):
    tls = authority.issue("/CN=center")._replace(ca=None)
    address = unix_address
    with (
        service.serve(RULE, address=address, security=service.Security(tls=tls)),
        pytest.raises(errors.EncryptionError, match="speaks TLS"),
    ):
        service.connect(address, RULE, timeout=LIMIT)


def test_missing_certificate_is_a_reason_and_no_error(authority):
    settings = authority.issue("/CN=center")
    with center(settings) as address:
        mine = settings._replace(key="no such file")
        reason = service.handshake.failure_reason(address, mine)
    assert "no such file" in reason


def test_server_that_does_not_answer_is_unreachable(authority):
    port = ports.free()
    with socket.create_server((ports.HOST, port)):
        for tls in (None, Tls(authority.ca)):
            with pytest.raises(errors.CenterUnreachableError) as silence:
                service.connect(f"127.0.0.1:{port}", RULE, tls=tls, timeout=0.3)
            assert not isinstance(silence.value, errors.EncryptionError)
    for tls in (None, Tls(authority.ca)):  # nothing listens any more
        with pytest.raises(errors.CenterUnreachableError) as silence:
            service.connect(f"127.0.0.1:{port}", RULE, tls=tls, timeout=0.3)
        assert not isinstance(silence.value, errors.EncryptionError)


def test_bad_certificates_of_this_end_are_rejected(authority, tmp_path):
    mine, hers = authority.issue("/CN=anna"), authority.issue("/CN=bert")
    mixed = mine._replace(key=hers.key)
    for made, message in (
        (mixed, "key values mismatch"),
        (mine._replace(key=None), "go together"),
        (mine._replace(ca=mine.key), "cannot be used"),
        (mine._replace(certificate=mine.key), "cannot be used"),
    ):
        assert not isinstance(made, errors.AgnOptaxError)
        with pytest.raises(errors.InvalidArgumentError, match=message):
            service.tls(**made._asdict())
        with pytest.raises(errors.InvalidArgumentError, match=message):
            service.serve(RULE, security=service.Security(tls=made))
        with pytest.raises(errors.InvalidArgumentError, match=message):
            service.connect("127.0.0.1:1", RULE, tls=made)
    assert service.tls(**mine._asdict()) == mine


@pytest.mark.slow
def test_grpc_logs_nothing_about_failed_handshakes(authority, other, tmp_path):
    """Neither at the center nor at its clients."""
    program = (
        "import sys\n"
        "from agn_optax import errors, rules, service\n"
        "ca, certificate, key, other = sys.argv[1:]\n"
        "tls = service.tls(None, certificate, key)\n"
        "security = service.Security(tls=tls)\n"
        "with service.serve(rules.downpour(), security=security) as server:\n"
        "    for tls in (service.tls(other), None):\n"
        "        try:\n"
        "            service.connect(server.address, rules.downpour(), tls=tls)\n"
        "        except errors.EncryptionError:\n"
        "            print('raised')\n"
    )
    done = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-c", program, *authority.issue("/CN=center"), other.ca],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=3 * LIMIT,
    )
    assert done.stdout == "raised\nraised\n"
    assert "handshake" not in done.stderr.lower()
    assert "SSL" not in done.stderr
