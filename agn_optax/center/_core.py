"""The core of every center: a ledger, a store and a keeper under one lock.

    Ledger      decides: registered workers, next message, waiting workers
    Store       computes: one version of the center after another
    Keeper      saves: the state on disk, if there is a durability

The embedded center, the service, and a center that is a worker of another center are
clients of a `Core`, and decide nothing themselves. The lock is held while programs are
dispatched to the device, and never while they run. If the device must first report
whether the center stays finite, a thread waits for it without the lock
(`Core._look_at`): the thread that submitted the last of the messages, or a new one.
These messages keep their turn, and no other message is applied meanwhile.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import check, combinations, in_background
from agn_optax.center._ledger import Batch, Ledger, Member, State
from agn_optax.center._message_limits import Rejection, Size
from agn_optax.center._protocol import Session
from agn_optax.center._store import CenterState, Known, Prepared, Store, Version
from agn_optax.center._submission import Answer, Snapshot, Submission
from agn_optax.center.durability import Durability, Image, Keeper, Room
from agn_optax.rules import Rule, check_outside, check_rule

PyTree = Any
_log = logging.getLogger("agn_optax")

_LOOKS = 1.0  # s, interval at which a waiting worker checks whether the disk has failed


@dataclasses.dataclass
class KeptAnswer:
    """An answer, kept until its worker has received it."""

    answer: Answer  # without its parameters, which are those of the version
    version: Version  # the version that the rule adopts
    recorded: int = 0  # number of records that must be on disk before it is sent
    read: Any = None  # arrays that are ready once the contribution has been read


@dataclasses.dataclass
class _Message:
    """A submission that waits to be applied."""

    submission: Submission  # with its contribution as the store takes it
    norm: Any
    size: Size | None  # None if the message limits do not need it
    # One condition per worker, because all workers of a round would wake up for one.
    over: threading.Condition  # notified when the message no longer waits

    def read_until(self, version: Version) -> Any:
        """Return arrays that are ready once the contribution has been read.

        Programs read NumPy arrays in place, and the owner of an array may then write to
        it. The returned arrays are results of the programs that made ``version``.
        """
        leaves = jax.tree.leaves(self.submission.contribution)
        if any(isinstance(leaf, np.ndarray) for leaf in leaves):
            return version.params, self.norm
        return None


@dataclasses.dataclass(eq=False)
class _Look:
    """Messages to be applied if the device reports that the center stays finite."""

    batch: Batch
    messages: list[_Message]
    prepared: Prepared
    store: Store
    is_begun: bool = False  # whether a thread was started to wait for the device
    looker: int | None = None  # id of the thread that waits for the device
    is_finite: bool | None = None  # None until the device has reported
    known: Known | None = None
    failure: Exception | None = None


class Core:
    """The center variable as used by centers and services: see `LocalCenter`.

    Arguments and exceptions are those of `LocalCenter`; ``decides`` are the arguments
    of `Ledger`.

    Attributes:
      rule: the rule.
      center_id: the center id. A center that continues from disk with no update lost
        keeps its id.
      ledger: the ledger; read it only under `atomically`.
      observer: called under the lock with each applied submission. Must not wait for
        the device. Returns an array that is ready once the contribution has been read,
        or None if it was not read.
      detached: reason why the center continues without its parent; "" while it is
        attached or has none.
    """

    def __init__(
        self,
        rule: Rule,
        params: PyTree = None,
        *,
        durability: Durability | None = None,
        dtype: Any = None,
        device: Any = None,
        flatten: bool = False,
        **decides: Any,
    ) -> None:
        check_rule(rule)
        check_outside(rule.center)
        self.rule = rule
        self.center_id = uuid.uuid4().hex
        self.ledger = Ledger(**decides)
        if not rule.is_summed and not self.ledger.mode.combines:
            combinations.reject(
                "a robust combine",
                "a center that is not synchronous",
                f"rule {rule.name!r} with {rule.combine}, mode={self.ledger.mode}",
            )
        self._dtype = check.float_dtype(dtype, "dtype")
        self._device = device
        self._flatten = flatten
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._store: Store | None = None
        self._messages: dict[str, _Message] = {}  # of the waiting workers
        self._answers: dict[str, KeptAnswer] = {}  # not yet acknowledged, by worker
        self._failures: dict[str, tuple[int, Exception]] = {}  # sequence and error
        self._cuts: dict[str, Callable[[], None]] = {}  # close a worker's connection
        self._look: _Look | None = None  # the messages that wait for the device
        self.observer: Callable[[Submission], Any] | None = None
        self.detached = ""
        self._closed = ""
        # Name of the worker that initialized the center; "" if it was created with its
        # parameters, None if it was restored.
        self._chief: str | None = None
        self._keeper: Keeper | None = None
        if durability is not None:
            self._keeper = Keeper(durability, rule, self._changed)
        try:
            if self._keeper is not None:
                self._go_on(self._keeper, params)
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
    def outlives(self) -> bool:
        """True if the center has a durability, so that it outlives its process."""
        return self._keeper is not None

    @property
    def failure(self) -> str:
        """The error after which nothing is written to disk any more; "" without one."""
        return "" if self._keeper is None else self._keeper.failure

    @property
    def degraded(self) -> str:
        """The reason why updates are not on disk or at the parent; "" if all are."""
        return (self._keeper.degraded if self._keeper else "") or self.detached

    @property
    def found(self) -> str:
        """A message on the center that was found on disk; "" if there was none."""
        return "" if self._keeper is None else self._keeper.found

    @property
    def saved_version(self) -> int | None:
        """Version of the newest snapshot that this process wrote; None without one."""
        return None if self._keeper is None else self._keeper.saved_version

    @property
    def room(self) -> Room | None:
        """Space on the disk of the durability; None without one."""
        return None if self._keeper is None else self._keeper.room()

    def atomically(self) -> threading.Condition:
        """Return the condition around the lock, which is notified of every change."""
        return self._changed

    def members(self) -> tuple[int | None, dict[str, Member], set[str]]:
        """Return the version (None: not initialized), members and waiting workers."""
        with self._changed:
            self._settle()
            version = None if self._store is None else self._store.current.number
            members = {
                name: dataclasses.replace(member, recent=member.recent.copy())
                for name, member in self.ledger.present().items()
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
            version = self._still_kept(version)
            version.readers += 1
            recorded = self._recorded()
        try:
            if kept:
                self._wait_until_kept(recorded)
            yield version
        finally:
            with self._changed:
                version.readers -= 1

    def snapshot(
        self, version: Version | None = None, *, broadcast: bool = False
    ) -> Snapshot:
        """Return a version that can be read without a time limit.

        Args:
          version: version of the answer to an exchange; None for the current one.
          broadcast: return the broadcast parameters, see `Center.pull`.
        """
        with self._changed:
            store = self.store
            read = store.broadcast if broadcast else store.tree
            if version is not None:
                read = store.answer
            version = self._still_kept(version)
            version.escaped = True
        # The arrays no longer change, so that the lock is not needed to wait for them.
        return Snapshot(read(version), version.number)

    def _still_kept(self, version: Version | None) -> Version:
        """Return a version, or the current one for None; raise if it was released."""
        current = self.store.current
        version = version or current
        if version is not current and not (version.readers or version.escaped):
            raise errors.WorkerStateError(
                f"the answer of version {version.number} was released, because its "
                "worker has continued or has joined again"
            )
        return version

    def differences(self, since: int, version: Version) -> list[PyTree] | None:
        """Return the deltas between two versions: see `Store.differences`."""
        with self._changed:
            return self.store.differences(since, version)

    def save(self) -> CenterState:
        """Return a consistent copy of the center's complete state, for a checkpoint."""
        with self._changed:
            store, copied = self.store, self.store.copy()
        return store.unpacked(copied)

    def write_snapshot(self) -> int:
        """Write a snapshot now: see `LocalCenter.write_snapshot`."""
        if self._keeper is None:
            raise errors.DurabilityError(
                "this center is in memory only, so it writes no snapshots: give it a "
                "durability (--journal, --snapshots)"
            )
        return self._keeper.save()

    # Start and end.

    def initialize(self, params: PyTree, *, worker: str | None) -> int:
        """Set the center's first parameters: see `Center.initialize`.

        If ``worker`` is None, the parameters come from a parent center, and a chief
        adopts them. The version whose number is returned has no readers yet, so the
        first exchange may reuse its arrays.
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
                self._begin(store, worker)
            self._chief = worker
            return self.store.current.number

    def restore(self, saved: CenterState) -> None:
        """Continue from a state that `save` returned: see `LocalCenter.restore`."""
        with self._changed:
            store = Store.restore(self.rule, saved, self._device, flatten=self._flatten)
            self._begin(store, None)

    def wait_until_initialized(self, timeout: float | None) -> bool:
        """Return whether the center has parameters, now or within ``timeout`` seconds.

        Raises:
          CenterClosedError: the center has ended without parameters.
        """
        return self._wait_while_open(lambda: self.is_initialized, timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Return whether ``condition`` holds, now or within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def close(self, reason: str = "this center has been closed") -> None:
        """Take no more exchanges: see `LocalCenter.close`."""
        with self._changed:
            self._closed = self._closed or reason
            for message in self._messages.values():
                message.over.notify_all()
            self._changed.notify_all()
        if self._keeper is not None:
            self._keeper.close()

    def wait_until_closed(self, timeout: float | None = None) -> bool:
        """Return whether the center has ended, now or within ``timeout`` seconds."""
        return self.wait_for(lambda: bool(self._ended), timeout)

    # Workers.

    def join(
        self,
        worker: str,
        session_id: str | None = None,
        params: PyTree = None,
        *,
        cut: Callable[[], None] | None = None,
        **how: Any,
    ) -> LocalSession:
        """Register a worker without waiting for other workers: see `Ledger.join`.

        Args:
          worker: the worker's name.
          session_id: the session id; None for a new session.
          params: the parameters that the worker will replace with the center's; None
            skips the check.
          cut: closes the worker's connection. Called once the session was given up, or
            has joined over another connection. Must not block.
          **how: the other arguments of `Ledger.join`.

        Raises:
          CenterClosedError: the center takes no more exchanges.
          TreeMismatchError: ``params`` does not match the center.
          NameTakenError, CenterFullError, WorkerStateError: see `Ledger.join`.
        """
        session_id = session_id or uuid.uuid4().hex
        with self._changed:
            self._check_open()
            if params is not None and self._store is not None:
                check.same_tree(params, self._store.like, "params", "center")
            now = time.monotonic()
            connection = self.ledger.join(worker, session_id, now, **how)
            if connection == 1:  # a new session does not get an earlier one's error
                self._failures.pop(worker, None)
            self._cut(worker)
            if cut is not None:
                self._cuts[worker] = cut
            self._prune(worker)
            self._remember(worker)
            before = self.ledger.member(worker, session_id).before
            self._settle()
        return LocalSession(self, worker, session_id, connection, before)

    def heartbeat(self, sessions: Iterable[tuple[str, str]]) -> list[str]:
        """Record heartbeats of sessions, and return the workers that are registered."""
        with self._changed:
            now = time.monotonic()
            there = [
                worker
                for worker, of in sessions
                if self.ledger.heartbeat(worker, of, now)
            ]
            self._settle()
            return there

    def knows(self, worker: str, session_id: str) -> bool:
        """Return whether the center remembers a worker's session."""
        with self._changed:
            member = self.ledger.find(worker)
            return member is not None and member.session_id == session_id

    def leave(self, worker: str, session_id: str) -> None:
        """End a worker's session, over another connection than the session's."""
        with self._changed:
            if self.ledger.leave(worker, session_id):
                self._remember(worker)
                self._settle()

    def wait_for_barrier(self, timeout: float | None) -> bool:
        """Return whether the barrier is reached, now or within ``timeout`` seconds.

        Raises:
          CenterClosedError: the center has ended before the barrier was reached.
        """
        return self._wait_while_open(lambda: self.ledger.is_open, timeout)

    def shift(self, adopted: PyTree, sent: PyTree) -> None:
        """Rebase the center: ``adopted`` replaces ``sent``, later updates are kept."""
        # Packing waits for the arrays, which is not allowed under the lock.
        adopted, sent = self.store.place(adopted), self.store.place(sent)
        with self._changed:
            self.store.shift(adopted, sent)
            self.ledger.shift()
            self._settle()

    # For sessions. The lock is held when these are called, except for `_examine`.

    def _examine(self, submission: Submission) -> _Message:
        """Place a contribution on the center's device, and measure its message."""
        store, limits, size = self.store, self.ledger.rejections.limits, None
        contribution = store.take(submission.contribution)
        # The rest is not used: answers are always whole.
        submission = submission.without_arrays()._replace(contribution=contribution)
        with self.reading() as version:
            norm: Any = store.norm(contribution, version.params, waits=limits.measures)
            if limits.measures:
                largest = None
                if limits.element is not None:
                    largest = float(store.largest(contribution, version.params))
                size = Size(float(norm), largest)
        return _Message(submission, norm, size, threading.Condition(self._lock))

    def _late_answer(self, worker: str, member: Member) -> KeptAnswer:
        """Return an answer to an exchange whose first answer has been released."""
        current = self.store.current
        current.escaped = True  # its reader does not report the end of reading
        answer = Answer(
            None,
            current.number,
            member.sequence,
            staleness=member.staleness or 0,
            applied=member.applied,
            rejected=member.why,
            pace=self.ledger.pace(worker),
        )
        return KeptAnswer(answer, current, self._recorded())

    def _settle(self, *, looks: bool = False) -> None:
        """Apply the messages that are due, and release the state of departed workers.

        Args:
          looks: whether the caller waits for the device, if necessary, once it has
            released the lock; otherwise a new thread waits.
        """
        if not self._ended:  # even while a thread waits for the device
            self.ledger.expire(time.monotonic())
        while (
            not self._ended
            and self._look is None
            and (batch := self.ledger.due(time.monotonic())) is not None
        ):
            self._begin_batch(batch)
        for worker in self.ledger.departed():
            self._cut(worker)
            self._prune(worker)
        self._changed.notify_all()
        look = self._look
        if look and not (looks or look.is_begun or look.looker):
            act = functools.partial(self._look_at, look)
            in_background(act, "agn-optax look", unread=True)
            look.is_begun = True  # after the start, so that a failed start is repeated

    def _begin_batch(self, batch: Batch) -> None:
        """Apply messages, or start the check that the center stays finite."""
        messages = [self._messages[entry.worker] for entry in batch.entries]
        batch = self.ledger.judge(batch, [message.size for message in messages])
        prepared = None
        try:
            if batch.taken:
                looks = self.ledger.rejections.limits.nonfinite
                norm = sum(batch.norms[i] for i in batch.taken) if looks else math.inf
                prepared = self.store.prepare(*_applied(batch, messages), norm)
                if looks and not self.store.is_bounded(prepared):
                    self._look = _Look(batch, messages, prepared, self.store)
                    return
        except Exception as error:
            self._end_batch(batch, messages, None, _kept(error))
        else:
            self._end_batch(batch, messages, prepared)

    def _look_at(self, look: _Look) -> None:
        """Wait for the device's check of messages, on one thread, and end the check.

        The lock is not held meanwhile, so that all other calls continue. No other
        messages are applied, so that the messages keep their turns.
        """
        me = threading.get_ident()
        try:
            with self._changed:
                if look.looker is None:
                    look.looker = me
            if look.looker == me:
                try:
                    look.is_finite, look.known = look.store.look(look.prepared)
                except Exception as error:
                    look.failure = _kept(error)
        finally:  # after Ctrl-C the messages still wait, and another thread checks them
            with self._changed:
                if look.looker == me:
                    self._look = None
                    self._seen(look)
                    self._settle()
                    # Rounds may end by time.
                    if self.ledger.mode.round_grace is not None:
                        for message in self._messages.values():
                            message.over.notify_all()

    def _seen(self, look: _Look) -> None:
        """End the messages of a check, unless the center or its workers have changed.

        The center may have been rebased or restored meanwhile, and workers may have
        left. Then the ledger decides again which messages are due.
        """
        store, batch = look.store, look.batch
        is_current = self._store is store and store.current is look.prepared.before
        if self._ended or not is_current or not self.ledger.is_waiting(batch):
            return
        if look.is_finite:
            store.learn(look.known)
        elif look.is_finite is not None:
            batch = self._not_finite(batch)
        elif look.failure is None:  # interrupted
            return
        self._end_batch(batch, look.messages, look.prepared, look.failure)

    def _not_finite(self, batch: Batch) -> Batch:
        """Return a batch in which all messages to be applied are rejected."""
        answers = self.rule.codec.answer_dtype or "unrounded"
        rejection = Rejection(
            "nonfinite",
            "with this message, or another one of its round, the center would not be "
            f"finite, either itself or as workers adopt it ({answers})",
        )
        others = {batch.entries[i].worker: rejection for i in batch.taken}
        return self.ledger.rejecting(batch, others)

    def _end_batch(
        self,
        batch: Batch,
        messages: list[_Message],
        prepared: Prepared | None,
        failure: Exception | None = None,
    ) -> None:
        """Apply, drop or reject messages, which then no longer wait."""
        store, before = self.store, self.store.current
        for entry in batch.entries:
            del self._messages[entry.worker]
        try:
            if batch.taken and failure is None:
                assert prepared is not None
                store.move(prepared)
        except Exception as error:
            failure = _kept(error)
        finally:  # also after Ctrl-C
            for message in messages:
                message.over.notify_all()
            if failure is not None:  # to be raised in these workers' calls
                for entry in batch.entries:
                    sequence = entry.submission.sequence
                    self._failures[entry.worker] = sequence, failure
            if batch.taken and store.current is before:
                self.ledger.fail(batch)
            else:
                self._answer(batch, messages, before)

    def _answer(self, batch: Batch, messages: list[_Message], before: Version) -> None:
        """Store the answers to messages that were applied, dropped or rejected."""
        store = self.store
        self.ledger.settle(batch, time.monotonic())
        taken, current = batch.taken, store.current
        exchange: tuple[Any, ...] = ()
        reads: dict[int, Any] = {}  # by the message's index in the batch
        if taken and (self.observer or self._keeper):
            submissions, *others = _applied(batch, messages)
            seen = [
                each._replace(contribution=store.unplace(each.contribution))
                for each in submissions
            ]
            exchange = seen, *others
        workers = [entry.worker for entry in batch.entries]
        recorded = self._remember(*workers, exchange=exchange)
        if taken and self.observer is not None:
            reads = dict(zip(taken, map(self.observer, seen), strict=True))
        for i, (worker, message) in enumerate(zip(workers, messages, strict=True)):
            sequence = message.submission.sequence
            rejection = batch.rejected.get(worker)
            if rejection is not None:
                _log.warning(
                    "a message of worker %r was rejected: %s", worker, rejection.why
                )
                if rejection.is_last:
                    error = self._too_many_rejected(worker, rejection)
                    self._failures[worker] = sequence, error
                    continue
            # A rejected worker adopts the center with the other messages of the round.
            adopts_before = self.rule.adopts == "before" and i in taken
            adopted = before if adopts_before else current
            adopted.readers += 1
            answer = Answer(
                None,
                adopted.number,
                sequence,
                staleness=batch.staleness[i],
                norm=message.norm,
                applied=i in taken,
                rejected="" if rejection is None else rejection.why,
                pace=self.ledger.pace(worker),
            )
            read = reads.get(i), message.read_until(current)
            self._answers[worker] = KeptAnswer(answer, adopted, recorded, read)

    def _too_many_rejected(
        self, worker: str, rejection: Rejection
    ) -> errors.MessageRejectedError:
        return errors.MessageRejectedError(
            f"worker {worker!r} has sent {self.ledger.rejections.limits.in_a_row} "
            "messages or more in a row that this center rejects, the last one because "
            f"{rejection.why}; the center is unchanged. Start again from the center, "
            "with a smaller learning rate or with clipping"
        )

    def _prune(self, worker: str) -> None:
        """Release the message, answer and error that a worker's state does not need."""
        member = self.ledger.present().get(worker)
        state = State.GONE if member is None else member.state
        message = self._messages.get(worker)
        if message is not None and state is not State.WAITING:
            del self._messages[worker]
            message.over.notify_all()
        if state is not State.ANSWERED:
            self._forget(worker)
        if state is not State.IDLE:
            self._failures.pop(worker, None)

    def _cut(self, worker: str) -> None:
        if cut := self._cuts.pop(worker, None):
            cut()

    def _forget(self, worker: str) -> None:
        if answer := self._answers.pop(worker, None):
            answer.version.readers -= 1

    # Durability.

    def _go_on(self, keeper: Keeper, params: PyTree) -> None:
        """Continue with the center found on disk, if there is one."""
        store = keeper.restore(
            self.ledger, params, self._dtype, self._device, self._flatten
        )
        self.center_id = keeper.center_id
        if store is not None:
            with self._changed:
                self._begin(store, keeper.chief)

    def _begin(self, store: Store, chief: str | None) -> None:
        """Set the center's store, and write it to disk before it has readers."""
        first, self._chief = self._chief, chief
        self._store, self.ledger.version = store, store.current.number
        try:
            if self._keeper is not None:
                self._keeper.begin(self._image)
        except BaseException:
            self._store, self._chief = None, first
            raise
        self._changed.notify_all()

    def _image(self) -> Image:
        store, copied = self.store, self.store.copy()
        state = functools.partial(store.unpacked, copied)  # called without the lock
        return state, self.ledger.memory(), self._chief

    def _remember(self, *workers: str, exchange: tuple[Any, ...] = ()) -> int:
        """Record a change of workers; return the record number to wait for."""
        if self._keeper is None:
            return 0
        return self._keeper.record(self.ledger.memory(workers), *exchange)

    def _recorded(self) -> int:
        return 0 if self._keeper is None else self._keeper.recorded

    def _wait_until_kept(self, recorded: int) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        with self._changed:  # a closed center still writes the records that it has
            self._changed.wait_for(lambda: keeper.is_kept(recorded) or self.failure)
            if not keeper.is_kept(recorded):
                self._check_open()

    # The end of the center, reported to each later caller.

    @property
    def _ended(self) -> str:
        """The reason why the center takes no more exchanges; "" while it takes them."""
        return self.failure or self._closed

    def _check_open(self) -> None:
        if reason := self._ended:
            raise errors.CenterClosedError(reason)

    def _wait_while_open(
        self, condition: Callable[[], bool], timeout: float | None
    ) -> bool:
        """Return whether ``condition`` holds in time; raise if the center ends."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._ended, timeout)
            if not (holds := condition()):
                self._check_open()
            return holds


def _applied(
    batch: Batch, messages: list[_Message]
) -> tuple[list[Submission], list[int], list[float] | None, int]:
    """Return the messages to be applied, as arguments of `Store.prepare`.

    Returns:
      The submissions, their staleness and weights, and the number of workers.
    """
    weights = batch.weights
    return (
        [messages[i].submission for i in batch.taken],
        [batch.staleness[i] for i in batch.taken],
        None if weights is None else [weights[i] for i in batch.taken],
        batch.workers,
    )


def _kept(error: Exception) -> Exception:
    """Return a copy of an error with its traceback as text, which holds no arrays."""
    kept = _again(error)
    kept.add_note("".join(traceback.format_exception(error)))
    return kept


def _again(error: Exception) -> Exception:
    """Return an equal error to raise; the traceback of a raised error keeps frames."""
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
    before: Any = None

    def submit(self, submission: Submission) -> None:
        """Submit an exchange, whose contribution may be flattened: see `Session`."""
        core, submission = self._core, submission.checked()
        message = core._examine(submission)
        with core.atomically():
            core._check_open()
            now = time.monotonic()
            if core.ledger.submit(self.worker, self.session_id, submission, now):
                core._messages.setdefault(self.worker, message)
                core._prune(self.worker)
            core._settle(looks=True)
            look = core._look
        if look and not (look.is_begun or look.looker):
            core._look_at(look)

    def collect(self, sequence: int, timeout: float | None = None) -> Answer | None:
        """Return the answer to an exchange: see `Session.collect`."""
        kept = self.answer(sequence, timeout)
        if kept is None:
            return None
        self.wait_until_kept(kept)
        snapshot = self._core.snapshot(kept.version)
        jax.block_until_ready(kept.read)
        return kept.answer._replace(params=snapshot.params)

    def answer(self, sequence: int, timeout: float | None = None) -> KeptAnswer | None:
        """Return the answer to an exchange as the center keeps it; None if it waits.

        Call `wait_until_kept` before the worker gets the answer, or its last part.
        """
        core, worker = self._core, self.worker
        end = math.inf if timeout is None else time.monotonic() + timeout
        with core.atomically():
            while True:
                member = core.ledger.member(worker, self.session_id)
                failed = core._failures.get(worker)
                if failed is not None and failed[0] == sequence:
                    raise _again(failed[1])
                if member.sequence == sequence:
                    kept = core._answers.get(worker)
                    return kept or core._late_answer(worker, member)
                if member.state is not State.WAITING:
                    raise errors.WorkerStateError(
                        f"worker {worker!r} asks for the answer to exchange "
                        f"{sequence}, but its last one was {member.sequence}"
                    )
                core._check_open()
                now = time.monotonic()
                if now >= end:
                    return None
                is_held = core._look is not None
                deadline = core.ledger.deadline(is_held=is_held) or math.inf
                until = min(end, deadline, now + _LOOKS)
                core._messages[worker].over.wait(max(0.0, until - now))
                core._settle()

    @property
    def resume_token(self) -> Any:
        """The center id and the session id: see `Session.resume_token`."""
        return [self._core.center_id, self.session_id]

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

    def acknowledge(self, sequence: int) -> None:
        """Release the answer to an exchange: see `Session.acknowledge`."""
        with self._core.atomically():
            self._core.ledger.acknowledge(self.worker, self.session_id, sequence)
            self._core._prune(self.worker)

    def disconnect(self) -> None:
        """Report a broken connection: see `Session.disconnect`."""
        core = self._core
        with core.atomically():
            now = time.monotonic()
            core.ledger.disconnect(self.worker, self.session_id, self.connection, now)
            core._settle()

    def leave(self) -> None:
        """End the session: see `Session.leave`."""
        self._core.leave(self.worker, self.session_id)
