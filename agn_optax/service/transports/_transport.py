"""The interface of transports, at both ends.

A transport is a module with a `Transport` in it. Its `listen` makes the service's end,
a `Listener`, which answers with the servicer and has the offer by which workers reach
it. Its `dial` makes the worker's end, a `Link`. All transports carry the frames of
`agn_optax.service.wire`. To add a transport, write its module and add it to the list in
`agn_optax.service.transports`.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from agn_optax._internal import in_background, keep_running
from agn_optax.service import center_pb2 as pb
from agn_optax.service.security._tls import Tls
from agn_optax.service.server._servicer import Servicer
from agn_optax.service.transports._connection import Connection
from agn_optax.service.transports._link import Link
from agn_optax.service.wire._buffers import Buffers


class ListenSettings(NamedTuple):
    """Listening settings of a service.

    Attributes:
      address: address for gRPC.
      direct_address: "host:port" for sockets; None for a free port.
      tls: TLS settings of sockets and gRPC.
    """

    address: str
    direct_address: str | None = None
    tls: Tls | None = None


class Target(NamedTuple):
    """A center to connect to.

    Attributes:
      connection: connection to its gRPC service.
      offer: the service's offer of the transport.
      buffers: buffers to receive in.
    """

    connection: Connection
    offer: pb.Offer | None
    buffers: Buffers


class Listener(abc.ABC):
    """The service's end of a transport, for all workers.

    Attributes:
      offer: settings that workers need to connect, except for the key; None if they
        need none.
      address: listening address to show to users; "" if there is nothing to show.
    """

    offer: pb.Offer | None = None
    address = ""

    def __init__(self) -> None:
        self._threads = Threads()

    def start(self) -> None:  # noqa: B027 most transports do nothing here
        """Start to answer, once all transports listen and the servicer knows them."""

    def drain(self) -> None:  # noqa: B027 most transports do nothing here
        """Report in health checks that the service is about to end."""

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """Accept no more workers, end all connections, and wait for the threads."""


class Threads(ThreadPoolExecutor):
    """A pool with one thread per call, for which the exit of the process does not wait.

    The number of threads is not limited: each worker's session is one call, and
    monitoring must be answered whatever the number of workers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: set[Future[Any]] = set()

    def wait(self, timeout: float) -> None:
        """Wait for all calls, because the exit of the process interrupts threads."""
        wait(set(self._running), timeout)

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(call, *args, **kwargs)
        return self._tracked(in_background(bound, "agn-optax center", lasting=True))

    def keep_running(self, loop: Callable[[], object], name: str) -> Future[None]:
        """Run a loop on a thread until it returns, restarting it after exceptions."""
        return self._tracked(keep_running(loop, name))

    def _tracked(self, future: Future[Any]) -> Future[Any]:
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future


class Transport(NamedTuple):
    """A transport of frames between workers and a center.

    Attributes:
      name: name of the transport, as in `connect(transports=[...])`.
      listen: makes the service's end; returns None if the system does not support it.
        Raises `InvalidArgumentError` if an address cannot be used, and OSError if the
        system has no further Unix socket.
      dial: makes the worker's end, connected. Raises OSError if the center cannot be
        reached in this way; another transport may succeed.
    """

    name: str
    listen: Callable[[Servicer, ListenSettings], Listener | None]
    dial: Callable[[Target], Link]
