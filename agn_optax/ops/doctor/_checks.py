"""The checks of ``agn-optax doctor``."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from agn_optax import errors
from agn_optax._internal import Notice
from agn_optax._version import __version__
from agn_optax.ops import units
from agn_optax.rules import Rule
from agn_optax.service import (
    Observer,
    Tls,
    address,
    fingerprint,
    handshake,
    interface_of,
    publishing,
    sockets,
    wire,
)

_SLOW_ROUND_TRIP = 0.25  # s, above which every exchange is noticeably slower
_MAX_ROUND_TRIP = 1.0  # s, above which workers hardly manage to join
_SAMPLES = 5  # round trips

Result = Literal["ok", "warning", "failed"]
_Outcome = tuple[Result, str]
# Checks that all later ones depend on.
_ESSENTIAL = ("address", "connection", "encryption", "health", "description")


class Finding(NamedTuple):
    """The result of one check, and what to do about it."""

    check: str
    result: Result
    message: str


@dataclasses.dataclass
class Checks:
    """The checks of one center.

    Args:
      address: address of the center.
      observer: opens a connection to the center.
      rule: rule to compare with the center's; None for no comparison.
      timeout: seconds that a call may take.
      tls: TLS settings of this end; None for plain text.
      interface: name of the network interface to use; None for any.
    """

    address: str
    observer: Callable[[], Observer]
    rule: Rule | None
    _: dataclasses.KW_ONLY
    timeout: float
    tls: Tls | None
    interface: str | None = None
    _center: Any = dataclasses.field(init=False, default=None)
    _description: Any = dataclasses.field(init=False, default=None)

    def run(self) -> Iterator[Finding]:
        """Run all checks in the order of their definition, and yield each finding.

        Ends after a failed check that all later ones depend on.
        """
        checks = [name for name in vars(Checks) if name.startswith("_check_")]
        if self.rule is None:
            checks.remove("_check_rule")
        try:
            for check in checks:
                name = check.removeprefix("_check_").replace("_", " ")
                try:
                    finding = Finding(name, *getattr(self, check)())
                except errors.AgnOptaxError as error:
                    finding = Finding(name, "failed", str(error))
                yield finding
                if finding.result == "failed" and name in _ESSENTIAL:
                    return
        finally:
            if self._center is not None:
                self._center.close()

    def _check_address(self) -> _Outcome:
        if (file := publishing.path_of(self.address)) is not None:
            self.address = publishing.read(file)
        address.check(self.address)
        if self.address.startswith("unix:"):
            return "ok", f"{self.address} is a socket of this machine"
        if not address.is_fixed(self.address):
            return "failed", "port 0 means any port: give the one the server printed"
        host, port = address.host(self.address), int(self.address.rpartition(":")[2])
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return "failed", f"{host} is not found: {error}"
        addresses = dict.fromkeys(
            str(socket_address[0]) for *_, socket_address in found
        )
        return "ok", f"{self.address} is {', '.join(addresses)}, port {port}"

    def _check_connection(self) -> _Outcome:
        try:
            with handshake.connect(self.address, self.timeout) as sock:
                interface = interface_of(sockets.local_address(sock))
        except OSError as error:
            return "failed", (
                f"nothing listens at {self.address}: {error}. Is the center running, "
                "and does a firewall let you through?"
            )
        over = f" over interface {interface!r}" if interface else ""
        text = f"connected to {self.address}{over}"
        expected = self.interface
        if interface and expected not in (None, interface):
            return "warning", (
                f"{text}, and {expected!r} was expected: give an address of the center "
                "in the network of that interface, or change the routes of this machine"
            )
        return "ok", text

    def _check_encryption(self) -> _Outcome:
        self._center = self.observer()
        if problem := handshake.failure_reason(self.address, self.tls, self.timeout):
            return "failed", problem
        if self.tls is not None:
            return "ok", "TLS"
        if address.is_local(self.address):
            return "ok", "plain text, which does not leave this machine"
        return "warning", "plain text can be read and changed on the network"

    def _check_health(self) -> _Outcome:
        try:
            status = self._center.health()
        except errors.CenterUnreachableError as error:
            return "failed", (
                "this is no gRPC server, or it rejects the call, or a proxy of the "
                "environment (http_proxy; add the center to no_proxy) is between: "
                f"{error}"
            )
        if status != "SERVING":
            return "failed", f"the center is {status}: it is draining"
        return "ok", status

    def _check_description(self) -> _Outcome:
        self._description = self._center.describe()
        return "ok", f"protocol {self._description.protocol}, {self._description.mode}"

    def _check_role(self) -> _Outcome:
        calls = self._description.calls
        if "Exchange" in calls:
            return "ok", "this end may exchange"
        return "warning", (
            f"this end may only call {', '.join(calls)}: a worker needs a token with "
            "the role worker or chief"
        )

    def _check_release(self) -> _Outcome:
        if (release := self._description.release) == __version__:
            return "ok", f"agn_optax {__version__} at both ends"
        return "warning", (
            f"agn_optax {release} at the center and {__version__} here; install the "
            "same at both ends"
        )

    def _check_rule(self) -> _Outcome:
        assert self.rule is not None
        fingerprint.compare(self._description.rule, self.rule, self.address)
        return "ok", f"{self.rule.name} at both ends"

    def _check_round_trip(self) -> _Outcome:
        times = []
        for _ in range(_SAMPLES):
            begin = time.monotonic()
            self._center.status()
            times.append(time.monotonic() - begin)
        median = statistics.median(times)
        text = f"{median * 1e3:.1f} ms"
        if median > _MAX_ROUND_TRIP:
            return "failed", (
                f"{text}: a join takes several round trips and times out after 3.5 s, "
                "so workers can hardly join; find out what delays packets, or place "
                "the center nearer"
            )
        if median > _SLOW_ROUND_TRIP:
            return "warning", f"{text}: long periods or overlap=True hide it"
        return "ok", text

    def _check_second_port(self) -> _Outcome:
        """Check that exchanges can connect to the port of sockets, beside gRPC's."""
        offers = {offer.transport: offer for offer in self._description.offers}
        if "socket" not in offers or self.address.startswith("unix:"):
            return "ok", "exchanges from here need no second port"
        offered = offers["socket"].address
        host = self.address.rpartition(":")[0]
        second = f"{host}:{offered.rpartition(':')[2]}"
        try:
            handshake.connect(second, self.timeout).close()
        except OSError as error:
            return "warning", (
                f"cannot connect by socket: {error}. Exchanges from here use gRPC, "
                f"which is slower: open {offered} in the firewall, or choose another "
                "port with `serve --direct-address`"
            )
        return "ok", f"connected to {second}"

    def _check_state(self) -> _Outcome:
        if notices := self._center.status()["notices"]:
            return "warning", "; ".join(str(Notice(**notice)) for notice in notices)
        if not self._description.HasField("schema"):
            return "warning", "no parameters yet: no worker has started as chief"
        leaves = wire.from_bytes(self._description.schema).leaves
        size = sum(leaf.nbytes for leaf in leaves)
        return "ok", f"{len(leaves)} leaves, {units.in_bytes(size)}"
