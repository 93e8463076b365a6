"""The worker's end of the wire: a `Center` that is somewhere else."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import jax

from agn_optax import errors
from agn_optax._internal import check, keep_running
from agn_optax.center import ShardedCenter, Snapshot
from agn_optax.round import Fragments
from agn_optax.rules import Rule, check_rule
from agn_optax.service import _published, _tls, _token
from agn_optax.service import center_pb2 as pb
from agn_optax.service._connection import Connection
from agn_optax.service._remote import Remote
from agn_optax.service._session import RemoteSession
from agn_optax.service._tls import Tls
from agn_optax.service.transports import named

PyTree = Any
_log = logging.getLogger("agn_optax")
_TRANSPORTS, INSECURE = "AGN_OPTAX_TRANSPORTS", "AGN_OPTAX_INSECURE"
_COMES = 2.0  # seconds that a chief may take until whoever waits for it says so
_WAITS = 10.0  # and until it says so again


def connect(
    address: str | Sequence[str],
    rule: Rule,
    *,
    timeout: float = 30.0,
    like: PyTree = None,
    tls: Tls | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    insecure: bool = False,
    token: _token.Token = None,
    transports: Sequence[str] | None = None,
    fragments: Fragments | None = None,
) -> RemoteCenter | ShardedCenter:
    """The center at an address, to be used as a `LocalCenter` is.

    Args:
      address: ``"host:port"`` or ``"unix:path"``, as ``Server.address`` has it. Several
        of them, in a list or separated by commas, are a center in shards: leaves are
        assigned to the servers by their sizes, and large ones are cut. ``"file:PATH"``
        names a file with the address of a center that may come back elsewhere, as
        ``serve --address-file`` writes it; it is read again at every call.
      rule: the rule that the center runs.
      timeout: seconds without a sign of life after which a call gives up, more than the
        three that a center at which it waits may be silent. An exchange that finds
        nobody says so after two seconds; its worker then goes on without.
      like: a tree with the containers in which `pull` is to return the parameters, for
        models whose containers are not dicts, lists and tuples. A worker that gives its
        parameters to `start` need not say so.
      tls: who vouches for the center, and this worker's certificate and key if it wants
        them. None takes the files that ``AGN_OPTAX_TLS_CA``,
        ``AGN_OPTAX_TLS_CERTIFICATE`` and ``AGN_OPTAX_TLS_KEY`` name, or, without them,
        plain text, which must stay on this machine.
      credentials: of gRPC instead, where `Tls` cannot say it; they encrypt nothing but
        gRPC.
      insecure: allows plain text beyond this machine, as ``AGN_OPTAX_INSECURE=1`` does.
      token: by which the center knows this end, or the path of a file with it, which is
        read again when it changes. None takes what ``AGN_OPTAX_TOKEN`` says, or the
        file that ``AGN_OPTAX_TOKEN_FILE`` names, or, of a center on this machine that
        `agn-optax serve` has started for the same user, the one that it has made.
      transports: how exchanges may travel, the preferred way first; the first one that
        works is taken; None takes those that ``AGN_OPTAX_TRANSPORTS`` says, with
        commas between them, or all. ``"memory"`` is shared with a center of the same
        user on this machine, ``"socket"`` a connection of their own beside gRPC's,
        ``"grpc"`` works wherever anything does, and a list without it insists.
      fragments: what each of several servers keeps, for a center whose workers, or some
        of them, exchange by these fragments; all say the same. None divides by size.

    Returns:
      The center.

    Raises:
      CenterUnreachableError: nobody answers in time.
      EncryptionError: it answers, but TLS of the two ends does not go together.
      NotAllowedError: the center wants a token or a certificate, or another one.
      RuleMismatchError: the center runs another rule; names what differs.
      ProtocolError: what answers is no center, or one of another release.
      InvalidArgumentError: the address is none, or a setting is out of range, or there
        are not as many fragments as servers.

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
    if transports is None and (said := os.environ.get(_TRANSPORTS)):
        transports = said.split(",")
    if tls is None and credentials is None:
        tls = _tls.of_environment()
        insecure = insecure or os.environ.get(INSECURE) == "1"
    if isinstance(address, str):
        address = [part.strip() for part in address.split(",")]
    if not isinstance(address, Iterable):
        address = [address]
    addresses = [_published.check_reachable(each) for each in address]
    if not addresses or len(set(addresses)) != len(addresses):
        raise errors.InvalidArgumentError(
            f"one address or several different ones expected, got {addresses}"
        )
    check.seconds(timeout, "timeout", positive=True)
    ways = named(transports)
    is_whole = len(addresses) == 1
    with contextlib.ExitStack() as made:
        centers = []
        for each in addresses:
            connection = Connection(each, timeout, tls, credentials, insecure, token)
            made.callback(connection.close)
            remote = Remote(connection, rule, ways)
            centers.append(RemoteCenter(remote, like if is_whole else None))
        center: RemoteCenter | ShardedCenter = centers[0]
        if not is_whole:
            center = ShardedCenter(centers, like=like, fragments=fragments)
        elif fragments is not None and len(fragments) != 1:
            raise errors.InvalidArgumentError(
                f"{len(fragments)} fragments need as many servers, got one address"
            )
        made.pop_all()
    return center


