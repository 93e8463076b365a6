"""The clock and the threads of a center."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agn_optax._internal import in_background, keep_running


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The clock and the threads of a center, which a simulation replaces.

    Attributes:
      clock: returns the time in seconds, which never goes back within a process.
      condition: returns a condition for a lock.
      in_background: runs a function on a thread, see `in_background`.
      keep_running: runs a function on a thread again and again, see `keep_running`.
    """

    clock: Callable[[], float] = time.monotonic
    condition: Callable[[Any], threading.Condition] = threading.Condition
    in_background: Callable[..., Future[Any]] = in_background
    keep_running: Callable[..., Future[None]] = keep_running
