"""The center as a process of its own: a gRPC server around a `LocalCenter`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import threading
import time
import uuid
import weakref
from typing import Any

import grpc
import jax

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center import Center, Durability, LocalCenter, Mode, Refuse
from agn_optax.rules import Rule, check_rule
from agn_optax.service import _address, _tls
from agn_optax.service._access import Access, Door
from agn_optax.service._servicer import Servicer
from agn_optax.service._tls import Tls
from agn_optax.service.transports import HealthListener, Listener, Place, named
from agn_optax.worker import Uplink

PyTree = Any
_log = logging.getLogger("agn_optax")
_LOOK = 0.2  # seconds between two looks at what still runs
_UNREAD = 2.0  # seconds after which a worker that takes nothing is not waited for
_LAST = 0.8  # seconds beyond the grace in which connections end, whoever holds them


class Server(contextlib.AbstractContextManager["Server"]):
    """A running center service, as `serve` returns it. Also a context manager.

    Attributes:
      address: where it listens; has the real port where 0 was asked for.
      direct_address: "host:port" where it takes exchanges beside gRPC; None if there
        is no such port.
      page_address: where a browser finds its page; None if it has none.
      health_address: where anybody may ask whether it serves; None for nowhere.
      center: the center variable: ``center.pull()``, ``center.save()``.
      uplink: the link to its parent; None if it has none.
    """

    def __init__(
        self, center: LocalCenter, servicer: Servicer, listeners: dict[str, Listener]
    ) -> None:
        self.center = center
        self.address = servicer.listens_at
        self.direct_address = servicer.direct_address or None
        self.page_address = servicer.page_address or None
        health = listeners.get("health")
        self.health_address = None if health is None else health.address
        self.uplink: Uplink | None = None
        self._servicer = servicer
        self._listeners = listeners
        servicer.stop = functools.partial(_stop, weakref.ref(self))
        self._stopping = threading.RLock()  # a handler of a signal may come in again
        self._is_stopping = False
        self._stopped = threading.Event()
        atexit.register(self.stop, grace=5.0)

    def __repr__(self) -> str:
        """Where it listens, and its center."""
        ended = ", which has ended" if self._stopped.is_set() else ""
        return f"Server(at {self.address}{ended}, {self.center!r})"

    @property
    def is_drained(self) -> bool:
        """True once an operator has asked for its end (``agn-optax drain``)."""
        return self._servicer.is_drained

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server has stopped; False if it has not in time.

        Handlers of signals run meanwhile, and may call `stop`.
        """
        # Asleep and not at a lock: a signal that comes while the main thread is about
        # to wait for one would be handled when that wait is over.
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._stopped.is_set() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK))
        return self._stopped.is_set()

    def stop(self, grace: float | None = None) -> None:
        """Drains the service and ends it.

        Exchanges that are being applied and answered finish; all others are told that
        the center is going down, and their workers go on trying to reach it.

        Args:
          grace: seconds that running exchanges may take, and what this center owes to
            its parent; None for 30, or twice as long as any of the last answers took to
            travel if that is more, up to 600. A worker that takes nothing of its answer
            for two seconds is cut off before; a second after the grace everything has
            ended, whatever workers do.

        A call while another thread stops the server waits for that. In the thread that
        stops it, where a handler of a second signal may call this, it returns at once.
        """
        with self._stopping:
            if self._is_stopping or self._stopped.is_set():
                return
            self._is_stopping = True
            try:
                self._stop(self._servicer.stop_grace if grace is None else grace)
            finally:  # of what raises, as Ctrl-C does, the next call does all again
                self._is_stopping = False

    def _stop(self, grace: float) -> None:
        end = time.monotonic() + grace
        for listener in self._listeners.values():
            listener.drain()
        self.center.close(f"the center at {self.address} is going down")
        while not self._servicer.wait_until_idle(_LOOK) and time.monotonic() < end:
            self._servicer.transfers.cut(_UNREAD)
        if self.uplink is not None:
            self.uplink.stop(max(0.0, end - time.monotonic()))
        for listener in self._listeners.values():
            listener.close(timeout=max(0.0, end + _LAST - time.monotonic()))
        self._stopped.set()
        atexit.unregister(self.stop)

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _stop(server: weakref.ref[Server]) -> None:
    if (known := server()) is not None:
        known.stop()


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
    memory: int | None = None,
    calls: float | None = 20.0,
    tls: Tls | None = None,
    credentials: grpc.ServerCredentials | None = None,
    insecure: bool = False,
    access: Access | None = None,
    reflection: bool | None = None,
    direct: bool = True,
    direct_address: str | None = None,
    page: str | None = None,
    health_address: str | None = None,
    parent: Center | None = None,
    parent_period: int = 10,
    name: str | None = None,
    durability: Durability | None = None,
    refuse: Refuse | None = None,
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
      memory: bytes that the center, its optimizer's state and all messages may take
        together: a worker for whose message there is no room is refused, and those that
        are there go on. None for any number.
      calls: a second, that one caller may make beside its exchanges (pulls, joins;
        those of many bytes count more), and connections that one host may begin without
        saying whose they are. Further ones wait or are refused. A caller is a token or
        a certificate, or without any a host. 400 calls are free, and as many as all
        workers make when they start. Status and health, snapshots, and what ends
        something are counted apart, each after 400 at once. None for no bound.
      tls: this center's certificate and key, and who vouches for workers if they must
        have certificates; None for plain text, which must stay on this machine.
      credentials: of gRPC instead, where `Tls` cannot say it; they encrypt nothing but
        gRPC, so that exchanges with other hosts take that.
      insecure: allows plain text beyond this machine, and callers that are unknown.
      access: who may call, and what each may do; None is everybody on this machine, or
        whom certificates name if ``tls`` asks for them.
      reflection: whether gRPC's reflection and channelz are served, which tell of calls
        and connections; None has them on this machine only.
      direct: also takes connections for exchanges beside gRPC, for speed: at another
        port, encrypted as gRPC is, and from processes of the same user on this machine
        in shared memory.
      direct_address: ``"host:port"`` of that other port; None takes one of the same
        host that is free. Workers reach it at the host that they know ``address`` by.
      page: ``"host:port"`` of a page in the browser that shows what goes on, with
        ``/metrics`` for Prometheus, behind the same tokens and certificates; None for
        no page. Port 0 takes one that is free: ``server.page_address``.
      health_address: ``"host:port"`` where gRPC's health checking is answered as well,
        in plain text and to anybody, and nothing else is: for whoever can neither speak
        TLS nor show a token, as the probes of Kubernetes. None for nowhere.
      parent: a center that this one is a worker of, such as `connect` returns: the
        workers of a site share this center, and the sites share the parent, whose rule
        says how. Without ``params``, the parent's are taken.
      parent_period: exchanges of this center's workers between two with the parent.
      name: of this center among the workers of its parent; None makes one up.
      durability: `agn_optax.center.Journal` or `Snapshots`, with a directory in which
        the center outlives its process: started again there, it goes on, and so do its
        workers. Only for a center without a parent. None keeps it in memory.
      refuse: which messages are refused, an `agn_optax.center.Refuse`; None for those
        that are not finite, or after which the center would not be.

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
    _tls.check(tls, credentials, insecure, _address.check(address))
    check.whole_number(memory, "memory", least=1)
    if calls is not None:
        check.rate(calls, "calls", low=0.0, high=math.inf, low_open=True)
    addresses = [address]
    if direct_address is not None:
        if not direct:
            raise errors.InvalidArgumentError(
                f"direct_address={direct_address!r} and direct=False exclude each other"
            )
        _tls.check(tls, credentials, insecure, _address.check(direct_address))
        addresses.append(direct_address)
        if direct_address.startswith("unix:"):
            raise errors.InvalidArgumentError(
                f'direct_address must be "host:port", got {direct_address!r}: beside a '
                "Unix socket there is another one anyway"
            )
    if page is not None:
        if _address.check(page).startswith("unix:"):
            raise errors.InvalidArgumentError(
                f'page must be "host:port", got {page!r}: browsers know no Unix sockets'
            )
        _tls.check(tls, None, insecure, page)
        addresses.append(page)
    if health_address is not None and _address.check(health_address)[:5] == "unix:":
        raise errors.InvalidArgumentError(
            f'health_address must be "host:port", got {health_address!r}'
        )
    is_local = all(map(_address.is_local, addresses))
    door = Door(_access(access, tls, insecure=insecure, is_local=is_local))
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
        refuse=refuse,
        durability=durability,
        packs=True,
    )
    kept = "" if dtype is None else check.float_dtype(dtype, "dtype").name
    upwards = "" if parent is None else getattr(parent, "address", "this process")
    with contextlib.ExitStack() as undone:
        undone.callback(center.close, "nothing can listen at its address")
        servicer = Servicer(center.core, door, kept, upwards, memory, calls)
        tells = is_local if reflection is None else reflection
        place = Place(
            address, direct_address, tls, credentials, tells, page, health_address
        )
        server = Server(center, servicer, _listeners(servicer, place, direct=direct))
        undone.callback(server.stop)
        if parent is not None:
            if name is None:  # sites on other hosts may listen at the same address
                name = f"center {uuid.uuid4().hex[:8]} at {server.address}"
            if hasattr(parent, "announce"):  # it is on the other side of a network
                parent.announce(server.address)
            server.uplink = Uplink(center.core, parent, period=parent_period, name=name)
        undone.pop_all()
    return server


