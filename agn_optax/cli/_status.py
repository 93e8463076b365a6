"""``agn-optax status``, ``watch``, ``save`` and ``drain``: a center from outside."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import time
from typing import Annotated, Any

import typer

from agn_optax import errors, service
from agn_optax.cli import _center_options, _options, _table

Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS", help="Where the center is: HOST:PORT or unix:PATH."
    ),
]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds a call may take.")]


@_options.record()
class Reached:
    """How a center is reached.

    Access:
      token_file FILE [of the environment, or of a center of this user here]: With the
        token by which the center knows this end.

    TLS:
      tls_ca FILE.pem: Who vouches for the center; plain text is spoken without it.
      tls_certificate FILE.pem: This end's certificate, with those that vouch for it.
      tls_key FILE.pem: The certificate's private key.
      insecure: Allow plain text beyond this machine, in a network that you trust.
    """

    token_file: pathlib.Path | None = None
    tls_ca: pathlib.Path | None = None
    tls_certificate: pathlib.Path | None = None
    tls_key: pathlib.Path | None = None
    insecure: bool | None = _options.switch()


def observer(address: str, reached: Reached, timeout: float) -> service.Observer:
    """A connection that takes no part.

    Raises:
      InvalidArgumentError: options do not go together, or a file cannot be read.
    """
    return service.Observer(address, timeout=timeout, **settings(reached))


def settings(reached: Reached) -> dict[str, Any]:
    """How a connection is made, whatever it is for.

    Raises:
      InvalidArgumentError: options do not go together, or a file cannot be read.
    """
    return {
        "tls": tls_of(reached),
        "insecure": bool(reached.insecure),
        "token": reached.token_file,
    }


def tls_of(reached: Reached) -> service.Tls | None:
    """The certificates of some options.

    Raises:
      InvalidArgumentError: they do not go together.
    """
    own = reached.tls_certificate, reached.tls_key
    _center_options.check_pair(*own)
    if reached.tls_ca is None:
        _options.refuse(reached, "needs --tls-ca", only=("tls_certificate",))
        return None
    return service.Tls(reached.tls_ca, *own)


def status(
    address: Address,
    reached: Reached,
    timeout: Timeout = 5.0,
    json: _options.Json = False,
) -> None:
    """Show a center and its workers, once.

    Rates are means since the center was started.
    """
    with observer(address, reached, timeout) as center:
        said = _with_rates(address, None, center.status())
    if json:
        _options.print_json(said)
    else:
        _table.console().print(_table.of(said))


def watch(
    address: Address,
    reached: Reached,
    interval: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two looks.")
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="Looks, after which it ends.")
    ] = None,
    timeout: Timeout = 5.0,
    json: _options.Json = False,
) -> None:
    """Show a center and its workers, again and again, until Ctrl-C.

    Rates are those since the last look. A center that is not there yet is waited for,
    as is one that goes away, whose last table stays. With --json, each look is an
    object on a line of its own.
    """
    before: dict[str, Any] | None = None
    shown: dict[str, Any] | None = None
    failure: errors.AgnOptaxError | None = None
    with (
        observer(address, reached, timeout) as center,
        _table.live(enabled=not json) as show,
        contextlib.suppress(KeyboardInterrupt),
    ):
        begin = time.monotonic()
        for look in itertools.islice(itertools.count(), count):
            # On time whatever a look takes, unless it takes longer than the interval.
            time.sleep(max(0.0, begin + look * interval - time.monotonic()))
            try:
                now, failure = center.status(), None
            except errors.CenterUnreachableError as error:
                failure = error
                said = {"address": address, "error": str(error)}
            else:
                said = shown = _with_rates(address, before or now, now)
                before = now
            if json:
                _options.print_json(said)
            elif failure is None:
                show(_table.of(said))
            else:
                show(_table.lost(str(failure), shown))
    if failure is not None:
        raise failure


def save(
    address: Address,
    reached: Reached,
    timeout: Timeout = 600.0,
    json: _options.Json = False,
) -> None:
    """Have a center write a snapshot, where --journal or --snapshots has it.

    Ends when that is on disk. Takes the role of an operator.
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
    """End a center, as SIGTERM does: what has reached it is applied and answered.

    Takes the role of an operator.
    """
    with observer(address, reached, timeout) as center:
        center.drain()
    if json:
        _options.print_json({"event": "draining", "address": address})
    else:
        typer.echo(f"draining {address}")


def _with_rates(
    address: str, before: dict[str, Any] | None, now: dict[str, Any]
) -> dict[str, Any]:
    """A status, and rates since another one; before None: since the start."""
    since = before or {}
    seconds = now["uptime"] - since.get("uptime", 0.0)

    def rate(
        now: dict[str, Any], since: dict[str, Any], seconds: float, *names: str
    ) -> float | None:
        made = sum((now[name] or 0) - (since.get(name) or 0) for name in names)
        # None also where another life counts from zero.
        return made / seconds if seconds > 0 and made >= 0 else None

    def with_rate(worker: dict[str, Any]) -> dict[str, Any]:
        seen = known.get(worker["name"], {})
        # Of one that was not there before: since it joined.
        over = seconds if before and seen else worker["joined"]
        made = rate(worker, seen, over, "exchanges")
        return {**worker, "exchanges_per_second": made}

    known = {worker["name"]: worker for worker in since.get("workers", ())}
    return {
        "address": address,
        **now,
        "workers": [with_rate(worker) for worker in now["workers"]],
        "exchanges_per_second": rate(now, since, seconds, "version"),
        "bytes_per_second": rate(now, since, seconds, "bytes_received", "bytes_sent"),
    }
