"""The exchanges of one fragment of a model with its center.

A `Worker` has a `FragmentWorker` for each of its fragments, whose center is the shard
that keeps the fragment. Without fragments it has one, for the whole model.

An exchange is a sequence of actions. Each takes the parameters and the local state of
the fragment, and returns the new ones:

    prepare   a message will be sent, with the local steps of this round
    send      send it, either in the background, or waiting for the answer and adopting
              it; if an earlier attempt has failed, send the same message again
    receive   wait for the answer to a message in the background, and adopt it

The `ExchangeMachine` has the state of the exchange, and decides which action is next.
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
from agn_optax._internal import Thresholds, check, trees
from agn_optax.center import Answer, Center, Snapshot, Submission, WorkerSession
from agn_optax.round import LocalState
from agn_optax.worker._checks import ExchangeChecks
from agn_optax.worker._flight import Message, was_not_applied
from agn_optax.worker._machine import Counts, ExchangeMachine, State
from agn_optax.worker._processes import ProcessesCenter
from agn_optax.worker._programs import MessageNumbers, programs
from agn_optax.worker._shardings import ParamShardings, shardings_of

PyTree = Any
Loop = tuple[PyTree, LocalState]  # parameters and state of a fragment
S = TypeVar("S", Snapshot, Answer)
# (number of the exchange, values by name) -> ignored.
Callback = Callable[[int, Mapping[str, float]], object]
_log = logging.getLogger("agn_optax")


class FragmentState(NamedTuple):
    """State of the exchanges of one fragment, or of a model without fragments."""

    anchor: PyTree  # the center as last adopted; None if the rule does not read it
    anchor_version: Any  # int; a tuple of ints for a center in shards
    local_steps: Any  # int: local steps since the last exchange
    exchanges: Any  # int
    weight: Any = None  # float: weight of the round so far; None if none was given
    pace: Any = None  # float: speed as a fraction of the fastest worker's
    late_steps: Any = 0  # int: see `Submission.late_steps`


class FragmentWorker:
    """The exchanges of one fragment: see `Worker` for the other arguments.

    Args:
      center: the center of this fragment.
      inner: the inner optimizer of this fragment.
      delay: local steps before an answer is adopted; 0 adopts it when it arrives.
      mixing: share of the worker's own parameters that stays.
      name: name of the worker.
      settings: further settings that all processes of the worker must share, by name.

    Attributes:
      programs: the compiled programs.
      machine: the state of the exchanges.
      message: the message to be sent, or in flight; None before its arrays are made.
      session: the session with the center; None if it has not started.
      answer: the last answer, without parameters; None before the first.
      reported: numbers that are sent with every message, by name.
      checks: looks for what goes wrong.

    Other attributes are those of `Worker`.
    """

    def __init__(
        self,
        center: Center,
        inner: optax.GradientTransformation,
        *,
        delay: int = 0,
        mixing: float = 0.0,
        name: str,
        period: Any,
        overlap: bool,
        patience: int | None,
        give_up: float,
        callbacks: Sequence[Callback],
        thresholds: Thresholds | None = None,
        settings: Mapping[str, Any],
    ) -> None:
        self.center = center
        self.name = name
        self._settings = settings
        self._make_programs = functools.partial(
            programs, center.rule, inner, delay, mixing
        )
        self.programs = self._make_programs()  # of parameters on one device
        self.machine = ExchangeMachine(overlap=overlap, delay=delay, patience=patience)
        self.message: Message | None = None
        self.session: Any = None
        self.reported: dict[str, Any] = {}
        self.dropped = 0
        self.rejected = 0
        self.answer: Answer | None = None
        self.checks = ExchangeChecks(name, center.rule, thresholds)
        self.pace: float | None = None
        # True if the length of rounds follows the worker's speed.
        self._is_dynamic = isinstance(period, rounds.DynamicPeriod)
        # Number of exchanges made so far -> local steps of the next round.
        self.round_length_at: Callable[[int], int] = (
            (lambda _: period(self.pace)) if self._is_dynamic else _scheduled(period)
        )
        self._give_up = give_up
        self._callbacks = callbacks
        self._anchor: Snapshot | None = None
        self._expected: Loop  # shapes and dtypes of the loop
        # Buffers for the next message sent in the background, and for a copy of its
        # parameters. They are those of the last message.
        self._spare: tuple[PyTree, PyTree] | None = None
        # The last message and its answer, until callbacks were called.
        self._completed: tuple[Message, Answer] | None = None

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
        """This fragment's session, for `restore` to continue."""
        if self.session is None:
            return None
        return [self.session.resume_token, self.machine.completed]

    @property
    def round_length(self) -> int:
        """The number of local steps of the current round."""
        return self.round_length_at(self.machine.finished_rounds)

    @property
    def is_full(self) -> bool:
        """True if the current round has as many local steps as its length."""
        return self.machine.is_full(self.round_length)

    def require_start(self) -> Snapshot:
        """Return the anchor, or raise if the worker has not started."""
        if self._anchor is None or self.session is None:
            raise errors.WorkerStateError(
                f"worker {self.name!r} has not started: call start() before its first "
                "local step"
            )
        return self._anchor

    # Start and leave.

    def check_start(self, params: PyTree, *, chief: bool | None) -> None:
        """Raise the errors of `start` that need no center."""
        self.round_length_at(self.exchanges)  # raises if invalid
        if chief:
            check.float_leaves(params, "params")
            # If this raises, it must do so before other workers can join.
            jax.eval_shape(self.programs.start, params, params)

    def start(
        self, params: PyTree, *, chief: bool | None, timeout: float | None
    ) -> Loop:
        """Join the center, and adopt it: see `Worker.start`."""
        center = self._center_for(shardings_of(params), exchanges=0, chief=bool(chief))
        session = center.join(self.name, params, timeout=timeout)
        try:
            if chief:
                center.initialize(params, worker=self.name)
            snapshot = center.wait(timeout) if chief is False else center.pull()
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
        self._begin_session(session, loop, anchor)
        return loop

    def _center_for(
        self, shardings: ParamShardings | None, *, exchanges: int, chief: bool = False
    ) -> Center | ProcessesCenter:
        """Return the center for these shardings, and make programs for them.

        Args:
          shardings: the shardings of the parameters.
          exchanges: number of exchanges made.
          chief: whether this worker initializes the center.
        """
        self.programs = self._make_programs(shardings)
        if shardings is None or not shardings.spans_processes:
            return self.center
        settings = {
            **self._settings,
            "period": self.round_length_at(exchanges),
            "exchanges": exchanges,
            "chief": chief,
        }
        return ProcessesCenter(self.center, shardings, settings)

    def _begin_session(
        self, session: WorkerSession, loop: Loop, anchor: Snapshot
    ) -> None:
        self.session = session
        self._expected = jax.eval_shape(lambda: loop)
        self.checks.begin_session()
        self._completed = None
        self._keep_anchor(anchor)

    def _keep_anchor(self, anchor: Snapshot) -> None:
        # An embedded center may reuse the memory of arrays that no worker holds.
        holds = self.programs.holds_anchor
        self._anchor = anchor if holds else anchor._replace(params=None)

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

    # Save and restore.

    def save(self) -> FragmentState:
        """Return the state of the exchanges.

        Raises:
          WorkerStateError: the worker was not started, or has an exchange in flight.
        """
        anchor = self.require_start()
        if self.message is not None:  # the center may or may not have applied it
            raise errors.WorkerStateError(
                f"worker {self.name!r} has an exchange that has not ended, which "
                "cannot be saved: call receive() or flush() first"
            )
        return FragmentState(
            anchor.params,
            anchor.version,
            self.machine.current.steps,
            self.exchanges,
            self.machine.current.weight,
            self.pace,
            self.machine.late,
        )

    def check_restored(self, loop: Loop, saved: FragmentState) -> None:
        """Raise the errors of `Worker.restore`, before anything changes."""
        params, state = loop
        center = self.center.describe()
        check.same_tree(params, center.params, "saved.params", "center")
        expected = jax.eval_shape(self.programs.start, center.params, params)[1]
        check.same_tree(state, expected, "saved.state", "this worker's state")
        if self.programs.holds_anchor:
            check.same_tree(saved.anchor, center.params, "saved.anchor", "center")
        version = jax.tree.map(int, saved.anchor_version)
        check.same_tree(version, center.version, "saved.anchor_version", "its version")
        if any(jax.tree.leaves(jax.tree.map(int.__gt__, version, center.version))):
            raise errors.WorkerStateError(
                f"the saved worker has seen version {version} of the center, which is "
                f"at {center.version}: restore both from one checkpoint, or adopt this "
                "center with start()"
            )
        self.round_length_at(int(saved.exchanges))  # raises if invalid

    def restore(self, loop: Loop, saved: FragmentState, resume_token: Any) -> Loop:
        """Join the center, and continue with these arrays: see `Worker.restore`."""
        is_resumed = resume_token is not None
        token, completed = resume_token if is_resumed else (None, 0)
        exchanges = int(saved.exchanges)
        center = self._center_for(shardings_of(loop[0]), exchanges=exchanges)
        session = center.join(self.name, loop[0], resume_token=token)
        weight = None if saved.weight is None else float(saved.weight)
        self.machine.start(
            completed=completed,
            exchanges=exchanges,
            counts=Counts(int(saved.local_steps), weight),
            late=int(saved.late_steps),
        )
        version = jax.tree.map(int, saved.anchor_version)
        anchor = Snapshot(saved.anchor, version)
        self._begin_session(session, loop, anchor)
        self.pace = None if saved.pace is None else float(saved.pace)
        return loop

    # An exchange, in the order of its actions.

    def must_act_now(self) -> bool:
        """Return whether an action is due after the local steps made so far.

        All processes of a worker must call it, and get the same result.
        """
        machine, message, length = self.machine, self.message, self.round_length
        if machine.must_act(length):
            return True
        if not machine.may_receive(length):
            return False
        assert message is not None
        return message.is_answered()

    def prepare(self, params: PyTree, state: LocalState) -> Loop:
        """Check the arrays of a message that will be sent next, and end the round."""
        self._check_loop(params, state)
        self.machine.prepare()
        return params, state

    def send(self, params: PyTree, state: LocalState) -> Loop:
        """Send the prepared message, if there is one.

        If it is not sent in the background, wait for the answer and adopt it.
        """
        if not self.machine.has_pending_message:
            return params, state
        message = self.message
        if message is not None:  # an earlier attempt has failed
            self._check_loop(params, state)
        elif self.machine.sends_in_background:
            return self._send_in_background(params, state)
        else:
            anchor = self.require_start()
            contribution, codec_state, numbers = self.programs.contribute(
                state, params, anchor.params
            )
            message = self._new_message(contribution, numbers, codec_state)
            self.message = message
        return self._send_and_wait(message, params, state)

    def _send_and_wait(
        self, message: Message, params: PyTree, state: LocalState
    ) -> Loop:
        """Send a message, wait for its answer, and adopt it.

        If the center is lost, local steps may go on while the message is retried in the
        background.
        """
        if message.answer is None:
            try:
                message.answer = message.send_once()
            except errors.CenterUnreachableError as error:
                may_continue = self.machine.lose_center()
                if not may_continue or isinstance(error, errors.CenterClosedError):
                    raise
                state = state._replace(codec_state=message.codec_state)
                sent, state = self.programs.continue_without_answer(params, state)
                self._begin_flight(message, sent)
                return params, state
            except Exception as error:
                if was_not_applied(error):
                    self._discard()
                raise
        if self.machine.state is State.PENDING:  # else an adoption was interrupted
            self.machine.answer()
        state = state._replace(codec_state=message.codec_state)
        return self._adopt(params, state, message, message.answer)

    def _send_in_background(self, params: PyTree, state: LocalState) -> Loop:
        """Make a message in buffers of its own, and send it while local steps go on."""
        anchor = self.require_start()
        spare, self._spare = self._spare, None
        if spare is None:
            contribution, *_ = self.programs.contribute(state, params, anchor.params)
            copied = params if self.programs.keeps_sent else None
            spare = trees.copy((contribution, copied))
        contribution, sent, state, numbers = self.programs.send(
            spare, params, state, anchor.params
        )
        for leaf in jax.tree.leaves(contribution):
            leaf.copy_to_host_async()
        message = self._new_message(contribution, numbers)
        self._begin_flight(message, sent)
        return params, state

    def _begin_flight(self, message: Message, sent: rounds.steps.Sent) -> None:
        """Leave a message to the background, which `finish` starts."""
        message.sent, self.message = sent, message
        self.machine.send()

    def _new_message(
        self, contribution: PyTree, numbers: MessageNumbers, codec_state: PyTree = None
    ) -> Message:
        anchor, counts = self.require_start(), self.machine.message
        size = trees.nbytes(self._expected[0])
        compression = size / max(trees.nbytes(contribution), 1)
        self.checks.add(numbers, counts.steps, compression)
        submission = Submission(
            self.machine.number,
            contribution,
            anchor.version,
            steps=counts.steps,
            weight=counts.weight,
            reported=dict(self.reported),
            notices={n.check: n.text for n in self.checks.notices.current("worker")},
            late_steps=min(self.machine.late, counts.steps),
        )
        return Message(self.session, submission, codec_state)

    def receive(self, params: PyTree, state: LocalState) -> Loop:
        """Wait for the answer to a message in flight, if there is one, and adopt it.

        The local steps made since the message are kept.
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
            if was_not_applied(error):
                self._discard()
            else:
                self.machine.lose_center()
                message.flight = None
                self.finish()  # sends it again
            raise
        params, state = self._adopt(params, state, message, answer, anchor)
        if self.machine.sends_in_background:
            assert message.sent is not None
            self._spare = message.submission.contribution, message.sent.params
        return params, state

    def _discard(self) -> None:
        """Discard a message that was not applied, so that it is not sent again."""
        self.message = None
        self.machine.discard()

    def discard_unsent(self) -> None:
        """Discard a message if the call that prepared it raised before sending it."""
        if self.machine.state is State.PENDING and self.message is None:
            self.machine.discard()

    def _adopt(
        self,
        params: PyTree,
        state: LocalState,
        message: Message,
        answer: Answer,
        sent_anchor: Snapshot | None = None,
    ) -> Loop:
        """Adopt an answer, or reset this worker if its message was rejected.

        If the codec has a residual, a message that was not applied is added to it, to
        be sent later. After two rejections in a row the residual is discarded instead:
        a message that is rejected again, such as for its size, would always be
        rejected. If only some shards of the center applied the message, the rest of it
        is lost, because nothing may be applied twice.

        Args:
          params: the parameters.
          state: the local state.
          message: the message.
          answer: its answer.
          sent_anchor: the anchor of a message that was in flight; None if the worker
            waited for the answer.
        """
        programs, contribution = self.programs, message.submission.contribution
        adopted = _placed(answer, params)
        center = adopted.params
        if self._callbacks:
            received = answer.received
            if received is None:
                dtype = self.center.rule.codec.answers
                received = trees.nbytes(answer.params, dtype)
            message.metrics["bytes_received"] = received
        if answer.rejected:
            _log.warning(
                "worker %r continues from the center. Its message was rejected: %s",
                self.name,
                answer.rejected,
            )
            is_second = self.answer is not None and self.answer.rejected
            residual = "discarded" if is_second else "restored"
            if answer.is_partial:
                residual = "kept"
            params, state = programs.reset(
                params, state, contribution, center, residual=residual
            )
        else:
            is_lost = not (answer.applied or answer.is_partial)
            if is_lost and programs.restore_residual is not None:
                state = programs.restore_residual(state, contribution)
            if sent_anchor is None:
                params, state = programs.adopt(params, state, center)
            else:
                anchor = sent_anchor.params
                params, state = programs.receive(
                    params, state, contribution, message.sent, anchor, center
                )
        self._end_exchange(message, adopted)
        return params, state

    def _end_exchange(self, message: Message, answer: Answer) -> None:
        """Update counts and the anchor; `finish` calls the callbacks."""
        self.machine.adopt(resets=bool(answer.rejected))
        self.message = None
        self.dropped += not (answer.applied or answer.rejected)
        self.rejected += bool(answer.rejected)
        self.answer = answer._replace(params=None)
        self.checks.adopt(answer)
        if answer.pace is not None:
            self.pace = answer.pace
        elif self._is_dynamic and self.machine.completed == 2:  # enough to measure it
            _log.warning(
                "%r does not report the speed of worker %r: its rounds stay at %d "
                "local steps",
                self.center,
                self.name,
                self.round_length_at(self.exchanges),
            )
        self._keep_anchor(answer.snapshot)
        self._completed = message, self.answer

    # After an action.

    def finish(self) -> None:
        """Do what follows an action once its parameters and state are kept.

        Start to send a message in the background, look for what goes wrong, and call
        the callbacks. If this raises, nothing is lost.
        """
        message = self.message
        if self.machine.in_flight and message is not None and message.flight is None:
            message.send_in_background(self._give_up)
        completed, self._completed = self._completed, None
        if completed is not None:
            if self.session is not None:
                self.checks.after_exchange(self.session.transfers)
            if self._callbacks and self.session is not None:
                self._run_callbacks(*completed)

    def _run_callbacks(self, message: Message, answer: Answer) -> None:
        submission, notices = message.submission, self.checks.notices.current()
        metrics = {
            "steps": submission.steps,
            **(submission.reported or {}),
            **message.metrics,
            "staleness": answer.staleness,
            "message_norm": answer.norm,
            "applied": answer.applied,
            "rejected": bool(answer.rejected),
            "version": max(jax.tree.leaves(answer.version)),
            "bytes_sent": trees.nbytes(submission.contribution),
            "notices": len(notices),
            **{f"notice_{notice.check}": 1 for notice in notices},
        }
        for callback in self._callbacks:
            try:
                values = {k: float(v) for k, v in metrics.items() if v is not None}
                callback(self.exchanges, values)
            except Exception:  # not raised: the center has moved, and the loop goes on
                _log.exception("%r failed; training goes on", callback)

    # Checks.

    def _check_loop(self, params: PyTree, state: LocalState) -> None:
        """Check the arrays of the training loop before anything is sent."""
        check.params_given(params, f"worker {self.name!r}")
        check_called_from_python(self.name, (params, state))
        expected_params, expected_state = self._expected
        check.same_tree(params, expected_params, "params", "this worker's parameters")
        if not isinstance(state, LocalState):
            raise not_its_state(
                self.name,
                state,
                ". Local steps are made with worker.tx itself: transform gradients "
                "before worker.tx.update",
            )
        check.same_tree(state, expected_state, "state", "this worker's state")
        check.float_leaves(params, "params")
        check_not_deleted(self.name, params, "params")
        check_not_deleted(self.name, state, "state")
        anchor = self.require_start()
        if anchor.params is not None:  # the parameters may be on other devices now
            self._anchor = _placed(anchor, params)


def not_its_state(worker: str, state: Any, advice: str = "") -> Exception:
    """Return the error for a state that is not a worker's."""
    return errors.TreeMismatchError(
        f"state does not belong to worker {worker!r}: pass the state that worker.start "
        f"or worker.tx.update returned, got {check.show(state)}{advice}"
    )


