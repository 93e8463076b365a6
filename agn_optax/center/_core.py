"""A center's heart: one lock around a ledger, a store and a keeper; and its sessions.

    Ledger      decides: who is there, which message is next, who waits
    Store       computes: one version of the center after the other
    Keeper      remembers: what outlives the process, if anything does

Everybody who has to do with a center is a client of its `Core`, and has nothing of its
own to decide: the embedded center, the service, and a center that is a worker of
another one. The lock is held while programs are handed to the device, never while they
run. Where the device must say first whether the center stays finite, somebody looks
without the lock (`Core._look_at`): whoever has sent the last of the messages, or a
thread. They keep their turn, and nothing else is applied meanwhile.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import check, in_background
from agn_optax.center._ledger import Batch, Ledger, Member, State, Synchronous
from agn_optax.center._protocol import Session, Snapshot
from agn_optax.center._refusals import Claim, Refusal, Size
from agn_optax.center._store import CenterState, Known, Prepared, Store, Version
from agn_optax.center.durability import Durability, Image, Keeper, Room
from agn_optax.rules import Rule, check_outside, check_rule

PyTree = Any
_log = logging.getLogger("agn_optax")

_LOOKS = 1.0  # seconds after which whoever waits looks whether the disk has failed


@dataclasses.dataclass
class Answer:
    """The answer to one exchange, kept until its worker has it."""

    sequence: int
    version: Version  # the one that the rule adopts
    staleness: int
    norm: jax.Array | None
    applied: bool
    refused: str = ""  # why it was
    recorded: int = 0  # what must be on disk before its worker has it
    pace: float | None = None  # as of `Snapshot`
    read: Any = None  # ready once nobody reads the contribution any more


@dataclasses.dataclass
class _Message:
    """A contribution that waits to be applied."""

    contribution: PyTree
    norm: Any
    size: Size | None  # where messages are measured
    # Of its worker alone: a crowd that waits for a round would wake up for each other.
    over: threading.Condition  # notified when it waits no longer

    def read_until(self, version: Version) -> Any:
        """Arrays that are ready once the programs that made a version have read this.

        Programs read NumPy's arrays where they are, and their owner may write to them.
        """
        leaves = jax.tree.leaves(self.contribution)
        if any(isinstance(leaf, np.ndarray) for leaf in leaves):
            return version.params, self.norm
        return None


@dataclasses.dataclass(eq=False)
class _Look:
    """Messages to be applied, if the device says that the center stays finite."""

    batch: Batch
    messages: list[_Message]
    prepared: Prepared
    is_begun: bool = False  # a thread has been started that looks
    looker: int | None = None  # the thread that does


class Core:
    """The center variable, for clients that are not its users: see `LocalCenter`.

    Args and raises as `LocalCenter`; ``decides`` are the settings of a `Ledger`.

    Attributes:
      rule: the rule.
      life: of this center; a center that goes on where an earlier process left it, with
        nothing lost, has the same.
      ledger: what it decides by; read it under `atomically` only.
      observer: called under the lock with every contribution that is applied, and what
        its worker claims of it. It must not wait for the device, and returns an array
        that is ready once it has read the contribution; None if it has not.
      detached: why this center goes on without its parent; "" while it does not.
    """

    def __init__(
        self,
        rule: Rule,
        params: PyTree = None,
        *,
        dtype: Any = None,
        device: Any = None,
        durability: Durability | None = None,
        packs: bool = False,
        **decides: Any,
    ) -> None:
        check_rule(rule)
        check_outside(rule.center)
        self.rule = rule
        self.life = uuid.uuid4().hex
        self.ledger = Ledger(**decides)
        if not rule.is_summed and not isinstance(self.ledger.mode, Synchronous):
            raise errors.InvalidArgumentError(
                f"rule {rule.name!r} makes one message of those of a round by "
                f"{rule.combine}, and a center in mode {self.ledger.mode} takes them "
                "one by one: give it mode=Synchronous() (--mode synchronous)"
            )
        self._dtype = check.float_dtype(dtype, "dtype")
        self._device = device
        self._packs = packs
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._store: Store | None = None
        self._messages: dict[str, _Message] = {}  # of the workers that wait
        self._answers: dict[str, Answer] = {}  # of the workers that have theirs to come
        self._failures: dict[str, tuple[int, Exception]] = {}  # and sequence
        self._cuts: dict[str, Callable[[], None]] = {}  # of their connections
        self._look: _Look | None = None  # at the messages whose turn it is
        self.observer: Callable[[PyTree, Claim], Any] | None = None
        self.detached = ""
        self._closed = ""
        # Who initialized: "" is whoever made this center, None (after a restore) nobody
        # in this life.
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
            self.close("it could not be made")
            raise

    # What it is.

    @property
    def is_initialized(self) -> bool:
        """Whether the center has parameters."""
        return self._store is not None

    @property
    def store(self) -> Store:
        """What computes.

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
        """Whether anything of this center outlives its process by itself."""
        return self._keeper is not None

    @property
    def failure(self) -> str:
        """Why this center cannot be kept on disk any more; "" while all is well."""
        return "" if self._keeper is None else self._keeper.failure

    @property
    def degraded(self) -> str:
        """Why less is on disk than was asked for, or sent to a parent; "" if not so."""
        return (self._keeper.degraded if self._keeper else "") or self.detached

    @property
    def found(self) -> str:
        """How it goes on from what an earlier process left; "" if there was nothing."""
        return "" if self._keeper is None else self._keeper.found

    @property
    def saved_version(self) -> int | None:
        """Of the newest snapshot on disk that this process wrote; None without one."""
        return None if self._keeper is None else self._keeper.saved_version

    @property
    def room(self) -> Room | None:
        """On the disk where it is kept; None as long as it is not."""
        return None if self._keeper is None else self._keeper.room()

    def atomically(self) -> threading.Condition:
        """Around what nobody may come between; notified whenever something changed."""
        return self._changed

    def members(self) -> tuple[int | None, dict[str, Member], set[str]]:
        """Version (None: not initialized), workers that are there, and who waits."""
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
        """A version, which stays what it is meanwhile.

        Args:
          version: of an answer; None takes the current one.
          kept: for those whom the news may outlive: waits until all that is in it is on
            disk, if exchanges are.

        Raises:
          WorkerStateError: the answer is kept no longer, as its worker has gone on or
            has come back in another life; the version may have been written over.
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
        self, version: Version | None = None, *, public: bool = False, **answer: Any
    ) -> Snapshot:
        """A version for somebody who need not say when it has been read.

        Args:
          version: the answer to an exchange; None is the center as it is.
          public: as workers have it, see `Center.pull`.
          **answer: what else an answer says.
        """
        with self._changed:
            store = self.store
            read = store.public if public else store.tree
            if version is not None:
                read = store.answer
            version = self._still_kept(version)
            version.escaped = True
        # Its arrays stay what they are, and may be waited for here.
        return Snapshot(read(version), version.number, **answer)

    def _still_kept(self, version: Version | None) -> Version:
        """Return a version whose arrays are its own; the current one for None."""
        current = self.store.current
        version = version or current
        if version is not current and not (version.readers or version.escaped):
            raise errors.WorkerStateError(
                f"the answer of version {version.number} is kept no longer: its worker "
                "has gone on, or has joined anew"
            )
        return version

    def differences(self, since: int, version: Version) -> list[PyTree] | None:
        """See `Store.differences`."""
        with self._changed:
            return self.store.differences(since, version)

    def save(self) -> CenterState:
        """A copy of everything that the center is, consistent, for a checkpoint."""
        with self._changed:
            store, copied = self.store, self.store.copy()
        return store.unpacked(copied)

    def write_snapshot(self) -> int:
        """See `LocalCenter.write_snapshot`."""
        if self._keeper is None:
            raise errors.DurabilityError(
                "this center is kept nowhere: give it a durability (--journal, "
                "--snapshots)"
            )
        return self._keeper.save()

    # How it begins and ends.

    def initialize(self, params: PyTree, *, worker: str | None) -> int:
        """Gives the center its first parameters: see `Center.initialize`.

        If ``worker`` is None they come from above, and a chief then adopts them.
        Nobody has seen the version whose number is returned, so the first exchange may
        move it in place.
        """
        check.float_leaves(params, "params")
        with self._changed:
            if self._store is not None and self._chief not in (None, worker):
                by = f"worker {self._chief!r}" if self._chief else "whoever made it"
                raise errors.AlreadyInitializedError(
                    f"worker {worker!r} wants to initialize a center that {by} has "
                    "initialized; start it with chief=False, and it adopts the center"
                )
            if self._store is None:
                store = Store(
                    self.rule, params, self._dtype, self._device, packs=self._packs
                )
                self._begin(store, worker)
            self._chief = worker
            return self.store.current.number

    def restore(self, saved: CenterState) -> None:
        """Goes on from what `save` returned: see `LocalCenter.restore`."""
        with self._changed:
            store = Store.restore(self.rule, saved, self._device, packs=self._packs)
            self._begin(store, None)

    def wait_until_initialized(self, timeout: float | None) -> bool:
        """Return whether the center has parameters, now or within ``timeout`` seconds.

        Raises:
          CenterClosedError: it has ended, and will never have any.
        """
        return self._wait_while_open(lambda: self.is_initialized, timeout)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Whether ``condition`` holds, now or within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def close(self, reason: str = "this center has been closed") -> None:
        """Takes no more exchanges: see `LocalCenter.close`."""
        with self._changed:
            self._closed = self._closed or reason
            for message in self._messages.values():
                message.over.notify_all()
            self._changed.notify_all()
        if self._keeper is not None:
            self._keeper.close()

    def wait_until_closed(self, timeout: float | None = None) -> bool:
        """Whether no more exchanges are taken, for whatever reason: now or in time."""
        return self.wait_for(lambda: bool(self._ended), timeout)

    # Who takes part.

    def join(
        self,
        worker: str,
        incarnation: str | None = None,
        params: PyTree = None,
        *,
        cut: Callable[[], None] | None = None,
        **how: Any,
    ) -> LocalSession:
        """A worker joins, and does not wait for others: see `Ledger.join`.

        Args:
          worker: its name.
          incarnation: of this life of it; None for a new one.
          params: what it will adopt the center into; None for what comes.
          cut: ends the connection that it came over; called once the center has given
            this life up, or it has come over another connection. Must not block.
          **how: the other arguments of `Ledger.join`.

        Raises:
          CenterClosedError: no more exchanges are taken.
          TreeMismatchError: ``params`` does not belong to this center.
          NameTakenError, CenterFullError, WorkerStateError: as `Ledger.join`.
        """
        incarnation = incarnation or uuid.uuid4().hex
        with self._changed:
            self._check_open()
            if params is not None and self._store is not None:
                check.same_tree(params, self._store.like, "params", "center")
            now = time.monotonic()
            connection = self.ledger.join(worker, incarnation, now, **how)
            if connection == 1:  # what became of another life is not its to hear
                self._failures.pop(worker, None)
            self._cut(worker)
            if cut is not None:
                self._cuts[worker] = cut
            self._prune(worker)
            self._remember(worker)
            before = self.ledger.member(worker, incarnation).before
            self._settle()
        return LocalSession(self, worker, incarnation, connection, before)

    def hear(self, lives: Iterable[tuple[str, str]]) -> list[str]:
        """Signs of life, by worker and incarnation; returns which workers are there."""
        with self._changed:
            now = time.monotonic()
            there = [
                worker for worker, of in lives if self.ledger.hear(worker, of, now)
            ]
            self._settle()
            return there

    def knows(self, worker: str, incarnation: str) -> bool:
        """Whether that life of a worker is there, or may come back."""
        with self._changed:
            member = self.ledger.find(worker)
            return member is not None and member.incarnation == incarnation

    def leave(self, worker: str, incarnation: str) -> None:
        """A worker goes, over another connection than that of its session."""
        with self._changed:
            if self.ledger.leave(worker, incarnation):
                self._remember(worker)
                self._settle()

    def wait_for_barrier(self, timeout: float | None) -> bool:
        """Return whether as many workers as the barrier wants have come.

        Raises:
          CenterClosedError: no more workers will come.
        """
        return self._wait_while_open(lambda: self.ledger.is_open, timeout)

    def shift(self, adopted: PyTree, sent: PyTree) -> None:
        """A version with ``adopted`` in place of ``sent``, and all progress since."""
        # To be packed they are waited for, which nothing is under the lock.
        adopted, sent = self.store.place(adopted), self.store.place(sent)
        with self._changed:
            self.store.shift(adopted, sent)
            self.ledger.shift()
            self._settle()

    # What sessions need of it; all but `_examine` is called under the lock.

    def _examine(self, contribution: PyTree) -> _Message:
        """A contribution where the center is, and how large its message is."""
        store, refuse, size = self.store, self.ledger.refusals.refuse, None
        contribution = store.take(contribution)
        with self.reading() as version:
            norm: Any
            norm, largest = store.measure(
                contribution, version.params, elements=refuse.element is not None
            )
            if refuse.measures:
                norm = np.float32(norm)
                size = Size(float(norm), None if largest is None else float(largest))
        return _Message(contribution, norm, size, threading.Condition(self._lock))

    def _late_answer(self, worker: str, member: Member) -> Answer:
        """To an exchange whose first answer is not kept any more."""
        current, staleness = self.store.current, member.staleness or 0
        current.escaped = True  # nobody says when it has been read
        return Answer(
            member.sequence,
            current,
            staleness,
            None,
            member.applied,
            member.why,
            self._recorded(),
            self.ledger.pace(worker),
        )

    def _settle(self, *, looks: bool = False) -> None:
        """Applies whatever waits no longer, and lets go of what nobody waits for.

        Args:
          looks: whether the caller looks at what must be looked at before, once it has
            let the lock go; else a thread of its own does.
        """
        if not self._ended:  # during a look, too
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
            look.is_begun = True  # had it not been started, the next one would try

    def _begin_batch(self, batch: Batch) -> None:
        """Applies messages, unless the center must be looked at first."""
        messages = [self._messages[entry.worker] for entry in batch.entries]
        batch = self.ledger.judge(batch, [message.size for message in messages])
        prepared = None
        try:
            if batch.taken:
                looks = self.ledger.refusals.refuse.nonfinite
                norm = sum(batch.norms[i] for i in batch.taken) if looks else math.inf
                prepared = self.store.prepare(
                    *_parts(batch, messages), *_claims(batch), norm
                )
                if looks and not self.store.is_bounded(prepared):
                    self._look = _Look(batch, messages, prepared)
                    return
        except Exception as error:
            self._end_batch(batch, messages, None, _kept(error))
        else:
            self._end_batch(batch, messages, prepared)

    def _look_at(self, look: _Look) -> None:
        """Waits for what the device says of messages, and ends them; one thread does.

        The lock is not held meanwhile, so that everything else goes on. Nothing else is
        applied: turns stay as they are.
        """
        me = threading.get_ident()
        store, is_finite, known, failure = self.store, None, None, None
        try:
            with self._changed:
                if look.looker is None:
                    look.looker = me
            if look.looker == me:
                try:
                    is_finite, known = store.look(look.prepared)
                except Exception as error:
                    failure = _kept(error)
        finally:  # by Ctrl-C, too: then they still wait, and the next one looks
            with self._changed:
                if look.looker == me:
                    self._look = None
                    if is_finite is not None or failure is not None:
                        self._seen(look, store, is_finite, known, failure)
                    self._settle()
                    if self.ledger.round_grace is not None:  # rounds may end again
                        for message in self._messages.values():
                            message.over.notify_all()

    def _seen(
        self,
        look: _Look,
        store: Store,
        is_finite: bool | None,
        known: Known | None,
        failure: Exception | None,
    ) -> None:
        """Ends what has been looked at, unless the center or its workers have gone on.

        It may have been shifted meanwhile, or restored, and workers may have left: then
        the ledger is asked again what is due.
        """
        is_current = self._store is store and store.current is look.prepared.before
        batch = look.batch
        if self._ended or not is_current or not self.ledger.is_waiting(batch):
            return
        if is_finite:
            store.learn(known)
        elif failure is None:
            batch = self._not_finite(batch)
        self._end_batch(batch, look.messages, look.prepared, failure)

    def _not_finite(self, batch: Batch) -> Batch:
        """A batch, of which all that was to be applied is refused."""
        answers = self.rule.codec.answer_dtype or "unrounded"
        refusal = Refusal(
            "nonfinite",
            "with this message, or with another one of its round, the center would not "
            f"be finite any more, as it is or as workers adopt it ({answers})",
        )
        others = {batch.entries[i].worker: refusal for i in batch.taken}
        return self.ledger.refusing(batch, others)

    def _end_batch(
        self,
        batch: Batch,
        messages: list[_Message],
        prepared: Prepared | None,
        failure: Exception | None = None,
    ) -> None:
        """Applies messages, or drops or refuses them: they wait no longer."""
        store, before = self.store, self.store.current
        for entry in batch.entries:
            del self._messages[entry.worker]
        try:
            if batch.taken and failure is None:
                assert prepared is not None
                store.move(prepared)
        except Exception as error:
            failure = _kept(error)
        finally:  # by Ctrl-C, too
            for message in messages:
                message.over.notify_all()
            if failure is not None:  # whoever called, it is these workers' to hear
                for entry in batch.entries:
                    self._failures[entry.worker] = entry.sequence, failure
            if batch.taken and store.current is before:
                self.ledger.refuse(batch)
            else:
                self._answer(batch, messages, before)

    def _answer(self, batch: Batch, messages: list[_Message], before: Version) -> None:
        """Messages have been applied, dropped or refused."""
        store = self.store
        self.ledger.settle(batch, time.monotonic())
        exchange: tuple[Any, ...] = ()
        seen = []
        reads: dict[int, Any] = {}  # by the numbers of their messages
        if batch.taken and (self.observer or self._keeper):
            contributions, staleness, weights = _parts(batch, messages)
            seen = [store.unplace(contribution) for contribution in contributions]
            exchange = seen, staleness, weights, *_claims(batch)
        workers = [entry.worker for entry in batch.entries]
        recorded = self._remember(*workers, exchange=exchange)
        if self.observer is not None:
            claims = _claims(batch)[0]
            for i, contribution, claim in zip(batch.taken, seen, claims, strict=True):
                reads[i] = self.observer(contribution, claim)
        taken, current = batch.taken, store.current
        for i, entry in enumerate(batch.entries):
            refusal = batch.refused.get(entry.worker)
            why = "" if refusal is None else refusal.why
            if refusal is not None:
                _log.warning(
                    "a message of worker %r was refused: %s", entry.worker, why
                )
            if refusal is not None and refusal.is_last:
                in_a_row = self.ledger.refusals.refuse.in_a_row
                self._failures[entry.worker] = (
                    entry.sequence,
                    errors.MessageRefusedError(
                        f"worker {entry.worker!r} has sent {in_a_row} messages or more "
                        f"in a row that this center refuses, the last one because "
                        f"{why}; the center stays as it was. Start again from the "
                        "center, with a smaller learning rate or with clipping"
                    ),
                )
                continue
            # Whoever is refused starts from what others have made of the round.
            adopts_before = self.rule.adopts == "before" and i in taken
            adopted = before if adopts_before else current
            adopted.readers += 1
            self._answers[entry.worker] = Answer(
                entry.sequence,
                adopted,
                batch.staleness[i],
                messages[i].norm,
                i in taken,
                why,
                recorded,
                self.ledger.pace(entry.worker),
                (reads.get(i), messages[i].read_until(current)),
            )

    def _prune(self, worker: str) -> None:
        """Lets go of what is kept for a worker that is in another state by now."""
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

    # What of it outlives the process, if anything does.

    def _go_on(self, keeper: Keeper, params: PyTree) -> None:
        """With the center that an earlier process has left."""
        store = keeper.restore(
            self.ledger, params, self._dtype, self._device, self._packs
        )
        self.life = keeper.life
        if store is not None:
            with self._changed:
                self._begin(store, keeper.chief)

    def _begin(self, store: Store, chief: str | None) -> None:
        """Has a center from now on; nobody has seen it before it is on disk."""
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
        state = functools.partial(store.unpacked, copied)  # without the lock
        return state, self.ledger.memory(), self._chief

    def _remember(self, *workers: str, exchange: tuple[Any, ...] = ()) -> int:
        """What has happened to some workers; returns what to wait for."""
        if self._keeper is None:
            return 0
        return self._keeper.record(self.ledger.memory(workers), *exchange)

    def _recorded(self) -> int:
        return 0 if self._keeper is None else self._keeper.recorded

    def _wait_until_kept(self, recorded: int) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        with self._changed:  # a center that is closed still writes what it has
            self._changed.wait_for(lambda: keeper.is_kept(recorded) or self.failure)
            if not keeper.is_kept(recorded):
                self._check_open()

    # How it has ended: whoever asks a center that takes no more is told so here.

    @property
    def _ended(self) -> str:
        """Why no more exchanges are taken; "" as long as they are."""
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


def _parts(
    batch: Batch, messages: list[_Message]
) -> tuple[list[PyTree], list[int], list[float] | None]:
    """Contributions, staleness and weights of the messages to be applied."""
    weights = batch.weights
    return (
        [messages[i].contribution for i in batch.taken],
        [batch.staleness[i] for i in batch.taken],
        None if weights is None else [weights[i] for i in batch.taken],
    )


def _claims(batch: Batch) -> tuple[list[Claim], int]:
    """What is said of the messages to be applied, and how many workers there are."""
    return [batch.entries[i].claim for i in batch.taken], batch.workers


def _kept(error: Exception) -> Exception:
    """An error to keep: its traceback, whose frames hold arrays, as a note."""
    kept = _again(error)
    kept.add_note("".join(traceback.format_exception(error)))
    return kept


def _again(error: Exception) -> Exception:
    """An equal error to raise: what raises one is held by its traceback."""
    try:
        return copy.copy(error)
    except Exception:  # of a class that takes other arguments than it keeps
        return errors.CenterError(f"it failed: {error!r}")


@dataclasses.dataclass(eq=False)
class LocalSession(Session):
    """One life of one worker at a `Core`; made by `Core.join`.

    A server, which sends versions as they are kept, asks for an `answer` where a user
    of an embedded center collects.
    """

    _core: Core
    worker: str
    incarnation: str
    connection: int  # 1, 2, 3, ... of this life
    before: Any = None

    def submit(
        self,
        sequence: int,
        contribution: PyTree,
        *,
        anchor_version: Any,
        steps: int = 0,
        weight: float | None = None,
        reported: Mapping[str, Any] | None = None,
        anchor: PyTree = None,
    ) -> None:
        """As `Session.submit`; a contribution may be packed as the center is."""
        del reported, anchor  # its answers are whole
        core = self._core
        # Numbers of Python, as the journal writes them; what is none, the ledger says.
        sequence, steps = _as_int(sequence), _as_int(steps)
        claim = Claim(steps, weight)
        message = core._examine(contribution)
        anchor = _as_int(anchor_version)
        anchor = anchor if isinstance(anchor, int) else -1
        with core.atomically():
            core._check_open()
            now = time.monotonic()
            life = self.worker, self.incarnation
            if core.ledger.submit(*life, sequence, anchor, now, claim):
                core._messages.setdefault(self.worker, message)
                core._prune(self.worker)
            core._settle(looks=True)
            look = core._look
        if look and not (look.is_begun or look.looker):
            core._look_at(look)

    def collect(self, sequence: int, timeout: float | None = None) -> Snapshot | None:
        """As `Session.collect`."""
        answer = self.answer(sequence, timeout)
        if answer is None:
            return None
        self.wait_until_kept(answer)
        snapshot = self._core.snapshot(
            answer.version,
            staleness=answer.staleness,
            norm=answer.norm,
            applied=answer.applied,
            refused=answer.refused,
            pace=answer.pace,
        )
        jax.block_until_ready(answer.read)
        return snapshot

    def answer(self, sequence: int, timeout: float | None = None) -> Answer | None:
        """The answer to an exchange as the center keeps it; None if it still waits.

        The worker may have it, or its end at least, after `wait_until_kept`.
        """
        core, worker = self._core, self.worker
        end = math.inf if timeout is None else time.monotonic() + timeout
        with core.atomically():
            while True:
                member = core.ledger.member(worker, self.incarnation)
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
    def life(self) -> Any:
        """As `Session.life`."""
        return [self._core.life, self.incarnation]

    def wait_until_kept(self, answer: Answer) -> None:
        """Until an answer will not be forgotten: with a journal, until it is on disk.

        Raises:
          CenterClosedError: it cannot be kept.
        """
        self._core._wait_until_kept(answer.recorded)

    def replace(self, answer: Answer, params: PyTree) -> Answer:
        """The same answer with a copy of its version, which then need not be kept.

        Args:
          answer: to the last exchange; nobody reads its contribution any more.
          params: the copy, as the version keeps them.
        """
        core = self._core
        with core.atomically():
            copied = dataclasses.replace(
                answer,
                version=Version(params, answer.version.number, readers=1),
                read=None,
            )
            if core._answers.get(self.worker) is answer:
                core._answers[self.worker] = copied
                answer.version.readers -= 1
        return copied

    def acknowledge(self, sequence: int) -> None:
        """As `Session.acknowledge`."""
        with self._core.atomically():
            self._core.ledger.acknowledge(self.worker, self.incarnation, sequence)
            self._core._prune(self.worker)

    def disconnect(self) -> None:
        """As `Session.disconnect`."""
        core = self._core
        with core.atomically():
            now = time.monotonic()
            core.ledger.disconnect(self.worker, self.incarnation, self.connection, now)
            core._settle()

    def leave(self) -> None:
        """As `Session.leave`."""
        self._core.leave(self.worker, self.incarnation)


def _as_int(number: Any) -> Any:
    """A whole number of NumPy as one of Python; anything else as it is."""
    return int(number) if isinstance(number, np.integer) else number
