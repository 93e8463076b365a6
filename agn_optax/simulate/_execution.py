"""The numbers of a simulation: messages are made, and move a center.

Its owner reports what happens, in the order of the center:

    start       a worker gets the center with which its session begins
    send        a worker sends a message after these local steps, now or certainly later
    norm        the center needs the norm of a message
    settle      the center applies, drops or rejects messages
    adopt       a worker adopts the answer

Between these actions a worker makes local steps. It is known what they are made of
before they are needed. So they are made only when the center needs a message, and
together with those of all other workers that are known by then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.center import Store, Submission, Version
from agn_optax.round import Fragments, parts
from agn_optax.simulate._events import Outcome, SessionEvent
from agn_optax.simulate._recording import Recording
from agn_optax.simulate._rounds import (
    Batches,
    Begin,
    Inputs,
    Kind,
    Made,
    OneByOne,
    Plan,
    Rounds,
)
from agn_optax.simulate._schedule import Schedule
from agn_optax.simulate._traces import Traces

PyTree = Any


class SettledMessage(Protocol):
    """A message that the center has settled; `Schedule` describes the attributes."""

    number: int  # index in the schedule
    worker: int
    fragment: int
    session: int
    sequence: int
    steps: int
    anchor_version: int
    in_background: bool
    staleness: int
    workers: int
    index: int
    weight: float
    outcome: Outcome

    @property
    def claimed_weight(self) -> float | None:
        """The weight that the worker claims for the message."""


class Evaluation(NamedTuple):
    """When the center is evaluated."""

    function: Callable[[PyTree], Any] | None = None  # of its parameters
    every: int = 100  # versions
    target: float | None = None  # value at or below which the execution ends


class _Action(NamedTuple):
    """An action of a worker, after ``at`` local steps of its session."""

    does: str  # "start", "adopt" or "send"
    at: int
    fragment: int = 0
    in_background: bool = False
    sequence: int = 0  # of a message


class _Answer(NamedTuple):
    """An answer that a worker has not adopted yet."""

    begin: Begin
    center: PyTree
    contribution: PyTree  # its message; None if the adoption does not read it


class _Stretch(NamedTuple):
    """A stretch of a worker: the arguments of `Rounds.stretch`."""

    kind: Kind
    sequence: int  # of its message
    inputs: Inputs
    plan: Plan


@dataclasses.dataclass(eq=False)
class _Exchange:
    """The exchanges of a worker, or of one of its fragments."""

    anchor: PyTree  # the center that was adopted last
    begin: Begin = Begin.STARTED  # of the current round
    began: int = 0  # local steps of the session at the begin of the round
    sent: int = 0  # local steps of the session in the last message that was sent
    sequence: int = 0  # of that message
    steps: int = 0  # its local steps
    made: Made | None = None  # the last message that was made, until it is settled
    made_sequence: int = 0
    answer: _Answer | None = None
    loss: Any = 0.0  # sum over the local steps since the last message was made
    losses: int = 0  # number of these local steps


@dataclasses.dataclass(eq=False)
class _Worker:
    """A worker, whose actions wait until they are needed."""

    index: int
    session: int = 0
    first: int = 0  # local steps in settled messages of earlier sessions
    done: int = 0  # local steps made in this session
    settled: int = 0  # those of them in settled messages
    actions: deque[_Action] = dataclasses.field(default_factory=deque)
    exchanges: list[_Exchange] = dataclasses.field(default_factory=list)


class Execution:
    """One execution.

    Args:
      rounds: the rounds of the workers.
      params: the first parameters.
      workers: number of workers.
      fragments: the fragments; None without.
      combines: whether the center applies messages in rounds.
      evaluation: when the center is evaluated.
      exact: whether each worker makes its messages by itself.
      is_uniform: whether all rounds have the same number of local steps.
      width: see `execute`.
      recording: the center that writes all to a journal; None writes nothing.

    Attributes:
      stores: the store of each fragment.
      has_ended: whether the target was reached.
    """

    def __init__(
        self,
        rounds: Rounds,
        params: PyTree,
        workers: int,
        *,
        fragments: Fragments | None = None,
        combines: bool,
        evaluation: Evaluation,
        exact: bool,
        is_uniform: bool,
        width: int | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._rounds, self._combines, self._recording = rounds, combines, recording
        params = trees.copy(params)
        centers = _centers(params, fragments)
        if recording is None:
            self.stores = [Store(rounds.rule, center) for center in centers]
        else:
            self.stores = [recording.store]
        self._workers = [_Worker(i) for i in range(workers)]
        self._ready: dict[int, None] = {}  # workers with actions
        self._makes_all = not exact
        self._maker: OneByOne | Batches = OneByOne(rounds)
        if not exact:
            self._maker = Batches(
                rounds, centers, workers, is_uniform=is_uniform, width=width
            )
        self._evaluation = evaluation
        self._value = evaluation.function
        self._evaluations: list[tuple[int, int, Any]] = []  # row, version and value
        self._losses: dict[int, Any] = {}  # by row, in the order of the center
        self.has_ended = False

    # What workers do.

    def start(self, index: int, session: int) -> None:
        """Give the center to a worker whose session begins."""
        worker, centers = self._workers[index], [s.current for s in self.stores]
        worker.first += worker.settled
        worker.session, worker.done, worker.settled = session, 0, 0
        worker.exchanges = []
        for store, version in zip(self.stores, centers, strict=True):
            version.escaped = True
            worker.exchanges.append(_Exchange(store.tree(version)))
        worker.actions = deque([_Action("start", 0)])
        self._ready[index] = None

    def send(
        self, index: int, fragment: int, sequence: int, steps: int, *, background: bool
    ) -> None:
        """Let a worker send a message, unless that is known already.

        Args:
          index: the worker.
          fragment: the fragment.
          sequence: sequence number of the message.
          steps: its local steps.
          background: whether it is sent in the background.
        """
        worker = self._workers[index]
        exchange = worker.exchanges[fragment]
        if exchange.sequence == sequence:
            assert exchange.steps == steps
            return
        at = exchange.began + steps
        exchange.sequence, exchange.steps, exchange.sent = sequence, steps, at
        if background:
            exchange.began = at
        worker.actions.append(_Action("send", at, fragment, background, sequence))
        self._ready[index] = None

    def adopt(
        self, index: int, fragment: int, steps_since: int, *, late: bool, resets: bool
    ) -> None:
        """Let a worker adopt the answer to its last message.

        Args:
          index: the worker.
          fragment: the fragment.
          steps_since: local steps since the message was sent.
          late: whether it was sent in the background.
          resets: whether the message was rejected.
        """
        worker = self._workers[index]
        exchange = worker.exchanges[fragment]
        at = exchange.sent + steps_since
        if resets or not late:
            exchange.began = at
        worker.actions.append(_Action("adopt", at, fragment, late))

    def note(self, at: int, index: int, session: int, event: SessionEvent) -> None:
        """Take a change of a session, at a time in ns."""
        if self._recording is not None:
            self._recording.note(at, index, session, event)

    # What the center does.

    def norm(self, message: Any) -> float | None:
        """Return the norm of a message that has arrived; None if its session is over.

        The message of an elastic rule depends on the center, which is the newest.
        """
        worker, f = self._workers[message.worker], message.fragment
        if message.session != worker.session:
            return None
        made, store = self._make(worker, f, message.sequence), self.stores[f]
        norm = made.norm
        if norm is None:
            norm, _ = store.measure(
                store.place(made.contribution), store.current.params, samples=False
            )
        return float(norm)

    def settle(self, messages: Sequence[SettledMessage]) -> None:
        """Apply, drop or reject messages of one fragment, all at once.

        Args:
          messages: the messages, with their outcomes.
        """
        store = self.stores[messages[0].fragment]
        before, sent = store.current, []
        applied = [m for m in messages if m.outcome is Outcome.APPLIED]
        for message in messages:
            worker, f = self._workers[message.worker], message.fragment
            made = self._make(worker, f, message.sequence)
            self._losses[message.number] = made.loss
            sent.append(
                Submission(
                    message.sequence,
                    store.place(made.contribution),
                    message.anchor_version,
                    message.steps,
                    message.claimed_weight,
                    {"loss": made.loss},
                )
            )
        if self._recording is not None:
            self._recording.settle(messages, sent)
        elif applied:
            pairs = zip(messages, sent, strict=True)
            store.apply(
                [each for m, each in pairs if m.outcome is Outcome.APPLIED],
                [message.staleness for message in applied],
                [message.weight for message in applied] if self._combines else None,
                applied[0].workers,
                [message.index for message in applied],
            )
        for message in messages:
            self._answer(message, before)
        self._evaluate(applied)

    def _answer(self, message: SettledMessage, before: Version) -> None:
        worker, store = self._workers[message.worker], self.stores[message.fragment]
        exchange = worker.exchanges[message.fragment]
        worker.settled = max(worker.settled, exchange.sent)
        begin = Begin.APPLIED
        if message.outcome is Outcome.DROPPED:
            begin = Begin.DROPPED
        elif message.outcome is Outcome.REJECTED:
            is_second = exchange.begin.resets
            begin = Begin.REJECTED_AGAIN if is_second else Begin.REJECTED
        adopts_before = begin is Begin.APPLIED and self._rounds.rule.adopts == "before"
        version = before if adopts_before else store.current
        version.escaped = True
        made, exchange.made = exchange.made, None
        assert made is not None
        restores = begin is Begin.DROPPED and self._rounds.has_residual
        reads = begin.resets or message.in_background or restores
        contribution = made.contribution if reads else None
        exchange.begin = begin
        exchange.answer = _Answer(begin, store.answer(version), contribution)
        self._ready[worker.index] = None

    def _evaluate(self, applied: Sequence[SettledMessage]) -> None:
        """Evaluate the center if these messages made a version to be evaluated."""
        number = sum(store.current.number for store in self.stores)
        if self._value is None or not applied or number % self._evaluation.every:
            return
        found = self._value(self._params())
        self._evaluations.append((applied[-1].number, number, found))
        target = self._evaluation.target
        self.has_ended = target is not None and float(found) <= target

    def _params(self) -> PyTree:
        return parts.join([store.tree(store.current) for store in self.stores])

    # Messages.

    def _make(self, worker: _Worker, fragment: int, sequence: int) -> Made:
        """Return a message, which is made if it is not."""
        exchange = worker.exchanges[fragment]
        while exchange.made is None or exchange.made_sequence != sequence:
            self._make_stretches([*self._ready] if self._makes_all else [worker.index])
        return exchange.made

    def _make_stretches(self, indices: Sequence[int]) -> None:
        """Make the next stretch of each of these workers, if it is known."""
        by_kind: dict[Kind, list[_Stretch]] = defaultdict(list)
        for index in indices:
            stretch = self._next_stretch(self._workers[index])
            if stretch is None:
                self._ready.pop(index, None)
            else:
                by_kind[stretch.kind].append(stretch)
        assert by_kind, "a message is needed that no worker sends"
        for kind, stretches in by_kind.items():
            made = self._maker.make(
                kind, [each.inputs for each in stretches], [s.plan for s in stretches]
            )
            for stretch, each in zip(stretches, made, strict=True):
                self._keep(stretch, each)

    def _keep(self, stretch: _Stretch, made: Made) -> None:
        """Keep the results of a stretch."""
        kind, plan = stretch.kind, stretch.plan
        exchanges = self._workers[plan.worker].exchanges
        for exchange in exchanges:
            exchange.loss = exchange.loss + made.loss
            exchange.losses += plan.late + plan.steps
        if kind.sends is not None:
            exchange = exchanges[kind.sends]
            mean = exchange.loss / np.float32(max(exchange.losses, 1))
            exchange.made = made._replace(loss=mean)
            exchange.made_sequence = stretch.sequence
            exchange.loss, exchange.losses = 0.0, 0

    def _next_stretch(self, worker: _Worker) -> _Stretch | None:
        """Take the next stretch from a worker's actions; None if it is not known."""
        actions = worker.actions
        if not actions or (len(actions) == 1 and actions[0].does != "send"):
            return None
        first, at, begin = actions[0], worker.done, None
        adopts, is_late = 0, False
        centers: tuple[PyTree, ...] = ()
        contribution = sent_anchor = anchor = None
        if first.does == "start":
            begin, centers = Begin.STARTED, tuple(x.anchor for x in worker.exchanges)
        elif first.does == "adopt":
            adopts, is_late = first.fragment, first.in_background
            exchange, at = worker.exchanges[adopts], first.at
            if exchange.answer is None:
                return None
            begin, center, contribution = exchange.answer
            sent_anchor = exchange.anchor if is_late else None
            exchange.answer, exchange.anchor, centers = None, center, (center,)
        if begin is not None:
            actions.popleft()
        end, sends, in_background, sequence = at, None, False, 0
        if actions and actions[0].does == "send":
            _, end, sends, in_background, sequence = actions.popleft()
        kind = Kind(begin, adopts, is_late, sends, in_background)
        if not self._rounds.holds_anchor:
            sent_anchor = None
            for exchange in worker.exchanges:
                exchange.anchor = None
        elif kind.reads_anchor:
            assert sends is not None
            anchor = worker.exchanges[sends].anchor
        late = at - worker.done
        plan = Plan(worker.index, worker.first + worker.done, late, end - at)
        worker.done = end
        inputs = Inputs(centers, contribution, sent_anchor, anchor)
        return _Stretch(kind, sequence, inputs, plan)

    # Results.

    def traces(self, planned: Schedule, samples: int) -> Traces:
        """Return the traces of a schedule; a batch has ``samples`` samples."""
        rows = np.array([*self._losses], np.int64)
        loss = np.array(jax.device_get([*self._losses.values()]), np.float32)
        states = [store.save() for store in self.stores]
        last, versions, values = (
            zip(*self._evaluations, strict=True) if self._evaluations else ((), (), ())
        )
        steps = np.cumsum(planned.steps[rows]) // len(self.stores)
        moved = np.add(planned.message_bytes, planned.answer_bytes)
        evaluations = np.array(jax.device_get([*values]), np.float64)
        digest = hashlib.blake2b(digest_size=8)
        digest.update(planned.digest.encode())
        for state in states:
            digest.update(f"/{trees.digest(state)}".encode())
        digest.update(loss.tobytes())
        digest.update(evaluations.tobytes())
        return Traces(
            schedule=planned,
            digest=digest.hexdigest(),
            center=states[0] if len(states) == 1 else tuple(states),
            rows=rows,
            seconds=planned.settled[rows] / 1e9,
            steps=steps,
            samples=steps * samples,
            bytes=np.cumsum(moved[planned.fragment[rows]]),
            loss=loss,
            evaluation_seconds=planned.settled[[*last]] / 1e9 if last else np.zeros(0),
            evaluation_versions=np.array(versions, np.int64),
            evaluations=evaluations,
        )


def _centers(params: PyTree, fragments: Fragments | None) -> Sequence[PyTree]:
    """Return the first parameters of each center."""
    return [params] if fragments is None else fragments.divide(params).cut(params)


def check_memory(
    rounds: Rounds, params: PyTree, fragments: Fragments | None, workers: int
) -> None:
    """Raise if there is no memory for the workers of an execution."""
    loop = jax.eval_shape(lambda: rounds.start(_centers(params, fragments)))
    row, size = trees.nbytes(loop), trees.nbytes(params)
    # A row, its anchor, and a message that waits.
    needed = workers * (row + 2 * size)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise errors.InvalidArgumentError(
            f"{workers} workers need {needed / 1e9:.3g} GB, with "
            f"{(row + 2 * size) / 1e6:.3g} MB each, and this machine has "
            f"{memory / 1e9:.3g} GB"
        )
