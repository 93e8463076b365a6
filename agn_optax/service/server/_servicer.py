"""The handlers of the service's calls, around the `Core` of a center."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

from agn_optax import errors
from agn_optax._internal import in_background
from agn_optax._version import __version__
from agn_optax.center import Core, LocalSession, release_arguments
from agn_optax.service import center_pb2 as pb
from agn_optax.service._address import PROTOCOL, WAITING_INTERVAL
from agn_optax.service.security._access import Authenticator, Caller
from agn_optax.service.security._call_limits import CallLimits
from agn_optax.service.security._rate_limits import MAX_WAIT
from agn_optax.service.server._assembly import Assembly, Groups
from agn_optax.service.server._center_frames import CenterFrames
from agn_optax.service.server._exchanges import WAITING, Exchanges, waiting_for
from agn_optax.service.server._first_parameters import (
    FirstParameters,
    other_chief,
)
from agn_optax.service.server._part import ProcessPart
from agn_optax.service.server._settings import Limits
from agn_optax.service.server._status import WorkerTraffic
from agn_optax.service.server._whole import check_regions
from agn_optax.service.wire import _pieces, _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._fingerprint import fingerprint
from agn_optax.service.wire._frames import (
    Frame,
    FrameReader,
    bytes_schema,
    do_nothing,
)

PyTree = Any
T = TypeVar("T", pb.DescribeRequest, pb.Join, pb.Start)
_log = logging.getLogger("agn_optax")
_MISSED_HEARTBEATS = 3  # heartbeats that may be missed
_MAX_HEARTBEAT = 5.0  # maximum s between two heartbeats
_MAX_NAME = 256  # bytes of a worker's name
_MAX_WITNESSES = 2  # of a worker that joins
_MAX_PULL_WAIT = 60.0  # s that a pull may wait for the first parameters


class Servicer:
    """The handlers of the service's calls; `Core` makes all decisions.

    Each handler first checks that the `Caller` may make the call.

    Args:
      core: the core of the center.
      authenticator: the authenticator of callers.
      dtype: the floating dtype that was chosen for the center; "" if none was.
      limits: the limits of the service.

    Attributes:
      limits: the limits of the service.
      call_limits: limits on calls and connections, for handlers and transports.
      exchanges: the exchanges that are under way.
      max_workers: number of workers that the limits allow for.
      buffers: buffers in which frames are received.
      stop: stops the whole service.
      on_event: reports an event to the monitor: its kind and its details. Must not
        block.
      offers: the offers of all transports other than gRPC, without keys.
      listens_at, direct_address, page_address: the addresses of gRPC, of direct
        connections and of the page, for the status.
    """

    def __init__(
        self,
        core: Core,
        authenticator: Authenticator,
        dtype: str,
        limits: Limits,
    ) -> None:
        self.core = core
        self.authenticator = authenticator
        self.limits = limits
        self.max_workers = limits.workers_of_service
        self._dtype = dtype
        self._frames = CenterFrames(core)
        self._traffic = WorkerTraffic(self.max_workers)
        self.exchanges = Exchanges(core, self._frames, self._traffic)
        self.call_limits = CallLimits(limits.calls, self.max_workers)
        # Computed once, before the first call: concurrent calls would each compute it,
        # which on a busy machine could take longer than the timeout of their retries.
        self._rule = fingerprint(core.rule)
        self._started = time.monotonic()
        heartbeat = max(limits.lease / _MISSED_HEARTBEATS, 0.5)
        self._heartbeat = min(heartbeat, _MAX_HEARTBEAT)
        self._heartbeat_timeout = max(
            limits.lease, _MISSED_HEARTBEATS * self._heartbeat
        )
        self.buffers = Buffers()
        self._joining = threading.Lock()
        self._assemblies: dict[str, Assembly] = {}  # by worker
        self._groups = Groups(self.max_workers)
        self._first_parameters = FirstParameters(self.buffers)
        self.stop: Callable[[], object] = do_nothing
        self.on_event: Callable[..., object] = _ignore_event
        self.offers: list[pb.Offer] = []
        self.listens_at, self.direct_address, self.page_address = "", "", ""

    def authenticate(self, authorization: str, host: str) -> Caller:
        """Return the caller with the credentials of a call.

        Failures are rate-limited and reported.

        Args:
          authorization: ``Bearer`` and a token; "" for none.
          host: network address of the caller.

        Raises:
          NotAllowedError: the caller is unknown.
          CenterBusyError: the host has failed too often.
        """
        kind, _, token = authorization.partition(" ")
        shown = token.strip() if kind.lower() == "bearer" else ""
        try:
            return self.authenticator.caller(shown.encode(), host)
        except errors.NotAllowedError as error:
            self.call_limits.admit_host(host)
            self.on_event("rejected", "", error, host)
            raise

    def describe(self, request: pb.DescribeRequest, caller: Caller) -> pb.Description:
        """Return the center's description."""
        caller.check("Describe")
        _check_protocol(request)
        schema = self._frames.schema
        key = self.authenticator.issue_key(caller)
        return pb.Description(
            protocol=PROTOCOL,
            release=__version__,
            center=self.core.center_id,
            rule=self._rule,
            schema=None if schema is None else self._frames.schema_bytes,
            schema_hash=b"" if schema is None else schema.hash,
            calls=sorted(caller.calls),
            lease=self.limits.lease,
            heartbeat=self._heartbeat,
            waiting_interval=WAITING_INTERVAL + MAX_WAIT,
            mode=repr(self.core.ledger.mode),
            dtype=self._dtype,
            barrier=self.core.ledger.barrier,
            version=None if schema is None else self.core.store.current.number,
            offers=[
                pb.Offer(transport=offer.transport, address=offer.address, key=key)
                for offer in self.offers
            ],
        )

    def initialize(
        self, reader: FrameReader, context: Any, caller: Caller
    ) -> pb.Initialized:
        """Initialize the center with the chief's parameters."""
        caller.check("Initialize")
        limits = self.call_limits
        with limits.time_receiving(reader, context.cancel, from_chief=True):
            with limits.time_handshake(context.cancel):
                start = _check_protocol(_read_header(reader).start)
            _check_name(start.worker, least=0)
            caller.check("Initialize", start.worker)
            if (version := self._initialized_version(start)) is not None:
                return pb.Initialized(version=version)
            # The processes of one chief send at the same time.
            chief = (caller.key, start.worker) if start.share_size else object()
            with limits.initializations.held(chief, other_chief(), WAITING_INTERVAL):
                version = self._initialized_version(start)
                if version is None:
                    try:
                        params = self._read_parameters(start, reader, context)
                        if params is not None:  # else pieces are still missing
                            version = self.core.initialize(params, worker=start.worker)
                    finally:
                        # Of a chief that has failed, or pieces that were sent twice.
                        if self.core.is_initialized:
                            self._first_parameters.forget()
        return pb.Initialized(version=version)

    def _initialized_version(self, start: pb.Start) -> int | None:
        """Return the version of an initialized center; None if it is not initialized.

        An initialized center checks only the hash of the chief's schema, and reads
        neither the schema nor the parameters.

        Raises:
          AlreadyInitializedError: another worker has initialized the center.
          TreeMismatchError: the chief's parameters are of another model.
        """
        schema = self._frames.schema
        if schema is None:
            return None
        version = self.core.initialize((), worker=start.worker)
        if start.schema_hash != schema.hash:
            raise errors.TreeMismatchError(
                f"another model: the parameters of worker {start.worker!r} have other "
                "paths, dtypes or shapes than this center's"
            )
        return version

    def _read_parameters(
        self, start: pb.Start, reader: FrameReader, context: Any
    ) -> PyTree:
        """Receive a chief's schema and parameters.

        Return None if it is one of several processes, and pieces of others are missing.
        """
        size, share_size = start.schema_size, start.share_size
        if size > _trees.MAX_SCHEMA:
            raise errors.ProtocolError(_trees.exceeded_limit(0, size, ""))
        _check_share_size(share_size)
        described = reader.read_buffer(bytes_schema(size + share_size), "a schema")
        schema = _trees.from_bytes(described[:size].tobytes())
        for leaf in schema.leaves:
            if not _trees.is_representable(leaf.dtype):
                raise errors.TreeMismatchError(
                    f"{leaf.path} is {leaf.dtype}, which this center can keep only "
                    "with JAX_ENABLE_X64=1 in its environment"
                )
        with self.call_limits.time_handshake(context.cancel):
            header = _read_header(reader)
        if not header.HasField("parameters"):
            raise errors.ProtocolError("expected parameters, got another frame")
        if not share_size:
            buffer = reader.read_buffer(schema, "the parameters")
            return _trees.build(schema, schema.views(buffer))
        share = _pieces.from_bytes(described[size:].tobytes())
        check_regions(share, schema)
        pieces = _pieces.piece_schemas(self.core.rule, schema, share).owned
        places = self._first_parameters.places(share, schema)
        reader.read_into(pieces, places, "pieces of the parameters")
        return self._first_parameters.add(share)

    def pull(self, request: pb.PullRequest, caller: Caller) -> Iterator[Frame]:
        """Send the current version of the center."""
        caller.check("Pull")
        limits = self.call_limits
        busy = errors.CenterBusyError("too many pulls are already waiting; try again")
        end = time.monotonic() + min(request.wait, _MAX_PULL_WAIT)
        with limits.waiting_pulls.held(caller.key, busy), ExitStack() as stack:
            while self._frames.schema is None and (left := end - time.monotonic()) > 0:
                self.core.wait_until_initialized(min(left, WAITING_INTERVAL))
                yield WAITING
            while not limits.pulls.acquire(caller.key, WAITING_INTERVAL):
                yield WAITING
            stack.callback(limits.pulls.release, caller.key)
            version = stack.enter_context(self.core.reading(kept=True))
            # The version is held until it is sent: the arrays are views of it.
            yield self._frames.snapshot(version)

    def exchange(
        self, reader: FrameReader, context: Any, caller: Caller, transport: str
    ) -> Iterator[Frame]:
        """Serve a worker's session, or the part of it that uses one connection.

        Args:
          reader: reader of the worker's frames, over gRPC or a direct connection.
          context: the connection: ``is_active()`` says whether it is open,
            ``add_callback(callback)`` registers a callback for its end and returns
            whether it will be called, and ``cancel()`` ends it.
          caller: the caller; it may only join with a name that it may act for.
          transport: name of the transport.
        """
        limits, worker = self.call_limits, ""
        limits.admit(caller.key)
        with limits.time_receiving(reader, context.cancel):
            try:
                with limits.time_handshake(context.cancel):
                    header = _read_header(reader)
                caller.check("Exchange")
                join = _check_protocol(header.join)
                _check_name(join.worker)
                _check_name(join.session_id)
                if len(join.witnesses) > _MAX_WITNESSES:
                    raise errors.ProtocolError(
                        f"a worker sends {_MAX_WITNESSES} witnesses at most, got "
                        f"{len(join.witnesses)}"
                    )
                caller.check("Exchange", join.worker)
                worker = join.worker
                yield from self._serve_session(join, reader, context, transport)
            except errors.AgnOptaxError as error:
                self.on_event("rejected", worker, error, caller.host)
                raise

    def _serve_session(
        self,
        join: pb.Join,
        reader: FrameReader,
        context: Any,
        transport: str,
    ) -> Iterator[Frame]:
        with self.core.recording_failed_join(join.worker):
            session = self._join(join, reader, context)
        if session is None:
            return  # the worker may already have reconnected in another call
        self._traffic.get(join.worker).transport = transport
        # gRPC calls it on one of its threads, which applying messages must not block.
        disconnect = functools.partial(
            in_background, session.disconnect, "agn-optax disconnect", unread=True
        )
        if not context.add_callback(disconnect):
            session.disconnect()
            return
        # If all have joined before, others may have their answers, and do not connect.
        if isinstance(session, ProcessPart) and not join.center:
            while missing := session.wait_for_processes(WAITING_INTERVAL):
                yield waiting_for(missing)
        while not self.core.wait_for_barrier(WAITING_INTERVAL):
            yield WAITING
        joined = pb.Joined(center=self.core.center_id)
        yield Frame(pb.Header(joined=joined))
        while (header := reader.read_header()) is not None:
            if header.HasField("acknowledge"):
                session.acknowledge(header.acknowledge)
                # Otherwise the programs of other exchanges release the arguments.
                if not self.exchanges.running:
                    release_arguments()
                continue
            if not header.HasField("message"):
                raise errors.ProtocolError("expected a message, got another frame")
            yield from self.exchanges.run(
                session, header.message, reader, self.on_event
            )

    def _join(
        self, join: pb.Join, reader: FrameReader, context: Any
    ) -> LocalSession | ProcessPart | None:
        """Let a worker or one of its processes join; None if its connection is lost."""
        if join.center not in ("", self.core.center_id):
            raise errors.WorkerStateError(
                f"this center is not the one that worker {join.worker!r} joined: it "
                "was started anew, or from a checkpoint, and may lack exchanges. Adopt "
                "its parameters with start()"
            )
        if not context.is_active():
            return None
        if join.share_size:
            return self._join_part(join, reader, context)
        session = self.core.join(
            join.worker,
            join.session_id,
            witnesses=join.witnesses,
            resume=bool(join.center),
            heartbeat_timeout=self._heartbeat_timeout,
            close_connection=context.cancel,
        )
        with self._joining:
            self._groups.join(join.worker, join.session_id, "")
        return session

    def _join_part(
        self, join: pb.Join, reader: FrameReader, context: Any
    ) -> ProcessPart:
        """Let one of several processes of a worker join."""
        _check_share_size(join.share_size)
        received = reader.read_buffer(bytes_schema(join.share_size), "a share")
        share = _pieces.from_bytes(received.tobytes())
        worker, session_id = join.worker, join.session_id
        # One object, by which the assembly knows the newest connection of a process.
        closer = context.cancel
        with self._joining:
            self._groups.check(worker, session_id, share.group)
            self.core.heartbeat(())  # a session whose lease has ended ends now
            kept = {k: a for k, a in self._assemblies.items() if not a.is_closed}
            assembly = kept.get(worker)
            ids = assembly and (assembly.session_id, assembly.group)
            if assembly is None or ids != (session_id, share.group):
                assembly = Assembly(
                    self.core, self._frames, self.buffers, worker, session_id, share
                )
            assembly.join(
                share,
                closer,
                witnesses=join.witnesses,
                resume=bool(join.center),
                heartbeat_timeout=self._heartbeat_timeout,
            )
            self._assemblies = {**kept, worker: assembly}
            self._groups.join(worker, session_id, share.group)
        return ProcessPart(assembly, share, closer)

    def alive(self, request: pb.AliveRequest, caller: Caller) -> pb.AliveReply:
        """Record the heartbeats of workers."""
        sessions = [
            (session.worker, session.session_id) for session in request.sessions
        ]
        known: list[str] = []
        try:
            caller.check("Alive")
            if len(sessions) > self.max_workers:
                raise errors.ProtocolError(
                    f"this center has at most {self.max_workers} workers, got "
                    f"heartbeats of {len(sessions)}"
                )
            for worker, _ in sessions:
                caller.check("Alive", worker)
            known = self.core.heartbeat(sessions)
        finally:
            self.call_limits.admit(("worker", known[0]) if known else caller.key)
        return pb.AliveReply()

    def leave(self, request: pb.LeaveRequest, caller: Caller) -> pb.LeaveReply:
        """Let a worker leave for good."""
        caller.check("Leave", request.worker)
        worker, session_id = request.worker, request.session_id
        with self._joining:
            may_leave = self._groups.may_leave(worker, session_id, request.group)
        if may_leave:
            self.core.leave(worker, session_id)
        return pb.LeaveReply()

    def status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusReply:
        """Return the center's status."""
        caller.check("Status")
        version, members, waiting = self.core.members()
        is_initialized = self.core.is_initialized
        parameters, nbytes = self._frames.parameters if is_initialized else (0, 0)
        keeper, notices = self.core.keeper, self.core.notices.current()
        stalled = {x.worker for x in notices if x.check == "missed_periods"}
        return pb.StatusReply(
            version=version,
            rule=self.core.rule.name,
            mode=repr(self.core.ledger.mode),
            uptime=time.monotonic() - self._started,
            parameters=parameters,
            parameter_bytes=nbytes,
            bytes_received=self._traffic.total.bytes_received,
            bytes_sent=self._traffic.total.bytes_sent,
            listens_at=self.listens_at,
            direct_address=self.direct_address,
            page_address=self.page_address,
            rejected=dict(self.core.ledger.rejections.counts),
            degraded="" if keeper is None else keeper.degraded,
            center=self.core.center_id,
            workers=self._traffic.statuses(members, waiting, stalled),
            notices=[pb.Notice(**notice._asdict()) for notice in notices],
            **self.core.ledger.totals._asdict(),
        )

    def drain(self, request: pb.DrainRequest, caller: Caller) -> pb.DrainReply:
        """Begin to end the service, which may take a while."""
        caller.check("Drain")
        _log.warning("draining, as requested by %s", caller.description)
        in_background(self.stop, "agn-optax drain", lasting=True)
        return pb.DrainReply()


