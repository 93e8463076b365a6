"""The transports between workers and a center.

Each transport is a module of this package with both ends; `_transport` and
`_link` have their interface. This module lists the transports.
"""

from collections.abc import Iterable
from typing import Any

from agn_optax import errors
from agn_optax.service.transports import _socket as sockets  # noqa: F401
from agn_optax.service.transports._grpc import GRPC
from agn_optax.service.transports._grpc import GrpcLink as GrpcLink
from agn_optax.service.transports._link import Link as Link
from agn_optax.service.transports._memory import MEMORY
from agn_optax.service.transports._socket import SOCKET
from agn_optax.service.transports._transport import Listener as Listener
from agn_optax.service.transports._transport import ListenSettings as ListenSettings
from agn_optax.service.transports._transport import Target as Target
from agn_optax.service.transports._transport import Transport as Transport

# In order of preference.
TRANSPORTS: list[Transport] = [MEMORY, SOCKET, GRPC]


def transports_named(names: Any) -> list[Transport]:
    """Return the transports with these names, in their order; all for None.

    Raises:
      InvalidTypeError: ``names`` is not a list of names.
      InvalidArgumentError: a name is unknown or repeated, or there are none.
    """
    by_name = {transport.name: transport for transport in TRANSPORTS}
    if names is None:
        return TRANSPORTS
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise errors.InvalidTypeError(
            f"transports must be a list of names such as {list(by_name)}, got {names!r}"
        )
    names = tuple(names)
    if not names or not set(names) <= set(by_name) or len(set(names)) < len(names):
        raise errors.InvalidArgumentError(
            f"transports must be some of {', '.join(by_name)}, each once, got {names}"
        )
    return [by_name[name] for name in names]
