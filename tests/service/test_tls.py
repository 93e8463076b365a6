"""Encrypted connections: the same certificates for gRPC and for direct sockets."""

import contextlib
import dataclasses
import socket
import ssl

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import certificates, links, sessions, shared
from helpers.support import SHARES_MEMORY, assert_identical

from agn_optax import codecs, errors, service
from agn_optax.service import Tls

RULE = shared.downpour()
SIZE = 300_000  # elements: more than a socket takes at once
LIMIT = 20  # s, generous: no test should come near it
pytestmark = pytest.mark.usefixtures("patient_dials")


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server_tls(pem):
    return Tls(None, *pem)


@pytest.fixture(scope="module")
def mutual(pem):
    """Settings of both ends for mutual TLS."""
    return Tls(pem[0], *pem)


def params():
    return {"w": jnp.ones(SIZE), "v": jnp.zeros((3, 5)), "b": jnp.zeros(())}


@contextlib.contextmanager
def connected(server, tls, *transports, rule=RULE, **settings):
    names = transports or ("memory", "socket", "grpc")
    settings = {"tls": tls, "timeout": LIMIT, "transports": names, **settings}
    with service.connect(server.address, rule, **settings) as center:
        yield center


def transport_of(center):
    (session,) = sessions.of_center(center)
    return session.transport


def exchanged(server, tls, *transports, **settings):
    """Make three exchanges; return the last answer and the transport."""
    with connected(server, tls, *transports, **settings) as center:
        for version in range(3):
            sent = jax.tree.map(lambda x, v=version: jnp.sin(x + v), params())
            answer = sessions.exchange(
                center, sent, anchor_version=version, worker="anna"
            )
        return jax.tree.map(np.asarray, answer.params), transport_of(center)


@pytest.mark.parametrize("codec", [codecs.identity(), codecs.cast("bfloat16")], ids=str)
def test_every_transport_gives_identical_results(server_tls, pem, codec):
    numbers, rule = [], dataclasses.replace(RULE, codec=codec)
    for name in ("grpc", "socket", *["memory"] * SHARES_MEMORY):
        with service.serve(
            rule, params(), security=service.Security(tls=server_tls)
        ) as server:
            made = exchanged(server, Tls(pem[0]), name, rule=rule)
        numbers.append(made[0])
        assert made[1] == name
    for other in numbers[1:]:
        assert_identical(other, numbers[0])


@pytest.mark.slow
def test_many_small_leaves_are_exchanged_over_tls(server_tls, pem):
    leaves = [jnp.full(i % 7, float(i)) for i in range(500)]
    with (
        service.serve(
            RULE, leaves, security=service.Security(tls=server_tls)
        ) as server,
        connected(server, Tls(pem[0]), "socket") as center,
    ):
        answer = sessions.exchange(center, leaves, anchor_version=0, worker="anna")
        assert all(not leaf.any() for leaf in answer.params)
        (session,) = sessions.of_center(center)
        link = sessions.link(session)
        assert link._sock.version() in ("TLSv1.2", "TLSv1.3")


def test_mutual_tls_needs_certificates_on_every_transport(mutual, pem):
    with service.serve(RULE, params(), security=service.Security(tls=mutual)) as server:
        assert exchanged(server, mutual, "socket")[1] == "socket"
        # The direct socket needs a client certificate, too, besides the key.
        for tls, error in ((Tls(pem[0]), OSError), (None, OSError)):
            with pytest.raises(error):
                dial(server, tls)
        with pytest.raises(errors.CenterUnreachableError):
            service.connect(server.address, RULE, tls=Tls(pem[0]), timeout=0.3)


def dial(server, tls):
    """Connect to a center's direct socket with a known key."""
    with service.Observer(server.address, timeout=LIMIT, tls=tls) as observer:
        link = links.dialled(observer, server, "socket")
        try:
            link.read_header()  # a missing certificate raises here
        finally:
            link.cancel()


def test_center_with_another_host_name_is_not_trusted(tmp_path):
    certificate, key = certificates.make(tmp_path, "DNS:elsewhere.example.org")
    with service.serve(
        RULE, params(), security=service.Security(tls=Tls(None, certificate, key))
    ) as server:
        with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
            dial(server, Tls(certificate))
        with pytest.raises(errors.CenterUnreachableError):
            service.connect(server.address, RULE, tls=Tls(certificate), timeout=0.3)


def test_center_of_an_unknown_authority_is_not_trusted(server_tls, tmp_path):
    other, _ = certificates.make(tmp_path)
    with (
        service.serve(
            RULE, params(), security=service.Security(tls=server_tls)
        ) as server,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        dial(server, Tls(other))


def test_plain_text_is_not_answered_by_a_center_with_tls(server_tls):
    with service.serve(
        RULE, params(), security=service.Security(tls=server_tls)
    ) as server:
        host, _, port = server.direct_address.rpartition(":")
        listener = sessions.listener(server, "socket")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as end:
            end.sendall(b"agn_optax direct 2\n" + sessions.offer(server, "socket").key)
            received = b""
            with contextlib.suppress(ConnectionError):
                while more := end.recv(100):
                    received += more
            assert b"agn_optax" not in received
        assert not listener._connections


def test_broken_encrypted_connection_is_reestablished(server_tls, pem):
    with (
        service.serve(
            RULE, params(), security=service.Security(tls=server_tls)
        ) as server,
        connected(server, Tls(pem[0]), "socket") as center,
    ):
        for version in range(4):
            sessions.exchange(center, params(), anchor_version=version, worker="anna")
            for each in list(sessions.listener(server, "socket")._connections.values()):
                each.cancel()
        assert server.center.version == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls": Tls()}, "needs both"),
        ({"tls": Tls(certificate="c.pem")}, "go together"),
        ({"tls": Tls(None, "no such file", "k")}, "cannot be used.*: 'no such file'"),
        ({"tls": Tls(None, __file__, __file__)}, "cannot be used"),
        ({"tls": Tls(None, "c.pem", b"secret")}, "key must be the path.*got bytes"),
        ({"tls": True}, "tls must be a Tls"),
    ],
)
def test_bad_settings_are_rejected(settings, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        service.serve(RULE, security=service.Security(**settings))


def test_public_address_needs_tls():
    for settings in ({"address": "8.8.8.8:0"}, {"direct_address": "8.8.8.8:0"}):
        with pytest.raises(errors.InvalidArgumentError, match="give tls="):
            service.serve(RULE, **settings)