def check_not_deleted(worker: str, tree: PyTree, name: str) -> None:
    """Raise if an array has been donated or deleted."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise errors.WorkerStateError(
                f"{name}{jax.tree_util.keystr(path)} has been donated or deleted: give "
                f"worker {worker!r} the arrays that its last local step returned"
            )


def check_called_from_python(worker: str, tree: PyTree) -> None:
    """Raise if called while tracing: the host would count the steps only once."""
    # Each local step renews `local_steps`, so it is traced if the state is.
    leaves = getattr(tree, "local_steps", tree)
    if any(map(check.is_traced, jax.tree.leaves(leaves))):
        raise errors.InvalidTypeError(
            f"exchange and save worker {worker!r} from Python, not inside jax.jit, "
            "jax.lax.scan or jax.vmap: compile the gradients and worker.tx.update "
            "alone, and call exchange after them"
        )


def _scheduled(period: Any) -> Callable[[int], int]:
    """Return ``period`` as a function of exchanges, called once for each round."""
    schedule = rounds.as_schedule(period)

    @functools.lru_cache(maxsize=2)  # this round and the next
    def round_length_at(exchanges: int) -> int:
        return int(check.positive_int(schedule(exchanges), f"period({exchanges})"))

    return round_length_at


def _placed(snapshot: S, like: PyTree) -> S:
    return snapshot._replace(params=trees.place_like(snapshot.params, like))
