"""A connection to a center, with retries and timeouts.

A call runs on the thread that makes it. The watchdog cancels a call that has received
nothing for too long.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from agn_optax import errors
from agn_optax._internal import Outage, retry
from agn_optax.service import _address, _published
from agn_optax.service import center_pb2 as pb
from agn_optax.service._watchdog import MIN_RATE, watchdog
from agn_optax.service.security import _handshake, _tls, _token
from agn_optax.service.security._tls import Tls
from agn_optax.service.transports._link import Link
from agn_optax.service.wire import _errors
from agn_optax.service.wire._frames import do_nothing

T = TypeVar("T")

_log = logging.getLogger("agn_optax")

# Seconds for which a call is retried if the center is known to be unreachable, or if
# the caller can continue without the center for a while.
SHORT_TIMEOUT = 2.0
# Timeout in seconds for the first response to Describe or Join; a center that lets a
# worker wait responds every two seconds. With the pause between two attempts, a worker
# reconnects within five seconds after an outage, even if its old connections hang.
FIRST_RESPONSE_TIMEOUT = 3.5

_PAUSES = (0.1, 1.0)  # s, the first and the longest between two attempts
# gRPC's text for a connection that cannot be made, and its reasons if no host answers.
_CANNOT_CONNECT = "failed to connect to all addresses"
_NO_HOST = ("connect to remote host", "timed out", "DNS")


class Connection:
    """A connection to one center.

    Args:
      address: the center's address, or ``file:PATH`` with a file that holds it.
      timeout: seconds without any response after which a call gives up.
      tls: the TLS settings; None for plain text.
      insecure: allows plain text beyond this machine.
      token: the token of this end, see `_token.source`.

    Attributes:
      address: the last known address of the center.
      unreachable_since: when the center stopped answering, in seconds since the epoch;
        None while it answers.
      round_trip: seconds of the fastest call without streams, which are at least those
        of a round trip; 0 before the first.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        tls: Tls | None = None,
        insecure: bool = False,
        token: _token.Token = None,
    ) -> None:
        self._file = _published.path_of(_published.check_reachable(address))
        self._check = functools.partial(_tls.check, tls, insecure)
        self._check(*([address] if self._file is None else []))
        self._credentials = None if tls is None else tls.client_credentials()
        self.address = address
        self.timeout = timeout
        self.tls = tls
        self.unreachable_since: float | None = None
        self.round_trip = 0.0
        self._token = _token.source(token, lambda: self.address)
        self._lock = threading.RLock()  # reentrant for `close` in a signal handler
        self._channel: Any = None
        self._has_answered = False  # whether the center has ever answered
        self._closed = threading.Event()
        self._last_received = -math.inf  # when bytes came last; monotonic seconds
        self._last_served = -math.inf  # when a frame came last that was not an error

    @property
    def closed(self) -> bool:
        """True once the connection has been closed or stopped."""
        return self._closed.is_set()

    def is_closed_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end; return whether the connection ended."""
        return self._closed.wait(seconds)

    def retry(self, attempt: Callable[[], T], within: float = math.inf) -> T:
        """Return the result of ``attempt``, called until it succeeds or time is over.

        Args:
          attempt: makes a call.
          within: seconds after which to give up, if this is less than the timeout.
            While the center is known to be unreachable, a call gives up after
            `SHORT_TIMEOUT`.

        Raises:
          CenterUnreachableError: the center does not answer; the message says since
            when.
          CenterBusyError: the center answers, but has not accepted the call in time.
          EncryptionError: the TLS settings do not match, and the center has never
            answered.
        """
        if self.unreachable_since is not None:
            within = SHORT_TIMEOUT
        outage = Outage(min(self.timeout, within), since=time.monotonic())
        is_logged = False

        def record(error: Exception) -> None:
            nonlocal is_logged
            now = time.monotonic()
            # The center responded during this attempt, so the timeout begins again. A
            # center that only responds that it is closed does not restart the timeout.
            if self._last_served > outage.began:
                outage.since, outage.attempts = self._last_received, 1
                elapsed = now - outage.since
                seconds = max(self.timeout, elapsed + SHORT_TIMEOUT)
                outage.seconds = min(seconds, elapsed + within)
            is_busy = isinstance(error, errors.CenterBusyError)
            if is_busy:
                self._record_answer()
            if not is_logged if is_busy else self.unreachable_since is None:
                state = "is busy" if is_busy else "does not answer"
                text = "the center at %s %s (%s); trying for %.0f s"
                _log.warning(text, self.address, state, error, outage.seconds)
                is_logged = True
            if not is_busy and self.unreachable_since is None:
                self.unreachable_since = time.time() - (now - outage.since)

        try:
            result = retry(
                attempt,
                outage,
                pauses=_PAUSES,
                wait=self._closed.wait,
                is_final=self._is_final,
                record=record,
            )
        except errors.CenterUnreachableError as error:
            if self._is_final(error) and not self.closed:
                raise
            reason, is_busy = str(error), isinstance(error, errors.CenterBusyError)
        else:
            self._record_answer()
            return result
        # Raised outside the handler: with the cause, they would keep its arrays alive.
        self.check_open()
        if is_busy:
            seconds = time.monotonic() - outage.since
            raise errors.CenterBusyError(
                f"the center at {self.address} answers, but has not accepted this call "
                f"in {seconds:.0f} s and {outage.attempts} attempts: {reason}"
            )
        since = time.strftime("%X", time.localtime(self.unreachable_since))
        raise errors.CenterUnreachableError(
            f"the center at {self.address} does not answer since {since} "
            f"({outage.attempts} attempts in this call): {reason}"
        )

    def _is_final(self, error: Exception) -> bool:
        """Return whether an error ends a call at once."""
        is_unencrypted = isinstance(error, errors.EncryptionError)
        return (
            not isinstance(error, errors.CenterUnreachableError)
            or self.closed
            or (is_unencrypted and not self._has_answered)
        )

    def _record_answer(self) -> None:
        """Record that the center has answered."""
        self._has_answered = True
        if self.unreachable_since is not None:
            _log.warning("the center at %s answers again", self.address)
            self.unreachable_since = None

    def begin(self, call: Callable[[Any], T]) -> T:
        """Return the result of ``call``, which begins a call on the gRPC channel.

        Raises:
          CenterClosedError: the connection is closed.
          CenterUnreachableError: the address file has no address yet.
        """
        while True:
            self._update_address()
            with self._lock:
                self.check_open()
                channel = self._channel = self._channel or self._new_channel()
            try:
                return call(channel)
            except ValueError:  # raised by a channel that was closed meanwhile
                if channel is self._channel and not self.closed:
                    raise

    def stream(self, name: str, messages: Iterator[bytes]) -> Any:
        """Begin a call with a stream of bytes in each direction."""
        path = f"/{_address.SERVICE}/{name}"
        metadata = self._metadata()
        return self.begin(
            lambda channel: channel.stream_stream(path)(messages, metadata=metadata)
        )

    def unary(
        self,
        name: str,
        request: Any,
        reply: Any,
        timeout: float | None = None,
        response_timeout: float = math.inf,
    ) -> Any:
        """Make a call without streams, and return its reply.

        Args:
          name: name of a method of the center, or the full path of any gRPC method.
          request: the request.
          reply: type of the reply.
          timeout: timeout in seconds of a call that may fail; afterwards the channel is
            kept. None uses the following timeout.
          response_timeout: timeout in seconds, if this is less than the connection's
            timeout. After it, the next call begins on a new channel, unless a link has
            received something meanwhile.
        """
        response_timeout = min(self.timeout, response_timeout)
        path = name if name.startswith("/") else f"/{_address.SERVICE}/{name}"

        def call(channel: Any) -> Any:
            method = channel.unary_unary(
                path, type(request).SerializeToString, reply.FromString
            )
            return method(
                request, timeout=timeout or response_timeout, metadata=self._metadata()
            )

        began = time.monotonic()
        try:
            replied = self.begin(call)
            elapsed = time.monotonic() - began
            self.round_trip = min(elapsed, self.round_trip or elapsed)
            return replied
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and timeout is None:
                self._close_silent_channel(response_timeout)
            raise self._failure(_errors.exception_of(error, self.address)) from None

    def describe(self) -> pb.Description:
        """Return the center's description, in one attempt."""
        request = pb.DescribeRequest(protocol=_address.PROTOCOL)
        return self.unary(
            "Describe", request, pb.Description, response_timeout=FIRST_RESPONSE_TIMEOUT
        )

    def status(self) -> dict[str, Any]:
        """Return the center's status as JSON values, in one attempt."""
        return as_dict(self.unary("Status", pb.StatusRequest(), pb.StatusReply))

    def drain(self) -> None:
        """End the center's service, in one attempt."""
        self.unary("Drain", pb.DrainRequest(), pb.DrainReply)

    def check_open(self) -> None:
        """Raise `CenterClosedError` if the connection is closed."""
        if self.closed:
            raise errors.CenterClosedError(
                f"the connection to the center at {self.address} is closed"
            ) from None

    def _metadata(self) -> list[tuple[str, str]]:
        token = self._token()
        return [] if token is None else [("authorization", f"Bearer {token}")]

    def _update_address(self) -> None:
        """Read the address file, if there is one, and follow a center that moved."""
        if self._file is None:
            return
        try:
            address = _published.read(self._file)
        except errors.CenterUnreachableError:
            if self._channel is None:
                raise
            return  # the center may still be at its last address
        if address != self.address:
            self._check(address)
            self._close_channel()
            self.address = address
            _log.info("the center is at %s, as %s says", address, self._file)

    def _new_channel(self) -> Any:
        options = _address.client_options(self.address)
        if self._credentials is None:
            return grpc.insecure_channel(self.address, options)
        return grpc.secure_channel(self.address, self._credentials, options)

    def _close_silent_channel(self, silence: float) -> None:
        """Drop the channel if no link has received anything for ``silence`` seconds.

        The next call then begins on a new channel. gRPC itself would keep a connection
        whose other end has vanished for up to a minute. Other calls on the old channel
        are lost as well, and are retried.
        """
        if time.monotonic() - self._last_received >= silence:
            self._close_channel()

    def _close_channel(self) -> None:
        """Close the channel; the next call opens another one."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @contextlib.contextmanager
    def watching(
        self, link: Link, until: float = math.inf, response_timeout: float = math.inf
    ) -> Iterator[None]:
        """Use a link within the block, with timeouts; cancel the link on any error.

        Args:
          link: the link.
          until: when to give up in any case; monotonic seconds.
          response_timeout: seconds without any traffic after which to give up, if this
            is less than the connection's timeout.

        Raises:
          TimeoutError: the block was not left by ``until``.
          CenterUnreachableError: nothing was received, or could be sent, in time.
          AgnOptaxError: the error with which the center ended the call.
        """
        silence_timeout = min(self.timeout, response_timeout)
        frame_deadline = math.inf  # deadline of the frame that is being transferred

        def sent() -> None:
            link.deadline = min(
                until, frame_deadline, time.monotonic() + silence_timeout
            )

        def received() -> None:
            self._last_received = time.monotonic()
            sent()

        @contextlib.contextmanager
        def timed(size: int) -> Iterator[None]:
            nonlocal frame_deadline
            frame_deadline = time.monotonic() + self.timeout + size / MIN_RATE
            try:
                yield
            finally:
                frame_deadline = math.inf

        def served() -> None:
            self._last_served = time.monotonic()

        sent()
        link.on_sent, link.on_received = sent, received
        link.timed, link.on_served = timed, served
        try:
            with watchdog.watching(link):
                yield
        except BaseException as error:  # after Ctrl-C, too, no link is left running
            link.cancel()
            is_ours = isinstance(error, errors.AgnOptaxError)
            if not is_ours and not isinstance(error, link.end_errors):
                raise
            if link.is_late:
                if time.monotonic() >= until:
                    raise TimeoutError from None
                self._close_silent_channel(silence_timeout)
                raise errors.CenterUnreachableError(
                    f"no data came for {silence_timeout:.3g} s, or data far too slowly"
                ) from None
            # The ended call knows the reason best.
            raise self._failure(error if is_ours else link.end_reason()) from None
        finally:
            # These closures refer to the link. Without the reference cycle, its memory
            # is freed at once instead of by the garbage collector.
            link.on_sent = link.on_received = link.on_served = do_nothing
            link.timed = contextlib.nullcontext

    def stop(self) -> None:
        """Accept no further calls, and end retries."""
        self._closed.set()

    def close(self) -> None:
        """Stop, and end all calls that are under way."""
        self.stop()
        self._close_channel()

    def _failure(self, error: BaseException) -> BaseException:
        """Return the error to raise instead of ``error``, with the real cause.

        A failed TLS handshake with a server that answers is an `EncryptionError`.

        Raises:
          CenterClosedError: the connection is closed, which explains the error.
        """
        if not isinstance(error, errors.CenterUnreachableError):
            return error
        self.check_open()
        text = str(error)
        if _CANNOT_CONNECT not in text or any(reason in text for reason in _NO_HOST):
            return error
        reason = _handshake.failure_reason(self.address, self.tls)
        if not reason:
            return error
        return errors.EncryptionError(f"no connection to {self.address}: {reason}")


def as_dict(message: Any) -> dict[str, Any]:
    """Return a protobuf message as JSON values; an absent field is None."""
    values = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = dict(value)
        elif field.message_type is not None:
            value = [as_dict(item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            value = None
        values[field.name] = value
    return values
