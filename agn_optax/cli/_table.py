"""The status of a center, for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import rich.console
import rich.live
import rich.table
import rich.text

_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "connected": lambda worker: _yes(worker["connected"]),
    "period": lambda worker: str(worker["period"] or "-"),
    "exchanges": lambda worker: str(worker["exchanges"]),
    "staleness": lambda worker: _number(worker["staleness"]),
    "last seen": lambda worker: f"{worker['seen']:.1f} s",
    "message norm": lambda worker: _number(worker["norm"]),
    "dropped": lambda worker: str(worker["dropped"]),
    "refused": lambda worker: str(worker["refused"]),
    "waits": lambda worker: _yes(worker["waits"]),
    "received": lambda worker: size(worker["bytes_received"]),
    "sent": lambda worker: size(worker["bytes_sent"]),
}


def console(*, stderr: bool = False) -> rich.console.Console:
    """Where tables are printed; as wide as they are if that is no terminal."""
    made = rich.console.Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = 160
    return made


@contextlib.contextmanager
def live(*, enabled: bool) -> Iterator[Callable[[Any], None]]:
    """Shows one table after the other: in its place, if on a terminal."""
    out = console()
    if not (enabled and out.is_terminal):
        yield out.print
        return
    with rich.live.Live(console=out, auto_refresh=False) as place:
        yield lambda table: place.update(table, refresh=True)


def of(said: dict[str, Any]) -> Any:
    """What `agn_optax.cli._status` knows of a center, to be printed."""
    if "error" in said:
        return rich.text.Text(said["error"], style="bold red")
    table = rich.table.Table(
        title=_title(said), title_justify="left", caption=_caption(said)
    )
    table.add_column("worker")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for worker in said["workers"]:
        cells = [column(worker) for column in _COLUMNS.values()]
        table.add_row(rich.text.Text(worker["name"]), *cells)
    if said["degraded"]:
        warning = rich.text.Text(f"warning: {said['degraded']}", style="bold red")
        return rich.console.Group(table, warning)
    return table


def size(number: float) -> str:
    """Bytes, in three digits or so."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"


def _title(said: dict[str, Any]) -> rich.text.Text:
    version = said["version"]
    holds = (
        "no parameters yet"
        if version is None
        else f"version {version}, {said['parameters']} parameters "
        f"({size(said['parameter_bytes'])})"
    )
    parent = f", parent {said['parent']}" if said["parent"] else ""
    return rich.text.Text(
        f"{said['rule']} at {said['address']}: {holds}, {said['mode']}{parent}"
    )


def _caption(said: dict[str, Any]) -> rich.text.Text:
    count = len(said["workers"])
    exchanges, traffic = said["exchanges_per_second"], said["bytes_per_second"]
    direct = said["direct_address"]
    direct = f", direct connections at {direct}" if direct else ""
    page = f", page at {said['page_address']}" if said["page_address"] else ""
    return rich.text.Text(
        f"{_number(exchanges)} exchanges/s, "
        f"{'-' if traffic is None else size(traffic)}/s, up {said['uptime']:.0f} s, "
        f"{count} worker{'' if count == 1 else 's'}{direct}{page}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
