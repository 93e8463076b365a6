"""A tree of centers: a center that is itself a worker of a parent center.

The workers of a site talk to the site's own center, often; the sites talk to their
parent, rarely. For the parent, a site is a `Worker` like any other: its parameters are
the site's center, and an exchange at the site is one of its local steps. The site does
not stop while it waits for its parent, so it adopts the answer with the progress that
it has made since.

Where the parent does not answer, the site sends the same message again. Where it knows
the site no more, or refuses it, the site joins it anew: what the site's center has more
than it had when it adopted last stays, and is sent. Whether a message without an answer
is to be sent again, the parent says: it knows the last exchange of the life before.
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
from agn_optax._internal import check, in_background, trees
from agn_optax.center import Center, Claim, Core
from agn_optax.round import LocalState
from agn_optax.worker._worker import Worker

PyTree = Any
_log = logging.getLogger("agn_optax")
_POLL = 0.5  # seconds; how soon it sees that somebody else initialized the parent
_LONGEST = 15.0  # seconds between two attempts to reach the parent, at most


@dataclasses.dataclass
class _Round:
    """The progress of a site since it last sent something."""

    sent: PyTree  # the site's center at its end
    steps: int
    weight: float | None
    record: PyTree

    @functools.cached_property
    def copied(self) -> PyTree:
        """Parameters that an exchange may donate."""
        return trees.copy(self.sent)


@dataclasses.dataclass
class _Lost:
    """A life at the parent that has ended, until the site has joined again."""

    life: Any  # as `Worker.life`
    before: Any  # as `Session.before`
    codec_state: PyTree  # the codec's
    # ... if the message that is under way has arrived; None if that is not known.
    codec_state_after: PyTree


class Uplink:
    """Keeps a center in touch with its parent, on a thread of its own.

    Args:
      core: of the site's center. Without parameters, it gets the parent's; if the
        parent has none either, the parent gets those of the site's chief.
      parent: the center that the sites share; its rule says what a site sends, and how
        it adopts.
      period: exchanges at the site between two exchanges with the parent.
      name: of the site, unique among the workers of the parent.

    Attributes:
      ready: an event, set when the site has joined its parent, or was refused.
      error: why the site goes on without its parent, which it tries to reach or to join
        again; None while it does not. Its core says the same as ``detached``.

    Raises:
      InvalidArgumentError: the parent's rule keeps a record of gradients, and the
        site's rule has none to offer, or does not trust all of them.
    """

    def __init__(self, core: Core, parent: Center, *, period: int, name: str) -> None:
        self._period = int(check.positive_int(period, "parent_period"))
        rule = parent.rule
        self._keeps_record = bool(jax.tree.leaves(rule.record.init(jnp.zeros(()))))
        if self._keeps_record and core.rule.message is not None:
            raise errors.InvalidArgumentError(
                f"rule {rule.name!r} of the parent sums gradients, and rule "
                f"{core.rule.name!r} of this center does not send any; give the "
                "parent a rule that sends displacements, such as downpour or diloco"
            )
        if self._keeps_record and not core.rule.is_summed:
            raise errors.InvalidArgumentError(
                f"rule {rule.name!r} of the parent sums all gradients that the workers "
                f"of this site send, also those that {core.rule.combine} of its rule "
                f"{core.rule.name!r} leaves out; give the parent a rule that sends "
                "displacements, such as downpour or diloco"
            )
        self.error: Exception | None = None
        self.ready = threading.Event()
        self._core = core
        self._parent = parent
        # A lost parent is an error of its exchange, which is then tried again.
        self._worker = Worker(
            parent, optax.identity(), period=period, name=name, patience=0
        )
        # Of that worker: its state, and whether it is in touch. Where it is not, its
        # life as it was.
        self._state: LocalState | None = None
        self._joined = False
        self._lost: _Lost | None = None
        self._since = ""  # when `error` began
        # The site's center where it last adopted the parent: all since is progress.
        self._base: PyTree = None
        self._rounds: list[
            _Round
        ] = []  # that are still to be sent, the first one first
        self._given: _Round | None = None  # what the parent gets as first parameters
        # Under the lock of the site's center: what its exchanges add up to since the
        # last of those rounds. Each is read by a program, which nobody waits for there.
        self._steps = 0
        self._weight: float | None = None  # None while none of them says anything
        self._record: PyTree = None  # None before the first
        self._begin_record = jax.jit(lambda: rule.record.init(self._like()))
        self._accumulate = jax.jit(self._recorded, donate_argnums=1)
        self._stopped = threading.Event()
        self._given_up = threading.Event()  # nothing that it owes is waited for
        with core.atomically():
            core.observer = self._observe
            if core.is_initialized:
                self._base = self._now()
        self._ended = in_background(self._run, f"{name} uplink", lasting=True)

    def stop(self, timeout: float = 30.0) -> None:
        """Exchanges once more, if there is something to say, and leaves the parent."""
        self._stopped.set()
        wait([self._ended], timeout)
        self._given_up.set()

    # What it does next, again and again.

    def _run(self) -> None:
        pause = _POLL
        try:
            while not self._is_over:
                try:
                    if self._is_due:
                        self._act()
                    else:
                        self._core.wait_for(lambda: self._steps >= self._period, _POLL)
                    pause = _POLL
                except Exception as error:  # whatever it is, another time may do
                    self._fails(error)
                    if self._stopped.is_set():
                        self._given_up.wait(_POLL)
                    else:
                        self._stopped.wait(pause)
                        pause = min(2 * pause, _LONGEST)
            if self.error is not None:
                _log.error(
                    "this center ends without its parent, which %d exchanges have not "
                    "reached: %s",
                    self._steps + sum(each.steps for each in self._rounds),
                    self.error,
                )
        finally:
            self.ready.set()
            self._worker.leave()  # the other sites do not wait for this one

    @property
    def _is_over(self) -> bool:
        if not self._stopped.is_set():
            return False
        # One that has never joined owes nothing.
        owes = self._state is not None and (self._steps or self._rounds)
        return self._given_up.is_set() or not owes

    @property
    def _is_due(self) -> bool:
        """True where there is something to do with the parent now."""
        enough = 1 if self._stopped.is_set() else self._period
        return not self._joined or bool(self._rounds) or self._steps >= enough

    def _act(self) -> None:
        """One attempt at what comes next. What has been done stays done if it fails."""
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
        """Say why an attempt has failed; the next one joins anew, or tries again."""
        is_lost = isinstance(error, errors.CenterUnreachableError)
        if self._joined and not is_lost:
            self._lost, self._joined = self._now_lost(), False
        if not is_lost:
            self.ready.set()
        if type(error) is not type(self.error):
            self._since = time.strftime("%X")
        said = (
            f"this center goes on without its parent since {self._since}: {error}. "
            "What its workers do is kept, and sent once the parent is there again"
        )
        if type(error) is not type(self.error):
            _log.warning("%s", said)
        self.error, self._core.detached = error, said

    # How it joins.

    def _meet(self) -> bool:
        """Give one center the other's parameters; False while neither has any."""
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
            if self._base is None:  # all that this one has are its chief's parameters
                self._base = given.sent
            elif given.steps:
                self._rounds.append(given)
        else:  # everything that was to be sent is in there
            self._base = given.sent
            self._rounds.clear()
        self._given = None
        return True

    def _begin(self, params: PyTree) -> None:
        """The site's first parameters, if it has none."""
        if self._base is not None:
            return
        with self._core.atomically():
            if not self._core.is_initialized:
                self._core.initialize(params, worker=None)
            self._base = self._now()
        self._take()  # what it had from a chief gives way to the parent's

    def _join(self) -> None:
        adopted, state = self._worker.start(self._base)
        base, left, lost = self._base, self._rounds, self._lost
        if lost is not None:
            codec_state = lost.codec_state
            if left and self._has_arrived(lost):
                base, left = left[0].sent, left[1:]
                codec_state = lost.codec_state_after
                if codec_state is None:  # what it owes is lost, and not sent twice
                    codec_state = state.codec_state
            state = state._replace(codec_state=codec_state)
        if jax.tree.all(jax.tree.map(jnp.array_equal, base, adopted)):
            self._base, self._rounds = base, left
        else:
            self._adopt(adopted, base, left)
        # Only now, for what raises before is tried again from the beginning.
        self._joined, self._state, self._lost = True, state, None

    def _has_arrived(self, lost: _Lost) -> bool:
        """Return whether the parent has a message of an earlier life without an answer.

        Where nobody knows, it is not sent again: nothing may count twice.
        """
        (lives, sequence), (now, _) = lost.life, self._worker.life
        then, before = lost.before, self._before
        if isinstance(lives[0], str):  # of a parent that is not in shards
            lives, now, then, before = [lives], [now], [then], [before]
        found = set()
        for (center, incarnation), (center_now, _), first, known in zip(
            lives, now, then, before, strict=True
        ):
            if known is not None and known[0] == incarnation:
                found.add(known[1] > sequence)
            elif center != center_now:  # a parent in another life has never had it
                found.add(False)
            else:  # nothing was settled since that life began, or nobody knows
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
        """The parent's word on this site's life before, see `Session.before`."""
        session = self._worker._session
        assert session is not None
        return session.before

    def _now_lost(self) -> _Lost:
        """The life that ends with an error."""
        assert self._state is not None
        try:
            after = self._codec_state_after()
        except Exception:  # a program has failed, and the site goes on all the same
            _log.exception("what the codec keeps for the next message may be lost")
            after = None
        return _Lost(self._worker.life, self._before, self._state.codec_state, after)

    def _codec_state_after(self) -> PyTree:
        """The codec's, had the parent the message that is under way."""
        state = self._state
        assert state is not None
        if not self._rounds or not jax.tree.leaves(state.codec_state):
            return state.codec_state
        anchor, _ = self._worker._require_start()
        sent = self._rounds[0]
        state = state._replace(local_steps=jnp.int32(sent.steps), record=sent.record)
        return self._worker._programs.contribute(state, sent.sent, anchor.params)[1]

    # What it sends, and adopts.

    def _now(self) -> PyTree:
        """The site's center, which stays what it is; called under its lock."""
        return self._core.snapshot().params

    def _take(self) -> _Round:
        """Take the progress since this was called last; it begins anew."""
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
        adopted, self._state = self._worker.flush(
            sent.copied, state, steps=steps, weight=sent.weight
        )
        # The parent has it, whether or not the site can adopt the answer.
        self._base = sent.sent
        del self._rounds[0]
        self._adopt(adopted, sent.sent, self._rounds)

    def _adopt(self, adopted: PyTree, base: PyTree, left: list[_Round]) -> None:
        """The parent's parameters in place of ``base``, and all progress since.

        That are the rounds that are left, too. If it raises, nothing has changed.
        """
        left = [
            _Round(
                rounds.with_progress(adopted, each.sent, base),
                each.steps,
                each.weight,
                each.record,
            )
            for each in left
        ]
        self._core.shift(adopted, base)
        self._base, self._rounds = adopted, left

    def _observe(self, contribution: PyTree, claim: Claim) -> jax.Array | None:
        """An exchange at the site; called under the lock of its center."""
        self._steps += 1
        if claim.weight is not None:
            self._weight = (self._weight or 0.0) + claim.weight
        if not self._keeps_record:
            return None
        if self._record is None:
            self._record = self._begin_record()
        self._record, read = self._accumulate(contribution, self._record)
        return read

    def _recorded(
        self, contribution: PyTree, record: PyTree
    ) -> tuple[PyTree, jax.Array]:
        """The parent's record with a contribution at the site, which came encoded.

        Also what is ready as soon as the contribution has been read.
        """
        gradients = self._core.rule.codec.decode(contribution, self._like())
        record = self._parent.rule.record.update(gradients, record, gradients)[1]
        return record, jnp.zeros((), jnp.bool)

    def _like(self) -> PyTree:
        """Zeros like the site's center."""
        return jax.tree.map(
            lambda c: jnp.zeros(c.shape, c.dtype), self._core.store.like
        )
