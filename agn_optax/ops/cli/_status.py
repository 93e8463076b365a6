"""``agn-optax status``, ``watch``, ``save`` and ``drain``: operate a running center."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from agn_optax import errors, service
from agn_optax.ops.cli import _options, _table

Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS",
        help="Address of the center: HOST:PORT, unix:PATH or file:PATH.",
    ),
]
Addresses = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS[,ADDRESS...]",
        help="Address of the center; or of each of its shards, or of several centers: "
        "HOST:PORT, unix:PATH or file:PATH.",
    ),
]
Timeout = Annotated[
    float, typer.Option(min=0.001, help="Timeout of a call, in seconds.")
]
_Reply = dict[str, Any] | errors.AgnOptaxError  # a center's status, or its error


@_options.record()
class Reached:
    """Options of a connection to a center.

    Access:
      token_file FILE [from the environment, or from this user's center on this
        machine]: File with the token to present to the center.

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
    insecure: bool | None = None


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
    ca, own = reached.tls_ca, (reached.tls_certificate, reached.tls_key)
    if ca is None:
        pair = ("tls_certificate", "tls_key")
        _options.reject(reached, "needs --tls-ca", only=pair)
    return {
        "tls": None if ca is None else service.Tls(ca, *own),
        "insecure": bool(reached.insecure),
        "token": reached.token_file,
    }


def status(
    address: Addresses,
    reached: Reached,
    timeout: Timeout = 5.0,
    json: _options.Json = False,
) -> None:
    """Show one or several centers and their workers once.

    Rates of workers are those of the last ten seconds. Rates of centers are means since
    their start.
    """
    with _observers_at(address, reached, timeout) as observers:
        replies = _ask(observers)
    missing = _missing(replies)
    if missing is not None and len(replies) == 1:
        raise missing
    centers = _as_dicts(replies, {})
    if json:
        _options.print_json(_as_json(centers))
    else:
        _table.console().print(_table.of(centers, {}))
    if missing is not None:
        raise missing


def watch(
    address: Addresses,
    reached: Reached,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two updates.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of updates; then it ends.")
    ] = None,
    timeout: Timeout = 5.0,
    json: _options.Json = False,
) -> None:
    """Show one or several centers and their workers, and refresh until Ctrl-C.

    Rates of workers are those of the last ten seconds. Rates of centers are means since
    the last update. The command waits for a center that does not answer yet, or no
    longer answers; its last known status stays. With --json, each update is an object
    on a line of its own.
    """
    before: dict[str, dict[str, Any]] | None = None
    shown: dict[str, dict[str, Any]] = {}
    missing: errors.AgnOptaxError | None = None
    with (
        _observers_at(address, reached, timeout) as observers,
        _table.live(enabled=not json) as show,
        contextlib.suppress(KeyboardInterrupt),
    ):
        begin = time.monotonic()
        for number in itertools.islice(itertools.count(), count):
            # Updates start at multiples of the interval, unless one takes longer.
            time.sleep(max(0.0, begin + number * interval - time.monotonic()))
            replies = _ask(observers)
            centers = _as_dicts(replies, before)
            answered = {at: x for at, x in replies.items() if isinstance(x, dict)}
            before = {**(before or {}), **answered}
            missing = _missing(replies)
            if not isinstance(missing, errors.CenterUnreachableError | None):
                break  # waiting does not help
            if json:
                _options.print_json(_as_json(centers))
            else:
                show(_table.of(centers, shown))
            shown |= {c["address"]: c for c in centers if not c["error"]}
    if missing is not None:
        raise missing


def save(
    address: Address,
    reached: Reached,
    timeout: Timeout = 600.0,
    json: _options.Json = False,
) -> None:
    """Have a center write a snapshot to the directory of its --journal.

    Ends when the snapshot is on disk. Needs the role of an operator.
    """
    with observer(address, reached, timeout) as center:
        version = center.save()
    text = f"version {version} of {address} is on its disk"
    _options.report(json, text, event="saved", address=address, version=version)


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
    text = f"draining {address}"
    _options.report(json, text, event="draining", address=address)


@contextlib.contextmanager
def _observers_at(
    address: str, reached: Reached, timeout: float
) -> Iterator[dict[str, service.Observer]]:
    """Open connections to one address, or to several separated by commas."""
    addresses = [part.strip() for part in address.split(",")]
    if len(set(addresses)) != len(addresses):
        raise errors.InvalidArgumentError(
            f"one address or several different ones expected, got {address!r}"
        )
    with contextlib.ExitStack() as stack:
        yield {
            address: stack.enter_context(observer(address, reached, timeout))
            for address in addresses
        }


def _ask(observers: dict[str, service.Observer]) -> dict[str, _Reply]:
    """Return the status of each center, or why it does not answer, by address."""
    with ThreadPoolExecutor(len(observers)) as pool:
        replies = pool.map(_status_or_error, observers.values())
        return dict(zip(observers, replies, strict=True))


def _status_or_error(center: service.Observer) -> _Reply:
    try:
        return center.status()
    except errors.AgnOptaxError as error:
        return error


def _as_dicts(
    replies: dict[str, _Reply], before: dict[str, dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the statuses of centers, with rates since earlier statuses by address.

    A center without an earlier status gets rates since its start. If ``before`` is
    None, all rates are None.
    """
    centers = []
    for address, reply in replies.items():
        if isinstance(reply, dict):
            since = reply if before is None else before.get(address, {})
            reply = {"error": "", **reply, **_rates(since, reply)}
        else:
            reply = {"error": str(reply)}
        centers.append({"address": address, **reply})
    return centers


def _rates(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float | None]:
    """Return a center's rates since an earlier status; if it is empty, since the start.

    The rates of its workers are in the status already.
    """
    seconds = now["uptime"] - before.get("uptime", 0.0)

    def rate(*names: str) -> float | None:
        made = sum((now[name] or 0) - (before.get(name) or 0) for name in names)
        # Negative if the center has restarted, and counts from zero.
        return made / seconds if seconds > 0 and made >= 0 else None

    return {
        "updates_per_second": rate("version"),
        "bytes_per_second": rate("bytes_received", "bytes_sent"),
    }


def _missing(replies: dict[str, _Reply]) -> errors.AgnOptaxError | None:
    """Return why a center did not answer; None if all answered."""
    found = [x for x in replies.values() if isinstance(x, errors.AgnOptaxError)]
    # Errors that waiting does not mend come first.
    found.sort(key=lambda error: isinstance(error, errors.CenterUnreachableError))
    return found[0] if found else None


def _as_json(centers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one center as an object, or several as an object with a list."""
    if len(centers) > 1:
        return {"centers": centers}
    (center,) = centers
    return {k: value for k, value in center.items() if k != "error" or value}
