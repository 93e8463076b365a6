"""The checks of ``agn-optax doctor``."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from agn_optax import errors
from agn_optax._version import __version__
from agn_optax.ops import units
from agn_optax.ops.doctor import _network
from agn_optax.rules import Rule
from agn_optax.service import (
    LEAST_RATE,
    Observer,
    Tls,
    Way,
    address,
    fingerprint,
    handshake,
    path,
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
# Factors by which another interface must be faster to be recommended: where the network
# is the bottleneck, and where processors may be.
_BETTER, _MUCH_BETTER = 1.5, 4.0
_BACK = 5.0  # seconds from an outage until workers have joined again
_LAST = 1.0  # seconds that a center takes beyond its grace
# Packages whose versions affect rounding.
_ARITHMETIC = ("jax", "jaxlib", "optax")
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


def _in_words(way: Way) -> str:
    """Describe the rates and the round trip of a transport."""

    def said(rate: float | None) -> str:
        return "nothing" if rate is None else f"{units.in_bytes(rate)}/s"

    if way.transport == "memory":
        return f"memory {said(way.up)} each way"
    return (
        f"{way.transport} {said(way.up)} up and {said(way.down)} down, "
        f"{way.round_trip * 1e3:.2g} ms"
    )


def _least(way: Way) -> float:
    """Return the rate of the slower direction, in bytes per second."""
    return min(way.up or 0.0, way.down or 0.0)


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
      client_timeout: seconds of silence after which calls of workers time out.
      give_up: seconds that workers wait for a lost center.
      stop_grace: seconds from the signal that ends the center until its process manager
        kills it; None if unknown.
      tls: TLS settings of this end; None for plain text.
    """

    address: str
    observer: Callable[[], Observer]
    rule: Rule | None
    _: dataclasses.KW_ONLY
    timeout: float
    client_timeout: float
    give_up: float
    stop_grace: float | None
    tls: Tls | None
    _center: Any = dataclasses.field(init=False, default=None)
    _described: Any = dataclasses.field(init=False, default=None)
    # By transport, in the order in which exchanges prefer them.
    _ways: dict[str, Way] = dataclasses.field(init=False, default_factory=dict)

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
        host, port = self._host_and_port()
        if port == 0:
            return "failed", (
                "with port 0 a server takes any free port; give the one that it printed"
            )
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return "failed", f"{host} is not found: {error}"
        numbers = dict.fromkeys(str(each[4][0]) for each in found)
        return "ok", f"{self.address} is {', '.join(numbers)}, port {port}"

    def _check_proxy(self) -> _Found:
        proxy = _network.proxy_of(self.address)
        if proxy is None:
            return "ok", "gRPC uses no proxy for it"
        said = f"{proxy.variable} sends gRPC through {proxy.host}:{proxy.port}"
        host = address.host(self.address)
        instead = f"add {host} to no_proxy, or unset {proxy.variable}"
        if why := _network.why_not_through(proxy, self.address, self.timeout):
            return "failed", (
                f"{said}, which does not connect to the center: {why}; {instead}"
            )
        return "warning", f"{said}, but exchanges by sockets bypass it; {instead}"

    def _check_connection(self) -> _Found:
        try:
            seconds = _seconds(
                lambda: handshake.connected(self.address, self.timeout).close()
            )
        except OSError as error:
            return "failed", (
                f"nothing listens at {self.address}: {error}. Is the center running, "
                "and does a firewall let you through?"
            )
        return "ok", f"connected in {seconds * 1e3:.1f} ms"

    def _check_encryption(self) -> _Found:
        self._center = self.observer()
        if why := handshake.why_not(self.address, self.tls, self.timeout):
            return "failed", why
        if self.tls is not None:
            return "ok", "TLS"
        if address.is_local(self.address):
            return "ok", "plain text, which does not leave this machine"
        return "warning", (
            "plain text leaves this machine: it can be read and changed on the network"
        )

    def _check_health(self) -> _Found:
        try:
            said = self._center.health()
        except errors.CenterUnreachableError as error:
            return "failed", (
                "the program that listens there is no gRPC server, or rejects the "
                f"call: {error}"
            )
        if said != "SERVING":
            return "failed", f"the center is {said}: it is going down"
        return "ok", said

    def _check_description(self) -> _Found:
        said = self._described = self._center.describe()
        return "ok", f"protocol {said.protocol}, {said.mode}"

    def _check_release(self) -> _Found:
        said = self._described
        if said.protocol != address.PROTOCOL:
            return "failed", (
                f"the center speaks version {said.protocol} of the protocol, and this "
                f"release {address.PROTOCOL}"
            )
        if said.release != __version__:
            return "warning", (
                f"the center runs agn_optax {said.release}, and this end {__version__}"
            )
        here, there = versions.installed(), dict(said.versions)
        differences = [
            f"{name} {there[name]} there and {here[name]} here"
            for name in here
            if there.get(name, here[name]) != here[name]
        ]
        if not differences:
            return "ok", f"agn_optax {__version__} at both ends"
        words = f"agn_optax {__version__} at both ends, but {', '.join(differences)}"
        if any(there.get(name, here[name]) != here[name] for name in _ARITHMETIC):
            return "warning", (
                f"{words}: their results may differ in the last place, and equal rules "
                "may be taken for different ones; install the same at both ends"
            )
        return "ok", words

    def _check_round_trip(self) -> _Found:
        times = [_seconds(self._center.status) for _ in range(_ROUND_TRIPS)]
        median = statistics.median(times)
        said = f"{median * 1e3:.1f} ms"
        if median > _FIRST_WORD:
            return "failed", (
                f"{said}: connections beside gRPC have a second for the first message "
                "of the handshake, so workers hardly join; find out what delays "
                "packets, or place the center nearer"
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
            f"{said}: certificates may not be valid here or there, and the times in "
            "logs do not match; synchronize both with a time server (chrony, "
            "systemd-timesyncd)"
        )

    def _check_schema(self) -> _Found:
        if not self._described.HasField("schema"):
            return "warning", "no parameters yet: no worker has started as chief"
        schema = wire.from_bytes(self._described.schema)
        if schema.hash != self._described.schema_hash:
            return "failed", (
                f"the hash of the leaves is {schema.hash.hex()}, and the center says "
                f"{self._described.schema_hash.hex()}"
            )
        size = sum(leaf.nbytes for leaf in schema.leaves)
        return "ok", f"{len(schema.leaves)} leaves, {units.in_bytes(size)}"

    def _check_disk(self) -> _Found:
        status = self._center.status()
        free, needed = status["disk_free"], status["disk_needed"]
        room = ""
        if free is not None and needed is not None:
            room = (
                f"{units.in_bytes(free)} are free, and the next snapshot with its "
                f"journal takes {units.in_bytes(needed)}"
            )
            if free < needed:
                return "failed", (
                    f"{room}: make room there, or the center stops. "
                    f"{status['degraded']}".strip()
                )
        said = status["degraded"]
        if said and not status["parent"]:
            return "warning", f"{said} ({room})" if room else said
        if room and free < 2 * needed:
            return "warning", f"{room}: make room before a second one is written"
        kept = "the center keeps everything on disk that it is set to keep"
        return "ok", f"{kept}; {room}" if room else kept

    def _check_parent(self) -> _Found:
        """Check that a site of a tree has its parent."""
        status = self._center.status()
        if not status["parent"]:
            return "ok", "the center has no parent"
        if said := status["degraded"]:
            return "warning", said
        return "ok", f"the center is a site of {status['parent']}, connected to it"

    def _check_ports(self) -> _Found:
        """Check that exchanges can use the port beside gRPC's."""
        direct = self._center.status()["direct_address"]
        if not direct:
            return "ok", "the center has no port for exchanges beside that of gRPC"
        host, port = address.host(self.address), int(direct.rpartition(":")[2])
        try:
            seconds = _seconds(
                lambda: socket.create_connection((host, port), self.timeout).close()
            )
        except OSError as error:
            swallowed = isinstance(error, TimeoutError)
            return "warning", (
                f"nothing listens at {host}:{port}: {error}"
                f"{', so a firewall drops the packets to it' if swallowed else ''}. "
                "Exchanges from here are as slow as gRPC is: open that port in the "
                "firewall, or choose another one by serve --direct-address"
            )
        return (
            "ok",
            f"exchanges go to {host}:{port}, connected in {seconds * 1e3:.1f} ms",
        )

    def _check_rates(self) -> _Found:
        """Measure each transport, up and down, through the connections of exchanges."""
        offered = {offer.transport for offer in self._described.offers} | {"grpc"}
        missing = []
        for name in _TRANSPORTS:
            if name not in offered:
                continue
            try:
                self._ways[name] = self._center.measure(name)
            except (errors.NotAllowedError, errors.ProtocolError) as error:
                return "warning", f"the rates cannot be measured: {error}"
            except errors.CenterUnreachableError as error:
                if name != "memory" or address.is_local(self.address):
                    missing.append(str(error))
        said = "; ".join([*map(_in_words, self._ways.values()), *missing])
        worst: Result = "warning" if missing else "ok"
        way = self._ways.get("socket") or self._ways.get("grpc")
        if way is None:
            return worst, said
        result, advice = self._judged(way)
        if result == "ok":
            return worst, said
        return result, f"{said}; {advice}"

    def _judged(self, way: Way) -> _Found:
        up, down = way.up, way.down
        if up is None or down is None:
            which = "to the center" if up is None else "from the center"
            return "failed", (
                f"short messages pass by {way.transport}, but 16 KiB {which} do not in "
                f"{self.timeout:g} s"
            )
        slow, which = min((up, "up, to the center"), (down, "down, from the center"))
        if slow < LEAST_RATE:
            return "failed", (
                f"the way {which}, is slower than the {units.in_bytes(LEAST_RATE)}/s "
                "below which both ends break transfers off"
            )
        unlike = max(up, down) / slow
        if unlike > _UNLIKE and slow < _FAST:
            return "warning", (
                f"the way {which}, is {unlike:.1f} times slower than the other one: "
                "check the speed and duplex that its network cards have negotiated, "
                "the cable, and traffic shaping in that direction"
            )
        return "ok", ""

    def _check_interface(self) -> _Found:
        """Check whether a network interface other than the one in use is faster."""
        if address.is_local(self.address):
            return "ok", "nothing leaves this machine"
        own = self._path()
        if own is None:
            return "warning", "this system does not report which interface is used"
        route = _network.interface_of(own)
        name = route.name if route else "an unknown interface"
        mbit = f", which reports {route.mbit} Mbit/s" if route and route.mbit else ""
        said = f"packets leave by {name} ({own.source}){mbit}"
        way = self._ways.get("socket")
        tried, better = [], []
        for each in _network.others(own, route):
            where = f"{each.name} ({', '.join(each.addresses)})"
            if way is None:
                tried.append(f"{where} may reach the center as well")
                continue
            try:
                other = self._center.measure(
                    "socket", route=path.Route(interface=each.name)
                )
            except errors.AgnOptaxError:
                tried.append(f"{where} does not reach the center")
                continue
            tried.append(f"{where} reaches the center: {_in_words(other)}")
            least = _BETTER if _least(way) < _FAST else _MUCH_BETTER
            if _least(other) > least * _least(way):
                better.append((_least(other), each.name))
        said = "; ".join([said, *tried])
        if better:
            _, best = max(better)
            return "warning", (
                f"{said}. A faster interface is not used: route {self._host()} by "
                f"{best} (`ip route get {self._host()}` shows the route), or give "
                "workers the address that the center has in that network"
            )
        return "ok", said

    def _check_packets(self) -> _Found:
        """Check that packets of the connection's maximum size come through."""
        if address.is_local(self.address):
            return "ok", "nothing leaves this machine"
        own = self._path()
        if own is None or not own.segment:
            return "warning", "this system does not report the maximum size of packets"
        more = _network.headers(own)
        route = _network.interface_of(own)
        mtu = own.mtu if route is None else route.mtu
        name = "this end's interface" if route is None else route.name
        said = f"segments of {own.segment} bytes, and {name} has an MTU of {mtu}"
        if own.mtu < mtu:
            said += f", the path one of {own.mtu}"
        if own.segment + more < min(own.mtu, mtu):
            said += (
                f"; the center's end, or the route, takes {own.segment + more} at most"
            )
        way = self._ways.get("socket") or self._ways.get("grpc")
        if way is None:
            return "warning", f"{said}; whether they pass could not be measured"
        if way.up and way.down:
            return "ok", f"{said}; they pass both ways"
        which = "to the center" if not way.up else "from the center"
        which = "either way" if not (way.up or way.down) else which
        less = _network.largest_segment(self._center, own, self.timeout)
        if less is None:
            return "failed", (
                f"{said}; they do not pass {which}, nor do shorter ones: something on "
                "the path drops all packets but tiny ones"
            )
        return "failed", (
            f"{said}; they do not pass {which}, and those of {less} bytes do. "
            f"Something on the path takes packets of about {less + more} bytes at most "
            "and does not report it: set that MTU (`ip link set dev "
            f"{name} mtu {less + more}`, or of the tunnel), let ICMP through, or set "
            "net.ipv4.tcp_mtu_probing=1 at both ends"
        )

    def _check_timeouts(self) -> _Found:
        waiting, lease = self._described.waiting_interval, self._described.lease
        options = dict(address.OPTIONS)
        keepalive = (
            options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]
        ) / 1000
        client = self.client_timeout
        said = (
            f"waiting workers hear from the center every {waiting:g} s, lost hosts are "
            f"noticed after {keepalive:g} s, workers give up a silent center after "
            f"{client:g} s, and the center gives up workers {lease:g} s after their "
            "connection was lost"
        )
        if waiting >= client:
            return "failed", (
                f"{said}: workers that wait would give up a healthy center; give "
                f"connect() a timeout above {waiting:g}"
            )
        if lease <= waiting:
            return "warning", (
                f"{said}: workers hardly have time to return; give serve a longer "
                "--lease"
            )
        if lease < _BACK:
            return "warning", (
                f"{said}: after a short outage workers are back within {_BACK:g} s, "
                "when they are given up already; give serve a longer --lease"
            )
        if keepalive >= client:
            return "warning", (
                f"{said}: workers give up a center before they notice a lost host"
            )
        return "ok", said

    def _check_grace(self) -> _Found:
        """Check the times that must exceed that of an exchange of this model."""
        described = self._described
        way = next(iter(self._ways.values()), None)
        said, exchange, message = "", 0.0, 0.0
        if described.HasField("schema") and way is not None and way.up and way.down:
            size = wire.from_bytes(described.schema).size
            exchange, message = way.seconds(size, size), way.seconds(size, 0)
            said = (
                f"an exchange of this model takes {exchange:.3g} s by {way.transport}, "
                f"{size / way.up:.3g} up and {size / way.down:.3g} down"
            )
        if described.HasField("grace") and described.grace <= message:
            return "warning", (
                f"{said}, and rounds close {described.grace:g} s after the first "
                "message of a quorum: the second message is late; give serve a longer "
                "--grace"
            )
        if not described.HasField("stop_grace"):
            return "ok", said or "this center does not report how long it takes to end"
        ends = described.stop_grace + _LAST
        crowd = exchange * max(1, len(self._center.status()["workers"]))
        said = f"{said}; the center ends within {ends:g} s".removeprefix("; ")
        if crowd > described.stop_grace:
            return "warning", (
                f"{said}, and the answers to all of its workers at once take "
                f"{crowd:.3g} s: give `Server.stop` a longer grace"
            )
        if self.stop_grace is not None and self.stop_grace < ends:
            return "failed", (
                f"{said}, and is killed after {self.stop_grace:g} s: give it {ends:g} "
                "at least (TimeoutStopSec, terminationGracePeriodSeconds)"
            )
        if self.give_up <= ends:
            return "warning", (
                f"{said}, and workers give up {self.give_up:g} s after they lost it, "
                "before it can be started again; give Worker() a longer give_up"
            )
        return "ok", said

    def _check_rule(self) -> _Found:
        assert self.rule is not None
        fingerprint.compare(self._described.rule, self.rule, self.address)
        return "ok", f"{self.rule.name} at both ends"

    def _path(self) -> path.Path | None:
        """Return the path of the exchanges' connection, or of one to gRPC's port."""
        way = self._ways.get("socket")
        own = None if way is None else way.path
        return own or _network.path_to(self.address, self.timeout)

    def _host(self) -> str:
        return address.host(self.address)

    def _host_and_port(self) -> tuple[str, int]:
        return self._host(), int(self.address.rpartition(":")[2])
