"""The transports between workers and a center.

Each transport is a module of this package with both ends; `_transport` has their
interface. This module lists the transports.
"""

from collections.abc import Iterable
from typing import Any

from agn_optax import errors
from agn_optax.service.transports import _socket as sockets  # noqa: F401
from agn_optax.service.transports._grpc import GRPC
from agn_optax.service.transports._grpc import GrpcLink as GrpcLink
from agn_optax.service.transports._grpc import HealthListener as HealthListener
from agn_optax.service.transports._memory import MEMORY
from agn_optax.service.transports._socket import SOCKET
from agn_optax.service.transports._transport import Link as Link
from agn_optax.service.transports._transport import Listener as Listener
from agn_optax.service.transports._transport import ListenSettings as ListenSettings
from agn_optax.service.transports._transport import Target as Target
from agn_optax.service.transports._transport import Transport as Transport

# In order of preference.
TRANSPORTS: list[Transport] = [MEMORY, SOCKET, GRPC]


def named(given: Any) -> list[Transport]:
    """Return the transports with the ``given`` names, in any order; all for None.

    Raises:
      InvalidTypeError: ``given`` is not a list of names.
      InvalidArgumentError: a name is unknown or repeated, or there are none.
    """
    known = {transport.name: transport for transport in TRANSPORTS}
    if given is None:
        return TRANSPORTS
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise errors.InvalidTypeError(
            f"transports must be a list of names such as {list(known)}, got {given!r}"
        )
    given = tuple(given)
    if not given or not set(given) <= set(known) or len(set(given)) < len(given):
        raise errors.InvalidArgumentError(
            f"transports must be some of {', '.join(known)}, each once, got {given}"
        )
    return [known[name] for name in given]
