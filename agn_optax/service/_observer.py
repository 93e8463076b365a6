"""Looks at a center from outside: takes no part, and needs no rule."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from agn_optax import errors
from agn_optax.service import _address, _status, _tls
from agn_optax.service import center_pb2 as pb
from agn_optax.service._tls import Tls


class Observer:
    """A connection to a center for whoever watches. Also a context manager.

    A call that finds nobody is not tried again; the next one may find somebody.

    Args:
      address: ``"host:port"`` or ``"unix:path"``.
      timeout: seconds that a call may take.
      tls: who vouches for the center, and a certificate and key of this end if it wants
        them; None for plain text, which must stay on this machine.
      credentials: of gRPC instead, where `Tls` cannot say it.
      insecure: allows plain text beyond this machine.

    Raises:
      InvalidArgumentError: the address is none, or plain text would leave this machine.

    Example:
      >>> import agn_optax, agn_optax.service
      >>> rule = agn_optax.rules.downpour()
      >>> with agn_optax.service.serve(rule) as server:
      ...     with agn_optax.service.Observer(server.address) as observer:
      ...         print(observer.status()["rule"])
      downpour
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 5.0,
        tls: Tls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        insecure: bool = False,
    ) -> None:
        self.address = _address.check(address)
        _tls.check(tls, credentials)
        if tls is not None:
            credentials = tls.client_credentials()
        _address.check_plaintext(address, credentials is not None, insecure)
        self._timeout = timeout
        self._channel = (
            grpc.insecure_channel(address, _address.client_options(address))
            if credentials is None
            else grpc.secure_channel(
                address, credentials, _address.client_options(address)
            )
        )

    def status(self) -> dict[str, Any]:
        """Who is there: what ``agn-optax status --json`` prints.

        Raises:
          CenterUnreachableError: nobody answers.
          ProtocolError: what answers is no center.
        """
        return as_dict(self._call("Status", pb.StatusRequest(), pb.StatusReply))

    def describe(self) -> pb.Description:
        """What the center says of itself.

        Raises:
          CenterUnreachableError: nobody answers.
          ProtocolError: what answers is no center, or one of another release.
        """
        request = pb.DescribeRequest(protocol=_address.PROTOCOL)
        return self._call("Describe", request, pb.Description)

    def health(self) -> str:
        """What gRPC's health service says of the center: ``"SERVING"`` if all is well.

        Raises:
          CenterUnreachableError: nobody answers.
          ProtocolError: what answers has no health service, or knows no center.
        """
        request = health_pb2.HealthCheckRequest(service=_address.SERVICE)
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            status = health.Check(request, timeout=self._timeout).status
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                raise errors.ProtocolError(
                    f"the gRPC server at {self.address} has no center of agn_optax"
                ) from None
            raise self._exception_of(error) from None
        return health_pb2.HealthCheckResponse.ServingStatus.Name(status)

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, name: str, request: Any, reply: Any) -> Any:
        call = self._channel.unary_unary(
            f"/{_address.SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        try:
            return call(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise self._exception_of(error) from None

    def _exception_of(self, error: Any) -> errors.AgnOptaxError:
        made = _status.exception_of(error, self.address)
        if type(made) is errors.CenterUnreachableError:
            return errors.CenterUnreachableError(
                f"the center at {self.address} does not answer: {made}"
            )
        return made


def as_dict(message: Any) -> dict[str, Any]:
    """A protobuf message in terms of JSON; what is absent is None."""
    said = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            value = [as_dict(each) for each in value]
        elif field.has_presence and not message.HasField(field.name):
            value = None
        said[field.name] = value
    return said
