"""A connection to a center, with retries and timeouts.

A call runs on the thread that makes it. The watchdog cancels a call that has received
nothing for too long.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from agn_optax import errors
from agn_optax._internal import Backoff
from agn_optax.service import _address, _published
from agn_optax.service import center_pb2 as pb
from agn_optax.service._watchdog import LEAST_RATE, watchdog
from agn_optax.service.security import _handshake, _tls, _token
from agn_optax.service.security._files import Reread
from agn_optax.service.security._tls import Tls
from agn_optax.service.wire import _status
from agn_optax.service.wire._packets import nothing

if TYPE_CHECKING:
    from agn_optax.service.transports import Link

T = TypeVar("T")

_log = logging.getLogger("agn_optax")

# Seconds for which a call is retried if the center is known to be unreachable, or if
# the caller can go on without the center for a while.
SOON = 2.0
# Timeout in seconds for the first response to Describe or Join; a center that lets a
# worker wait responds every two seconds. With the pause between two attempts, a worker
# reconnects within five seconds after an outage, even if its old connections hang.
FIRST_WORD = 3.5

_BACKOFF = Backoff(first=0.1, longest=1.0)
_MOST_DESCRIPTION = 1 << 20  # bytes without the schema; 10,000 are typical
# gRPC's text for a connection that cannot be made, and its reasons if no host answers.
_CONNECTING = "failed to connect to all addresses"
_NOBODY = ("connect to remote host", "timed out", "DNS")


class Connection:
    """A connection to one center.

    Args:
      address: the center's address, or ``file:PATH`` with a file that holds it.
      timeout: seconds without any response after which a call gives up.
      tls: the TLS settings; None for plain text.
      insecure: allows plain text beyond this machine.
      token: the token of this end, see `_token.of`.

    Attributes:
      address: the last known address of the center.
      unreachable_since: when the center stopped answering, in seconds since the epoch;
        None while it answers.
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
        self._credentials: Callable[[], grpc.ChannelCredentials | None]
        self._credentials = lambda: None
        if tls is not None:
            self._credentials = Reread(tls.files, tls.client_credentials)
        self.address = address
        self.timeout = timeout
        self.tls = tls
        self.unreachable_since: float | None = None
        self._token = _token.of(token, lambda: self.address)
        self._lock = threading.RLock()  # reentrant for `close` in a signal handler
        self._channel: Any = None
        self._shown: Any = None  # the credentials of that channel
        self._answers = False  # whether the center has ever answered
        self._closed = threading.Event()
        self._heard = -math.inf  # when a frame came last; monotonic seconds
        self._served = -math.inf  # when a frame came last that was not an error

    @property
    def closed(self) -> bool:
        """True once the connection has been closed or stopped."""
        return self._closed.is_set()

    def is_closed_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end; return whether the connection ended."""
        return self._closed.wait(seconds)

    def retry(self, attempt: Callable[[], T], within: float = math.inf) -> T:
        """Return the result of ``attempt``, retried until the time is over.

        Args:
          attempt: makes a call.
          within: seconds after which to give up, if this is less than the timeout.
            While the center is known to be unreachable, a call gives up after `SOON`.

        Raises:
          CenterUnreachableError: the center does not answer; the message says since
            when.
          CenterBusyError: the center answers, but has not accepted the call in time.
          EncryptionError: the TLS settings do not match, and the center has never
            answered.
        """
        begin = time.monotonic()
        if self.unreachable_since is not None:
            within = SOON
        end = begin + min(self.timeout, within)
        attempts, is_told, pauses = 0, False, _BACKOFF.pauses()
        while True:
            attempts += 1
            began = time.monotonic()
            try:
                result = attempt()
            except errors.CenterUnreachableError as error:
                is_for_good = isinstance(error, errors.EncryptionError)
                if self.closed or (is_for_good and not self._answers):
                    raise
                reason, is_busy = str(error), isinstance(error, errors.CenterBusyError)
            else:
                self._answered()
                return result
            now = time.monotonic()
            # The center responded during this attempt, so the timeout begins again. A
            # center that only responds that it is closed does not restart the timeout.
            if self._served > began:
                begin, attempts, pauses = self._heard, 1, _BACKOFF.pauses()
                end = max(begin + self.timeout, now + SOON)
                end = min(end, now + within)
            if is_busy:
                self._answered()
            if not is_told if is_busy else self.unreachable_since is None:
                state = "is busy" if is_busy else "does not answer"
                text = "the center at %s %s (%s); trying for %.0f s"
                _log.warning(text, self.address, state, reason, end - begin)
                is_told = True
            if not is_busy and self.unreachable_since is None:
                self.unreachable_since = time.time() - (now - begin)
            pause = next(pauses) * random.uniform(0.5, 1)  # noqa: S311 jitter
            if now + pause <= end:
                self._closed.wait(pause)
                continue
            if is_busy:
                raise errors.CenterBusyError(
                    f"the center at {self.address} answers, but has not accepted this "
                    f"call in {now - begin:.0f} s and {attempts} attempts: {reason}"
                )
            since = time.strftime("%X", time.localtime(self.unreachable_since))
            raise errors.CenterUnreachableError(
                f"the center at {self.address} does not answer since {since} "
                f"({attempts} attempts in this call): {reason}"
            )

    def _answered(self) -> None:
        """Record that the center has answered."""
        self._answers = True
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
            self._find()
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
        said = self._metadata()
        return self.begin(
            lambda channel: channel.stream_stream(path)(messages, metadata=said)
        )

    def unary(
        self,
        name: str,
        request: Any,
        reply: Any,
        timeout: float | None = None,
        patience: float = math.inf,
    ) -> Any:
        """Make a call without streams, and return its reply.

        Args:
          name: name of a method of the center, or the full path of any gRPC method.
          request: the request.
          reply: type of the reply.
          timeout: timeout in seconds of a call that may fail; the channel is kept then.
            None for any other call.
          patience: timeout in seconds of any other call, if this is less than the
            connection's timeout. The next call then begins on a new channel.
        """
        patience = min(self.timeout, patience)
        path = name if name.startswith("/") else f"/{_address.SERVICE}/{name}"

        def call(channel: Any) -> Any:
            return channel.unary_unary(
                path, type(request).SerializeToString, reply.FromString
            )(request, timeout=timeout or patience, metadata=self._metadata())

        try:
            return self.begin(call)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and timeout is None:
                self._renew(patience)
            raise self._failure(_status.exception_of(error, self.address)) from None

    def describe(self) -> pb.Description:
        """Return the center's description, in one attempt."""
        request = pb.DescribeRequest(protocol=_address.PROTOCOL)
        said = self.unary("Describe", request, pb.Described, patience=FIRST_WORD)
        return description_in(said)

    def status(self) -> dict[str, Any]:
        """Return the center's status as JSON values, in one attempt."""
        return _as_dict(self.unary("Status", pb.StatusRequest(), pb.StatusReply))

    def save(self) -> int:
        """Have the center write a snapshot, in one attempt; return its version."""
        return int(self.unary("Save", pb.SaveRequest(), pb.SaveReply).version)

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

    def _find(self) -> None:
        """Read the address file, if there is one, and follow a center that moved."""
        if self._file is None:
            return
        try:
            found = _published.read(self._file)
        except errors.CenterUnreachableError:
            if self._channel is None:
                raise
            return  # the center may still be at its last address
        if found != self.address:
            self._check(found)
            self._let_go()
            self.address = found
            _log.info("the center is at %s, as %s says", found, self._file)

    def _new_channel(self) -> Any:
        options = _address.client_options(self.address)
        self._shown = self._credentials()
        if self._shown is None:
            return grpc.insecure_channel(self.address, options)
        return grpc.secure_channel(self.address, self._shown, options)

    def _renew(self, silence: float) -> None:
        """Drop the channel if no link has received anything for ``silence`` seconds.

        The next call then begins on a new channel. gRPC itself would keep a connection
        whose other end has vanished for up to a minute. Other calls on the old channel
        are as lost, and are retried.
        """
        if time.monotonic() - self._heard >= silence:
            self._let_go()

    def _let_go(self) -> None:
        """Close the channel; the next call opens another one."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @contextlib.contextmanager
    def watching(
        self, link: Link, until: float = math.inf, patience: float = math.inf
    ) -> Iterator[None]:
        """Use a link within the block, with timeouts; cancel the link on any error.

        Args:
          link: the link.
          until: when to give up in any case; monotonic seconds.
          patience: seconds without any traffic after which to give up, if this is less
            than the timeout.

        Raises:
          TimeoutError: the block was not left by ``until``.
          CenterUnreachableError: nothing was received, or could be sent, in time.
          AgnOptaxError: the error with which the center ended the call.
        """
        patience = min(self.timeout, patience)
        over_by = math.inf  # deadline of the frame that is being transferred

        def sent() -> None:
            link.deadline = min(until, over_by, time.monotonic() + patience)

        def received() -> None:
            self._heard = time.monotonic()
            sent()

        @contextlib.contextmanager
        def pace(size: int) -> Iterator[None]:
            nonlocal over_by
            over_by = time.monotonic() + self.timeout + size / LEAST_RATE
            try:
                yield
            finally:
                over_by = math.inf

        def served() -> None:
            self._served = time.monotonic()

        sent()
        link.sent, link.received, link.pace, link.served = sent, received, pace, served
        try:
            with watchdog.watching(link):
                yield
        except BaseException as error:  # also of Ctrl-C: no link is left running
            link.cancel()
            is_ours = isinstance(error, errors.AgnOptaxError)
            if not is_ours and not isinstance(error, link.ended):
                raise
            if link.is_late:
                if time.monotonic() >= until:
                    raise TimeoutError from None
                self._renew(patience)
                silence = f"no data came for {patience:.3g} s, or far too slowly"
                raise errors.CenterUnreachableError(silence) from None
            # The ended call knows the reason best.
            raise self._failure(error if is_ours else link.why_it_ended()) from None
        finally:
            # These closures refer to the link. Without the reference cycle, its memory
            # is freed at once instead of by the garbage collector.
            link.sent = link.received = link.served = nothing
            link.pace = contextlib.nullcontext

    def stop(self) -> None:
        """Accept no further calls, and end retries."""
        self._closed.set()

    def close(self) -> None:
        """Stop, and end all calls that are under way."""
        self.stop()
        self._let_go()

    def _failure(self, error: BaseException) -> BaseException:
        """Return the error to raise instead of ``error``, with the real cause.

        A failed TLS handshake with a server that answers is an `EncryptionError`.

        Raises:
          CenterClosedError: the connection is closed, which explains the error.
        """
        if not isinstance(error, errors.CenterUnreachableError):
            return error
        self.check_open()
        said = str(error)
        if _CONNECTING not in said or any(reason in said for reason in _NOBODY):
            return error
        if self._credentials() is not self._shown:  # the certificates have changed
            self._let_go()
            return error
        reason = _handshake.why_not(self.address, self.tls)
        if not reason:
            return error
        return errors.EncryptionError(f"no connection to {self.address}: {reason}")


def description_in(said: pb.Described) -> pb.Description:
    """Return the description of a center from a reply, its schema still as bytes.

    Raises:
      ProtocolError: the description is not valid, or too large.
    """
    size = len(said.description)
    if size > _MOST_DESCRIPTION:
        raise errors.ProtocolError(
            f"a description must have at most {_MOST_DESCRIPTION} bytes beside its "
            f"schema, got {size}"
        )
    try:
        description = pb.Description.FromString(said.description)
    except DecodeError as error:
        raise errors.ProtocolError(f"not a description: {error}") from None
    if said.HasField("schema"):
        description.schema = said.schema
    return description


def _as_dict(message: Any) -> dict[str, Any]:
    """Return a protobuf message as JSON values; an absent field is None."""
    said = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = dict(value)
        elif field.message_type is not None:
            value = [_as_dict(each) for each in value]
        elif field.has_presence and not message.HasField(field.name):
            value = None
        said[field.name] = value
    return said
