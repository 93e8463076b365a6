"""How a center is served: options of ``serve``, and of ``launch`` for its own."""

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

# Options that `agn_optax.service.serve` has under the same name.
_AS_THEY_ARE = (
    *("address", "barrier", "max_workers", "lease", "memory", "calls", "dtype"),
    *("device", "direct", "direct_address", "health_address", "insecure"),
    *("parent_period", "reflection"),
)
_PAGE = "127.0.0.1:0"
# Options that `agn_optax.center.Refuse` has without their prefix.
_REFUSALS = [
    *("refuse_nonfinite", "refuse_norm", "refuse_times_median", "refuse_element"),
    *("refuse_staleness", "refuse_share", "refuse_in_a_row"),
    *("refuse_steps", "refuse_weight"),
]
# Modes and durabilities, and the names that they have for options of theirs alone.
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
    """How a center is served; its rule is apart.

    Center:
      address HOST:PORT|unix:PATH [127.0.0.1:0]: Where to listen; port 0 takes one that
        is free.
      address_file FILE: Where the address is left, on a disk that workers share: they
        reach a center that may come back elsewhere as file:FILE.
      barrier: Workers that must have joined before any of them starts.
      max_workers [64]: Workers that may be there at a time.
      lease [10]: Seconds after which a worker that lost its connection is given up.
      memory [no bound]: Bytes that the center, its optimizer's state and all messages
        may take together; workers for whom there is no room are refused.
      calls [20]: Calls a second that one caller may make beside its exchanges, such as
        pulls; one that makes more has to wait.
      dtype: Floating dtype of the center, whatever its workers have.
      device [cpu]: Platform the center lives on.
      direct [direct]: Exchanges beside gRPC too, on another port and in shared memory.
      direct_address HOST:PORT [a port that is free]: Where that other port is; workers
        reach it at the host of --address.
      page [no-page]: A page in the browser that shows what goes on, and /metrics for
        Prometheus, at --page-address.
      page_address HOST:PORT [of --page: 127.0.0.1:0]: Where the page is, which this
        asks for as well; port 0 takes one that is free.
      health_address HOST:PORT: Where gRPC's health checking is answered in plain text
        and to anybody as well, as the probes of Kubernetes need it.
      signal_exit_code [0]: Exit code of a center that a signal has drained. One that is
        not 0 is for engines that start only those again that have failed.

    Access:
      tokens FILE: Who may call, in lines of roles, a worker's name (* for any) and a
        token; it is read again when it changes. Without it a token is made and printed,
        and programs of the same user on this machine find it by themselves.
      open: Let in whoever reaches it; beyond this machine, with --insecure only.
      reflection [on this machine only]: Serve gRPC's reflection and channelz.

    Mode:
      mode MODE [asynchronous]: When messages are applied: {modes}.
      max_versions_behind: Of bounded: a message with an older anchor is dropped.
      max_rounds_ahead: Of bounded: a worker further ahead of the slowest waits.
      quorum: Of synchronous: messages that are enough once the grace is over.
      grace: Of synchronous: seconds from a round's first message.
      late next|weighted|drop [next]: Of synchronous: what becomes of a message that
        missed its round.

    Refusal:
      refuse_nonfinite [refuse-nonfinite]: Refuse messages that are not finite, or after
        which the center would not be.
      refuse_norm: Refuse messages of a larger global norm.
      refuse_times_median: Refuse messages whose norm is more than so many times the
        median of the last ones.
      refuse_element: Refuse messages with an element of a larger absolute value.
      refuse_staleness: Refuse messages made of a center more versions old.
      refuse_share: Refuse messages by which a worker would have made more than this
        share of all recent movement.
      refuse_steps: Refuse messages that claim to be made of more local steps.
      refuse_weight: Refuse messages that claim a larger weight.
      refuse_in_a_row [10]: Messages of a worker that are refused in a row before it
        gets an error.

    Durability:
      journal DIRECTORY: Where every exchange is on disk before it is answered; a center
        that is found there goes on.
      journal_size [1 GiB, or 4 snapshots]: Of --journal: bytes after which a snapshot
        takes its place.
      journal_interval [none]: Of --journal: seconds within which exchanges are synced
        to disk; they do not wait for that then, and no more are lost with the power.
      journal_on_failure WHAT [stop]: Of --journal: whether to stop if the disk fails,
        or to "go on" in memory, and to say so.
      snapshots DIRECTORY: Where the center is written from time to time; one that is
        found there goes on.
      snapshot_seconds [60, without --snapshot-exchanges]: Of --snapshots: between two
        of them.
      snapshot_exchanges: Of --snapshots: exchanges between two of them.
      snapshots_kept [2]: Of --snapshots: how many stay there.
      snapshots_kept_seconds [0]: Of --snapshots: those that are younger stay, too.
      save DIRECTORY: Where its parameters are written at its end, as a checkpoint that
        Orbax reads; needs the extra flax.

    Parent:
      parent HOST:PORT|unix:PATH: A center that this one is a worker of.
      parent_period: Exchanges here between two with the parent.
      parent_name: Of this center among the parent's workers, where a token says it.
      parent_token_file FILE: With the token by which the parent knows this center.
      parent_tls_ca FILE.pem: Who vouches for the parent.

    TLS:
      tls_certificate FILE.pem: This end's certificate, with those that vouch for it.
      tls_key FILE.pem: The certificate's private key.
      tls_client_ca FILE.pem: Who vouches for workers, which must then have
        certificates.
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
    """The arguments of `agn_optax.service.serve`, but for its rule and its parent.

    Raises:
      InvalidArgumentError: options do not go together.
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
    """The center that this one is a worker of, connected; None without one.

    Raises:
      InvalidArgumentError: options do not go together.
      CenterError: the parent does not answer, or runs another rule.
    """
    if options.parent is None:
        only = ("parent_period", "parent_name", "parent_token_file", "parent_tls_ca")
        _options.refuse(options, "needs --parent", only=only)
        return None
    # A center that has a certificate shows it to its parent.
    ca, own = options.parent_tls_ca, (options.tls_certificate, options.tls_key)
    return service.connect(
        options.parent,
        rule,
        tls=None if ca is None else service.Tls(ca, *own),
        insecure=bool(options.insecure),
        token=options.parent_token_file,
    )


def page_address(options: CenterOptions) -> str | None:
    """Where the page is to be; None for none.

    Raises:
      InvalidArgumentError: options do not go together.
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
    """Who may call: as options and the environment say, and whoever has a new token.

    Args:
      options: of the center.
      made: a token for all that can be done; "" for none.
      shown: a token for the page; "" for none.

    Raises:
      InvalidArgumentError: options do not go together, or make no sense.
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
    """Whether nobody said who may call, and so a token is to be made."""
    lines = os.environ.get(service.tokens.TOKENS)
    return not (options.open or options.tokens is not None or lines)


def check_pair(certificate: pathlib.Path | None, key: pathlib.Path | None) -> None:
    """Both are there, or none is.

    Raises:
      InvalidArgumentError: one is missing.
    """
    if (certificate is None) != (key is None):
        raise errors.InvalidArgumentError(
            "--tls-certificate and --tls-key go together: give both"
        )


def _named(options: CenterOptions, names: dict[str, str]) -> dict[str, Any]:
    """Those of some options that were given, under other names."""
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
    tls.server_credentials()  # what is wrong is said before anything is started
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
            if "exchanges" in own:  # then time is no rule, unless it was asked for
                own.setdefault("seconds", None)
            made = kind(directory, **own)
    return made
