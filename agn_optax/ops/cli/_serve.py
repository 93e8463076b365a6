"""``agn-optax serve``: run a center as a process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Iterator
from types import FrameType

import typer

from agn_optax import errors, service
from agn_optax._signals import handled
from agn_optax.ops.cli import _center_options, _options, _recorded, _rules, _save
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._rules import RuleOptions

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL = 0.2  # seconds between two checks for a signal


def serve(
    rule: RuleOptions,
    center: CenterOptions,
    config: _options.Config = None,
    json: _options.Json = False,
) -> None:
    """Serve a center until SIGTERM or SIGINT drains it.

    Prints the addresses and the token as soon as workers can join. The first worker
    that starts as chief provides the parameters, unless --journal names a directory
    with a center, which then continues. The first options below are those that most
    centers need; the others follow by topic.

    Example: agn-optax serve --rule agn --center-optimizer adam --learning-rate 1e-3
    """
    values = _options.read_file(config, RuleOptions, CenterOptions)
    center = _options.with_defaults(center, values)
    rule = _options.with_defaults(rule, values)
    center_rule = _rules.make(rule)
    settings = _center_options.settings(center)
    if center.save is not None:
        _save.check(center.save)
    address = str(settings.get("address", service.LOOPBACK))
    # Workers that know a fixed address may call at once, so its token is stored first.
    is_fixed = service.address.is_fixed(address)
    token = ""
    if not (center.open or center.tokens):
        token = service.tokens.for_address(address)
    # The token for a browser has the role of an observer only.
    page_token = service.tokens.generate() if token and settings["page"] else ""
    access = _center_options.access(center, token, page_token)
    settings["security"] = dataclasses.replace(settings["security"], access=access)
    _center_options.use_default_device(settings.get("device"))
    signals: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        signal.signal(signum, signal.SIG_DFL)  # the next signal kills

    with (
        handled(_SIGNALS, on_signal),
        _log_to_stderr(),
        contextlib.ExitStack() as stack,
    ):
        if token and is_fixed:
            _store_token(stack, address, token, stays=True)
        server = stack.enter_context(service.serve(center_rule, **settings))
        if (journal := settings["durability"]) is not None:
            _recorded.write(journal.directory, rule, center)
        if token and not is_fixed:
            _store_token(stack, server.address, token)
        if center.address_file is not None:
            stack.enter_context(service.published(server.address, center.address_file))
        version = server.center.version if server.center.core.is_initialized else 0
        text = [
            f"serving {center_rule.name} at {server.address}",
            f"continuing at version {version}, which was on disk" if version else "",
            server.direct_address and f"direct connections at {server.direct_address}",
            token and f"token {token}",
            server.page_address and f"page at {server.page_address}",
            page_token and f"token of the page {page_token}",
        ]
        _options.report(
            json,
            "\n".join(line for line in text if line),
            event="serving",
            rule=center_rule.name,
            address=server.address,
            version=version,
            direct_address=server.direct_address,
            token=token or None,
            page=server.page_address,
            page_token=page_token or None,
        )
        core = server.center.core
        while not (signals or core.wait_until_closed(_POLL)):
            pass
        if signals:
            name = signal.Signals(signals[0]).name
            typer.echo(f"draining after {name}; send it again to end at once", err=True)
    core = server.center.core
    if center.save is not None and core.is_initialized:
        snapshot = server.center.pull()
        _save.write(snapshot.params, center.save)
        typer.echo(f"version {snapshot.version} is in {center.save}", err=True)
    if core.failure:
        raise errors.DurabilityError(core.failure)


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Write what this package logs to stderr, with information such as hashes."""
    log, handler = logging.getLogger("agn_optax"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("agn-optax: %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def _store_token(
    stack: contextlib.ExitStack, address: str, token: str, *, stays: bool = False
) -> None:
    """Store a token for this user's programs: until the end, or longer if ``stays``."""
    try:
        stack.enter_context(service.tokens.token_file(address, token, stays=stays))
    except OSError as error:
        typer.echo(
            "agn-optax: the token cannot be stored for programs on this machine: give "
            f"it to them yourself ({error})",
            err=True,
        )
