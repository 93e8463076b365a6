"""Tables of the statuses of centers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import rich.cells
import rich.console
import rich.live
import rich.table
import rich.text

from agn_optax.ops import units

_MOST_NAME = 24  # characters of a worker's name in the table, if names stay distinct


class _Column(NamedTuple):
    """A column of the table of workers."""

    title: str
    cell: Callable[[dict[str, Any]], str]
    rank: int  # in a narrow table, the columns of greatest rank are left out


# In the order of display; columns of reported numbers come after "staleness".
_COLUMNS = (
    _Column("connected", lambda worker: _there(worker), 1),
    _Column("exchanges", lambda worker: str(worker["exchanges"]), 2),
    _Column("per s", lambda worker: _number(worker["exchanges_per_second"]), 4),
    _Column("staleness", lambda worker: _number(worker["staleness"]), 5),
    _Column("transport", lambda worker: worker["transport"] or "-", 6),
    _Column("last seen", lambda worker: _seconds(worker["seen"]), 7),
    _Column("period", lambda worker: str(worker["period"] or "-"), 8),
    _Column("rejected", lambda worker: str(worker["refused"]), 9),
    _Column("dropped", lambda worker: str(worker["dropped"]), 10),
    _Column("message norm", lambda worker: _number(worker["norm"]), 11),
    _Column("waits", lambda worker: _yes(worker["waits"]), 12),
    _Column("received", lambda worker: units.in_bytes(worker["bytes_received"]), 13),
    _Column("sent", lambda worker: units.in_bytes(worker["bytes_sent"]), 14),
)
_REPORTED = 3  # rank of the numbers that workers report
_AFTER = "staleness"


def console(*, stderr: bool = False) -> rich.console.Console:
    """Return the console for tables; if it is no terminal, it is 160 columns wide."""
    made = rich.console.Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = 160
    return made


@contextlib.contextmanager
def live(*, enabled: bool) -> Iterator[Callable[[Any], None]]:
    """Yield a function that shows a table, on a terminal in place of the last one."""
    out = console()
    if not (enabled and out.is_terminal):
        yield out.print
        return
    with rich.live.Live(console=out, auto_refresh=False) as place:
        yield lambda table: place.update(table, refresh=True)


def of(said: dict[str, Any], width: int | None = None) -> Any:
    """Return the table of one center.

    Args:
      said: status of the center, with rates.
      width: available characters; None for the width of `console`. The least important
        columns are left out if there are too few.
    """
    workers = said["workers"]
    names = _distinct([worker["name"] for worker in workers], _MOST_NAME)
    table = _filled(names, workers, "worker", width)
    table.title, table.caption = _title(said), _caption(said)
    if said["degraded"]:
        return rich.console.Group(table, _warning(f"warning: {said['degraded']}"))
    return table


def of_all(
    centers: list[dict[str, Any]],
    shown: dict[str, dict[str, Any]],
    width: int | None = None,
) -> Any:
    """Return the table of several centers and all of their workers.

    Args:
      centers: status of each center with its place in the tree, or its error.
      shown: earlier statuses by address, for centers that do not answer.
      width: available characters, as in `of`.
    """
    there = []
    for center in centers:
        known = shown.get(center["address"]) if center["error"] else center
        if known is not None:
            there.append({**known, "error": center["error"], "under": center["under"]})
    below: dict[tuple[str, str] | None, list[dict[str, Any]]] = {}
    for center in there:
        key = None if center["under"] is None else tuple(center["under"])
        below.setdefault(key, []).append(center)
    names: list[str] = []
    rows: list[dict[str, Any]] = []

    def put(center: dict[str, Any], indent: int) -> None:
        names.append("  " * indent + center["address"])
        rows.append(_as_row(center))
        workers = center["workers"]
        short = _distinct([worker["name"] for worker in workers], _MOST_NAME)
        for name, worker in zip(short, workers, strict=True):
            names.append("  " * (indent + 1) + name)
            rows.append(worker)
            for site in below.get((center["address"], worker["name"]), ()):
                put(site, indent + 2)

    for root in below.get(None, ()):
        put(root, 0)
    table = _filled(names, rows, "center, worker", width)
    count = sum(len(center["workers"]) for center in there)
    rules = ", ".join(dict.fromkeys(center["rule"] for center in there))
    table.title = _text(
        f"{rules}: {len(there)} of {len(centers)} centers, {count} workers"
    )
    said = [
        _warning(f"warning: {center['address']}: {center['degraded']}")
        for center in there
        if center["degraded"]
    ]
    said += [
        _warning(f"not reachable: {center['address']}: {center['error']}")
        for center in centers
        if center["error"]
    ]
    return rich.console.Group(table, *said)


def lost(why: str, said: dict[str, Any] | None) -> Any:
    """Return a warning that a center does not answer, below its last known status."""
    warning = _warning(f"waiting: {why}")
    return warning if said is None else rich.console.Group(of(said), warning)


def _warning(said: str) -> rich.text.Text:
    return _text(said, style="bold red")


def _text(said: str, style: str = "") -> rich.text.Text:
    """Return text from a center or its workers, without markup and escapes.

    Workers choose names and labels, and a terminal would obey the escapes in them.
    """
    shown = (c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in said)
    return rich.text.Text("".join(shown), style=style)


def _filled(
    names: list[str], rows: list[dict[str, Any]], title: str, width: int | None
) -> rich.table.Table:
    """Return a table of the names, and of the columns that fit beside them."""
    width = console().width if width is None else width
    table = rich.table.Table(title_justify="left")
    own = max(map(rich.cells.cell_len, [title, *names]))
    table.add_column(_text(title), min_width=own, no_wrap=True)
    columns = _fitting(rows, width - own - 4)
    for column in columns:
        table.add_column(_text(column.title), justify="right", no_wrap=True)
    for name, row in zip(names, rows, strict=True):
        cells = [_text(column.cell(row)) for column in columns]
        table.add_row(_text(name), *cells)
    return table


def _as_row(center: dict[str, Any]) -> dict[str, Any]:
    """Return a center as a row of the workers' table: with sums, or nothing."""
    workers = center["workers"]
    return {
        **dict.fromkeys(("staleness", "transport", "seen", "period", "norm", "waits")),
        "stalled": None,
        "connected": not center["error"],
        "exchanges": center["version"] or 0,
        "exchanges_per_second": center["exchanges_per_second"],
        "refused": sum(center["refused"].values()),
        "dropped": sum(worker["dropped"] for worker in workers),
        "bytes_received": center["bytes_received"],
        "bytes_sent": center["bytes_sent"],
        "reported": {},
    }


