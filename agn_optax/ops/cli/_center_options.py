"""Options of a served center, for ``serve`` and for the center of ``launch``."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax

from agn_optax import errors, service
from agn_optax._internal import check, notices
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Journal,
    MessageLimits,
    Mode,
    Synchronous,
    Thresholds,
)
from agn_optax.ops.cli import _options
from agn_optax.ops.cli._options import Group

_SERVED = Group(
    service.ServerSettings,
    *("address", "barrier", "dtype", "device", "direct_address"),
)
_MODES = {
    "asynchronous": Group(Asynchronous),
    "bounded": Group(
        BoundedStaleness,
        names={"versions": "max_versions_behind", "rounds": "max_rounds_ahead"},
        needs="--mode bounded",
    ),
    "synchronous": Group(Synchronous, needs="--mode synchronous"),
}
_DEFAULT_MODE = {group.source: name for name, group in _MODES.items()}[
    type(service.ServerSettings.mode)
]
_JOURNAL = Group(
    Journal,
    prefix="journal_",
    names={"directory": "journal"},
    needs="--journal",
)
_TLS = Group(
    service.Tls,
    *("certificate", "key", "ca"),
    prefix="tls_",
    names={"ca": "tls_client_ca"},
)
_SECURITY = Group(service.Security)
_LIMITS = Group(service.Limits)
_MESSAGES = Group(MessageLimits, prefix="reject_")
_THRESHOLDS = Group(
    Thresholds,
    *(name for name, row in notices.CHECKS.items() if row.observer == "center"),
    prefix="warn_",
)


# Fields of the settings of all modes.
MODE_SETTINGS = {name for group in _MODES.values() for name in group.fields}


@_options.record(
    groups={**_MODES, "messages": _MESSAGES},
    modes=", ".join(_MODES),
    default_mode=_DEFAULT_MODE,
)
class ModeOptions:
    """Options of how a center treats messages.

    Mode:
      mode NAME [that of the tape, or {default_mode}]: When messages are applied:
        {modes}.
      *bounded
      *synchronous

    Message limits:
      *messages
    """

    mode: str | None = None


@_options.record(
    groups={
        "served": _SERVED,
        **_MODES,
        "journal": _JOURNAL,
        "tls": _TLS,
        "security": _SECURITY,
        "limits": _LIMITS,
        "messages": _MESSAGES,
        "thresholds": _THRESHOLDS,
    },
    everyday=("address", "journal", "save", "mode", "tokens", "page"),
    modes=", ".join(_MODES),
    default_mode=_DEFAULT_MODE,
    loopback=service.LOOPBACK,
)
class CenterOptions:
    """Options of a served center, without its rule.

    Center:
      *served
      address_file FILE: File to write the address to, on a disk that the workers share.
        Workers connect to file:FILE, and find the center again after it has moved.

    Durability:
      *journal
      save DIRECTORY: Directory for the parameters at the end, written as a checkpoint
        that Orbax reads; needs the extra flax.

    Mode:
      mode NAME [{default_mode}]: When messages are applied: {modes}.
      *bounded
      *synchronous

    Access:
      tokens FILE: File of the allowed callers, with a line for each: roles, a worker's
        name (* for any) and a token. Without a file, a token is made and printed;
        programs of the same user on this machine find this token by themselves.
      open: Allow every caller; beyond this machine only with --tls-client-ca or
        --insecure.
      *security

    TLS:
      *tls

    Further settings of the center:
      direct [direct]: Also accept exchanges outside gRPC, on another port and in shared
        memory.
      page [no-page]: Serve a page that shows the center's status in a browser, and
        /metrics for Prometheus, at --page-address.
      page_address HOST:PORT [{loopback} with --page]: Address of the page; implies
        --page. Port 0 takes a free port.

    Limits:
      *limits

    Message limits:
      *messages

    Thresholds of what the log and the status say; 0 says nothing:
      *thresholds
    """

    address_file: pathlib.Path | None = None
    save: pathlib.Path | None = None
    mode: str | None = None
    tokens: pathlib.Path | None = None
    open: bool | None = None
    direct: bool | None = None
    page: bool | None = None
    page_address: str | None = None


def settings(options: CenterOptions) -> dict[str, Any]:
    """Return the arguments of `agn_optax.service.serve`, without the rule.

    `access` returns the part of ``security`` that names the callers.

    Raises:
      InvalidArgumentError: options exclude each other, or one is out of range.
    """
    for option, is_given, excluded in (
        ("--open", options.open, "tokens"),
        ("--no-page", options.page is False, "page_address"),
        ("--no-direct", options.direct is False, "direct_address"),
    ):
        if is_given:
            _options.reject(
                options, f"and {option} exclude each other", only=(excluded,)
            )
    arguments: dict[str, Any] = {
        "page": options.page_address or (service.LOOPBACK if options.page else None),
        "mode": mode_of(options),
        "durability": _JOURNAL.build_if_given("directory", options),
        "limits": _LIMITS.build(options, messages=message_limits(options)),
        "thresholds": _THRESHOLDS.build(options),
        "security": _SECURITY.build(options, tls=_tls_of(options)),
        **_SERVED.given(options),
    }
    if options.direct is False:
        arguments["direct_address"] = False
    return arguments


def use_default_device(device: str | None = None) -> None:
    """Leave the memory of accelerators to the workers on this machine.

    Args:
      device: device of the center; None for the default one.
    """
    default = service.ServerSettings.device
    if not os.environ.get("JAX_PLATFORMS") and device in (None, default):
        jax.config.update("jax_platforms", default)


def access(
    options: CenterOptions, operator_token: str = "", page_token: str = ""
) -> service.Access | None:
    """Return the callers that the center allows; None allows every caller.

    The tokens come from the options, the environment and the arguments.

    Args:
      options: options of the center.
      operator_token: a new token with the roles chief and operator; "" for none.
      page_token: a new token for the page, with the role observer; "" for none.

    Raises:
      InvalidArgumentError: tokens cannot be read.
    """
    if options.open:
        return None
    files = [] if options.tokens is None else [options.tokens]
    callers = [
        os.environ.get(service.tokens.TOKENS, ""),
        f"chief,operator * {operator_token}" if operator_token else "",
        f"observer * {page_token}" if page_token else "",
    ]
    return service.Access(*files, *(lines.encode() for lines in callers if lines))


def message_limits(options: CenterOptions | ModeOptions) -> MessageLimits:
    """Return the limits on messages that the options describe."""
    return _MESSAGES.build(options)


def mode_of(options: CenterOptions | ModeOptions) -> Mode:
    """Return the mode that the options describe.

    Raises:
      InvalidArgumentError: options do not apply to the mode, or one is out of range.
    """
    name = options.mode or _DEFAULT_MODE
    chosen = check.choose(name, _MODES, "--mode")
    for other, group in _MODES.items():
        if other != name:
            group.reject(options, f"applies to --mode {other}, and the mode is {name}")
    if name == "bounded" and not chosen.given(options):
        raise errors.InvalidArgumentError(
            "--mode bounded needs --max-versions-behind, --max-rounds-ahead or both"
        )
    return chosen.build(options)


def _tls_of(options: CenterOptions) -> service.Tls | None:
    tls: service.Tls = _TLS.build(options)
    if tls.certificate is None:
        _TLS.reject(options, "needs --tls-certificate and --tls-key")
        return None
    tls.server_credentials()  # raises for bad files before anything is started
    return tls
