"""The seam: what a transport is, at both ends.

A transport is a file with a `Transport` in it. `listen` makes the service's end, a
`Listener`, which answers with the servicer and says what workers must know to reach it;
`dial` makes the worker's end, a `Link`. All of them carry the packets of
`agn_optax.service.wire`. To add one, write its file and put it on the list in
`agn_optax.service.transports`.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import grpc

from agn_optax import errors
from agn_optax._internal import in_background, keep_running
from agn_optax.service import _status
from agn_optax.service import center_pb2 as pb
from agn_optax.service._connection import Connection
from agn_optax.service._path import Path, Route
from agn_optax.service._servicer import Servicer
from agn_optax.service._tls import Tls
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import Parcel, Reader, nothing


class Place(NamedTuple):
    """Where a service is to listen, and how.

    Attributes:
      address: for gRPC.
      direct_address: "host:port" for sockets; None for a port that is free.
      tls: what encrypts sockets, and gRPC as well.
      credentials: of gRPC alone.
      reflection: whether gRPC tells of its services and connections.
      page: "host:port" of the page; None for none.
      health: "host:port" where anybody may ask whether it serves; None for nowhere.
    """

    address: str
    direct_address: str | None = None
    tls: Tls | None = None
    credentials: grpc.ServerCredentials | None = None
    reflection: bool = True
    page: str | None = None
    health: str | None = None


class Target(NamedTuple):
    """A center to be dialled.

    Attributes:
      connection: to its gRPC service.
      offer: what it says of the transport.
      buffers: to receive in.
      route: how to get there; None leaves that to the system, and to gRPC anyway.
    """

    connection: Connection
    offer: pb.Offer | None
    buffers: Buffers
    route: Route | None = None


class Listener(abc.ABC):
    """The service's end of a transport, for all workers.

    Attributes:
      offer: what workers must know to dial it, but for the key; None for nothing.
      address: where it listens, for people; "" where that says nothing.
    """

    offer: pb.Offer | None = None
    address = ""

    def __init__(self) -> None:
        self._threads = Threads()

    def start(self) -> None:  # noqa: B027 most have nothing to wait for
        """Answers, now that every transport listens and the servicer knows of them."""

    def drain(self) -> None:  # noqa: B027 most have nobody to tell
        """Tells those who ask that the service is about to end."""

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """Takes no more workers, ends what there is, and waits for its threads."""


class Threads(ThreadPoolExecutor):
    """A thread for every call, for which the end of the process does not wait.

    As many as there are calls: a worker's life is one, and whoever watches must be
    answered however many workers there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: set[Future[Any]] = set()

    def wait(self, timeout: float) -> None:
        """Until all calls have ended: in a process that ends, a thread is cut off."""
        wait(set(self._running), timeout)

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(call, *args, **kwargs)
        return self._owned(in_background(bound, "agn-optax center", lasting=True))

    def keep_running(self, loop: Callable[[], object], name: str) -> Future[None]:
        """Run a loop on a thread until it returns, whatever it raises."""
        return self._owned(keep_running(loop, name))

    def _owned(self, future: Future[Any]) -> Future[Any]:
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future


class Link(Reader, abc.ABC):
    """The worker's end of its call, each way. One thread at a time uses it.

    Args:
      receive, buffers: as of any `Reader`.

    Attributes:
      ended: what its methods raise when the call has ended; `why_it_ended` has more.
      sent: called when something went out, as ``heard`` is when something came.
      served: called when a packet came that is no refusal.
      deadline: when whoever watches it cancels it; monotonic seconds.
      is_late: whether that has happened.
      transport: its name, once it is dialled for a worker.
    """

    transport = ""

    ended: tuple[type[Exception], ...]

    def __init__(self, receive: Callable[[memoryview], int], buffers: Buffers) -> None:
        super().__init__(receive, buffers)
        self.sent = self.served = nothing
        self.deadline = math.inf
        self.is_late = False

    @abc.abstractmethod
    def send(self, parcel: Parcel) -> None:
        """Sends a parcel; its arrays are read until the answer is there."""

    def control(self) -> pb.Frame:
        """The control part of the next packet."""
        frame = super().control()
        if frame is None:
            raise EOFError("the call has ended")
        if frame.HasField("refused"):
            raise _status.exception_in(frame.refused)
        self.served()
        return frame

    def path(self) -> Path | None:
        """What the system knows of its connection; None where there is nothing."""
        return None

    @abc.abstractmethod
    def why_it_ended(self) -> errors.AgnOptaxError:
        """The exception that the call ended with."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether it is known to have ended."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends it, from any thread."""


class Transport(NamedTuple):
    """A way for packets between a worker and a center.

    Attributes:
      name: as `connect(transports=[...])` has it.
      listen: makes the service's end; None where there is none, as on another system.
        Raises `InvalidArgumentError` where nothing can listen where it was told to, and
        OSError where nothing can listen and nobody insists.
      dial: makes the worker's end, connected. Raises OSError if there is no way;
        another transport may have one.
    """

    name: str
    listen: Callable[[Servicer, Place], Listener | None]
    dial: Callable[[Target], Link]
