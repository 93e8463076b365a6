"""The worker's end of a call, as each transport implements it."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports._interfaces import interface_of
from agn_optax.service.wire import _errors
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import Frame, FrameReader, do_nothing


class Link(FrameReader, abc.ABC):
    """The worker's end of a call, in both directions; for one thread at a time.

    Args:
      receive, buffers: see `FrameReader`.

    Attributes:
      end_errors: exceptions that its methods raise if the call has ended; see
        `end_reason` for the reason.
      on_sent: called when bytes were sent.
      on_served: called when a frame was received that is not an error.
      deadline: time at which the watchdog cancels the call; monotonic seconds.
      is_late: whether the watchdog has canceled the call.
      transport, detour: name of the transport, and why a direct connection was not
        made, once the link was dialed for a worker.
    """

    transport = detour = ""

    end_errors: tuple[type[Exception], ...]

    def __init__(self, receive: Callable[[memoryview], int], buffers: Buffers) -> None:
        super().__init__(receive, buffers)
        self.on_sent = self.on_served = do_nothing
        self.deadline = math.inf
        self.is_late = False

    @abc.abstractmethod
    def send(self, frame: Frame) -> None:
        """Send a frame; its arrays may be read until the answer has been received."""

    def read_header(self) -> pb.Header:
        """Read the header of the next frame."""
        header = super().read_header()
        if header is None:
            raise EOFError("the call has ended")
        if header.HasField("failure"):
            raise _errors.exception_in(header.failure)
        self.on_served()
        return header

    @functools.cached_property
    def interface(self) -> str | None:
        """The name of the network interface in use: see `interface_of`."""
        try:
            return interface_of(self.local_address())
        except OSError:  # the link has just broken
            return None

    @abc.abstractmethod
    def local_address(self) -> str:
        """Return the IP address of this end; "" if the link uses no network."""

    @abc.abstractmethod
    def end_reason(self) -> errors.AgnOptaxError:
        """Return the exception that ended the call."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Return whether the call is known to have ended."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """End the call, from any thread."""
