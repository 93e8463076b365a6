"""The checks of ``agn-optax doctor``."""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple
from urllib.request import proxy_bypass

from agn_optax import errors
from agn_optax._version import __version__
from agn_optax.ops import units
from agn_optax.rules import Rule
from agn_optax.service import (
    MIN_RATE,
    Observer,
    Tls,
    TransportSpeed,
    address,
    fingerprint,
    handshake,
    publishing,
    versions,
    wire,
)

_MAX_CLOCK_DIFFERENCE = 1.0  # s
_SLOW_ROUND_TRIP = 0.25  # s, above which every exchange is noticeably slower
_MAX_ROUND_TRIP = 1.0  # s, above which workers hardly manage to join
_SAMPLES = 5  # of round trips and clocks
_MAX_ASYMMETRY = 3.0  # factor by which one direction may be slower than the other
_FAST_RATE = 200e6  # bytes/s, above which processors may be the bottleneck
# Variables that gRPC reads, in its order of preference, in lower case only.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_TRANSPORTS = ("memory", "socket", "grpc")

Result = Literal["ok", "warning", "failed"]
_Outcome = tuple[Result, str]
# Checks that all later ones depend on.
_ESSENTIAL = ("address", "connection", "encryption", "health", "description")


class Finding(NamedTuple):
    """The result of one check."""

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
    """

    address: str
    observer: Callable[[], Observer]
    rule: Rule | None
    _: dataclasses.KW_ONLY
    timeout: float
    tls: Tls | None
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
        host, port = self._host, int(self.address.rpartition(":")[2])
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return "failed", f"{host} is not found: {error}"
        addresses = dict.fromkeys(
            str(socket_address[0]) for *_, socket_address in found
        )
        return "ok", f"{self.address} is {', '.join(addresses)}, port {port}"

    def _check_proxy(self) -> _Outcome:
        variable = next((name for name in _PROXIES if os.environ.get(name)), None)
        is_local = address.is_local(self.address)
        if is_local or variable is None or proxy_bypass(self._host):
            return "ok", "gRPC uses no proxy for this center"
        return "warning", (
            f"{variable} sends gRPC through a proxy, and exchanges by sockets bypass "
            f"it; add {self._host} to no_proxy, or unset {variable}"
        )

    def _check_connection(self) -> _Outcome:
        try:
            seconds = _seconds(
                lambda: handshake.connect(self.address, self.timeout).close()
            )
        except OSError as error:
            return "failed", (
                f"nothing listens at {self.address}: {error}. Is the center running, "
                "and does a firewall let you through?"
            )
        return "ok", f"connected in {seconds * 1e3:.1f} ms"

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
            return "failed", f"this is no gRPC server, or it rejects the call: {error}"
        if status != "SERVING":
            return "failed", f"the center is {status}: it is draining"
        return "ok", status

    def _check_description(self) -> _Outcome:
        self._description = self._center.describe()
        return "ok", f"protocol {self._description.protocol}, {self._description.mode}"

    def _check_release(self) -> _Outcome:
        center = self._description
        if center.release != __version__:
            return "warning", (
                f"the center runs agn_optax {center.release}, and this end "
                f"{__version__}"
            )
        text = f"agn_optax {__version__} at both ends"
        differences = [
            f"{name} {center.versions.get(name)} at the center and {version} here"
            for name, version in versions.installed().items()
            if center.versions.get(name) != version
        ]
        if not differences:
            return "ok", text
        return "warning", (
            f"{text}, but {', '.join(differences)}: results may differ in the last "
            "digits, and equal rules seem different; install the same at both ends"
        )

    def _check_round_trip(self) -> _Outcome:
        times = [_seconds(self._center.status) for _ in range(_SAMPLES)]
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

    def _check_clocks(self) -> _Outcome:
        samples = []
        for _ in range(_SAMPLES):
            begin = time.time()
            clock = self._center.describe().clock
            end = time.time()
            samples.append((end - begin, clock - (begin + end) / 2))
        round_trip, offset = min(samples)  # the shortest round trip: the most accurate
        text = (
            f"the center's clock is {abs(offset):.3f} s "
            f"{'ahead' if offset > 0 else 'behind'}, +-{round_trip / 2:.3f} s"
        )
        if abs(offset) - round_trip / 2 <= _MAX_CLOCK_DIFFERENCE:
            return "ok", text
        return "warning", (
            f"{text}: certificates may not be valid, and times in logs do not match; "
            "synchronize both clocks with a time server (chrony, systemd-timesyncd)"
        )

    def _check_schema(self) -> _Outcome:
        if not self._description.HasField("schema"):
            return "warning", "no parameters yet: no worker has started as chief"
        leaves = wire.from_bytes(self._description.schema).leaves
        size = sum(leaf.nbytes for leaf in leaves)
        return "ok", f"{len(leaves)} leaves, {units.in_bytes(size)}"

    def _check_disk(self) -> _Outcome:
        status = self._center.status()
        degraded = status["degraded"]
        free, needed = status["disk_free"], status["disk_needed"]
        if free is None or needed is None:  # not known, or nothing is kept on disk
            text = degraded or "the center stores everything that it is set to store"
            return "warning" if degraded else "ok", text
        space = (
            f"{units.in_bytes(free)} are free, and the next snapshot with its journal "
            f"takes {units.in_bytes(needed)}"
        )
        if free < needed:
            return "failed", (
                f"{space}: make room, or the center stops. {degraded}".strip()
            )
        if degraded:
            return "warning", f"{degraded} ({space})"
        if free < 2 * needed:
            return "warning", f"{space}: make room before a second snapshot"
        return "ok", space

    def _check_rates(self) -> _Outcome:
        """Measure each transport, up and down, over the connections of exchanges."""
        offers = {offer.transport: offer for offer in self._description.offers}
        ways: dict[
            str, TransportSpeed
        ] = {}  # in the order in which exchanges prefer them
        missing = []
        for name in _TRANSPORTS:
            if name not in offers and name != "grpc":
                continue
            try:
                ways[name] = self._center.measure(name)
            except errors.NotAllowedError as error:
                return "warning", f"the rates cannot be measured: {error}"
            except errors.CenterUnreachableError as error:
                if name == "socket":
                    missing.append(
                        f"{error}. Exchanges from here use gRPC, which is slower: open "
                        f"{offers[name].address} in the firewall, or choose another "
                        "port with `serve --direct-address`"
                    )
                elif name != "memory" or address.is_local(self.address):
                    missing.append(str(error))
        text = "; ".join([*map(_described, ways.values()), *missing])
        way = ways.get("socket") or ways.get("grpc")
        if way is not None:
            result, advice = self._rate_problem(way)
            if result != "ok":
                return result, f"{text}; {advice}"
        return "warning" if missing else "ok", text

    def _rate_problem(self, way: TransportSpeed) -> _Outcome:
        if way.up is None or way.down is None:
            which = "to the center" if way.up is None else "from the center"
            return "failed", (
                f"short messages pass over {way.transport}, but 16 KiB {which} take "
                f"more than {self.timeout:g} s: something on the path may drop large "
                f"packets (`tracepath {self._host}` shows the largest size that passes)"
            )
        up, down = (way.up, "up, to the center"), (way.down, "down, from the center")
        (slow, which), (fast, _) = sorted((up, down))
        if slow < MIN_RATE:
            return "failed", (
                f"the way {which}, is slower than the {units.in_bytes(MIN_RATE)}/s "
                "below which both ends break off transfers"
            )
        if fast > _MAX_ASYMMETRY * slow and slow < _FAST_RATE:
            return "warning", (
                f"the way {which}, is {fast / slow:.1f} times slower than the other "
                "one: check the speed and duplex that the network cards have "
                "negotiated, the cable, and traffic shaping in that direction"
            )
        return "ok", ""

    def _check_rule(self) -> _Outcome:
        assert self.rule is not None
        fingerprint.compare(self._description.rule, self.rule, self.address)
        return "ok", f"{self.rule.name} at both ends"

    @property
    def _host(self) -> str:
        return address.host(self.address)


def _described(way: TransportSpeed) -> str:
    """Describe the rates and the round trip of a transport in words."""

    def in_words(rate: float | None) -> str:
        return "nothing" if rate is None else f"{units.in_bytes(rate)}/s"

    if way.transport == "memory":
        return f"memory {in_words(way.up)} each way"
    return (
        f"{way.transport} {in_words(way.up)} up and {in_words(way.down)} down, "
        f"{way.round_trip * 1e3:.2g} ms"
    )


def _seconds(call: Callable[[], object]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin
