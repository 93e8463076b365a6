"""The gRPC transport: the center's service, with a stream for each worker.

The messages of a stream are parts of frames, as bytes that are not decoded by protobuf.
"""

from __future__ import annotations

import contextlib
import operator
import os
import queue
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from agn_optax import errors
from agn_optax.service import _address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.security import _handshake
from agn_optax.service.security._access import Caller
from agn_optax.service.server._servicer import Servicer
from agn_optax.service.transports import _transport
from agn_optax.service.transports._connection import Connection
from agn_optax.service.transports._interfaces import source_address
from agn_optax.service.transports._link import Link
from agn_optax.service.wire import _errors
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import Frame, FrameReader, join_pieces

T = TypeVar("T")

_serialized = operator.methodcaller("SerializeToString")

_MAX_CALLS = 4096
_CONNECT_TIMEOUT = 1.0  # s, to another server at a Unix socket
# Calls that the servicer itself charges to the rate limit.
_ADMITTED_LATER = ("Alive", "Exchange")
MESSAGE_SIZE = 1 << 20  # maximum size in bytes, the fastest for streams of Python


# The worker's end.


class GrpcLink(Link):
    """A gRPC call.

    Args:
      connection: the connection to the center.
      name: name of the call.
      buffers: buffers to receive in.
      messages: messages to send; None for those of the frames passed to `send`.
    """

    end_errors = (grpc.RpcError, EOFError)

    def __init__(
        self,
        connection: Connection,
        name: str,
        buffers: Buffers,
        messages: Iterator[bytes] | None = None,
    ) -> None:
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._call = connection.stream(name, messages or self._outgoing())
        self._call.add_done_callback(lambda _: self._frames.put(None))
        self._address = connection.address
        super().__init__(JoinedMessages(self._call), buffers)

    def send(self, frame: Frame) -> None:
        self._frames.put(frame)

    def end(self) -> None:
        """Send nothing more, and wait until the service has ended the call."""
        self._frames.put(None)
        for _ in self._call:
            pass

    def local_address(self) -> str:
        return source_address(self._address)

    def end_reason(self) -> errors.AgnOptaxError:
        self._call.cancel()  # without effect if the call has ended
        return _errors.exception_of(self._call, self._address)

    def is_done(self) -> bool:
        return bool(self._call.done())

    def cancel(self) -> None:
        self._call.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        """Yield messages to send, on a thread of gRPC."""
        while (frame := self._frames.get()) is not None:
            with frame, self.timed(frame.nbytes):
                for message in join_pieces(frame.pieces(), MESSAGE_SIZE):
                    yield message
                    self.on_sent()


# The service's end.


