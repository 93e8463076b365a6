"""The worker's side of a center, embedded or remote: one class for both.

In an exchange, a worker usually sends a message, waits for the answer, and adopts it.
With ``overlap``, or if the center is lost, it does not wait but makes further local
steps while the message is in flight. When the answer arrives, the worker adopts it and
keeps the progress that it has made since the message was sent.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, trees
from agn_optax.center import (
    MOST_REPORTED,
    Answer,
    Center,
    Session,
    Snapshot,
    Submission,
)
from agn_optax.round import Fragments, LocalState
from agn_optax.worker._flight import Message, is_settled
from agn_optax.worker._machine import Counts, Machine, State
from agn_optax.worker._processes import ToldMessage, ToldSession
from agn_optax.worker._programs import AT_ONCE, Sent, programs

PyTree = Any
S = TypeVar("S", Snapshot, Answer)
# One action of a call: (params, state) -> (params, state).
Act = Callable[[PyTree, Any], tuple[PyTree, Any]]
# ({part: number of its message}, params, state) -> None.
BeforeSend = Callable[[Mapping[int, int], PyTree, Any], object]
# (number of the exchange, values by name) -> ignored.
Callback = Callable[[int, Mapping[str, float]], object]
_log = logging.getLogger("agn_optax")


class WorkerState(NamedTuple):
    """Complete state of a worker, as a pytree to save and to restore from."""

    params: PyTree
    state: LocalState
    anchor: PyTree  # the center as last adopted; None if the rule does not read it
    anchor_version: Any  # int; a tuple of ints for a center in shards
    local_steps: Any  # int: local steps since the last exchange
    exchanges: Any  # int
    weight: Any = None  # float: weight of the round so far; None if none was given
    pace: Any = None  # float: as `Worker.pace`


class Worker:
    """A worker: its local phase as an optax transformation, and its exchanges.

    You write the loop, as with any optax optimizer, and call `exchange` from Python
    after every local step. It makes an exchange when the period is full. Steps are
    counted on the host, so that no local step waits for the device.

    Args:
      center: the center: a `LocalCenter`, or any other object with its protocol.
      inner: the inner optimizer.
      period: local steps between exchanges, a positive int; or a function from the
        exchanges that this worker has made (int) to the length of the next round; or
        `dynamic_period`, which follows the worker's speed.
      gradients: transformation of the gradients before anything else, such as
        ``optax.clip_by_global_norm(1.0)``: both the inner optimizer and the record,
        which is sent to the center, get its output. As a part of ``inner`` it would
        change the local steps only. None for none.
      name: the worker's name, unique among the workers of the center; None generates a
        name.
      overlap: send in the background while local steps go on. When the answer arrives,
        the worker adopts the center, and keeps the local progress made since the
        message was sent. At most one exchange is in flight. This takes memory: the
        buffers of the contribution are kept for the next one, and with AGN also those
        of a copy of the parameters, which cannot be recovered from its contribution.
        The first exchange waits for its answer, so that a new worker starts from a
        center that includes its first message.
      patience: local steps that the worker makes while an answer is missing, because
        exchanges overlap or the center is lost, before it waits. None is one round of
        steps. With 0, `exchange` raises as soon as the center counts as lost.
      give_up: seconds that the worker waits for a lost center before it raises.
      fragments: parts of the parameters that are exchanged in turn, for a center with
        as many shards, each of which keeps one fragment. None exchanges all at once.
        With fragments, one is sent at a time, and each has its own offset in the
        period, version, staleness and answer. With a ``delay``, local steps go on while
        the fragment is in flight, and the answer is adopted after that many steps; the
        worker then waits for it (or after ``patience`` steps, if that is given and
        longer). With ``mixing``, a share of the worker's own parameters stays. The
        state is a `StreamingState`, and `save` returns a `StreamingWorkerState`. All
        workers of the center need the same fragments.
      callbacks: functions called after each exchange as ``callback(step, values)``,
        with the number of the exchange, and a dictionary of floats. ``steps``: local
        steps of the round. ``message_norm`` and ``staleness``: of the message.
        ``applied`` and ``refused``: whether the message was applied or rejected (0 or
        1). ``distance``: norm of the difference between worker and center before the
        adoption. ``version``: version of the center. ``codec_error``: error of the
        codec relative to the norm of the contribution. ``seconds``: time from sending
        to the answer. ``bytes_sent`` and ``bytes_received``: bytes of the arrays. The
        numbers given to `report` are included. Callbacks cost a pass over the
        parameters per exchange, and wait for the device. An exception in a callback is
        logged and not raised, because the exchange has been made. `agn_optax.sinks` has
        ready-made callbacks.

    Attributes:
      tx: the local phase, inner step and record: ``tx.update(grads, state, params)``.
        Pure; jit it.
      name: the worker's name.
      fragments: the fragments as given.
      exchanges: number of exchanges made.
      staleness: staleness of the last message sent; None before the first. If the rule
        adopts the center as it was before a message, the worker's own previous message
        counts too.
      norm: norm of the last message sent, as a scalar; None before the first.
      dropped: number of messages that the center did not apply (too stale, or too
        late).
      refused: number of messages that the center rejected by its limits, which are in
        `agn_optax.center.Refuse`. After a rejection the worker discards its progress
        since its last exchange, including the current local steps, adopts the center in
        full, and goes on. If the state of its inner optimizer is not finite, that state
        is initialized again.
      refusal: reason why the last message was rejected; "" if it was not.
      version: version of the center that the worker adopted last; None before the
        start.
      pace: this worker's speed as a share of the fastest worker's, as last measured by
        the center; None before the first measurement.

    Raises:
      InvalidArgumentError: ``period`` is not a positive whole number, or ``patience``
        or ``give_up`` is negative; or the center does not have one shard for each of
        the ``fragments``; or the fragments cannot be used with this rule, are eager, or
        have a delay together with ``overlap``.
      InvalidTypeError: ``inner`` or ``gradients`` is not an optimizer, or ``center`` is
        not a center.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> center = agn_optax.LocalCenter(agn_optax.rules.agn(optax.sgd(0.1)))
      >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=2, name="worker-0")
      >>> params, state = worker.start({"w": jnp.zeros(3)}, chief=True)
      >>> for _ in range(4):
      ...     updates, state = worker.tx.update({"w": jnp.ones(3)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     params, state = worker.exchange(params, state)
      >>> worker.exchanges, center.version
      (2, 2)
    """

    fragments: Fragments | None = None
    _adoption = AT_ONCE

    def __new__(cls, *args: Any, **settings: Any) -> Worker:
        """Make a `StreamingWorker` if there are fragments."""
        if cls is Worker and settings.get("fragments") is not None:
            # Imported here, because that module imports this one.
            from agn_optax.worker._streaming import StreamingWorker  # noqa: PLC0415

            return super().__new__(StreamingWorker)
        return super().__new__(cls)

    def __init__(
        self,
        center: Center,
        inner: optax.GradientTransformation,
        *,
        period: Any,
        fragments: Fragments | None = None,
        gradients: optax.GradientTransformation | None = None,
        name: str | None = None,
        overlap: bool = False,
        patience: int | None = None,
        give_up: float = 600.0,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if fragments is not None:
            raise errors.InvalidArgumentError(
                f"fragments are for Worker itself, got {type(self).__name__}"
            )
        such_as = "a center, such as agn_optax.LocalCenter(rule, params)"
        check.instance(center, Center, f"center must be {such_as}")
        if name is not None and (not isinstance(name, str) or not name):
            raise errors.InvalidTypeError(f"name must be a non-empty str, got {name!r}")
        if patience is not None and patience != 0:
            patience = int(check.positive_int(patience, "patience"))
        check.rate(give_up, "give_up", low=0.0, high=float("inf"))
        check.optimizer(inner, "inner")
        self._programs = programs(center.rule, inner, gradients, self._adoption)
        self.center = center
        self.tx: optax.GradientTransformationExtraArgs = self._programs.tx
        self.name = name or f"worker-{uuid.uuid4().hex[:8]}"
        self._machine = Machine(
            overlap=overlap, delay=self._adoption.delay, patience=patience
        )
        self.dropped = 0
        self.refused = 0
        self.refusal = ""
        self.staleness: int | None = None
        self.norm: Any = None
        self._give_up = give_up
        self.pace: float | None = None
        self._length = self._lengths(period)
        self._follows = isinstance(period, rounds.DynamicPeriod)  # the worker's speed
        self._session: Session | None = None
        self._anchor: Snapshot | None = None
        self._knows_anchor = True  # whether the center, by its id, has had this anchor
        self._callbacks = _callbacks(callbacks)
        self._reported: dict[str, Any] = {}
        self._paced = False  # whether a warning about miscounted steps was logged
        # Local steps of a message, as counted by the device, and as `exchange` was
        # told; kept until the device has computed its count.
        self._steps: tuple[Any, int] | None = None
        self._empty = 0  # messages in a row without local steps of `tx`
        self._message: Message | None = None  # the arrays of the machine's message
        # Buffers of the last message, and of the parameters of which it was made: the
        # next message sent in the background overwrites them.
        self._spare: tuple[PyTree, PyTree] | None = None
        self._like: tuple[PyTree, LocalState]  # params and state, abstract
        # Parameters and state of a call that raised after it had donated its arguments:
        # the next call continues from them.
        self._kept: tuple[PyTree, Any] | None = None
        self._turn = 0  # part whose turn is first
        # Called when messages exist, before they are made of the given parameters and
        # state, and before they are sent. All earlier messages have been answered.
        self.before_send: BeforeSend | None = None

    def __repr__(self) -> str:
        """Return the worker's name, rule and progress."""
        where = "not started" if self._session is None else f"version {self.version}"
        return (
            f"Worker({self.name!r}, {self.center.rule.name}, {self.exchanges} "
            f"exchanges, {where}, at {self.center!r})"
        )

    def start(
        self,
        params: PyTree = None,
        *,
        chief: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[PyTree, LocalState]:
        """Adopt the center and begin the first round.

        Every worker may run the same line, ``worker.start(params, chief=rank == 0)``:
        the chief's parameters initialize the center, and the other workers wait for
        them and adopt them.

        Args:
          params: this worker's own parameters. Only the chief's values are used; those
            of the others give the dtypes and devices for the adopted center. None uses
            the dtypes and devices of the center.
          chief: True initializes the center with ``params``, unless this worker has
            done so in an earlier session; False waits until a chief has; None expects
            an initialized center.
          timeout: seconds to wait at most, for a chief or for the other workers of a
            barrier; None waits forever.

        Returns:
          Parameters and state of the local phase: new arrays, which you may donate.

        Raises:
          NotInitializedError: the center has no parameters (in time).
          AlreadyInitializedError: ``chief=True``, but another worker was the chief.
          MissingArgumentError: ``chief=True`` without ``params``.
          TreeMismatchError: ``params`` does not match this center.
          NameTakenError: another worker has the same name.
          CenterFullError: the center takes no further worker.
          InvalidArgumentError: the inner optimizer itself exchanges with a center.
        """
        self._length(self.exchanges)  # raises if invalid, before anything changes
        if chief and params is None:
            raise errors.MissingArgumentError(
                f"worker {self.name!r} starts as chief and so must give parameters: "
                "start(params, chief=True), got params=None"
            )
        if chief:
            check.float_leaves(params, "params")
            # If this raises, it must do so before other workers can join.
            jax.eval_shape(self._programs.start, params, params)
        self.leave()
        session = self.center.join(self.name, params, timeout=timeout)
        try:
            if chief:
                snapshot = self.center.initialize(params, worker=self.name)
            elif chief is None:
                public = {"public": True} if self._programs.follows else {}
                snapshot = self.center.pull(**public)
            else:
                snapshot = self.center.wait(timeout)
            if params is None:
                params = snapshot.params
            check.same_tree(params, snapshot.params, "params", "center")
            check.float_leaves(params, "params")
            anchor = _placed(snapshot, params)
            loop = self._programs.start(anchor.params, params)
        except BaseException:
            session.leave()
            raise
        self._begin(session, loop, anchor)
        return loop

    @property
    def exchanges(self) -> int:
        """The number of exchanges made."""
        return self._machine.exchanges

    @property
    def version(self) -> Any:
        """The version of the center adopted last; None before the start."""
        return None if self._anchor is None else self._anchor.version

    @property
    def life(self) -> Any:
        """This worker's session, for `restore` to continue; None before the start.

        It has the ids of the session and the center, and the number of exchanges that
        are over. It can be serialized as JSON.
        """
        if self._session is None:
            return None
        return [self._session.life, self._machine.settled]

    @property
    def due(self) -> bool:
        """True if the next call of `exchange` acts, or may act on a message in flight.

        This is for loops that must first gather their arrays, such as those of
        `Towers`: on all other steps `exchange` returns its arguments unchanged.
        """
        return self._kept is not None or any(
            part._machine.is_due(part._round_length) for part in self._parts
        )

    def exchange(
        self,
        params: PyTree,
        state: LocalState,
        *,
        steps: int = 1,
        weight: float | None = None,
    ) -> tuple[PyTree, LocalState]:
        """Make an exchange when the period is full; call this after every local step.

        Call it from Python: inside a compiled function it would count its steps only
        once, while tracing. Before the period is full it returns its arguments, at the
        cost of a few comparisons.

        An exchange donates ``params`` and ``state``: continue with the returned ones.
        If it raises, nothing has changed: ``steps`` and ``weight`` are not counted, so
        you can repeat the same call. If the center was unreachable, the repeated call
        sends the same message again, and local steps made after the first attempt are
        lost when the answer is adopted. If an answer had been adopted before the error,
        the arrays have been donated but are not lost: repeat the same call, or call
        `receive` before it, to continue from the adopted parameters.

        Args:
          params: the parameters after the local step.
          state: the state after the local step.
          steps: local steps since the last call that returned, if a compiled function
            makes several (`jax.lax.scan`). The round ends at the first call with which
            it is full.
          weight: weight of these local steps, such as their number of tokens or
            samples, a positive Python or NumPy number. The message carries the sum over
            its round, for center optimizers that use it, and for rules that take the
            mean of the messages of a round. None gives no weight; a round without
            weights counts 1.

        Returns:
          Parameters and state with which to continue.

        Raises:
          InvalidTypeError: it was called inside `jax.jit`, `jax.lax.scan` or the like.
          InvalidArgumentError: ``steps`` is not a positive whole number, or ``weight``
            is not positive and finite.
          WorkerStateError: the worker was not started, or parameters or state have been
            donated elsewhere; or the center has restarted and does not know this
            session, or has given this worker's name to another worker.
          MessageRefusedError: the center has rejected too many messages in a row (10 by
            default).
          CenterUnreachableError: the center is lost, and ``patience`` is 0 or
            ``give_up`` seconds have passed.
          TreeMismatchError: parameters or state are not those of this worker.
        """
        self._check_rounds()
        self._check_called_from_python(state)
        check.whole_number(steps, "steps", least=1, optional=False)
        weight = check.weight(weight)
        return self._call(
            params,
            state,
            self._exchanging(),
            "exchange",
            lambda counts: counts.plus(steps, weight),
        )

    def _call(
        self,
        params: PyTree,
        state: Any,
        acts: Iterable[Act],
        name: str = "",
        count: Callable[[Counts], Counts] | None = None,
    ) -> tuple[PyTree, Any]:
        """Run the acts of a call in order, with its steps and weight counted.

        If the call raises, its steps and weight are not counted, and it can be repeated
        with the same arguments. If an act before the one that raised has donated the
        loop's arrays, its results are kept, and the next call continues from them.

        Args:
          params: the loop's parameters.
          state: the loop's state.
          acts: the acts.
          name: name of a call with steps.
          count: counts of a round so far -> with those of the call; None for a call
            without steps.
        """
        kept, self._kept = self._kept, None
        machines = [part._machine for part in self._parts]
        keeps = kept is None  # arrays of this call, if any
        try:
            if count is not None:
                for machine in machines:
                    machine.begin(name, count)
            if kept is not None:
                params, state = kept
            for act in acts:
                loop = act(params, state)
                if loop[0] is not params or loop[1] is not state:
                    kept = params, state = loop
        except BaseException:
            self._kept = kept
            for part in self._parts:
                part._discard_unsent()
                if count is not None:
                    part._machine.end(returns=False, keeps=keeps and kept is not None)
            raise
        if count is not None:
            for machine in machines:
                machine.end(returns=True)
        return params, state

    @property
    def _parts(self) -> Sequence[Worker]:
        """The parts of the model, each with its own exchanges; here the whole."""
        return (self,)

    def _one(self, p: int, act: Act, params: PyTree, state: Any) -> tuple[PyTree, Any]:
        """Run an act of one part on the whole tree."""
        del p
        return act(params, state)

    def _on(self, p: int, act: Act) -> Act:
        return functools.partial(self._one, p, act)

    @property
    def _round_length(self) -> int:
        return self._length(self._machine.round)

    @property
    def _is_full(self) -> bool:
        return self._machine.is_full(self._round_length)

    def _check_rounds(self) -> None:
        """Check that the worker has started, and that all rounds have valid lengths."""
        for part in self._parts:
            part._require_start()
            part._length(part._machine.round)

    # The acts of a call, in order.

    def _exchanging(self) -> Iterator[Act]:
        """Yield the acts of `exchange`, if it acts at all."""
        if self._announces_next:
            yield from self._receiving()
        acting = self._acting()
        for p in acting:
            yield from self._ending(p)
        if acting:
            self._turn = (acting[-1] + 1) % len(self._parts)

    @property
    def _announces_next(self) -> bool:
        """True if this call makes a message of which `before_send` is told."""
        if self.before_send is None or self._parts[self._order[0]]._machine.is_stuck:
            return False
        return any(part._is_full for part in self._parts)

    @property
    def _order(self) -> list[int]:
        """Parts in the order of their turns, after one with a message to complete."""
        order = [*range(self._turn, len(self._parts)), *range(self._turn)]
        return sorted(order, key=lambda p: not self._parts[p]._machine.is_stuck)

    def _acting(self) -> list[int]:
        """Return the parts of one call: one to adopt, and perhaps one to send."""
        parts, order = self._parts, self._order
        if parts[order[0]]._machine.is_stuck:
            return order[:1]
        now = [p for p in order if parts[p]._ask_if_acting()]
        receiving = [p for p in now if parts[p]._machine.in_flight][:1]
        if not receiving or parts[receiving[0]]._is_full:  # it sends, too
            return now[:1]
        sending = [p for p in now if parts[p]._machine.sends_in_background]
        return receiving + sending[:1]

    def _ending(self, p: int) -> Iterator[Act]:
        """Yield the acts that adopt a part's answer, and end a round that is full."""
        part = self._parts[p]
        length = part._round_length
        yield self._on(p, part._receive)
        if part._machine.must_act(length):
            part._length(part.exchanges + 1)  # raises if the next period is invalid
            yield self._making([p])
            yield self._on(p, part._complete)

    def _flushing(self, parts: Sequence[int]) -> Iterator[Act]:
        """Yield the acts of `flush`, which sends all messages before it waits.

        If a part already has a message in flight, the answer of that one must be
        adopted before the next can be sent. The next period is not checked: the steps
        are sent in any case.
        """
        if self.before_send is not None:
            yield from self._finishing()
        if len(parts) > 1:
            flying = [p for p in parts if self._parts[p]._machine.in_flight]
            yield self._making(parts)
            yield from (self._on(p, self._parts[p]._send_ahead) for p in parts)
            for p in flying:
                yield self._on(p, self._parts[p]._receive)
                yield self._making([p])
                yield self._on(p, self._parts[p]._send_ahead)
        for p in parts:
            yield self._on(p, self._parts[p]._receive)
            yield self._making([p])
            yield self._on(p, self._parts[p]._complete)
            yield self._on(p, self._parts[p]._receive)

    def _finishing(self) -> Iterator[Act]:
        """Yield the acts that complete all messages; no new one is sent."""
        each = list(enumerate(self._parts))
        if len(each) > 1:
            yield from (self._on(p, part._send_ahead) for p, part in each)
        for p, part in each:
            yield self._on(p, part._receive)
            yield self._on(p, part._complete)
            yield self._on(p, part._receive)

    def _receiving(self) -> Iterator[Act]:
        """Yield the acts that adopt the answers of all messages in flight."""
        for p, part in enumerate(self._parts):
            yield self._on(p, part._receive)

    def _making(self, parts: Iterable[int]) -> Act:
        """Return an act: messages of the rounds of parts exist, before any is sent."""

        def act(params: PyTree, state: Any) -> tuple[PyTree, Any]:
            numbers = {}
            for p in parts:
                part = self._parts[p]
                if part._machine.can_make:
                    self._one(p, part._make, params, state)
                    numbers[p] = part._machine.number
            if numbers and self.before_send is not None:
                self.before_send(numbers, params, state)
            return params, state

        return act

    def _ask_if_acting(self) -> bool:
        """Return whether an act is due after the local steps made so far.

        A worker of several processes communicates here: all of them must call this.
        """
        machine, message, length = self._machine, self._message, self._round_length
        if machine.must_act(length):
            return True
        if not machine.may_receive(length):
            return False
        assert message is not None
        return message.ask_if_answered()

    def report(self, **numbers: Any) -> None:
        """Report numbers of this worker, such as its loss, for monitoring.

        They are sent with the next exchange and all later ones, until they are reported
        again. A served center shows them in ``agn-optax watch`` and on its page.

        Args:
          numbers: real scalars by name. An array is waited for when it is sent, not
            here.

        Raises:
          InvalidTypeError: a value is not a real scalar.
          InvalidArgumentError: more than 64 numbers have been reported in total, or a
            name has more than 64 characters.

        Example:
          >>> import optax, agn_optax
          >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour())
          >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=2)
          >>> worker.report(loss=0.7, accuracy=0.9)
        """
        for name, number in numbers.items():
            check.real_scalar(number, f"report({name}=...)")
        reported = {**self._reported, **numbers}
        if len(reported) > (most := MOST_REPORTED) or any(
            len(name) > most for name in numbers
        ):
            raise errors.InvalidArgumentError(
                f"a worker reports {most} numbers at most, whose names have {most} "
                f"characters at most, got {len(reported)}: {sorted(reported)}"
            )
        self._reported = reported

    def flush(
        self,
        params: PyTree,
        state: LocalState,
        *,
        steps: int | None = None,
        weight: float | None = None,
    ) -> tuple[PyTree, LocalState]:
        """Exchange now, unless the round has had no local steps.

        This is for a worker that is about to leave, or to be preempted. The message
        carries the number of steps really made. The call waits for the answers of this
        exchange and of one in flight.

        Arguments, results and errors are those of `exchange`, except that ``steps`` is
        the total number of local steps of the round and ``weight`` their total weight.
        None keeps the values counted by `exchange`.
        """
        for part in self._parts:
            part._require_start()
        self._check_called_from_python(state)
        weight = self._check_flush(steps, weight)
        return self._call(
            params,
            state,
            self._flushing(range(len(self._parts))),
            "flush",
            lambda counts: counts.replaced(steps, weight),
        )

    def _check_flush(self, steps: int | None, weight: float | None) -> float | None:
        """Check the arguments of `flush`; return the weight as a Python float."""
        check.whole_number(steps, "steps", least=0)
        return check.weight(weight)

    def resend(
        self, params: PyTree, state: Any, parts: Sequence[int]
    ) -> tuple[PyTree, Any]:
        """Exchange the messages of some parts of which `before_send` was told.

        This is for a worker that was restored from what `save` returned at that time:
        they are the same messages, so the center does not apply them twice, and
        `before_send` is not called again.
        """
        hook, self.before_send = self.before_send, None
        try:
            acts = self._flushing(parts)
            params, state = self._call(
                params, state, acts, "flush", lambda counts: counts
            )
        finally:
            self.before_send = hook
        if len(parts) == 1:
            self._turn = (parts[0] + 1) % len(self._parts)
        return params, state

    def receive(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Wait for the answer of an exchange in flight, and adopt it.

        This is for code that needs a worker without a message in flight, such as for
        `save`. Nothing is sent. If nothing is in flight, the call does nothing.

        Arguments, results and errors are those of `exchange`.
        """
        return self._call(params, state, self._receiving())

    def leave(self) -> None:
        """Leave the center, which then no longer waits for this worker.

        Progress that was not exchanged is lost: call `flush` before, if it matters. A
        ``with worker:`` block calls this at its end, also when Ctrl-C ends it.
        """
        self._anchor = self._spare = self._kept = None
        self._machine.leave()
        session, self._session = self._session, None
        message, self._message = self._message, None
        if message is not None:
            message.abandoned.set()  # end its retries
        if session is not None:
            session.leave()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def save(self, params: PyTree, state: LocalState) -> WorkerState:
        """Return the complete state of this worker, for a checkpoint.

        The arrays are the given ones, not copies: write them before you donate them.

        Args:
          params: the current parameters.
          state: the current state.

        Returns:
          A pytree. Together with the center's own ``save``, made while no worker
          exchanges, it lets training continue as if it had never stopped.

        Raises:
          WorkerStateError: the worker was not started, or has an exchange in flight.
        """
        anchor, _ = self._require_start()
        self._check_called_from_python(state)
        if self._message is not None:  # the center may or may not have applied it
            raise errors.WorkerStateError(
                f"worker {self.name!r} has an exchange that has not ended, which "
                "cannot be saved: receive() or flush() before"
            )
        params, state = self._kept or (params, state)
        return WorkerState(
            params,
            state,
            anchor.params,
            anchor.version,
            self._machine.now.steps,
            self.exchanges,
            self._machine.now.weight,
            self.pace,
        )

    def restore(
        self, saved: WorkerState, *, life: Any = None
    ) -> tuple[PyTree, LocalState]:
        """Continue from a saved state; call this instead of `start`.

        Args:
          saved: the result of `save`, or its arrays read back from a checkpoint;
            copied.
          life: the saved worker's `life`: this worker continues its session, at a
            center that has kept running. If the center has already applied the next
            exchange of the session, it answers that exchange without applying it again.
            None begins a new session, at a center that was saved with the worker.

        Returns:
          Parameters and state with which to continue.

        Raises:
          TreeMismatchError: ``saved`` does not match this worker or center.
          WorkerStateError: the center is older than ``saved``, or does not know the
            session.
        """
        center = self.center.pull()
        check.same_tree(saved.params, center.params, "saved.params", "center")
        expected = jax.eval_shape(self._programs.start, center.params, saved.params)[1]
        check.same_tree(saved.state, expected, "saved.state", "this worker's state")
        if self._programs.holds_anchor:
            check.same_tree(saved.anchor, center.params, "saved.anchor", "center")
        seen = jax.tree.map(int, saved.anchor_version)
        check.same_tree(seen, center.version, "saved.anchor_version", "its version")
        if any(jax.tree.leaves(jax.tree.map(int.__gt__, seen, center.version))):
            raise errors.WorkerStateError(
                f"saved is of a worker that has seen version {seen} of the center, "
                f"which is at {center.version}: restore both from one checkpoint, or "
                "adopt this center with start()"
            )
        exchanges = int(saved.exchanges)
        self._length(exchanges)  # raises if invalid, before anything changes
        params, state, anchor = trees.copy((saved.params, saved.state, saved.anchor))
        self.leave()
        its, sent = (None, 0) if life is None else life
        session = self.center.join(self.name, params, life=its)
        weight = None if saved.weight is None else float(saved.weight)
        self._begin(
            session,
            (params, state),
            Snapshot(anchor, seen),
            settled=sent,
            exchanges=exchanges,
            counts=Counts(int(saved.local_steps), weight),
        )
        self._knows_anchor = life is not None  # else the center may have a new id
        self.pace = None if saved.pace is None else float(saved.pace)
        return params, state

    # The acts of one part.

    def _make(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """End the round: its message exists, of these parameters and this state."""
        self._check_loop(params, state)
        self._machine.make()
        return params, state

    def _complete(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Send the message and adopt its answer, or send it in the background.

        If there is no message to complete, nothing is done.
        """
        machine, message = self._machine, self._message
        if not machine.is_stuck:
            return params, state
        if message is not None:  # else `_make` has checked them
            self._check_loop(params, state)
        elif machine.background:
            return self._send(params, state)
        else:
            message = self._new_message(params, state)
        if message.answer is None:
            try:
                message.answer = message.exchange()
            except errors.CenterUnreachableError as error:
                goes_on = machine.lose()
                if not goes_on or isinstance(error, errors.CenterClosedError):
                    raise
                state = state._replace(codec_state=message.codec_state)
                sent, state = self._programs.keep_going(params, state)
                self._send_in_background(message, sent)
                return params, state
            except Exception as error:
                if is_settled(error):
                    self._discard()
                raise
        if machine.state is State.MADE:
            machine.answer()
        answer = self._taken(message, message.answer, params)
        state = state._replace(codec_state=message.codec_state)
        if answer.refused:
            return self._reset(params, state, message, answer)
        state = self._taken_back(state, message, answer)
        params, state = self._programs.adopt(params, state, answer.params)
        self._adopted(answer)
        return params, state

    def _send_ahead(
        self, params: PyTree, state: LocalState
    ) -> tuple[PyTree, LocalState]:
        """Begin to complete a message: send it, without a wait for the answer.

        `_complete` then waits for the answer.
        """
        if not self._machine.is_stuck:
            return params, state
        message = self._message
        if message is not None:  # else `_make` has checked them
            self._check_loop(params, state)
        elif self._machine.background:
            return self._send(params, state)
        (message or self._new_message(params, state)).send_ahead()
        return params, state

    def _new_message(self, params: PyTree, state: LocalState) -> Message:
        """Make the arrays of a message, for which the caller waits."""
        anchor, _ = self._require_start()
        measured = self._measured(params, state)
        contribution, codec_state, made = self._programs.contribute(
            state, params, anchor.params
        )
        self._message = self._message_of(contribution, made, measured, codec_state)
        return self._message

    def _discard(self) -> None:
        """Forget a message that was not applied, so that it is not sent again."""
        self._message = None
        self._machine.discard()

    def _discard_unsent(self) -> None:
        """Forget a message that a call has not sent because it raised before."""
        if self._machine.state is State.MADE and self._message is None:
            self._machine.discard()

    def _reset(
        self, params: PyTree, state: LocalState, message: Message, answer: Answer
    ) -> tuple[PyTree, LocalState]:
        """Reset this worker to the center, after its message was rejected.

        The codec returns the rejected message to its residual, if it can, to send it
        later. After two rejections in a row the residual is discarded: a message that
        is rejected again, such as for its size, would always be rejected.
        """
        _log.warning(
            "a message of worker %r was refused, which goes on from the center: %s",
            self.name,
            answer.refused,
        )
        residual = "discarded" if self.refusal else "restored"
        if answer.in_part:
            residual = "kept"
        params, state = self._programs.reset(
            params,
            state,
            message.submission.contribution,
            answer.params,
            residual=residual,
        )
        self._adopted(answer, resets=True)
        return params, state

    def _taken_back(
        self, state: LocalState, message: Message, answer: Answer
    ) -> LocalState:
        """Return a dropped message to the codec's residual, to be sent later.

        A message in parts is lost instead: some parts may have been applied, and
        nothing may be applied twice.
        """
        is_whole = answer.applied or answer.in_part
        if is_whole or self._programs.take_back is None:
            return state
        return self._programs.take_back(state, message.submission.contribution)

    def _message_of(
        self,
        contribution: PyTree,
        made: jax.Array,
        measured: dict[str, Any],
        codec_state: PyTree = None,
    ) -> Message:
        anchor, session = self._require_start()
        counts = self._machine.message
        if self._steps is None:
            self._steps = made, counts.steps
        is_known = self._programs.follows and self._knows_anchor
        submission = Submission(
            self._machine.number,
            contribution,
            anchor.version,
            steps=counts.steps,
            weight=counts.weight,
            reported=dict(self._reported),
            anchor=anchor.params if is_known else None,
        )
        if isinstance(session, ToldSession):
            return ToldMessage(session, submission, measured, codec_state)
        return Message(session, submission, measured, codec_state)

    def _send(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Make the arrays of a message, and send it while local steps go on."""
        anchor, _ = self._require_start()
        spare, self._spare = self._spare, None
        if spare is None:
            contribution, *_ = self._programs.contribute(state, params, anchor.params)
            kept = params if self._programs.keeps_sent else None
            spare = trees.copy((contribution, kept))
        measured = self._measured(params, state)
        contribution, sent, state = self._programs.send(
            spare, params, state, anchor.params
        )
        for leaf in jax.tree.leaves(contribution):
            leaf.copy_to_host_async()
        message = self._message_of(contribution, sent.steps, measured)
        self._send_in_background(message, sent)
        return params, state

    def _send_in_background(self, message: Message, sent: Sent) -> None:
        """Send a message in the background, and begin the next round."""
        message.sent, self._message = sent, message
        self._machine.send()
        message.send_in_background(self._give_up)

    def _receive(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Wait for the answer to a message in flight, adopt it, and keep progress.

        If no message is in flight, nothing is done.
        """
        if not self._machine.in_flight:
            return params, state
        message = self._message
        assert message is not None
        assert message.sent is not None
        self._check_loop(params, state)
        anchor, _ = self._require_start()
        try:
            answer = message.receive()
        except Exception as error:
            if is_settled(error):
                self._discard()  # local steps may go on
            else:
                self._machine.lose()
                message.send_in_background(self._give_up)
            raise
        answer, sent = self._taken(message, answer, params), message.sent
        if answer.refused:
            params, state = self._reset(params, state, message, answer)
        else:
            state = self._taken_back(state, message, answer)
            params, state = self._programs.receive(
                params,
                state,
                message.submission.contribution,
                sent,
                anchor.params,
                answer.params,
            )
            self._adopted(answer)
        if self._machine.background:
            self._spare = message.submission.contribution, sent.params
        return params, state

    def _check_steps(self) -> None:
        """Warn if the device counted other local steps than `exchange` was told.

        Steps made with an optimizer of the caller's own are not in the record, so the
        center gets nothing of them. This is not an error, because loss scaling may skip
        some or all steps of a round.
        """
        # If the device has not computed its count yet, a later exchange checks it.
        if self._paced or self._steps is None or not self._steps[0].is_ready():
            return
        (counted, told), self._steps = self._steps, None
        made = int(counted)
        self._empty = 0 if made else self._empty + 1
        if made > told:
            is_off = (
                "its rounds are longer than its period. Call it once after every local "
                "step, or say of how many it is: exchange(params, state, steps=...)"
            )
        elif 0 < 2 * made <= told:  # loss scaling skips some steps, but not half
            is_off = (
                "its rounds are shorter than its period. Call it once after every "
                "local step"
            )
        elif self._empty >= 2 and not self.center.rule.needs_params:
            is_off = (
                "its messages are empty, and the center does not move. Make local "
                "steps with worker.tx.update(grads, state, params), which makes the "
                "record that is sent; an optimizer of your own is the argument inner, "
                "Worker(center, inner, ...). Only where loss scaling has skipped all "
                "of these steps, nothing is wrong"
            )
        else:
            return
        self._paced = True
        _log.warning(
            "worker %r has made %d local steps in a round in which exchange() was told "
            "of %d: %s",
            self.name,
            made,
            told,
            is_off,
        )

    def _measured(self, params: PyTree, state: LocalState) -> dict[str, Any]:
        """Return the values for callbacks that are known before a message is made."""
        if not self._callbacks:
            return {}
        anchor, _ = self._require_start()
        measured: dict[str, Any] = {
            "steps": self._machine.message.steps,
            **self._reported,
        }
        if not self.center.rule.codec.is_identity:
            measured["codec_error"] = self._programs.codec_error(
                state, params, anchor.params
            )
        return measured

    def _taken(self, message: Message, answer: Answer, params: PyTree) -> Answer:
        """Move an answer to the devices of ``params``, and measure it for callbacks."""
        if self._callbacks:
            received = answer.received
            if received is None:
                dtype = self.center.rule.codec.answer_dtype
                received = trees.nbytes(answer.params, dtype)
            message.measured["bytes_received"] = received
        answer = _placed(answer, params)
        if self._callbacks:
            distance = self._programs.distance(params, answer.params)
            message.measured["distance"] = distance
        return answer

    def _tell(self, message: Message, answer: Answer) -> None:
        """Call the callbacks after an exchange."""
        said = {
            **message.measured,
            "staleness": answer.staleness,
            "message_norm": answer.norm,
            "applied": answer.applied,
            "refused": bool(answer.refused),
            "version": max(jax.tree.leaves(answer.version)),
            "bytes_sent": trees.nbytes(message.submission.contribution),
        }
        values = {k: float(v) for k, v in said.items() if v is not None}
        for callback in self._callbacks:
            try:
                callback(self.exchanges, values)
            except Exception:  # not raised: the center has moved, and the loop goes on
                _log.exception("%r failed; training goes on", callback)

    def _adopted(self, answer: Answer, *, resets: bool = False) -> None:
        """Update counts and the anchor after an exchange: see `Machine.adopt`."""
        self._check_steps()
        message = self._message
        self._machine.adopt(resets=resets)
        self._message = None
        self.dropped += not (answer.applied or answer.refused)
        self.refused += bool(answer.refused)
        self.refusal = answer.refused
        self.staleness = answer.staleness
        self.norm = answer.norm
        self._set_pace(answer.pace)
        self._knows_anchor = True
        if message is not None and self._callbacks:
            self._tell(message, answer)
        self._keep_anchor(answer.snapshot)

    def _set_pace(self, pace: float | None) -> None:
        if pace is not None:
            self.pace = pace
        elif self._follows and self._machine.settled == 2:  # it is measured by then
            _log.warning(
                "%r says nothing of how fast worker %r is, as a center of an earlier "
                "release: its rounds stay at %d local steps",
                self.center,
                self.name,
                self._length(self.exchanges),
            )

    def _lengths(self, period: Any) -> Callable[[int], int]:
        """Return a function: exchanges made so far -> local steps of the next round."""
        if isinstance(period, rounds.DynamicPeriod):
            return lambda exchanges: period(self.pace)
        return _scheduled(period)

    def _begin(
        self,
        session: Session,
        loop: PyTree,
        anchor: Snapshot,
        *,
        settled: int = 0,
        exchanges: int | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._session = session
        self._machine.start(
            settled=settled, exchanges=exchanges, counts=counts or Counts()
        )
        self._knows_anchor = True
        self._steps, self._empty = None, 0
        self._like = jax.eval_shape(lambda: loop)
        self._keep_anchor(anchor)

    def _keep_anchor(self, anchor: Snapshot) -> None:
        # If the arrays are not read, they are released, so that the center can
        # overwrite them.
        holds = self._programs.holds_anchor
        self._anchor = anchor if holds else anchor._replace(params=None)

    def _check_loop(self, params: PyTree, state: LocalState) -> None:
        """Check the loop's arrays before anything is sent."""
        check.params_given(params, f"worker {self.name!r}")
        self._check_called_from_python((params, state))
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
        anchor, _ = self._require_start()
        if anchor.params is not None:  # the parameters may have moved since `start`
            self._anchor = _placed(anchor, params)

    def _check_called_from_python(self, tree: PyTree) -> None:
        """Raise if called while tracing: the host would count the steps only once."""
        # Each local step renews `local_steps`, so it is traced if the state is.
        leaves = tree.local_steps if isinstance(tree, LocalState) else tree
        if any(map(check.is_traced, jax.tree.leaves(leaves))):
            raise errors.InvalidTypeError(
                f"worker {self.name!r} exchanges and is saved from Python, and not "
                "inside jax.jit, jax.lax.scan or jax.vmap: compile the gradients and "
                "worker.tx.update alone, and call exchange after it"
            )

    def _require_start(self) -> tuple[Snapshot, Session]:
        if self._anchor is None or self._session is None:
            raise errors.WorkerStateError(
                f"worker {self.name!r} has not started: call start() before its first "
                "local step"
            )
        return self._anchor, self._session


def _callbacks(given: Sequence[Callback]) -> tuple[Callback, ...]:
    for each in given:
        if not callable(each):
            raise errors.InvalidTypeError(
                "callbacks must be functions of a step and its values, or objects of "
                f"agn_optax.sinks, got {check.show(each)}"
            )
    return tuple(given)


def _scheduled(period: Any) -> Callable[[int], int]:
    """Return ``period`` as a function of exchanges, called once for each round."""
    schedule = rounds.as_schedule(period)

    @functools.lru_cache(maxsize=2)  # this round and the next
    def length(exchanges: int) -> int:
        return int(check.positive_int(schedule(exchanges), f"period({exchanges})"))

    return length


def _placed(snapshot: S, like: PyTree) -> S:
    return snapshot._replace(params=trees.place_like(snapshot.params, like))
