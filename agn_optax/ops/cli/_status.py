"""``agn-optax status``, ``watch`` and ``drain``: operate a running center."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import time
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
Timeout = Annotated[
    float, typer.Option(min=0.001, help="Timeout of a call, in seconds.")
]


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
    address: Address,
    reached: Reached,
    timeout: Timeout = 5.0,
    json: _options.Json = False,
) -> None:
    """Show a center and its workers once. Rates are those of the last ten seconds."""
    with observer(address, reached, timeout) as center:
        found = {"address": address, **center.status()}
    if json:
        _options.print_json(found)
    else:
        _table.console().print(_table.of(found))


def watch(
    address: Address,
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
    """Show a center and its workers, and refresh until Ctrl-C.

    Rates are those of the last ten seconds. The command waits for a center that does
    not answer yet, or no longer answers; its last known status stays. With --json, each
    update is an object on a line of its own.
    """
    shown: dict[str, Any] = {"address": address}
    error: errors.CenterUnreachableError | None = None
    out = _table.console()
    with (
        observer(address, reached, timeout) as center,
        contextlib.suppress(KeyboardInterrupt),
    ):
        begin = time.monotonic()
        for number in itertools.islice(itertools.count(), count):
            # Updates start at multiples of the interval, unless one takes longer.
            time.sleep(max(0.0, begin + number * interval - time.monotonic()))
            try:
                found, error = center.status(), None
            except errors.CenterUnreachableError as unreachable:
                found, error = {"error": str(unreachable)}, unreachable
            if json:
                _options.print_json({"address": address, **found})
            else:
                shown = {**shown, "error": "", **found}
                out.clear()  # on a terminal only
                out.print(_table.of(shown))
    if error is not None:
        raise error


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
