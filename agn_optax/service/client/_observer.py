"""Monitoring and operation of a center from outside, without its rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from grpc_health.v1 import health, health_pb2

from agn_optax import errors
from agn_optax.center import Snapshot
from agn_optax.service import _address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.client._remote import pull
from agn_optax.service.security import _token
from agn_optax.service.security._tls import Tls
from agn_optax.service.transports._connection import Connection
from agn_optax.service.wire import _trees

T = TypeVar("T")


class Observer(contextlib.AbstractContextManager["Observer"]):
    """A connection to a center for monitoring and operation. Also a context manager.

    A call that does not reach the center fails and is not retried. The connection stays
    usable, and a later call may succeed.

    Args:
      address: ``"host:port"``, ``"unix:path"`` or ``"file:path"``, as in `connect`.
      timeout: seconds that a call may take.
      tls: the certificate authorities that the center's certificate is checked against,
        and a certificate and key of this end if the center asks for them; None for
        plain text, which is only allowed within this machine.
      insecure: allows plain text beyond this machine.
      token: as in `connect`.

    Raises:
      InvalidArgumentError: the address is not valid, or plain text would leave this
        machine.

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
        insecure: bool = False,
        token: _token.Token = None,
    ) -> None:
        self._connection = Connection(address, timeout, tls, insecure, token)

    @property
    def address(self) -> str:
        """The center's address."""
        return self._connection.address

    def status(self) -> dict[str, Any]:
        """Return the center's status, as ``agn-optax status --json`` prints it.

        Raises:
          CenterUnreachableError: the center does not answer.
          ProtocolError: the server at the address is not a center.
        """
        return self._call(self._connection.status)

    def describe(self) -> pb.Description:
        """Return the center's description.

        Raises:
          CenterUnreachableError: the center does not answer.
          ProtocolError: the server at the address is not a center, or is one of an
            incompatible release.
        """
        return self._call(self._connection.describe)

    def pull(self) -> Snapshot:
        """Return the current version of the center, in dicts, lists and tuples.

        This needs the role of a reader.

        Raises:
          CenterUnreachableError: the center does not answer.
          NotAllowedError: this end does not have the role.
          NotInitializedError: the center has no parameters yet.
        """

        def attempt() -> Snapshot:
            schema = _trees.from_bytes(self._connection.describe().schema)
            snapshot, arrays = pull(self._connection, lambda: schema)
            return Snapshot(_trees.build(schema, arrays), snapshot.version)

        return self._call(attempt)

    def drain(self) -> None:
        """Have the center drain and end, as SIGTERM does.

        This needs the role of an operator.

        Raises:
          CenterUnreachableError: the center does not answer.
          NotAllowedError: this end does not have the role.
        """
        self._call(self._connection.drain)

    def health(self) -> str:
        """Return the status of gRPC's health service: ``"SERVING"`` if all is well.

        Raises:
          CenterUnreachableError: the center does not answer.
          ProtocolError: the server has no health service, or is not a center.
        """
        request = health_pb2.HealthCheckRequest(service=_address.SERVICE)
        reply = health_pb2.HealthCheckResponse
        path = f"/{health.SERVICE_NAME}/Check"
        checked = self._call(lambda: self._connection.unary(path, request, reply))
        return reply.ServingStatus.Name(checked.status)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except errors.CenterUnreachableError as error:
            if type(error) is not errors.CenterUnreachableError:
                raise
            raise errors.CenterUnreachableError(
                f"the center at {self.address} does not answer: {error}"
            ) from None
