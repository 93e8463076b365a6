"""The center as a process of its own: a gRPC server around a `LocalCenter`."""

from __future__ import annotations

import atexit
import functools
import logging
import socket
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import grpc
import jax
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from agn_optax import errors
from agn_optax._internal import check, in_background
from agn_optax.center import Center, Durability, LocalCenter, Mode, Uplink
from agn_optax.rules import Rule, check_rule, codecs
from agn_optax.service import _address
from agn_optax.service._servicer import Servicer
from agn_optax.service.transports._listener import Listener

PyTree = Any
_log = logging.getLogger("agn_optax")


class Server:
    """A running center service, as `serve` returns it. Also a context manager.

    Attributes:
      address: where it listens; has the real port where 0 was asked for.
      center: the center variable: ``center.pull()``, ``center.save()``.
      uplink: the link to its parent; None if it has none.
    """

    def __init__(self, center: LocalCenter, servicer: Servicer, address: str) -> None:
        self.center = center
        self.address = address
        self.uplink: Uplink | None = None
        self._servicer = servicer
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        self._health: Any = None
        self._grpc: Any = None
        self._threads: Any = None
        self._listener: Listener | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server has stopped; False if it has not in time."""
        return self._stopped.wait(timeout)

    def stop(self, grace: float = 30.0) -> None:
        """Drains the service and ends it.

        Exchanges that are being applied and answered finish; all others are told that
        the center is going down, and their workers go on trying to reach it.

        Args:
          grace: seconds that running exchanges may take.
        """
        with self._stopping:
            if self._stopped.is_set():
                return
            self._health.enter_graceful_shutdown()
            self.center.close(f"the center at {self.address} is going down")
            self._servicer.wait_until_idle(grace)
            if self.uplink is not None:
                self.uplink.stop(grace)
            if self._listener is not None:
                self._listener.close(timeout=5.0)
            self._grpc.stop(grace=0.5).wait()
            self._threads.wait(timeout=5.0)
            self._stopped.set()
            atexit.unregister(self.stop)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def serve(
    rule: Rule,
    params: PyTree = None,
    *,
    address: str = "127.0.0.1:0",
    dtype: Any = None,
    device: Any = "cpu",
    mode: Mode | None = None,
    barrier: int = 0,
    max_workers: int = 64,
    lease: float = 10.0,
    credentials: grpc.ServerCredentials | None = None,
    insecure: bool = False,
    direct: bool = True,
    parent: Center | None = None,
    parent_period: int = 10,
    name: str | None = None,
    durability: Durability | None = None,
) -> Server:
    """Serves a center variable over gRPC, in threads of this process.

    Args:
      rule: a record of `agn_optax.rules`; workers must have the same.
      params: the first parameters; None leaves them to a chief.
      address: ``"host:port"``, with port 0 for any that is free, or ``"unix:path"``.
      dtype: floating dtype of the center; None keeps that of its first parameters.
      device: where the center lives and its optimizer runs: a `jax.Device`, or the name
        of a platform such as ``"cpu"`` or ``"gpu"``, whose first device is taken.
      mode: when messages are applied: `agn_optax.center.Asynchronous` (the default),
        `BoundedStaleness` or `Synchronous`.
      barrier: workers that must have joined before any of them starts.
      max_workers: workers that may be there at a time.
      lease: seconds after which a worker that lost its connection is given up.
      credentials: of TLS; None for plain text, which must stay on this machine.
      insecure: allows plain text beyond this machine.
      direct: also takes connections for exchanges beside gRPC, for speed: on another
        port of the same host that is free, and from this machine over a Unix socket and
        shared memory. They are plain text, so there are none with ``credentials``.
      parent: a center that this one is a worker of, such as `connect` returns: the
        workers of a site share this center, and the sites share the parent, whose rule
        says how. Without ``params``, the parent's are taken.
      parent_period: exchanges of this center's workers between two with the parent.
      name: of this center among the workers of its parent; None makes one up.
      durability: `agn_optax.center.Journal` or `Snapshots`, with a directory in which
        the center outlives its process: started again there, it goes on, and so do its
        workers. Only for a center without a parent. None keeps it in memory.

    Returns:
      The running server: ``server.address``, ``server.stop()``.

    Raises:
      InvalidArgumentError: a setting is out of range, the address is none, or nothing
        can listen there.
      TreeMismatchError: ``params`` has leaves that are not real floating arrays, or the
        center on disk is of another model.
      RuleMismatchError: the center on disk is one of another rule.
      DurabilityError: what is on disk cannot be read, or nothing can be written.

    Example:
      >>> import jax.numpy as jnp, agn_optax, agn_optax.service
      >>> rule = agn_optax.rules.downpour()
      >>> with agn_optax.service.serve(rule, {"w": jnp.zeros(3)}) as server:
      ...     center = agn_optax.service.connect(server.address, rule)
      ...     print(center.pull().params["w"])
      ...     center.close()
      [0. 0. 0.]
    """
    check_rule(rule)
    codecs.check_identity(rule.codec, "the center service")
    _address.check(address)
    _address.check_plaintext(address, credentials, insecure)
    if parent is not None and durability is not None:
        raise errors.InvalidArgumentError(
            "a center with a parent cannot outlive its process: what it owes to its "
            "parent would be lost. Give the parent a durability"
        )
    center = LocalCenter(
        rule,
        params,
        dtype=dtype,
        device=_device(device),
        mode=mode,
        barrier=barrier,
        max_workers=max_workers,
        lease=lease,
        refuse_nonfinite=True,
        durability=durability,
        packs=True,
    )
    kept = "" if dtype is None else check.float_dtype(dtype, "dtype").name
    upwards = "" if parent is None else getattr(parent, "address", "this process")
    servicer = Servicer(center.core, kept, upwards)
    try:
        server = start(
            center, servicer, address, credentials, max_workers, direct=direct
        )
    except BaseException:
        center.close("nothing can listen at its address")
        raise
    if parent is not None:
        if name is None:  # sites on other hosts may listen at the same address
            name = f"center {uuid.uuid4().hex[:8]} at {server.address}"
        try:
            server.uplink = Uplink(center.core, parent, period=parent_period, name=name)
        except BaseException:
            server.stop()
            raise
    return server


def start(
    center: LocalCenter,
    servicer: Servicer,
    address: str,
    credentials: grpc.ServerCredentials | None,
    max_workers: int,
    *,
    direct: bool,
) -> Server:
    """A server that answers with ``servicer``."""
    # A worker's life is one call, and one thread; its pull at the start is another, and
    # whoever watches needs a few.
    threads = 2 * max_workers + 16
    pool = _Threads()
    server = grpc.server(
        pool,
        options=[
            *_address.OPTIONS,
            ("grpc.so_reuseport", 0),  # a second server on this port is an error
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ],
        maximum_concurrent_rpcs=threads,
    )
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    channelz.add_channelz_servicer(server)
    names = (
        _address.SERVICE,
        health.SERVICE_NAME,
        channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name,
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
    server.add_generic_rpc_handlers((servicer.handler(),))
    _check_free(address)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        reason = str(error).partition("; set GRPC_VERBOSITY")[0]
        raise errors.InvalidArgumentError(
            f"cannot listen at {address}: {reason}. Perhaps another process does; port "
            "0 takes one that is free"
        ) from None
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{port}"
    made = Server(center, servicer, address)
    made._health, made._grpc, made._threads = checks, server, pool
    if direct and credentials is None:
        try:
            made._listener = Listener(servicer, address)
            servicer.direct = made._listener.direct
        except OSError as error:  # there is gRPC
            _log.warning("no direct connections at %s: %s", address, error)
    server.start()
    atexit.register(made.stop, grace=5.0)
    for name in ("", _address.SERVICE):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    return made


class _Threads(ThreadPoolExecutor):
    """A thread for every call, for which the end of the process does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self._running: set[Future[Any]] = set()

    def wait(self, timeout: float) -> None:
        """Until all calls have ended: in a process that ends, a thread is cut off."""
        wait(set(self._running), timeout)

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(call, *args, **kwargs)
        future = in_background(bound, "agn-optax center", lasting=True)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future


def _check_free(address: str) -> None:
    """GRPC would take over the socket file of a running server without a word."""
    if not address.startswith("unix:"):
        return
    path = address.removeprefix("unix:").removeprefix("//")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise errors.InvalidArgumentError(
        f"cannot listen at {address}: another server does"
    )


def _device(device: Any) -> jax.Device:
    if not isinstance(device, str):
        return device
    try:
        return jax.devices(device)[0]
    except RuntimeError as error:
        raise errors.InvalidArgumentError(
            f"device must be a jax.Device or the name of a platform, got {device!r} "
            f"({error})"
        ) from None
