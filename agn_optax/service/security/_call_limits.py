"""Limits on the calls and connections of callers and hosts, and their timeouts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from agn_optax import errors
from agn_optax.service._watchdog import Transfers
from agn_optax.service.security._access import Caller
from agn_optax.service.security._rate_limits import CallerSemaphore, RateLimiter

# Costs of calls in tokens; a plain call costs 1.
JOIN_TOKENS = (
    2.0  # a join also creates a worker's state; delays others as much as 5 calls
)
# Bytes that cost 1 token:
TRANSFER_BYTES = 2 << 20  # of the center, pulled
SNAPSHOT_BYTES = 512 << 10  # of the center, written to a snapshot
SCHEMA_BYTES = 32 << 10  # of a schema, parsed
BURST = 400.0  # tokens of a bucket, in addition to those for the start of all workers
ACCEPT_RATE = 200.0  # connections per second and port; each takes about 0.1 ms
HANDSHAKE_BURST = 128.0  # unauthenticated connections of a host at once
# Calls that do not share the bucket of all others, and the names of their buckets.
_BUCKETS = {
    "Status": "watch",
    "Health": "watch",
    "Save": "save",
    "Drain": "end",
    "Leave": "end",
}
# Timeouts in s:
TRANSFER_TIMEOUT = 30.0  # between the transfers of two parts of a frame
# The same for a chief's first parameters. It is shorter because another worker waits
# meanwhile, up to its `timeout` (30 s).
CHIEF_TIMEOUT = 10.0
HANDSHAKE_TIMEOUT = 5.0  # of authentication, and of the first frame of a call
SHORT_TIMEOUT = 0.5  # the same for a caller or host with too many such calls
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
      center_size: returns the size of the center in bytes; 0 without parameters.

    Attributes:
      pulls: semaphore of pulls that are being sent.
      waiting_pulls: semaphore of all pulls.
      initializations: semaphore of chiefs that send the first parameters.
      transfers: frames that are being sent or received.
    """

    def __init__(
        self, calls: float | None, max_workers: int, center_size: Callable[[], int]
    ) -> None:
        self._max_workers = max_workers
        self._center_size = center_size
        self._callers = RateLimiter(calls)
        self._ports = RateLimiter(None if calls is None else ACCEPT_RATE)
        self.pulls = CallerSemaphore(MAX_PULLS, _PULLS_OF_CALLER)
        self.waiting_pulls = CallerSemaphore(
            _MAX_WAITING_PULLS + max_workers, max(64, max_workers)
        )
        self.initializations = CallerSemaphore(1, 1)
        self.transfers = Transfers()

    # Rates.

    def admit(self, caller: Caller, call: str, tokens: float = 1.0) -> None:
        """Apply the rate limit of a call, waiting for its turn if necessary.

        A bucket holds the calls that all workers make when they start, in addition to
        `BURST`, because all workers may be one caller. The calls in `_BUCKETS` have
        buckets of their own, so that a caller's other calls do not delay them.

        Raises:
          CenterBusyError: the wait would be too long; the call can be retried.
        """
        bucket, burst = _BUCKETS.get(call, ""), BURST
        if not bucket and "Exchange" in caller.calls:
            tokens_of_start = 3 + JOIN_TOKENS + self._center_size() / TRANSFER_BYTES
            burst += self._max_workers * tokens_of_start
        elif bucket == "end":
            burst += self._max_workers
        self._admit((bucket, caller.key), burst, tokens)

    def admit_again(self, worker: str) -> None:
        """Apply a separate rate limit to a worker that resumes its session."""
        self._admit(("resume", worker), BURST, JOIN_TOKENS)

    def admit_heartbeat(self, worker: str) -> None:
        """Apply a separate rate limit to a heartbeat that was recorded.

        A caller's other calls must not delay heartbeats until a worker seems dead.
        """
        self._admit(("heartbeat", worker), BURST)

    def admit_host(self, host: str, kind: str = "watch") -> None:
        """Apply a separate rate limit to one kind of call by a host."""
        self._admit((kind, host), BURST)

    def _admit(self, bucket: Hashable, burst: float, tokens: float = 1.0) -> None:
        if not self._callers.take(bucket, burst, tokens):
            raise errors.CenterBusyError(
                f"too many calls: beside its exchanges, a caller may make {burst:.0f} "
                f"calls at once and then {self._callers.rate:g} a second, and a call "
                "that moves many bytes counts as several; try again"
            )

    def wait_to_accept(self, port: Hashable) -> None:
        """Wait until a port may accept another connection, from any host."""
        self._ports.take(port, self._handshake_burst, max_wait=math.inf)

    def take_handshake_token(self, host: Hashable) -> bool:
        """Return whether a host may begin another unauthenticated connection or call.

        Call `return_handshake_token` once the host has authenticated.
        """
        return self._callers.take(("host", host), self._handshake_burst, max_wait=0.0)

    def return_handshake_token(self, host: Hashable) -> None:
        """Return the token of a host's connection that has been authenticated."""
        self._callers.give_back(("host", host))

    @property
    def _handshake_burst(self) -> float:
        return max(HANDSHAKE_BURST, 2.0 * self._max_workers)

    # Timeouts.

    def time_handshake(
        self, cancel: Callable[[], None]
    ) -> contextlib.AbstractContextManager[object]:
        """Limit the time in which a caller authenticates, or receives an error.

        Args:
          cancel: ends the connection, from any thread.
        """
        return self.transfers.timed(cancel, 0, HANDSHAKE_TIMEOUT)

    @contextlib.contextmanager
    def time_first_frame(
        self, cancel: Callable[[], None], caller: Hashable
    ) -> Iterator[None]:
        """Limit the time in which the first frame of a call is received.

        A caller with too many silent calls has less time, but is not rejected, because
        its next call may be that of a worker.

        Args:
          cancel: ends the connection, from any thread.
          caller: key of the caller.
        """
        key = ("silent", caller)
        has_token = self.take_handshake_token(key)
        timeout = HANDSHAKE_TIMEOUT if has_token else SHORT_TIMEOUT
        with self.transfers.timed(cancel, 0, timeout):
            yield
        if has_token:
            self.return_handshake_token(key)

    def time_chief(
        self, cancel: Callable[[], None]
    ) -> contextlib.AbstractContextManager[object]:
        """Limit the time in which the header of a chief's next frame is received."""
        return self.transfers.timed(cancel, 0, CHIEF_TIMEOUT)

    @contextlib.contextmanager
    def time_sending(
        self, cancel: Callable[[], None], size: int
    ) -> Iterator[Callable[[], None]]:
        """Send a frame with a buffer of ``size`` bytes within the block, with timeouts.

        Args:
          cancel: ends the connection, from any thread.
          size: size of the buffer in bytes.

        Yields:
          A callable, to be called whenever a part of the frame was sent.
        """
        with self.transfers.timed(cancel, size, TRANSFER_TIMEOUT) as transfer:
            yield transfer.progress

    @contextlib.contextmanager
    def time_receiving(
        self, reader: Reader, cancel: Callable[[], None], *, from_chief: bool = False
    ) -> Iterator[None]:
        """Receive frames within the block, with timeouts.

        Args:
          reader: reader of the frames.
          cancel: ends the connection, from any thread.
          from_chief: whether the frames are a chief's first parameters.
        """
        timeout = CHIEF_TIMEOUT if from_chief else TRANSFER_TIMEOUT
        before = reader.timed, reader.on_received

        @contextlib.contextmanager
        def timed(size: int) -> Iterator[None]:
            with self.transfers.timed(cancel, size, timeout) as transfer:
                reader.on_received = transfer.progress
                yield

        reader.timed = timed
        try:
            yield
        finally:  # breaks a reference cycle, so that the reader's memory is freed
            reader.timed, reader.on_received = before
