"""How what travels gets from one side to the other.

A transport is a file here, with both ends inside (`_transport` has the seam); this is
the list of them. `_dialling` has how a worker chooses among them.
"""

from agn_optax.service.transports._grpc import Grpc, GrpcLink
from agn_optax.service.transports._memory import Memory
from agn_optax.service.transports._socket import Socket
from agn_optax.service.transports._transport import (
    Link,
    Listener,
    Place,
    Target,
    Transport,
)

# In order of preference.
TRANSPORTS: list[Transport] = [Memory(), Socket(), Grpc()]

__all__ = [
    "TRANSPORTS",
    "GrpcLink",
    "Link",
    "Listener",
    "Place",
    "Target",
    "Transport",
]
