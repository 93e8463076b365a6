"""A message of a worker, from sending until its answer is adopted."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import traceback
from concurrent.futures import Future
from typing import Any

import jax

from agn_optax import errors
from agn_optax._internal import Outage, in_background, retry
from agn_optax.center import Answer, Submission
from agn_optax.round import steps

PyTree = Any

_PAUSE = 0.5  # s between attempts, in addition to the pauses inside an attempt


@dataclasses.dataclass(eq=False)
class Message:
    """A message, kept until its answer is adopted.

    If sending fails, the same message is sent again with the same sequence number,
    because the center may have applied it.
    """

    session: Any  # a WorkerSession
    submission: Submission
    codec_state: PyTree = None  # after encoding; None if the local state has it
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)  # for callbacks
    answer: Answer | None = None
    sent: steps.Sent | None = None  # None unless local steps go on meanwhile
    flight: Future[Answer] | None = None  # answer to a message sent in the background
    abandoned: threading.Event = dataclasses.field(default_factory=threading.Event)

    def send_once(self) -> Answer:
        """Send the message on this thread, measure the time, and return the answer."""
        begin = time.monotonic()
        answer = self.session.exchange(self.submission)
        self.metrics["seconds"] = time.monotonic() - begin
        return answer

    def is_answered(self) -> bool:
        """Return whether the message in flight has an answer or has failed.

        All processes of a worker must call it, and get the same result.
        """
        assert self.flight is not None
        return bool(self.session.is_answered(self.flight.done()))

    def send_in_background(self, give_up: float) -> None:
        """Send in the background, with retries for ``give_up`` seconds."""
        retried = functools.partial(self._retried, give_up)
        self.flight = in_background(retried, "agn-optax exchange")

    def receive(self) -> Answer:
        """Wait for the answer of the message in flight, or raise its error."""
        assert self.flight is not None
        return _result_of(self.flight)

    def _retried(self, give_up: float) -> Answer:
        # Wait until the contribution is computed: if the worker leaves meanwhile,
        # nothing may be sent.
        jax.block_until_ready(self.submission.contribution)
        return retry(
            self.send_once,
            Outage(give_up),
            pauses=(_PAUSE, _PAUSE),
            wait=self.abandoned.wait,
            decide=self.session.decide,
            is_final=lambda error: (
                not isinstance(error, errors.CenterUnreachableError)
                or isinstance(error, errors.CenterClosedError)
            ),
        )


def was_not_applied(error: Exception) -> bool:
    """Return whether an error means that the message was not applied.

    After any other error the same message must be sent again: a new message with its
    sequence number would get the old answer.
    """
    is_unknown = isinstance(error, errors.CenterUnreachableError) or (
        type(error) is errors.CenterError
    )
    return isinstance(error, errors.AgnOptaxError) and not is_unknown


def _result_of(future: Future[Answer]) -> Answer:
    """Wait for an answer, or raise the error of its thread.

    Callers may keep the error, so the frames of its traceback are cleared: they would
    keep the arrays of that thread alive.
    """
    cause = future.exception()
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return future.result()
