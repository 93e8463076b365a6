"""Health checks of gRPC, which a center answers at its own port."""

import grpc
import jax.numpy as jnp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers import sessions, shared

from agn_optax import service
from agn_optax.service import address

RULE = shared.downpour()
LIMIT = 20  # s, generous: no test should come near it
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def server():
    with service.serve(RULE, jnp.zeros(3)) as server:
        yield server


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def reply(channel, name=""):
    request = health_pb2.HealthCheckRequest(service=name)
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(request, timeout=LIMIT, wait_for_ready=True).status


@pytest.mark.parametrize("name", ["", address.SERVICE])
def test_health_check_reports_a_drain(server, channel, name):
    assert reply(channel, name) == SERVING
    sessions.listener(server, "grpc").drain()
    assert reply(channel, name) == NOT_SERVING


def test_health_check_of_an_unknown_service_is_not_found(channel):
    with pytest.raises(grpc.RpcError) as raised:
        reply(channel, "other")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("call", ["Watch", "List"])
def test_other_health_calls_are_not_answered(channel, call):
    """gRPC's own `Watch` would remember every name in a request."""
    request = health_pb2.HealthCheckRequest(service="a name to keep")
    assert reply(channel) == SERVING
    ask = channel.unary_stream(
        f"/grpc.health.v1.Health/{call}",
        health_pb2.HealthCheckRequest.SerializeToString,
    )
    with pytest.raises(grpc.RpcError) as raised:
        next(ask(request, timeout=LIMIT))
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
