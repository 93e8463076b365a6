"""Signals as numbers in a pipe, where whoever waits for the pipe hears them.

Python runs the handler of a signal in the main thread, between two instructions. If
the signal comes while that thread is about to wait, the handler runs when the wait is
over, which may be never. What the system itself calls runs at once, in whatever thread,
and can write the signal's number to a pipe: a wait for the pipe ends then.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


def _nothing(signum: int, frame: FrameType | None) -> None:
    pass


@contextlib.contextmanager
def signals_to(
    pipe: int,
    signums: Iterable[int],
    handler: Callable[[int, FrameType | None], object] = _nothing,
) -> Iterator[None]:
    """Has signals written to a pipe, each as one byte, for a time.

    Those that are ignored, as nohup and background jobs have it, stay so. Other signals
    with handlers of Python's are written there, too.

    Args:
      pipe: a descriptor that does not block.
      signums: the signals.
      handler: what they do as well, in the main thread, sooner or later.
    """
    before = {}
    woken = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    try:
        for signum in signums:
            # None is a handler not of Python's, which could not be restored.
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                before[signum] = signal.signal(signum, handler)
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)
        signal.set_wakeup_fd(woken)
