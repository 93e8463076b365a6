"""Options, tables and JSON that all benchmarks share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import rich.table
import side_by_side
from rich.console import Console
from rich.markup import escape

Row = dict[str, Any]


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """Parse the options, including those that all benchmarks have.

    ``quick`` has the defaults of a run that only shows that everything works; options
    of the command line override them.
    """
    parser.add_argument("--json", type=pathlib.Path, help="also write the numbers here")
    parser.add_argument("--quick", action="store_true", help="tiny: does it work?")
    if parser.parse_args().quick:
        parser.set_defaults(**quick)
    return parser.parse_args()


@dataclasses.dataclass
class Report:
    """Tables of one benchmark, printed when they are added."""

    json: pathlib.Path | None = None
    console: Console = dataclasses.field(
        # Wide enough for tables, if the output is not a terminal.
        default_factory=lambda: Console(width=None if sys.stdout.isatty() else 120)
    )
    tables: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self.machine = side_by_side.machine()
        self.say(", ".join(f"{key} {value}" for key, value in self.machine.items()))

    def say(self, text: str) -> None:
        """Print a line on the screen only."""
        self.console.print(escape(text))

    def add(self, key: str, title: str, rows: Sequence[Row]) -> None:
        """Add a table; ``key`` names it for programs, and all rows have equal columns.

        Raises:
          ValueError: a number is not finite.
        """
        for row in rows:
            if not all(map(math.isfinite, numbers(row))):
                raise ValueError(f"{title}: a number is not finite: {row}")
        self.tables.append({"key": key, "title": title, "rows": list(rows)})
        table = rich.table.Table(title=escape(title))
        columns = list(rows[0])
        for i, column in enumerate(columns):
            table.add_column(heading(column), justify="right" if i else "left")
        for row in rows:
            table.add_row(*(escape(text(row[column])) for column in columns))
        self.console.print(table)

    def write(self) -> None:
        """Write the JSON, if requested."""
        if self.json is None:
            return
        program, *options = sys.argv
        command = ["python", f"benchmarks/{pathlib.Path(program).name}", *options]
        results = {
            "command": shlex.join(command),
            "machine": self.machine,
            "seconds": round(time.monotonic() - self._start, 1),
            "tables": self.tables,
        }
        self.json.write_text(json.dumps(results, indent=1))


def numbers(row: Row) -> Iterator[float]:
    """Yield the numbers of a row, including quartiles."""
    for value in row.values():
        if isinstance(value, list):
            yield from value
        elif isinstance(value, int | float):
            yield value


def heading(column: str) -> str:
    """Return a column's name for display."""
    return column.replace("_", " ")


def text(value: Any) -> str:
    """Format a number, quartiles or words for a table."""
    match value:
        case None:
            return ""
        case [low, high]:
            return f"[{text(low)}, {text(high)}]"
        case float() if 100 <= abs(value) < 1e6:
            return f"{value:,.0f}"
        case float():
            return f"{value:.3g}"
        case _:
            return str(value)


def markdown(table: dict[str, Any]) -> str:
    """Format a table of the JSON as Markdown."""
    columns = list(table["rows"][0])
    lines = [
        [heading(column) for column in columns],
        ["---", *["---:"] * (len(columns) - 1)],
        *([text(row[column]) for column in columns] for row in table["rows"]),
    ]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{table['title']}**\n\n{body}\n"
