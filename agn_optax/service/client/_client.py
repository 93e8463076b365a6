"""The remote center as workers use it: a `Center` reached over gRPC."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from agn_optax import errors
from agn_optax._internal import check, keep_running
from agn_optax.center import ExpectedLink, Pieces, ShardedCenter, Snapshot
from agn_optax.round import Fragments
from agn_optax.rules import Rule, check_rule
from agn_optax.service import _published
from agn_optax.service import center_pb2 as pb
from agn_optax.service.client._remote import Remote
from agn_optax.service.client._session import RemoteSession
from agn_optax.service.security import _tls, _token
from agn_optax.service.security._tls import Tls
from agn_optax.service.transports import transports_named
from agn_optax.service.transports._connection import Connection
from agn_optax.service.wire import _trees

PyTree = Any
_log = logging.getLogger("agn_optax")
_TRANSPORTS, INSECURE = "AGN_OPTAX_TRANSPORTS", "AGN_OPTAX_INSECURE"
_WARNING_INTERVAL = 5.0  # s between warnings of a worker that waits for a chief


def connect(
    address: str | Sequence[str],
    rule: Rule,
    *,
    timeout: float = 30.0,
    like: PyTree = None,
    tls: Tls | None = None,
    insecure: bool = False,
    token: _token.Token = None,
    transports: Sequence[str] | None = None,
    fragments: Fragments | None = None,
    expected: ExpectedLink | None = None,
) -> RemoteCenter | ShardedCenter:
    """Connect to the center at an address, and return it for use as a `LocalCenter`.

    Args:
      address: ``"host:port"`` or ``"unix:path"``, such as ``Server.address``. Several
        addresses, in a list or separated by commas, are one center in shards: leaves
        are assigned to the servers by size, and large leaves are split.
        ``"file:PATH"`` names a file that holds the address of a center that may restart
        elsewhere, as ``serve --address-file`` writes it; it is read again at every
        call.
      rule: the rule that the center runs.
      timeout: seconds without any response from the center after which a call gives up.
        It must exceed the three seconds for which a center may send nothing to a
        waiting worker. An exchange gives up after two seconds if the center does not
        answer; its worker then goes on training without it.
      like: a tree with the containers in which `pull` is to return the parameters, for
        models whose containers are not dicts, lists and tuples. It is not needed by a
        worker that passes its parameters to `start`.
      tls: the certificate authorities that the center's certificate is checked against,
        and this worker's certificate and key if the center asks for them. None uses the
        files that ``AGN_OPTAX_TLS_CA``, ``AGN_OPTAX_TLS_CERTIFICATE`` and
        ``AGN_OPTAX_TLS_KEY`` name, or, without these, plain text, which is only allowed
        within this machine.
      insecure: allows plain text beyond this machine, as ``AGN_OPTAX_INSECURE=1`` does.
      token: the token that authenticates this worker at the center, or the path of a
        file with the token. None uses ``AGN_OPTAX_TOKEN``, or the file that
        ``AGN_OPTAX_TOKEN_FILE`` names, or, if the same user started the center on this
        machine with `agn-optax serve`, the token that the center generated.
      transports: names of the transports that exchanges may use, in order of
        preference; the first one that works is used. ``"memory"`` is memory shared with
        a center of the same user on this machine, ``"socket"`` is a connection of its
        own beside the one of gRPC, and ``"grpc"`` works wherever a center can be
        reached; without ``"grpc"``, a call fails if the others do not work. None uses
        ``AGN_OPTAX_TRANSPORTS``, a list separated by commas, or else all transports.
      fragments: the fragments of the model, one for each of several servers, for a
        center whose workers (or some of them) exchange by these fragments. All workers
        must pass the same fragments. None divides the leaves by size.
      expected: how exchanges are expected to travel: their rate, interface and
        transport. A worker warns if they travel otherwise. None expects the center's
        direct connection, if ``transports`` has it, and the worker's best rate so far.

    Returns:
      The center.

    Raises:
      CenterUnreachableError: the center does not answer in time.
      EncryptionError: the center answers, but the TLS settings of the two ends are not
        compatible.
      NotAllowedError: the center requires a token that it knows.
      RuleMismatchError: the center runs another rule; the message names what differs.
      ProtocolError: the server at the address is not a center, or is one of an
        incompatible release.
      InvalidArgumentError: an address is not valid, a setting is out of range, or the
        number of fragments is not the number of servers.

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
    if transports is None and (names := os.environ.get(_TRANSPORTS)):
        transports = names.split(",")
    if tls is None:
        tls = _tls.of_environment()
        insecure = insecure or os.environ.get(INSECURE) == "1"
    if isinstance(address, str):
        address = [part.strip() for part in address.split(",")]
    if not isinstance(address, Iterable):
        address = [address]
    addresses = [_published.check_reachable(part) for part in address]
    if not addresses or len(set(addresses)) != len(addresses):
        raise errors.InvalidArgumentError(
            f"expected one address, or several different ones, got {addresses}"
        )
    check.seconds(timeout, "timeout", positive=True)
    allowed_transports = transports_named(transports)
    if expected is not None:
        check.instance(expected, ExpectedLink, "expected must be an ExpectedLink")
        if expected.transport is not None:
            transports_named([expected.transport])  # raises if there is none
    is_whole = len(addresses) == 1
    with contextlib.ExitStack() as on_error:
        centers = []
        for part in addresses:
            connection = Connection(part, timeout, tls, insecure, token)
            on_error.callback(connection.close)
            remote = Remote(connection, rule, allowed_transports, expected)
            centers.append(RemoteCenter(remote, like if is_whole else None))
        center: RemoteCenter | ShardedCenter = centers[0]
        if not is_whole:
            center = ShardedCenter(centers, like=like, fragments=fragments)
        elif fragments is not None and len(fragments) != 1:
            raise errors.InvalidArgumentError(
                f"{len(fragments)} fragments need as many servers, got one address"
            )
        on_error.pop_all()
    return center


