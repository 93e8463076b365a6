"""``agn-optax doctor``: what is wrong between here and a center."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import typer

from agn_optax import errors
from agn_optax._version import __version__
from agn_optax.cli import _options, _rules, _status, _table
from agn_optax.cli._center_options import CenterOptions
from agn_optax.cli._rules import RuleOptions
from agn_optax.cli._status import Reached
from agn_optax.rules import Rule
from agn_optax.service import Observer, Tls, address, fingerprint, handshake, wire

_CLOCKS = 1.0  # seconds that two clocks may differ
_SLOW = 0.25  # seconds: a round trip that is felt at every exchange
_ROUND_TRIPS = 5

Result = Literal["ok", "warning", "failed"]
_Found = tuple[Result, str]
# Without what these are about, there is nothing to check further.
_NEEDED = ("address", "connection", "encryption", "health", "description")
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    address: _status.Address,
    reached: Reached,
    rule: RuleOptions,
    config: _options.Config = None,
    timeout: _status.Timeout = 5.0,
    client_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="timeout= that workers give to connect()."),
    ] = 30.0,
    json: _options.Json = False,
) -> None:
    """Check the way to a center, and the center, one thing after the other.

    Where a check fails that others need, those are left out. With a rule, it is
    compared with the center's.
    """
    rule = _options.filled(rule, _options.read(config, RuleOptions, CenterOptions))
    checks = Checks(
        address,
        lambda: _status.observer(address, reached, timeout),
        _rules.make(rule) if _options.given(rule) else None,
        timeout=timeout,
        client_timeout=client_timeout,
        tls=_status.tls_of(reached),
    )
    console = _table.console()
    findings = []
    for finding in checks.run():
        findings.append(finding)
        if not json:
            console.print(
                f"[{_STYLES[finding.result]}]{finding.result:<8}[/]{finding.check:<12}",
                end="",
            )
            console.print(finding.said, markup=False, soft_wrap=True)
    failed = sum(finding.result == "failed" for finding in findings)
    if json:
        checked = [finding._asdict() for finding in findings]
        _options.print_json({"address": address, "ok": not failed, "checks": checked})
    elif failed:
        typer.echo(f"agn-optax: {failed} of {len(findings)} checks failed", err=True)
    if failed:
        raise typer.Exit(1)


class Finding(NamedTuple):
    """What one check found."""

    check: str
    result: Result
    said: str


def _seconds(call: Callable[[], object]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


@dataclasses.dataclass
class Checks:
    """The checks of one center.

    Args:
      address: of the center.
      observer: opens a connection to it.
      rule: what to compare its rule with; None for nothing.
      timeout: seconds that a call may take.
      client_timeout: seconds after which workers give up.
      tls: of this end; None for plain text.
    """

    address: str
    observer: Callable[[], Observer]
    rule: Rule | None
    _: dataclasses.KW_ONLY
    timeout: float
    client_timeout: float
    tls: Tls | None
    _center: Any = dataclasses.field(init=False, default=None)
    _described: Any = dataclasses.field(init=False, default=None)

    def run(self) -> Iterator[Finding]:
        """All checks, in the order in which they stand below, as they are made.

        Ends at one that the rest needs.
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
        address.check(self.address)
        if self.address.startswith("unix:"):
            return "ok", f"{self.address} is a socket of this machine"
        host, port = self._host_and_port()
        if port == 0:
            return "failed", (
                "with port 0 a server takes any; give the one that it printed"
            )
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return "failed", f"{host} is not found: {error}"
        numbers = dict.fromkeys(str(each[4][0]) for each in found)
        return "ok", f"{self.address} is {', '.join(numbers)}, port {port}"

    def _check_connection(self) -> _Found:
        try:
            seconds = _seconds(
                lambda: handshake.connected(self.address, self.timeout).close()
            )
        except OSError as error:
            return "failed", (
                f"nobody listens at {self.address}: {error}. Is the center there, and "
                "does a firewall let you through?"
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
            "plain text leaves this machine: anybody on the way can read and change it"
        )

    def _check_health(self) -> _Found:
        try:
            said = self._center.health()
        except errors.CenterUnreachableError as error:
            return "failed", (
                f"what listens there is no gRPC server, or refuses us: {error}"
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
                f"the center runs agn_optax {said.release}, and here is {__version__}"
            )
        return "ok", f"agn_optax {__version__} at both ends"

    def _check_round_trip(self) -> _Found:
        times = [_seconds(self._center.status) for _ in range(_ROUND_TRIPS)]
        median = statistics.median(times)
        said = f"{median * 1e3:.1f} ms"
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
        round_trip, ahead = min(looks)  # the quickest tells it best
        said = (
            f"the center's is {abs(ahead):.3f} s {'ahead' if ahead > 0 else 'behind'}, "
            f"give or take {round_trip / 2:.3f} s"
        )
        return ("warning" if abs(ahead) > _CLOCKS else "ok"), said

    def _check_schema(self) -> _Found:
        if not self._described.HasField("schema"):
            return "warning", "no parameters yet: no worker has started as chief"
        schema = wire.from_proto(self._described.schema)
        if schema.hash != self._described.schema_hash:
            return "failed", (
                f"the hash of the leaves is {schema.hash.hex()}, and the center says "
                f"{self._described.schema_hash.hex()}"
            )
        size = sum(leaf.nbytes for leaf in schema.leaves)
        return "ok", f"{len(schema.leaves)} leaves, {_table.size(size)}"

    def _check_disk(self) -> _Found:
        if said := self._center.status()["degraded"]:
            return "warning", said
        return "ok", "whatever the center was told to keep there, it keeps"

    def _check_ports(self) -> _Found:
        """Whether exchanges can take the way beside gRPC that others need."""
        direct = self._center.status()["direct_address"]
        if not direct:
            return "ok", "the center has no port for exchanges beside that of gRPC"
        host, port = address.host(self.address), int(direct.rpartition(":")[2])
        try:
            socket.create_connection((host, port), self.timeout).close()
        except OSError as error:
            return "warning", (
                f"nobody listens at {host}:{port}: {error}. Exchanges from here are as "
                "slow as gRPC is: let that port through, or give serve another one by "
                "--direct-address"
            )
        return "ok", f"exchanges go to {host}:{port}"

    def _check_timeouts(self) -> _Found:
        waiting, lease = self._described.waiting_interval, self._described.lease
        options = dict(address.OPTIONS)
        keepalive = (
            options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]
        ) / 1000
        client = self.client_timeout
        said = (
            f"signs of life every {waiting:g} s, lost hosts are noticed after "
            f"{keepalive:g} s, workers give up after {client:g} s, and are given up "
            f"{lease:g} s after their connection"
        )
        if waiting >= client:
            return "failed", (
                f"{said}: workers that wait would give up a center that is well; "
                f"give connect() a timeout above {waiting:g}"
            )
        if lease <= waiting:
            return "warning", f"{said}: hardly time to come back; serve --lease is it"
        if keepalive >= client:
            return "warning", f"{said}: before they notice"
        return "ok", said

    def _check_rule(self) -> _Found:
        assert self.rule is not None
        fingerprint.compare(self._described.rule, self.rule, self.address)
        return "ok", f"{self.rule.name} at both ends"

    def _host_and_port(self) -> tuple[str, int]:
        return address.host(self.address), int(self.address.rpartition(":")[2])
