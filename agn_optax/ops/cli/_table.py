"""The table of a center's status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import rich.cells
import rich.console
import rich.table
import rich.text

from agn_optax._internal import Notice
from agn_optax.center import Totals
from agn_optax.ops import units

_Status = dict[str, Any]
_Cell = Callable[[_Status], str]
# Columns in the order of display; a narrow table leaves out the last ones. The columns
# of numbers that workers report are between `_FIRST` and `_OTHERS`.
_FIRST: dict[str, _Cell] = {
    "worker": lambda worker: worker["name"],
    "connected": lambda worker: _connected(worker),
    "exchanges": lambda worker: str(worker["exchanges"]),
}
_OTHERS: dict[str, _Cell] = {
    "per s": lambda worker: number(worker["exchanges_per_second"]),
    "staleness": lambda worker: number(worker["staleness"]),
    "transport": lambda worker: worker["transport"],
    "last seen": lambda worker: f"{worker['seen']:.1f} s",
    "period": lambda worker: str(worker["period"] or "-"),
    "rejected": lambda worker: str(worker["rejected"]),
    "dropped": lambda worker: str(worker["dropped"]),
    "local steps": lambda worker: str(worker["steps_delivered"]),
    "weight": lambda worker: number(worker["weight_delivered"] or None),
    "MB/s": lambda worker: number(worker["rate"] and worker["rate"] / 1e6),
    "interface": lambda worker: worker["interface"] or "-",
}


def console(*, stderr: bool = False) -> rich.console.Console:
    """Return the console for tables; if it is no terminal, it is 160 columns wide."""
    made = rich.console.Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = 160
    return made


def of(center: _Status) -> rich.console.Group:
    """Return a table with a row for each worker of a center, and warnings below it.

    Args:
      center: the status of the center, its error, or both: the last known status.
    """
    shown: list[rich.console.RenderableType] = []
    if "workers" in center:
        notices = [f"warning: {Notice(**notice)}" for notice in center["notices"]]
        shown = [_workers(center), *(text(line, "bold red") for line in notices)]
    if center.get("error"):
        shown.append(text(f"waiting: {center['error']}", "bold red"))
    return rich.console.Group(*shown)


def _workers(center: _Status) -> rich.table.Table:
    """Return the table of a center's workers, with the columns that fit."""
    workers = center["workers"]
    reported = [
        [name, *(number(worker["reported"].get(name)) for worker in workers)]
        for name in sorted({name for worker in workers for name in worker["reported"]})
    ]
    first, others = (
        [[title, *map(cell, workers)] for title, cell in columns.items()]
        for columns in (_FIRST, _OTHERS)
    )
    table = fitting([*first, *reported, *others], console().width)
    table.title, table.caption = text(_title(center)), text(_caption(center))
    return table


def text(shown: str, style: str = "") -> rich.text.Text:
    """Return text from a center or its workers, without markup and escapes.

    Workers choose names and labels, and a terminal would obey the escapes in them.
    """
    printable = (c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return rich.text.Text("".join(printable), style=style)


def fitting(columns: Sequence[Sequence[str]], width: int) -> rich.table.Table:
    """Return a table with the first columns, as many as fit into a width.

    Args:
      columns: columns with their titles; the first one is in any table.
      width: available characters.
    """
    table = rich.table.Table(title_justify="left")
    shown: list[Sequence[str]] = []
    room = width - 1
    for column in columns:
        room -= _width(column)
        if room < 0 and len(shown) > 1:
            break
        shown.append(column)
        justify: Literal["left", "right"] = "right" if table.columns else "left"
        table.add_column(text(column[0]), justify=justify, no_wrap=True)
    for row in zip(*(cells[1:] for cells in shown), strict=True):
        table.add_row(*map(text, row))
    return table


def _width(column: Sequence[str]) -> int:
    """Return the width of a column with its border."""
    return max(map(rich.cells.cell_len, column)) + 3


def _title(center: _Status) -> str:
    version = center["version"]
    holds = "no parameters yet"
    if version is not None:
        size = units.in_bytes(center["parameter_bytes"])
        holds = f"version {version}, {center['parameters']} parameters ({size})"
    return f"{center['rule']} at {center['address']}: {holds}, {center['mode']}"


def _caption(center: _Status) -> str:
    workers = center["workers"]
    rate = sum(worker["exchanges_per_second"] or 0.0 for worker in workers)
    totals = Totals(**{name: center[name] for name in Totals._fields})
    direct, page = center["direct_address"], center["page_address"]
    return (
        f"{number(rate)} exchanges/s, up {center['uptime']:.0f} s, "
        f"{len(workers)} worker{'' if len(workers) == 1 else 's'}, "
        f"{totals}"
        + (f", direct connections at {direct}" if direct else "")
        + (f", page at {page}" if page else "")
    )


def number(value: float | None) -> str:
    """Return a number with four digits, or a dash for None."""
    return "-" if value is None else f"{value:.4g}"


def _connected(worker: _Status) -> str:
    if worker["stalled"] is not None:
        return f"stalled {worker['stalled']:.0f} s"
    state = "waits" if worker["waits"] else "yes"
    return state if worker["connected"] else "no"
