"""The worker's side of a center, embedded or remote: one class for both.

In an exchange, a worker usually sends a message, waits for the answer, and adopts it.
With ``overlap``, or if the center is lost, it does not wait but makes further local
steps while the message is in flight. When the answer arrives, the worker adopts it and
keeps the progress that it has made since the message was sent.

A model has one part, or with fragments several, and each part has its own exchanges.
The worker decides whose turn it is, and runs the acts of the parts in order.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, combinations, trees
from agn_optax.center import MAX_REPORTED, Center, ShardedCenter
from agn_optax.round import Fragments, LocalState
from agn_optax.worker._part import (
    Callback,
    Part,
    PartState,
    check_called_from_python,
)
from agn_optax.worker._phase import Divided, Whole
from agn_optax.worker._programs import Adoption

PyTree = Any
# One action of a call: (params, state) -> (params, state).
Act = Callable[[PyTree, Any], tuple[PyTree, Any]]
# ({part: number of its message}, params, state) -> None.
BeforeSend = Callable[[Mapping[int, int], PyTree, Any], object]
# The inner optimizer of a fragment: the real one is for the whole tree.
_ALONE = optax.identity()


class WorkerState(NamedTuple):
    """Complete state of a worker, as a pytree to save and to restore from."""

    params: PyTree
    state: Any  # ``LocalState``; with fragments, a `StreamingState`
    parts: tuple[PartState, ...]  # one; with fragments, one for each
    turn: Any = 0  # int: part that comes first if several are due


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
        state is a `StreamingState`. A call of `exchange` waits for one fragment at
        most. If several are due at once, the others have their turns at the next calls,
        except that one may be sent while the answer of another one is adopted. `flush`
        sends all fragments in turn. `version` and `resume_token` have an entry for each
        fragment, `exchanges` is the smallest count among them, and attributes of the
        last message are those of the fragment that sent it. Callbacks get its index as
        ``fragment``. All workers of the center need the same fragments.
      callbacks: functions called after each exchange as ``callback(step, values)``,
        with the number of the exchange, and a dictionary of floats. ``steps``: local
        steps of the round. ``message_norm`` and ``staleness``: of the message.
        ``applied`` and ``rejected``: whether the message was applied or rejected (0 or
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
      rejected: number of messages that the center rejected by its limits, which are in
        `agn_optax.center.MessageLimits`. After a rejection the worker discards its
        progress since its last exchange, including the current local steps, adopts the
        center in full, and goes on. If the state of its inner optimizer is not finite,
        that state is initialized again.
      rejection: reason why the last message was rejected; "" if it was not.
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
        such_as = "a center, such as agn_optax.LocalCenter(rule, params)"
        check.instance(center, Center, f"center must be {such_as}")
        shards: Sequence[Center] = ()
        if fragments is not None:
            center = divided = _divided(center, fragments, period, overlap)
            shards = divided.centers
        if name is not None and (not isinstance(name, str) or not name):
            raise errors.InvalidTypeError(f"name must be a non-empty str, got {name!r}")
        if patience is not None and patience != 0:
            patience = int(check.positive_int(patience, "patience"))
        check.rate(give_up, "give_up", low=0.0, high=float("inf"))
        check.optimizer(inner, "inner")
        self.center = center
        self.fragments = fragments
        self.name = name or f"worker-{uuid.uuid4().hex[:8]}"
        callbacks = _callbacks(callbacks)
        settings: dict[str, Any] = {
            "name": self.name,
            "overlap": overlap,
            "patience": patience,
            "give_up": give_up,
        }
        self._phase: Whole | Divided
        if fragments is None:
            settings |= {"period": period, "callbacks": callbacks}
            self._parts = [Part(center, inner, gradients, **settings)]
            self._phase = Whole(self._parts[0])
        else:
            lengths = rounds.as_schedule(period)
            self._parts = [
                Part(
                    shard,
                    _ALONE,
                    adoption=Adoption(fragments.delay, fragments.mixing),
                    period=fragments.periods(p, lengths),
                    callbacks=[_of_fragment(p, each) for each in callbacks],
                    **settings,
                )
                for p, shard in enumerate(shards)
            ]
            self._phase = Divided(fragments, self._parts, inner, gradients)
        self.tx: optax.GradientTransformationExtraArgs = self._phase.tx
        self._last = self._parts[0]  # part with the last message
        self._turn = 0  # part whose turn is first
        # Parameters and state of a call that raised after it had donated its arguments:
        # the next call continues from them.
        self._kept: tuple[PyTree, Any] | None = None
        # Called when messages exist, before they are made of the given parameters and
        # state, and before they are sent. All earlier messages have been answered.
        self.before_send: BeforeSend | None = None

    def __repr__(self) -> str:
        """Return the worker's name, rule and progress."""
        made = f"{self.exchanges} exchanges"
        if self.fragments is not None:
            counts = [part.exchanges for part in self._parts]
            made = f"{counts} exchanges of {len(counts)} fragments"
        where = "not started" if self.version is None else f"version {self.version}"
        return (
            f"Worker({self.name!r}, {self.center.rule.name}, {made}, {where}, "
            f"at {self.center!r})"
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
        if chief and params is None:
            raise errors.MissingArgumentError(
                f"worker {self.name!r} starts as chief and so must give parameters: "
                "start(params, chief=True), got params=None"
            )
        if params is None and self.fragments is not None:
            whole = self.center.pull() if chief is None else self.center.wait(timeout)
            params = whole.params
        self._phase.check(params)
        cut = self._phase.cut(params)
        for part, own in zip(self._parts, cut, strict=True):
            part.check_start(own, chief=chief)
        self.leave()
        loops = self._all(
            lambda part, own: part.start(own, chief=chief, timeout=timeout), cut
        )
        self._turn, self._last = 0, self._parts[0]
        return self._phase.joined(loops, None)

    def _all(self, begin: Callable[..., Any], *each: Sequence[Any]) -> list[Any]:
        """Call ``begin(part, ...)`` for every part; leave all if one raises."""
        try:
            return [begin(*of_one) for of_one in zip(self._parts, *each, strict=True)]
        except BaseException:
            self.leave()
            raise

    @property
    def exchanges(self) -> int:
        """The number of exchanges made."""
        return min(part.exchanges for part in self._parts)

    @property
    def dropped(self) -> int:
        """The number of messages that the center did not apply."""
        return sum(part.dropped for part in self._parts)

    @property
    def rejected(self) -> int:
        """The number of messages that the center rejected by its limits."""
        return sum(part.rejected for part in self._parts)

    @property
    def rejection(self) -> str:
        """The reason why the last message was rejected; "" if it was not."""
        return "" if self._last.answer is None else self._last.answer.rejected

    @property
    def staleness(self) -> int | None:
        """The staleness of the last message; None before the first."""
        return None if self._last.answer is None else self._last.answer.staleness

    @property
    def norm(self) -> Any:
        """The norm of the last message; None before the first."""
        return None if self._last.answer is None else self._last.answer.norm

    @property
    def pace(self) -> float | None:
        """The speed as a share of the fastest worker's; None if not measured."""
        return self._last.pace

    @property
    def version(self) -> Any:
        """The version of the center adopted last; None before the start."""
        versions = tuple(part.version for part in self._parts)
        if self.fragments is None:
            return versions[0]
        return None if None in versions else versions

    @property
    def resume_token(self) -> Any:
        """This worker's session, for `restore` to continue; None before the start.

        It has the ids of the session and the center, and the number of exchanges that
        are over. It can be serialized as JSON.
        """
        tokens = [part.resume_token for part in self._parts]
        if self.fragments is None:
            return tokens[0]
        return None if None in tokens else tokens

    @property
    def due(self) -> bool:
        """True if the next call of `exchange` acts, or may act on a message in flight.

        This is for loops that must first gather their arrays, such as those of
        `Towers`: on all other steps `exchange` returns its arguments unchanged.
        """
        return self._is_due(1)

    def _is_due(self, steps: int) -> bool:
        """Return whether a call of `exchange` with ``steps`` acts, or may act."""
        # A list: all lengths are asked for, and raise if they are invalid.
        due = [part.machine.is_due(part.round_length, steps) for part in self._parts]
        return self._kept is not None or any(due)

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
          MessageRejectedError: the center has rejected too many messages in a row (10
            by default).
          CenterUnreachableError: the center is lost, and ``patience`` is 0 or
            ``give_up`` seconds have passed.
          TreeMismatchError: parameters or state are not those of this worker.
        """
        for part in self._parts:
            part.require_start()
        check_called_from_python(self.name, state)
        check.whole_number(steps, "steps", least=1, optional=False)
        weight = check.weight(weight)
        if not self._is_due(steps):
            for part in self._parts:
                part.machine.count(steps, weight)
            return params, state
        acts = self._exchanging()
        return self._call(params, state, acts, "exchange", steps, weight)

    def _call(
        self,
        params: PyTree,
        state: Any,
        acts: Iterable[Act],
        name: str = "",
        steps: int = 0,
        weight: float | None = None,
    ) -> tuple[PyTree, Any]:
        """Run the acts of a call in order, with its steps and weight counted.

        If the call raises, its steps and weight are not counted, and it can be repeated
        with the same arguments. If an act before the one that raised has donated the
        loop's arrays, its results are kept, and the next call continues from them.

        Args:
          params: the loop's parameters.
          state: the loop's state.
          acts: the acts.
          name: name of the call; "" for one that neither counts nor sends.
          steps: its local steps.
          weight: their weight.
        """
        kept, self._kept = self._kept, None
        keeps = kept is None  # arrays of this call, if any
        try:
            if name:
                for part in self._parts:
                    part.machine.begin(name, steps, weight)
            if kept is not None:
                params, state = kept
            for act in acts:
                loop = act(params, state)
                if loop[0] is not params or loop[1] is not state:
                    kept = params, state = loop
        except BaseException:
            self._kept = kept
            for part in self._parts:
                part.discard_unsent()
                if name:
                    part.machine.end(returns=False, keeps=keeps and kept is not None)
            raise
        if name:
            for part in self._parts:
                part.machine.end(returns=True)
        return params, state

    def _on(self, p: int, act: Act) -> Act:
        """Return an act of one part as an act on the whole tree."""
        return functools.partial(self._one, p, act)

    def _one(self, p: int, act: Act, params: PyTree, state: Any) -> tuple[PyTree, Any]:
        states, cut = self._phase.states(state), self._phase.cut(params)
        part, rejected = self._parts[p], self._parts[p].rejected
        loop = act(cut[p], states[p])
        if loop[0] is cut[p] and loop[1] is states[p]:
            return params, state
        self._last = part
        loops = [*zip(cut, states, strict=True)]
        loops[p] = loop
        return self._phase.joined(loops, state, resets=part.rejected > rejected)

    # The acts of a call, in order.

    def _exchanging(self) -> Iterator[Act]:
        """Yield the acts of `exchange`, if it acts at all."""
        if self._announces_next:
            yield from self._receiving()
        acting = self._acting()
        for p in acting:
            part = self._parts[p]
            length = part.round_length
            yield self._on(p, part.receive)
            if part.machine.must_act(length):
                part.length(part.exchanges + 1)  # raises if the next period is invalid
                yield self._making([p])
                yield self._on(p, part.complete)
        if acting:
            self._turn = (acting[-1] + 1) % len(self._parts)

    @property
    def _stuck(self) -> list[int]:
        """The part with a message to complete before anything else, if there is one."""
        return [p for p, part in enumerate(self._parts) if part.machine.is_stuck]

    @property
    def _announces_next(self) -> bool:
        """True if this call makes a message of which ``before_send`` is told."""
        if self.before_send is None or self._stuck:
            return False
        return any(part.is_full for part in self._parts)

    @property
    def _order(self) -> list[int]:
        """The parts in the order of their turns."""
        return [*range(self._turn, len(self._parts)), *range(self._turn)]

    def _acting(self) -> list[int]:
        """Return the parts of one call: one to adopt, and perhaps one to send."""
        if stuck := self._stuck:
            return stuck
        parts = self._parts
        now = [p for p in self._order if parts[p].ask_if_acting()]
        receiving = [p for p in now if parts[p].machine.in_flight][:1]
        if not receiving or parts[receiving[0]].is_full:  # it sends, too
            return now[:1]
        sending = [p for p in now if parts[p].machine.sends_in_background]
        return receiving + sending[:1]

    def _flushing(self, parts: Iterable[int]) -> Iterator[Act]:
        """Yield the acts of `flush`, which ends the rounds of parts.

        If a part already has a message, its answer must be adopted before the next is
        made. The next period is not checked: the steps are sent in any case. Workers of
        synchronous rounds wait for each other, so all take the parts in turns.
        """
        yield from self._finishing()
        yield self._making(parts)
        yield from self._finishing()

    def _finishing(self) -> Iterator[Act]:
        """Yield the acts that complete all messages; no new one is made."""
        for p in self._order:
            yield self._on(p, self._parts[p].complete)
        yield from self._receiving()

    def _receiving(self) -> Iterator[Act]:
        """Yield the acts that adopt the answers of all messages in flight."""
        for p in self._order:
            yield self._on(p, self._parts[p].receive)

    def _making(self, parts: Iterable[int]) -> Act:
        """Return an act: messages of the rounds of parts exist, before any is sent."""

        def act(params: PyTree, state: Any) -> tuple[PyTree, Any]:
            numbers = {}
            for p in parts:
                part = self._parts[p]
                if part.machine.can_make:
                    self._one(p, part.make, params, state)
                    numbers[p] = part.machine.number
            if numbers and self.before_send is not None:
                self.before_send(numbers, params, state)
            return params, state

        return act

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
        reported = {**self._parts[0].reported, **numbers}
        if len(reported) > (most := MAX_REPORTED) or any(
            len(name) > most for name in numbers
        ):
            raise errors.InvalidArgumentError(
                f"a worker reports {most} numbers at most, whose names have {most} "
                f"characters at most, got {len(reported)}: {sorted(reported)}"
            )
        for part in self._parts:
            part.reported = reported

    def flush(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Exchange now, unless the round has had no local steps.

        This is for a worker that is about to leave, or to be preempted. The message
        carries the number of steps really made. The call waits for the answers of this
        exchange and of one in flight.

        Arguments, results and errors are those of `exchange`.
        """
        for part in self._parts:
            part.require_start()
        check_called_from_python(self.name, state)
        acts = self._flushing(range(len(self._parts)))
        return self._call(params, state, acts, "flush")

    def resend(
        self, params: PyTree, state: Any, parts: Sequence[int]
    ) -> tuple[PyTree, Any]:
        """Exchange the messages of some parts of which ``before_send`` was told.

        This is for a worker that was restored from what `save` returned at that time:
        they are the same messages, so the center does not apply them twice, and
        ``before_send`` is not called again.
        """
        hook, self.before_send = self.before_send, None
        try:
            acts = self._flushing(parts)
            params, state = self._call(params, state, acts, "flush")
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
        self._kept = None
        for part in self._parts:
            part.leave()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def save(self, params: PyTree, state: Any) -> WorkerState:
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
        for part in self._parts:
            part.require_start()
        check_called_from_python(self.name, state)
        params, state = self._kept or (params, state)
        self._phase.states(state)  # raises if it is not of this worker
        parts = tuple(part.save() for part in self._parts)
        return WorkerState(params, state, parts, self._turn)

    def restore(
        self, saved: WorkerState, *, resume_token: Any = None
    ) -> tuple[PyTree, LocalState]:
        """Continue from a saved state; call this instead of `start`.

        Args:
          saved: the result of `save`, or its arrays read back from a checkpoint;
            copied.
          resume_token: the saved worker's `resume_token`: this worker continues its
            session, at a center that has kept running. If the center has already
            applied the next exchange of the session, it answers that exchange without
            applying it again. None begins a new session, at a center that was saved
            with the worker.

        Returns:
          Parameters and state with which to continue.

        Raises:
          TreeMismatchError: ``saved`` does not match this worker or center.
          WorkerStateError: the center is older than ``saved``, or does not know the
            session.
        """
        count = len(self._parts)
        tokens: Sequence[Any] = [None] * count if resume_token is None else resume_token
        if self.fragments is None:
            tokens = [resume_token]
        for what, given in (("saved", saved.parts), ("resume_token", tokens)):
            if len(given) != count:
                raise errors.WorkerStateError(
                    f"{what} is of a worker with {len(given)} fragments, and worker "
                    f"{self.name!r} has {count}"
                )
        self._phase.check(saved.params, saved.state)
        cut, states = self._phase.cut(saved.params), self._phase.states(saved.state)
        for part, *own in zip(self._parts, cut, states, saved.parts, strict=True):
            part.check_restored(*own)
        # Copies may fail, so they are made before the worker leaves.
        params, state = trees.copy((saved.params, saved.state))
        kept = [own._replace(anchor=trees.copy(own.anchor)) for own in saved.parts]
        cut, states = self._phase.cut(params), self._phase.states(state)
        each = [*zip(cut, states, kept, strict=True)]
        self.leave()
        loops = self._all(
            lambda part, own, resume_token: part.restore(*own, resume_token),
            each,
            tokens,
        )
        self._turn, self._last = int(saved.turn) % count, self._parts[0]
        return self._phase.joined(loops, state)


def _callbacks(given: Sequence[Callback]) -> tuple[Callback, ...]:
    for each in given:
        if not callable(each):
            raise errors.InvalidTypeError(
                "callbacks must be functions of a step and its values, or objects of "
                f"agn_optax.sinks, got {check.show(each)}"
            )
    return tuple(given)


def _of_fragment(p: int, callback: Callback) -> Callback:
    return lambda step, values: callback(step, {**values, "fragment": float(p)})


def _divided(
    center: Center, fragments: Fragments, period: Any, overlap: bool
) -> ShardedCenter:
    """Return a center in shards with one fragment each, or raise if that cannot be."""
    such_as = "an agn_optax.Fragments, such as Fragments(2)"
    check.instance(fragments, Fragments, f"fragments must be {such_as}")
    if not isinstance(center, ShardedCenter):
        center = ShardedCenter([center])
    if len(center.centers) != len(fragments):
        raise errors.InvalidArgumentError(
            "a worker with fragments needs a center in as many shards, each of "
            f"which keeps one: got {len(fragments)} fragments, and shards: "
            f"{len(center.centers)}"
        )
    fragments.check(center.rule)
    if fragments.eager:
        combinations.reject("eager updates", "a Worker", f"{fragments}")
    if fragments.delay and overlap:
        got = f"delay={fragments.delay}, overlap=True"
        combinations.reject("fragments with a delay", "overlap=True", got)
    if isinstance(period, rounds.DynamicPeriod):
        combinations.reject("dynamic_period", "fragments", f"period={period}")
    fragments.check_period(int(rounds.as_schedule(period)(0)))
    return center.divided_by(fragments)
