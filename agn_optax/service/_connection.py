"""A connection to a center: calls that are tried again, as long as there is hope.

grpc.aio's objects belong to one thread. It is that of a loop which all connections of
the process share; callers on other threads hand it coroutines with `Connection.run`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from agn_optax import errors
from agn_optax.service import _address, _status
from agn_optax.service import center_pb2 as pb
from agn_optax.service._links import Link

T = TypeVar("T")

_log = logging.getLogger("agn_optax")

# Seconds that a call tries to reach a center that is known not to answer, or that it
# can do without for a while.
SOON = 2.0
# Of the calls without streams.
_REPLIES: dict[str, Any] = {
    "Describe": pb.Description,
    "Leave": pb.LeaveReply,
    "Status": pb.StatusReply,
}


class Connection:
    """To one address.

    Args:
      address: of the center.
      timeout: seconds without a sign of life after which a call gives up.
      credentials: of TLS; None for plain text.

    Attributes:
      unreachable_since: seconds since the epoch; None while the center answers.
      closed: whether it takes no more calls.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self.unreachable_since: float | None = None
        self.closed = False
        self._credentials = credentials
        self._channel: Any = None
        self._heard = -math.inf  # when something came; monotonic seconds

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """What ``work`` returns, run on the loop's thread and waited for here."""
        future = asyncio.run_coroutine_threadsafe(work, _loop())
        try:
            return future.result(timeout)
        except concurrent.futures.CancelledError:
            raise self._is_closed() from None
        except BaseException:
            future.cancel()  # Ctrl-C: nothing goes on behind the caller's back
            raise

    # On the loop's thread.

    async def retry(
        self, attempt: Callable[[], Awaitable[T]], within: float = math.inf
    ) -> T:
        """What ``attempt`` returns, in as many attempts as the time allows.

        Args:
          attempt: makes a call.
          within: seconds, if the center must be found sooner than the timeout has it.
            While it is known to be unreachable, a call says so soon anyway.

        Raises:
          CenterUnreachableError: nobody answers; says since when.
        """
        begin = time.monotonic()
        if self.unreachable_since is not None:
            within = SOON
        end = begin + min(self.timeout, within)
        attempts = 0
        while True:
            attempts += 1
            began = time.monotonic()
            try:
                result = await attempt()
            except errors.CenterUnreachableError as error:
                if self.closed:
                    raise
                reason = str(error)
            else:
                if self.unreachable_since is not None:
                    _log.warning("the center at %s answers again", self.address)
                    self.unreachable_since = None
                return result
            now = time.monotonic()
            if self._heard > began:  # it was there meanwhile, and waited perhaps
                begin, attempts = self._heard, 1
                end = max(begin + self.timeout, now + SOON)
                end = min(end, now + within)
            if self.unreachable_since is None:
                self.unreachable_since = time.time() - (now - begin)
                _log.warning(
                    "the center at %s does not answer (%s); trying for %.0f s",
                    self.address,
                    reason,
                    end - begin,
                )
            pause = min(2.0, 0.05 * 2 ** min(attempts, 10)) * random.uniform(0.5, 1)  # noqa: S311 jitter
            if now + pause > end:
                since = time.strftime("%X", time.localtime(self.unreachable_since))
                silent = time.time() - self.unreachable_since
                raise errors.CenterUnreachableError(
                    f"the center at {self.address} does not answer since {since} "
                    f"({silent:.0f} s, {attempts} attempts in this call): {reason}"
                )
            await asyncio.sleep(pause)

    def channel(self) -> Any:
        """The gRPC channel, opened when it is needed first.

        Raises:
          CenterClosedError: the connection is closed.
        """
        if self.closed:
            raise self._is_closed()
        if self._channel is None:
            options = _address.client_options(self.address)
            self._channel = (
                grpc.aio.insecure_channel(self.address, options)
                if self._credentials is None
                else grpc.aio.secure_channel(self.address, self._credentials, options)
            )
        return self._channel

    async def unary(self, name: str, request: Any) -> Any:
        """The reply to a call without streams."""
        call = self.channel().unary_unary(
            f"/{_address.SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=_REPLIES[name].FromString,
        )
        try:
            return await call(request, timeout=self.timeout)
        except grpc.aio.AioRpcError as error:
            raise _status.exception_of(error, self.address) from None

    @contextlib.asynccontextmanager
    async def watching(self, link: Link) -> AsyncIterator[None]:
        """Around a use of a link, which is cancelled if anything goes wrong.

        Raises:
          CenterUnreachableError: nothing came, or could be sent, for too long.
          AgnOptaxError: the center ended the call, with this.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout) as watch:

                def sent() -> None:
                    watch.reschedule(loop.time() + self.timeout)

                def heard() -> None:
                    self._heard = time.monotonic()
                    sent()

                link.sent, link.heard = sent, heard
                yield
        except TimeoutError:
            link.cancel()
            raise errors.CenterUnreachableError(
                f"nothing came for {self.timeout:.0f} s"
            ) from None
        except errors.AgnOptaxError:  # which may be an OSError as well
            link.cancel()
            raise
        except link.ended:
            # Whatever went wrong, the call knows why.
            raise await link.why_it_ended() from None
        except BaseException:
            link.cancel()
            raise

    async def close(self) -> None:
        """Ends all calls."""
        self.closed = True
        if self._channel is not None:
            await self._channel.close()

    def _is_closed(self) -> errors.CenterClosedError:
        return errors.CenterClosedError(
            f"the connection to the center at {self.address} is closed"
        )


_lock = threading.Lock()
_running: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    global _running
    with _lock:
        if _running is None:
            _running = asyncio.new_event_loop()
            threading.Thread(
                target=_running.run_forever, name="agn-optax client", daemon=True
            ).start()
        return _running
