"""The center as a service: a small gRPC shell around `agn_optax.center`.

- `server`: a center that answers calls; `client`: the center as workers see it, and an
  observer for monitoring and operation.
- `wire`: trees as bytes; `transports`: how the bytes travel; `security`: certificates,
  tokens, roles and rate limits.
- `_environment`: settings of launched workers, read from environment variables.
- `center.proto`: the protocol.

This package needs the extra ``agn_optax[service]``; `agn_optax` itself does not import
it. Names that are imported with `as` are for the layers above, not for users.
"""

from agn_optax._signals import delay_sigterm
from agn_optax.center import ExpectedLink
from agn_optax.service import _absl  # noqa: F401 before gRPC is imported
from agn_optax.service import _address as address  # noqa: F401
from agn_optax.service import _published as publishing  # noqa: F401
from agn_optax.service import center_pb2 as messages  # noqa: F401
from agn_optax.service import wire as wire
from agn_optax.service._environment import RULE as RULE
from agn_optax.service._environment import Environment, environment
from agn_optax.service._published import published as published
from agn_optax.service._watchdog import timed as timed
from agn_optax.service.client._client import INSECURE as INSECURE
from agn_optax.service.client._client import RemoteCenter, connect
from agn_optax.service.client._observer import Observer
from agn_optax.service.security import _handshake as handshake  # noqa: F401
from agn_optax.service.security import _token as tokens  # noqa: F401
from agn_optax.service.security._access import EVERYBODY as EVERYBODY
from agn_optax.service.security._access import Access
from agn_optax.service.security._tls import TLS_CA as TLS_CA
from agn_optax.service.security._tls import Tls, tls
from agn_optax.service.server._server import DEFAULT_GRACE as DEFAULT_GRACE
from agn_optax.service.server._server import Server, serve
from agn_optax.service.server._servicer import Servicer as Servicer
from agn_optax.service.server._settings import LOOPBACK as LOOPBACK
from agn_optax.service.server._settings import Limits, Security
from agn_optax.service.server._settings import ServerSettings as ServerSettings
from agn_optax.service.transports import Listener as Listener
from agn_optax.service.transports import sockets as sockets
from agn_optax.service.transports._connection import as_dict as as_dict
from agn_optax.service.transports._interfaces import interface_of as interface_of
from agn_optax.service.wire import _fingerprint as fingerprint  # noqa: F401

__all__ = [
    "Access",
    "Environment",
    "ExpectedLink",
    "Limits",
    "Observer",
    "RemoteCenter",
    "Security",
    "Server",
    "Tls",
    "connect",
    "delay_sigterm",
    "environment",
    "serve",
    "tls",
]
