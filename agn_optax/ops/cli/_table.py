"""Tables of the statuses of centers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import rich.cells
import rich.console
import rich.live
import rich.table
import rich.text

from agn_optax.ops import units

_MOST_NAME = 24  # characters of a worker's name in the table, if names stay distinct

_Status = dict[str, Any]
_Cell = Callable[[_Status], str]
# Columns in the order of display; a narrow table leaves out the last ones. The columns
# of numbers that workers report are between `_FIRST` and `_OTHERS`.
_FIRST: dict[str, _Cell] = {
    "connected": lambda worker: _connected(worker),
    "exchanges": lambda worker: str(worker["exchanges"]),
}
_OTHERS: dict[str, _Cell] = {
    "per s": lambda worker: _number(worker["exchanges_per_second"]),
    "staleness": lambda worker: _number(worker["staleness"]),
    "transport": lambda worker: worker["transport"] or "-",
    "last seen": lambda worker: _seconds(worker["seen"]),
    "period": lambda worker: str(worker["period"] or "-"),
    "rejected": lambda worker: str(worker["rejected"]),
    "dropped": lambda worker: str(worker["dropped"]),
    "message norm": lambda worker: _number(worker["norm"]),
    "waits": lambda worker: _yes(worker["waits"]),
    "received": lambda worker: units.in_bytes(worker["bytes_received"]),
    "sent": lambda worker: units.in_bytes(worker["bytes_sent"]),
}


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


def of(
    centers: list[_Status],
    shown: dict[str, _Status],
    *,
    width: int | None = None,
) -> rich.console.Group:
    """Return the table of one or several centers and their workers.

    Args:
      centers: status of each center with its rates, or its error.
      shown: earlier statuses by address, for centers that do not answer.
      width: available characters; None for the width of `console`. The last columns are
        left out if they do not fit.
    """
    is_single = len(centers) == 1
    known, warnings = [], []
    for center in centers:
        where = "" if is_single else f"{center['address']}: "
        found = shown.get(center["address"]) if center["error"] else center
        if found is not None:
            known.append({**found, "error": center["error"]})
            if found["degraded"]:
                warnings.append(f"warning: {where}{found['degraded']}")
        if center["error"]:
            what = "waiting" if is_single else "not reachable"
            warnings.append(f"{what}: {where}{center['error']}")
    parts: list[rich.console.RenderableType] = []
    if known:
        first = "worker" if is_single else "center, worker"
        table = _filled(*_rows(known, is_single), first, width)
        table.title = _text(_title(known, len(centers), is_single))
        table.caption = _text(_caption(known[0])) if is_single else None
        parts.append(table)
    return rich.console.Group(*parts, *(_text(w, "bold red") for w in warnings))


def _rows(centers: list[_Status], is_single: bool) -> tuple[list[str], list[_Status]]:
    """Return names and rows of workers, below their centers if there are several."""
    names: list[str] = []
    rows: list[_Status] = []
    for center in centers:
        if not is_single:
            names.append(center["address"])
            rows.append(_as_row(center))
        workers = center["workers"]
        indent = "" if is_single else "  "
        names += [indent + n for n in _distinct([worker["name"] for worker in workers])]
        rows += workers
    return names, rows


def _text(text: str, style: str = "") -> rich.text.Text:
    """Return text from a center or its workers, without markup and escapes.

    Workers choose names and labels, and a terminal would obey the escapes in them.
    """
    shown = (c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return rich.text.Text("".join(shown), style=style)


def _filled(
    names: list[str], rows: list[_Status], title: str, width: int | None
) -> rich.table.Table:
    """Return a table of the names, and of the columns that fit beside them."""
    reported = [
        [name, *(_number(row["reported"].get(name)) for row in rows)]
        for name in sorted({name for row in rows for name in row["reported"]})
    ]
    first, others = (
        [[name, *map(cell, rows)] for name, cell in columns.items()]
        for columns in (_FIRST, _OTHERS)
    )
    columns = [[title, *names], *first, *reported, *others]
    return next(split(columns, console().width if width is None else width))


def split(
    columns: Sequence[Sequence[str]], width: int, sections: Collection[int] = ()
) -> Iterator[rich.table.Table]:
    """Yield tables that fit into a width, each with some columns after the first one.

    Args:
      columns: columns with their titles; the first one is in each table.
      width: available characters.
      sections: numbers of the rows that begin a section.
    """
    first, *others = columns
    groups: list[list[Sequence[str]]] = []
    room = 0
    for column in others:
        needed = _width(column)
        if needed > room or not groups:
            groups.append([first])
            room = width - _width(first) - 1
        groups[-1].append(column)
        room -= needed
    for group in groups:
        table = rich.table.Table(title_justify="left")
        for title, *_ in group:
            table.add_column(_text(title), justify="right", no_wrap=True)
        table.columns[0].justify = "left"
        table.columns[0].min_width = _width(first) - 3
        for number, row in enumerate(zip(*group, strict=True)):
            if number in sections:
                table.add_section()
            if number:
                table.add_row(*map(_text, row))
        yield table


def _width(column: Sequence[str]) -> int:
    """Return the width of a column with its border."""
    return max(map(rich.cells.cell_len, column)) + 3


def _as_row(center: _Status) -> _Status:
    """Return a center as a row of the workers' table: with sums, or None."""
    workers = center["workers"]
    return {
        **dict.fromkeys(("staleness", "transport", "seen", "period", "norm", "waits")),
        "stalled": None,
        "connected": not center["error"],
        "exchanges": sum(worker["exchanges"] for worker in workers),
        "exchanges_per_second": sum(
            worker["exchanges_per_second"] or 0.0 for worker in workers
        ),
        "rejected": sum(center["rejected"].values()),
        "dropped": sum(worker["dropped"] for worker in workers),
        "bytes_received": center["bytes_received"],
        "bytes_sent": center["bytes_sent"],
        "reported": {},
    }


def _distinct(names: list[str]) -> list[str]:
    """Shorten long names in their middle, unless two would then be the same."""
    tail = _MOST_NAME // 2
    short = [
        name
        if len(name) <= _MOST_NAME
        else f"{name[: _MOST_NAME - tail - 1]}…{name[-tail:]}"
        for name in names
    ]
    return short if len(set(short)) == len(set(names)) else names


def _title(centers: list[_Status], count: int, is_single: bool) -> str:
    if not is_single:
        workers = sum(len(center["workers"]) for center in centers)
        rules = ", ".join(dict.fromkeys(center["rule"] for center in centers))
        return f"{rules}: {len(centers)} of {count} centers, {workers} workers"
    (center,) = centers
    version = center["version"]
    holds = "no parameters yet"
    if version is not None:
        size = units.in_bytes(center["parameter_bytes"])
        holds = f"version {version}, {center['parameters']} parameters ({size})"
    return f"{center['rule']} at {center['address']}: {holds}, {center['mode']}"


def _caption(center: _Status) -> str:
    count, traffic = len(center["workers"]), center["bytes_per_second"]
    direct, page = center["direct_address"], center["page_address"]
    rate = "-" if traffic is None else units.in_bytes(traffic)
    return (
        f"{_number(center['updates_per_second'])} updates/s, {rate}/s, "
        f"up {center['uptime']:.0f} s, {count} worker{'' if count == 1 else 's'}"
        + (f", direct connections at {direct}" if direct else "")
        + (f", page at {page}" if page else "")
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _connected(worker: _Status) -> str:
    stalled = worker["stalled"]
    return _yes(worker["connected"]) if stalled is None else f"stalled {stalled:.0f} s"


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