class GrpcListener(_transport.Listener):
    """A gRPC server with the calls of a servicer, and with health checking.

    Only `Check` is served: `Watch` would remember every name that it was asked for, and
    gRPC does not count its calls in any limit.

    Args:
      servicer: the servicer.
      settings: listening settings.
    """

    def __init__(self, servicer: Servicer, settings: _transport.ListenSettings) -> None:
        super().__init__()
        self._health = health.HealthServicer()
        self._server = grpc.server(
            self._threads,
            handlers=[_health_handlers(servicer, self._health), _handlers(servicer)],
            options=[
                ("grpc.so_reuseport", 0),  # a second server on this port fails
                # Heartbeats of workers are more frequent.
                ("grpc.max_connection_idle_ms", 60_000),
                *_address.OPTIONS,
                ("grpc.max_receive_message_length", 2 * MESSAGE_SIZE),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.server_handshake_timeout_ms", 5_000),
                # Per connection; each center object of a process has one connection.
                ("grpc.max_concurrent_streams", 64 + 4 * servicer.max_workers),
            ],
            # The limits of callers admit fewer calls, with very few exceptions.
            maximum_concurrent_rpcs=_MAX_CALLS + 16 * servicer.max_workers,
        )
        self.address = _listen_at(self._server, settings)
        if self.address.startswith("unix:") and servicer.authenticator.access is None:
            os.chmod(_address.path(self.address), 0o600)  # noqa: PTH101 this user only

    def start(self) -> None:
        self._server.start()
        for name in ("", _address.SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def drain(self) -> None:
        self._health.enter_graceful_shutdown()

    def close(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        self._server.stop(grace=min(0.5, timeout / 2)).wait(timeout)
        self._threads.wait(max(0.0, end - time.monotonic()))


def _listen_at(server: grpc.Server, settings: _transport.ListenSettings) -> str:
    """Let a server listen; return its address with the assigned port."""
    address = settings.address
    _check_free(address)
    try:
        if settings.tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, settings.tls.server_credentials())
    except RuntimeError as error:
        reason = str(error).partition("; set GRPC_VERBOSITY")[0]
        raise errors.InvalidArgumentError(
            f"cannot listen at {address}: {reason}. Another process may use that port; "
            "port 0 picks a free one"
        ) from None
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def _check_free(address: str) -> None:
    """Raise if a server uses the address: gRPC would silently replace a socket file."""
    if not address.startswith("unix:"):
        return
    with contextlib.suppress(OSError):
        _handshake.connect(address, _CONNECT_TIMEOUT).close()
        raise errors.InvalidArgumentError(
            f"cannot listen at {address}: another server uses it"
        )


def _health_handlers(servicer: Servicer, health_servicer: Any) -> Any:
    """Return the handler of health checks."""

    def check(messages: Iterator[bytes], context: Any) -> Any:
        with _errors_to(context):
            caller = _caller(servicer, context)
            servicer.call_limits.admit(caller.key)
            caller.check("Health")
            message = _read_one(servicer, messages, context)
            request = _parse(health_pb2.HealthCheckRequest, message)
        return health_servicer.Check(request, context)

    handler: Any = grpc.stream_unary_rpc_method_handler(
        check, response_serializer=_serialized
    )
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": handler})


def _handlers(servicer: Servicer) -> Any:
    """Return the handlers of the calls in center.proto."""

    def reader(messages: Iterator[bytes]) -> FrameReader:
        return FrameReader(JoinedMessages(messages), servicer.buffers)

    def admitted(name: str, context: Any) -> Caller:
        """Return the caller of a call that the rate limit admits."""
        caller = _caller(servicer, context)
        if name not in _ADMITTED_LATER:
            servicer.call_limits.admit(caller.key)
        return caller

    def with_reply(name: str, call: Callable[..., Any]) -> Any:
        """Return a handler that answers with one reply."""

        def answer(messages: Iterator[bytes], context: Any) -> Any:
            with _errors_to(context):
                return call(messages, context, admitted(name, context))

        return grpc.stream_unary_rpc_method_handler(
            answer, response_serializer=_serialized
        )

    def with_frames(name: str, call: Callable[..., Iterator[Frame]]) -> Any:
        """Return a handler that answers with a stream of frames."""

        def answer(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
            time_sending = servicer.call_limits.time_sending
            with _errors_to(context):
                for frame in call(messages, context, admitted(name, context)):
                    with frame, time_sending(context.cancel, frame.nbytes) as transfer:
                        for message in join_pieces(frame.pieces(), MESSAGE_SIZE):
                            yield message
                            transfer.progress()

        return grpc.stream_stream_rpc_method_handler(answer)

    def with_request(name: str) -> Callable[..., Any]:
        """Return a function that parses a call's only message and handles it."""
        call, request = getattr(servicer, name.lower()), getattr(pb, f"{name}Request")

        def answer(messages: Iterator[bytes], context: Any, caller: Caller) -> Any:
            message = _read_one(servicer, messages, context)
            return call(_parse(request, message), caller)

        return answer

    names = ("Describe", "Alive", "Leave", "Status", "Drain")
    handlers = {name: with_reply(name, with_request(name)) for name in names}
    handlers["Pull"] = with_frames("Pull", with_request("Pull"))
    handlers["Initialize"] = with_reply(
        "Initialize",
        lambda messages, context, caller: servicer.initialize(
            reader(messages), context, caller
        ),
    )
    handlers["Exchange"] = with_frames(
        "Exchange",
        lambda messages, context, caller: servicer.exchange(
            reader(messages), context, caller, "grpc"
        ),
    )
    return grpc.method_handlers_generic_handler(_address.SERVICE, handlers)


def _read_one(servicer: Servicer, messages: Iterator[T], context: Any) -> T:
    """Return the only message of a call, which must arrive within a timeout.

    Calls of one message are served as streams. Otherwise gRPC would wait for the
    message without a timeout, and before the caller is authenticated.

    Raises:
      EOFError: the call ends without a message.
    """
    with servicer.call_limits.time_handshake(context.cancel):
        message = next(messages, None)
    if message is None:
        raise EOFError("a call must have a message, got none")
    return message


def _parse(request: Any, message: bytes) -> Any:
    """Decode a request here, because gRPC keeps calls that it cannot decode.

    Raises:
      ProtocolError: the request is malformed.
    """
    try:
        return request.FromString(message)
    except DecodeError as error:
        raise errors.ProtocolError(f"not a request: {error}") from None


def _caller(servicer: Servicer, context: Any) -> Caller:
    """Return the caller, by the call's metadata.

    Raises:
      NotAllowedError: the caller is unknown.
    """
    authorization = dict(context.invocation_metadata()).get("authorization", "")
    return servicer.authenticate(authorization, _host(context))


def _host(context: Any) -> str:
    """Return the host from which a call comes."""
    kind, _, address = urllib.parse.unquote(context.peer()).partition(":")
    return _address.network("" if kind.startswith("unix") else _address.host(address))


@contextlib.contextmanager
def _errors_to(context: Any) -> Iterator[None]:
    """Report exceptions of a call to its caller."""
    try:
        yield
    except (errors.AgnOptaxError, EOFError, MemoryError) as error:
        _errors.abort(context, error)


# Both ends.


class JoinedMessages:
    """A reader of messages of any number and size as one sequence of bytes."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._rest = memoryview(b"")

    def __call__(self, view: memoryview) -> int:
        """Write the next bytes to a view; return their number, and 0 at the end."""
        while not self._rest:
            message = next(self._messages, None)
            if message is None:
                return 0
            self._rest = memoryview(message)
        size = min(len(view), len(self._rest))
        view[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _dial(target: _transport.Target) -> Link:
    """Start a call; whether the center answers it is not known yet."""
    return GrpcLink(target.connection, "Exchange", target.buffers)


# The listener serves all calls, not only those of the workers' sessions.
GRPC = _transport.Transport("grpc", GrpcListener, _dial)
