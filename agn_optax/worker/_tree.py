"""A tree of centers: a center that is itself a worker of a parent center.

The workers of a site exchange often with the site's own center, and the sites exchange
rarely with their parent. For the parent, a site is a `Worker` like any other: its
parameters are the site's center, and an exchange at the site is one of its local steps.
The site does not stop while it waits for its parent, so it adopts the answer and keeps
the progress that it has made meanwhile.

If the parent does not answer, the site sends the same message again. If the parent does
not know the site any more, or rejects it, the site joins it again; the progress of the
site's center since it last adopted the parent is kept, and sent. The parent then tells
the last exchange that it knows of the previous session, and the site decides by this
whether to send a message without an answer again.
"""

from __future__ import annotations

import dataclasses
import functools
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
from agn_optax._internal import Backoff, combinations, in_background, trees
from agn_optax.center import Center, Core, Submission
from agn_optax.round import LocalState
from agn_optax.worker._worker import Worker

PyTree = Any
_log = logging.getLogger("agn_optax")
_POLL = 0.5  # s between checks whether another site has initialized the parent
_LONGEST = 15.0  # s, the longest pause between two attempts to reach the parent


@dataclasses.dataclass
class _Round:
    """The progress of a site in one round with its parent."""

    sent: PyTree  # the site's center at the end of the round
    steps: int  # exchanges at the site
    weight: float | None
    record: PyTree

    @functools.cached_property
    def copied(self) -> PyTree:
        """A copy of ``sent`` that an exchange may donate."""
        return trees.copy(self.sent)