def _fitting(workers: list[dict[str, Any]], width: int) -> list[_Column]:
    """Return the columns that fit, in the order of display."""
    reported = sorted({name for worker in workers for name in worker["reported"]})
    after = [column.title for column in _COLUMNS].index(_AFTER) + 1
    columns = [*_COLUMNS[:after], *map(_reported, reported), *_COLUMNS[after:]]
    fitting = []
    for column in sorted(columns, key=lambda column: column.rank):
        cells = [column.title, *map(column.cell, workers)]
        width -= max(map(rich.cells.cell_len, cells)) + 3
        if width < 0:
            break
        fitting.append(column)
    return [column for column in columns if column in fitting]


def _reported(name: str) -> _Column:
    """Return the column of a number that workers report."""
    return _Column(
        name, lambda worker: _number(worker["reported"].get(name)), _REPORTED
    )


def _distinct(names: list[str], most: int) -> list[str]:
    """Shorten names to ``most`` characters, unless two would then be the same."""
    short = [name if len(name) <= most else _shortened(name, most) for name in names]
    return short if len(set(short)) == len(set(names)) else names


def _shortened(name: str, most: int) -> str:
    """Return the beginning and the end of a name, which differ most among names."""
    tail = most // 2
    return f"{name[: most - tail - 1]}…{name[-tail:]}"


def _title(said: dict[str, Any]) -> rich.text.Text:
    version = said["version"]
    holds = (
        "no parameters yet"
        if version is None
        else f"version {version}, {said['parameters']} parameters "
        f"({units.in_bytes(said['parameter_bytes'])})"
    )
    parent = f", parent {said['parent']}" if said["parent"] else ""
    return _text(
        f"{said['rule']} at {said['address']}: {holds}, {said['mode']}{parent}"
    )


def _caption(said: dict[str, Any]) -> rich.text.Text:
    count = len(said["workers"])
    exchanges, traffic = said["exchanges_per_second"], said["bytes_per_second"]
    direct = said["direct_address"]
    direct = f", direct connections at {direct}" if direct else ""
    page = f", page at {said['page_address']}" if said["page_address"] else ""
    rate = "-" if traffic is None else units.in_bytes(traffic)
    return _text(
        f"{_number(exchanges)} exchanges/s, {rate}/s, up {said['uptime']:.0f} s, "
        f"{count} worker{'' if count == 1 else 's'}{direct}{page}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _there(worker: dict[str, Any]) -> str:
    stalled = worker["stalled"]
    return _yes(worker["connected"]) if stalled is None else f"stalled {stalled:.0f} s"


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
