"""The worker's side of an embedded or served center: one class for both.

In an exchange, a worker usually sends a message, waits for the answer, and adopts it.
With ``overlap``, or if the center is lost, it does not wait but makes further local
steps while the message is in flight. When the answer arrives, the worker adopts it and
keeps the progress that it has made since the message was sent.

With fragments, each fragment has its own exchanges. The worker decides whose turn it
is, and runs the actions of the fragments in order.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import (
    Notice,
    Thresholds,
    check,
    combinations,
    notices,
    trees,
)
from agn_optax.center import MAX_REPORTED, Center, ShardedCenter
from agn_optax.round import Fragments, LocalState
from agn_optax.rules import Rule
from agn_optax.worker._fragment import (
    Callback,
    FragmentState,
    FragmentWorker,
    check_called_from_python,
)
from agn_optax.worker._machine import due_fragments
from agn_optax.worker._phase import FragmentedModel, WholeModel
from agn_optax.worker._programs import NO_INNER

PyTree = Any
Loop = tuple[PyTree, Any]  # parameters and state
Action = Callable[[PyTree, Any], Loop]  # a step of an exchange
# ({fragment: number of its message}, params, state) -> None.
BeforeSend = Callable[[Mapping[int, int], PyTree, Any], object]


class WorkerState(NamedTuple):
    """Complete state of a worker, as a pytree to save and to restore from."""

    params: PyTree
    state: Any  # ``LocalState``; with fragments, a `StreamingState`
    fragments: tuple[FragmentState, ...]  # one per fragment; one without fragments
    turn: Any = 0  # int: fragment that comes first if several are due


class Worker:
    """A worker: its local phase as an optax transformation, and its exchanges.

    You write the loop, as with any optax optimizer, and call `exchange` from Python
    after every local step. It makes an exchange when the period is full. Steps are
    counted on the host, so that no local step waits for the device.

    Args:
      center: the center: a `LocalCenter`, or any other object with its protocol.
      inner: the inner optimizer. It does not change the gradients that a rule records:
        clip these before ``tx.update``.
      period: local steps between exchanges, a positive int; or a function from the
        exchanges that this worker has made (int) to the length of the next round; or
        `dynamic_period`, which follows the worker's speed.
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
        last message are those of the fragment that sent it. Callbacks get the index of
        the fragment as ``fragment``. All workers of the center need the same fragments.
      callbacks: functions called after each exchange as ``callback(step, values)``,
        with the number of the exchange, and a dictionary of floats. ``steps``: local
        steps of the round. ``message_norm`` and ``staleness``: of the message.
        ``applied`` and ``rejected``: whether the message was applied or rejected (0 or
        1). ``version``: version of the center. ``seconds``: time from sending to the
        answer. ``bytes_sent`` and ``bytes_received``: bytes of the arrays. ``notices``:
        number of notices that hold; each of them adds a 1 under its name, such as
        ``notice_slow_exchange``. The numbers given to `report` are included. Callbacks
        wait for the device. An exception in a callback is logged and not raised,
        because the exchange has been made.
      thresholds: `agn_optax.center.Thresholds` from which the worker says that
        exchanges go wrong; None for ``Thresholds()``.

    Attributes:
      center: the center; with ``fragments``, each of its shards keeps one of them.
      before_send: function to be called as ``before_send(numbers, params, state)``,
        once before a message is made, or before all messages of a `flush`. None, the
        default, calls nothing; assign a function at any time. ``numbers`` has the
        number of each message by its fragment, which is 0 without fragments. The
        messages are made from ``params`` and ``state``. All earlier messages have been
        answered by then, also with ``overlap``. If the function calls `save`, the
        worker restored from the result sends the same messages by `resend`. An
        exception in the function is raised by `exchange` or `flush`. Nothing has been
        sent then, and the call can be repeated with the same arguments; it calls the
        function again.
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
      resume_token: this worker's session, for `restore` to continue; None before the
        start.
      notices: the notices that hold now, as logged: those of this worker's checks,
        which the next message takes to a served center; and those of the center, about
        itself or this worker, which each answer brings.
      due: whether the next call of `exchange` sends a message, or may adopt an answer.

    Raises:
      InvalidArgumentError: ``period`` is not a positive whole number, or ``patience``
        or ``give_up`` is negative; or the center does not have one shard for each of
        the ``fragments``; or the fragments cannot be used with this rule, or have a
        delay together with ``overlap``.
      InvalidTypeError: ``inner`` is not an optimizer, or ``center`` is not a center.

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
        name: str | None = None,
        overlap: bool = False,
        patience: int | None = None,
        give_up: float = 600.0,
        callbacks: Sequence[Callback] = (),
        thresholds: Thresholds | None = None,
    ) -> None:
        such_as = "a center, such as agn_optax.LocalCenter(rule, params)"
        check.instance(center, Center, f"center must be {such_as}")
        if fragments is not None:
            center = divided = _divided(center, fragments, period, overlap)
        if name is not None and (not isinstance(name, str) or not name):
            raise errors.InvalidTypeError(f"name must be a non-empty str, got {name!r}")
        if patience is not None and patience != 0:
            patience = int(check.positive_int(patience, "patience"))
        check.rate(give_up, "give_up", low=0.0, high=float("inf"))
        check.optimizer(inner, "inner")
        _check_callbacks(callbacks)
        notices.check_thresholds(thresholds)
        self.center = center
        self.fragments = fragments
        self.name = name or f"worker-{uuid.uuid4().hex[:8]}"
        fragment_worker = functools.partial(
            FragmentWorker,
            name=self.name,
            overlap=overlap,
            patience=patience,
            give_up=give_up,
            thresholds=thresholds,
            settings={
                "fragments": repr(fragments),
                "overlap": bool(overlap),
                "patience": patience,
            },
        )
        self._model: WholeModel | FragmentedModel
        if fragments is None:
            only = fragment_worker(
                center, inner, period=period, callbacks=tuple(callbacks)
            )
            self._workers = [only]  # one for each fragment
            self._model = WholeModel(only.programs.tx)
        else:
            schedule = rounds.as_schedule(period)
            self._workers = [
                fragment_worker(
                    shard,
                    NO_INNER,
                    delay=fragments.delay,
                    mixing=fragments.mixing,
                    period=fragments.periods(f, schedule),
                    callbacks=[_with_fragment(f, callback) for callback in callbacks],
                )
                for f, shard in enumerate(divided.centers)
            ]
            workers, rule = self._workers, center.rule
            self._model = FragmentedModel(
                fragments, lambda: [w.programs for w in workers], rule, inner, self.name
            )
        self.tx: optax.GradientTransformationExtraArgs = self._model.tx
        self._last_sender = self._workers[0]  # its answer has the newest numbers
        self._turn = 0  # fragment that comes first if several are due
        # Parameters and state of a call that raised after its arguments were donated:
        # the next call continues from them.
        self._kept: Loop | None = None
        # Called once before each message, or before all messages of a flush, with the
        # parameters and state from which it is made. All earlier messages have been
        # answered by then.
        self.before_send: BeforeSend | None = None

    def __repr__(self) -> str:
        """Return the worker's name, rule and progress."""
        progress = f"{self.exchanges} exchanges"
        if self.fragments is not None:
            counts = [worker.exchanges for worker in self._workers]
            progress = f"{counts} exchanges of {len(counts)} fragments"
        version = "not started" if self.version is None else f"version {self.version}"
        return (
            f"Worker({self.name!r}, {self.center.rule.name}, {progress}, {version}, "
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
            of the others give the dtypes, devices and shardings for the adopted center.
            None uses the dtypes and devices of the center. If the parameters are global
            arrays of a `jax.distributed` job, its processes are one worker: each makes
            the same calls with the same values, and exchanges its own pieces.
          chief: True initializes the center with ``params``, unless this worker has
            done so in an earlier session; False waits until a chief has; None expects
            an initialized center.
          timeout: seconds to wait at most, for a chief or for the other workers of a
            barrier; None waits forever.

        Returns:
          Parameters and state of the local phase: new arrays, which you may donate.

        Raises:
          NotInitializedError: the center has no parameters, or none within ``timeout``.
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
            center = self.center.pull() if chief is None else self.center.wait(timeout)
            params = center.params
        self._model.check(params)
        split = self._model.split_params(params)
        for worker, fragment in zip(self._workers, split, strict=True):
            worker.check_start(fragment, chief=chief)
        self.leave()
        start = functools.partial(FragmentWorker.start, chief=chief, timeout=timeout)
        loops = self._for_all(start, split)
        return self._begin(loops, None, 0)

    def _for_all(self, join: Callable[..., Loop], *args: Sequence[Any]) -> list[Loop]:
        """Call ``join(worker, ...)`` for every fragment; leave all if one raises."""
        try:
            return [*map(join, self._workers, *args)]
        except BaseException:
            self.leave()
            raise

    def _begin(self, loops: Sequence[Loop], state: Any, turn: int) -> Loop:
        self._turn, self._last_sender = turn, self._workers[0]
        return self._model.join(loops, state)

    @property
    def exchanges(self) -> int:
        """The number of exchanges made."""
        return min(worker.exchanges for worker in self._workers)

    @property
    def dropped(self) -> int:
        """The number of messages that the center did not apply."""
        return sum(worker.dropped for worker in self._workers)

    @property
    def rejected(self) -> int:
        """The number of messages that the center rejected by its limits."""
        return sum(worker.rejected for worker in self._workers)

    @property
    def rejection(self) -> str:
        """The reason why the last message was rejected; "" if it was not."""
        answer = self._last_sender.answer
        return "" if answer is None else answer.rejected

    @property
    def staleness(self) -> int | None:
        """The staleness of the last message; None before the first."""
        answer = self._last_sender.answer
        return None if answer is None else answer.staleness

    @property
    def norm(self) -> Any:
        """The norm of the last message; None before the first."""
        answer = self._last_sender.answer
        return None if answer is None else answer.norm

    @property
    def pace(self) -> float | None:
        """The speed as a share of the fastest worker's; None if not measured."""
        return self._last_sender.pace

    @property
    def version(self) -> Any:
        """The version of the center adopted last; None before the start."""
        versions = tuple(worker.version for worker in self._workers)
        if self.fragments is None:
            return versions[0]
        return None if None in versions else versions

    @property
    def resume_token(self) -> Any:
        """This worker's session, for `restore` to continue; None before the start.

        It has the ids of the session and the center, and the number of exchanges that
        are over. It can be serialized as JSON.
        """
        tokens = [worker.resume_token for worker in self._workers]
        if self.fragments is None:
            return tokens[0]
        return None if None in tokens else tokens

    @property
    def notices(self) -> list[Notice]:
        """The notices that hold now, as logged."""
        return [n for worker in self._workers for n in worker.checks.notices.current()]

    @property
    def due(self) -> bool:
        """True if the next call of `exchange` sends a message, or may adopt an answer.

        This is for loops that must first gather their arrays, such as those of
        `Towers`: at all other steps `exchange` returns its arguments unchanged.
        """
        return self._is_due(1)

    def _is_due(self, steps: int) -> bool:
        """Return whether a call of `exchange` with ``steps`` may do anything."""
        # A list, so that every invalid round length raises.
        due = [
            worker.machine.is_due(worker.round_length, steps)
            for worker in self._workers
        ]
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
        for worker in self._workers:
            worker.require_start()
        check_called_from_python(self.name, state)
        check.whole_number(steps, "steps", least=1, optional=False)
        weight = check.weight(weight)
        if not self._is_due(steps):
            for worker in self._workers:
                worker.machine.count_steps(steps, weight)
            return params, state
        actions = self._exchange_actions()
        return self._run(params, state, actions, "exchange", steps, weight)

    # A call is a sequence of actions.

    def _run(
        self,
        params: PyTree,
        state: Any,
        actions: Iterable[Action],
        call: str = "",
        steps: int = 0,
        weight: float | None = None,
    ) -> Loop:
        """Run the actions of a call in order, with its steps and weight counted.

        If the call raises, its steps and weight are not counted, and it can be repeated
        with the same arguments. If an action before the one that raised has donated the
        arguments, its results are kept, and the next call continues from them.

        Args:
          params: the parameters.
          state: the state.
          actions: the actions.
          call: name of the call; "" for one that neither counts nor sends.
          steps: its local steps.
          weight: their weight.
        """
        kept, self._kept = self._kept, None
        is_own = kept is None  # True if arrays that will be kept are this call's
        try:
            if call:
                for worker in self._workers:
                    worker.machine.begin_call(call, steps, weight)
            if kept is not None:
                params, state = kept
            self._finish_actions()
            for action in actions:
                loop = action(params, state)
                if loop[0] is not params or loop[1] is not state:
                    kept = params, state = loop
                    self._finish_actions()
        except BaseException:
            self._kept = kept
            is_kept = is_own and kept is not None
            for worker in self._workers:
                worker.discard_unsent()
                if call:
                    worker.machine.end_call(returned=False, kept=is_kept)
            raise
        if call:
            for worker in self._workers:
                worker.machine.end_call(returned=True)
        return params, state

    def _finish_actions(self) -> None:
        for worker in self._workers:
            worker.finish()

    def _exchange_actions(self) -> Iterator[Action]:
        """Yield the actions of `exchange`, if anything is to be done."""
        if self._calls_before_send:
            yield from self._receive_actions()
        due = self._due_fragments()
        for f in due:
            worker = self._workers[f]
            length = worker.round_length
            yield self._on_whole(f, worker.receive)
            if worker.machine.must_act(length):
                worker.round_length_at(worker.exchanges + 1)  # raises if invalid
                yield self._prepare_action([f])
                yield self._on_whole(f, worker.send)
        if due:
            self._turn = (due[-1] + 1) % len(self._workers)

    @property
    def _calls_before_send(self) -> bool:
        """True if this call prepares a message, and so calls ``before_send``."""
        if self.before_send is None or self._pending:
            return False
        return any(worker.is_full for worker in self._workers)

    def _due_fragments(self) -> list[int]:
        """Return the fragments of one call: one to adopt, and perhaps one to send."""
        workers = self._workers
        return due_fragments(
            [worker.machine for worker in workers],
            self._turn,
            lambda f: workers[f].must_act_now(),
            lambda f: workers[f].is_full,
        )

    @property
    def _pending(self) -> list[int]:
        """The fragment with a message that must be completed first, if there is one."""
        workers = enumerate(self._workers)
        return [f for f, worker in workers if worker.machine.has_pending_message]

    @property
    def _order(self) -> list[int]:
        """The fragments in the order of their turns."""
        return [*range(self._turn, len(self._workers)), *range(self._turn)]

    def _flush_actions(self, fragments: Iterable[int]) -> Iterator[Action]:
        """Yield the actions of `flush`, which ends the rounds of these fragments.

        If a fragment already has a message, its answer must be adopted first. The next
        period is not checked, because the steps are sent in any case. All workers send
        the fragments in the same order: in synchronous rounds they wait for each other.
        """
        yield from self._complete_actions()
        yield self._prepare_action(fragments)
        yield from self._complete_actions()

    def _complete_actions(self) -> Iterator[Action]:
        """Yield the actions that complete all messages, and prepare no new one."""
        for f in self._order:
            yield self._on_whole(f, self._workers[f].send)
        yield from self._receive_actions()

    def _receive_actions(self) -> Iterator[Action]:
        """Yield the actions that adopt the answers to all messages in flight."""
        for f in self._order:
            yield self._on_whole(f, self._workers[f].receive)

    def _prepare_action(self, fragments: Iterable[int]) -> Action:
        """Return an action that prepares messages, and calls ``before_send``."""

        def prepare(params: PyTree, state: Any) -> Loop:
            numbers = {}
            for f in fragments:
                worker = self._workers[f]
                if worker.machine.can_prepare:
                    self._on_whole(f, worker.prepare)(params, state)
                    numbers[f] = worker.machine.number
            if numbers and self.before_send is not None:
                self.before_send(numbers, params, state)
            return params, state

        return prepare

    def _on_whole(self, fragment: int, action: Action) -> Action:
        """Return an action of a fragment as an action on the whole model."""
        worker = self._workers[fragment]

        def act(params: PyTree, state: Any) -> Loop:
            self._model.check_loop(params, state)
            before = self._model.take(params, state, fragment)
            rejected = worker.rejected
            loop = action(*before)
            if loop[0] is before[0] and loop[1] is before[1]:
                return params, state
            self._last_sender = worker
            resets = worker.rejected > rejected
            return self._model.put(params, state, fragment, loop, resets=resets)

        return act

    def _split(self, params: PyTree, state: Any) -> list[Loop]:
        states = self._model.split_state(state)
        return [*zip(self._model.split_params(params), states, strict=True)]

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
        reported = {**self._workers[0].reported, **numbers}
        if len(reported) > (most := MAX_REPORTED) or any(
            len(name) > most for name in numbers
        ):
            raise errors.InvalidArgumentError(
                f"a worker reports {most} numbers at most, whose names have {most} "
                f"characters at most, got {len(reported)}: {sorted(reported)}"
            )
        for worker in self._workers:
            worker.reported = reported

    def flush(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Exchange now, unless the round has had no local steps.

        This is for a worker that is about to leave, or to be preempted. The message
        carries the number of steps really made. The call waits for the answers of this
        exchange and of one in flight.

        Arguments, results and errors are those of `exchange`.
        """
        for worker in self._workers:
            worker.require_start()
        check_called_from_python(self.name, state)
        actions = self._flush_actions(range(len(self._workers)))
        return self._run(params, state, actions, "flush")

    def resend(
        self, params: PyTree, state: Any, fragments: Sequence[int]
    ) -> tuple[PyTree, Any]:
        """Send the messages of the fragments for which ``before_send`` was called.

        This is for a worker restored from what `save` returned in that call: the center
        does not apply these messages twice. ``before_send`` is not called again.
        """
        hook, self.before_send = self.before_send, None
        try:
            actions = self._flush_actions(fragments)
            params, state = self._run(params, state, actions, "flush")
        finally:
            self.before_send = hook
        if len(fragments) == 1:
            self._turn = (fragments[0] + 1) % len(self._workers)
        return params, state

    def receive(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Wait for the answer of an exchange in flight, and adopt it.

        This is for code that needs a worker without a message in flight, such as for
        `save`. Nothing is sent. If nothing is in flight, the call does nothing.

        Arguments, results and errors are those of `exchange`.
        """
        return self._run(params, state, self._receive_actions())

    def leave(self) -> None:
        """Leave the center, which then no longer waits for this worker.

        Progress that was not exchanged is lost: call `flush` before, if it matters. A
        ``with worker:`` block calls this at its end, also when Ctrl-C ends it.
        """
        self._kept = None
        for worker in self._workers:
            worker.leave()

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
        for worker in self._workers:
            worker.require_start()
        check_called_from_python(self.name, state)
        params, state = self._kept or (params, state)
        self._model.split_state(state)  # raises if it does not belong to this worker
        fragments = tuple(worker.save() for worker in self._workers)
        return WorkerState(params, state, fragments, self._turn)

    def restore(
        self, saved: WorkerState, *, resume_token: Any = None
    ) -> tuple[PyTree, LocalState]:
        """Continue from a saved state; call this instead of `start`.

        Args:
          saved: the result of `save`, or its arrays read back from a checkpoint. The
            arrays are copied.
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
        count = len(self._workers)
        tokens: Sequence[Any] = [None] * count if resume_token is None else resume_token
        if self.fragments is None:
            tokens = [resume_token]
        for name, fragments in (("saved", saved.fragments), ("resume_token", tokens)):
            if len(fragments) != count:
                raise errors.WorkerStateError(
                    f"{name} is of a worker with {len(fragments)} fragments, but "
                    f"worker {self.name!r} has {count}"
                )
        self._model.check(saved.params, saved.state)
        loops = self._split(saved.params, saved.state)
        given = zip(self._workers, loops, saved.fragments, strict=True)
        for worker, loop, fragment in given:
            worker.check_restored(loop, fragment)
        # Copies may fail, so they are made before the worker leaves.
        params, state = trees.copy((saved.params, saved.state))
        copies = [f._replace(anchor=trees.copy(f.anchor)) for f in saved.fragments]
        loops = self._split(params, state)
        self.leave()
        loops = self._for_all(FragmentWorker.restore, loops, copies, tokens)
        return self._begin(loops, state, int(saved.turn) % count)


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        if not callable(callback):
            raise errors.InvalidTypeError(
                "callbacks must be functions of a step and its values, got "
                f"{check.show(callback)}"
            )


def _with_fragment(fragment: int, callback: Callback) -> Callback:
    return lambda step, values: callback(step, {**values, "fragment": float(fragment)})


def _divided(
    center: Center, fragments: Fragments, period: Any, overlap: bool
) -> ShardedCenter:
    """Return a center with a shard for each fragment; raise if that is impossible."""
    check_fragments(fragments, center.rule, period, overlap=overlap)
    if not isinstance(center, ShardedCenter):
        center = ShardedCenter([center])
    if len(center.centers) != len(fragments):
        raise errors.InvalidArgumentError(
            "a worker with fragments needs a center with one shard for each of them, "
            f"got {len(fragments)} fragments, and shards: {len(center.centers)}"
        )
    return center.divided_by(fragments)


def check_fragments(
    fragments: Fragments, rule: Rule | None, period: Any, *, overlap: bool
) -> None:
    """Check that a worker can exchange by these fragments.

    Raises:
      InvalidTypeError: ``fragments`` are none, or the period is dynamic.
      InvalidArgumentError: they do not go with the rule, the period or overlap.
    """
    such_as = "an agn_optax.Fragments, such as Fragments(2)"
    check.instance(fragments, Fragments, f"fragments must be {such_as}")
    if rule is not None:
        fragments.check(rule)
    if fragments.delay and overlap:
        got = f"delay={fragments.delay}, overlap=True"
        combinations.reject("fragments with a delay", "overlap=True", got)
    if isinstance(period, rounds.DynamicPeriod):
        got = f"period={period}"
        combinations.reject("dynamic_period", "fragments", got, errors.InvalidTypeError)
    fragments.check_period(int(rounds.as_schedule(period)(0)))
