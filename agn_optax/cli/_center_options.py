"""How a center is served: options of ``serve``, and of ``launch`` for its own."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import typer

from agn_optax import errors, service
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Durability,
    Journal,
    Mode,
    Snapshots,
    Synchronous,
)
from agn_optax.cli import _options, _tls
from agn_optax.rules import Rule

_CENTER = "Center"
_MODE = "Mode"
_DURABILITY = "Durability"
_PARENT = "Parent"

# Options that `agn_optax.service.serve` has under the same name.
_AS_THEY_ARE = (
    *("address", "barrier", "max_workers", "lease", "dtype", "device"),
    *("direct", "direct_address", "insecure"),
)
_MODES: dict[str, Any] = {
    "asynchronous": Asynchronous,
    "bounded": BoundedStaleness,
    "synchronous": Synchronous,
}
# Options by their modes, with the names that the modes have for them.
_OF_MODES = {
    "max_versions_behind": ("bounded", "versions"),
    "max_rounds_ahead": ("bounded", "rounds"),
    "quorum": ("synchronous", "quorum"),
    "grace": ("synchronous", "grace"),
    "late": ("synchronous", "late"),
}
# ... and by what they say more of.
_OF_DURABILITIES = {
    "journal_size": ("journal", "size"),
    "snapshot_seconds": ("snapshots", "seconds"),
    "snapshot_exchanges": ("snapshots", "exchanges"),
    "snapshots_kept": ("snapshots", "keep"),
}


def _option(panel: str, help_: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(help=help_, metavar=metavar, rich_help_panel=panel, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CenterOptions:
    """How a center is served; its rule is apart."""

    address: Annotated[
        str | None,
        _option(
            _CENTER,
            "Where to listen; port 0 takes one that is free.",
            "HOST:PORT|unix:PATH",
            show_default="127.0.0.1:0",
        ),
    ] = None
    barrier: Annotated[
        int | None,
        _option(_CENTER, "Workers that must have joined before any of them starts."),
    ] = None
    max_workers: Annotated[
        int | None,
        _option(_CENTER, "Workers that may be there at a time.", show_default="64"),
    ] = None
    lease: Annotated[
        float | None,
        _option(
            _CENTER,
            "Seconds after which a worker that lost its connection is given up.",
            show_default="10",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _option(_CENTER, "Floating dtype of the center, whatever its workers have."),
    ] = None
    device: Annotated[
        str | None,
        _option(_CENTER, "Platform the center lives on.", show_default="cpu"),
    ] = None
    direct: Annotated[
        bool | None,
        typer.Option(
            "--direct/--no-direct",
            help="Exchanges beside gRPC too, on another port and in shared memory.",
            show_default="direct",
            rich_help_panel=_CENTER,
        ),
    ] = None
    direct_address: Annotated[
        str | None,
        _option(
            _CENTER,
            "Where that other port is; workers reach it at the host of --address.",
            "HOST:PORT",
            show_default="a port that is free",
        ),
    ] = None
    mode: Annotated[
        str | None,
        _option(
            _MODE,
            f"When messages are applied: {', '.join(_MODES)}.",
            "MODE",
            show_default="asynchronous",
        ),
    ] = None
    max_versions_behind: Annotated[
        int | None,
        _option(_MODE, "Of bounded: a message with an older anchor is dropped."),
    ] = None
    max_rounds_ahead: Annotated[
        int | None,
        _option(_MODE, "Of bounded: a worker further ahead of the slowest waits."),
    ] = None
    quorum: Annotated[
        int | None,
        _option(
            _MODE, "Of synchronous: messages that are enough once the grace is over."
        ),
    ] = None
    grace: Annotated[
        float | None,
        _option(_MODE, "Of synchronous: seconds from a round's first message."),
    ] = None
    late: Annotated[
        str | None,
        _option(
            _MODE,
            "Of synchronous: what becomes of a message that missed its round.",
            "next|weighted|drop",
            show_default="next",
        ),
    ] = None
    journal: Annotated[
        pathlib.Path | None,
        _option(
            _DURABILITY,
            "Where every exchange is on disk before it is answered; a center that is "
            "found there goes on.",
            "DIRECTORY",
        ),
    ] = None
    journal_size: Annotated[
        int | None,
        _option(
            _DURABILITY,
            "Of --journal: bytes after which a snapshot takes its place.",
            show_default="1 GiB, or 4 snapshots",
        ),
    ] = None
    snapshots: Annotated[
        pathlib.Path | None,
        _option(
            _DURABILITY,
            "Where the center is written from time to time; one that is found there "
            "goes on.",
            "DIRECTORY",
        ),
    ] = None
    snapshot_seconds: Annotated[
        float | None,
        _option(
            _DURABILITY,
            "Of --snapshots: between two of them.",
            show_default="60, without --snapshot-exchanges",
        ),
    ] = None
    snapshot_exchanges: Annotated[
        int | None,
        _option(_DURABILITY, "Of --snapshots: exchanges between two of them."),
    ] = None
    snapshots_kept: Annotated[
        int | None,
        _option(_DURABILITY, "Of --snapshots: how many stay there.", show_default="2"),
    ] = None
    parent: Annotated[
        str | None,
        _option(
            _PARENT, "A center that this one is a worker of.", "HOST:PORT|unix:PATH"
        ),
    ] = None
    parent_period: Annotated[
        int | None, _option(_PARENT, "Exchanges here between two with the parent.")
    ] = None
    parent_tls_ca: Annotated[
        pathlib.Path | None,
        _option(_PARENT, "Who vouches for the parent.", "FILE.pem"),
    ] = None
    tls_certificate: _tls.Certificate = None
    tls_key: _tls.Key = None
    tls_client_ca: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Who vouches for workers, which must then have certificates.",
            metavar="FILE.pem",
            rich_help_panel="TLS",
        ),
    ] = None
    insecure: _tls.Insecure = None


def settings(options: CenterOptions) -> dict[str, Any]:
    """The arguments of `agn_optax.service.serve`, but for its rule and parent.

    Raises:
      InvalidArgumentError: options do not go together.
    """
    values = _options.given(options)
    made = {name: values[name] for name in _AS_THEY_ARE if name in values}
    return made | {
        "mode": _mode(options),
        "tls": _tls.server(
            options.tls_certificate, options.tls_key, options.tls_client_ca
        ),
        "durability": _durability(options),
    }


def _durability(options: CenterOptions) -> Durability | None:
    if options.journal is not None and options.snapshots is not None:
        raise errors.InvalidArgumentError(
            "--journal and --snapshots exclude each other: a journal has snapshots"
        )
    values = _options.given(options)
    own: dict[str, Any] = {}
    for field, (kind, argument) in _OF_DURABILITIES.items():
        if field in values:
            if kind not in values:
                raise errors.InvalidArgumentError(
                    f"{_options.option(field)} needs {_options.option(kind)}"
                )
            own[argument] = values[field]
    if options.journal is not None:
        return Journal(options.journal, **own)
    if options.snapshots is not None:
        if "exchanges" in own:  # then time is no rule, unless it was asked for
            own.setdefault("seconds", None)
        return Snapshots(options.snapshots, **own)
    return None


def _mode(options: CenterOptions) -> Mode:
    name = options.mode or "asynchronous"
    if name not in _MODES:
        raise errors.InvalidArgumentError(
            f"--mode must be one of {', '.join(_MODES)}, got {name!r}"
        )
    own = {}
    for field, value in _options.given(options).items():
        mode, argument = _OF_MODES.get(field, (name, ""))
        if mode != name:
            raise errors.InvalidArgumentError(
                f"{_options.option(field)} applies to --mode {mode}, and the mode is "
                f"{name}"
            )
        if argument:
            own[argument] = value
    if name == "bounded" and not own:
        raise errors.InvalidArgumentError(
            "--mode bounded needs --max-versions-behind, --max-rounds-ahead or both"
        )
    return _MODES[name](**own)


def parent(options: CenterOptions, rule: Rule) -> dict[str, Any]:
    """The arguments of `agn_optax.service.serve` about a parent, which is connected.

    Raises:
      InvalidArgumentError: options do not go together.
      CenterError: the parent does not answer, or runs another rule.
    """
    if options.parent is None:
        for field in ("parent_period", "parent_tls_ca"):
            if getattr(options, field) is not None:
                raise errors.InvalidArgumentError(
                    f"{_options.option(field)} needs --parent"
                )
        return {}
    # A center that has a certificate shows it to its parent.
    has_ca = options.parent_tls_ca is not None
    tls = _tls.client(
        options.parent_tls_ca,
        options.tls_certificate if has_ca else None,
        options.tls_key if has_ca else None,
    )
    connected = service.connect(
        options.parent,
        rule,
        tls=tls,
        insecure=bool(options.insecure),
    )
    made: dict[str, Any] = {"parent": connected}
    if options.parent_period is not None:
        made["parent_period"] = options.parent_period
    return made
