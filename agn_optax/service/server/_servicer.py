"""The handlers of the service's calls, around the `Core` of a center."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import in_background
from agn_optax._version import __version__
from agn_optax.center import (
    Answer,
    Core,
    KeptAnswer,
    LocalSession,
    Member,
    Packed,
    Snapshot,
    Version,
    release_arguments,
)
from agn_optax.service import center_pb2 as pb
from agn_optax.service._address import PROTOCOL, WAITING_INTERVAL
from agn_optax.service._watchdog import Transfers
from agn_optax.service.security._access import Caller, Door
from agn_optax.service.security._rate_limits import (
    ACCEPTED,
    JOIN,
    LONGEST,
    MOVED,
    NEWCOMERS,
    PARSED,
    SAVED,
    SPARE,
    Limiter,
    Places,
)
from agn_optax.service.server._settings import Limits
from agn_optax.service.wire import _buffers, _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._fingerprint import fingerprint
from agn_optax.service.wire._packets import (
    MOST_PROBED,
    Parcel,
    Reader,
    in_bytes,
    nothing,
    of_bytes,
)
from agn_optax.service.wire._schema import Schema
from agn_optax.service.wire._submission import snapshot_of, submission_of
from agn_optax.service.wire._versions import installed

PyTree = Any
T = TypeVar("T", pb.DescribeRequest, pb.Join, pb.Start)
_log = logging.getLogger("agn_optax")
_LEAST_COPIED = 1 << 20  # bytes of a message whose answer may be copied over it
_SILENT_BEATS = 3  # heartbeats that may be missed
_LONGEST_BEAT = 5.0  # maximum s between two heartbeats
_WAITING = Parcel(pb.Frame(waiting=pb.Waiting()))
# Calls with rate limits of their own, and the names of these.
_APART = {
    "Status": "watch",
    "Health": "watch",
    "Save": "save",
    "Drain": "end",
    "Leave": "end",
}
# Limits that protect a center from its peers.
_STALLED = 30.0  # timeout in s for any part of a frame to be transferred
# The same for a chief's first parameters. It is shorter because another worker waits
# meanwhile, up to its `timeout` (30 s).
_STALLED_CHIEF = 10.0
_UNKNOWN = 5.0  # timeout in s of authentication, and of the first frame of a call
_HURRY = 0.5  # the same for a caller or host with too many such connections or calls
_MOST_NAME = 256  # bytes of a worker's name
_MOST_PULLS = 4  # concurrent pulls: each may keep a version from being updated in place
_MOST_OF_ONE = 3  # concurrent pulls of one caller, which may read slowly
# Concurrent probes in all, and of one caller. If the network loses a caller's bytes,
# several count, because the center does not notice that the earlier ones have ended.
_MOST_PROBING, _MOST_OF_ONE_PROBING = 16, 12
_MOST_WAITING = 1024  # waiting pulls, in addition to one for each worker
_LONGEST_WAIT = 60.0  # s that a pull may wait for the first parameters
_MANY = 1024  # maximum number of workers if none is set
LONGEST_GRACE = 30.0  # s of the grace by default


@dataclasses.dataclass
class _Traffic:
    """The traffic and the reported numbers of one worker, for its status."""

    bytes_received: int = 0
    bytes_sent: int = 0
    period: int = 0  # local steps
    norm: float | None = None
    transport: str = ""
    reported: dict[str, float] = dataclasses.field(default_factory=dict)


class Servicer:
    """The handlers of the service's calls; `Core` makes all decisions.

    Each handler first checks that the `Caller` may make the call.

    Args:
      core: the core of the center.
      door: the authenticator of callers.
      dtype: the floating dtype that was chosen for the center; "" if none was.
      parent: address of the center that this one is a worker of; "" if none.
      limits: the limits of the service.

    Attributes:
      limits: the limits of the service.
      transfers: frames that are being sent or received.
      workers: maximum number of workers.
    """

    def __init__(
        self,
        core: Core,
        door: Door,
        dtype: str,
        parent: str,
        limits: Limits,
    ) -> None:
        self.core = core
        self.door = door
        self.transfers = Transfers()
        self.limits = limits
        self.workers = limits.max_workers or _MANY
        self._limiter = Limiter(limits.calls)
        self._ports = Limiter(None if limits.calls is None else ACCEPTED)
        self._pulls = Places(_MOST_PULLS, _MOST_OF_ONE)
        self._pulling = Places(_MOST_WAITING + self.workers, max(64, self.workers))
        self._initializations = Places(1, 1)
        self._probing = Places(_MOST_PROBING, _MOST_OF_ONE_PROBING)
        self._dtype = dtype
        self._parent = parent
        if core.is_initialized:
            _ = self._schema_bytes  # raises now if the tree has no valid schema
        # Computed once, before the first call: concurrent calls would each compute it,
        # which on a busy machine could take longer than the timeout of their retries.
        self._rule = fingerprint(core.rule)
        self._started = time.monotonic()
        lease = limits.lease
        self._heartbeat = min(max(lease / _SILENT_BEATS, 0.5), _LONGEST_BEAT)
        self._silence = max(lease, _SILENT_BEATS * self._heartbeat)
        self._idle = threading.Condition()
        self._busy = 0  # exchanges that are being applied and answered
        self._talking = 0  # the same, and those whose message is still being received
        # It is held while a large message is applied and its answer copied, because the
        # next in-place update must wait for the copy. No I/O happens while it is held.
        self._turn = threading.Lock()
        self._counts = threading.Lock()  # guards the traffic
        self._traffic: dict[str, _Traffic] = {}  # by worker
        self._total = _Traffic()  # of all workers since the start
        # Hashes of the schemas whose programs are compiled.
        self._compiled: set[bytes] = set()
        self.buffers = Buffers()
        self.stop: Callable[[], object] = nothing  # stops the whole service
        self.is_drained = False  # whether an operator has drained the service
        # Reports an event to the monitor: its kind and its details. Must not block.
        self.tell: Callable[..., object] = _unheard
        # The offers of all transports without gRPC, still without a key.
        self.offers: list[pb.Offer] = []
        # The addresses of gRPC, of direct connections and of the page, for the status.
        self.listens_at, self.direct_address, self.page_address = "", "", ""

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no exchange is being applied or answered; False if one still is.

        Args:
          timeout: seconds to wait at most.
        """
        with self._idle:
            return self._idle.wait_for(lambda: not self._busy, timeout)

    @contextmanager
    def sending(
        self, cancel: Callable[[], None], parcel: Parcel
    ) -> Iterator[Callable[[], None]]:
        """Send a frame to a worker within the block, with timeouts.

        Args:
          cancel: ends the connection to that worker, from any thread.
          parcel: the frame.

        Yields:
          A callable, to be called whenever a part of the frame was sent.
        """
        with self.transfers.under_way(cancel, parcel.nbytes, _STALLED) as transfer:
            yield transfer.went

    def admit(self, caller: Caller, call: str, tokens: float = 1.0) -> None:
        """Apply the rate limit of a call, waiting for its turn if necessary.

        A bucket holds the calls that all workers make when they start, in addition to
        `SPARE`, because one caller may be all of them. Calls that watch, write a
        snapshot or end something have buckets of their own, so that a caller's other
        calls do not delay them.

        Raises:
          CenterBusyError: the wait would be too long; the call can be retried.
        """
        apart, size = _APART.get(call, ""), SPARE
        if not apart and "Exchange" in caller.calls:
            size += self.workers * (3 + JOIN + self._size / MOVED)
        elif apart == "end":
            size += self.workers
        self._admit((apart, caller.key), size, tokens)

    def _admit(self, key: Hashable, size: float, tokens: float = 1.0) -> None:
        if not self._limiter.take(key, size, tokens):
            raise errors.CenterBusyError(
                f"too many calls: beside its exchanges, a caller may make {size:.0f} "
                f"calls at once and then {self._limiter.rate:g} a second, and a call "
                "that moves many bytes counts as several; try again"
            )

    def admit_host(self, host: str, what: str = "watch") -> None:
        """Apply a rate limit of its own to what the host of an unknown caller does."""
        self._admit((what, host), SPARE)

    def pace(self, port: Hashable) -> None:
        """Wait until a port may accept another connection, from any host."""
        self._ports.take(port, self._most_newcomers, patience=math.inf)

    def lets_in(self, host: Hashable) -> bool:
        """Return whether a host may begin another unauthenticated connection or call.

        This takes a token, which `came_in` gives back.
        """
        return self._limiter.take(("host", host), self._most_newcomers, patience=0.0)

    def came_in(self, host: Hashable) -> None:
        """Give back the token of a host's connection that has been authenticated."""
        self._limiter.give_back(("host", host))

    @property
    def _most_newcomers(self) -> float:
        return max(NEWCOMERS, 2.0 * self.workers)

    def known(self, authorization: str, certificate: bytes, host: str) -> Caller:
        """Return the caller with the credentials of a call.

        Failures are rate-limited and reported.

        Args:
          authorization: ``Bearer`` and a token; "" for none.
          certificate: certificate of the connection (DER); b"" for none.
          host: network address of the caller.

        Raises:
          NotAllowedError: the caller is unknown.
          CenterBusyError: the host has failed too often.
        """
        kind, _, token = authorization.partition(" ")
        try:
            if self.door.access is None:
                return self.door.caller(host=host)
            if authorization and kind.lower() != "bearer":
                raise errors.NotAllowedError(
                    "authorization must be `Bearer` and a token"
                )
            return self.door.caller(token.strip().encode(), certificate, host)
        except errors.NotAllowedError as error:
            self.admit_host(host, "rejected")
            self.tell("rejected", "", error, host)
            raise

    def introduced(self, cut: Callable[[], None]) -> AbstractContextManager[object]:
        """Limit the time in which a caller authenticates, or receives an error.

        Args:
          cut: ends the connection, from any thread.
        """
        return self.transfers.under_way(cut, 0, _UNKNOWN)

    @contextmanager
    def hearing(self, cut: Callable[[], None], caller: Hashable) -> Iterator[None]:
        """Limit the time in which the first frame of a call is received.

        A caller with too many silent calls has less time, but is not rejected, because
        its next call may be that of a worker.

        Args:
          cut: ends the connection, from any thread.
          caller: key of the caller.
        """
        silent = ("silent", caller)
        in_time = self.lets_in(silent)
        with self.transfers.under_way(cut, 0, _UNKNOWN if in_time else _HURRY):
            yield
        if in_time:
            self.came_in(silent)

    def describe(self, request: pb.DescribeRequest, caller: Caller) -> pb.Described:
        """Return the center's description."""
        caller.check("Describe")
        _of_our_protocol(request)
        schema = self.schema()
        description = pb.Description(
            protocol=PROTOCOL,
            release=__version__,
            center=self.core.center_id,
            rule=self._rule,
            schema_hash=b"" if schema is None else schema.hash,
            clock=time.time(),
            lease=self.limits.lease,
            heartbeat=self._heartbeat,
            waiting_interval=WAITING_INTERVAL + LONGEST,
            mode=repr(self.core.ledger.mode),
            dtype=self._dtype,
            barrier=self.core.ledger.barrier,
            offers=self._offers_to(caller),
            versions=installed(),
        )
        return pb.Described(
            description=description.SerializeToString(),
            schema=None if schema is None else self._schema_bytes,
        )

    def initialize(
        self, reader: Reader, context: Any, caller: Caller
    ) -> pb.Initialized:
        """Initialize the center with the chief's parameters.

        An initialized center checks only the hash of the chief's schema, and reads
        neither the schema nor the parameters.
        """
        caller.check("Initialize")
        with self._receiving(reader, context.cancel, _STALLED_CHIEF):
            start = _of_our_protocol(self._next(reader, context).start)
            _check_name(start.worker, least=0)
            caller.check("Initialize", start.worker)
            # The client retries until its timeout, because the other chief may fail.
            busy = errors.CenterBusyError(
                "another worker is initializing this center; try again"
            )
            with self._initializations.one(caller.key, busy, WAITING_INTERVAL):
                own = self.schema()
                params = ()
                if own is None:
                    params = self._sent(start, reader, context, caller)
                version = self.core.initialize(params, worker=start.worker)
        if own is not None and start.schema_hash != own.hash:
            raise errors.TreeMismatchError(
                f"another model: the parameters of worker {start.worker!r} have other "
                "paths, dtypes or shapes than this center's"
            )
        return pb.Initialized(version=version)

    def _next(self, reader: Reader, context: Any) -> pb.Frame:
        """Return the control part of a chief's next frame, received with a timeout."""
        with self.transfers.under_way(context.cancel, 0, _STALLED_CHIEF):
            return _control(reader)

    def _sent(
        self, start: pb.Start, reader: Reader, context: Any, caller: Caller
    ) -> PyTree:
        """Receive a chief's schema and parameters."""
        if start.schema_size > _trees.MOST_SCHEMA:
            raise errors.ProtocolError(_trees.why_too_large(0, start.schema_size, ""))
        self.admit(caller, "Initialize", start.schema_size / PARSED)
        came = reader.buffer(of_bytes(start.schema_size), "a schema")
        schema = _trees.from_bytes(came.tobytes())
        for leaf in schema.leaves:
            if not _trees.is_representable(leaf.dtype):
                raise errors.TreeMismatchError(
                    f"{leaf.path} is {leaf.dtype}, which this center can keep only "
                    "with JAX_ENABLE_X64=1 in its environment"
                )
        if not self._next(reader, context).HasField("parameters"):
            raise errors.ProtocolError("expected parameters, got another frame")
        buffer = reader.buffer(schema, "the parameters")
        return _trees.build(schema, schema.views(buffer))

    def pull(self, request: pb.PullRequest, caller: Caller) -> Iterator[Parcel]:
        """Send the current version of the center."""
        caller.check("Pull")
        many = errors.CenterBusyError("too many pulls are already waiting; try again")
        end = time.monotonic() + min(request.wait, _LONGEST_WAIT)
        with self._pulling.one(caller.key, many), ExitStack() as taken:
            while self.schema() is None and (left := end - time.monotonic()) > 0:
                self.core.wait_until_initialized(min(left, WAITING_INTERVAL))
                yield _WAITING
            self.admit(caller, "Pull", self._size / MOVED)
            while not self._pulls.take(caller.key, WAITING_INTERVAL):
                yield _WAITING
            taken.callback(self._pulls.give_back, caller.key)
            version = taken.enter_context(self.core.reading(kept=True))
            pulled, schema = Snapshot(None, version.number), self._travels.center
            # The version is held until it is sent: the arrays are views of it.
            yield self._parcel(version, pulled, schema, broadcast=request.broadcast)

    def exchange(
        self, reader: Reader, context: Any, caller: Caller, transport: str
    ) -> Iterator[Parcel]:
        """Serve a worker's session, or the part of it that uses one connection.

        Args:
          reader: reader of the worker's frames, over gRPC or a direct connection.
          context: the connection: ``is_active()`` says whether it is open,
            ``add_callback(gone)`` registers a callback for its end and returns whether
            it will be called, and ``cancel()`` ends it.
          caller: the caller; it may only join with a name that it may act for.
          transport: name of the transport.
        """
        with self._receiving(reader, context.cancel):
            try:
                with self.hearing(context.cancel, caller.key):
                    first = _control(reader)
                if first.HasField("probe"):
                    yield from self._probed(first, reader, caller)
                    return
                caller.check("Exchange")
                join = _of_our_protocol(first.join)
                _check_name(join.worker)
                _check_name(join.session_id)
                caller.check("Exchange", join.worker)
            except (errors.AgnOptaxError, OSError, EOFError) as error:
                if isinstance(error, errors.AgnOptaxError):
                    self.tell("rejected", "", error, caller.host)
                self.admit(caller, "Exchange", JOIN)
                raise
            if self.core.knows(join.worker, join.session_id):
                self._admit(("back", join.worker), SPARE, JOIN)
            else:
                self.admit(caller, "Exchange", JOIN)
            try:
                yield from self._live(join, reader, context, caller, transport)
            except errors.AgnOptaxError as error:
                self.tell("rejected", join.worker, error, caller.host)
                raise

    def _probed(
        self, control: pb.Frame | None, reader: Reader, caller: Caller
    ) -> Iterator[Parcel]:
        """Receive and send bytes, for a measurement of the transport's speed.

        The rate limit is applied after the answer, so that its wait is not measured.
        """
        caller.check("Probe")
        busy = errors.CenterBusyError("other callers are already measuring; try again")
        with self._probing.one(caller.key, busy, _STALLED / 2):
            while control is not None:
                if not control.HasField("probe"):
                    raise errors.ProtocolError("expected a probe, got another frame")
                probe = control.probe
                if max(probe.size, probe.answer) > MOST_PROBED:
                    raise errors.ProtocolError(
                        f"a probe must have at most {MOST_PROBED} bytes each way, got "
                        f"{probe.size} and {probe.answer}"
                    )
                if probe.size:
                    reader.buffer(of_bytes(probe.size), "a probe")
                yield in_bytes(pb.Frame(probed=pb.Probed()), probe.answer)
                if size := probe.size + probe.answer:
                    self.admit(caller, "Probe", 1 + size / MOVED)
                control = reader.control()

    def _live(
        self,
        join: pb.Join,
        reader: Reader,
        context: Any,
        caller: Caller,
        transport: str,
    ) -> Iterator[Parcel]:
        if join.center not in ("", self.core.center_id):
            raise errors.WorkerStateError(
                f"this center is not the one that worker {join.worker!r} joined: it "
                "was started anew, or from a snapshot, and may lack exchanges. Adopt "
                "its parameters with start()"
            )
        if not context.is_active():
            return  # the worker may already be back in another call
        is_back = bool(join.center)
        session = self.core.join(
            join.worker,
            join.session_id,
            back=is_back,
            silence=self._silence,
            cut=context.cancel,
        )
        traffic = self._traffic_of(join.worker)
        traffic.transport = transport
        self.tell("joined", join.worker, join.session_id, is_back, transport)
        # A thread of gRPC calls it, which must not be blocked by applying messages.
        gone = functools.partial(
            in_background, session.disconnect, "agn-optax gone", unread=True
        )
        if not context.add_callback(gone):
            session.disconnect()
            return
        while not self.core.wait_for_barrier(WAITING_INTERVAL):
            yield _WAITING
        before, settled = session.before or ("", 0)
        joined = pb.Joined(center=self.core.center_id, before=before, settled=settled)
        yield Parcel(pb.Frame(joined=joined))
        while (control := reader.control()) is not None:
            caller = self._again(caller, join.worker)
            if control.HasField("acknowledge"):
                session.acknowledge(control.acknowledge)
                if not self._talking:  # else the programs of other exchanges do this
                    release_arguments()
                continue
            if not control.HasField("message"):
                raise errors.ProtocolError("expected a message, got another frame")
            yield from self._exchange(session, control.message, reader)

    def alive(self, request: pb.AliveRequest, caller: Caller) -> pb.AliveReply:
        """Record the heartbeats of workers."""
        sessions = [(each.worker, each.session_id) for each in request.sessions]
        there: list[str] = []
        try:
            caller.check("Alive")
            if len(sessions) > self.workers:
                raise errors.ProtocolError(
                    f"this center has at most {self.workers} workers, got heartbeats "
                    f"of {len(sessions)}"
                )
            for worker, _ in sessions:
                caller.check("Alive", worker)
            there = self.core.heartbeat(sessions)
        finally:
            # With a bucket of its own: a caller's other calls must not delay heartbeats
            # so that a worker seems dead.
            if there:
                self._admit(("alive", there[0]), SPARE)
            else:
                self.admit(caller, "Alive")
        return pb.AliveReply()

    def leave(self, request: pb.LeaveRequest, caller: Caller) -> pb.LeaveReply:
        """Let a worker leave for good."""
        caller.check("Leave", request.worker)
        # First, or its ended connection would be reported as lost.
        self.tell("left", request.worker, request.session_id)
        self.core.leave(request.worker, request.session_id)
        return pb.LeaveReply()

    def status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusReply:
        """Return the center's status."""
        caller.check("Status")
        version, members, waiting = self.core.members()
        traffic = {n: dataclasses.asdict(t) for n, t in list(self._traffic.items())}
        is_there = self.core.is_initialized
        room = self.core.room
        return pb.StatusReply(
            version=version,
            rule=self.core.rule.name,
            mode=repr(self.core.ledger.mode),
            uptime=time.monotonic() - self._started,
            parameters=self._sizes[0] if is_there else 0,
            parameter_bytes=self._sizes[1] if is_there else 0,
            bytes_received=self._total.bytes_received,
            bytes_sent=self._total.bytes_sent,
            parent=self._parent,
            listens_at=self.listens_at,
            direct_address=self.direct_address,
            page_address=self.page_address,
            rejected=dict(self.core.ledger.rejections.counts),
            degraded=self.core.degraded,
            disk_free=None if room is None else room.free,
            disk_needed=None if room is None else room.needed,
            center=self.core.center_id,
            workers=[
                _status_of(name, member, name in waiting, traffic.get(name, {}))
                for name, member in sorted(members.items())
            ],
        )

    def save(self, request: pb.SaveRequest, caller: Caller) -> pb.SaveReply:
        """Write a snapshot, which may take a while."""
        caller.check("Save")
        self.admit(caller, "Save", self._size / SAVED)
        return pb.SaveReply(version=self.core.write_snapshot())

    def drain(self, request: pb.DrainRequest, caller: Caller) -> pb.DrainReply:
        """Begin to end the service, which may take a while."""
        caller.check("Drain")
        self.is_drained = True
        _log.warning("draining, as requested by %s", caller.description)
        in_background(self.stop, "agn-optax drain", lasting=True)
        return pb.DrainReply()

    def _traffic_of(self, worker: str) -> _Traffic:
        """Return a worker's traffic; drop that of absent workers if there are many."""
        many = len(self._traffic) > 2 * self.workers
        there = self.core.members()[1] if many else {}
        with self._counts:
            if many:
                known = self._traffic.items()
                self._traffic = {name: its for name, its in known if name in there}
            return self._traffic.setdefault(worker, _Traffic())

    def _count(self, traffic: _Traffic, *, received: int = 0, sent: int = 0) -> None:
        """Add bytes to the traffic of a worker and to the total."""
        with self._counts:
            for each in (traffic, self._total):
                each.bytes_received += received
                each.bytes_sent += sent

    def _offers_to(self, caller: Caller) -> list[pb.Offer]:
        """Return the offers with the key that authenticates this caller."""
        key = self.door.ticket(caller)
        return [
            pb.Offer(transport=each.transport, address=each.address, key=key)
            for each in self.offers
        ]

    def _again(self, caller: Caller, worker: str) -> Caller:
        """Check a joined worker against the current tokens; return its caller.

        Raises:
          CenterUnreachableError: the worker's credentials are no longer valid. This
            error makes the worker reconnect, with a new token if it has one; otherwise
            it then receives the `NotAllowedError`.
        """
        try:
            caller = self.door.caller(caller.token, caller.certificate, caller.host)
            caller.check("Exchange", worker)
        except errors.NotAllowedError as error:
            raise errors.CenterUnreachableError(f"no longer allowed: {error}") from None
        return caller

    @functools.cached_property
    def _schema_bytes(self) -> bytes:
        return _trees.to_bytes(self._travels.center)

    @functools.cached_property
    def _sizes(self) -> tuple[int, int]:
        """The number of the center's parameters, and their size in bytes."""
        leaves = self._travels.center.leaves
        numbers = sum(math.prod(leaf.shape) for leaf in leaves)
        return numbers, sum(leaf.nbytes for leaf in leaves)

    @property
    def _size(self) -> int:
        """Size of the center's buffer in bytes; 0 without parameters."""
        return self._travels.center.size if self.core.is_initialized else 0

    def schema(self) -> Schema | None:
        """Return the schema of the center; None if it has no parameters yet."""
        return self._travels.center if self.core.is_initialized else None

    @contextmanager
    def _receiving(
        self,
        reader: Reader,
        cancel: Callable[[], None],
        patience: float | None = None,
    ) -> Iterator[None]:
        """Receive frames within the block, with timeouts.

        Args:
          reader: reader of the frames.
          cancel: ends the connection, from any thread.
          patience: timeout in seconds for any part of a frame to be received; None for
            the default.
        """
        patience = _STALLED if patience is None else patience

        @contextmanager
        def pace(size: int) -> Iterator[None]:
            with self.transfers.under_way(cancel, size, patience) as transfer:
                reader.received = transfer.went
                yield

        reader.pace = pace
        try:
            yield
        finally:  # breaks a reference cycle, so that the reader's memory is freed
            reader.pace, reader.received = nullcontext, nothing

    @functools.cached_property
    def _travels(self) -> _trees.Travelling:
        """The wire formats of the center, messages and answers.

        Raises:
          NotInitializedError: the center has no parameters.
        """
        return _trees.travelling(self.core.rule, self.core.store.like)

    @functools.cached_property
    def _packed(self) -> bool:
        """True if the center's arrays have the layout of the buffer on the wire."""
        store = self.core.store
        return store.packing is not None and _trees.in_order(store.like)

    def _schema_of(self, message: pb.Message) -> Schema:
        """Return the schema of a message's contribution.

        Raises:
          InvalidArgumentError: JAX does not support its dtype with these settings.
          TreeMismatchError: it does not match the center's tree.
        """
        if message.dtype and not _trees.is_representable(message.dtype):
            raise errors.InvalidArgumentError(
                f"a message in {message.dtype} needs JAX_ENABLE_X64=1 in this center's "
                "environment"
            )
        schema = self._travels.message.cast(message.dtype)
        if message.schema_hash != schema.hash:
            raise errors.TreeMismatchError(
                "the message does not match the center's tree; the worker must ask for "
                "the center's description again"
            )
        return schema

    def _exchange(
        self, session: LocalSession, message: pb.Message, reader: Reader
    ) -> Iterator[Parcel]:
        traffic = self._traffic_of(session.worker)
        with self._counting("_talking"), ExitStack() as busy:
            kept = yield from self._settled(session, message, reader, busy, traffic)
            answer = kept.answer
            if answer.norm is not None:
                norm = traffic.norm = float(answer.norm)
                answer = answer._replace(norm=norm)
            own = session.worker, session.session_id
            self.tell("exchange", *own, message.steps, answer)
            with self.core.reading(kept.version) as version:
                parcel = self._followed(version, answer, message) or self._parcel(
                    version, answer, self._travels.answer, broadcast=True
                )
                if kept.recorded:
                    # Only the last part of the answer waits for the disk: an answer
                    # without it cannot be used, so the rest may be sent before.
                    parcel.until = functools.partial(session.wait_until_kept, kept)
                self._count(traffic, sent=parcel.nbytes)
                yield parcel

    def _settled(
        self,
        session: LocalSession,
        message: pb.Message,
        reader: Reader,
        busy: ExitStack,
        traffic: _Traffic,
    ) -> Generator[Parcel, None, KeptAnswer]:
        """Receive and apply a message; return its answer.

        The message's memory is not referenced any more when this returns.

        Yields:
          Waiting frames, until the answer is known.
        """
        schema = self._schema_of(message)
        buffer = reader.buffer(schema, "a message")
        busy.enter_context(self._counting("_busy"))
        self._count(traffic, received=schema.size)
        submission = submission_of(message, self._contribution(schema, buffer))
        traffic.period = submission.steps
        traffic.reported = dict(submission.reported or {})  # each message has them all
        submit = functools.partial(session.submit, submission)
        if schema.hash not in self._compiled:  # its programs may take minutes
            submitted = in_background(submit, "agn-optax first exchange")
            while wait([submitted], WAITING_INTERVAL).not_done:
                yield _WAITING
            submitted.result()
            self._compiled.add(schema.hash)
        elif self._packed and schema.size >= _LEAST_COPIED:
            while not self._turn.acquire(timeout=WAITING_INTERVAL):
                yield _WAITING
            try:
                submit()
                kept = session.answer(message.sequence, timeout=0.0)
                if kept is not None and self._talking > 1:
                    return self._moved_out(session, kept, schema, buffer)
            finally:
                self._turn.release()
        else:
            submit()
        while (kept := session.answer(message.sequence, WAITING_INTERVAL)) is None:
            yield _WAITING
        return kept

    @contextmanager
    def _counting(self, what: str) -> Iterator[None]:
        """Increase the counter named ``what`` within the block."""
        with self._idle:
            setattr(self, what, getattr(self, what) + 1)
        try:
            yield
        finally:
            with self._idle:
                setattr(self, what, getattr(self, what) - 1)
                self._idle.notify_all()

    def _contribution(self, schema: Schema, buffer: np.ndarray) -> PyTree:
        """Return a received buffer as a contribution for the center."""
        if self._packed:
            return Packed(*schema.packed.views(buffer))
        like = self.core.store.contribution_like
        return _trees.build(schema, schema.views(buffer), like)

    def _moved_out(
        self,
        session: LocalSession,
        kept: KeptAnswer,
        schema: Schema,
        buffer: np.ndarray,
    ) -> KeptAnswer:
        """Return an answer that is copied over its message, if it has the same schema.

        The version itself, while it was being sent, would prevent other messages from
        updating the center in place. The copy takes less time than the allocation of
        another version.
        """
        if schema.hash != self._travels.center.hash or kept.recorded:
            return kept  # the journal may still read a recorded message
        with self.core.reading(kept.version) as version, self.core.reading() as now:
            # Wait until the message is no longer read. Later versions depend on it, but
            # the answer's version does not if the rule adopts the version before.
            jax.block_until_ready(
                (version.params, now.params, kept.answer.norm, kept.read)
            )
            sent = schema.packed
            _buffers.write(sent, _trees.host_arrays(version.params, sent), buffer)
        return session.replace(kept, Packed(*sent.views(buffer)))

    def _followed(
        self, version: Version, answer: Answer, message: pb.Message
    ) -> Parcel | None:
        """Return an answer as differences from the worker's anchor.

        Returns:
          The frame; None if the answer must be sent whole, because the anchor is not
          known any more or the differences are not smaller.
        """
        travels = self._travels
        if travels.differences is None or not message.has_anchor:
            return None
        made = self.core.differences(message.anchor_version, version)
        if made is None:
            return None
        schema = travels.differences(len(made))
        if schema.size >= travels.answer.size:
            return None
        count = len(made)
        snapshot = snapshot_of(answer, schema_hash=schema.hash, differences=count)
        arrays = _trees.host_arrays(made, schema)
        return Parcel(pb.Frame(snapshot=snapshot), schema, arrays)

    def _parcel(
        self,
        version: Version,
        record: Answer | Snapshot,
        schema: Schema,
        *,
        broadcast: bool,
    ) -> Parcel:
        """Return the frame with a version, with views of its arrays if possible."""
        snapshot = snapshot_of(record, schema_hash=schema.hash)
        store = self.core.store
        read = store.broadcast if broadcast else store.tree
        params = version.params if self._packed else read(version)
        sent = schema.packed if self._packed else schema
        arrays = _trees.host_arrays(params, sent)
        return Parcel(pb.Frame(snapshot=snapshot), sent, arrays)


