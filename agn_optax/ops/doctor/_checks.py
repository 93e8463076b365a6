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

_CLOCKS = 1.0  # seconds by which two clocks may differ
_SLOW = 0.25  # seconds: a longer round trip makes every exchange noticeably slower
_FIRST_WORD = 1.0  # seconds: with a longer round trip, workers hardly manage to join
_ROUND_TRIPS = 5
_UNLIKE = 3.0  # factor by which one direction may be slower than the other
_FAST = 200e6  # bytes per second: at a higher rate, processors may be the bottleneck
# Variables that gRPC reads, in its order of preference, in lower case only.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_TRANSPORTS = ("memory", "socket", "grpc")

Result = Literal["ok", "warning", "failed"]
_Found = tuple[Result, str]
# Checks that all later ones depend on.
_NEEDED = ("address", "connection", "encryption", "health", "description")


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    result: Result
    said: str


def _in_words(way: TransportSpeed) -> str:
    """Describe the rates and the round trip of a transport."""

    def said(rate: float | None) -> str:
        return "nothing" if rate is None else f"{units.in_bytes(rate)}/s"

    if way.transport == "memory":
        return f"memory {said(way.up)} each way"
    return (
        f"{way.transport} {said(way.up)} up and {said(way.down)} down, "
        f"{way.round_trip * 1e3:.2g} ms"
    )


