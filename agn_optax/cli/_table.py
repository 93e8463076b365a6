"""The status of a center, for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import rich.cells
import rich.console
import rich.live
import rich.table
import rich.text

_MOST_NAME = 24  # characters of a worker's name, where others would go for it


class _Column(NamedTuple):
    """Of the table of workers."""

    title: str
    cell: Callable[[dict[str, Any]], str]
    rank: int  # the greatest go first where there is no room


# In the order in which they stand; what workers report comes after "staleness".
_COLUMNS = (
    _Column("there", lambda worker: _yes(worker["connected"]), 1),
    _Column("exchanges", lambda worker: str(worker["exchanges"]), 2),
    _Column("per s", lambda worker: _number(worker["exchanges_per_second"]), 4),
    _Column("staleness", lambda worker: _number(worker["staleness"]), 5),
    _Column("transport", lambda worker: worker["transport"] or "-", 6),
    _Column("last seen", lambda worker: f"{worker['seen']:.1f} s", 7),
    _Column("period", lambda worker: str(worker["period"] or "-"), 8),
    _Column("refused", lambda worker: str(worker["refused"]), 9),
    _Column("dropped", lambda worker: str(worker["dropped"]), 10),
    _Column("message norm", lambda worker: _number(worker["norm"]), 11),
    _Column("waits", lambda worker: _yes(worker["waits"]), 12),
    _Column("received", lambda worker: size(worker["bytes_received"]), 13),
    _Column("sent", lambda worker: size(worker["bytes_sent"]), 14),
)
_REPORTED = 3  # the rank of what workers report
_AFTER = "staleness"


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


def of(said: dict[str, Any], width: int | None = None) -> Any:
    """What `agn_optax.cli._status` knows of a center, to be printed.

    Args:
      said: the status, with rates.
      width: characters there are; None for those of `console`. Columns go where there
        are too few, the least important first.
    """
    width = console().width if width is None else width
    table = rich.table.Table(
        title=_title(said), title_justify="left", caption=_caption(said)
    )
    workers = said["workers"]
    names = _distinct([worker["name"] for worker in workers], _MOST_NAME)
    own = max(map(rich.cells.cell_len, ["worker", *names]))
    table.add_column("worker", min_width=own, no_wrap=True)
    columns = _fitting(workers, width - own - 4)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for name, worker in zip(names, workers, strict=True):
        cells = [rich.text.Text(column.cell(worker)) for column in columns]
        table.add_row(rich.text.Text(name), *cells)
    if said["degraded"]:
        warning = rich.text.Text(f"warning: {said['degraded']}", style="bold red")
        return rich.console.Group(table, warning)
    return table


def lost(why: str, said: dict[str, Any] | None) -> Any:
    """A center that does not answer, and what was known of it last, if anything was."""
    warning = rich.text.Text(f"waiting: {why}", style="bold red")
    return warning if said is None else rich.console.Group(of(said), warning)


def _fitting(workers: list[dict[str, Any]], width: int) -> list[_Column]:
    """The columns for which there is room, in the order in which they stand."""
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
    """Of a number that workers report."""
    return _Column(
        name, lambda worker: _number(worker["reported"].get(name)), _REPORTED
    )


def _distinct(names: list[str], most: int) -> list[str]:
    """Names of at most so many characters, unless two would then be the same."""
    short = [name if len(name) <= most else _shortened(name, most) for name in names]
    return short if len(set(short)) == len(set(names)) else names


def _shortened(name: str, most: int) -> str:
    """Its beginning and its end, where names differ."""
    tail = most // 2
    return f"{name[: most - tail - 1]}…{name[-tail:]}"


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