@dataclasses.dataclass
class _Lost:
    """A session with the parent that has ended, kept until the next one begins."""

    resume_token: Any  # as `Worker.resume_token`
    before: Any  # as `Session.previous_session`
    codec_state: PyTree  # state of the codec before the message under way


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
      error: the error because of which the site continues without its parent, while it
        tries to reach or to join it again; None if there is none. ``core.detached`` has
        the text.

    Raises:
      InvalidArgumentError: the parent's rule keeps a record of gradients, and the
        site's rule sends no gradients, or leaves some of them out as not trusted.
    """

    def __init__(self, core: Core, parent: Center, *, period: int, name: str) -> None:
        self._period = int(period)
        rule = parent.rule
        self._keeps_record = bool(jax.tree.leaves(rule.record.init(jnp.zeros(()))))
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
        # The worker's state, and whether it has joined; if its session has ended, the
        # session's data.
        self._state: LocalState | None = None
        self._joined = False
        self._lost: _Lost | None = None
        self._since = ""  # time of day at which `error` began
        # The site's center when it last adopted the parent: later changes are progress.
        self._base: PyTree = None
        self._rounds: list[_Round] = []  # rounds still to be sent, in order
        self._given: _Round | None = None  # round that initializes the parent
        # Under the lock of the site's center: the sums over its exchanges since the
        # last of these rounds. A program adds each to the record, without a wait for
        # the result under the lock.
        self._steps = 0
        self._weight: float | None = None  # None until a message has a weight
        self._record: PyTree = None  # None before the first exchange
        self._begin_record = jax.jit(lambda: rule.record.init(self._like()))
        self._accumulate = jax.jit(self._recorded, donate_argnums=1)
        self._stopped = threading.Event()
        self._given_up = threading.Event()  # set: do not wait to send what is left
        with core.atomically():
            core.observer = self._observe
            if core.is_initialized:
                self._base = self._now()
        self._ended = in_background(self._run, f"{name} uplink", lasting=True)

    def stop(self, timeout: float = 30.0) -> None:
        """Send the remaining progress, if there is any, and leave the parent."""
        self._stopped.set()
        wait([self._ended], timeout)
        self._given_up.set()

    # The loop.

    def _run(self) -> None:
        backoff = Backoff(_POLL, longest=_LONGEST)
        pauses = backoff.pauses()
        try:
            while not self._is_over:
                try:
                    if self._is_due:
                        self._act()
                    else:
                        self._core.wait_for(lambda: self._steps >= self._period, _POLL)
                    pauses = backoff.pauses()
                except Exception as error:  # any: a later attempt may succeed
                    self._fails(error)
                    if self._stopped.is_set():
                        self._given_up.wait(_POLL)
                    else:
                        self._stopped.wait(next(pauses))
            if self.error is not None:
                _log.error(
                    "this center ends without its parent, which %d exchanges have not "
                    "reached: %s",
                    self._steps + sum(left.steps for left in self._rounds),
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
        owes = self._state is not None and (self._steps or self._rounds)
        return self._given_up.is_set() or not owes

    @property
    def _is_due(self) -> bool:
        """True if the site must join the parent or send a round now."""
        enough = 1 if self._stopped.is_set() else self._period
        return not self._joined or bool(self._rounds) or self._steps >= enough

    def _act(self) -> None:
        """Attempt the next action: join, or send a round.

        If it fails, the actions before are not undone.
        """
        if not self._joined:
            if not self._meet():
                self._core.wait_for(lambda: self._core.is_initialized, _POLL)
                return
            self._join()
        else:
            if not self._rounds:
                self._rounds.append(self._take())
            self._send(self._rounds[0])
        if self.error is not None:
            _log.warning("this center has its parent again")
        self.error, self._core.detached = None, ""
        self.ready.set()

    def _fails(self, error: Exception) -> None:
        """Record and log why an attempt failed, and prepare the next one.

        The next attempt sends again if the parent is unreachable, else it joins again.
        """
        is_lost = isinstance(error, errors.CenterUnreachableError)
        if self._joined and not is_lost:
            assert self._state is not None
            codec_state = self._state.codec_state
            self._lost = _Lost(self._worker.resume_token, self._before, codec_state)
            self._joined = False
        if not is_lost:
            self.ready.set()
        is_new = type(error) is not type(self.error)
        if is_new:
            self._since = time.strftime("%X")
        text = (
            f"this center goes on without its parent since {self._since}: {error}. "
            "What its workers do is kept, and sent once the parent is there again"
        )
        if is_new:
            _log.warning("%s", text)
        self.error, self._core.detached = error, text

    # Joining the parent.

    def _meet(self) -> bool:
        """Initialize one center with the other's parameters.

        Returns:
          False if neither has parameters yet.
        """
        if self._given is None:
            try:
                params = self._parent.pull().params
            except errors.NotInitializedError:
                if not self._core.is_initialized:
                    return False
                self._given = self._take()
            else:
                self._begin(params)
                return True
        given = self._given
        try:
            self._parent.initialize(given.sent, worker=self._worker.name)
        except errors.AlreadyInitializedError:  # another site was quicker
            if self._base is None:  # this site only has the parameters of its chief
                self._base = given.sent
            elif given.steps:
                self._rounds.append(given)
        else:  # the parent's first parameters include all progress
            self._base = given.sent
            self._rounds.clear()
        self._given = None
        return True

    def _begin(self, params: PyTree) -> None:
        """Set the site's base, and initialize its center with ``params`` if needed."""
        if self._base is not None:
            return
        with self._core.atomically():
            if not self._core.is_initialized:
                self._core.initialize(params, worker=None)
            self._base = self._now()
        self._take()  # discarded: parameters of the site's chief yield to the parent's

    def _join(self) -> None:
        adopted, state = self._worker.start(self._base)
        base, left, lost = self._base, self._rounds, self._lost
        if lost is not None:
            if left and self._has_arrived(lost):
                # The codec begins again: its residual is lost rather than sent twice.
                base, left = left[0].sent, left[1:]
            else:
                state = state._replace(codec_state=lost.codec_state)
        if jax.tree.all(jax.tree.map(jnp.array_equal, base, adopted)):
            self._base, self._rounds = base, left
        else:
            self._adopt(adopted, base, left)
        # Set last: if a call above raises, the next attempt joins again.
        self._joined, self._state, self._lost = True, state, None

    def _has_arrived(self, lost: _Lost) -> bool:
        """Return whether the unanswered message of a lost session reached the parent.

        If this is unknown, the result is True, so that the message is not sent again:
        nothing may count twice.
        """
        (tokens, sequence), (now, _) = lost.resume_token, self._worker.resume_token
        then, before = lost.before, self._before
        if isinstance(tokens[0], str):  # the parent is not in shards
            tokens, now, then, before = [tokens], [now], [then], [before]
        found = set()
        for (center, session_id), (center_now, _), first, known in zip(
            tokens, now, then, before, strict=True
        ):
            if known is not None and known[0] == session_id:
                found.add(known[1] > sequence)
            elif center != center_now:  # a parent with a new id has never had it
                found.add(False)
            else:  # no exchange was settled since that session began, or unknown
                found.add(False if known is not None and known == first else None)
        if found - {True, False} or len(found) > 1:
            _log.warning(
                "the parent may have a message of %d exchanges, or a part of it, which "
                "had no answer; it is not sent again",
                self._rounds[0].steps,
            )
        return found != {False}

    @property
    def _before(self) -> Any:
        """The last exchange that the parent knows, as in `Session.previous_session`."""
        return self._worker._parts[0].session.previous_session

    # Sending and adopting.

    def _now(self) -> PyTree:
        """Return the site's center, safe from overwriting; called under its lock."""
        return self._core.snapshot().params

    def _take(self) -> _Round:
        """End a round of progress: return it, and begin the next one."""
        with self._core.atomically():
            version = self._core.store.current
            version.escaped = True
            steps, self._steps = self._steps, 0
            weight, self._weight = self._weight, None
            record, self._record = self._record, None
        sent = self._core.store.tree(version)
        if record is None:
            record = self._parent.rule.record.init(sent)
        return _Round(sent, steps, weight, record)

    def _send(self, sent: _Round) -> None:
        assert self._state is not None
        steps = sent.steps
        state = self._state._replace(local_steps=jnp.int32(steps), record=sent.record)
        adopted, self._state = self._worker.exchange(
            sent.copied, state, steps=steps, weight=sent.weight
        )
        # The parent has the round, even if the site cannot adopt the answer.
        self._base = sent.sent
        del self._rounds[0]
        self._adopt(adopted, sent.sent, self._rounds)

    def _adopt(self, adopted: PyTree, base: PyTree, left: list[_Round]) -> None:
        """Replace ``base`` by the parent's parameters, and keep all progress since.

        The rounds in ``left`` are moved as well. If this raises, nothing has changed.
        """
        left = [
            dataclasses.replace(
                part, sent=rounds.with_progress(adopted, part.sent, base)
            )
            for part in left
        ]
        self._core.rebase(adopted, base)
        self._base, self._rounds = adopted, left

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
            self._record = self._begin_record()
        contribution = submission.contribution
        self._record, read = self._accumulate(contribution, self._record)
        return read

    def _recorded(
        self, contribution: PyTree, record: PyTree
    ) -> tuple[PyTree, jax.Array]:
        """Add an encoded contribution at the site to the parent's record.

        Returns:
          The record, and an array that is ready once the contribution has been read.
        """
        gradients = rounds.decode(self._core.rule, contribution, self._like())
        rule = self._parent.rule
        record = rounds.add_to_record(rule, record, gradients, gradients)
        return record, jnp.zeros((), jnp.bool)

    def _like(self) -> PyTree:
        """Return zeros like the site's center."""
        return jax.tree.map(
            lambda c: jnp.zeros(c.shape, c.dtype), self._core.store.like
        )
