"""The exchanges of one part of a model with its center.

A part is a fragment of the model, for the shard that keeps it, or the whole model. A
`Worker` has one or more parts, and calls their acts in order. The `Machine` of a part
says what to do next, and this module does it: its acts take the parameters and the
local state of the part, and return them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, trees
from agn_optax.center import Answer, Center, Session, Snapshot, Submission
from agn_optax.round import LocalState
from agn_optax.worker._flight import Message, is_settled
from agn_optax.worker._machine import Counts, Machine, State
from agn_optax.worker._processes import SharedMessage, SharedSession
from agn_optax.worker._programs import (
    AT_ONCE,
    Adoption,
    Sent,
    StreamingState,
    programs,
)

PyTree = Any
S = TypeVar("S", Snapshot, Answer)
# (number of the exchange, values by name) -> ignored.
Callback = Callable[[int, Mapping[str, float]], object]
_log = logging.getLogger("agn_optax")


class PartState(NamedTuple):
    """State of a worker's exchanges of one part of its model."""

    anchor: PyTree  # the center as last adopted; None if the rule does not read it
    anchor_version: Any  # int; a tuple of ints for a center in shards
    local_steps: Any  # int: local steps since the last exchange
    exchanges: Any  # int
    weight: Any = None  # float: weight of the round so far; None if none was given
    pace: Any = None  # float: as `Worker.pace`


