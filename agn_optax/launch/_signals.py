"""Handlers of signals, for a time."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


@contextlib.contextmanager
def handled(
    signums: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Has signals call ``handler``, in the main thread, between two instructions.

    A wait of the main thread may go on meanwhile: Python wakes nobody if the signal
    comes right before it, or to another thread. So whoever is told of signals in this
    way waits a little at a time.

    Those that are ignored, as nohup and background jobs have it, stay so.
    """
    with contextlib.ExitStack() as stack:
        for signum in signums:
            # None is a handler not of Python's, which could not be restored.
            if (before := signal.getsignal(signum)) not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, signum, before)
                signal.signal(signum, handler)
        yield
