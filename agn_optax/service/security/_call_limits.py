"""Limits on the calls and connections of callers and hosts, and their timeouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from agn_optax import errors
from agn_optax.service._watchdog import TimedTransfer, timed
from agn_optax.service.security._rate_limits import (
    CallerSemaphore,
    OneCallerSemaphore,
    RateLimiter,
)

BURST = 400.0  # calls of a caller at once, and `_CALLS_OF_WORKER` for each worker
_CALLS_OF_WORKER = 8  # to start and to leave
HANDSHAKE_BURST = 128.0  # unauthenticated connections of a host at once
# Timeouts in s:
TRANSFER_TIMEOUT = 30.0  # between the transfers of two parts of a frame
# The same for a chief's first parameters. It is shorter because another worker waits
# meanwhile, up to its `timeout` (30 s).
CHIEF_TIMEOUT = 10.0
HANDSHAKE_TIMEOUT = 5.0  # of authentication, and of the first header of a call
# Maximum numbers of concurrent pulls, in all and of one caller. Each may keep a version
# from being updated in place, and a caller may read slowly.
MAX_PULLS, _PULLS_OF_CALLER = 4, 3
_MAX_WAITING_PULLS = 1024  # in addition to one for each worker


class Reader(Protocol):
    """A reader of frames, see `FrameReader`."""

    on_received: Callable[[], None]
    timed: Callable[[int], contextlib.AbstractContextManager[Any]]


class CallLimits:
    """Limits on the calls of callers, and on the connections of hosts.

    Args:
      calls: calls per second of one caller, and unauthenticated connections per second
        of one host; None for no limit.
      max_workers: maximum number of workers.

    Attributes:
      pulls: semaphore of pulls that are being sent.
      waiting_pulls: semaphore of all pulls.
      initializations: semaphore of chiefs that send the first parameters.
    """

    def __init__(self, calls: float | None, max_workers: int) -> None:
        # All workers may be one caller, or at one host.
        self._burst = BURST + _CALLS_OF_WORKER * max_workers
        self._handshake_burst = max(HANDSHAKE_BURST, 2.0 * max_workers)
        self._limiter = RateLimiter(calls)
        self.pulls = CallerSemaphore(MAX_PULLS, _PULLS_OF_CALLER)
        self.waiting_pulls = CallerSemaphore(
            _MAX_WAITING_PULLS + max_workers, max(64, max_workers)
        )
        self.initializations = OneCallerSemaphore()

    # Rates.

    def admit(self, caller: Hashable) -> None:
        """Apply the rate limit of a caller, waiting for its turn if necessary.

        Args:
          caller: key of the caller; ``("worker", name)`` for a heartbeat, which the
            other calls of a worker's host must not delay.

        Raises:
          CenterBusyError: the wait would be too long; the call can be retried.
        """
        if not self._limiter.take(caller, self._burst):
            raise errors.CenterBusyError(
                f"too many calls: beside its exchanges, a caller may make "
                f"{self._burst:.0f} at once and then {self._limiter.rate:g} a second; "
                "try again"
            )

    def admit_host(self, host: Hashable) -> None:
        """Apply the rate limit of a host's unauthenticated calls: see `admit`."""
        if not self._limiter.take(("host", host), self._handshake_burst):
            raise errors.CenterBusyError(
                f"too many calls: without authentication, a host may make "
                f"{self._handshake_burst:.0f} at once and then "
                f"{self._limiter.rate:g} a second; try again"
            )

    def accepts_connection(self, host: Hashable) -> bool:
        """Return whether a host may begin another unauthenticated connection."""
        return self._limiter.take(("host", host), self._handshake_burst, max_wait=0.0)

    # Timeouts.

    def time_handshake(
        self, cancel: Callable[[], None]
    ) -> contextlib.AbstractContextManager[object]:
        """Limit the time in which a caller authenticates, or sends the next header.

        Args:
          cancel: ends the connection, from any thread.
        """
        return timed(cancel, 0, HANDSHAKE_TIMEOUT)

    def time_sending(
        self, cancel: Callable[[], None], size: int
    ) -> contextlib.AbstractContextManager[TimedTransfer]:
        """Apply timeouts to a block that sends a frame with a buffer of ``size`` bytes.

        Args:
          cancel: ends the connection, from any thread.
          size: size of the buffer in bytes.

        Returns:
          The transfer; call its `progress` whenever a part of the frame was sent.
        """
        return timed(cancel, size, TRANSFER_TIMEOUT)

    @contextlib.contextmanager
    def time_receiving(
        self,
        reader: Reader,
        cancel: Callable[[], None],
        *,
        from_chief: bool = False,
    ) -> Iterator[None]:
        """Apply timeouts to the frames that are received in a block.

        Args:
          reader: reader of the frames.
          cancel: ends the connection, from any thread.
          from_chief: whether the frames are a chief's first parameters.
        """
        timeout = CHIEF_TIMEOUT if from_chief else TRANSFER_TIMEOUT
        before = reader.timed, reader.on_received

        @contextlib.contextmanager
        def timed_frame(size: int) -> Iterator[None]:
            with timed(cancel, size, timeout) as transfer:
                reader.on_received = transfer.progress
                yield

        reader.timed = timed_frame
        try:
            yield
        finally:  # breaks a reference cycle, so that the reader's memory is freed
            reader.timed, reader.on_received = before
