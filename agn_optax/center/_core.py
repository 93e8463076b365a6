"""The core of every center: a ledger, a store and a keeper under one lock.

    Ledger      decides: registered workers, next message, waiting workers
    Store       computes: one version of the center after another
    Keeper      saves: the state on disk, if there is a durability

The embedded center and the service are clients of a `Core`, and decide nothing
themselves. The lock is held while programs are dispatched to the device, and not while
they run.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import Notice, Notices, check, trees
from agn_optax.center._inspector import LOOK_INTERVAL, Inspector
from agn_optax.center._ledger import Batch, Member, Stage
from agn_optax.center._links import Links
from agn_optax.center._protocol import Session
from agn_optax.center._runtime import Runtime
from agn_optax.center._settings import CenterSettings, check_combine
from agn_optax.center._store import CenterState, Store, Version, log_version
from agn_optax.center._submission import Answer, Snapshot, Submission
from agn_optax.center.durability import Arrival, Image, Keeper, event_of
from agn_optax.rules import instead_one_by_one

PyTree = Any
_log = logging.getLogger("agn_optax")

# s, interval at which a waiting worker checks whether the disk has failed
_FAILURE_CHECK_INTERVAL = 1.0
_MAX_REASON = 300  # recorded characters of the reason why a worker could not join


@dataclasses.dataclass
class KeptAnswer:
    """An answer, kept until its worker has received it."""

    answer: Answer  # without its parameters, which are those of the version
    version: Version  # the version that the worker adopts
    recorded: int = 0  # number of records that must be on disk before it is sent
    read: Any = None  # arrays that are ready once the contribution has been read


@dataclasses.dataclass
class _WaitingMessage:
    """A submission that waits to be applied."""

    submission: Submission  # with its contribution as the store takes it
    norm: Any
    sample: Any  # see `Store.measure`
    reported: dict[str, float]  # empty without a durability
    # One condition per message: a shared one would wake up all workers every time.
    done: threading.Condition  # notified when the message no longer waits

    def read_until(self, version: Version) -> Any:
        """Return arrays that are ready once the contribution has been read.

        Programs read NumPy arrays in place; afterwards, the owner of an array may write
        to it. The returned arrays are results of the programs that read them, and that
        made ``version``. None if no array is a NumPy array.
        """
        leaves = jax.tree.leaves(self.submission.contribution)
        if any(isinstance(leaf, np.ndarray) for leaf in leaves):
            return version.params, self.norm
        return None


class Core:
    """The implementation of a center, for `LocalCenter` and for servers.

    Exceptions are those of `LocalCenter`, and ``flatten`` is that of `Store`.

    Attributes:
      rule: the rule.
      center_id: the center id. A center that continues from disk keeps its id, unless
        updates were lost.
      ledger: the ledger; read it only under `atomically`.
      keeper: saves the center on disk; None without a durability.
      notices: what goes wrong now.
      links: the rates of workers over a network; only a server knows them.
      clock: returns the time of this center, s.
    """

    def __init__(
        self,
        settings: CenterSettings,
        *,
        flatten: bool = False,
        runtime: Runtime = Runtime(),  # noqa: B008 it is immutable
    ) -> None:
        self._runtime, self.clock = runtime, runtime.clock
        rule = self.rule = settings.rule
        self.center_id = uuid.uuid4().hex
        self.ledger = settings.make_ledger()
        check_combine(rule, self.ledger.mode)
        self.notices = Notices(settings.thresholds)
        # Workers of an elastic rule spread around the center: their messages differ.
        compares = self.notices.is_on("apart") and rule.adopts == "after"
        self._inspector = Inspector(self.notices, compares=compares)
        self.links = Links(self.notices)
        self._next_look = 0.0  # time, s
        self._measure_one_by_one(workers=0)
        self._dtype = check.float_dtype(settings.dtype, "dtype")
        self._device = settings.find_device()
        self._flatten = flatten
        self._lock = threading.RLock()
        self._changed = runtime.condition(self._lock)
        self._store: Store | None = None
        self._messages: dict[str, _WaitingMessage] = {}  # of the waiting workers
        self._answers: dict[str, KeptAnswer] = {}  # not yet acknowledged, by worker
        self._failures: dict[str, tuple[int, Exception]] = {}  # sequence and error
        self._connection_closers: dict[str, Callable[[], None]] = {}  # by worker
        self._closed = ""
        self._is_end_logged = False
        self._logging: Future[None] | None = None  # the first line about a version
        # Name of the worker that initialized the center; "" if the center was created
        # with its parameters. None if any worker may call `initialize`.
        self._chief: str | None = None
        self.keeper: Keeper | None = None
        if settings.durability is not None:
            self.keeper = Keeper(settings.durability, rule, self._changed, runtime)
        params = settings.params
        try:
            if self.keeper is not None:
                store = self.keeper.restore(
                    self.ledger, params, self._dtype, self._device, flatten
                )
                self.center_id = self.keeper.center_id
                if store is not None:
                    self.ledger.take_ended()  # recorded by an earlier process
                    with self._changed:
                        self._set_store(store, self.keeper.chief)
            if params is not None and self._store is None:
                self.initialize(params, worker="")
        except BaseException:
            self.close("this center could not be created")
            raise

    # State.

    @property
    def is_initialized(self) -> bool:
        """True if the center has parameters."""
        return self._store is not None

    @property
    def store(self) -> Store:
        """The store.

        Raises:
          NotInitializedError: the center has no parameters yet.
        """
        if self._store is None:
            raise errors.NotInitializedError(
                "this center has no parameters yet: start one worker with "
                "start(params, chief=True), or give the center its parameters"
            )
        return self._store

    @property
    def failure(self) -> str:
        """The error after which nothing is written to disk any more; "" without one."""
        return "" if self.keeper is None else self.keeper.failure

    @property
    def witness(self) -> str:
        """The newest record on disk, for workers: see `Answer.witness`."""
        with self._changed:
            return "" if self.keeper is None else self.keeper.witness

    def atomically(self) -> threading.Condition:
        """Return the condition around the lock, notified after every change."""
        return self._changed

    def members(self) -> tuple[int | None, dict[str, Member], set[str]]:
        """Return the version (None: not initialized), members and waiting workers."""
        self.look()
        with self._changed:
            self._apply_due()
            version = None if self._store is None else self._store.current.number
            members = {
                name: dataclasses.replace(member, recent=member.recent.copy())
                for name, member in self.ledger.registered().items()
            }
            return version, members, set(self.ledger.pending)

    @contextmanager
    def reading(
        self, version: Version | None = None, *, kept: bool = False
    ) -> Iterator[Version]:
        """Hold a version, whose arrays do not change within the context.

        Args:
          version: version of an answer; None for the current one.
          kept: wait until the version is on disk, if exchanges are written there. Pass
            this if a copy of the version may outlive this process.

        Raises:
          WorkerStateError: the answer was released, because its worker has continued or
            has joined again; the version's arrays may have been reused.
        """
        with self._changed:
            version = self._readable(version)
            version.readers += 1
            recorded = self._recorded()
        try:
            if kept:
                self._wait_until_kept(recorded)
            yield version
        finally:
            with self._changed:
                version.readers -= 1

    def snapshot(self, version: Version | None = None) -> Snapshot:
        """Return a version that can be read without a time limit.

        Args:
          version: version of the answer to an exchange; None for the current one.
        """
        with self._changed:
            store = self.store
            read = store.tree if version is None else store.answer
            version = self._readable(version)
            version.escaped = True
        # The arrays no longer change, so that the lock is not needed to wait for them.
        return Snapshot(read(version), version.number)

    def _readable(self, version: Version | None) -> Version:
        """Return a version, or the current one for None; raise if it was released."""
        current = self.store.current
        version = version or current
        if version is not current and not (version.readers or version.escaped):
            raise errors.WorkerStateError(
                f"the answer of version {version.number} was released, because its "
                "worker has continued or has joined again"
            )
        return version

    def save(self) -> CenterState:
        """Return a consistent copy of the center's complete state, for a checkpoint."""
        with self._changed:
            store, copied = self.store, self.store.copy()
        state = store.unpacked(copied)
        log_version("the center is copied for a checkpoint", lambda: state)
        return state

    # Start and end.

    def initialize(self, params: PyTree, *, worker: str) -> int:
        """Set the center's first parameters: see `Center.initialize`.

        The version whose number is returned has no readers yet, so the first exchange
        may reuse its arrays.
        """
        check.float_leaves(params, "params")
        with self._changed:
            if self._store is not None and self._chief not in (None, worker):
                how = "was created with its parameters"
                if self._chief:
                    how = f"worker {self._chief!r} has initialized"
                raise errors.AlreadyInitializedError(
                    f"worker {worker!r} cannot initialize a center that {how}; start "
                    "the worker with chief=False, and it adopts the center"
                )
            if self._store is None:
                store = Store(
                    self.rule, params, self._dtype, self._device, flatten=self._flatten
                )
                self._set_store(store, worker)
                self.ledger.begin(self.clock())
            self._chief = worker
            return self.store.current.number

    def restore(self, saved: CenterState) -> None:
        """Continue from a state that `save` returned: see `LocalCenter.restore`."""
        with self._changed:
            store = Store.restore(self.rule, saved, self._device, flatten=self._flatten)
            self._set_store(store, None)

    def wait_until_initialized(self, timeout: float | None) -> bool:
        """Return whether the center has parameters, now or within ``timeout`` seconds.

        Raises:
          CenterClosedError: the center has ended without parameters.
        """
        return self._wait_while_open(lambda: self.is_initialized, timeout)

    def close(self, reason: str = "this center has been closed") -> None:
        """Take no more exchanges: see `LocalCenter.close`."""
        with self._changed:
            self._closed = self._closed or reason
            for message in self._messages.values():
                message.done.notify_all()
            self._changed.notify_all()
        if self.keeper is not None:
            self.keeper.close()

    def log_end(self) -> None:
        """Log the last version of a closed center, and what its workers have made."""
        with self._changed:
            if self._store is None or self._is_end_logged:
                return
            self._is_end_logged = True
            totals = {name: x.totals for name, x in self.ledger.known().items()}
        if self._logging is not None:
            wait([self._logging])
        for name, total in totals.items():
            _log.info("worker %r: %s", name, total)
        _log.info("all workers: %s", self.ledger.totals)
        log_version("the center ends", self._store.save)

    def wait_until_closed(self, timeout: float | None = None) -> bool:
        """Return whether the center has ended, now or within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ended), timeout)

    # Workers.

    def join(
        self,
        worker: str,
        session_id: str | None = None,
        params: PyTree = None,
        *,
        witnesses: Iterable[str] = (),
        close_connection: Callable[[], None] | None = None,
        **join_arguments: Any,
    ) -> LocalSession:
        """Register a worker without waiting for other workers: see `Ledger.join`.

        Args:
          worker: the worker's name.
          session_id: the session id; None for a new session.
          params: the parameters that the worker will replace with the center's; None
            skips the check.
          witnesses: `Answer.witness` of answers that the worker has seen.
          close_connection: closes the worker's connection. Called once the session has
            ended, or has joined over another connection. Must not block.
          **join_arguments: the other arguments of `Ledger.join`.

        Raises:
          CenterClosedError: the center takes no more exchanges.
          TreeMismatchError: ``params`` does not match the center.
          NameTakenError, CenterFullError, WorkerStateError: see `Ledger.join`.
          OtherHistoryError: this center does not have the record of a witness.
        """
        session_id = session_id or uuid.uuid4().hex
        if self.keeper is not None:
            self.keeper.check_witnesses(witnesses, worker)
        with self._changed:
            self.check_open()
            if params is not None and self._store is not None:
                check.same_tree(params, self._store.like, "params", "center")
            now = self.clock()
            connection = self.ledger.join(worker, session_id, now, **join_arguments)
            if connection == 1:  # a new session does not get an earlier one's error
                self._failures.pop(worker, None)
            self._close_connection(worker)
            if close_connection is not None:
                self._connection_closers[worker] = close_connection
            self._release(worker)
            self._record("join", worker, session=session_id, connection=connection)
            self._apply_due()
        return LocalSession(self, worker, session_id, connection)

    @contextmanager
    def recording_failed_join(self, worker: str) -> Iterator[None]:
        """Record the error that a worker gets within the context, where it joins."""
        try:
            yield
        except errors.AgnOptaxError as error:
            with self._changed:
                if self.keeper is not None and self.keeper.may_record_failed_join():
                    reason = str(error)[:_MAX_REASON]
                    self._record("failed_join", worker=worker, reason=reason)
            raise

    def heartbeat(self, sessions: Iterable[tuple[str, str]]) -> list[str]:
        """Record heartbeats of sessions, and return the workers that are registered."""
        with self._changed:
            now = self.clock()
            registered = [
                worker
                for worker, session_id in sessions
                if self.ledger.heartbeat(worker, session_id, now)
            ]
            self._apply_due()
            return registered

    def leave(self, worker: str, session_id: str) -> None:
        """End a worker's session, even if the call comes over another connection."""
        with self._changed:
            self._release_ended("expired")
            if self.ledger.leave(worker, session_id):
                self._release_ended("leave")
                self._apply_due()

    def wait_for_barrier(self, timeout: float | None) -> bool:
        """Return whether the barrier is reached, now or within ``timeout`` seconds.

        If joins are written to disk, wait until they are, too: a worker that has
        started continues after a restart of the center, and finds an open barrier.

        Raises:
          CenterClosedError: the center has ended before the barrier was reached.
        """
        is_open = self._wait_while_open(lambda: self.ledger.is_open, timeout)
        if is_open:
            self._wait_until_kept(self._recorded())
        return is_open

    # For sessions. Hold the lock to call these, except `_examine`.

    def _examine(self, submission: Submission) -> _WaitingMessage:
        """Place a contribution on the center's device, and measure its message."""
        store = self.store
        contribution = store.check_and_place(submission.contribution)
        reported = (submission.reported or {}) if self.keeper is not None else {}
        reported = {name: float(number) for name, number in reported.items()}
        submission = submission.without_arrays()._replace(contribution=contribution)
        with self.reading() as version:
            norm, sample = store.measure(
                contribution, version.params, samples=not self._inspector.is_full
            )
            if self.ledger.rejections.limits.measures:
                norm = np.float32(trees.on_host(norm))  # waits for the device
        done = self._runtime.condition(self._lock)
        return _WaitingMessage(submission, norm, sample, reported, done)

    def _repeated_answer(self, worker: str, member: Member) -> KeptAnswer:
        """Return an answer to an exchange whose first answer has been released."""
        current = self.store.current
        current.escaped = True  # its reader does not report the end of reading
        answer = self._last_answer(worker, member, current)
        return KeptAnswer(answer, current, self._recorded())

    def _last_answer(self, worker: str, member: Member, version: Version) -> Answer:
        """Return the answer to a worker's last exchange, without its parameters."""
        return Answer(
            None,
            version.number,
            member.sequence,
            staleness=member.staleness or 0,
            applied=member.applied,
            rejected=member.rejection_reason,
            pace=self.ledger.pace(worker),
        )

    def _apply_due(self) -> None:
        """Apply the messages that are due, and release what ended sessions needed."""
        if not self._ended:
            self.ledger.expire(self.clock())
        while not self._ended and (batch := self.ledger.due(self.clock())) is not None:
            self._release_ended("expired")  # an end may be why the batch is due
            self._settle(batch)
        self._release_ended("expired")
        self._changed.notify_all()

    def _release_ended(self, kind: str) -> None:
        """Release what sessions needed that have ended, and record their ends."""
        for worker in self.ledger.take_ended():
            self._record(kind, worker)
            self._close_connection(worker)
            self._release(worker)
            self._inspector.forget(worker)

    def _settle(self, batch: Batch) -> None:
        """Apply, drop or reject messages, which then no longer wait."""
        store, before = self.store, self.store.current
        messages = [self._messages.pop(entry.worker) for entry in batch.entries]
        try:
            if batch.indices_to_apply:
                store.apply(*_applied(batch, messages))
        except Exception as error:
            failure = _with_traceback(error)  # to be raised in these workers' calls
            for entry in batch.entries:
                self._failures[entry.worker] = entry.submission.sequence, failure
        finally:  # also after Ctrl-C
            for message in messages:
                message.done.notify_all()
            if batch.indices_to_apply and store.current is before:
                self.ledger.fail(batch)
            else:
                self._answer(batch, messages, before)

    def _answer(
        self, batch: Batch, messages: list[_WaitingMessage], before: Version
    ) -> None:
        """Store the answers to messages that were applied, dropped or rejected."""
        store = self.store
        self.ledger.settle(batch, self.clock())
        to_apply, current = batch.indices_to_apply, store.current
        workers = [entry.worker for entry in batch.entries]
        recorded = self._record_batch(batch, messages)
        for i, (worker, message) in enumerate(zip(workers, messages, strict=True)):
            lost_because = _lost_because(batch, i, self.ledger.mode.combines)
            self._inspector.add_message(
                worker, message.norm, message.sample, lost_because
            )
        if to_apply:
            self._inspector.add_version(current.number, store.sample)
        for i, (worker, message) in enumerate(zip(workers, messages, strict=True)):
            rejection = batch.rejected.get(worker)
            if rejection is not None:
                _log.warning(
                    "a message of worker %r was rejected: %s", worker, rejection.reason
                )
                if rejection.is_last:
                    error = errors.MessageRejectedError(
                        f"worker {worker!r} has sent "
                        f"{self.ledger.rejections.limits.in_a_row} messages or more in "
                        "a row that this center rejects, the last one because "
                        f"{rejection.reason}; the center is unchanged. Start again "
                        "from the center, with a smaller learning rate or with "
                        "clipping"
                    )
                    self._failures[worker] = message.submission.sequence, error
                    continue
            # A rejected worker adopts the center with the other messages of the round.
            adopts_before = self.rule.adopts == "before" and batch.is_applied(i)
            adopted = before if adopts_before else current
            adopted.readers += 1
            member = self.ledger.registered()[worker]
            answer = self._last_answer(worker, member, adopted)
            self._answers[worker] = KeptAnswer(
                answer._replace(norm=message.norm),
                adopted,
                recorded,
                message.read_until(current),
            )

    def _release(self, worker: str) -> None:
        """Release the message, answer and error that a worker's state does not need."""
        member = self.ledger.registered().get(worker)
        state = Stage.ENDED if member is None else member.state
        message = self._messages.get(worker)
        if message is not None and state is not Stage.WAITING:
            del self._messages[worker]
            message.done.notify_all()
        if state is not Stage.ANSWERED and (kept := self._answers.pop(worker, None)):
            kept.version.readers -= 1
        if state is not Stage.IDLE:
            self._failures.pop(worker, None)

    def _close_connection(self, worker: str) -> None:
        if close := self._connection_closers.pop(worker, None):
            close()

    # Notices.

    def look(self, *, if_due: bool = False) -> None:
        """Compare what messages alone do not show with the thresholds.

        Args:
          if_due: only if the last look was at least `LOOK_INTERVAL` ago.
        """
        now = self.clock()
        if if_due and now < self._next_look:
            return
        self._next_look = now + LOOK_INTERVAL
        with self._changed:
            registered = self.ledger.registered()
            if self.ledger.is_open and self.is_initialized:
                self._inspector.look(registered, self.ledger.pending, now)
            if (keeper := self.keeper) is not None:
                reason = keeper.degraded
                self.notices.measure("not_on_disk", keeper.failures, reason=reason)
            names = set(registered)
        # These take longer: not under the lock.
        self._measure_one_by_one(len(names))
        self._inspector.read(names)

    def notices_for(self, worker: str) -> tuple[Notice, ...]:
        """Return the notices of the center's checks for a worker's answer."""
        found = self.notices.current("center")
        return tuple(notice for notice in found if notice.worker in ("", worker))

    def _measure_one_by_one(self, workers: int) -> None:
        """Say how far workers move a center that makes no rounds of their messages."""
        rule, mode = self.rule, self.ledger.mode
        if mode.combines or not self.notices.is_on("one_by_one"):
            return
        instead = instead_one_by_one(rule, workers)
        self.notices.measure(
            "one_by_one",
            max(workers, 2) if instead else None,  # more may come
            rule=rule.name,
            mode=mode,
            workers=workers if workers > 1 else "n",
            instead=instead,
        )

    # Durability.

    def _set_store(self, store: Store, chief: str | None) -> None:
        """Set the center's store, and write it to disk before it has readers."""
        old_chief, self._chief = self._chief, chief
        self._store, self.ledger.version = store, store.current.number
        self.ledger.rejections.max_norm = store.max_norm
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(store.like)}
        dtype = " or ".join(sorted(dtypes))
        self._inspector.start(store.current.number, store.sample(), dtype)
        try:
            if self.keeper is not None:
                self.keeper.begin(self._image)
        except BaseException:
            self._store, self._chief = None, old_chief
            raise
        if _log.isEnabledFor(logging.INFO):
            # Not here, where the lock is held: a large center takes seconds.
            copied = functools.partial(store.unpacked, store.copy())
            log = functools.partial(log_version, "the center starts", copied)
            self._logging = self._runtime.in_background(
                log, "agn-optax hash", unread=True
            )
        self._changed.notify_all()

    def _image(self) -> Image:
        store, copied = self.store, self.store.copy()
        state = functools.partial(store.unpacked, copied)  # called without the lock
        return state, self.ledger.state_to_save(), self._chief

    def _record(self, kind: str, *workers: str, **about: Any) -> None:
        """Record a change of workers: see `Keeper.record`."""
        if self.keeper is not None:
            about = {"workers": workers, "version": self.ledger.version, **about}
            self.keeper.record(kind, about, self.ledger.state_to_save(workers))

    def _record_batch(self, batch: Batch, messages: list[_WaitingMessage]) -> int:
        """Record what became of messages; return the record number to wait for."""
        keeper = self.keeper
        if keeper is None:
            return 0
        arrivals = [
            Arrival(message.submission.contribution, message.norm, message.reported)
            for message in messages
        ]
        event = event_of(
            batch,
            arrivals,
            keeps_all=keeper.keeps_all,
            seconds=keeper.seconds,
            unplace=self.store.unplace,
        )
        workers = [entry.worker for entry in batch.entries]
        about = {"workers": workers, "version": self.ledger.version, **event.about}
        ledger = self.ledger.state_to_save(workers)
        return keeper.record(event.kind, about, ledger, event.contents)

    def _recorded(self) -> int:
        return 0 if self.keeper is None else self.keeper.recorded

    def _wait_until_kept(self, recorded: int) -> None:
        keeper = self.keeper
        if keeper is None:
            return
        with self._changed:  # a closed center still writes the records that it has
            self._changed.wait_for(lambda: keeper.is_kept(recorded) or self.failure)
            if not keeper.is_kept(recorded):
                self.check_open()

    # The end of the center, reported to each later caller.

    @property
    def _ended(self) -> str:
        """The reason why the center takes no more exchanges; "" while it takes them."""
        return self.failure or self._closed

    def check_open(self) -> None:
        """Raise `CenterClosedError` if the center takes no more exchanges."""
        if reason := self._ended:
            raise errors.CenterClosedError(reason)

    def _wait_while_open(
        self, condition: Callable[[], bool], timeout: float | None
    ) -> bool:
        """Return whether ``condition`` holds in time; raise if the center ends."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._ended, timeout)
            if not (holds := condition()):
                self.check_open()
            return holds


def _lost_because(batch: Batch, index: int, in_rounds: bool) -> str:
    """Return how a message was lost; "" if it was applied in time."""
    rejection = batch.rejected.get(batch.entries[index].worker)
    if rejection is not None:
        return f"was rejected: {rejection.reason}"
    if not batch.applies:
        return "was dropped, because it was too old"
    if in_rounds and batch.round_staleness[index]:
        return "missed its round"
    return ""


def _applied(
    batch: Batch, messages: list[_WaitingMessage]
) -> tuple[list[Submission], list[int], list[float] | None, int, list[int]]:
    """Return the messages to be applied, as arguments of `Store.apply`.

    Returns:
      The submissions, their staleness and weights, the number of workers, and the
      index of each message's worker.
    """
    weights = batch.weights
    return (
        [messages[i].submission for i in batch.indices_to_apply],
        [batch.staleness[i] for i in batch.indices_to_apply],
        None if weights is None else [weights[i] for i in batch.indices_to_apply],
        batch.workers,
        [batch.indices[i] for i in batch.indices_to_apply],
    )


def _with_traceback(error: Exception) -> Exception:
    """Return a copy of an error with its traceback as text, which holds no arrays."""
    copied = _copy_error(error)
    copied.add_note("".join(traceback.format_exception(error)))
    return copied


def _copy_error(error: Exception) -> Exception:
    """Return a copy to raise, because a raised error keeps frames and their arrays."""
    try:
        return copy.copy(error)
    except Exception:  # its constructor takes other arguments than `args`
        return errors.CenterError(f"the exchange failed: {error!r}")


@dataclasses.dataclass(eq=False)
class LocalSession(Session):
    """A worker's session at a `Core`; made by `Core.join`.

    A user of an embedded center calls `collect`. A server, which sends versions as the
    store keeps them, calls `answer`.
    """

    _core: Core
    worker: str
    session_id: str
    connection: int  # 1, 2, 3, ... within the session

    def submit(self, submission: Submission) -> None:
        """Submit an exchange, whose contribution may be flattened: see `Session`."""
        core, submission = self._core, submission.checked()
        message = core._examine(submission)
        # It is still on the device if no limit needs it.
        norm = None if isinstance(message.norm, jax.Array) else float(message.norm)
        with core.atomically():
            core.check_open()
            if core.ledger.submit(
                self.worker, self.session_id, submission, core.clock(), norm
            ):
                core._messages.setdefault(self.worker, message)
                core._release(self.worker)
            core._apply_due()

    def collect(self, sequence: int, timeout: float | None = None) -> Answer | None:
        """Return the answer to an exchange: see `Session.collect`."""
        kept = self.answer(sequence, timeout)
        if kept is None:
            return None
        self.wait_until_kept(kept)
        snapshot = self._core.snapshot(kept.version)
        jax.block_until_ready(kept.read)
        notices, witness = self._core.notices_for(self.worker), self._core.witness
        return kept.answer._replace(
            params=snapshot.params, notices=notices, witness=witness
        )

    def answer(self, sequence: int, timeout: float | None = None) -> KeptAnswer | None:
        """Return the answer to an exchange as the center keeps it.

        None if the message still waits when the timeout is over. Call
        `wait_until_kept` before the worker gets the answer, or its last part.
        """
        core, worker = self._core, self.worker
        end = math.inf if timeout is None else core.clock() + timeout
        with core.atomically():
            while True:
                member = core.ledger.member(worker, self.session_id)
                failed = core._failures.get(worker)
                if failed is not None and failed[0] == sequence:
                    raise _copy_error(failed[1])
                if member.sequence == sequence:
                    kept = core._answers.get(worker)
                    return kept or core._repeated_answer(worker, member)
                if member.state is not Stage.WAITING:
                    raise errors.WorkerStateError(
                        f"worker {worker!r} asks for the answer to exchange "
                        f"{sequence}, but its last one was {member.sequence}"
                    )
                core.check_open()
                now = core.clock()
                if now >= end:
                    return None
                deadline = core.ledger.deadline() or math.inf
                until = min(end, deadline, now + _FAILURE_CHECK_INTERVAL)
                core._messages[worker].done.wait(max(0.0, until - now))
                core._apply_due()

    @property
    def resume_token(self) -> Any:
        """The ids of center and session, and a witness: see `Session.resume_token`."""
        return [self._core.center_id, self.session_id, self._core.witness]

    def wait_until_kept(self, kept: KeptAnswer) -> None:
        """Wait until an answer is on disk, if exchanges are written there.

        Raises:
          CenterClosedError: the answer cannot be written.
        """
        self._core._wait_until_kept(kept.recorded)

    def replace(self, kept: KeptAnswer, params: PyTree) -> KeptAnswer:
        """Copy the version of an answer, so that the store may reuse its arrays.

        Args:
          kept: the answer to the last exchange, whose contribution has been read.
          params: the copy, as the version keeps its parameters.
        """
        core = self._core
        with core.atomically():
            version = Version(params, kept.version.number, readers=1)
            copied = dataclasses.replace(kept, version=version, read=None)
            if core._answers.get(self.worker) is kept:
                core._answers[self.worker] = copied
                kept.version.readers -= 1
        return copied

    def completed(self) -> int:
        """Return the number of the last exchange that the center has completed."""
        with self._core.atomically():
            return self._core.ledger.member(self.worker, self.session_id).sequence

    def current(self) -> KeptAnswer:
        """Return the current version as if it answered an exchange of number 0."""
        core = self._core
        with core.atomically():
            core.ledger.member(self.worker, self.session_id)  # raises if it has ended
            version = core.store.current
            version.escaped = True  # its readers do not report the end of reading
            answer = Answer(None, version.number, 0)
            return KeptAnswer(answer, version, core._recorded())

    def acknowledge(self, sequence: int) -> None:
        """Release the answer to an exchange: see `Session.acknowledge`."""
        with self._core.atomically():
            self._core.ledger.acknowledge(self.worker, self.session_id, sequence)
            self._core._release(self.worker)
        self._core.look(if_due=True)  # the worker has its answer

    def disconnect(self) -> None:
        """Report a broken connection: see `Session.disconnect`."""
        core = self._core
        with core.atomically():
            now, connection = core.clock(), self.connection
            if core.ledger.disconnect(self.worker, self.session_id, connection, now):
                core._record("disconnect", self.worker, connection=connection)
            core._apply_due()

    def leave(self) -> None:
        """End the session: see `Session.leave`."""
        self._core.leave(self.worker, self.session_id)
