"""Display of a loop's records on a terminal or in the log."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping

_log = logging.getLogger("agn_optax")

Show = Callable[[int, Mapping[str, float]], None]


@contextlib.contextmanager
def showing(progress: bool) -> Iterator[Show]:
    """Yield a callback that shows a record.

    On a terminal each record replaces the one before, and the last one stays.
    """
    if not progress:
        yield lambda step, metrics: None
    elif importlib.util.find_spec("rich") is not None and sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415 only needed on a terminal
        from rich.text import Text  # noqa: PLC0415

        console, last = Console(stderr=True), Text()

        def show(step: int, metrics: Mapping[str, float]) -> None:
            nonlocal last
            last = Text(_line(step, metrics))  # not markup, whatever names contain
            status.update(last)

        try:
            with console.status("training") as status:
                yield show
        finally:
            if last:
                console.print(last, soft_wrap=True)
    else:
        yield lambda step, metrics: _log.info(_line(step, metrics))


def _line(step: int, metrics: Mapping[str, float]) -> str:
    said = [f"{name} {value:.4g}" for name, value in metrics.items()]
    return ", ".join([f"step {step}", *said])
