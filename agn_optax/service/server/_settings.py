"""The settings of a served center, with a dataclass for each group of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from agn_optax import errors
from agn_optax._internal import check, combinations, extras
from agn_optax.center import CenterSettings
from agn_optax.center import Limits as CenterLimits
from agn_optax.service import _address
from agn_optax.service.security import _tls
from agn_optax.service.security._access import Access
from agn_optax.service.security._tls import Tls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(CenterLimits):
    """Limits of a served center: those of `agn_optax.center.Limits`, and one more.

    Args:
      max_workers: maximum number of registered workers. None for no limit; the
        service's limits on calls, connections and heartbeats are then those of 1,024
        workers.
      calls: calls per second that one caller may make beside its exchanges, such as
        pulls and joins, after 400 at once plus 8 for each of ``max_workers``; None for
        no limit. Further calls wait or are rejected. The same limit holds for the
        unauthenticated connections per second of one host. A caller is a token,
        or, without tokens, a host.

    Raises:
      InvalidTypeError: ``messages`` are not message limits.
      InvalidArgumentError: a value is out of range.

    Example:
      >>> import jax.numpy as jnp, agn_optax, agn_optax.service
      >>> limits = agn_optax.service.Limits(max_workers=8, calls=50.0)
      >>> rule = agn_optax.rules.downpour()
      >>> with agn_optax.service.serve(rule, jnp.zeros(3), limits=limits) as server:
      ...     print(server.center.version)
      0
    """

    calls: float | None = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calls is not None:
            check.rate(self.calls, "calls", low=0.0, high=math.inf, low_open=True)

    @property
    def workers_of_service(self) -> int:
        """The number of workers that the service's own limits allow for."""
        return self.max_workers or 1024

    @property
    def of_center(self) -> CenterLimits:
        """The limits that the center itself checks, and not the service around it."""
        names = [field.name for field in dataclasses.fields(CenterLimits)]
        return CenterLimits(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Security:
    """Access to a served center, and the encryption of its calls.

    Args:
      tls: the center's certificate and key, and, if workers must have certificates,
        the certificate authorities that these are checked against. None for plain text,
        which is only allowed within this machine.
      insecure: allow plain text beyond this machine, and unauthenticated callers, in a
        network that you trust.
      access: access control: the callers and their roles. None admits everybody on this
        machine, or, if ``tls`` asks for certificates, everybody with a certificate.

    Raises:
      InvalidTypeError: ``tls`` is not a `Tls`, or ``access`` not an `Access`.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> from agn_optax import service
      >>> token = "0123456789abcdef"
      >>> access = service.Access(f"reader * {token}".encode())
      >>> security = service.Security(access=access)
      >>> rule = agn_optax.rules.downpour()
      >>> with service.serve(rule, jnp.zeros(3), security=security) as server:
      ...     center = service.connect(server.address, rule, token=token)
      ...     print(center.pull().params)
      ...     center.close()
      [0. 0. 0.]
    """

    tls: Tls | None = None
    insecure: bool = False
    access: Access | None = None

    def __post_init__(self) -> None:
        _tls.check(self.tls, self.insecure)
        if not isinstance(self.access, Access | None):
            raise errors.InvalidTypeError(
                f"access must be an Access, got {self.access!r}"
            )

    def access_of_server(self, *, is_local: bool) -> Access | None:
        """Return the access control of a server; None to admit everybody.

        Args:
          is_local: whether the server can be reached only from this machine.

        Raises:
          InvalidArgumentError: anybody beyond this machine could change the center.
        """
        needs_certificate = self.tls is not None and self.tls.ca is not None
        if self.access is None and not (is_local or self.insecure or needs_certificate):
            raise errors.InvalidArgumentError(
                "every program that can reach this address from another machine could "
                "change the center: give access=Access(...) (--tokens), require "
                "certificates of workers by the ca= of tls (--tls-client-ca), or give "
                "insecure=True (--insecure) in a network that you trust"
            )
        return self.access


LOOPBACK = "127.0.0.1:0"  # any free port, which only this machine reaches


@dataclasses.dataclass(frozen=True, eq=False)
class ServerSettings(CenterSettings):
    """The arguments of `serve`.

    Args:
      limits: limits on workers, messages and calls, an
        `agn_optax.service.Limits`; None for ``Limits()``.
      address: address to listen at: ``"host:port"``, with port 0 for any free port, or
        ``"unix:path"``.
      direct_address: address to listen at for exchanges without gRPC, which are faster:
        ``"host:port"``; None for a free port of the same host. Workers connect to this
        port at the host by which they reach ``address``. It is encrypted as gRPC is.
        Processes of the same user on this machine also exchange in shared memory. False
        serves gRPC alone.
      page: ``"host:port"`` of a web page that shows the center's activity, with
        ``/metrics`` for Prometheus, protected by the same tokens and certificates. Port
        0 uses a free one, see ``server.page_address``. None for no page.
      security: certificates, and who may call, an `agn_optax.service.Security`; None
        for ``Security()``, which serves everybody on this machine, and nobody else.
    """

    _: dataclasses.KW_ONLY
    # This leaves the memory of accelerators to the workers on this machine. An embedded
    # center stays where its parameters are, in the process of its workers.
    device: Any = "cpu"
    limits: Limits | None = None
    address: str = LOOPBACK
    direct_address: str | Literal[False] | None = None
    page: str | None = None
    security: Security | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_group("security", Security)
        _address.check(self.address)
        direct = None if self.direct_address is False else self.direct_address
        if direct is not None:
            addresses = _address.check(direct), self.address
            if any(address.startswith("unix:") for address in addresses):
                got = f"direct_address={direct!r}, address={self.address!r}"
                combinations.reject("direct_address", "a Unix socket", got)
        if self.page is not None and _address.check(self.page).startswith("unix:"):
            combinations.reject("page", "a Unix socket", f"page={self.page!r}")
        if self.page is not None and not extras.is_installed("agn_optax.ops.watch"):
            raise errors.MissingExtraError(
                "page needs agn_optax/ops, which this copy of the package lacks: "
                "install agn_optax whole, or pass page=None",
                name="agn_optax.ops.watch",
            )
        security = self.security or Security()
        _tls.check(security.tls, security.insecure, *self._addresses)

    @property
    def is_local(self) -> bool:
        """True if all callers are on this machine."""
        return all(map(_address.is_local, self._addresses))

    @property
    def of_center(self) -> dict[str, Any]:
        """The arguments of the center that is served."""
        limits = None if self.limits is None else self.limits.of_center
        names = [field.name for field in dataclasses.fields(CenterSettings)]
        return {name: getattr(self, name) for name in names} | {"limits": limits}

    @property
    def _addresses(self) -> list[str]:
        """The addresses at which it listens."""
        return [x for x in (self.address, self.direct_address, self.page) if x]

    def _check_limits(self) -> None:
        self._check_group("limits", Limits)

    def _check_group(self, name: str, kind: type) -> None:
        if (value := getattr(self, name)) is not None:
            expected = f"{name} must be agn_optax.service.{kind.__name__}(...)"
            check.instance(value, kind, expected)
