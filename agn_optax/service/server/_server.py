"""The center service: a gRPC server around a `LocalCenter`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from concurrent.futures import Future, wait

from agn_optax._internal import arguments, check, keep_running
from agn_optax.center import LOOK_INTERVAL, LocalCenter, PackedCenter
from agn_optax.service.security._access import Authenticator
from agn_optax.service.server._servicer import Servicer
from agn_optax.service.server._settings import Limits, Security, ServerSettings
from agn_optax.service.transports import (
    Listener,
    ListenSettings,
    transports_named,
)

_log = logging.getLogger("agn_optax")
DEFAULT_GRACE = 30.0  # s for exchanges to be finished when the server stops
_CHECK_INTERVAL = 0.2  # s between two checks of whether something still runs
_CLOSE_TIMEOUT = 0.8  # s after the grace within which all connections are closed


class Server(contextlib.AbstractContextManager["Server"]):
    """A running center service, as `serve` returns it. Also a context manager.

    Attributes:
      address: the address at which the server listens, with the actual port if port 0
        was requested.
      direct_address: "host:port" for exchanges without gRPC; None if there is no such
        port.
      page_address: URL of its page; None if it has none.
      center: the center variable: ``center.pull()``, ``center.save()``.
    """

    def __init__(
        self, center: LocalCenter, servicer: Servicer, listeners: dict[str, Listener]
    ) -> None:
        self.center = center
        self.address = servicer.listens_at
        self.direct_address = servicer.direct_address or None
        self.page_address = servicer.page_address or None
        self._servicer = servicer
        self._listeners = listeners
        servicer.stop = functools.partial(_stop, weakref.ref(self))
        self._stopping = threading.RLock()  # reentrant for `stop` in a signal handler
        self._is_stopping = False
        self._stopped = threading.Event()
        self._looking: Future[None] | None = None
        atexit.register(self.stop, grace=5.0)

    def __repr__(self) -> str:
        """Return the address and the center as text."""
        ended = ", which has ended" if self._stopped.is_set() else ""
        return f"Server(at {self.address}{ended}, {self.center!r})"

    def start(self) -> None:
        """Look for what goes wrong until the server has stopped."""
        self._looking = keep_running(self._look, "agn-optax notices")

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_INTERVAL):
            self.center.core.look()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped; return False if it has not in time.

        Signal handlers run meanwhile, and may call `stop`.

        Args:
          timeout: seconds to wait at most; None for no limit.
        """
        # It sleeps instead of waiting for a lock: a signal that arrives just before the
        # main thread waits for a lock would only be handled after that wait.
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._stopped.is_set() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _CHECK_INTERVAL))
        return self._stopped.is_set()

    def stop(self, grace: float | None = None) -> None:
        """Drain the service and end it.

        Exchanges that are being applied and answered are finished. All others are
        rejected because the center is going down, and their workers keep trying to
        reach it.

        If another thread is already stopping the server, this waits for that thread.
        If the same thread is, because the handler of a second signal calls this, the
        second call returns at once.

        Args:
          grace: seconds for the exchanges that are running; None for 30. One second
            after the grace, everything has ended in any case.
        """
        with self._stopping:
            if self._is_stopping or self._stopped.is_set():
                return
            self._is_stopping = True
            try:
                self._stop(DEFAULT_GRACE if grace is None else grace)
            finally:  # if it raises, as by Ctrl-C, the next call starts over
                self._is_stopping = False

    def _stop(self, grace: float) -> None:
        end = time.monotonic() + grace
        for listener in self._listeners.values():
            listener.drain()
        self.center.core.close(f"the center at {self.address} is going down")
        exchanges = self._servicer.exchanges
        while not exchanges.wait_until_idle(_CHECK_INTERVAL) and time.monotonic() < end:
            pass
        for listener in self._listeners.values():
            listener.close(timeout=max(0.0, end + _CLOSE_TIMEOUT - time.monotonic()))
        self.center.close()  # logs the end, which takes long for a large center
        self._stopped.set()
        if self._looking is not None:  # Python aborts if it ends within a JAX program
            wait([self._looking], _CLOSE_TIMEOUT)
        atexit.unregister(self.stop)

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _stop(reference: weakref.ref[Server]) -> None:
    server = reference()
    if server is not None:
        server.stop()


@arguments.for_function(ServerSettings)
def serve(settings: ServerSettings) -> Server:
    """Serve a center variable over gRPC, in threads of this process.

    Returns:
      The running server: ``server.address``, ``server.stop()``.

    Raises:
      InvalidTypeError: ``limits`` or ``security`` is of another type.
      InvalidArgumentError: a setting is out of range, some do not go together, or an
        address is not valid or cannot be listened at.
      TreeMismatchError: ``params`` has leaves that are not real floating arrays, or the
        center on disk is of another model.
      RuleMismatchError: the center on disk has another rule.
      MissingExtraError: ``page`` is given, and ``agn_optax/ops`` is not installed.
      DurabilityError: the center on disk cannot be read, or nothing can be written.

    Example:
      >>> import jax.numpy as jnp, agn_optax, agn_optax.service
      >>> rule = agn_optax.rules.downpour()
      >>> with agn_optax.service.serve(rule, {"w": jnp.zeros(3)}) as server:
      ...     center = agn_optax.service.connect(server.address, rule)
      ...     print(center.pull().params["w"])
      ...     center.close()
      [0. 0. 0.]
    """
    limits = settings.limits or Limits()
    access = (settings.security or Security()).access_of_server(
        is_local=settings.is_local
    )
    authenticator = Authenticator(access)
    center = PackedCenter(**settings.of_center)
    dtype = check.float_dtype(settings.dtype, "dtype")
    with contextlib.ExitStack() as on_error:
        on_error.callback(center.close, "the server could not be started")
        dtype_name = "" if dtype is None else dtype.name
        servicer = Servicer(center.core, authenticator, dtype_name, limits)
        server = Server(center, servicer, _listeners(servicer, settings))
        on_error.callback(server.stop)
        server.start()
        on_error.pop_all()
    return server


__test__ = {"serve": serve}  # doctest skips functions that a decorator has made


def _listeners(servicer: Servicer, settings: ServerSettings) -> dict[str, Listener]:
    """Start the service's listeners of all transports, and the page."""
    listeners: dict[str, Listener] = {}
    tls = (settings.security or Security()).tls
    direct = settings.direct_address
    listening = ListenSettings(settings.address, direct or None, tls)
    with contextlib.ExitStack() as on_error:
        for transport in transports_named(["grpc"] if direct is False else None):
            try:
                listener = transport.listen(servicer, listening)
            except OSError as error:  # workers can still use gRPC
                _log.warning("no connections by %s: %s", transport.name, error)
                continue
            if listener is not None:
                listeners[transport.name] = listener
                on_error.callback(listener.close, timeout=5.0)
        if settings.page is not None:
            from agn_optax.ops.watch import Page  # noqa: PLC0415 slow to import

            page = listeners["page"] = Page(servicer, settings.page, tls)
            servicer.on_event = page.monitor.record
            on_error.callback(page.close, timeout=5.0)
        servicer.offers = [x.offer for x in listeners.values() if x.offer is not None]
        servicer.listens_at = listeners["grpc"].address
        if "socket" in listeners:
            servicer.direct_address = listeners["socket"].address
        for listener in listeners.values():
            listener.start()
        on_error.pop_all()
    return listeners
