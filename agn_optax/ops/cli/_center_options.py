"""Options of a served center, for ``serve`` and for the center of ``launch``."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from agn_optax import errors, service
from agn_optax._internal import check
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Durability,
    Journal,
    Mode,
    Refuse,
    ShardedCenter,
    Snapshots,
    Synchronous,
)
from agn_optax.ops.cli import _options
from agn_optax.rules import Rule

# Options that are arguments of `agn_optax.service.serve`, by the same name.
_AS_THEY_ARE = (
    *("address", "barrier", "max_workers", "lease", "memory", "calls", "dtype"),
    *("device", "direct", "direct_address", "health_address", "insecure"),
    *("parent_period", "reflection"),
)
_PAGE = "127.0.0.1:0"
# Options that are arguments of `agn_optax.center.Refuse`, without their prefix.
_REFUSALS = [
    *("refuse_nonfinite", "refuse_norm", "refuse_times_median", "refuse_element"),
    *("refuse_staleness", "refuse_share", "refuse_in_a_row"),
    *("refuse_steps", "refuse_weight"),
]
# Modes and durabilities, each with its own options and their names as its arguments.
_MODES: dict[str, tuple[Any, dict[str, str]]] = {
    "asynchronous": (Asynchronous, {}),
    "bounded": (
        BoundedStaleness,
        {"max_versions_behind": "versions", "max_rounds_ahead": "rounds"},
    ),
    "synchronous": (
        Synchronous,
        {"quorum": "quorum", "grace": "grace", "late": "late"},
    ),
}
_DURABILITIES: dict[str, tuple[Any, dict[str, str]]] = {
    "journal": (
        Journal,
        {
            "journal_size": "size",
            "journal_interval": "interval",
            "journal_on_failure": "on_failure",
        },
    ),
    "snapshots": (
        Snapshots,
        {
            "snapshot_seconds": "seconds",
            "snapshot_exchanges": "exchanges",
            "snapshots_kept": "keep",
            "snapshots_kept_seconds": "keep_seconds",
        },
    ),
}


@_options.record(modes=", ".join(_MODES))
class CenterOptions:
    """Options of a served center, without its rule.

    Center:
      address HOST:PORT|unix:PATH [127.0.0.1:0]: Address to listen at; port 0 takes a
        free port.
      address_file FILE: File to write the address to, on a disk that the workers share.
        They connect to file:FILE, and find a center again that has moved.
      barrier: Number of workers that must have joined before any of them starts.
      max_workers [64]: Maximum number of workers at a time.
      lease [10]: Seconds after which a worker that lost its connection is given up.
      memory [no bound]: Maximum bytes of the center, its optimizer's state and all
        messages together. A worker whose message has no room is rejected.
      calls [20]: Calls per second that one caller may make beside its exchanges, such
        as pulls. Further calls are delayed.
      dtype: Floating dtype of the center, whatever the dtype of its workers.
      device [cpu]: Platform of the device that holds the center.
      direct [direct]: Also accept exchanges outside gRPC, on another port and in shared
        memory.
      direct_address HOST:PORT [a free port]: Address of that other port; workers reach
        it at the host of --address.
      page [no-page]: Serve a page that shows the center's status in a browser, and
        /metrics for Prometheus, at --page-address.
      page_address HOST:PORT [127.0.0.1:0 with --page]: Address of the page; implies
        --page. Port 0 takes a free port.
      health_address HOST:PORT: Additional address of gRPC's health check, in plain text
        and for every caller, as the probes of Kubernetes need it.
      signal_exit_code [0]: Exit code after a signal has drained the center. Set it to
        another value than 0 for engines that restart only what has failed.

    Access:
      tokens FILE: File of the callers that are allowed, a line each: roles, a worker's
        name (* for any) and a token. It is read again when it changes. Without it, a
        token is made and printed, and programs of the same user on this machine find
        it by themselves.
      open: Allow every caller; beyond this machine only with --insecure.
      reflection [on this machine only]: Serve gRPC's reflection and channelz.

    Mode:
      mode MODE [asynchronous]: When messages are applied: {modes}.
      max_versions_behind: For bounded: drop messages whose anchor is older than this
        many versions.
      max_rounds_ahead: For bounded: delay workers that are more than this many rounds
        ahead of the slowest.
      quorum: For synchronous: number of messages that end a round after --grace.
      grace: For synchronous: seconds from a round's first message until a quorum can
        end the round.
      late next|weighted|drop [next]: For synchronous: how to treat a message that
        missed its round.

    Message limits:
      refuse_nonfinite [refuse-nonfinite]: Reject messages that are not finite, and
        those after which the center would not be finite.
      refuse_norm: Reject messages with a larger global norm.
      refuse_times_median: Reject messages whose norm exceeds this multiple of the
        median norm of recent messages.
      refuse_element: Reject messages with an element of larger absolute value.
      refuse_staleness: Reject messages whose anchor is more versions old.
      refuse_share: Reject messages after which their worker would have made more than
        this share of all recent movement of the center.
      refuse_steps: Reject messages that claim more local steps.
      refuse_weight: Reject messages that claim a larger weight.
      refuse_in_a_row [10]: Number of consecutive rejections of a worker's messages
        before the worker gets an error.

    Durability:
      journal DIRECTORY: Write every exchange to this directory before it is answered. A
        center that is found in the directory continues.
      journal_size [1 GiB, or 4 snapshots]: With --journal: bytes after which a snapshot
        replaces the journal.
      journal_interval [none]: With --journal: maximum seconds between two syncs to
        disk. Exchanges do not wait for a sync then, and a power failure loses those of
        at most this time.
      journal_on_failure WHAT [stop]: With --journal: whether to "stop" if the disk
        fails, or to "go on" in memory and report it.
      snapshots DIRECTORY: Write snapshots of the center to this directory from time to
        time. A center that is found in the directory continues.
      snapshot_seconds [60, without --snapshot-exchanges]: With --snapshots: seconds
        between two snapshots.
      snapshot_exchanges: With --snapshots: exchanges between two snapshots.
      snapshots_kept [2]: With --snapshots: number of snapshots to keep.
      snapshots_kept_seconds [0]: With --snapshots: also keep younger snapshots than
        this.
      save DIRECTORY: Directory for the parameters at the end, written as a checkpoint
        that Orbax reads; needs the extra flax.

    Parent:
      parent HOST:PORT|unix:PATH: Address of a center that this one joins as a worker.
      parent_period: Exchanges at this center between two exchanges with its parent.
      parent_name: Name of this center among the parent's workers, needed if the
        parent's token is for one name.
      parent_token_file FILE: File with the token to present to the parent.
      parent_tls_ca FILE.pem: CA certificates to verify the parent with.

    TLS:
      tls_certificate FILE.pem: Certificate of this end, with the chain of its issuers.
      tls_key FILE.pem: Private key of the certificate.
      tls_client_ca FILE.pem: CA certificates to verify workers with; workers must then
        have certificates.
      insecure: Allow plain text beyond this machine, in a network that you trust.
    """

    address: str | None = None
    address_file: pathlib.Path | None = None
    barrier: int | None = None
    max_workers: int | None = None
    lease: float | None = None
    memory: int | None = None
    calls: float | None = None
    dtype: str | None = None
    device: str | None = None
    direct: bool | None = None
    direct_address: str | None = None
    page: bool | None = None
    page_address: str | None = None
    health_address: str | None = None
    signal_exit_code: int | None = None
    tokens: pathlib.Path | None = None
    open: bool | None = _options.switch()
    reflection: bool | None = None
    mode: str | None = None
    max_versions_behind: int | None = None
    max_rounds_ahead: int | None = None
    quorum: int | None = None
    grace: float | None = None
    late: str | None = None
    refuse_nonfinite: bool | None = None
    refuse_norm: float | None = None
    refuse_times_median: float | None = None
    refuse_element: float | None = None
    refuse_staleness: int | None = None
    refuse_share: float | None = None
    refuse_steps: int | None = None
    refuse_weight: float | None = None
    refuse_in_a_row: int | None = None
    journal: pathlib.Path | None = None
    journal_size: int | None = None
    journal_interval: float | None = None
    journal_on_failure: str | None = None
    snapshots: pathlib.Path | None = None
    snapshot_seconds: float | None = None
    snapshot_exchanges: int | None = None
    snapshots_kept: int | None = None
    snapshots_kept_seconds: float | None = None
    save: pathlib.Path | None = None
    parent: str | None = None
    parent_period: int | None = None
    parent_name: str | None = None
    parent_token_file: pathlib.Path | None = None
    parent_tls_ca: pathlib.Path | None = None
    tls_certificate: pathlib.Path | None = None
    tls_key: pathlib.Path | None = None
    tls_client_ca: pathlib.Path | None = None
    insecure: bool | None = _options.switch()


def settings(options: CenterOptions) -> dict[str, Any]:
    """Return the arguments of `agn_optax.service.serve`, without rule and parent.

    Raises:
      InvalidArgumentError: options exclude each other, or one is out of range.
    """
    if not 0 <= (options.signal_exit_code or 0) <= 255:
        raise errors.InvalidArgumentError(
            "--signal-exit-code must be a whole number from 0 to 255, got "
            f"{options.signal_exit_code}"
        )
    return {
        **_named(options, {name: name for name in _AS_THEY_ARE}),
        **_named(options, {"parent_name": "name"}),
        "page": page_address(options),
        "mode": _mode_of(options),
        "refuse": Refuse(
            **_named(options, {o: o.removeprefix("refuse_") for o in _REFUSALS})
        ),
        "tls": _tls_of(options),
        "durability": _durability_of(options),
    }


def parent(
    options: CenterOptions, rule: Rule
) -> service.RemoteCenter | ShardedCenter | None:
    """Connect to the center's parent, and return it; None without a parent.

    Raises:
      InvalidArgumentError: an option needs another one.
      CenterError: the parent does not answer, or runs another rule.
    """
    if options.parent is None:
        only = ("parent_period", "parent_name", "parent_token_file", "parent_tls_ca")
        _options.refuse(options, "needs --parent", only=only)
        return None
    # A center that has a certificate presents it to its parent.
    ca, own = options.parent_tls_ca, (options.tls_certificate, options.tls_key)
    return service.connect(
        options.parent,
        rule,
        tls=None if ca is None else service.Tls(ca, *own),
        insecure=bool(options.insecure),
        token=options.parent_token_file,
    )


def page_address(options: CenterOptions) -> str | None:
    """Return the address of the page; None for no page.

    Raises:
      InvalidArgumentError: options exclude each other.
    """
    if options.page is False:
        _options.refuse(
            options, "and --no-page exclude each other", only=["page_address"]
        )
    if options.page or options.page_address is not None:
        return options.page_address or _PAGE
    return None


def access(
    options: CenterOptions, made: str = "", shown: str = ""
) -> service.Access | None:
    """Return who may call the center; None for every caller.

    The tokens come from the options, the environment and the arguments.

    Args:
      options: options of the center.
      made: a new token with the roles chief and operator; "" for none.
      shown: a new token for the page, with the role observer; "" for none.

    Raises:
      InvalidArgumentError: options exclude each other, or tokens cannot be read.
    """
    lines = os.environ.get(service.tokens.TOKENS, "")
    if options.open:
        _options.refuse(options, "and --open exclude each other", only=("tokens",))
        return None
    given: list[bytes | pathlib.Path] = []
    given += [options.tokens] if options.tokens is not None else []
    given += [lines.encode()] if lines else []
    given += [f"chief,operator * {made}".encode()] if made else []
    given += [f"observer * {shown}".encode()] if shown else []
    return service.Access(*given)


def makes_token(options: CenterOptions) -> bool:
    """Return whether a token has to be made, because no callers are given."""
    lines = os.environ.get(service.tokens.TOKENS)
    return not (options.open or options.tokens is not None or lines)


def check_pair(certificate: pathlib.Path | None, key: pathlib.Path | None) -> None:
    """Raise unless a certificate and its key are given together.

    Raises:
      InvalidArgumentError: one of them is missing.
    """
    if (certificate is None) != (key is None):
        raise errors.InvalidArgumentError(
            "--tls-certificate and --tls-key go together: give both"
        )


def _named(options: CenterOptions, names: dict[str, str]) -> dict[str, Any]:
    """Return the given options among ``names``, renamed to the values of ``names``."""
    given = _options.given(options)
    return {other: given[name] for name, other in names.items() if name in given}


def _mode_of(options: CenterOptions) -> Mode:
    name = options.mode or "asynchronous"
    kind, own_names = check.choose(name, _MODES, "--mode")
    for other, (_, names) in _MODES.items():
        if other != name:
            why = f"applies to --mode {other}, and the mode is {name}"
            _options.refuse(options, why, only=names)
    own = _named(options, own_names)
    if name == "bounded" and not own:
        raise errors.InvalidArgumentError(
            "--mode bounded needs --max-versions-behind, --max-rounds-ahead or both"
        )
    return kind(**own)


def _tls_of(options: CenterOptions) -> service.Tls | None:
    certificate, key = options.tls_certificate, options.tls_key
    check_pair(certificate, key)
    if certificate is None:
        why = "needs --tls-certificate and --tls-key"
        _options.refuse(options, why, only=("tls_client_ca",))
        return None
    tls = service.Tls(options.tls_client_ca, certificate, key)
    tls.server_credentials()  # raises for bad files before anything is started
    return tls


def _durability_of(options: CenterOptions) -> Durability | None:
    if options.journal is not None and options.snapshots is not None:
        raise errors.InvalidArgumentError(
            "--journal and --snapshots exclude each other: a journal has snapshots"
        )
    made = None
    for name, (kind, names) in _DURABILITIES.items():
        directory = getattr(options, name)
        if directory is None:
            _options.refuse(options, f"needs --{name}", only=names)
        else:
            own = _named(options, names)
            if "exchanges" in own:  # no snapshots by time, unless seconds are given
                own.setdefault("seconds", None)
            made = kind(directory, **own)
    return made
