"""The health port: it answers health checks of any caller, and no other calls."""

import grpc
import jax.numpy as jnp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers import certificates, shared

from agn_optax import errors, service
from agn_optax.service import Access, address, center_pb2

RULE = shared.downpour()
LIMIT = 20  # s, generous: no test should come near it
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def server(tmp_path):
    """A server whose other calls need a certificate and a token."""
    tls = certificates.Authority(tmp_path).issue("/CN=*/OU=chief")
    access = Access(b"chief * 0123456789abcdef")
    security = service.Security(tls=tls, access=access)
    with service.serve(
        RULE, jnp.zeros(3), health_address="127.0.0.1:0", security=security
    ) as server:
        yield server


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.health_address) as channel:
        yield channel


def reply(channel, name=""):
    request = health_pb2.HealthCheckRequest(service=name)
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(request, timeout=LIMIT, wait_for_ready=True).status


@pytest.mark.parametrize("name", ["", address.SERVICE])
def test_health_check_needs_no_token_and_reports_a_drain(server, channel, name):
    assert reply(channel, name) == SERVING
    server._listeners["health"].drain()
    assert reply(channel, name) == NOT_SERVING


def test_health_check_of_an_unknown_service_is_not_found(channel):
    with pytest.raises(grpc.RpcError) as raised:
        reply(channel, "other")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "call",
    [
        f"/{address.SERVICE}/Status",
        "/grpc.health.v1.Health/Watch",
        "/grpc.health.v1.Health/List",
    ],
)
def test_health_port_answers_no_other_calls(channel, call):
    ask = channel.unary_unary(call, center_pb2.StatusRequest.SerializeToString)
    with pytest.raises(grpc.RpcError) as raised:
        ask(center_pb2.StatusRequest(), timeout=LIMIT, wait_for_ready=True)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("call", ["Watch", "List"])
def test_main_port_answers_health_check_but_no_other_health_calls(call):
    """gRPC's own `Watch` would remember every name in a request."""
    request = health_pb2.HealthCheckRequest(service="a name to keep")
    with (
        service.serve(RULE, jnp.zeros(3)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert reply(channel) == SERVING
        ask = channel.unary_stream(
            f"/grpc.health.v1.Health/{call}",
            health_pb2.HealthCheckRequest.SerializeToString,
        )
        with pytest.raises(grpc.RpcError) as raised:
            next(ask(request, timeout=LIMIT))
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_health_port_closes_with_the_server(server, channel):
    assert reply(channel) == SERVING
    server.stop()
    with pytest.raises(grpc.RpcError) as raised:
        health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=LIMIT
        )
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


def test_server_has_no_health_port_by_default():
    with service.serve(RULE) as server:
        assert server.health_address is None


@pytest.mark.parametrize("bad", ["unix:/tmp/health", "nowhere"])
def test_bad_health_address_is_rejected(bad):
    with pytest.raises(errors.InvalidArgumentError, match="address"):
        service.serve(RULE, health_address=bad)
