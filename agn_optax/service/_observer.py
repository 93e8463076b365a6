"""Looks at a center from outside: takes no part, and needs no rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2

from agn_optax import errors
from agn_optax.center import Snapshot
from agn_optax.service import _address, _token
from agn_optax.service import center_pb2 as pb
from agn_optax.service._connection import Connection
from agn_optax.service._path import Route
from agn_optax.service._probe import Way, measure
from agn_optax.service._remote import pull
from agn_optax.service._tls import Tls
from agn_optax.service.transports import named
from agn_optax.service.wire import _trees

T = TypeVar("T")


class Observer(contextlib.AbstractContextManager["Observer"]):
    """A connection to a center for whoever watches. Also a context manager.

    A call that finds nobody is not tried again; the next one may find somebody.

    Args:
      address: ``"host:port"``, ``"unix:path"`` or ``"file:path"``, as of `connect`.
      timeout: seconds that a call may take.
      tls: who vouches for the center, and a certificate and key of this end if it wants
        them; None for plain text, which must stay on this machine.
      credentials: of gRPC instead, where `Tls` cannot say it.
      insecure: allows plain text beyond this machine.
      token: as of `connect`.

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
        token: _token.Token = None,
    ) -> None:
        self._connection = Connection(
            address, timeout, tls, credentials, insecure, token
        )

    @property
    def address(self) -> str:
        """Where the center is."""
        return self._connection.address

    def status(self) -> dict[str, Any]:
        """Who is there: what ``agn-optax status --json`` prints.

        Raises:
          CenterUnreachableError: nobody answers.
          ProtocolError: what answers is no center.
        """
        return self._ask(self._connection.status)

    def describe(self) -> pb.Description:
        """What the center says of itself.

        Raises:
          CenterUnreachableError: nobody answers.
          ProtocolError: what answers is no center, or one of another release.
        """
        return self._ask(self._connection.describe)

    def pull(self) -> Snapshot:
        """One version of the center, in dicts, lists and tuples; takes a reader.

        Raises:
          CenterUnreachableError: nobody answers.
          NotAllowedError: this end may not.
          NotInitializedError: the center has no parameters yet.
        """

        def attempt() -> Snapshot:
            schema = _trees.from_bytes(self._connection.describe().schema)
            said, arrays = pull(self._connection, lambda: schema)
            return Snapshot(_trees.build(schema, arrays), said.version)

        return self._ask(attempt)

    def measure(
        self,
        transport: str,
        *,
        route: Route | None = None,
        timeout: float | None = None,
    ) -> Way:
        """How fast a way is, each direction by itself; takes a reader, and a second.

        Args:
          transport: ``"memory"``, ``"socket"`` or ``"grpc"``, as `connect` has them.
          route: of a socket: by which interface it connects, and how long its segments
            may be; None leaves that to the system.
          timeout: seconds in which some kilobytes must come through; None for those of
            every call.

        Raises:
          CenterUnreachableError: there is no such way.
          NotAllowedError: this end may not.
          ProtocolError: the center is of a release that cannot be measured.
        """
        (way,) = named([transport])
        patience = self._connection.timeout if timeout is None else timeout

        def attempt() -> Way:
            offers = {offer.transport: offer for offer in self.describe().offers}
            own = offers.get(transport)
            try:
                return measure(
                    self._connection, way, own, timeout=patience, route=route
                )
            except errors.AgnOptaxError:
                raise  # some of them are errors of the system, too
            except OSError as error:
                raise errors.CenterUnreachableError(
                    f"no way by {transport}: {error}"
                ) from None

        return self._ask(attempt)

    def save(self) -> int:
        """Has the center write a snapshot now, where it is kept; takes an operator.

        The call's ``timeout`` is for all of that. If it is over, the center goes on.

        Returns:
          The snapshot's version.

        Raises:
          CenterUnreachableError: nobody answers in time.
          NotAllowedError: this end is no operator.
          DurabilityError: it cannot be written, or that center is kept nowhere.
          NotInitializedError: it has no parameters yet.
        """
        return self._ask(self._connection.save)

    def drain(self) -> None:
        """Has the center end, as SIGTERM does; takes the role of an operator.

        Raises:
          CenterUnreachableError: nobody answers.
          NotAllowedError: this end is no operator.
        """
        self._ask(self._connection.drain)

    def health(self) -> str:
        """What gRPC's health service says of the center: ``"SERVING"`` if all is well.

        Raises:
          CenterUnreachableError: nobody answers.
          ProtocolError: what answers has no health service, or knows no center.
        """
        request = health_pb2.HealthCheckRequest(service=_address.SERVICE)
        reply = health_pb2.HealthCheckResponse
        path = f"/{health.SERVICE_NAME}/Check"
        said = self._ask(lambda: self._connection.unary(path, request, reply))
        return reply.ServingStatus.Name(said.status)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except errors.CenterUnreachableError as error:
            if type(error) is not errors.CenterUnreachableError:
                raise
            raise errors.CenterUnreachableError(
                f"the center at {self.address} does not answer: {error}"
            ) from None