class RemoteCenter(contextlib.AbstractContextManager["RemoteCenter"]):
    """A center that is reached over a gRPC connection; made by `connect`.

    Its methods may be called from any thread. A call that does not reach the center is
    retried at growing intervals until ``timeout`` seconds have passed without any
    response. An exchange that was already applied is not applied again.

    Attributes:
      rule: the rule that the center runs.
    """

    def __init__(self, remote: Remote, like: PyTree = None) -> None:
        self.rule = remote.rule
        self._like = like
        self._connection = remote.connection
        self._remote = remote
        self._sessions: dict[str, RemoteSession] = {}  # that have not left, by id
        remote.describe()
        heartbeats = functools.partial(
            _send_heartbeats, weakref.ref(self), self._connection
        )
        keep_running(heartbeats, "agn-optax heartbeat")
        _open_centers.add(self)

    @property
    def address(self) -> str:
        """The center's address."""
        return self._connection.address

    @property
    def unreachable_since(self) -> float | None:
        """Time since which the center does not answer (s since the epoch), or None."""
        return self._connection.unreachable_since

    # The protocol `Center`.

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        resume_token: Any = None,
    ) -> RemoteSession:
        """Register a worker: see `Center.join`."""
        share = None
        if isinstance(params, Pieces):
            share = params.share
            self._remote.check_model(share.like, worker)
        elif params is not None:
            self._remote.check_model(params, worker)
            self._like = jax.tree.map(lambda _: 0, params)
        is_resumed = bool(resume_token and resume_token[0])
        for previous in list(self._sessions.values()):
            if previous.worker == worker:  # this process no longer uses it
                is_same = is_resumed and previous.session_id == resume_token[1]
                (previous.disconnect if is_same else previous.leave)()
        session = RemoteSession(
            self._remote,
            worker,
            self._like,
            resume_token,
            share=share,
            on_left=self._sessions.pop,
        )
        self._sessions[session.session_id] = session
        try:
            session.join(timeout)
        except BaseException:
            if is_resumed:  # it may be resumed again
                session.disconnect()
                self._sessions.pop(session.session_id, None)
            else:
                session.leave()
            raise
        return session

    def initialize(self, params: PyTree, *, worker: str) -> None:
        """Give the center its first parameters: see `Center.initialize`."""
        like = params.share.like if isinstance(params, Pieces) else params
        check.float_leaves(like, "params")
        if self._remote.schemas is not None:
            self._remote.check_model(like, worker)
        self._like = jax.tree.map(lambda _: 0, like)
        self._remote.initialize(params, worker)

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait until the center is initialized, and return it: see `Center.wait`."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            remaining = max(0.0, min(end - time.monotonic(), _WARNING_INTERVAL))
            try:
                return self._pull(remaining)
            except errors.NotInitializedError:
                text = "one worker must call start(params, chief=True)"
                if time.monotonic() >= end:
                    raise errors.NotInitializedError(
                        f"no chief has initialized the center at {self.address} within "
                        f"{timeout} s; {text}"
                    ) from None
                _log.warning("no chief has started at %s yet; %s", self.address, text)

    def pull(self) -> Snapshot:
        """Return the current version of the center: see `Center.pull`."""
        return self._pull(0.0)

    def describe(self) -> Snapshot:
        """Return the current version without its arrays: see `Center.describe`."""
        version = self._remote.describe().version
        schema = self._remote.known_schemas().center
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in schema.leaves]
        return Snapshot(_trees.build(schema, leaves, self._like), version)

    # Methods that `Center` does not have.

    @property
    def takes_pieces(self) -> bool:
        """True, as each process of a worker may exchange its own pieces."""
        return True

    def current_ids(self) -> list[str]:
        """Return the center id, in a list as that of a center in shards."""
        return [self._remote.describe().center]

    @property
    def timeout(self) -> float:
        """The timeout of the connection, in seconds."""
        return self._connection.timeout

    def status(self) -> dict[str, Any]:
        """Return the center's status, as ``agn-optax status --json`` prints it."""
        return self._connection.retry(self._connection.status)

    def close(self) -> None:
        """Let all workers of this connection leave, and close the connection."""
        if self._connection.closed:
            return
        _open_centers.discard(self)
        end = time.monotonic() + 2.0
        try:
            for session in list(self._sessions.values()):
                session.leave(max(0.1, min(1.0, end - time.monotonic())))
        finally:
            self._connection.close()
            for session in list(self._sessions.values()):  # that joined meanwhile
                session.disconnect()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        transports = {s.worker: s.transport for s in list(self._sessions.values())}
        workers = [f", {name!r} by {t}" for name, t in sorted(transports.items()) if t]
        return f"RemoteCenter({self.rule.name}, at {self.address}{''.join(workers)})"

    def _pull(self, wait: float) -> Snapshot:
        snapshot, arrays = self._connection.retry(lambda: self._remote.pull(wait))
        # A pull is too rare to compile a program for it, as `to_device` would.
        leaves = jax.device_put(arrays)
        return Snapshot(self._remote.as_tree(leaves, self._like), snapshot.version)

    def _send_heartbeat(self) -> float:
        """Send a heartbeat of all joined workers; return seconds until the next one."""
        interval = self._remote.description.heartbeat
        sessions = [
            pb.Session(worker=session.worker, session_id=session.session_id)
            for session in list(self._sessions.values())
            if not session.has_left
        ]
        if sessions:
            request = pb.AliveRequest(sessions=sessions)
            with contextlib.suppress(errors.AgnOptaxError):  # the next may get through
                self._connection.unary("Alive", request, pb.AliveReply, interval)
        return interval


def _send_heartbeats(center: weakref.ref[RemoteCenter], connection: Connection) -> None:
    """Send heartbeats of a center's workers until it is closed or garbage-collected."""

    def send_once() -> float:
        open_center = center()
        return 0.0 if open_center is None else open_center._send_heartbeat()

    while (interval := send_once()) and not connection.is_closed_within(interval / 2):
        pass


_open_centers: weakref.WeakSet[RemoteCenter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all open centers at the end of the process, so that their workers leave."""
    for center in list(_open_centers):
        with contextlib.suppress(Exception):  # the others must be closed anyway
            center.close()
