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
_Status = dict[str, Any]  # of a center


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

    Rates are those of the last ten seconds.
    """
    with _observers_at(address, reached, timeout) as observers:
        centers, error = _ask(observers)
    if error is not None and len(centers) == 1:
        raise error
    if json:
        _options.print_json(_as_json(centers))
    else:
        _table.console().print(_table.of(centers))
    if error is not None:
        raise error


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

    Rates are those of the last ten seconds. The command waits for a center that does
    not answer yet, or no longer answers; its last known status stays. With --json, each
    update is an object on a line of its own.
    """
    shown: dict[str, _Status] = {}
    error: errors.AgnOptaxError | None = None
    with (
        _observers_at(address, reached, timeout) as observers,
        _table.live(enabled=not json) as show,
        contextlib.suppress(KeyboardInterrupt),
    ):
        begin = time.monotonic()
        for number in itertools.islice(itertools.count(), count):
            # Updates start at multiples of the interval, unless one takes longer.
            time.sleep(max(0.0, begin + number * interval - time.monotonic()))
            centers, error = _ask(observers)
            if not isinstance(error, errors.CenterUnreachableError | None):
                break  # waiting does not help
            if json:
                _options.print_json(_as_json(centers))
                continue
            for center in centers:
                known = shown.get(center["address"], {})
                shown[center["address"]] = {**known, "error": "", **center}
            show(_table.of(list(shown.values())))
    if error is not None:
        raise error


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


def _ask(
    observers: dict[str, service.Observer],
) -> tuple[list[_Status], errors.AgnOptaxError | None]:
    """Return the status of each center, or its error, and one of these errors."""
    with ThreadPoolExecutor(len(observers)) as pool:
        replies = list(pool.map(_status_or_error, observers.values()))
    failures = [x for x in replies if isinstance(x, errors.AgnOptaxError)]
    # Errors that waiting does not mend come first.
    failures.sort(key=lambda error: isinstance(error, errors.CenterUnreachableError))
    centers = [
        {"address": address, **(x if isinstance(x, dict) else {"error": str(x)})}
        for address, x in zip(observers, replies, strict=True)
    ]
    return centers, next(iter(failures), None)


def _status_or_error(center: service.Observer) -> _Status | errors.AgnOptaxError:
    try:
        return center.status()
    except errors.AgnOptaxError as error:
        return error


def _as_json(centers: list[_Status]) -> _Status:
    """Return one center as an object, or several as an object with a list."""
    return {"centers": centers} if len(centers) > 1 else centers[0]