class Part:
    """The exchanges of one part of a model: see `Worker` for most arguments.

    Args:
      center: the center of this part.
      inner: the inner optimizer of this part.
      gradients: the transformation before it.
      adoption: how answers are adopted.
      name: name of the worker.
      period: as for `Worker`.
      overlap: as for `Worker`.
      patience: as for `Worker`.
      give_up: as for `Worker`.
      callbacks: as for `Worker`.

    Attributes:
      programs: the compiled programs.
      machine: the state of the exchanges.
      message: the arrays of the machine's message; None if it has none yet.
      session: the session with the center; None if it has not started.
      answer: the last answer, without parameters; None before the first.
      reported: numbers that go with every message, by name.

    Other attributes are those of `Worker`.
    """

    def __init__(
        self,
        center: Center,
        inner: optax.GradientTransformation,
        gradients: optax.GradientTransformation | None = None,
        adoption: Adoption = AT_ONCE,
        *,
        name: str,
        period: Any,
        overlap: bool,
        patience: int | None,
        give_up: float,
        callbacks: Sequence[Callback],
    ) -> None:
        self.center = center
        self.name = name
        self.programs = programs(center.rule, inner, gradients, adoption)
        self.machine = Machine(overlap=overlap, delay=adoption.delay, patience=patience)
        self.message: Message | None = None
        self.session: Any = None
        self.reported: dict[str, Any] = {}
        self.dropped = 0
        self.rejected = 0
        self.answer: Answer | None = None
        self.pace: float | None = None
        self._follows = isinstance(period, rounds.DynamicPeriod)  # the worker's speed
        # Exchanges made so far -> local steps of the next round.
        self.length: Callable[[int], int] = (
            (lambda _: period(self.pace)) if self._follows else _scheduled(period)
        )
        self._give_up = give_up
        self._callbacks = callbacks
        self._anchor: Snapshot | None = None
        self._knows_anchor = True  # whether the center, by its id, has had this anchor
        self._paced = False  # whether a warning about miscounted steps was logged
        # Local steps of a message, as counted by the device, and as `exchange` was
        # told; kept until the device has computed its count.
        self._steps: tuple[Any, int] | None = None
        self._empty = 0  # messages in a row without local steps of `tx`
        # Buffers of the last message, and of the parameters of which it was made: the
        # next message sent in the background overwrites them.
        self._spare: tuple[PyTree, PyTree] | None = None
        self._like: tuple[PyTree, LocalState]  # params and state, abstract

    @property
    def exchanges(self) -> int:
        """The number of exchanges made."""
        return self.machine.exchanges

    @property
    def version(self) -> Any:
        """The version of the center adopted last; None before the start."""
        return None if self._anchor is None else self._anchor.version

    @property
    def resume_token(self) -> Any:
        """This part's session, as `Worker.resume_token`."""
        if self.session is None:
            return None
        return [self.session.resume_token, self.machine.settled]

    @property
    def round_length(self) -> int:
        """The local steps of the current round."""
        return self.length(self.machine.round)

    @property
    def is_full(self) -> bool:
        """True if the current round is full."""
        return self.machine.is_full(self.round_length)

    def require_start(self) -> Snapshot:
        """Return the anchor, or raise if the worker has not started."""
        if self._anchor is None or self.session is None:
            raise errors.WorkerStateError(
                f"worker {self.name!r} has not started: call start() before its first "
                "local step"
            )
        return self._anchor

    # Start, leave, save and restore.

    def check_start(self, params: PyTree, *, chief: bool | None) -> None:
        """Raise the errors of `start` that need no center."""
        self.length(self.exchanges)  # raises if invalid
        if chief:
            check.float_leaves(params, "params")
            # If this raises, it must do so before other workers can join.
            jax.eval_shape(self.programs.start, params, params)

    def start(
        self, params: PyTree, *, chief: bool | None, timeout: float | None
    ) -> tuple[PyTree, LocalState]:
        """Join the center, and adopt it: see `Worker.start`."""
        session = self.center.join(self.name, params, timeout=timeout)
        try:
            if chief:
                snapshot = self.center.initialize(params, worker=self.name)
            elif chief is None:
                broadcast = {"broadcast": True} if self.programs.follows else {}
                snapshot = self.center.pull(**broadcast)
            else:
                snapshot = self.center.wait(timeout)
            if params is None:
                params = snapshot.params
            check.same_tree(params, snapshot.params, "params", "center")
            check.float_leaves(params, "params")
            anchor = _placed(snapshot, params)
            loop = self.programs.start(anchor.params, params)
        except BaseException:
            session.leave()
            raise
        self.machine.start(counts=Counts())
        self._begin(session, loop, anchor)
        return loop

    def leave(self) -> None:
        """Leave the center: see `Worker.leave`."""
        self._anchor = self._spare = None
        self.machine.leave()
        session, self.session = self.session, None
        message, self.message = self.message, None
        if message is not None:
            message.abandoned.set()  # end its retries
        if session is not None:
            session.leave()

    def save(self) -> PartState:
        """Return the state of the exchanges.

        Raises:
          WorkerStateError: the worker was not started, or has an exchange in flight.
        """
        anchor = self.require_start()
        if self.message is not None:  # the center may or may not have applied it
            raise errors.WorkerStateError(
                f"worker {self.name!r} has an exchange that has not ended, which "
                "cannot be saved: receive() or flush() before"
            )
        return PartState(
            anchor.params,
            anchor.version,
            self.machine.now.steps,
            self.exchanges,
            self.machine.now.weight,
            self.pace,
        )

    def check_restored(
        self, params: PyTree, state: LocalState, saved: PartState
    ) -> None:
        """Raise the errors of `Worker.restore`, before anything changes."""
        center = self.center.pull()
        check.same_tree(params, center.params, "saved.params", "center")
        expected = jax.eval_shape(self.programs.start, center.params, params)[1]
        check.same_tree(state, expected, "saved.state", "this worker's state")
        if self.programs.holds_anchor:
            check.same_tree(saved.anchor, center.params, "saved.anchor", "center")
        seen = jax.tree.map(int, saved.anchor_version)
        check.same_tree(seen, center.version, "saved.anchor_version", "its version")
        if any(jax.tree.leaves(jax.tree.map(int.__gt__, seen, center.version))):
            raise errors.WorkerStateError(
                f"saved is of a worker that has seen version {seen} of the center, "
                f"which is at {center.version}: restore both from one checkpoint, or "
                "adopt this center with start()"
            )
        self.length(int(saved.exchanges))  # raises if invalid

    def restore(
        self, params: PyTree, state: LocalState, saved: PartState, resume_token: Any
    ) -> tuple[PyTree, LocalState]:
        """Join the center, and continue with these arrays: see `Worker.restore`."""
        own, settled = (None, 0) if resume_token is None else resume_token
        session = self.center.join(self.name, params, resume_token=own)
        weight = None if saved.weight is None else float(saved.weight)
        self.machine.start(
            settled=settled,
            exchanges=int(saved.exchanges),
            counts=Counts(int(saved.local_steps), weight),
        )
        seen = jax.tree.map(int, saved.anchor_version)
        self._begin(session, (params, state), Snapshot(saved.anchor, seen))
        self._knows_anchor = (
            resume_token is not None
        )  # else the center may have a new id
        self.pace = None if saved.pace is None else float(saved.pace)
        return params, state

    def _begin(self, session: Session, loop: PyTree, anchor: Snapshot) -> None:
        self.session = session
        self._knows_anchor = True
        self._steps, self._empty = None, 0
        self._like = jax.eval_shape(lambda: loop)
        self._keep_anchor(anchor)

    def ask_if_acting(self) -> bool:
        """Return whether an act is due after the local steps made so far.

        A worker of several processes communicates here: all of them must call this.
        """
        machine, message, length = self.machine, self.message, self.round_length
        if machine.must_act(length):
            return True
        if not machine.may_receive(length):
            return False
        assert message is not None
        return message.ask_if_answered()

    # Acts.

    def make(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """End the round: its message exists, of these parameters and this state."""
        self._check_loop(params, state)
        self.machine.make()
        return params, state

    def complete(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Send the message and adopt its answer, or send it in the background.

        If there is no message to complete, nothing is done.
        """
        machine, message = self.machine, self.message
        if not machine.is_stuck:
            return params, state
        if message is not None:  # else `make` has checked them
            self._check_loop(params, state)
        elif machine.background:
            return self._send(params, state)
        else:
            anchor, measured = self.require_start(), self._measured(params, state)
            contribution, codec_state, steps = self.programs.contribute(
                state, params, anchor.params
            )
            message = self._message_of(contribution, steps, measured, codec_state)
            self.message = message
        if message.answer is None:
            try:
                message.answer = message.exchange()
            except errors.CenterUnreachableError as error:
                goes_on = machine.lose()
                if not goes_on or isinstance(error, errors.CenterClosedError):
                    raise
                state = state._replace(codec_state=message.codec_state)
                sent, state = self.programs.keep_going(params, state)
                self._send_in_background(message, sent)
                return params, state
            except Exception as error:
                if is_settled(error):
                    self._discard()
                raise
        if machine.state is State.MADE:
            machine.answer()
        state = state._replace(codec_state=message.codec_state)
        return self._adopt(params, state, message, message.answer)

    def receive(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Wait for the answer to a message in flight, adopt it, and keep progress.

        If no message is in flight, nothing is done.
        """
        if not self.machine.in_flight:
            return params, state
        message = self.message
        assert message is not None
        self._check_loop(params, state)
        anchor = self.require_start()
        try:
            answer = message.receive()
        except Exception as error:
            if is_settled(error):
                self._discard()  # local steps may go on
            else:
                self.machine.lose()
                message.send_in_background(self._give_up)
            raise
        params, state = self._adopt(params, state, message, answer, anchor)
        if self.machine.background:
            assert message.sent is not None
            self._spare = message.submission.contribution, message.sent.params
        return params, state

    def _discard(self) -> None:
        """Forget a message that was not applied, so that it is not sent again."""
        self.message = None
        self.machine.discard()

    def discard_unsent(self) -> None:
        """Forget a message that a call has not sent because it raised before."""
        if self.machine.state is State.MADE and self.message is None:
            self.machine.discard()

    def _send(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Make the arrays of a message, and send it while local steps go on."""
        anchor, measured = self.require_start(), self._measured(params, state)
        spare, self._spare = self._spare, None
        if spare is None:
            contribution, *_ = self.programs.contribute(state, params, anchor.params)
            kept = params if self.programs.keeps_sent else None
            spare = trees.copy((contribution, kept))
        contribution, sent, state = self.programs.send(
            spare, params, state, anchor.params
        )
        for leaf in jax.tree.leaves(contribution):
            leaf.copy_to_host_async()
        message = self._message_of(contribution, sent.steps, measured)
        self._send_in_background(message, sent)
        return params, state

    def _send_in_background(self, message: Message, sent: Sent) -> None:
        """Send a message in the background, and begin the next round."""
        message.sent, self.message = sent, message
        self.machine.send()
        message.send_in_background(self._give_up)

    def _message_of(
        self,
        contribution: PyTree,
        steps: jax.Array,
        measured: dict[str, Any],
        codec_state: PyTree = None,
    ) -> Message:
        anchor, counts = self.require_start(), self.machine.message
        if self._steps is None:
            self._steps = steps, counts.steps
        is_known = self.programs.follows and self._knows_anchor
        submission = Submission(
            self.machine.number,
            contribution,
            anchor.version,
            steps=counts.steps,
            weight=counts.weight,
            reported=dict(self.reported),
            anchor=anchor.params if is_known else None,
        )
        kind = SharedMessage if isinstance(self.session, SharedSession) else Message
        return kind(self.session, submission, measured, codec_state)

    def _adopt(
        self,
        params: PyTree,
        state: LocalState,
        message: Message,
        answer: Answer,
        anchor: Snapshot | None = None,
    ) -> tuple[PyTree, LocalState]:
        """Adopt an answer, or reset this worker if its message was rejected.

        The codec returns a message that was not applied to its residual, if it can, to
        send it later. After two rejections in a row the residual is discarded: a
        message that is rejected again, such as for its size, would always be rejected.
        A message in parts is lost instead: some parts may have been applied, and
        nothing may be applied twice.

        Args:
          params: the loop's parameters.
          state: the loop's state.
          message: the message.
          answer: its answer.
          anchor: the anchor of a message that was in flight.
        """
        contribution = message.submission.contribution
        if self._callbacks:
            dtype = self.center.rule.codec.answer_dtype
            message.measured["bytes_received"] = (
                trees.nbytes(answer.params, dtype)
                if answer.received is None
                else answer.received
            )
        answer = _placed(answer, params)
        if self._callbacks:
            distance = self.programs.distance(params, answer.params)
            message.measured["distance"] = distance
        if answer.rejected:
            _log.warning(
                "a message of worker %r was rejected; it continues from the center: %s",
                self.name,
                answer.rejected,
            )
            is_next = self.answer is not None and self.answer.rejected
            residual = "discarded" if is_next else "restored"
            params, state = self.programs.reset(
                params,
                state,
                contribution,
                answer.params,
                residual="kept" if answer.is_partial else residual,
            )
        else:
            take_back = self.programs.take_back
            if take_back is not None and not (answer.applied or answer.is_partial):
                state = take_back(state, contribution)
            if anchor is None:
                params, state = self.programs.adopt(params, state, answer.params)
            else:
                params, state = self.programs.receive(
                    params,
                    state,
                    contribution,
                    message.sent,
                    anchor.params,
                    answer.params,
                )
        self._end(message, answer)
        return params, state

    def _end(self, message: Message, answer: Answer) -> None:
        """Update counts and the anchor after an exchange."""
        self._check_steps()
        self.machine.adopt(resets=bool(answer.rejected))
        self.message = None
        self.dropped += not (answer.applied or answer.rejected)
        self.rejected += bool(answer.rejected)
        self.answer = answer._replace(params=None)
        if answer.pace is not None:
            self.pace = answer.pace
        elif self._follows and self.machine.settled == 2:  # it is measured by then
            _log.warning(
                "%r does not report the speed of worker %r: its rounds stay at %d "
                "local steps",
                self.center,
                self.name,
                self.length(self.exchanges),
            )
        self._knows_anchor = True
        if self._callbacks and self.session is not None:
            self._call_back(message, answer)
        self._keep_anchor(answer.snapshot)

    def _measured(self, params: PyTree, state: LocalState) -> dict[str, Any]:
        """Return the values for callbacks that are known before a message is made."""
        if not self._callbacks:
            return {}
        measured = {"steps": self.machine.message.steps, **self.reported}
        if not self.center.rule.codec.is_identity:
            anchor = self.require_start()
            measured["codec_error"] = self.programs.codec_error(
                state, params, anchor.params
            )
        return measured

    def _call_back(self, message: Message, answer: Answer) -> None:
        """Call the callbacks after an exchange."""
        measured = {
            **message.measured,
            "staleness": answer.staleness,
            "message_norm": answer.norm,
            "applied": answer.applied,
            "rejected": bool(answer.rejected),
            "version": max(jax.tree.leaves(answer.version)),
            "bytes_sent": trees.nbytes(message.submission.contribution),
        }
        values = {k: float(v) for k, v in measured.items() if v is not None}
        for callback in self._callbacks:
            try:
                callback(self.exchanges, values)
            except Exception:  # not raised: the center has moved, and the loop goes on
                _log.exception("%r failed; training goes on", callback)

    def _check_steps(self) -> None:
        """Warn if the device counted other local steps than `exchange` was told.

        Steps made with an optimizer of the caller's own are not in the record, so the
        center gets nothing of them. This is not an error, because loss scaling may skip
        some or all steps of a round.
        """
        # If the device has not computed its count yet, a later exchange checks it.
        if self._paced or self._steps is None or not self._steps[0].is_ready():
            return
        (counted, steps), self._steps = self._steps, None
        made = int(counted)
        self._empty = 0 if made else self._empty + 1
        once = "Call it once after every local step"
        if made > steps:
            problem = (
                f"its rounds are longer than its period. {once}, or say of how many it "
                "is: exchange(params, state, steps=...)"
            )
        elif 0 < 2 * made <= steps:  # loss scaling skips some steps, but not half
            problem = f"its rounds are shorter than its period. {once}"
        elif self._empty >= 2 and not self.center.rule.needs_params:
            problem = (
                "its messages are empty, and the center does not move, unless loss "
                "scaling has skipped all of these steps. Make local steps with "
                "worker.tx.update(grads, state, params), and give an optimizer of your "
                "own as Worker(center, inner, ...)"
            )
        else:
            return
        self._paced = True
        _log.warning(
            "worker %r has made %d local steps in a round in which exchange() was told "
            "of %d: %s",
            self.name,
            made,
            steps,
            problem,
        )

    def _keep_anchor(self, anchor: Snapshot) -> None:
        # If the arrays are not read, they are released, so that the center can
        # overwrite them.
        holds = self.programs.holds_anchor
        self._anchor = anchor if holds else anchor._replace(params=None)

    def _check_loop(self, params: PyTree, state: LocalState) -> None:
        """Check the loop's arrays before anything is sent."""
        check.params_given(params, f"worker {self.name!r}")
        check_called_from_python(self.name, (params, state))
        check.same_tree(params, self._like[0], "params", "this worker's parameters")
        if not isinstance(state, LocalState):
            raise errors.TreeMismatchError(
                f"state is not of worker {self.name!r}, which wants what worker.start "
                f"and worker.tx.update return, got {check.show(state)}: local steps go "
                "through worker.tx itself. What is done to gradients before is an "
                "argument of the worker, Worker(..., gradients=...)"
            )
        check.same_tree(state, self._like[1], "state", "this worker's state")
        check.float_leaves(params, "params")
        for what, tree in (("params", params), ("state", state)):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                if isinstance(leaf, jax.Array) and leaf.is_deleted():
                    raise errors.WorkerStateError(
                        f"{what}{jax.tree_util.keystr(path)} has been donated or "
                        f"deleted; give worker {self.name!r} what its last local step "
                        "returned"
                    )
        anchor = self.require_start()
        if anchor.params is not None:  # the parameters may have moved since `start`
            self._anchor = _placed(anchor, params)


def check_called_from_python(worker: str, tree: PyTree) -> None:
    """Raise if called while tracing: the host would count the steps only once."""
    # Each local step renews `local_steps`, so it is traced if the state is.
    if isinstance(tree, StreamingState):
        tree = tree.fragments[0]
    leaves = tree.local_steps if isinstance(tree, LocalState) else tree
    if any(map(check.is_traced, jax.tree.leaves(leaves))):
        raise errors.InvalidTypeError(
            f"worker {worker!r} exchanges and is saved from Python, and not "
            "inside jax.jit, jax.lax.scan or jax.vmap: compile the gradients and "
            "worker.tx.update alone, and call exchange after it"
        )


def _scheduled(period: Any) -> Callable[[int], int]:
    """Return ``period`` as a function of exchanges, called once for each round."""
    schedule = rounds.as_schedule(period)

    @functools.lru_cache(maxsize=2)  # this round and the next
    def length(exchanges: int) -> int:
        return int(check.positive_int(schedule(exchanges), f"period({exchanges})"))

    return length


def _placed(snapshot: S, like: PyTree) -> S:
    return snapshot._replace(params=trees.place_like(snapshot.params, like))