def _access(
    access: Any, tls: Tls | None, *, insecure: bool, is_local: bool
) -> Access | None:
    """Who may call; None for everybody."""
    if access is not None:
        if not isinstance(access, Access):
            raise errors.InvalidTypeError(f"access must be an Access, got {access!r}")
        return access
    if insecure:
        return None
    if tls is not None and tls.ca is not None:
        return Access()
    if not is_local:
        raise errors.InvalidArgumentError(
            "whoever reaches it beyond this machine could change the center: give "
            "access=Access(...) (--tokens), ask workers for certificates with the ca= "
            "of tls (--tls-client-ca), or say insecure=True (--insecure) in a network "
            "that you trust"
        )
    return None


def _listeners(
    servicer: Servicer, place: Place, *, direct: bool
) -> dict[str, Listener]:
    """The service's ends of all transports, which answer with ``servicer``."""
    made: dict[str, Listener] = {}
    with contextlib.ExitStack() as stack:
        for transport in named(None if direct else ["grpc"]):
            try:
                listener = transport.listen(servicer, place)
            except OSError as error:  # there is gRPC
                _log.warning("nobody is listened to by %s: %s", transport.name, error)
                continue
            if listener is not None:
                made[transport.name] = listener
                stack.callback(listener.close, timeout=5.0)
        if place.page is not None:
            from agn_optax.service._page import Page  # noqa: PLC0415 slow to import

            made["page"] = Page(servicer, place.page, place.tls)
            stack.callback(made["page"].close, timeout=5.0)
        if place.health is not None:
            made["health"] = HealthListener(servicer, place.health)
            stack.callback(made["health"].close, timeout=5.0)
        servicer.offers = [each.offer for each in made.values() if each.offer]
        servicer.listens_at = made["grpc"].address
        if "socket" in made:
            servicer.direct_address = made["socket"].address
        for listener in made.values():
            listener.start()
        stack.pop_all()
    return made


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
