"""``agn-optax status``, ``watch``, ``save`` and ``drain``: operate a running center."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import time
from typing import Annotated, Any

import typer

from agn_optax import errors, service
from agn_optax.ops.cli import _center_options, _options, _table
from agn_optax.ops.cli._centers import Centers, Seen

Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS", help="Address of the center: HOST:PORT or unix:PATH."
    ),
]
Addresses = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS[,ADDRESS...]",
        help="Address of the center, or of each of its shards or of several centers: "
        "HOST:PORT or unix:PATH.",
    ),
]
Tree = Annotated[
    bool,
    typer.Option(
        "--tree",
        help="Also show its parents and their sites, if they can be reached. The same "
        "token is presented to all of them: use an observer's.",
    ),
]
Timeout = Annotated[
    float, typer.Option(min=0.001, help="Timeout of a call, in seconds.")
]


@_options.record()
class Reached:
    """Options of a connection to a center.

    Access:
      token_file FILE [the environment's, or of this user's center here]: File with the
        token to present to the center.

    TLS:
      tls_ca FILE.pem: CA certificates to verify the center with; without them the
        connection is plain text.
      tls_certificate FILE.pem: Certificate of this end, with the chain of its issuers.
      tls_key FILE.pem: Private key of the certificate.
      insecure: Allow plain text beyond this machine, in a network that you trust.
    """

    token_file: pathlib.Path | None = None
    tls_ca: pathlib.Path | None = None
    tls_certificate: pathlib.Path | None = None
    tls_key: pathlib.Path | None = None
    insecure: bool | None = _options.switch()


def observer(address: str, reached: Reached, timeout: float) -> service.Observer:
    """Open a connection that observes a center.

    Raises:
      InvalidArgumentError: an option needs another one, or a file cannot be read.
    """
    return service.Observer(address, timeout=timeout, **settings(reached))


def settings(reached: Reached) -> dict[str, Any]:
    """Return the arguments of any connection: TLS, plain text and token.

    Raises:
      InvalidArgumentError: an option needs another one, or a file cannot be read.
    """
    return {
        "tls": tls_of(reached),
        "insecure": bool(reached.insecure),
        "token": reached.token_file,
    }


def tls_of(reached: Reached) -> service.Tls | None:
    """Return the TLS settings of a connection; None for plain text.

    Raises:
      InvalidArgumentError: an option needs another one.
    """
    own = reached.tls_certificate, reached.tls_key
    _center_options.check_pair(*own)
    if reached.tls_ca is None:
        _options.refuse(reached, "needs --tls-ca", only=("tls_certificate",))
        return None
    return service.Tls(reached.tls_ca, *own)


def status(
    address: Addresses,
    reached: Reached,
    tree: Tree = False,
    timeout: Timeout = 5.0,
    json: _options.Json = False,
) -> None:
    """Show a center and its workers once; or all shards of a center, or a whole tree.

    Rates of workers are those of the last ten seconds. Rates of centers are means since
    their start.
    """
    with _centers_at(address, reached, timeout, tree=tree) as centers:
        look = _Poll(centers.look(), {})
    missing = look.missing(centers.addresses)
    if missing is not None and look.only(tree=tree):
        raise missing
    if json:
        _options.print_json(look.as_json(tree=tree))
    else:
        _table.console().print(look.table(tree=tree))
    if missing is not None:
        raise missing


def watch(
    address: Addresses,
    reached: Reached,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two updates.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of updates, after which it ends.")
    ] = None,
    tree: Tree = False,
    timeout: Timeout = 5.0,
    json: _options.Json = False,
) -> None:
    """Show one or several centers and their workers, and refresh until Ctrl-C.

    Rates of workers are those of the last ten seconds. Rates of centers are means since
    the last look. The command waits for a center that does not answer yet, or no
    longer; its last known status stays. With --json, each look is an object on a line
    of its own.
    """
    before: dict[str, dict[str, Any]] | None = None
    shown: dict[str, dict[str, Any]] = {}
    missing: errors.AgnOptaxError | None = None
    with (
        _centers_at(address, reached, timeout, tree=tree) as centers,
        _table.live(enabled=not json) as show,
        contextlib.suppress(KeyboardInterrupt),
    ):
        begin = time.monotonic()
        for number in itertools.islice(itertools.count(), count):
            # Starts at a multiple of the interval, unless a look takes longer than one.
            time.sleep(max(0.0, begin + number * interval - time.monotonic()))
            look = _Poll(centers.look(), before)
            before = {**(before or {}), **look.statuses()}
            missing = look.missing(centers.addresses)
            if not isinstance(missing, errors.CenterUnreachableError | None):
                break  # waiting does not help
            if json:
                _options.print_json(look.as_json(tree=tree))
            else:
                show(look.table(tree=tree, shown=shown))
            shown.update(look.known())
    if missing is not None:
        raise missing


def save(
    address: Address,
    reached: Reached,
    timeout: Timeout = 600.0,
    json: _options.Json = False,
) -> None:
    """Have a center write a snapshot to the directory of its --journal or --snapshots.

    Ends when the snapshot is on disk. Needs the role of an operator.
    """
    with observer(address, reached, timeout) as center:
        version = center.save()
    if json:
        _options.print_json({"event": "saved", "address": address, "version": version})
    else:
        typer.echo(f"version {version} of {address} is on its disk")


def drain(
    address: Address,
    reached: Reached,
    timeout: Timeout = 5.0,
    json: _options.Json = False,
) -> None:
    """End a center as SIGTERM does, after messages that have reached it are answered.

    Needs the role of an operator.
    """
    with observer(address, reached, timeout) as center:
        center.drain()
    if json:
        _options.print_json({"event": "draining", "address": address})
    else:
        typer.echo(f"draining {address}")


class _Poll:
    """The statuses of centers at one moment, with rates since an earlier look.

    Args:
      seen: statuses of the centers.
      before: the earlier statuses by address; a center that has none gets rates since
        its start. None gives no rates, for the first of several looks.
    """

    def __init__(
        self, seen: list[Seen], before: dict[str, dict[str, Any]] | None
    ) -> None:
        self._seen = seen
        self._said = []
        for each in seen:
            said: dict[str, Any] = {"address": each.address, "error": ""}
            if each.error is not None:
                said["error"] = str(each.error)
            if (now := each.status) is not None:
                since = now if before is None else before.get(each.address)
                said |= _with_rates(each.address, since, now)
            said["depth"] = each.depth
            said["under"] = None if each.under is None else list(each.under)
            self._said.append(said)

    def statuses(self) -> dict[str, dict[str, Any]]:
        """Return the statuses of the centers that answered, by address."""
        return {s.address: s.status for s in self._seen if s.status is not None}

    def known(self) -> dict[str, dict[str, Any]]:
        """Return the statuses with rates of the centers that answered, by address."""
        return {said["address"]: said for said in self._said if not said["error"]}

    def only(self, *, tree: bool) -> dict[str, Any] | None:
        """Return the status of the center if it is the only one; else None."""
        return self._said[0] if not tree and len(self._said) == 1 else None

    def missing(self, addresses: list[str]) -> errors.AgnOptaxError | None:
        """Return why one of these addresses did not answer; None if all answered."""
        found = [
            each.error
            for each in self._seen
            if each.error is not None and each.address in addresses
        ]
        # Errors that waiting does not mend come first.
        found.sort(key=lambda e: isinstance(e, errors.CenterUnreachableError))
        return found[0] if found else None

    def as_json(self, *, tree: bool) -> dict[str, Any]:
        """Return one center as an object, or several as an object with a list."""
        if (one := self.only(tree=tree)) is None:
            return {"centers": self._said}
        if one["error"]:
            return {"address": one["address"], "error": one["error"]}
        return {k: v for k, v in one.items() if k not in ("error", "depth", "under")}

    def table(
        self, *, tree: bool, shown: dict[str, dict[str, Any]] | None = None
    ) -> Any:
        """Return a table; a center without an answer has its status from ``shown``."""
        shown = shown or {}
        if (one := self.only(tree=tree)) is None:
            return _table.of_all(self._said, shown)
        if one["error"]:
            return _table.lost(one["error"], shown.get(one["address"]))
        return _table.of(one)


def _centers_at(
    address: str, reached: Reached, timeout: float, *, tree: bool
) -> Centers:
    """Return connections to one address, or to several separated by commas."""
    addresses = [each.strip() for each in address.split(",")]
    if len(set(addresses)) != len(addresses):
        raise errors.InvalidArgumentError(
            f"one address or several different ones expected, got {address!r}"
        )
    return Centers(addresses, lambda each: observer(each, reached, timeout), tree=tree)


def _with_rates(
    address: str, before: dict[str, Any] | None, now: dict[str, Any]
) -> dict[str, Any]:
    """Return a status with the center's rates since an earlier one, or its start.

    The rates of its workers are in the status already.
    """
    since = before or {}
    seconds = now["uptime"] - since.get("uptime", 0.0)

    def rate(*names: str) -> float | None:
        made = sum((now[name] or 0) - (since.get(name) or 0) for name in names)
        # Negative if the center has restarted, and counts from zero.
        return made / seconds if seconds > 0 and made >= 0 else None

    return {
        "address": address,
        **now,
        "exchanges_per_second": rate("version"),
        "bytes_per_second": rate("bytes_received", "bytes_sent"),
    }