class RemoteCenter(contextlib.AbstractContextManager["RemoteCenter"]):
    """A center on the other side of a gRPC connection; made by `connect`.

    Its methods may be called from any thread. A call that finds nobody is tried again,
    at growing intervals, until ``timeout`` seconds have passed without a sign of life;
    what had been applied is not applied again.

    Attributes:
      rule: the rule.
    """

    def __init__(self, remote: Remote, like: PyTree = None) -> None:
        self.rule = remote.rule
        self._like = like
        self._connection = remote.connection
        self._remote = remote
        self._sessions: dict[str, RemoteSession] = {}  # that have not left
        self._lock = threading.RLock()  # of them; a handler of a signal may close
        remote.describe()
        beats = functools.partial(_beat, weakref.ref(self), self._connection)
        keep_running(beats, "agn-optax heartbeat")
        _open_centers.add(self)

    @property
    def address(self) -> str:
        """Where the center is."""
        return self._connection.address

    @property
    def unreachable_since(self) -> float | None:
        """Seconds since the epoch; None while the center answers."""
        return self._connection.unreachable_since

    # The protocol `Center`.

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        life: Any = None,
    ) -> RemoteSession:
        """A worker is there: see `Center.join`."""
        if params is not None:
            self._remote.check_model(params, worker)
            self._like = jax.tree.map(lambda _: 0, params)
        if (old := self._sessions.get(worker)) is not None:
            old.leave()  # which this process has given up
        forget = functools.partial(_forget, weakref.ref(self))
        session = RemoteSession(self._remote, worker, self._like, life, left=forget)
        with self._lock:
            self._sessions[worker] = session
        try:
            session.join(timeout)
        except BaseException:
            session.leave()
            raise
        return session

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives the center its first parameters: see `Center.initialize`."""
        check.float_leaves(params, "params")
        if self._remote.travelling is not None:
            self._remote.check_model(params, worker)
        self._like = jax.tree.map(lambda _: 0, params)
        self._remote.initialize(params, worker)
        return self.pull(public=True)

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once it is initialized: see `Center.wait`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        patience = _COMES
        while True:
            left = max(0.0, min(end - time.monotonic(), patience))
            try:
                return self._pull(left, public=True)
            except errors.NotInitializedError:
                patience = _WAITS
                if time.monotonic() >= end:
                    raise errors.NotInitializedError(
                        f"no chief has initialized the center at {self.address} within "
                        f"{timeout} s; start one worker with start(params, chief=True)"
                    ) from None
                _log.warning(
                    "a worker waits: no chief has started at the center at %s; one of "
                    "its workers must call start(params, chief=True)",
                    self.address,
                )

    def pull(self, *, public: bool = False) -> Snapshot:
        """The center as it is, at any time: see `Center.pull`."""
        return self._pull(0.0, public=public)

    # Beyond it.

    def status(self) -> dict[str, Any]:
        """Who is there: what ``agn-optax status --json`` prints."""
        return self._connection.retry(self._connection.status)

    def describe(self) -> pb.Description:
        """What the center says of itself, fresh."""
        return self._remote.describe()

    def announce(self, address: str) -> None:
        """Workers that join from now on are themselves a center, at an address."""
        self._remote.serves_at = address

    def close(self) -> None:
        """Leaves with all workers of this connection, and closes it."""
        if self._connection.closed:
            return
        _open_centers.discard(self)
        end = time.monotonic() + 2.0
        try:
            for session in list(self._sessions.values()):
                session.leave(max(0.1, min(1.0, end - time.monotonic())))
        finally:
            self._connection.close()
            for session in list(self._sessions.values()):  # who have joined meanwhile
                session.disconnect()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        by = {name: each.transport for name, each in list(self._sessions.items())}
        workers = [f", {name!r} by {way}" for name, way in sorted(by.items()) if way]
        return f"RemoteCenter({self.rule.name}, at {self.address}{''.join(workers)})"

    def _pull(self, wait: float, *, public: bool) -> Snapshot:
        said, arrays = self._connection.retry(
            lambda: self._remote.pull(wait, public=public)
        )
        # No program is compiled for what happens once.
        leaves = jax.device_put(arrays)
        return Snapshot(self._remote.as_tree(leaves, self._like), said.version)

    def _give_signs_of_life(self) -> float:
        """Of the workers that are there; returns seconds between two of them."""
        interval = self._remote.description.heartbeat
        there = [each for each in list(self._sessions.values()) if not each.left]
        if there:
            lives = [pb.Life(worker=s.worker, incarnation=s.incarnation) for s in there]
            request = pb.AliveRequest(lives=lives)
            with contextlib.suppress(errors.AgnOptaxError):  # the next one may arrive
                self._connection.unary("Alive", request, pb.AliveReply, interval)
        return interval


def _forget(center: weakref.ref[RemoteCenter], session: RemoteSession) -> None:
    """Let go of a session that has left, and of the contribution that it holds."""
    if (known := center()) is not None:
        with known._lock:
            if known._sessions.get(session.worker) is session:
                del known._sessions[session.worker]


def _beat(center: weakref.ref[RemoteCenter], connection: Connection) -> None:
    """Gives signs of life of a center's workers, until that is closed or forgotten."""

    def once() -> float:
        alive = center()
        return 0.0 if alive is None else alive._give_signs_of_life()

    while (interval := once()) and not connection.is_closed_within(interval / 2):
        pass


_open_centers: weakref.WeakSet[RemoteCenter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At the end of the process, its workers leave."""
    for center in list(_open_centers):
        with contextlib.suppress(Exception):  # the others leave nevertheless
            center.close()
