"""An exchange of a worker, from its departure until its answer is adopted."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import jax

from agn_optax import errors
from agn_optax._internal import in_background
from agn_optax.center import Snapshot
from agn_optax.worker._programs import Left

PyTree = Any

_PAUSE = 0.5  # seconds between attempts, which have pauses of their own


@dataclasses.dataclass(eq=False)
class Message:
    """An exchange that has begun: kept until its answer is adopted.

    If it fails, the same message is sent again, with the same sequence number, for the
    center may have applied it.
    """

    send: Callable[[], Snapshot]  # returns when the answer is there
    contribution: PyTree
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    codec_state: PyTree = None  # once it is sent; where local steps go on, they have it
    answer: Snapshot | None = None
    left: Left | None = None  # None unless local steps go on meanwhile
    flight: Future[Snapshot] | None = None  # its way on a thread of its own
    attempt: Future[Snapshot] | None = None  # to send it, which nobody waits for yet
    abandoned: threading.Event = dataclasses.field(default_factory=threading.Event)

    def send_ahead(self) -> None:
        """Begin what `exchange` does, which then waits for the answer only."""
        if self.attempt is None and self.answer is None:
            self.attempt = in_background(self.sent, "agn-optax exchange")

    def exchange(self) -> Snapshot:
        """Sends it, and waits for the answer."""
        if self.attempt is None:
            return self.sent()
        wait([self.attempt])  # if this is broken off, the next call waits for it again
        attempt, self.attempt = self.attempt, None
        return _result_of(attempt)

    def ask_if_answered(self) -> bool:
        """Return whether it has come back from its way, or its flight has failed.

        A worker of several processes communicates: all of them must ask at once.
        """
        assert self.flight is not None
        return self.flight.done()

    def sent(self) -> Snapshot:
        """Its answer, once it is sent from here; also says how long that took."""
        begin = time.monotonic()
        answer = self.send()
        self.measured["seconds"] = time.monotonic() - begin
        return answer

    def take_off(self, give_up: float) -> None:
        """Sends in the background until there is an answer, or no hope."""
        fly = functools.partial(self._fly, give_up)
        self.flight = in_background(fly, "agn-optax exchange")

    def land(self) -> Snapshot:
        """Waits for the answer, and raises what the flight did."""
        assert self.flight is not None
        return _result_of(self.flight)

    def _fly(self, give_up: float) -> Snapshot:
        lost: float | None = None  # since when
        # Whoever leaves before it is computed has left for the center, too.
        jax.block_until_ready(self.contribution)
        while True:
            try:
                return self.sent()
            except errors.CenterClosedError:
                raise
            except errors.CenterUnreachableError:
                lost = lost or time.monotonic()
                if time.monotonic() - lost >= give_up or self.abandoned.wait(_PAUSE):
                    raise


def is_settled(error: Exception) -> bool:
    """Return whether an error says that a message has not been applied.

    After any other it is sent again: under its number, the center would answer the old
    message in place of a new one.
    """
    unknown = isinstance(error, errors.CenterUnreachableError)
    return isinstance(error, errors.AgnOptaxError) and not (
        unknown or type(error) is errors.CenterError
    )


def _result_of(future: Future[Snapshot]) -> Snapshot:
    """Wait for an answer, or raise what its thread did.

    Callers may keep the error, and so it must not hold the arrays of that thread.
    """
    cause = future.exception()
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return future.result()
