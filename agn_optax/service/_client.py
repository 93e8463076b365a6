"""The worker's end of the wire: a `Center` that is somewhere else."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import math
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center import ShardedCenter, Snapshot
from agn_optax.rules import Rule, check_rule
from agn_optax.service import _address, _fingerprint
from agn_optax.service import center_pb2 as pb
from agn_optax.service._connection import SOON, Connection
from agn_optax.service._observer import as_dict
from agn_optax.service.transports import _memory
from agn_optax.service.transports._links import GrpcLink, Link, open_direct
from agn_optax.service.wire import _schema, _trees
from agn_optax.service.wire._frames import Parcel

PyTree = Any
# Bytes of an exchange whose answer the center had better not keep until the next one.
_LEAST_ACKNOWLEDGED = 64 << 10
TRANSPORTS = ("auto", "memory", "socket", "grpc")
_log = logging.getLogger("agn_optax")


def connect(
    address: str | Sequence[str],
    rule: Rule,
    *,
    timeout: float = 30.0,
    wire_dtype: Any = None,
    like: PyTree = None,
    credentials: grpc.ChannelCredentials | None = None,
    insecure: bool = False,
    transport: str = "auto",
) -> RemoteCenter | ShardedCenter:
    """The center at an address, to be used as a `LocalCenter` is.

    Args:
      address: ``"host:port"`` or ``"unix:path"``, as ``Server.address`` has it. Several
        of them, in a list or separated by commas, are a center in shards: leaves are
        assigned to the servers by their sizes, and large ones are cut.
      rule: the rule that the center runs.
      timeout: seconds without a sign of life after which a call gives up. An exchange
        that finds nobody says so after two seconds; its worker then goes on without.
      wire_dtype: floating dtype in which messages and centers travel, such as
        ``"bfloat16"``; None for that of the center, which stays as it is either way.
      like: a tree with the containers in which `pull` is to return the parameters, for
        models whose containers are not dicts, lists and tuples. A worker that gives its
        parameters to `start` need not say so.
      credentials: of TLS; None for plain text, which must stay on this machine.
      insecure: allows plain text beyond this machine.
      transport: how exchanges travel. ``"auto"`` takes the fastest that works: memory
        shared with a center on this machine, a socket of their own beside gRPC, or gRPC
        itself, which is the only one with ``credentials``. ``"memory"``, ``"socket"``
        and ``"grpc"`` insist.

    Returns:
      The center.

    Raises:
      CenterUnreachableError: nobody answers in time.
      RuleMismatchError: the center runs another rule; names what differs.
      ProtocolError: what answers is no center, or one of another release.
      InvalidArgumentError: the address is none, or a setting is out of range.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax, agn_optax.service
      >>> rule = agn_optax.rules.agn(optax.sgd(0.1))
      >>> server = agn_optax.service.serve(rule, {"w": jnp.zeros(3)})
      >>> center = agn_optax.service.connect(server.address, rule)
      >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=2)
      >>> params, state = worker.start()
      >>> for _ in range(4):
      ...     updates, state = worker.tx.update({"w": jnp.ones(3)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     params, state = worker.exchange(params, state)
      >>> center.pull().version
      2
      >>> center.close(); server.stop()
    """
    check_rule(rule)
    if isinstance(address, str):
        address = [part.strip() for part in address.split(",")]
    if not isinstance(address, Iterable):
        address = [address]
    addresses = [_address.check(each) for each in address]
    if not addresses or len(set(addresses)) != len(addresses):
        raise errors.InvalidArgumentError(
            f"one address or several different ones expected, got {addresses}"
        )
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise errors.InvalidArgumentError(
            f"timeout must be a positive number of seconds, got {timeout!r}"
        )
    for each in addresses:
        _address.check_plaintext(each, credentials, insecure)
    if transport not in TRANSPORTS:
        raise errors.InvalidArgumentError(
            f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}"
        )
    if credentials is not None and transport not in ("auto", "grpc"):
        raise errors.InvalidArgumentError(
            f"transport {transport!r} is plain text, and cannot go with credentials"
        )
    settings: dict[str, Any] = {
        "timeout": timeout,
        "wire_dtype": _wire_dtype(wire_dtype),
        "credentials": credentials,
        "transport": "grpc" if credentials is not None else transport,
    }
    if len(addresses) == 1:
        return RemoteCenter(addresses[0], rule, like=like, **settings)
    made: list[RemoteCenter] = []
    try:
        for each in addresses:
            made.append(RemoteCenter(each, rule, **settings))
    except BaseException:
        for center in made:
            center.close()
        raise
    return ShardedCenter(made, like=like)


def _wire_dtype(dtype: Any) -> str:
    if dtype is None:
        return ""
    name = jnp.dtype(check.float_dtype(dtype, "wire_dtype")).name
    _schema.Schema([]).cast(name)
    return str(name)


@dataclasses.dataclass
class _Session:
    """A worker's life at the center, over as many calls as its connection needs."""

    worker: str
    incarnation: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    sequence: int = 0  # of the last exchange whose answer is here
    center: str = ""  # the life of the center that this worker has joined
    link: Link | None = None
    like: PyTree = None  # the worker's containers
    left: bool = False


class RemoteCenter:
    """A center on the other side of a gRPC connection; made by `connect`.

    Its methods may be called from any thread, each worker's from one at a time. A call
    that finds nobody is tried again, at growing intervals, until ``timeout`` seconds
    have passed without a sign of life; what had been applied is not applied again.

    Attributes:
      rule: the rule.
      address: where the center is.
    """

    def __init__(
        self,
        address: str,
        rule: Rule,
        *,
        timeout: float,
        wire_dtype: str,
        like: PyTree = None,
        credentials: grpc.ChannelCredentials | None = None,
        transport: str = "auto",
    ) -> None:
        self.rule = rule
        self.address = address
        self._connection = Connection(address, timeout, credentials)
        self._retry = self._connection.retry
        self._wire_dtype = wire_dtype
        self._like = like
        self._sessions: dict[str, _Session] = {}
        self._schema: _schema.Schema | None = None
        self._dtype = ""
        self._transport = transport
        self._direct: pb.Direct | None = None
        # Ways that did not work while gRPC did: they are not tried again.
        self._closed_ways: set[bool] = set()
        self._buffers, self._wide_buffers = _memory.Buffers(), _memory.Buffers()
        # The kind of contribution that was found to belong here, and its wire dtype.
        self._known: dict[Any, str] = {}
        try:
            self._describe()
        except BaseException:
            self.close()
            raise
        _open_centers.add(self)

    @property
    def unreachable_since(self) -> float | None:
        """Seconds since the epoch; None while the center answers."""
        return self._connection.unreachable_since

    # The protocol `Center`.

    def join(
        self, worker: str, params: PyTree = None, *, timeout: float | None = None
    ) -> None:
        """A worker is there: see `Center.join`."""
        if params is not None:
            self._check_model(params, worker)
            self._like = jax.tree.map(lambda _: 0, params)
        old = self._sessions.pop(worker, None)
        if old is not None:  # which this process has given up
            self._leave(old)
        session = _Session(worker, like=self._like)
        self._sessions[worker] = session
        try:
            self._join(session, timeout)
        except BaseException:
            self.leave(worker)
            raise

    def leave(self, worker: str) -> None:
        """A worker goes: see `Center.leave`."""
        session = self._sessions.pop(worker, None)
        if session is not None:
            self._leave(session)

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives the center its first parameters: see `Center.initialize`."""
        check.float_leaves(params, "params")
        if self._schema is not None:
            self._check_model(params, worker)
        self._like = jax.tree.map(lambda _: 0, params)
        schema, arrays = _trees.schema_of(params), _trees.host_arrays(params)
        self._retry(lambda: self._initialize(schema, arrays, worker))
        return self.pull()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once it is initialized: see `Center.wait`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, min(end - time.monotonic(), 10.0))
            try:
                return self._pull(left)
            except errors.NotInitializedError:
                _log.warning("no chief has started at the center at %s", self.address)
                if time.monotonic() >= end:
                    raise errors.NotInitializedError(
                        f"no chief has initialized the center at {self.address} within "
                        f"{timeout} s; start one worker with start(params, chief=True)"
                    ) from None

    def pull(self) -> Snapshot:
        """The center as it is, at any time: see `Center.pull`."""
        return self._pull(0.0)

    def exchange(
        self,
        contribution: PyTree,
        *,
        anchor_version: Any,
        worker: str,
        steps: int = 0,
    ) -> Snapshot:
        """Sends what a worker contributes: see `Center.exchange`."""
        if self._schema is None:
            self._describe()
        if self._schema is None:
            raise _not_initialized(self.address)
        if worker not in self._sessions:
            self.join(worker)
        session = self._sessions[worker]
        schema = self._schema.cast(dtype := self._checked(contribution, worker))
        arrays = _trees.host_arrays(contribution, schema)
        is_int = isinstance(anchor_version, int | np.integer) and anchor_version >= 0
        if not is_int:
            raise errors.InvalidArgumentError(
                "anchor_version must be a version that the center has had, "
                f"got {anchor_version!r}"
            )
        message = pb.Message(
            sequence=session.sequence + 1,
            anchor_version=int(anchor_version),
            schema_hash=schema.hash,
            wire_dtype=dtype,
            steps=steps,
        )
        snapshot, arrays = self._retry(
            lambda: self._exchange(session, message, schema, arrays), within=SOON
        )
        session.sequence += 1
        return Snapshot(
            self._tree(_trees.to_device(self._widened(arrays)), session.like),
            snapshot.version,
            snapshot.staleness,
            np.float32(snapshot.norm) if snapshot.HasField("norm") else None,
            snapshot.applied,
        )

    # Beyond it.

    def status(self) -> dict[str, Any]:
        """Who is there: what ``agn-optax status --json`` prints."""
        request = pb.StatusRequest()
        ask = functools.partial(self._connection.unary, "Status", request)
        return as_dict(self._retry(ask))

    def describe(self) -> pb.Description:
        """What the center says of itself, fresh."""
        return self._describe()

    def close(self) -> None:
        """Leaves with all workers of this connection, and closes it."""
        if self._connection.closed:
            return
        _open_centers.discard(self)
        end = time.monotonic() + 2.0
        try:
            while self._sessions:
                _, session = self._sessions.popitem()
                self._leave(session, max(0.1, min(1.0, end - time.monotonic())))
        finally:
            self._connection.close()
            for session in list(self._sessions.values()):  # who have joined meanwhile
                if session.link is not None:
                    session.link.cancel()

    def __enter__(self) -> RemoteCenter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pull(self, wait: float) -> Snapshot:
        snapshot, arrays = self._retry(lambda: self._pull_once(wait))
        # No program is compiled for what happens once.
        leaves = jax.device_put(self._widened(arrays))
        return Snapshot(self._tree(leaves, self._like), snapshot.version)

    def _widened(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """What travelled narrow, as wide as the center again, its values rounded."""
        schema = self._schema
        assert schema is not None
        if not self._wire_dtype or jax.default_backend() != "cpu":  # `_tree` does it
            return arrays
        buffer = self._wide_buffers.take(schema.size)
        _memory.write(schema, arrays, buffer)
        return schema.views(buffer)

    def _tree(self, leaves: list[jax.Array], like: PyTree) -> PyTree:
        """What came, in the containers of ``like``."""
        schema = self._schema
        assert schema is not None
        for dtype in schema.cast(self._wire_dtype).dtypes:
            if jax.dtypes.canonicalize_dtype(dtype).name != dtype:
                raise errors.TreeMismatchError(
                    f"the center at {self.address} sends {dtype}, which needs "
                    "jax.config.update('jax_enable_x64', True) here"
                )
        tree = _trees.build(schema, leaves, like)
        # On the device, where that is an accelerator: fewer bytes go there.
        return _trees.cast(tree, schema) if self._wire_dtype else tree

    def _checked(self, contribution: PyTree, worker: str) -> str:
        """The dtype in which a contribution travels, which belongs to this center."""
        leaves, treedef = jax.tree.flatten(contribution)
        kind = (treedef, *map(_abstract, leaves))
        if (known := self._known.get(kind)) is None:
            self._check_model(contribution, worker, "contribution", any_float=True)
            # Narrower than the center without a loss, where the contribution is.
            own = {jnp.result_type(leaf).name for leaf in leaves}
            narrow = own.pop() if len(own) == 1 else ""
            if narrow not in ("bfloat16", "float16"):
                narrow = ""
            known = self._wire_dtype or narrow
            self._known = {kind: known}
        return known

    def _check_model(
        self,
        tree: PyTree,
        worker: str,
        what: str = "parameters",
        *,
        any_float: bool = False,
    ) -> None:
        check.float_leaves(tree, what)
        if self._schema is None:
            self._describe()
        if self._schema is None:
            return
        dtype = "float32" if any_float or self._dtype else ""
        difference = (
            _trees.schema_of(tree)
            .cast(dtype)
            .difference(
                self._schema.cast(dtype),
                f"worker {worker!r}",
                f"the center at {self.address}",
            )
        )
        if difference:
            raise errors.TreeMismatchError(
                f"{what} of another model: {difference}. (Of a center in shards, every "
                "worker must have all addresses, in one order)"
            )

    def _describe(self) -> pb.Description:
        said = self._retry(self._ask)
        self._learn(said)
        return said

    def _ask(self) -> pb.Description:
        request = pb.DescribeRequest(protocol=_address.PROTOCOL)
        return self._connection.unary("Describe", request)

    def _learn(self, said: pb.Description) -> None:
        """What a center says of itself, if it is one to be used."""
        if said.protocol != _address.PROTOCOL:
            raise errors.ProtocolError(
                f"the center at {self.address} speaks version {said.protocol} of the "
                f"protocol, and this release {_address.PROTOCOL}"
            )
        _fingerprint.compare(said.rule, self.rule, self.address)
        self._dtype = said.dtype
        self._direct = said.direct if said.HasField("direct") else None
        if said.HasField("schema"):
            schema = _trees.from_proto(said.schema)
            if self._schema is None or schema.hash != self._schema.hash:
                self._schema, self._known = schema, {}

    def _receive(self, link: Link) -> tuple[pb.Snapshot, list[np.ndarray]]:
        while True:
            said = link.control()
            if said.HasField("snapshot"):
                break
            if not said.HasField("waiting"):
                raise errors.ProtocolError("a snapshot was expected, got another frame")
        if self._schema is None:
            self._describe()
            assert self._schema is not None
        schema = self._schema.cast(self._wire_dtype)
        if said.snapshot.schema_hash != schema.hash:
            raise errors.TreeMismatchError(
                f"the center at {self.address} holds another tree than it did before"
            )
        buffer = link.buffer(schema, "an answer")
        return said.snapshot, schema.views(buffer)

    def _grpc_link(
        self, begin: Callable[[Any, Iterator[bytes]], Any], buffers: _memory.Buffers
    ) -> GrpcLink:
        """A call that ``begin(channel, frames)`` begins."""

        def begun(frames: Iterator[bytes]) -> Any:
            return self._connection.begin(lambda channel: begin(channel, frames))

        return GrpcLink(begun, self.address, buffers)

    def _pull_once(self, wait: float) -> tuple[pb.Snapshot, list[np.ndarray]]:
        request = pb.PullRequest(wire_dtype=self._wire_dtype, wait=wait)

        def begin(channel: Any, _: Any) -> Any:
            return channel.unary_stream(
                f"/{_address.SERVICE}/Pull",
                request_serializer=pb.PullRequest.SerializeToString,
            )(request)

        link = self._grpc_link(begin, _memory.Buffers(keeps=False))
        with self._connection.watching(link):
            return self._receive(link)

    def _initialize(
        self, schema: _schema.Schema, arrays: list[np.ndarray], worker: str
    ) -> None:
        def begin(channel: Any, frames: Iterator[bytes]) -> Any:
            return channel.stream_unary(
                f"/{_address.SERVICE}/Initialize",
                response_deserializer=pb.Initialized.FromString,
            ).future(frames)

        start = pb.Start(
            protocol=_address.PROTOCOL, worker=worker, schema=_trees.to_proto(schema)
        )
        link = self._grpc_link(begin, _memory.Buffers(keeps=False))
        with self._connection.watching(link):
            link.send(Parcel(pb.Frame(start=start), schema, arrays))
            link.no_more()
            link.result()
        self._describe()

    def _open(self, session: _Session, until: float = math.inf) -> None:
        """A call in which a worker lives; the old one, if any, has broken.

        Raises:
          TimeoutError: the center still had not enough workers ``until`` then.
        """
        if session.link is not None:
            session.link.cancel()
        self._connection.check_open()
        link, failed = self._link()
        session.link = link
        if session.left or self._connection.closed:  # meanwhile
            link.cancel()
            self._connection.check_open()
            raise _has_left(session.worker)
        waits = False
        join = pb.Join(
            protocol=_address.PROTOCOL,
            worker=session.worker,
            incarnation=session.incarnation,
            wire_dtype=self._wire_dtype,
        )
        with self._connection.watching(link, until):
            link.send(Parcel(pb.Frame(join=join)))
            while (said := link.control()).HasField("waiting"):
                if not waits:
                    waits = True
                    _log.warning(
                        "worker %r waits at the center at %s until there are as many "
                        "as its barrier wants",
                        session.worker,
                        self.address,
                    )
        if session.center not in ("", said.joined.center):
            link.cancel()
            raise errors.WorkerStateError(
                f"the center at {self.address} is not the one that worker "
                f"{session.worker!r} joined: it was started anew, or from a snapshot, "
                "and has not all that was exchanged. Adopt what it has with start()"
            )
        session.center = said.joined.center
        if isinstance(link, GrpcLink):  # which works where others did not
            self._closed_ways |= failed

    def _link(self) -> tuple[Link, set[bool]]:
        """The fastest way to the center that the transport allows, and those closed."""
        link, failed = self._direct_link()
        if link is None and failed:
            key = self._direct and self._direct.key
            self._learn(self._ask())
            if self._direct and self._direct.key != key:  # it was started anew
                self._closed_ways = set()
                link, failed = self._direct_link()
        if link is not None:
            return link, set()
        if self._transport in ("memory", "socket"):
            raise errors.CenterUnreachableError(
                f"no direct connection to the center at {self.address}: "
                f"{'; '.join(str(error) for error in failed.values())}"
            )
        if failed:
            _log.info("exchanges with %s travel over gRPC: %s", self.address, failed)
        name = f"/{_address.SERVICE}/Exchange"
        link = self._grpc_link(
            lambda channel, frames: channel.stream_stream(name)(frames), self._buffers
        )
        return link, set(failed)

    def _direct_link(self) -> tuple[Link | None, dict[bool, OSError]]:
        """A direct connection, if there is one, and what was wrong with the others."""
        ways = {"auto": [True, False], "memory": [True], "socket": [False], "grpc": []}
        failed: dict[bool, OSError] = {}
        for shares in ways[self._transport]:
            if shares in self._closed_ways:
                continue
            try:
                if self._direct is None:
                    raise OSError("the center takes no direct connections")
                direct, buffers = self._direct, self._buffers
                link = open_direct(direct, self.address, buffers, shares=shares)
            except OSError as error:
                failed[shares] = error
            else:
                return link, failed
        return None, failed

    def _join(self, session: _Session, timeout: float | None) -> None:
        within = math.inf if timeout is None else timeout
        until = time.monotonic() + within
        try:
            self._retry(lambda: self._open(session, until), within)
        except TimeoutError:
            barrier = self._describe().barrier
            raise errors.NotInitializedError(
                f"worker {session.worker!r} waited {timeout} s for {barrier} workers "
                "to start together"
            ) from None

    def _exchange(
        self,
        session: _Session,
        message: pb.Message,
        schema: _schema.Schema,
        arrays: list[np.ndarray],
    ) -> tuple[pb.Snapshot, list[np.ndarray]]:
        if session.link is None or session.link.done():
            self._open(session)
        link = session.link
        assert link is not None and self._schema is not None  # noqa: PT018
        parcel = Parcel(pb.Frame(message=message), schema, arrays)
        with self._living(session), self._connection.watching(link):
            link.expect(self._schema.cast(self._wire_dtype))
            link.send(parcel)
            answer = self._receive(link)
            if schema.size >= _LEAST_ACKNOWLEDGED:
                try:
                    link.send(Parcel(pb.Frame(acknowledge=message.sequence)))
                except link.ended:  # the next exchange has another link
                    link.cancel()
            return answer

    @contextlib.contextmanager
    def _living(self, session: _Session) -> Iterator[None]:
        """Around an exchange, which ends with its worker and not with the center."""
        try:
            yield
        except errors.CenterUnreachableError:
            if session.left:
                raise _has_left(session.worker) from None
            raise

    def _leave(self, session: _Session, timeout: float = 1.0) -> None:
        session.left = True
        request = pb.LeaveRequest(
            worker=session.worker, incarnation=session.incarnation
        )
        try:
            with contextlib.suppress(errors.AgnOptaxError):
                self._connection.unary("Leave", request, timeout)
        finally:
            if session.link is not None:
                session.link.cancel()


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):  # as most are; the other way takes ten times longer
        return leaf.aval
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _has_left(worker: str) -> errors.WorkerStateError:
    return errors.WorkerStateError(
        f"worker {worker!r} has left the center; start() joins again"
    )


def _not_initialized(address: str) -> errors.NotInitializedError:
    return errors.NotInitializedError(
        f"the center at {address} has no parameters yet: start one worker with "
        "start(params, chief=True)"
    )


_open_centers: weakref.WeakSet[RemoteCenter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At the end of the process, its workers leave."""
    for center in list(_open_centers):
        with contextlib.suppress(Exception):  # the others leave nevertheless
            center.close()