def _unheard(*event: object) -> None:
    """Ignore an event, because there is no monitor."""


def _status_of(
    name: str, member: Member, waits: bool, traffic: dict[str, Any]
) -> pb.WorkerStatus:
    """Return the status of a worker; it has not stalled while the center waits."""
    now = time.monotonic()
    exchanges, steps = member.recent.rates(now) or (None, None)
    is_awaited = member.connected and not waits
    return pb.WorkerStatus(
        name=name,
        connected=member.connected,
        exchanges=member.exchanges,
        dropped=member.dropped,
        staleness=member.staleness,
        joined=now - member.joined,
        seen=now - member.seen,
        waits=waits,
        rejected=member.rejected,
        exchanges_per_second=exchanges,
        steps_per_second=steps,
        stalled=member.recent.overdue(now) if is_awaited else None,
        **traffic,
    )


def _check_name(name: str, least: int = 1) -> None:
    """Check the length of a worker's name or of a session id."""
    if not least <= len(name.encode()) <= _MOST_NAME:
        raise errors.ProtocolError(
            f"a worker's name and its session id must have {least} to {_MOST_NAME} "
            f"bytes, got {len(name.encode())}: {name[:40]!r}"
        )


def _control(reader: Reader) -> pb.Frame:
    """Return the control part of the next frame.

    Raises:
      ProtocolError: the call has ended.
    """
    control = reader.control()
    if control is None:
        raise errors.ProtocolError("expected a frame, but the call ended")
    return control


def _of_our_protocol(request: T) -> T:
    """Check the protocol version in the first frame of a call, and return the frame."""
    if request.protocol != PROTOCOL:
        raise errors.ProtocolError(
            f"this center speaks version {PROTOCOL} of the protocol, got "
            f"{request.protocol}; run the same release of agn_optax on both sides"
        )
    return request
