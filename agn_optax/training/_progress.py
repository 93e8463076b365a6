"""Records of a loop, on a terminal or in the log."""

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
    """A function that shows a record, as a callback gets it."""
    if not progress:
        yield lambda step, metrics: None
    elif importlib.util.find_spec("rich") is not None and sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415 only where it is used

        with Console(stderr=True).status("training") as status:
            yield lambda step, metrics: status.update(_line(step, metrics))
    else:
        yield lambda step, metrics: _log.info(_line(step, metrics))


def _line(step: int, metrics: Mapping[str, float]) -> str:
    said = [f"{name} {value:.4g}" for name, value in metrics.items()]
    return ", ".join([f"step {step}", *said])
