"""``agn-optax doctor``: what is wrong between here and a center."""

from __future__ import annotations

from typing import Annotated

import typer

from agn_optax.cli import _checks, _options, _rules, _status, _table
from agn_optax.cli._center_options import CenterOptions
from agn_optax.cli._rules import RuleOptions
from agn_optax.cli._tls import ClientTls

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    address: _status.Address,
    tls: ClientTls,
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
    checks = _checks.Checks(
        address,
        lambda: _status.observer(address, tls, timeout),
        _rules.make(rule) if _options.given(rule) else None,
        timeout=timeout,
        client_timeout=client_timeout,
        encrypted=tls.tls_ca is not None,
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
