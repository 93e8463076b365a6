"""``agn-optax doctor``: check a center and the network path to it."""

from __future__ import annotations

from typing import Annotated

import typer

from agn_optax import service
from agn_optax.ops.cli import _options, _rules, _status, _table
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.cli._status import Reached
from agn_optax.ops.doctor._checks import Checks

Interface = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Network interface of this machine that exchanges are expected to use.",
    ),
]
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    address: _status.Address,
    reached: Reached,
    rule: RuleOptions,
    config: _options.Config = None,
    timeout: _status.Timeout = 5.0,
    interface: Interface = None,
    json: _options.Json = False,
) -> None:
    """Check the network path to a center, and the center itself, step by step.

    Checks that depend on a failed check are skipped. If a rule is given, it is compared
    with the center's.
    """
    rule = _options.with_defaults(
        rule, _options.read_file(config, RuleOptions, CenterOptions)
    )
    checks = Checks(
        address,
        lambda: _status.observer(address, reached, timeout),
        _rules.make(rule) if _options.given(rule) else None,
        timeout=timeout,
        tls=_status.settings(reached)["tls"],
        interface=service.ExpectedLink(interface=interface).interface,
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
            console.print(finding.message, markup=False, soft_wrap=True)
    failed = sum(finding.result == "failed" for finding in findings)
    if json:
        checked = [finding._asdict() for finding in findings]
        _options.print_json({"address": address, "ok": not failed, "checks": checked})
    elif failed:
        typer.echo(f"agn-optax: {failed} of {len(findings)} checks failed", err=True)
    if failed:
        raise typer.Exit(1)
