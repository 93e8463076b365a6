"""An optional step that is skipped, with the reason in the log, if it raises."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_log = logging.getLogger("agn_optax")


def attempt(what: str, step: Callable[[], T], level: int = logging.INFO) -> T | None:
    """Return ``step()``; or None, with the reason in the log, if it raises.

    Every exception counts, because code that is written for a whole tree may raise
    anything for a part of it.

    Args:
      what: the step, as a text for the log.
      step: a function that raises if a rule or a program does not allow the step.
      level: level of the log entry; a warning where no exception is expected.
    """
    try:
        return step()
    except Exception as error:
        _log.log(level, "not done: %s (%s: %s)", what, type(error).__name__, error)
        return None
