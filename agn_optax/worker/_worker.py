"""The worker's side of a center, embedded or remote: one class for both.

A worker that exchanges mostly sends a message, waits for the answer, and adopts it.
With `overlap`, or when the center is lost, it does not wait. It goes on with local
steps while the message is in flight, and when the answer is there, it lands: it adopts
the answer, and keeps the progress that it has made since the message left.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, trees
from agn_optax.center import MOST_REPORTED, Center, Session, Snapshot
from agn_optax.round import Fragments, LocalState
from agn_optax.worker._flight import Message, is_settled
from agn_optax.worker._processes import ToldMessage, ToldSession
from agn_optax.worker._programs import AT_ONCE, Left, programs

PyTree = Any
# Part of a call: the loop's parameters and state, and those with which to go on.
Act = Callable[[PyTree, Any], tuple[PyTree, Any]]
# Told of something, with its number and what there is to say of it.
Callback = Callable[[int, Mapping[str, float]], object]
_log = logging.getLogger("agn_optax")


class WorkerState(NamedTuple):
    """All that a worker is, as a pytree to save and to restore from."""

    params: PyTree
    state: LocalState
    anchor: PyTree  # the center as last adopted; None where the rule does not read it
    anchor_version: Any  # int; a tuple of them for a center in shards
    local_steps: Any  # int: since the last exchange
    exchanges: Any  # int
    weight: Any = None  # float: said of the round so far; None if nothing was
    pace: Any = None  # float: as `Worker.pace`


class Worker:
    """One participant: its local phase as an optax transformation, and its exchanges.

    The loop is yours, as with any optax optimizer; `exchange` is called after every
    local step, from Python, and acts when the period is full. It counts on the host, so
    that no local step waits for the device.

    Args:
      center: where the center variable lives: a `LocalCenter`, or anything with its
        protocol.
      inner: the inner optimizer.
      period: local steps between exchanges, a positive int; or a function from the
        exchanges that this worker has made (int) to the length of the round that
        begins; or `dynamic_period`, by which it follows the worker's speed.
      gradients: what is done to a gradient before anything else, such as
        ``optax.clip_by_global_norm(1.0)``: both the inner optimizer and the record,
        which the center gets, see what comes out. In ``inner``, it would change the
        local steps alone. None for nothing.
      name: the worker's name, unique among the workers of the center; None makes one
        up.
      overlap: sends in the background while local steps go on. When the answer comes,
        the worker adopts the center, and keeps the local progress made since the
        message left. One exchange is in flight at most. It takes memory: the buffers of
        the contribution are kept for the next one, and with AGN also those of a copy of
        the parameters, which its contribution does not tell. The first exchange waits
        for its answer, so that a newcomer starts from a center that knows of it.
      patience: local steps that the worker makes while an answer is missing, because
        exchanges overlap or the center is lost. Then it waits. None is one round of
        steps. With 0, `exchange` raises as soon as the center counts as lost.
      give_up: seconds that it waits for a lost center before it raises.
      fragments: parts of the parameters that exchange by turns, for a center in as many
        shards, each of which keeps one. None exchanges all at once. Then one fragment
        is sent at a time; its offset in the period is its own, and so are its version,
        its staleness and its answer. With a ``delay`` it is on its way while local
        steps go on, and is adopted after so many, for which the worker then waits (but
        for its ``patience``, if that is given and longer); with ``mixing`` a share of
        its own parameters stays. State is a `StreamingState`, and `save` gives a
        `StreamingWorkerState`. All workers of that center need the same fragments.
      callbacks: what is told of each exchange once it is over, as
        ``callback(step, values)``: the number of the exchange, and float values by
        their names. ``steps`` were made in the round; the message had this
        ``message_norm`` and ``staleness``, and was ``applied`` or ``refused`` (0 or 1);
        ``distance`` was that of worker and center before it was adopted, and
        ``version`` the center's; ``codec_error`` is what the codec changed of the
        contribution as a share of its norm, ``seconds`` is the time from sending to
        the answer, and ``bytes_sent`` and ``bytes_received`` are those of the arrays;
        and whatever was reported (`report`). They cost a pass over the parameters an
        exchange, and wait for the device. One that raises is logged: the exchange has
        been made. `agn_optax.sinks` has some.

    Attributes:
      tx: the local phase, inner step and record: ``tx.update(grads, state, params)``.
        Pure; jit it.
      name: the worker's name.
      fragments: as given.
      exchanges: exchanges made.
      staleness: of the last message sent; None before the first. If the rule adopts the
        center as it was before a message, the worker's own previous message counts too.
      norm: of the last message sent, as a scalar; None before the first.
      dropped: messages that the center did not apply (too stale, or too late).
      refused: messages that the center did not want; `agn_optax.center.Refuse` has
        which. The worker then forgets what it has done since its last exchange, local
        steps of now included, adopts the center whole, and goes on; if its inner
        optimizer's state is not finite, that begins anew.
      refusal: why the last message was refused; "" if it was not.
      version: of the center that it adopted last; None before the start.
      pace: this worker's speed as a share of the fastest worker's, as the center has
        measured it last; None before it has.

    Raises:
      InvalidArgumentError: ``period`` is not a positive whole number, or ``patience``
        or ``give_up`` is negative; or the center is not in as many shards as there are
        ``fragments``, or these are not for this rule, or eager, or have a delay beside
        ``overlap``.
      InvalidTypeError: ``inner`` or ``gradients`` is not an optimizer, or ``center``
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
    _landing = AT_ONCE

    def __new__(cls, *args: Any, **settings: Any) -> Worker:
        """One for each fragment, where there are any."""
        if cls is Worker and settings.get("fragments") is not None:
            # Which is made of workers.
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
        self._programs = programs(center.rule, inner, gradients, self._landing)
        self.center = center
        self.tx: optax.GradientTransformationExtraArgs = self._programs.tx
        self.name = name or f"worker-{uuid.uuid4().hex[:8]}"
        self.exchanges = 0
        self.dropped = 0
        self.refused = 0
        self.refusal = ""
        self.staleness: int | None = None
        self.norm: Any = None
        self.overlap = overlap
        self._patience = patience
        self._give_up = give_up
        self.pace: float | None = None
        self._length = self._lengths(period)
        self._follows = isinstance(period, rounds.DynamicPeriod)  # its own speed
        self._session: Session | None = None
        self._sent = 0  # exchanges of this session that are over
        self._anchor: Snapshot | None = None
        self._knows_anchor = True  # whether it is of this life of the center
        self._callbacks = _callbacks(callbacks)
        self._reported: dict[str, Any] = {}
        self._paced = False  # whether a miscount was said
        # Local steps of a message, as the device has counted them, and as `exchange`
        # was told: until the device has made the number.
        self._steps: tuple[Any, int] | None = None
        self._empty = 0  # messages in a row without local steps of `tx`
        self._message: Message | None = None  # whose answer has not been adopted
        # Buffers of a message that is over, and of the parameters it was made of: the
        # next one that departs is written over them.
        self._spare: tuple[PyTree, PyTree] | None = None
        self._like: tuple[PyTree, LocalState]  # params and state, abstract
        self._local_steps = 0
        self._weight: float | None = None  # said of the round
        # Parameters and state of a call that raised after it had donated those that
        # it was given: what the next call goes on from.
        self._kept: tuple[PyTree, Any] | None = None
        # The method whose call that was: what it was told is counted, and its
        # repetition counts nothing, also if `land` is called in between.
        self._counted: str | None = None

    def __repr__(self) -> str:
        """Its name and rule, and how far it is."""
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
        """Adopts the center and begins the first round.

        Every worker may run the same line, ``worker.start(params, chief=rank == 0)``:
        the chief's parameters initialize the center, the others wait for it and adopt
        it.

        Args:
          params: this worker's own parameters. Only the chief's values count; the
            others' give the dtypes and devices in which they adopt the center. None
            takes those of the center.
          chief: True initializes the center with ``params``, unless this worker has
            done so in an earlier life; False waits until a chief has; None expects an
            initialized center.
          timeout: seconds to wait at most, for a chief or for the other workers of a
            barrier; None waits for good.

        Returns:
          Parameters and state of the local phase: fresh arrays, to be donated if you
          like.

        Raises:
          NotInitializedError: the center has no parameters (in time).
          AlreadyInitializedError: ``chief=True``, but another worker was the chief.
          MissingArgumentError: ``chief=True`` without ``params``.
          TreeMismatchError: ``params`` does not belong to this center.
          NameTakenError: another worker has this one's name.
          CenterFullError: the center has no room for one more.
          InvalidArgumentError: the inner optimizer exchanges with a center itself.
        """
        self._length(self.exchanges)  # or it raises before anything changes
        if chief and params is None:
            raise errors.MissingArgumentError(
                f"worker {self.name!r} starts as chief and so must give parameters: "
                "start(params, chief=True), got params=None"
            )
        if chief:
            check.float_leaves(params, "params")
            # What it raises, it is to raise before others are let in.
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
    def version(self) -> Any:
        """Of the center that this worker adopted last; None before the start."""
        return None if self._anchor is None else self._anchor.version

    @property
    def life(self) -> Any:
        """What `restore` takes to go on with this life of the worker; None before one.

        It names the life, and says which of its exchanges are over. JSON can write it.
        """
        return None if self._session is None else [self._session.life, self._sent]

    def fills_round(self, steps: int) -> bool:
        """Whether the round is full with so many local steps more."""
        length = self._length(self.exchanges + self._in_flight)
        return self._local_steps + steps >= length

    @property
    def due(self) -> bool:
        """Whether `exchange`, at its next call, acts (or may, if one is in flight).

        For loops whose arrays must be brought together first, such as those of
        `Towers`: on the other steps `exchange` returns whatever it is given.
        """
        if self._kept is not None:
            return True
        lands = self._in_flight and self._local_steps + 1 >= self._landing.delay
        return lands or self.fills_round(1)

    def exchange(
        self,
        params: PyTree,
        state: LocalState,
        *,
        steps: int = 1,
        weight: float | None = None,
    ) -> tuple[PyTree, LocalState]:
        """To be called after every local step: exchanges when the period is full.

        It is called from Python: a compiled function would count its steps once, as it
        is traced. On the other steps it returns what it was given, at the cost of a few
        comparisons.
        An exchange donates ``params`` and ``state``: go on with what is returned. If it
        raises, nothing has changed: ``steps`` and ``weight`` are not counted, so the
        same call again tries again. If the center was unreachable, that sends the same
        message again, and local steps that were made after the first attempt are lost
        when the answer is adopted. If an answer had been adopted before the error, the
        arrays are donated but not lost: the same call again, or `land` before it, goes
        on from there.

        Args:
          params: the parameters after the local step.
          state: the state after the local step.
          steps: local steps since the last call that returned, if a compiled function
            makes several (`jax.lax.scan`). The round ends at the first call with which
            it is full.
          weight: what these local steps count, such as their tokens or samples, a
            positive number of Python's or NumPy's. The message says the sum of its
            round, for center optimizers that ask for it, and where messages of a round
            become their mean. None says nothing; a round of which nothing is said
            counts 1.

        Returns:
          Parameters and state with which to go on.

        Raises:
          InvalidTypeError: it was called inside `jax.jit`, `jax.lax.scan` or the like.
          InvalidArgumentError: ``steps`` is not a positive whole number, or ``weight``
            not positive and finite.
          ProtocolError: the center is of a release that takes no weights.
          WorkerStateError: the worker was not started, or parameters or state have been
            donated to something else; or the center has been started anew, or has given
            this worker's name to another one.
          MessageRefusedError: the center has refused too many messages in a row (10,
            unless it was told otherwise).
          CenterUnreachableError: the center is lost, and ``patience`` 0 or ``give_up``
            over.
          TreeMismatchError: parameters or state are not those of this worker.
        """
        self._require_start()
        self._check_called_from_python(state)
        check.whole_number(steps, "steps", least=1, optional=False)
        weight = check.weight(weight)
        count = functools.partial(self._count, steps, weight)
        return self._call(params, state, self._exchanging(), "exchange", count)

    def _call(
        self,
        params: PyTree,
        state: Any,
        acts: Iterable[Act],
        method: str,
        count: Callable[[], None] | None = None,
    ) -> tuple[PyTree, Any]:
        """Count what a call of the loop is told, and make its acts in their order.

        A call that raises can be made again with the same. Nothing is counted twice;
        and where an act before the one that raised has donated the loop's arrays, what
        it returned is kept, and the next call goes on from there.

        Args:
          params: the loop's.
          state: the loop's.
          acts: what is done, one after the other.
          method: that was called.
          count: counts what it was told; None if it is told nothing.
        """
        (kept, self._kept), counted = (self._kept, None), self._counted
        before = self._counts
        try:
            if kept is not None:
                params, state = kept
            if count is not None:
                if counted != method:
                    count()
                self._counted = None
            for act in acts:
                loop = act(params, state)
                if loop[0] is not params or loop[1] is not state:
                    kept = params, state = loop
        except BaseException:
            self._kept = kept
            if kept is None:
                self._counts, self._counted = before, counted
            elif count is not None:
                self._counted = method
            raise
        return params, state

    @property
    def _counts(self) -> Any:
        """The local steps of the round so far, and what was said that they count."""
        return self._local_steps, self._weight

    @_counts.setter
    def _counts(self, counts: Any) -> None:
        self._local_steps, self._weight = counts

    def _count(self, steps: int, weight: float | None = None) -> None:
        """So many local steps more have been made, which count so much."""
        self._require_start()
        self._length(self.exchanges + self._in_flight)  # or it raises before
        self._local_steps += steps
        if weight is not None:
            self._weight = (self._weight or 0.0) + weight

    def _ask_if_acting(self) -> bool:
        """Return whether there is something to do after the local steps made so far.

        A worker of several processes communicates: all of them must ask at once.
        """
        message = self._message
        if message is None or self.is_stuck:
            return self.fills_round(0)
        length = self._length(self.exchanges + 1)
        delay = min(self._landing.delay, length)  # of a round that is shorter
        patience = delay or length
        if self._patience is not None:
            patience = max(self._patience, delay, 1)
        made = self._local_steps
        return made >= patience or (made >= delay and message.ask_if_answered())

    @property
    def is_stuck(self) -> bool:
        """Whether it has a message that did not come through, to be sent again."""
        return self._message is not None and self._message.flight is None

    @property
    def _departs(self) -> bool:
        """Whether its next message leaves, and local steps go on meanwhile."""
        if self._message is not None:
            return False
        return bool(self._landing.delay or (self.overlap and self.exchanges))

    def _exchanging(self) -> Iterator[Act]:
        """Yield the acts of `exchange`, if it acts at all."""
        if self._ask_if_acting():
            yield from self._ending()

    def _ending(self) -> Iterator[Act]:
        """Lands, and ends the round if it is full."""
        length = self._length(self.exchanges + self._in_flight)
        yield self._land_flying
        if self._local_steps >= length:
            self._length(self.exchanges + 1)  # or the next round cannot begin
            yield self._exchange

    def _flushing(self) -> Iterator[Act]:
        """Yield the acts of `flush`: land, send the round as it is, and land."""
        yield self._land_flying
        if self._local_steps or self.is_stuck:
            # Whatever the schedule says of the next round, these steps are sent.
            yield self._exchange
        yield self._land_flying

    def _finishing(self) -> Iterator[Act]:
        """Lands, or repeats a message that has not come through."""
        yield self._land_flying
        if self.is_stuck:
            yield self._exchange
        yield self._land_flying

    def report(self, **numbers: Any) -> None:
        """Numbers of this worker's own, such as its loss, for whoever watches.

        They travel with its next exchange, and later ones, until they are reported
        anew; a served center shows them in ``agn-optax watch`` and on its page.

        Args:
          numbers: real scalars by their names. An array is waited for when it is sent,
            and not here.

        Raises:
          InvalidTypeError: one of them is no real scalar.
          InvalidArgumentError: there are more than 64 by now, or a name has more than
            64 characters.

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
        """Exchanges now, however few local steps the round has had; not if it had none.

        For a worker that is about to leave, or to be preempted. The message says how
        many steps were really made. Waits for the answers of this exchange and of one
        that is in flight.

        Args, returns and raises as `exchange`; but ``steps`` are all local steps that
        the round has had, if not those that `exchange` was told of, and ``weight`` is
        what all of them count.
        """
        self._require_start()
        self._check_called_from_python(state)
        weight = self.check_flush(steps, weight)

        def count() -> None:
            self._local_steps = self._local_steps if steps is None else steps
            self._weight = self._weight if weight is None else weight

        return self._call(params, state, self._flushing(), "flush", count)

    def check_flush(self, steps: int | None, weight: float | None) -> float | None:
        """The weight, as Python's own, if `flush` can be told both of these."""
        check.whole_number(steps, "steps", least=0)
        return check.weight(weight)

    def land(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Waits for the answer of an exchange that is in flight, and adopts it.

        For who must know where it stands, to `save` it say. Nothing is sent; if nothing
        is in flight, nothing happens at all.

        Args, returns and raises as `exchange`.
        """
        return self._call(params, state, [self._land_flying], "land")

    def _land_flying(
        self, params: PyTree, state: LocalState
    ) -> tuple[PyTree, LocalState]:
        """Waits for the answer of an exchange that is in flight, if one is."""
        return self._land(params, state) if self._in_flight else (params, state)

    def leave(self) -> None:
        """Leaves the center, which then no longer waits for this worker.

        What was not exchanged is lost: call `flush` before, if it matters. A ``with
        worker:`` block calls this at its end, also when Ctrl-C ends it.
        """
        self._anchor = self._spare = self._kept = self._counted = None
        session, self._session = self._session, None
        message, self._message = self._message, None
        if message is not None:
            message.abandoned.set()  # nobody waits for its answer any more
        if session is not None:
            session.leave()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def save(self, params: PyTree, state: LocalState) -> WorkerState:
        """Everything that this worker is, for a checkpoint.

        The arrays are those given, not copies: write them before you donate them.

        Args:
          params: the parameters as they are.
          state: the state as it is.

        Returns:
          A pytree; with the center's own ``save``, made while no worker exchanges,
          training goes on as if it had never stopped.

        Raises:
          WorkerStateError: the worker was not started, or has an exchange in flight.
        """
        anchor, _ = self._require_start()
        self._check_called_from_python(state)
        if self._message is not None:  # the center may have applied it
            raise errors.WorkerStateError(
                f"worker {self.name!r} has an exchange that has not ended, which "
                "cannot be saved: land() or flush() before"
            )
        params, state = self._kept or (params, state)
        return WorkerState(
            params,
            state,
            anchor.params,
            anchor.version,
            self._local_steps,
            self.exchanges,
            self._weight,
            self.pace,
        )

    def restore(
        self, saved: WorkerState, *, life: Any = None
    ) -> tuple[PyTree, LocalState]:
        """Goes on where `save` was called, instead of `start`.

        Args:
          saved: what `save` returned, or its arrays read back from a checkpoint;
            copied.
          life: of the worker that was saved, as its `life` was: this one goes on with
            it, at a center that has outlived it. Its next exchange, if the center has
            applied that before, is answered and not applied again. None begins another
            life, at a center that was saved with the worker.

        Returns:
          Parameters and state with which to go on.

        Raises:
          TreeMismatchError: what was saved does not belong to this worker or center.
          WorkerStateError: the center is older than what was saved, or knows nothing of
            that life.
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
        self._length(exchanges)  # or it raises before anything changes
        params, state, anchor = trees.copy((saved.params, saved.state, saved.anchor))
        self.leave()
        its, sent = (None, 0) if life is None else life
        session = self.center.join(self.name, params, life=its)
        self.exchanges = exchanges
        self._begin(session, (params, state), Snapshot(anchor, seen))
        self._knows_anchor = life is not None  # as the center has had it
        self._sent = sent
        self._local_steps = int(saved.local_steps)
        self._weight = None if saved.weight is None else float(saved.weight)
        self.pace = None if saved.pace is None else float(saved.pace)
        return params, state

    def _exchange(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Ends a round."""
        self._check_loop(params, state)
        message = self._message
        if self._departs:
            return self._depart(params, state)
        if message is None:
            message = self._message = self._made_message(params, state)
        if message.answer is None:
            try:
                message.answer = message.exchange()
            except errors.CenterUnreachableError as error:
                if self._patience == 0 or isinstance(error, errors.CenterClosedError):
                    raise
                state = state._replace(codec_state=message.codec_state)
                left, state = self._programs.stay(params, state)
                self._take_off(message, left)
                return params, state
            except Exception as error:
                if is_settled(error):
                    self._message = None  # it was refused, and is not to be sent again
                raise
        answer = self._taken(message, message.answer, params)
        state = state._replace(codec_state=message.codec_state)
        if answer.refused:
            return self._give_in(params, state, message, answer)
        state = self._taken_back(state, message, answer)
        params, state = self._programs.adopt(params, state, answer.params)
        self._adopted(answer)
        self._local_steps, self._weight = 0, None
        return params, state

    def _send_ahead(
        self, params: PyTree, state: LocalState
    ) -> tuple[PyTree, LocalState]:
        """Ends a round as `_exchange` does, but for the answer, which that waits for.

        Nothing is done if there is nothing to send, or a message is in flight.
        """
        if self._in_flight or not (self._local_steps or self.is_stuck):
            return params, state
        if self._departs:
            return self._exchange(params, state)
        self._check_loop(params, state)
        if self._message is None:
            self._message = self._made_message(params, state)
        self._message.send_ahead()
        return params, state

    def _made_message(self, params: PyTree, state: LocalState) -> Message:
        """Make the message of a round, to be sent while nobody makes local steps."""
        anchor, _ = self._require_start()
        measured = self._measured(params, state)
        contribution, codec_state, made = self._programs.contribute(
            state, params, anchor.params
        )
        return self._new_message(contribution, made, measured, codec_state)

    def _give_in(
        self, params: PyTree, state: LocalState, message: Message, answer: Snapshot
    ) -> tuple[PyTree, LocalState]:
        """The center in place of all that this worker has; its message was refused.

        What the message had is sent later, if the codec does that. But once only: what
        is refused again, such as for its size, would be refused for good.
        """
        _log.warning(
            "a message of worker %r was refused, which goes on from the center: %s",
            self.name,
            answer.refused,
        )
        becomes = "forgotten" if self.refusal else "owed"
        if answer.in_part:
            becomes = "lost"
        params, state = self._programs.give_in(
            params, state, message.contribution, answer.params, becomes=becomes
        )
        self._adopted(answer)
        self._local_steps, self._weight = 0, None
        return params, state

    def _taken_back(
        self, state: LocalState, message: Message, answer: Snapshot
    ) -> LocalState:
        """With what a dropped message had, if the codec sends that later.

        Nothing may be applied twice, and of one in parts some may have been.
        """
        is_whole = answer.applied or answer.in_part
        if is_whole or self._programs.take_back is None:
            return state
        return self._programs.take_back(state, message.contribution)

    def _new_message(
        self,
        contribution: PyTree,
        made: jax.Array,
        measured: dict[str, Any],
        codec_state: PyTree = None,
    ) -> Message:
        anchor, session = self._require_start()
        if self._steps is None:
            self._steps = made, self._local_steps
        arguments = (self._sent + 1, contribution)
        more = {
            "anchor_version": anchor.version,
            "steps": self._local_steps,
            "weight": self._weight,
            "reported": dict(self._reported),
        }
        if self._programs.follows and self._knows_anchor:
            more["anchor"] = anchor.params
        kept = (contribution, measured, codec_state)
        if isinstance(session, ToldSession):
            send = functools.partial(session.exchange_alone, *arguments, **more)
            return ToldMessage(send, *kept, session=session)
        return Message(functools.partial(session.exchange, *arguments, **more), *kept)

    @property
    def _in_flight(self) -> bool:
        return self._message is not None and self._message.flight is not None

    def _depart(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Contributes, and goes on with local steps while that is on its way."""
        anchor, _ = self._require_start()
        spare, self._spare = self._spare, None
        if spare is None:
            contribution, *_ = self._programs.contribute(state, params, anchor.params)
            kept = params if self._programs.keeps_left else None
            spare = trees.copy((contribution, kept))
        measured = self._measured(params, state)
        contribution, left, state = self._programs.depart(
            spare, params, state, anchor.params
        )
        for leaf in jax.tree.leaves(contribution):
            leaf.copy_to_host_async()
        self._take_off(self._new_message(contribution, left.steps, measured), left)
        return params, state

    def _take_off(self, message: Message, left: Left) -> None:
        """A round begins while a message is in flight."""
        message.left, self._message = left, message
        self._local_steps, self._weight = 0, None
        message.take_off(self._give_up)

    def _land(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Waits for the answer, and adopts it with the progress made since."""
        message = self._message
        assert message is not None
        assert message.left is not None
        self._check_loop(params, state)
        anchor, _ = self._require_start()
        try:
            answer = message.land()
        except Exception as error:
            if is_settled(error):
                self._message = None  # it is lost, and local steps may go on
            else:
                message.take_off(self._give_up)
            raise
        answer, left = self._taken(message, answer, params), message.left
        if answer.refused:
            params, state = self._give_in(params, state, message, answer)
        else:
            state = self._taken_back(state, message, answer)
            params, state = self._programs.land(
                params, state, message.contribution, left, anchor.params, answer.params
            )
            self._adopted(answer)
        if self.overlap or self._landing.delay:
            self._spare = message.contribution, left.params
        return params, state

    def _check_steps(self) -> None:
        """Warn where the local steps of a message are not those that were told.

        Of steps that an optimizer of the caller's own has made, the record has nothing,
        and the center gets nothing. That is no error: loss scaling may skip all steps
        of a round, or of some.
        """
        # A number that the device has yet to make is looked at after a later exchange.
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
        elif 0 < 2 * made <= told:  # fewer where steps are skipped, but not half
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
        """What callbacks want to know of a message before it is made."""
        if not self._callbacks:
            return {}
        anchor, _ = self._require_start()
        measured: dict[str, Any] = {"steps": self._local_steps, **self._reported}
        if not self.center.rule.codec.is_identity:
            measured["codec_error"] = self._programs.codec_error(
                state, params, anchor.params
            )
        return measured

    def _taken(self, message: Message, answer: Snapshot, params: PyTree) -> Snapshot:
        """An answer where the parameters are that it is to be adopted by."""
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

    def _tell(self, message: Message, answer: Snapshot) -> None:
        """Callbacks, of an exchange that is over."""
        said = {
            **message.measured,
            "staleness": answer.staleness,
            "message_norm": answer.norm,
            "applied": answer.applied,
            "refused": bool(answer.refused),
            "version": max(jax.tree.leaves(answer.version)),
            "bytes_sent": trees.nbytes(message.contribution),
        }
        values = {k: float(v) for k, v in said.items() if v is not None}
        for callback in self._callbacks:
            try:
                callback(self.exchanges, values)
            except Exception:  # the center has moved, and the loop needs its arrays
                _log.exception("%r failed; training goes on", callback)

    def _adopted(self, answer: Snapshot) -> None:
        """An exchange is over."""
        message = self._message
        self._check_steps()
        self._sent += 1
        self.exchanges += 1
        self.dropped += not (answer.applied or answer.refused)
        self.refused += bool(answer.refused)
        self.refusal = answer.refused
        self.staleness = answer.staleness
        self.norm = answer.norm
        self._set_pace(answer.pace)
        self._message = None
        self._knows_anchor = True
        if message is not None and self._callbacks:
            self._tell(message, answer)
        self._keep_anchor(answer)

    def _set_pace(self, pace: float | None) -> None:
        if pace is not None:
            self.pace = pace
        elif self._follows and self._sent == 2:  # by then a center knows
            _log.warning(
                "%r says nothing of how fast worker %r is, as a center of an earlier "
                "release: its rounds stay at %d local steps",
                self.center,
                self.name,
                self._length(self.exchanges),
            )

    def _lengths(self, period: Any) -> Callable[[int], int]:
        """Local steps of the round after so many exchanges."""
        if isinstance(period, rounds.DynamicPeriod):
            return lambda exchanges: period(self.pace)
        return _scheduled(period)

    def _begin(self, session: Session, loop: PyTree, anchor: Snapshot) -> None:
        self._session, self._sent = session, 0
        self._local_steps, self._weight = 0, None
        self._knows_anchor = True
        self._steps, self._empty = None, 0
        self._like = jax.eval_shape(lambda: loop)
        self._keep_anchor(anchor)

    def _keep_anchor(self, anchor: Snapshot) -> None:
        # Where nobody reads its arrays they are let go, so that the center can write
        # over them.
        holds = self._programs.holds_anchor
        self._anchor = anchor if holds else anchor._replace(params=None)

    def _check_loop(self, params: PyTree, state: LocalState) -> None:
        """Everything that can be wrong with the loop's arrays, before any is sent."""
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
        if anchor.params is not None:  # as after `start`, when towers took the loop
            self._anchor = _placed(anchor, params)

    def _check_called_from_python(self, tree: PyTree) -> None:
        """What is traced is counted once, however often the program is called."""
        # Of a state one leaf tells of all, as each local step makes it anew.
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
    """Local steps of the round after so many exchanges; each is asked for once."""
    schedule = rounds.as_schedule(period)

    @functools.lru_cache(maxsize=2)  # this round and the next
    def length(exchanges: int) -> int:
        return int(check.positive_int(schedule(exchanges), f"period({exchanges})"))

    return length


def _placed(snapshot: Snapshot, like: PyTree) -> Snapshot:
    return snapshot._replace(params=trees.place_like(snapshot.params, like))
