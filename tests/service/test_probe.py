"""Probes, which measure the bandwidth of connections: results and limits."""

import time

import jax.numpy as jnp
import pytest
from helpers import links, sessions, shared, tuning

from agn_optax import errors, service
from agn_optax.service import center_pb2 as pb

RULE = shared.downpour()
MOST = 4 << 20  # bytes of a probe in each direction
pytestmark = pytest.mark.usefixtures("patient_dials")


@pytest.fixture(scope="module")
def server():
    with service.serve(RULE, jnp.zeros(3), limits=service.Limits(calls=None)) as server:
        yield server


@pytest.mark.parametrize("transport", ["memory", "socket", "grpc"])
def test_every_transport_is_measured_in_both_directions(server, transport):
    with service.Observer(server.address) as observer:
        measured = observer.measure(transport)
    assert measured.transport == transport
    assert 0 < measured.round_trip < 5
    assert measured.up > 1e6
    assert measured.down > 1e6


def test_single_pause_does_not_lower_the_measured_rate(server, monkeypatch):
    """A busy end may delay one probe; the next one of the same size is quick."""
    send, pauses = service.sockets.SocketLink.send, [0.3]

    def late(link, frame):
        if frame.nbytes and pauses:
            time.sleep(pauses.pop())
        send(link, frame)

    monkeypatch.setattr(service.sockets.SocketLink, "send", late)
    with service.Observer(server.address) as observer:
        measured = observer.measure("socket")
    assert not pauses
    assert measured.up > 1e6


def test_probes_do_not_affect_workers(server):
    before = server.center.version
    with (
        service.Observer(server.address) as observer,
        service.connect(server.address, RULE) as center,
    ):
        sessions.exchange(center, jnp.ones(3), anchor_version=before, worker="w")
        observer.measure("socket")
        there = observer.status()["workers"]
        answer = sessions.exchange(
            center, jnp.ones(3), anchor_version=before + 1, worker="w"
        )
    assert answer.version == before + 2
    assert [worker["name"] for worker in there] == ["w"]


def linked(server, transport):
    observer = service.Observer(server.address)
    return observer, links.dialled(observer, server, transport)


def send(observer, link, frame):
    with observer._connection.watching(link):
        links.send(link, frame)
        return link.read_header()


@pytest.mark.parametrize("transport", ["socket", "grpc"])
@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (pb.Probe(answer=MOST + 1), "at most 4194304 bytes each way"),
        (pb.Probe(size=3), "a probe of 3 bytes was expected, got 0"),
    ],
)
def test_bad_probes_are_rejected(server, transport, probe, message):
    observer, link = linked(server, transport)
    with observer, pytest.raises(errors.ProtocolError, match=message):
        send(observer, link, pb.Header(probe=probe))


def test_other_messages_after_a_probe_are_rejected(server):
    observer, link = linked(server, "socket")
    with observer, observer._connection.watching(link):
        links.send(link, pb.Header(probe=pb.Probe(size=5, answer=7)), size=5)
        assert link.read_header().HasField("probed")
        assert len(links.receive(link, 7)) == 7
        links.send(link, pb.Header(acknowledge=1))
        with pytest.raises(errors.ProtocolError, match="expected a probe"):
            link.read_header()


def test_number_of_concurrent_measurements_is_limited(server, monkeypatch):
    many = [linked(server, "socket") for _ in range(12)]
    try:
        for observer, link in many:
            send(observer, link, pb.Header(probe=pb.Probe()))
        # Half of this is the time that a measurement waits for its turn.
        tuning.set_stall_timeout(monkeypatch, 2.0)
        with (
            service.Observer(server.address, timeout=5.0) as observer,
            pytest.raises(
                errors.CenterUnreachableError, match="other callers are already"
            ),
        ):
            observer.measure("socket")
    finally:
        for observer, link in many:
            link.cancel()
            observer.close()


def test_measuring_an_unavailable_transport_raises():
    with (
        service.serve(RULE, jnp.zeros(3), direct_address=False) as server,
        service.Observer(server.address) as observer,
        pytest.raises(errors.CenterUnreachableError, match="cannot connect by socket"),
    ):
        observer.measure("socket")