def _seconds(call: Callable[[], object]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


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
    _described: Any = dataclasses.field(init=False, default=None)

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
                if finding.result == "failed" and name in _NEEDED:
                    return
        finally:
            if self._center is not None:
                self._center.close()

    def _check_address(self) -> _Found:
        if (file := publishing.path_of(self.address)) is not None:
            self.address = publishing.read(file)
        address.check(self.address)
        if self.address.startswith("unix:"):
            return "ok", f"{self.address} is a socket of this machine"
        if not address.is_fixed(self.address):
            return "failed", "with port 0, give the port that the server printed"
        host, port = self._host, int(self.address.rpartition(":")[2])
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return "failed", f"{host} is not found: {error}"
        numbers = dict.fromkeys(str(each[4][0]) for each in found)
        return "ok", f"{self.address} is {', '.join(numbers)}, port {port}"

    def _check_proxy(self) -> _Found:
        variable = next((name for name in _PROXIES if os.environ.get(name)), None)
        is_local = address.is_local(self.address)
        if is_local or variable is None or proxy_bypass(self._host):
            return "ok", "gRPC uses no proxy for it"
        return "warning", (
            f"{variable} sends gRPC through a proxy, and exchanges by sockets bypass "
            f"it; add {self._host} to no_proxy, or unset {variable}"
        )

    def _check_connection(self) -> _Found:
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

    def _check_encryption(self) -> _Found:
        self._center = self.observer()
        if why := handshake.failure_reason(self.address, self.tls, self.timeout):
            return "failed", why
        if self.tls is not None:
            return "ok", "TLS"
        if address.is_local(self.address):
            return "ok", "plain text, which does not leave this machine"
        return "warning", "plain text can be read and changed on the network"

    def _check_health(self) -> _Found:
        try:
            said = self._center.health()
        except errors.CenterUnreachableError as error:
            return "failed", f"it is no gRPC server, or rejects the call: {error}"
        if said != "SERVING":
            return "failed", f"the center is {said}: it is going down"
        return "ok", said

    def _check_description(self) -> _Found:
        said = self._described = self._center.describe()
        return "ok", f"protocol {said.protocol}, {said.mode}"

    def _check_release(self) -> _Found:
        said = self._described
        if said.release != __version__:
            return "warning", (
                f"the center runs agn_optax {said.release}, and this end {__version__}"
            )
        words, there = f"agn_optax {__version__} at both ends", dict(said.versions)
        differences = [
            f"{name} {there.get(name)} there and {here} here"
            for name, here in versions.installed().items()
            if there.get(name) != here
        ]
        if not differences:
            return "ok", words
        return "warning", (
            f"{words}, but {', '.join(differences)}: results may differ in the last "
            "place, and equal rules seem different; install the same at both ends"
        )

    def _check_round_trip(self) -> _Found:
        times = [_seconds(self._center.status) for _ in range(_ROUND_TRIPS)]
        median = statistics.median(times)
        said = f"{median * 1e3:.1f} ms"
        if median > _FIRST_WORD:
            return "failed", (
                f"{said}: handshakes beside gRPC have a second, so workers hardly join;"
                " find out what delays packets, or place the center nearer"
            )
        if median > _SLOW:
            return "warning", f"{said}: long periods or overlap=True hide it"
        return "ok", said

    def _check_clocks(self) -> _Found:
        looks = []
        for _ in range(_ROUND_TRIPS):
            begin = time.time()
            clock = self._center.describe().clock
            end = time.time()
            looks.append((end - begin, clock - (begin + end) / 2))
        round_trip, ahead = min(looks)  # the shortest round trip is the most accurate
        said = (
            f"the center's clock is {abs(ahead):.3f} s "
            f"{'ahead' if ahead > 0 else 'behind'}, give or take {round_trip / 2:.3f} s"
        )
        if abs(ahead) - round_trip / 2 <= _CLOCKS:
            return "ok", said
        return "warning", (
            f"{said}: certificates may not be valid, and times in logs do not match; "
            "synchronize both with a time server (chrony, systemd-timesyncd)"
        )

    def _check_schema(self) -> _Found:
        if not self._described.HasField("schema"):
            return "warning", "no parameters yet: no worker has started as chief"
        leaves = wire.from_bytes(self._described.schema).leaves
        size = sum(leaf.nbytes for leaf in leaves)
        return "ok", f"{len(leaves)} leaves, {units.in_bytes(size)}"

    def _check_disk(self) -> _Found:
        status = self._center.status()
        degraded = "" if status["parent"] else status["degraded"]
        free, needed = status["disk_free"], status["disk_needed"]
        if free is None or needed is None:  # not known, or nothing is kept on disk
            kept = degraded or "the center keeps everything that it is set to keep"
            return "warning" if degraded else "ok", kept
        room = (
            f"{units.in_bytes(free)} are free, and the next snapshot with its journal "
            f"takes {units.in_bytes(needed)}"
        )
        if free < needed:
            return "failed", (
                f"{room}: make room there, or the center stops. {degraded}".strip()
            )
        if degraded:
            return "warning", f"{degraded} ({room})"
        if free < 2 * needed:
            return "warning", f"{room}: make room before a second one is written"
        return "ok", room

    def _check_parent(self) -> _Found:
        """Check that a site of a tree has its parent."""
        status = self._center.status()
        if not status["parent"]:
            return "ok", "the center has no parent"
        if degraded := status["degraded"]:
            return "warning", degraded
        return "ok", f"the center is a site of {status['parent']}, connected to it"

    def _check_rates(self) -> _Found:
        """Measure each transport, up and down, through the connections of exchanges."""
        offers = {offer.transport: offer for offer in self._described.offers}
        # In the order in which exchanges prefer them.
        ways: dict[str, TransportSpeed] = {}
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
                        f"{error}. Exchanges from here are as slow as gRPC is: open "
                        f"{offers[name].address} in the firewall, or choose another "
                        "port by serve --direct-address"
                    )
                elif name != "memory" or address.is_local(self.address):
                    missing.append(str(error))
        said = "; ".join([*map(_in_words, ways.values()), *missing])
        way = ways.get("socket") or ways.get("grpc")
        if way is not None:
            result, advice = self._judged(way)
            if result != "ok":
                return result, f"{said}; {advice}"
        return "warning" if missing else "ok", said

    def _judged(self, way: TransportSpeed) -> _Found:
        if way.up is None or way.down is None:
            which = "to the center" if way.up is None else "from the center"
            return "failed", (
                f"short messages pass by {way.transport}, but 16 KiB {which} do not in "
                f"{self.timeout:g} s: something on the path may drop large packets "
                f"(`tracepath {self._host}` shows their largest size)"
            )
        up, down = (way.up, "up, to the center"), (way.down, "down, from the center")
        (slow, which), (fast, _) = sorted((up, down))
        if slow < MIN_RATE:
            return "failed", (
                f"the way {which}, is slower than the {units.in_bytes(MIN_RATE)}/s "
                "below which both ends break transfers off"
            )
        if fast > _UNLIKE * slow and slow < _FAST:
            return "warning", (
                f"the way {which}, is {fast / slow:.1f} times slower than the other "
                "one: check the speed and duplex that its network cards have "
                "negotiated, the cable, and traffic shaping in that direction"
            )
        return "ok", ""

    def _check_rule(self) -> _Found:
        assert self.rule is not None
        fingerprint.compare(self._described.rule, self.rule, self.address)
        return "ok", f"{self.rule.name} at both ends"

    @property
    def _host(self) -> str:
        return address.host(self.address)