def _ignore_event(*event: object) -> None:
    """Ignore an event, because there is no monitor."""


def _check_name(name: str, least: int = 1) -> None:
    """Check the length of a worker's name or of a session id."""
    if not least <= len(name.encode()) <= _MAX_NAME:
        raise errors.ProtocolError(
            f"a worker's name and its session id must have {least} to {_MAX_NAME} "
            f"bytes, got {len(name.encode())}: {name[:40]!r}"
        )


def _check_share_size(size: int) -> None:
    """Check the size of a share before memory is allocated for it."""
    if size > _pieces.MAX_SHARE:
        raise errors.ProtocolError(
            f"a share has at most {_pieces.MAX_SHARE} bytes, got {size}"
        )


def _read_header(reader: FrameReader) -> pb.Header:
    """Return the header of the next frame.

    Raises:
      ProtocolError: the call has ended.
    """
    header = reader.read_header()
    if header is None:
        raise errors.ProtocolError("expected a frame, but the call ended")
    return header


def _check_protocol(request: T) -> T:
    """Check the protocol version in the first frame of a call, and return the frame."""
    if request.protocol != PROTOCOL:
        raise errors.ProtocolError(
            f"this center speaks version {PROTOCOL} of the protocol, got "
            f"{request.protocol}; run the same release of agn_optax on both sides"
        )
    return request
