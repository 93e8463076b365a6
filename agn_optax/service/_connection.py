"""A connection to a center: calls that are tried again, as long as there is hope.

Calls are made on the thread of whoever makes them. The watchdog ends those that nothing
is heard of for too long.
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
from agn_optax.service import _address, _handshake, _published, _status, _tls, _token
from agn_optax.service import center_pb2 as pb
from agn_optax.service._files import Reread
from agn_optax.service._tls import Tls
from agn_optax.service._watchdog import LEAST_RATE, watchdog
from agn_optax.service.wire._packets import nothing

if TYPE_CHECKING:
    from agn_optax.service.transports import Link

T = TypeVar("T")

_log = logging.getLogger("agn_optax")

# Seconds that a call tries to reach a center that is known not to answer, or that it
# can do without for a while.
SOON = 2.0
# Seconds in which a center says something to whoever describes it or joins: while it
# has workers wait, it does every two. With the pause between two attempts, a worker is
# back within five seconds of an outage, whatever became of its connections meanwhile.
FIRST_WORD = 3.5

_MOST_DESCRIPTION = 1 << 20  # bytes beside the schema; most have ten thousand
# What gRPC says of connections that it cannot make, and of those to nobody.
_CONNECTING = "failed to connect to all addresses"
_NOBODY = ("connect to remote host", "timed out", "DNS")


class Connection:
    """To one center.

    Args:
      address: of the center, or ``file:PATH`` with a file that says where it is.
      timeout: seconds without a sign of life after which a call gives up.
      tls: who vouches for the center; None for plain text, or
      credentials: of gRPC, which say it instead.
      insecure: allows plain text beyond this machine.
      token: by which this end is known, see `_token.of`.

    Attributes:
      address: where the center was last.
      unreachable_since: seconds since the epoch; None while the center answers.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        tls: Tls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        insecure: bool = False,
        token: _token.Token = None,
    ) -> None:
        self._file = _published.path_of(_published.check_reachable(address))
        self._check = functools.partial(_tls.check, tls, credentials, insecure)
        self._check(*([address] if self._file is None else []))
        self._credentials: Callable[[], grpc.ChannelCredentials | None]
        self._credentials = lambda: credentials
        if tls is not None:
            self._credentials = Reread(tls.files, tls.client_credentials)
        self.address = address
        self.timeout = timeout
        self.tls = tls
        self.unreachable_since: float | None = None
        self._token = _token.of(token, lambda: self.address)
        self._lock = threading.RLock()  # a handler of a signal may close it within
        self._channel: Any = None
        self._shown: Any = None  # credentials, by that channel
        self._answers = False  # whether it ever has
        self._closed = threading.Event()
        self._heard = -math.inf  # when something came; monotonic seconds
        self._served = -math.inf  # when that was no refusal

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Of gRPC, made of ``tls`` or given; None for plain text."""
        return self._credentials()

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed.is_set()

    def is_closed_within(self, seconds: float) -> bool:
        """Whether it takes no more calls, now or within so many seconds."""
        return self._closed.wait(seconds)

    def retry(self, attempt: Callable[[], T], within: float = math.inf) -> T:
        """What ``attempt`` returns, in as many attempts as the time allows.

        Args:
          attempt: makes a call.
          within: seconds, if the center must be found sooner than the timeout has it.
            While it is known to be unreachable, a call says so soon anyway.

        Raises:
          CenterUnreachableError: nobody answers; says since when.
          CenterBusyError: it answers, and has not taken the call in all that time.
          EncryptionError: nobody ever has, for a reason that time does not mend.
        """
        begin = time.monotonic()
        if self.unreachable_since is not None:
            within = SOON
        end = begin + min(self.timeout, within)
        attempts, is_told = 0, False
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
            # It was there meanwhile, and waited perhaps. A center that answers only to
            # say that it is closed gets no more time than one that does not answer.
            if self._served > began:
                begin, attempts = self._heard, 1
                end = max(begin + self.timeout, now + SOON)
                end = min(end, now + within)
            if is_busy:
                self._answered()
            says = not is_told if is_busy else self.unreachable_since is None
            if says:
                _log.warning(
                    "the center at %s %s (%s); trying for %.0f s",
                    self.address,
                    "is busy" if is_busy else "does not answer",
                    reason,
                    end - begin,
                )
                is_told = True
            if not is_busy and self.unreachable_since is None:
                self.unreachable_since = time.time() - (now - begin)
            pause = min(1.0, 0.05 * 2 ** min(attempts, 10)) * random.uniform(0.5, 1)  # noqa: S311 jitter
            if now + pause > end and is_busy:
                raise errors.CenterBusyError(
                    f"the center at {self.address} answers, and has not taken this "
                    f"call in {now - begin:.0f} s and {attempts} attempts: {reason}"
                )
            if now + pause > end:
                assert self.unreachable_since is not None
                since = time.strftime("%X", time.localtime(self.unreachable_since))
                silent = time.time() - self.unreachable_since
                raise errors.CenterUnreachableError(
                    f"the center at {self.address} does not answer since {since} "
                    f"({silent:.0f} s, {attempts} attempts in this call): {reason}"
                )
            self._closed.wait(pause)

    def _answered(self) -> None:
        """Note that the center is there."""
        self._answers = True
        if self.unreachable_since is not None:
            _log.warning("the center at %s answers again", self.address)
            self.unreachable_since = None

    def begin(self, call: Callable[[Any], T]) -> T:
        """What ``call`` returns, which begins a call on the gRPC channel.

        Raises:
          CenterClosedError: the connection is closed.
          CenterUnreachableError: nobody has said where the center is.
        """
        while True:
            self._find()
            with self._lock:
                self.check_open()
                channel = self._channel = self._channel or self._new_channel()
            try:
                return call(channel)
            except ValueError:  # of a channel that has been closed meanwhile
                if channel is self._channel and not self.closed:
                    raise

    def stream(self, name: str, messages: Iterator[bytes]) -> Any:
        """A call of two streams, of bytes each way."""
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
        """The reply, of a type, to a call without streams; of others by its path.

        Args:
          name: of a method of the center, or a path.
          request: what it is asked.
          reply: the type of its reply.
          timeout: seconds for a call without which one can do; nothing is made of it if
            they are over.
          patience: seconds for any other, if the timeout of all is longer; after them
            the next call begins on a new channel.
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
        """What the center says of itself, in one attempt."""
        request = pb.DescribeRequest(protocol=_address.PROTOCOL)
        said = self.unary("Describe", request, pb.Described, patience=FIRST_WORD)
        return description_in(said)

    def status(self) -> dict[str, Any]:
        """Who is there, in one attempt and in terms of JSON."""
        return _as_dict(self.unary("Status", pb.StatusRequest(), pb.StatusReply))

    def save(self) -> int:
        """Has the center write a snapshot, in one attempt; returns its version."""
        return int(self.unary("Save", pb.SaveRequest(), pb.SaveReply).version)

    def drain(self) -> None:
        """Ends the center's service, in one attempt."""
        self.unary("Drain", pb.DrainRequest(), pb.DrainReply)

    def check_open(self) -> None:
        """Raises `CenterClosedError` once it takes no more calls."""
        if self.closed:
            raise errors.CenterClosedError(
                f"the connection to the center at {self.address} is closed"
            ) from None

    def _metadata(self) -> list[tuple[str, str]]:
        token = self._token()
        return [] if token is None else [("authorization", f"Bearer {token}")]

    def _find(self) -> None:
        """Where the center is now, if a file says it."""
        if self._file is None:
            return
        try:
            found = _published.read(self._file)
        except errors.CenterUnreachableError:
            if self._channel is None:
                raise
            return  # it may still be where it was
        if found != self.address:
            self._check(found)
            self._let_go()
            self.address = found
            _log.info("the center is at %s, as %s says", found, self._file)

    def _new_channel(self) -> Any:
        options = _address.client_options(self.address)
        self._shown = self.credentials
        if self._shown is None:
            return grpc.insecure_channel(self.address, options)
        return grpc.secure_channel(self.address, self._shown, options)

    def _renew(self, silence: float) -> None:
        """Calls begin on a new channel, if nothing came over any link for too long.

        GRPC itself would keep to a connection whose other end has vanished for up to a
        minute. What else is on the old channel is as lost, and tried again.
        """
        if time.monotonic() - self._heard >= silence:
            self._let_go()

    def _let_go(self) -> None:
        """Of the channel; the next call has another."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @contextlib.contextmanager
    def watching(
        self, link: Link, until: float = math.inf, patience: float = math.inf
    ) -> Iterator[None]:
        """Around a use of a link, which is cancelled if anything goes wrong.

        Args:
          link: that is used.
          until: when to give up in any case; monotonic seconds.
          patience: seconds in which something comes, if the timeout is longer.

        Raises:
          TimeoutError: it was not over then.
          CenterUnreachableError: nothing came, or could be sent, for too long.
          AgnOptaxError: the center ended the call, with this.
        """
        patience = min(self.timeout, patience)
        over_by = math.inf  # of the packet that moves

        def sent() -> None:
            link.deadline = min(until, over_by, time.monotonic() + patience)

        def heard() -> None:
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
        link.sent, link.heard, link.pace, link.served = sent, heard, pace, served
        try:
            with watchdog.watching(link):
                yield
        except BaseException as error:  # Ctrl-C, too: nothing goes on by itself
            link.cancel()
            is_ours = isinstance(error, errors.AgnOptaxError)
            if not is_ours and not isinstance(error, link.ended):
                raise
            if link.is_late:
                if time.monotonic() >= until:
                    raise TimeoutError from None
                self._renew(patience)
                silence = f"nothing came for {patience:.3g} s, or far too slowly"
                raise errors.CenterUnreachableError(silence) from None
            # Whatever went wrong, the call knows why.
            raise self._failure(error if is_ours else link.why_it_ended()) from None
        finally:
            # They know the link: in a circle, its memory would outlive it for long.
            link.sent = link.heard = link.served = nothing
            link.pace = contextlib.nullcontext

    def stop(self) -> None:
        """Takes no more calls, and does not try any again."""
        self._closed.set()

    def close(self) -> None:
        """Ends all calls."""
        self.stop()
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def _failure(self, error: BaseException) -> BaseException:
        """An error as the caller is to see it: a closed connection is the cause."""
        if isinstance(error, errors.CenterUnreachableError):
            self.check_open()
            return self._greeting_failure(str(error)) or error
        return error

    def _greeting_failure(self, said: str) -> errors.EncryptionError | None:
        """Of a connection that could not be made although somebody is there."""
        if _CONNECTING not in said or any(reason in said for reason in _NOBODY):
            return None
        if self.credentials is not self._shown:  # certificates have changed meanwhile
            self._let_go()
            return None
        if self.tls is None and self.credentials is not None:
            return None  # gRPC's own, which nobody else can read
        reason = _handshake.why_not(self.address, self.tls)
        if not reason:
            return None
        return errors.EncryptionError(f"no connection to {self.address}: {reason}")


def description_in(said: pb.Described) -> pb.Description:
    """Return what a center says of itself, its schema still in bytes.

    Raises:
      ProtocolError: it makes no sense, or is too much.
    """
    size = len(said.description)
    if size > _MOST_DESCRIPTION:
        raise errors.ProtocolError(
            f"a description has at most {_MOST_DESCRIPTION} bytes beside its schema, "
            f"got {size}"
        )
    try:
        description = pb.Description.FromString(said.description)
    except DecodeError as error:
        raise errors.ProtocolError(f"not a description: {error}") from None
    if said.HasField("schema"):
        description.schema = said.schema
    return description


def _as_dict(message: Any) -> dict[str, Any]:
    """A protobuf message in terms of JSON; what is absent is None."""
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
