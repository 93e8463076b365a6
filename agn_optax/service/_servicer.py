"""The calls of the service, around the `Core` of a center: bytes in, bytes out."""

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
    MOST_REPORTED,
    Answer,
    Core,
    LocalSession,
    Member,
    Packed,
    Version,
    let_go,
)
from agn_optax.service import center_pb2 as pb
from agn_optax.service._access import Caller, Door
from agn_optax.service._address import (
    PROTOCOL,
    WAITING_INTERVAL,
    host_of,
    is_everywhere,
)
from agn_optax.service._address import check as check_address
from agn_optax.service._fingerprint import fingerprint
from agn_optax.service._limits import (
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
from agn_optax.service._versions import installed
from agn_optax.service._watchdog import Transfers
from agn_optax.service.wire import _buffers, _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._packets import (
    MOST_PROBED,
    Parcel,
    Reader,
    in_bytes,
    nothing,
    of_bytes,
)
from agn_optax.service.wire._schema import Schema

PyTree = Any
T = TypeVar("T", pb.Join, pb.Start)
_log = logging.getLogger("agn_optax")
_LEAST_COPIED = 1 << 20  # bytes
_SILENT_BEATS = 3  # signs of life that may fail to come
_LONGEST_BEAT = 5.0  # seconds
_WAITING = Parcel(pb.Frame(waiting=pb.Waiting()))
# Calls that are counted apart from a caller's others.
_APART = {
    "Status": "watch",
    "Health": "watch",
    "Save": "save",
    "Drain": "end",
    "Leave": "end",
}
# What a peer may do to a center.
_STALLED = 30.0  # seconds in which some of a packet must move
# The same of a chief's first parameters: another worker waits meanwhile, for as long as
# its `timeout` lets it (30 s).
_STALLED_CHIEF = 10.0
_UNKNOWN = 5.0  # seconds in which a caller must say who it is, or hear why not
_HURRY = 0.5  # the same where too many of that caller or host do not say it
_MOST_NAME = 256  # bytes of a worker's name
_MOST_PULLS = 4  # at a time: each may keep a version of its own from being moved
_MOST_OF_ONE = 3  # of a caller, who may read slowly
# Who measure at a time. Of one whose bytes get lost on the way several are there, as it
# is not heard that the others have gone.
_MOST_PROBING, _MOST_OF_ONE_PROBING = 16, 12
_MOST_WAITING = 1024  # pulls
_LONGEST_WAIT = 60.0  # seconds that a pull may wait for the first parameters
_MANY = 1024  # workers, where nobody says how many there may be
_OVERHEAD = 4 << 20  # bytes that a connection takes, beside its message
_GRACE = 30.0  # seconds to end in, at least, where nobody says how many
LONGEST_GRACE = 600.0  # and at most


@dataclasses.dataclass
class _Traffic:
    """What one worker sent and got, for whoever watches."""

    bytes_received: int = 0
    bytes_sent: int = 0
    period: int = 0  # local steps
    norm: float | None = None
    transport: str = ""
    serves_at: str = ""
    reported: dict[str, float] = dataclasses.field(default_factory=dict)


class Servicer:
    """Answers calls; everything that is decided, `Core` decides.

    Each call comes with its `Caller`, which is asked first whether it may make it.

    Args:
      core: of the center.
      door: through which callers come.
      dtype: the floating dtype that the center keeps by choice; "" if it has none.
      parent: address of the center that this one is a worker of; "" if none.
      memory: bytes that the center and all messages may take together; None for any
        number.
      calls: a second, that one caller may make beside its exchanges; None for any
        number.

    Attributes:
      transfers: packets that are on their way.
      workers: that there may be.
    """

    def __init__(
        self,
        core: Core,
        door: Door,
        dtype: str = "",
        parent: str = "",
        memory: int | None = None,
        calls: float | None = None,
    ) -> None:
        self.core = core
        self.door = door
        self.transfers = Transfers()
        self.workers = core.ledger.max_workers or _MANY
        self._limiter = Limiter(calls)
        self._ports = Limiter(None if calls is None else ACCEPTED)
        self._memory = memory
        self._pulls = Places(_MOST_PULLS, _MOST_OF_ONE)
        self._pulling = Places(_MOST_WAITING + self.workers, max(64, self.workers))
        self._initializations = Places(1, 1)
        self._probing = Places(_MOST_PROBING, _MOST_OF_ONE_PROBING)
        self._dtype = dtype
        self._parent = parent
        if core.is_initialized:
            _ = self._schema_bytes  # raises where nobody would read it
        # Once, and before anybody asks: calls that come together would each compute it,
        # and a busy machine might never end with that before they are tried again.
        self._rule = fingerprint(core.rule)
        self._started = time.monotonic()
        lease = core.ledger.lease
        self._heartbeat = min(max(lease / _SILENT_BEATS, 0.5), _LONGEST_BEAT)
        self._silence = max(lease, _SILENT_BEATS * self._heartbeat)
        self._idle = threading.Condition()
        self._busy = 0  # exchanges that are being applied and answered
        self._talking = 0  # and those whose message is still coming
        # Around a large message and the copy of its answer, which the next one's move
        # in place has to wait for. Nobody's socket is waited for within.
        self._turn = threading.Lock()
        # Of workers that are there, and of all that ever were.
        self._counts = threading.Lock()  # around what is added to them
        self._traffic: dict[str, _Traffic] = {}
        self._total = _Traffic()
        # Kinds of messages that there are programs for.
        self._compiled: set[bytes] = set()
        self.buffers = Buffers()
        self.stop: Callable[[], object] = nothing  # the whole service
        self.is_drained = False  # by an operator, for good
        # Whoever watches hears what happens: its kind, and more. Must not block.
        self.tell: Callable[..., object] = _unheard
        # What workers must know to connect without gRPC, but for the key.
        self.offers: list[pb.Offer] = []
        # Where it listens, for those who watch: gRPC, sockets, and the page.
        self.listens_at, self.direct_address, self.page_address = "", "", ""

    @property
    def stop_grace(self) -> float:
        """Seconds that the service takes to end, where nobody says how many."""
        return min(max(_GRACE, 2 * self.transfers.longest), LONGEST_GRACE)

    def wait_until_idle(self, timeout: float) -> bool:
        """Until no exchange is being applied or answered; False if one still is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._busy, timeout)

    @contextmanager
    def sending(
        self, cancel: Callable[[], None], parcel: Parcel
    ) -> Iterator[Callable[[], None]]:
        """Around a parcel's way to a worker; to be called whenever some of it went.

        Args:
          cancel: ends the connection to that worker, from any thread.
          parcel: to be sent.
        """
        is_answer = parcel.control.snapshot.sequence > 0
        with self.transfers.under_way(
            cancel, parcel.nbytes, _STALLED, counts=is_answer
        ) as transfer:
            yield transfer.went

    def admit(self, caller: Caller, call: str, tokens: float = 1.0) -> None:
        """Take a call's tokens of its caller, and return when it is its turn.

        As many calls as all workers make when they start are free, for a caller may be
        all of them. Calls that look, write a snapshot or end something have buckets of
        their own: whatever else its caller has done, they are still due.

        Raises:
          CenterBusyError: that is not soon. It may try again.
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
                f"too many calls: a caller may make {self._limiter.rate:g} a second "
                f"beside its exchanges, after {size:.0f} at once, and one that moves "
                "many bytes counts as many; try again"
            )

    def admit_host(self, host: str) -> None:
        """The same, of a host that looks and of whom nothing else is known yet."""
        self._admit(("watch", host), SPARE)

    def admit_probe(self, host: str) -> None:
        """The same, of a host that asks whether this center serves."""
        self._admit(("probe", host), SPARE)

    def pace(self, port: Hashable) -> None:
        """Wait until a port may accept one more connection, whoever comes."""
        self._ports.take(port, self._most_newcomers, patience=math.inf)

    def lets_in(self, host: Hashable) -> bool:
        """Return whether one more connection of a host may say whose it is.

        It takes a token, which `came_in` gives back.
        """
        return self._limiter.take(("host", host), self._most_newcomers, patience=0.0)

    def came_in(self, host: Hashable) -> None:
        """Note that a connection of a host has said whose it is."""
        self._limiter.give_back(("host", host))

    @property
    def _most_newcomers(self) -> float:
        return max(NEWCOMERS, 2.0 * self.workers)

    def refusal(
        self, error: errors.NotAllowedError, host: str
    ) -> errors.NotAllowedError:
        """Return the error to raise for an unknown caller, whose call counts."""
        self._admit(("refused", host), SPARE)
        self.tell("refused", "", error, host)
        return error

    def known(self, authorization: str, certificate: bytes, host: str) -> Caller:
        """Who calls, by what came with the call.

        Args:
          authorization: ``Bearer`` and a token; "" without.
          certificate: of the connection (DER); b"" without.
          host: whence it came.

        Raises:
          NotAllowedError: nobody who may.
        """
        if self.door.access is None:
            return self.door.caller(host=host)
        kind, _, token = authorization.partition(" ")
        if authorization and kind.lower() != "bearer":
            error = errors.NotAllowedError("authorization must be `Bearer` and a token")
            raise self.refusal(error, host)
        try:
            return self.door.caller(token.strip().encode(), certificate, host)
        except errors.NotAllowedError as error:
            raise self.refusal(error, host) from None

    def introduced(
        self, cut: Callable[[], None], *, hurry: bool = False
    ) -> AbstractContextManager[object]:
        """Bound the seconds in which somebody says who it is, or hears why not."""
        return self.transfers.under_way(cut, 0, _HURRY if hurry else _UNKNOWN)

    @contextmanager
    def hearing(self, cut: Callable[[], None], caller: Hashable) -> Iterator[None]:
        """Bound the seconds in which the first message of a call comes.

        A caller of too many silent calls has less time, but is not refused: the next
        call may be a worker's.
        """
        silent = ("silent", caller)
        in_time = self._limiter.take(silent, self._most_newcomers, patience=0.0)
        with self.introduced(cut, hurry=not in_time):
            yield
        if in_time:
            self._limiter.give_back(silent)

    def describe(self, request: pb.DescribeRequest, caller: Caller) -> pb.Described:
        """What this center is."""
        caller.check("Describe")
        _check_protocol(request.protocol)
        schema = self.schema()
        said = pb.Description(
            protocol=PROTOCOL,
            release=__version__,
            center=self.core.life,
            rule=self._rule,
            schema_hash=b"" if schema is None else schema.hash,
            clock=time.time(),
            lease=self.core.ledger.lease,
            heartbeat=self._heartbeat,
            waiting_interval=WAITING_INTERVAL + LONGEST,
            mode=repr(self.core.ledger.mode),
            dtype=self._dtype,
            barrier=self.core.ledger.barrier,
            offers=self._offers_to(caller),
            versions=installed(),
            grace=self.core.ledger.round_grace,
            stop_grace=self.stop_grace,
            takes_weights=True,
        )
        return pb.Described(
            description=said.SerializeToString(),
            schema=None if schema is None else self._schema_bytes,
        )

    def initialize(
        self, reader: Reader, context: Any, caller: Caller
    ) -> pb.Initialized:
        """The chief's parameters."""
        caller.check("Initialize")
        with self._receiving(reader, context.cancel, _STALLED_CHIEF):
            start = _of_our_protocol(self._next(reader, context).start)
            _check_name(start.worker, least=0)
            caller.check("Initialize", start.worker)
            if (version := self._initialized(start)) is not None:
                return pb.Initialized(version=version)
            # Which its client does, as long as it has time: the other may break off.
            busy = errors.CenterBusyError(
                "another worker initializes this center; try again"
            )
            with self._initializations.one(caller.key, busy, WAITING_INTERVAL):
                return self._initialize(start, reader, context, caller)

    def _initialized(self, start: pb.Start) -> int | None:
        """The version of a center that has parameters; None if it has none.

        Such a center reads no schema and no parameters: the hash is enough.

        Raises:
          AlreadyInitializedError: another chief has given them.
          TreeMismatchError: they are of another model.
        """
        own = self.schema()
        if own is None:
            return None
        version = self.core.initialize((), worker=start.worker)
        if start.schema_hash != own.hash:
            raise errors.TreeMismatchError(
                f"another model: the parameters of worker {start.worker!r} have other "
                "paths, dtypes or shapes than this center's"
            )
        return version

    def _next(self, reader: Reader, context: Any) -> pb.Frame:
        """Return the control part of a chief's packet, which comes within a while."""
        with self.transfers.under_way(context.cancel, 0, _STALLED_CHIEF):
            return _control(reader)

    def _initialize(
        self, start: pb.Start, reader: Reader, context: Any, caller: Caller
    ) -> pb.Initialized:
        if (version := self._initialized(start)) is not None:
            return pb.Initialized(version=version)
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
        if self._memory is not None and schema.size > self._memory:
            raise errors.CenterFullError(
                f"the parameters have {schema.size} bytes, and this center may use "
                f"{self._memory}: serve it with more memory="
            )
        if not self._next(reader, context).HasField("parameters"):
            raise errors.ProtocolError("parameters were expected, got another packet")
        buffer = reader.buffer(schema, "the parameters")
        params = _trees.build(schema, schema.views(buffer))
        return pb.Initialized(version=self.core.initialize(params, worker=start.worker))

    def pull(self, request: pb.PullRequest, caller: Caller) -> Iterator[Parcel]:
        """One version of the center."""
        caller.check("Pull")
        many = errors.CenterBusyError("too many pulls wait already; try again")
        with self._pulling.one(caller.key, many):
            yield from self._pull(request, caller)

    def _pull(self, request: pb.PullRequest, caller: Caller) -> Iterator[Parcel]:
        end = time.monotonic() + min(request.wait, _LONGEST_WAIT)
        while self.schema() is None and (left := end - time.monotonic()) > 0:
            self.core.wait_until_initialized(min(left, WAITING_INTERVAL))
            yield _WAITING
        self.admit(caller, "Pull", self._size / MOVED)
        while not self._pulls.take(caller.key, WAITING_INTERVAL):
            yield _WAITING
        try:
            with self.core.reading(kept=True) as version:
                public = request.public
                # Held until it is sent: its arrays are views of it.
                yield self._parcel(
                    version, self._travels.center, public=public, applied=True
                )
        finally:
            self._pulls.give_back(caller.key)

    def exchange(
        self, reader: Reader, context: Any, caller: Caller, transport: str
    ) -> Iterator[Parcel]:
        """The life of a worker, or a part of it between two connections.

        Args:
          reader: of what the worker says, over gRPC or a direct connection.
          context: knows whether the worker is there: ``is_active()``, and
            ``add_callback(gone)``, which returns whether it will be called; and
            ``cancel()`` ends the connection.
          caller: the worker, which says no other name than its own.
          transport: by which it talks.
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
                _check_name(join.incarnation)
                caller.check("Exchange", join.worker)
            except (errors.AgnOptaxError, OSError, EOFError) as error:
                if isinstance(error, errors.AgnOptaxError):
                    self.tell("refused", "", error, caller.host)
                self.admit(caller, "Exchange", JOIN)
                raise
            if self.core.knows(join.worker, join.incarnation):
                self._admit(("back", join.worker), SPARE, JOIN)
            else:
                self.admit(caller, "Exchange", JOIN)
            try:
                yield from self._live(join, reader, context, caller, transport)
            except errors.AgnOptaxError as error:
                self.tell("refused", join.worker, error, caller.host)
                raise

    def _probed(
        self, control: pb.Frame | None, reader: Reader, caller: Caller
    ) -> Iterator[Parcel]:
        """Bytes each way, for whoever measures how fast they are.

        They are paid for afterwards: nobody measures how long he waits for his turn.
        """
        caller.check("Probe")
        busy = errors.CenterBusyError("others measure already; try again")
        with self._probing.one(caller.key, busy, _STALLED / 2):
            while control is not None:
                if not control.HasField("probe"):
                    raise errors.ProtocolError("a probe was expected")
                probe = control.probe
                if max(probe.size, probe.answer) > MOST_PROBED:
                    raise errors.ProtocolError(
                        f"a probe has at most {MOST_PROBED} bytes each way, got "
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
        if join.center not in ("", self.core.life):
            raise errors.WorkerStateError(
                f"this center is not the one that worker {join.worker!r} joined: it "
                "was started anew, or from a snapshot, and has not all that was "
                "exchanged. Adopt what it has with start()"
            )
        if not context.is_active():
            return  # and may be back in another call already
        session = self.core.join(
            join.worker,
            join.incarnation,
            back=bool(join.center),
            silence=self._silence,
            cut=context.cancel,
            room=self._room(),
        )
        traffic = self._traffic_of(join.worker)
        traffic.transport = transport
        traffic.serves_at = _seen_from_here(join.serves_at, caller)
        is_back = bool(join.center)
        self.tell("joined", join.worker, join.incarnation, is_back, transport)
        # gRPC's own thread calls it, on which nothing may be applied.
        gone = functools.partial(
            in_background, session.disconnect, "agn-optax gone", unread=True
        )
        if not context.add_callback(gone):
            session.disconnect()
            return
        while not self.core.wait_for_barrier(WAITING_INTERVAL):
            yield _WAITING
        before, settled = session.before or ("", 0)
        joined = pb.Joined(center=self.core.life, before=before, settled=settled)
        yield Parcel(pb.Frame(joined=joined))
        while (control := reader.control()) is not None:
            caller = self._again(caller, join.worker)
            if control.HasField("acknowledge"):
                session.acknowledge(control.acknowledge)
                if not self._talking:  # else the others let go, by what they run
                    let_go()
                continue
            if not control.HasField("message"):
                raise errors.ProtocolError("a message was expected, got another packet")
            yield from self._exchange(session, control.message, reader)

    def alive(self, request: pb.AliveRequest, caller: Caller) -> pb.AliveReply:
        """Signs of life of workers that have nothing else to say."""
        lives = [(life.worker, life.incarnation) for life in request.lives]
        there: list[str] = []
        try:
            caller.check("Alive")
            if len(lives) > self.workers:
                raise errors.ProtocolError(
                    f"this center has {self.workers} workers at most, got signs of "
                    f"life of {len(lives)}"
                )
            for worker, _ in lives:
                caller.check("Alive", worker)
            there = self.core.hear(lives)
        finally:
            # Apart from other calls: nobody's others make a worker look dead.
            if there:
                self._admit(("alive", there[0]), SPARE)
            else:
                self.admit(caller, "Alive")
        return pb.AliveReply()

    def leave(self, request: pb.LeaveRequest, caller: Caller) -> pb.LeaveReply:
        """A worker goes for good."""
        caller.check("Leave", request.worker)
        self.tell("left", request.worker, request.incarnation)  # or it would seem lost
        self.core.leave(request.worker, request.incarnation)
        return pb.LeaveReply()

    def status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusReply:
        """Who is there."""
        caller.check("Status")
        version, members, waiting = self.core.members()
        now = time.monotonic()
        traffic = {n: dataclasses.asdict(t) for n, t in list(self._traffic.items())}
        is_there = self.core.is_initialized
        room = self.core.room
        return pb.StatusReply(
            version=version,
            rule=self.core.rule.name,
            mode=repr(self.core.ledger.mode),
            uptime=now - self._started,
            parameters=self._sizes[0] if is_there else 0,
            parameter_bytes=self._sizes[1] if is_there else 0,
            bytes_received=self._total.bytes_received,
            bytes_sent=self._total.bytes_sent,
            parent=self._parent,
            listens_at=self.listens_at,
            direct_address=self.direct_address,
            page_address=self.page_address,
            refused=dict(self.core.ledger.refusals.counts),
            degraded=self.core.degraded,
            disk_free=None if room is None else room.free,
            disk_needed=None if room is None else room.needed,
            center=self.core.life,
            workers=[
                pb.WorkerStatus(
                    name=name,
                    connected=member.connected,
                    exchanges=member.exchanges,
                    dropped=member.dropped,
                    staleness=member.staleness,
                    joined=now - member.joined,
                    seen=now - member.seen,
                    waits=name in waiting,
                    refused=member.refused,
                    **_lately(member, now, waits=name in waiting),
                    **traffic.get(name, {}),
                )
                for name, member in sorted(members.items())
            ],
        )

    def save(self, request: pb.SaveRequest, caller: Caller) -> pb.SaveReply:
        """Writes a snapshot, which may take a while."""
        caller.check("Save")
        self.admit(caller, "Save", self._size / SAVED)
        return pb.SaveReply(version=self.core.write_snapshot())

    def drain(self, request: pb.DrainRequest, caller: Caller) -> pb.DrainReply:
        """Ends the service, which may take a while."""
        caller.check("Drain")
        self.is_drained = True
        _log.warning("draining, as %s has asked for", caller.said)
        in_background(self.stop, "agn-optax drain", lasting=True)
        return pb.DrainReply()

    def _traffic_of(self, worker: str) -> _Traffic:
        """Return the traffic of a worker; forget those that left once they are many."""
        many = len(self._traffic) > 2 * self.workers
        there = self.core.members()[1] if many else {}
        with self._counts:
            if many:
                known = self._traffic.items()
                self._traffic = {name: its for name, its in known if name in there}
            return self._traffic.setdefault(worker, _Traffic())

    def _count(self, traffic: _Traffic, *, received: int = 0, sent: int = 0) -> None:
        """Add bytes to those of a worker, and to those of all."""
        with self._counts:
            for each in (traffic, self._total):
                each.bytes_received += received
                each.bytes_sent += sent

    def _offers_to(self, caller: Caller) -> list[pb.Offer]:
        """With the key by which a connection is known as this caller's."""
        key = self.door.ticket(caller)
        return [
            pb.Offer(transport=each.transport, address=each.address, key=key)
            for each in self.offers
        ]

    def _again(self, caller: Caller, worker: str) -> Caller:
        """A worker that is there already, by the tokens of now.

        Raises:
          CenterUnreachableError: it may not go on. It dials again, and either shows a
            new token then or hears why not.
        """
        try:
            now = self.door.again(caller)
            if now is not caller:
                now.check("Exchange", worker)
        except errors.NotAllowedError as error:
            raise errors.CenterUnreachableError(f"not any more: {error}") from None
        return now

    @functools.cached_property
    def _schema_bytes(self) -> bytes:
        return _trees.to_bytes(self._travels.center)

    @functools.cached_property
    def _sizes(self) -> tuple[int, int]:
        """How many numbers the center has, and their bytes."""
        leaves = self._travels.center.leaves
        numbers = sum(math.prod(leaf.shape) for leaf in leaves)
        return numbers, sum(leaf.nbytes for leaf in leaves)

    @property
    def _size(self) -> int:
        """Bytes of the center's parameters."""
        return self._travels.center.size if self.core.is_initialized else 0

    def schema(self) -> Schema | None:
        """Of the center, once it has parameters."""
        return self._travels.center if self.core.is_initialized else None

    def _room(self) -> int | None:
        """Workers for whom there is memory; None if that is not bounded.

        The center is there, its optimizer's state, the version that is made next, and
        one for each pull; and of every worker a message, over which its answer is
        written. Where answers are differences, each version is two centers, and the
        last differences are less than one.
        """
        if self._memory is None or not self.core.is_initialized:
            return None
        versions = (2 + _MOST_PULLS) * self._travels.center.size
        if self._travels.differences is not None:  # and the public one of each
            versions = 2 * versions + self._travels.center.size
        taken = versions + self.core.store.state_bytes
        each = self._travels.message.size + _OVERHEAD
        return max(0, (self._memory - taken) // each)

    @contextmanager
    def _receiving(
        self,
        reader: Reader,
        cancel: Callable[[], None],
        patience: float | None = None,
    ) -> Iterator[None]:
        """Packets come, of which none may stop in the middle for longer than that."""
        patience = _STALLED if patience is None else patience

        @contextmanager
        def pace(size: int) -> Iterator[None]:
            with self.transfers.under_way(cancel, size, patience) as transfer:
                reader.heard = transfer.went
                yield

        reader.pace = pace
        try:
            yield
        finally:  # it knows the reader: in a circle, its memory would outlive it
            reader.pace, reader.heard = nullcontext, nothing

    @functools.cached_property
    def _travels(self) -> _trees.Travelling:
        """In which form center and messages travel.

        Raises:
          NotInitializedError: the center has no parameters.
        """
        return _trees.travelling(self.core.rule, self.core.store.like)

    @functools.cached_property
    def _packed(self) -> bool:
        """Whether the center's arrays are the wire's buffer."""
        store = self.core.store
        return store.packing is not None and _trees.in_order(store.like)

    def _schema_of(self, message: pb.Message) -> Schema:
        """Of the contribution that a message announces."""
        if message.dtype and not _trees.is_representable(message.dtype):
            raise errors.InvalidArgumentError(
                f"a message in {message.dtype} needs JAX_ENABLE_X64=1 in this center's "
                "environment"
            )
        schema = self._travels.message.cast(message.dtype)
        if message.schema_hash != schema.hash:
            raise errors.TreeMismatchError(
                "the message is of another tree than the center's; the worker must "
                "describe the center again"
            )
        return schema

    def _exchange(
        self, session: LocalSession, message: pb.Message, reader: Reader
    ) -> Iterator[Parcel]:
        traffic = self._traffic_of(session.worker)
        with self._counting("_talking"), ExitStack() as busy:
            answer = yield from self._settled(session, message, reader, busy, traffic)
            norm = None if answer.norm is None else float(answer.norm)
            traffic.norm = traffic.norm if norm is None else norm
            self.tell(
                "exchange",
                session.worker,
                session.incarnation,
                answer.sequence,
                message.steps,
                answer.staleness,
                answer.applied,
                answer.refused,
            )
            with self.core.reading(answer.version) as version:
                said = {
                    "staleness": answer.staleness,
                    "norm": norm,
                    "applied": answer.applied,
                    "refused": answer.refused,
                    "sequence": answer.sequence,
                    "pace": answer.pace,
                }
                parcel = self._followed(version, message, said) or self._parcel(
                    version, self._travels.answer, public=True, **said
                )
                if answer.recorded:
                    # A part of an answer is none: the rest may travel while the disk is
                    # busy.
                    parcel.until = functools.partial(session.wait_until_kept, answer)
                self._count(traffic, sent=parcel.nbytes)
                yield parcel

    def _settled(
        self,
        session: LocalSession,
        message: pb.Message,
        reader: Reader,
        busy: ExitStack,
        traffic: _Traffic,
    ) -> Generator[Parcel, None, Answer]:
        """The answer to a message, whose memory is let go of when this returns."""
        schema = self._schema_of(message)
        buffer = reader.buffer(schema, "a message")
        busy.enter_context(self._counting("_busy"))
        self._count(traffic, received=schema.size)
        traffic.period = message.steps
        traffic.reported = _reported(message)  # a message has all of them
        submit = functools.partial(
            session.submit,
            message.sequence,
            self._contribution(schema, buffer),
            anchor_version=message.anchor_version,
            steps=message.steps,
            weight=message.weight if message.HasField("weight") else None,
        )
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
                answer = session.answer(message.sequence, timeout=0.0)
                if answer is not None and self._talking > 1:
                    return self._moved_out(session, answer, schema, buffer)
            finally:
                self._turn.release()
        else:
            submit()
        while (answer := session.answer(message.sequence, WAITING_INTERVAL)) is None:
            yield _WAITING
        return answer

    @contextmanager
    def _counting(self, what: str) -> Iterator[None]:
        """One more ``what``, meanwhile."""
        with self._idle:
            setattr(self, what, getattr(self, what) + 1)
        try:
            yield
        finally:
            with self._idle:
                setattr(self, what, getattr(self, what) - 1)
                self._idle.notify_all()

    def _contribution(self, schema: Schema, buffer: np.ndarray) -> PyTree:
        """What came in a buffer, as the center takes it."""
        if self._packed:
            return Packed(*schema.packed.views(buffer))
        like = self.core.store.contribution_like
        return _trees.build(schema, schema.views(buffer), like)

    def _moved_out(
        self, session: LocalSession, answer: Answer, schema: Schema, buffer: np.ndarray
    ) -> Answer:
        """An answer that lies where its message came, if it has room there.

        While the version itself were being sent, others could not move the center in
        place. The copy takes less time than the fresh memory that a next version needs.
        """
        if schema.hash != self._travels.center.hash or answer.recorded:
            return answer  # of what is recorded, the journal may still read the message
        with self.core.reading(answer.version) as version, self.core.reading() as now:
            # Until then the message is still being read: all versions since are made of
            # it, and the answer is not where the rule adopts the one before.
            jax.block_until_ready(
                (version.params, now.params, answer.norm, answer.read)
            )
            sent = schema.packed
            _buffers.write(sent, _trees.host_arrays(version.params, sent), buffer)
        return session.replace(answer, Packed(*sent.views(buffer)))

    def _followed(
        self, version: Version, message: pb.Message, said: dict[str, Any]
    ) -> Parcel | None:
        """An answer as differences from what its worker has; None if it is whole."""
        travels = self._travels
        if travels.differences is None or not message.has_anchor:
            return None
        made = self.core.differences(message.anchor_version, version)
        if made is None:
            return None
        schema = travels.differences(len(made))
        if schema.size >= travels.answer.size:
            return None
        snapshot = pb.Snapshot(
            version=version.number,
            schema_hash=schema.hash,
            differences=len(made),
            **said,
        )
        arrays = _trees.host_arrays(made, schema)
        return Parcel(pb.Frame(snapshot=snapshot), schema, arrays)

    def _parcel(
        self, version: Version, schema: Schema, *, public: bool, **said: Any
    ) -> Parcel:
        """A version as it is sent: views of it where that is possible."""
        snapshot = pb.Snapshot(version=version.number, schema_hash=schema.hash, **said)
        store = self.core.store
        read = store.public if public else store.tree
        params = version.params if self._packed else read(version)
        sent = schema.packed if self._packed else schema
        arrays = _trees.host_arrays(params, sent)
        return Parcel(pb.Frame(snapshot=snapshot), sent, arrays)


def _lately(member: Member, now: float, *, waits: bool) -> dict[str, Any]:
    """Return a worker's rates, and whether it has stalled, as its status says it."""
    rates = member.recent.rates(now) or (None, None)
    is_awaited = member.connected and not waits
    return {
        "exchanges_per_second": rates[0],
        "steps_per_second": rates[1],
        "stalled": member.recent.overdue(now) if is_awaited else None,
    }


def _unheard(*said: object) -> None:
    """Where nobody watches."""


def _reported(message: pb.Message) -> dict[str, float]:
    """What a worker says of itself, as far as anybody will look at it."""
    said = sorted(message.reported.items())[:MOST_REPORTED]
    return {name[:MOST_REPORTED]: value for name, value in said}


def _check_name(name: str, least: int = 1) -> None:
    """Of a worker, or of one of its lives."""
    if not least <= len(name.encode()) <= _MOST_NAME:
        raise errors.ProtocolError(
            f"the names of a worker and of its incarnation have {least} to "
            f"{_MOST_NAME} bytes, got {len(name.encode())}: {name[:40]!r}"
        )


def _control(reader: Reader) -> pb.Frame:
    """Of a packet that must come."""
    control = reader.control()
    if control is None:
        raise errors.ProtocolError("a call ended where a packet was expected")
    return control


def _of_our_protocol(said: T) -> T:
    """What the first packet of a call says."""
    _check_protocol(said.protocol)
    return said


def _seen_from_here(serves_at: str, caller: Caller) -> str:
    """Where a worker is itself a center, for those who ask this center.

    One that listens at all of its addresses is reached at the one that it calls from.
    """
    try:
        is_any = serves_at and is_everywhere(check_address(serves_at))
    except errors.AgnOptaxError:  # whatever it is, nobody is sent there
        return ""
    if not is_any:
        return serves_at
    host = host_of(caller.host)
    return f"{host}:{serves_at.rpartition(':')[2]}" if host else serves_at


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise errors.ProtocolError(
            f"this center speaks version {PROTOCOL} of the protocol, got {protocol}; "
            "run the same release of agn_optax on both sides"
        )
