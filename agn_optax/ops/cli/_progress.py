"""Progress on stderr, for commands that may take long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import rich.progress

from agn_optax.ops.cli import _table

_AFTER = 2.0  # s, before progress is shown


def records() -> contextlib.AbstractContextManager[Callable[[float], None]]:
    """Return a context with a function that shows the number of a record."""
    return _shown(
        rich.progress.TextColumn("record {task.completed}"),
        rich.progress.SpinnerColumn(),
        rich.progress.TimeElapsedColumn(),
    )


def fraction(text: str) -> contextlib.AbstractContextManager[Callable[[float], None]]:
    """Return a context with a function that shows the fraction done, after a text."""
    columns = rich.progress.Progress.get_default_columns()
    return _shown(rich.progress.TextColumn(text), *columns[1:], total=1.0)


@contextlib.contextmanager
def _shown(
    *columns: rich.progress.ProgressColumn, total: float | None = None
) -> Iterator[Callable[[float], None]]:
    """Show progress if stderr is a terminal and the work takes more than two seconds.

    Args:
      *columns: the text and marks of the line.
      total: the number at the end; None if it is not known.
    """
    begin, console = time.monotonic(), _table.console(stderr=True)
    progress = rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    task = progress.add_task("", total=total)

    def advance(completed: float) -> None:
        progress.update(task, completed=completed)
        if not progress.live.is_started and time.monotonic() > begin + _AFTER:
            progress.start()

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
