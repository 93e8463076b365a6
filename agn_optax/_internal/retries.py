"""Repeat a call that may succeed later, with pauses between its attempts."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass
class Outage:
    """The failed attempts of a call, and for how long it is repeated.

    A caller that learns during an attempt that the other end is there may begin anew:
    with another ``since``, and with ``attempts`` set to 1.

    Args:
      seconds: an attempt begins at most this many seconds after ``since``.
      since: when the outage began, in monotonic seconds; by default, when the first
        attempt failed.
      attempts: number of failed attempts.
      began: when the newest attempt began, in monotonic seconds.
    """

    seconds: float = math.inf
    since: float = math.inf
    attempts: int = 0
    began: float = -math.inf


def retry(
    attempt: Callable[[], T],
    outage: Outage,
    *,
    pauses: tuple[float, float],
    wait: Callable[[float], object],
    is_final: Callable[[Exception], bool] = lambda error: False,
    record: Callable[[Exception], object] = lambda error: None,
    decide: Callable[[bool], bool] = bool,
) -> T:
    """Return the result of ``attempt``, called until it succeeds or time is over.

    The pauses double. Each is shortened at random to between a half and the whole, so
    that callers that failed together do not come back together.

    Args:
      attempt: the call.
      outage: for how long to go on; this function counts the attempts there.
      pauses: the first and the longest pause in seconds.
      wait: waits for a pause in seconds; true if no further attempt may follow.
      is_final: whether to raise an exception instead of trying again.
      record: is called with each exception after which an attempt may follow.
      decide: is called with whether time is over, and returns what is done; for
        callers that must decide alike.

    Raises:
      Exception: the exception of the last attempt.
    """
    first, longest = pauses
    pause = first
    while True:
        outage.began = time.monotonic()
        try:
            return attempt()
        except Exception as error:
            if is_final(error):
                raise
            outage.attempts += 1
            outage.since = min(outage.since, time.monotonic())
            record(error)
            pause = min(first if outage.attempts == 1 else 2 * pause, longest)
            seconds = pause * random.uniform(0.5, 1)  # noqa: S311 not for secrets
            is_over = time.monotonic() + seconds > outage.since + outage.seconds
            if decide(is_over) or wait(seconds):
                raise
