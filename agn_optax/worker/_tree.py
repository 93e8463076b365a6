"""A tree of centers: a center that is itself a worker of a parent center.

The workers of a site exchange often with the site's own center, and the sites exchange
rarely with their parent. For the parent, a site is a `Worker` like any other: its
parameters are the site's center, and an exchange at the site is one of its local steps.
The site does not stop while it waits for its parent, so it adopts the answer and keeps
the progress that it has made meanwhile.

If the parent does not answer, the site sends the same message again. If the parent no
longer knows the site, or rejects it, the site joins again; the progress of the site's
center since it last adopted the parent is kept, and sent. The parent then reports the
last exchange of the previous session that it knows. This tells the site whether a
message without an answer must be sent again.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from concurrent.futures import wait
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import Outage, combinations, in_background, retry, trees
from agn_optax.center import Center, Core, Submission
from agn_optax.round import LocalState
from agn_optax.worker._worker import Worker

PyTree = Any
_log = logging.getLogger("agn_optax")
_POLL = 0.5  # s between checks whether another site has initialized the parent
_MAX_PAUSE = 15.0  # s between two attempts to reach the parent


@dataclasses.dataclass
class _Round:
    """The progress of a site in one round with its parent."""

    params: PyTree  # the site's center at the end of the round
    steps: int  # exchanges at the site
    weight: float | None
    record: PyTree


@dataclasses.dataclass
class _EndedSession:
    """A session with the parent that has ended, kept until the next one begins."""

    resume_token: Any  # its `Worker.resume_token`
    before: Any  # its `Session.previous_session`
    codec_state: PyTree  # state of the codec before the unanswered message


class Uplink:
    """Connection of a site's center to its parent, on a separate thread.

    Args:
      core: the core of the site's center. If it has no parameters, it gets the
        parent's; if the parent has none either, the parent gets those of the site's
        chief.
      parent: the center that the sites share; its rule defines the messages of a site,
        and how a site adopts the parent.
      period: exchanges at the site between two exchanges with the parent.
      name: name of the site, unique among the workers of the parent.

    Attributes:
      ready: an event, set when the site has joined its parent, or was rejected.
      error: the error of the last attempt to reach or to join the parent; None if the
        attempt succeeded. ``core.detached`` has the text.

    Raises:
      InvalidArgumentError: the parent's rule keeps a record of gradients, and the
        site's rule sends no gradients, or has a robust ``combine``.
    """

    def __init__(self, core: Core, parent: Center, *, period: int, name: str) -> None:
        self._period = int(period)
        rule = parent.rule
        self._keeps_record = bool(
            jax.tree.leaves(rounds.init_record(rule, jnp.zeros(())))
        )
        if self._keeps_record and core.rule.message is not None:
            combinations.reject(
                "a parent whose rule sums gradients",
                "a center whose rule sends no gradients",
                f"{rule.name!r} of the parent and {core.rule.name!r} of this center",
            )
        if self._keeps_record and not core.rule.is_summed:
            combinations.reject(
                "a parent whose rule sums gradients",
                "a robust combine",
                f"{rule.name!r} of the parent and {core.rule.name!r} with "
                f"{core.rule.combine} of this center",
            )
        self.error: Exception | None = None
        self.ready = threading.Event()
        self._core = core
        self._parent = parent
        # Each exchange sends a round of the site. With patience 0 it raises if the
        # parent is lost, and is then retried.
        self._worker = Worker(parent, optax.identity(), period=1, name=name, patience=0)
        self._state: LocalState | None = None  # the worker's
        self._joined = False
        self._ended_session: _EndedSession | None = None
        self._failing_since = ""  # time of day at which `error` began
        # The site's center when it last adopted the parent: later changes are progress.
        self._anchor: PyTree = None
        self._rounds: list[_Round] = []  # rounds still to be sent, in order
        self._initial_round: _Round | None = None  # round that initializes the parent
        # Sums over the exchanges at the site since the last of these rounds, changed
        # under the lock of the site's center. The record is computed by a program, and
        # nobody waits for it under the lock.
        self._steps = 0
        self._weight: float | None = None  # None until a message has a weight
        self._record: PyTree = None  # None before the first exchange
        self._init_record = jax.jit(
            lambda: rounds.init_record(rule, self._zeros_like_center())
        )
        self._accumulate = jax.jit(self._add_to_record, donate_argnums=1)
        self._stopped = threading.Event()
        self._stop_waiting = threading.Event()  # when set, unsent progress is lost
        with core.atomically():
            core.observer = self._observe
            if core.is_initialized:
                self._anchor = self._center_params()
        self._thread = in_background(self._run, f"{name} uplink", lasting=True)

    def stop(self, timeout: float = 30.0) -> None:
        """Send the remaining progress, if there is any, and leave the parent."""
        self._stopped.set()
        wait([self._thread], timeout)
        self._stop_waiting.set()

    # The loop.

    def _run(self) -> None:
        try:
            while not self._is_over:
                retry(  # after any error: a later attempt may succeed
                    self._attempt,
                    Outage(),
                    pauses=(_POLL, _MAX_PAUSE),
                    wait=self._wait,
                    record=self._record_failure,
                )
            if self.error is not None:
                _log.error(
                    "this center ends without its parent, which %d exchanges have not "
                    "reached: %s",
                    self._steps + sum(unsent.steps for unsent in self._rounds),
                    self.error,
                )
        finally:
            self.ready.set()
            self._worker.leave()  # the other sites do not wait for this one

    @property
    def _is_over(self) -> bool:
        if not self._stopped.is_set():
            return False
        # A site that has never joined has nothing to send.
        has_unsent = self._state is not None and (self._steps or self._rounds)
        return self._stop_waiting.is_set() or not has_unsent

    @property
    def _is_due(self) -> bool:
        """True if the site must join the parent or send a round now."""
        enough = 1 if self._stopped.is_set() else self._period
        return not self._joined or bool(self._rounds) or self._steps >= enough

    def _wait(self, pause: float) -> None:
        """Wait before the next attempt; once the site ends, only for a short time."""
        if self._stopped.is_set():
            self._stop_waiting.wait(min(pause, _POLL))
        else:
            self._stopped.wait(pause)

    def _attempt(self) -> None:
        """Join the parent, send a round, or wait for progress, unless this has ended.

        If this raises, the steps before the error are not undone.
        """
        if self._is_over:
            return
        if not self._is_due:
            self._core.wait_for(lambda: self._steps >= self._period, _POLL)
            return
        if not self._joined:
            if not self._initialize_either():
                self._core.wait_for(lambda: self._core.is_initialized, _POLL)
                return
            self._join()
        else:
            if not self._rounds:
                self._rounds.append(self._end_round())
            self._send(self._rounds[0])
        if self.error is not None:
            _log.warning("this center has its parent again")
        self.error, self._core.detached = None, ""
        self.ready.set()

    def _record_failure(self, error: Exception) -> None:
        """Record and log why an attempt failed, and prepare the next one.

        If the parent is unreachable, the next attempt sends the same message again;
        after any other error it joins again.
        """
        is_unreachable = isinstance(error, errors.CenterUnreachableError)
        if self._joined and not is_unreachable:
            assert self._state is not None
            codec_state = self._state.codec_state
            self._ended_session = _EndedSession(
                self._worker.resume_token, self._last_known, codec_state
            )
            self._joined = False
        if not is_unreachable:
            self.ready.set()
        is_new = type(error) is not type(self.error)
        if is_new:
            self._failing_since = time.strftime("%X")
        text = (
            f"this center goes on without its parent since {self._failing_since}: "
            f"{error}. The progress of its workers is kept, and sent when the parent "
            "is back"
        )
        if is_new:
            _log.warning("%s", text)
        self.error, self._core.detached = error, text

    # Joining the parent.

    def _initialize_either(self) -> bool:
        """Initialize one center with the other's parameters.

        Returns:
          False if neither has parameters yet.
        """
        if self._initial_round is None:
            try:
                params = self._parent.pull().params
            except errors.NotInitializedError:
                if not self._core.is_initialized:
                    return False
                self._initial_round = self._end_round()
            else:
                self._set_anchor(params)
                return True
        initial = self._initial_round
        try:
            self._parent.initialize(initial.params, worker=self._worker.name)
        except errors.AlreadyInitializedError:  # another site was first
            if self._anchor is None:  # this site only has the parameters of its chief
                self._anchor = initial.params
            elif initial.steps:
                self._rounds.append(initial)
        else:  # the parent's first parameters include all progress
            self._anchor = initial.params
            self._rounds.clear()
        self._initial_round = None
        return True

    def _set_anchor(self, params: PyTree) -> None:
        """Set the anchor; if the site's center has no parameters, initialize it."""
        if self._anchor is not None:
            return
        with self._core.atomically():
            if not self._core.is_initialized:
                self._core.initialize(params, worker=None)
            self._anchor = self._center_params()
        self._end_round()  # discarded: the parent's parameters replace the chief's

    def _join(self) -> None:
        adopted, state = self._worker.start(self._anchor)
        anchor, unsent, ended = self._anchor, self._rounds, self._ended_session
        if ended is not None:
            if unsent and self._has_arrived(ended):
                # The codec begins again: its residual is lost rather than sent twice.
                anchor, unsent = unsent[0].params, unsent[1:]
            else:
                state = state._replace(codec_state=ended.codec_state)
        if jax.tree.all(jax.tree.map(jnp.array_equal, anchor, adopted)):
            self._anchor, self._rounds = anchor, unsent
        else:
            self._adopt(adopted, anchor, unsent)
        # Set last: if a call above raises, the next attempt joins again.
        self._joined, self._state, self._ended_session = True, state, None

    def _has_arrived(self, ended: _EndedSession) -> bool:
        """Return whether the unanswered message of an ended session was applied.

        If this is unknown, the result is True, so that the message is not sent again:
        nothing may count twice.
        """
        tokens, sequence = ended.resume_token
        new_tokens, _ = self._worker.resume_token
        before, last_known = ended.before, self._last_known
        if isinstance(tokens[0], str):  # the parent is not in shards
            tokens, new_tokens = [tokens], [new_tokens]
            before, last_known = [before], [last_known]
        found = set()  # for each shard True, False, or None if unknown
        for (center, session), (new_center, _), old, last in zip(
            tokens, new_tokens, before, last_known, strict=True
        ):
            if last is not None and last[0] == session:
                found.add(last[1] > sequence)
            elif center != new_center:  # a parent with a new id has never had it
                found.add(False)
            else:  # False if no exchange was completed since that session began
                found.add(False if last is not None and last == old else None)
        if found - {True, False} or len(found) > 1:
            _log.warning(
                "the parent may have a message of %d exchanges, or a part of it, which "
                "had no answer; it is not sent again",
                self._rounds[0].steps,
            )
        return found != {False}

    @property
    def _last_known(self) -> Any:
        """The last exchange that the parent knows, as in `Session.previous_session`."""
        return self._worker._workers[0].session.previous_session

    # Sending and adopting.

    def _center_params(self) -> PyTree:
        """Return the center, in arrays that stay valid; call under the core's lock."""
        return self._core.snapshot().params

    def _end_round(self) -> _Round:
        """End a round of progress: return it, and begin the next one."""
        with self._core.atomically():
            version = self._core.store.current
            version.escaped = True
            steps, self._steps = self._steps, 0
            weight, self._weight = self._weight, None
            record, self._record = self._record, None
        sent = self._core.store.tree(version)
        if record is None:
            record = rounds.init_record(self._parent.rule, sent)
        return _Round(sent, steps, weight, record)

    def _send(self, finished: _Round) -> None:
        assert self._state is not None
        steps, weight = finished.steps, finished.weight
        state = self._state._replace(
            local_steps=jnp.int32(steps), record=finished.record
        )
        params = trees.copy(finished.params)  # the exchange donates them
        adopted, self._state = self._worker.exchange(
            params, state, steps=steps, weight=weight
        )
        # The parent has the round, even if the site cannot adopt the answer.
        self._anchor = finished.params
        del self._rounds[0]
        self._adopt(adopted, finished.params, self._rounds)

    def _adopt(self, adopted: PyTree, anchor: PyTree, unsent: list[_Round]) -> None:
        """Replace ``anchor`` by the parent's parameters, and keep all progress since.

        The rounds in ``unsent`` are moved as well. If this raises, nothing has changed.
        """
        unsent = [
            dataclasses.replace(
                later, params=rounds.with_progress(adopted, later.params, anchor)
            )
            for later in unsent
        ]
        self._core.rebase(adopted, anchor)
        self._anchor, self._rounds = adopted, unsent

    def _observe(self, submission: Submission) -> jax.Array | None:
        """Add an exchange at the site to the sums; called under the center's lock.

        Returns:
          An array that is ready once the contribution has been read; None if it is not
          read.
        """
        self._steps += 1
        if submission.weight is not None:
            self._weight = (self._weight or 0.0) + submission.weight
        if not self._keeps_record:
            return None
        if self._record is None:
            self._record = self._init_record()
        contribution = submission.contribution
        self._record, read = self._accumulate(contribution, self._record)
        return read

    def _add_to_record(
        self, contribution: PyTree, record: PyTree
    ) -> tuple[PyTree, jax.Array]:
        """Add an encoded contribution at the site to the parent's record.

        Returns:
          The record, and an array that is ready once the contribution has been read.
        """
        gradients = rounds.decode(
            self._core.rule, contribution, self._zeros_like_center()
        )
        rule = self._parent.rule
        record = rounds.add_to_record(rule, record, gradients, gradients)
        return record, jnp.zeros((), jnp.bool)

    def _zeros_like_center(self) -> PyTree:
        """Return zeros like the site's center."""
        return optax.tree.zeros_like(self._core.store.like)
