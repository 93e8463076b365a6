"""The center in this process: embedded default, and reference for every other."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center._departures import Departures
from agn_optax.center._ledger import Batch, Ledger, Member, Mode
from agn_optax.center._protocol import Snapshot
from agn_optax.center._store import CenterState, Store, Version
from agn_optax.center.durability import Durability, Image, Keeper
from agn_optax.rules import Rule, check_rule

PyTree = Any


@dataclasses.dataclass
class Answer:
    """The answer to one exchange, kept until its worker has it."""

    sequence: int
    version: Version  # the one that the rule adopts
    staleness: int
    norm: jax.Array | None
    applied: bool
    recorded: int = 0  # what must be on disk before its worker has it


class LocalCenter:
    """The center variable of all workers in this process, which threads may share.

    Exchanges are atomic: message, staleness, center optimizer and new version happen
    under one lock. The lock is held while programs are handed to the device, never
    while they run. Versions are immutable, so a reader keeps what it has and delays
    nobody.

    Args:
      rule: a record of `agn_optax.rules`.
      params: the first parameters, copied; None leaves it to a chief to `initialize`
        them.
      dtype: floating dtype of the center and its optimizer; None keeps that of the
        parameters. float32 under workers with bfloat16 parameters is a master copy.
      device: where the center lives; None leaves it where its first parameters are.
      mode: when messages are applied: `agn_optax.center.Asynchronous` (the default),
        `BoundedStaleness` or `Synchronous`.
      barrier: workers that must have joined before any of them starts.
      max_workers: workers that may be there at a time; None for any number.
      lease: seconds after which a worker that lost its connection is given up; workers
        in this process have none to lose.
      refuse_nonfinite: refuses messages with NaN or infinite elements, for which it
        must wait for the device; else they are applied.
      durability: `agn_optax.center.Journal` or `Snapshots`, with a directory in which
        the center outlives its process. What is found there goes on, and ``params`` are
        the first ones only where nothing is. None keeps the center in memory.
      packs: keeps the parameters in two arrays, where the rule does the same to all
        elements, so that an exchange over a wire costs nothing per leaf; `pull` then
        takes them apart. Their numbers are the same.

    Attributes:
      life: of this center; a center that goes on where an earlier process left it, with
        nothing lost, has the same.

    Raises:
      InvalidTypeError: ``rule`` is not a rule, or ``mode`` not a mode.
      InvalidArgumentError: another setting is out of range.
      TreeMismatchError: ``params`` has leaves that are not real floating arrays, or the
        center that was found is of another model.
      RuleMismatchError: the center that was found is one of another rule.
      DurabilityError: what was found cannot be read, or nothing can be written.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> center = agn_optax.LocalCenter(rule, jnp.array([1.0, 2.0]))
      >>> worker = agn_optax.Worker(center, optax.sgd(0.5), period=2)
      >>> params, state = worker.start()
      >>> for _ in range(2):
      ...     updates, state = worker.tx.update(jnp.ones(2), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     params, state = worker.exchange(params, state)
      >>> print(center.pull().params, center.pull().version)
      [0. 1.] 1
    """

    def __init__(
        self,
        rule: Rule,
        params: PyTree = None,
        *,
        dtype: Any = None,
        device: Any = None,
        mode: Mode | None = None,
        barrier: int = 0,
        max_workers: int | None = None,
        lease: float = 10.0,
        refuse_nonfinite: bool = False,
        durability: Durability | None = None,
        packs: bool = False,
    ) -> None:
        check_rule(rule)
        self.rule = rule
        self._dtype = check.float_dtype(dtype, "dtype")
        self._device = device
        self._packs = packs
        self._refuse_nonfinite = refuse_nonfinite
        self._changed = threading.Condition()
        self._store: Store | None = None
        self._ledger = Ledger(
            mode, lease=lease, max_workers=max_workers, barrier=barrier
        )
        self._contributions: dict[str, tuple[PyTree, Any]] = {}  # and norm, by worker
        self._answers: dict[str, Answer] = {}
        # Sequence and contribution of an exchange whose end its thread did not see.
        self._interrupted: dict[str, tuple[int, PyTree]] = {}
        self._departures = Departures()
        self._observers: list[Callable[[PyTree], None]] = []
        self._closed = ""
        # Who initialized: "" is whoever made this center, None (after a restore) nobody
        # in this life.
        self._chief: str | None = None
        self.life = uuid.uuid4().hex
        self._keeper: Keeper | None = None
        if durability is not None:
            self._keeper = Keeper(durability, self._changed, self.life)
        try:
            self._go_on(params)
            if params is not None and self._store is None:
                self.initialize_unseen(params, worker="")
        except BaseException:
            self.close("it could not be made")
            raise

    @classmethod
    def restore(cls, rule: Rule, saved: CenterState, **settings: Any) -> LocalCenter:
        """A center that goes on where `save` was called.

        Args:
          rule: the rule of the saved center; its optimizer must have the same state.
          saved: what `save` returned, or its arrays read back from a checkpoint.
          **settings: of the center, as when it is made.

        Returns:
          A center at the saved version, which further exchanges take where the saved
          one would have gone, bit for bit.

        Raises:
          TreeMismatchError: the saved state is not one of this rule's center optimizer.
          InvalidArgumentError: the saved version is negative.
          AlreadyInitializedError: there is a center in the directory of a durability
            that is one of the settings.

        Example:
          >>> import jax.numpy as jnp, agn_optax
          >>> center = agn_optax.LocalCenter(agn_optax.rules.diloco(), jnp.ones(2))
          >>> agn_optax.LocalCenter.restore(center.rule, center.save()).version
          0
        """
        center = cls(rule, **settings)
        if center.is_initialized:
            center.close("it is another one")
            raise errors.AlreadyInitializedError(
                f"there is a center in {settings['durability'].directory} already; "
                "restore the saved one in another directory"
            )
        try:
            with center._changed:
                store = Store.restore(rule, saved, packs=center._packs)
                center._begin(store)
        except BaseException:
            center.close("it could not be restored")
            raise
        return center

    def save(self) -> CenterState:
        """A copy of everything that the center is, consistent, for a checkpoint."""
        with self._changed:
            return self._initialized().save()

    @property
    def mode(self) -> Mode:
        """When messages are applied."""
        return self._ledger.mode

    @property
    def lease(self) -> float:
        """Seconds after which a worker that lost its connection is given up."""
        return self._ledger.lease

    @property
    def barrier(self) -> int:
        """Workers that must have joined before any of them starts."""
        return self._ledger.barrier

    @property
    def like(self) -> PyTree:
        """The tree of parameters, abstract."""
        return self._initialized().like

    @property
    def is_packed(self) -> bool:
        """Whether versions and contributions are kept packed."""
        return self._initialized().layout.packs

    @property
    def is_initialized(self) -> bool:
        """Whether the center has parameters."""
        return self._store is not None

    @property
    def version(self) -> int:
        """Exchanges applied so far."""
        return self._initialized().current.number

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives the center its first parameters: see `Center.initialize`."""
        with self._changed:
            self.initialize_unseen(params, worker=worker)
            return self.pull()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once it is initialized: see `Center.wait`."""
        if not self.wait_until_initialized(timeout):
            raise errors.NotInitializedError(
                f"no chief has initialized this center within {timeout} s; start "
                "one worker with start(params, chief=True)"
            )
        return self.pull()

    def wait_until_initialized(self, timeout: float | None) -> bool:
        """Whether the center has parameters, now or within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_initialized, timeout)

    def pull(self) -> Snapshot:
        """The center as it is: ``.params`` and ``.version``, at any time."""
        with self._changed:
            version = self._initialized().current
            version.escaped = True
            return Snapshot(self._initialized().tree(version), version.number)

    def join(
        self, worker: str, params: PyTree = None, *, timeout: float | None = None
    ) -> None:
        """A worker is there: see `Center.join`.

        Names are not checked: a worker takes the name from an earlier one, for in one
        process nobody can tell whether that still runs.
        """
        with self._changed:
            self._departures.add(worker)
            self._ledger.leave(worker, "")  # with a message that still waits
            self.enter(worker, "", params, replace=True)
            if not self._changed.wait_for(lambda: self._ledger.is_open, timeout):
                self.leave(worker)
                there = len(self._ledger.present())
                raise errors.NotInitializedError(
                    f"worker {worker!r} waited {timeout} s for {self.barrier} workers "
                    f"to start together, and {there} others are there"
                )

    def leave(self, worker: str) -> None:
        """A worker goes: see `Center.leave`."""
        self.exit(worker, "")

    def exchange(
        self,
        contribution: PyTree,
        *,
        anchor_version: int,
        worker: str,
        steps: int = 0,
    ) -> Snapshot:
        """Applies what a worker contributes: see `Center.exchange`."""
        del steps
        given, departures = contribution, self._departures.number(worker)
        contribution, norm = self._examine(given)
        with self._changed:
            self._departures.check(worker, departures)
            member = self._ledger.members.get(worker)
            if member is None or member.gone or not member.connected:
                self._ledger.join(worker, "", time.monotonic())
                member = self._ledger.members[worker]
            if worker in self._contributions:
                raise errors.WorkerStateError(
                    f"worker {worker!r} has an exchange that waits; it can have one"
                )
            life, sequence = member.incarnation, member.sequence
            begun, interrupted = self._interrupted.pop(worker, (0, None))
            try:
                # One that was applied before it was interrupted is only answered.
                if begun != sequence or interrupted is not given:
                    sequence += 1
                    self._submit(
                        contribution, norm, anchor_version, worker, life, sequence
                    )
                answer = self._collect(worker, life, sequence, None)
                assert answer is not None
                self.wait_until_kept(answer)
            except BaseException:
                self._interrupted[worker] = (sequence, given)
                self._ledger.pending.pop(worker, None)
                self._contributions.pop(worker, None)
                raise
            answer.version.escaped = True
            self._forget(worker)
            return Snapshot(
                self._initialized().tree(answer.version),
                answer.version.number,
                answer.staleness,
                answer.norm,
                answer.applied,
            )

    # For a site of a tree of centers: see `Uplink`.

    def initialize_from(self, params: PyTree) -> None:
        """Parameters from above, if there are none; a chief then adopts them."""
        with self._changed:
            if self._store is None:
                self.initialize_unseen(params, worker="")
                self._chief = None

    def observe(self, observer: Callable[[PyTree], None]) -> None:
        """Has ``observer`` see every contribution that is applied from now on."""
        with self._changed:
            self._observers.append(observer)

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Whether ``condition`` holds, now or within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def atomically(self) -> threading.Condition:
        """Around what nobody may come between; observers are called within it."""
        return self._changed

    def shift(self, adopted: PyTree, sent: PyTree) -> None:
        """A version with ``adopted`` in place of ``sent``, and all progress since."""
        with self._changed:
            self._initialized().shift(adopted, sent)
            self._ledger.shift()
            self._settle()

    # For a server: workers with incarnations, and exchanges that may be repeated.

    def initialize_unseen(self, params: PyTree, *, worker: str) -> int:
        """The same as `initialize`; returns the version's number alone.

        So nobody has seen the version, and the first exchange may move it in place.
        """
        check.float_leaves(params, "params")
        with self._changed:
            if self._store is not None and self._chief not in (None, worker):
                by = f"worker {self._chief!r}" if self._chief else "whoever made it"
                raise errors.AlreadyInitializedError(
                    f"worker {worker!r} wants to initialize a center that {by} has "
                    "initialized; start it with chief=False, and it adopts the center"
                )
            first = self._chief
            self._chief = worker
            if self._store is None:
                try:
                    store = Store(
                        self.rule,
                        params,
                        self._dtype,
                        self._device,
                        packs=self._packs,
                    )
                    self._begin(store)
                except BaseException:
                    self._chief = first
                    raise
            return self.version

    def enter(
        self,
        worker: str,
        incarnation: str,
        params: PyTree = None,
        *,
        replace: bool = False,
    ) -> None:
        """A worker joins, and does not wait for others: see `Ledger.join`."""
        with self._changed:
            self._check_open()
            if params is not None and self._store is not None:
                check.same_tree(params, self._store.like, "params", "center")
            self._ledger.join(worker, incarnation, time.monotonic(), replace=replace)
            self._remember(worker)
            self._settle()

    def exit(self, worker: str, incarnation: str) -> None:
        """A worker leaves: see `Ledger.leave`."""
        with self._changed:
            self._departures.add(worker)
            self._ledger.leave(worker, incarnation)
            self._remember(worker)
            self._settle()

    def disconnect(self, worker: str, incarnation: str) -> None:
        """A worker lost its connection: see `Ledger.disconnect`."""
        with self._changed:
            self._ledger.disconnect(worker, incarnation, time.monotonic())
            self._settle()

    def wait_for_barrier(self, timeout: float) -> bool:
        """Whether as many workers as the barrier wants have come."""
        with self._changed:
            self._changed.wait_for(lambda: self._ledger.is_open, timeout)
            return self._ledger.is_open

    def submit(
        self,
        contribution: PyTree,
        *,
        anchor_version: int,
        worker: str,
        incarnation: str,
        sequence: int,
    ) -> None:
        """Hands in an exchange; `collect` has its answer. Repeated, it does nothing.

        A contribution may be packed as the center is.
        """
        contribution, norm = self._examine(contribution, may_be_packed=True)
        with self._changed:
            self._submit(
                contribution, norm, anchor_version, worker, incarnation, sequence
            )

    def collect(
        self,
        worker: str,
        incarnation: str,
        sequence: int,
        *,
        timeout: float,
    ) -> Answer | None:
        """The answer to an exchange that was handed in; None if it still waits.

        The worker may have it, or its end at least, after `wait_until_kept`.
        """
        with self._changed:
            return self._collect(worker, incarnation, sequence, timeout)

    def tree(self, version: Version) -> PyTree:
        """The parameters of a version that somebody reads."""
        return self._initialized().tree(version)

    def wait_until_moved(self) -> None:
        """Until the device has made the current version, and read all messages."""
        with self.reading() as version:
            jax.block_until_ready(version.params)

    def wait_until_kept(self, answer: Answer) -> None:
        """Until an answer will not be forgotten: with a journal, until it is on disk.

        Raises:
          CenterClosedError: it cannot be kept.
        """
        self._wait_until_kept(answer.recorded)

    def detach(self, worker: str, answer: Answer, params: PyTree) -> Answer:
        """The same answer with a copy of its version, which may then be written over.

        Args:
          worker: whose answer it is.
          answer: to its last exchange.
          params: the copy, as the version keeps them.
        """
        with self._changed:
            copied = dataclasses.replace(
                answer, version=Version(params, answer.version.number, readers=1)
            )
            if self._answers.get(worker) is answer:
                self._answers[worker] = copied
                answer.version.readers -= 1
        return copied

    def acknowledge(self, worker: str, incarnation: str, sequence: int) -> None:
        """A worker has its answer, which need not be kept."""
        with self._changed:
            self._ledger.acknowledge(worker, incarnation, sequence)
            self._prune()

    def close(self, reason: str = "this center has been closed") -> None:
        """Takes no more exchanges; those that wait are told so, and nothing is lost.

        With a ``durability``, writes down what is not yet on disk, and lets go of the
        directory.
        """
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()
        if self._keeper is not None:
            self._keeper.close()

    def wait_until_closed(self) -> None:
        """Until no more exchanges are taken, for whatever reason."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.failure)

    @property
    def failure(self) -> str:
        """Why this center cannot be kept on disk any more; "" while all is well."""
        return "" if self._keeper is None else self._keeper.failure

    def members(self) -> tuple[int | None, dict[str, Member], set[str]]:
        """Version (None: not initialized), workers that are there, and who waits."""
        with self._changed:
            self._ledger.expire(time.monotonic())
            version = None if self._store is None else self._store.current.number
            members = {
                name: dataclasses.replace(member)
                for name, member in self._ledger.present().items()
            }
            return version, members, set(self._ledger.pending)

    @contextmanager
    def reading(self, *, kept: bool = False) -> Iterator[Version]:
        """The current version, which stays what it is meanwhile.

        With ``kept``, for those whom the news may outlive: waits until all that is in
        it is on disk, if exchanges do.
        """
        with self._changed:
            version = self._initialized().current
            version.readers += 1
            recorded = self._recorded()
        try:
            if kept:
                self._wait_until_kept(recorded)
            yield version
        finally:
            with self._changed:
                version.readers -= 1

    def _examine(
        self, contribution: PyTree, *, may_be_packed: bool = False
    ) -> tuple[PyTree, jax.Array]:
        """A contribution where the center is, and the norm of its message."""
        with self._changed:
            store = self._initialized()
            if not (may_be_packed and store.layout.holds(contribution)):
                store.check(contribution)
            contribution = store.place(contribution)
        with self.reading() as version:
            norm: Any = store.norm(contribution, version.params)
            if self._refuse_nonfinite:
                norm = np.float32(norm)
                if not math.isfinite(norm):
                    raise errors.MessageRefusedError(
                        f"the message is not finite (its norm is {norm}); the center "
                        "stays as it was. Start again from the center, with a smaller "
                        "learning rate or with clipping"
                    )
        return contribution, norm

    def _submit(
        self,
        contribution: PyTree,
        norm: Any,
        anchor_version: int,
        worker: str,
        incarnation: str,
        sequence: int,
    ) -> None:
        self._check_open()
        is_int = isinstance(anchor_version, int | np.integer)
        if self._ledger.submit(
            worker,
            incarnation,
            sequence,
            int(anchor_version) if is_int else -1,
            time.monotonic(),
        ):
            self._contributions.setdefault(worker, (contribution, norm))
            self._forget(worker)
        self._settle()

    def _collect(
        self,
        worker: str,
        incarnation: str,
        sequence: int,
        timeout: float | None,
    ) -> Answer | None:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            member = self._ledger.members.get(worker)
            if member is None or member.incarnation != incarnation:
                return self._late_answer(worker, incarnation, sequence)
            answer = self._answers.get(worker)
            if answer is not None and answer.sequence == sequence:
                return answer
            if worker not in self._contributions:
                return self._late_answer(worker, incarnation, sequence)
            self._check_open()
            now = time.monotonic()
            if now >= end:
                return None
            deadline = self._ledger.deadline()
            until = end if deadline is None else min(end, deadline)
            self._changed.wait(None if until == math.inf else max(0.0, until - now))
            self._settle()

    def _late_answer(self, worker: str, incarnation: str, sequence: int) -> Answer:
        """To an exchange whose first answer is not kept any more."""
        member = self._ledger.members.get(worker)
        if (
            member is None
            or member.incarnation != incarnation
            or member.sequence != sequence
        ):
            raise errors.WorkerStateError(
                f"exchange {sequence} of worker {worker!r} waits no longer: the worker "
                "was given up, or replaced by another one of that name"
            )
        current = self._initialized().current
        current.escaped = True  # nobody says when it has been read
        return Answer(
            sequence,
            current,
            member.staleness or 0,
            None,
            member.applied,
            self._recorded(),
        )

    def _settle(self) -> None:
        """Applies whatever waits no longer."""
        while (
            not (self._closed or self.failure)
            and (batch := self._ledger.take(time.monotonic())) is not None
        ):
            self._apply(batch)
        self._prune()
        self._changed.notify_all()

    def _apply(self, batch: Batch) -> None:
        store = self._initialized()
        waiting = [self._contributions.pop(entry.worker) for entry in batch.entries]
        adopted = store.current
        exchange: tuple[Any, ...] = ()
        seen: list[PyTree] = []
        if batch.applies:
            # The center optimizer gets the staleness of a single message; those of a
            # round are weighed one by one.
            staleness = batch.staleness[0] if len(batch.entries) == 1 else 0
            contributions = [contribution for contribution, _ in waiting]
            before, after = store.apply(contributions, batch.weights, staleness)
            if self._observers or self._keeper is not None:
                seen = [store.unplace(each) for each in contributions]
                exchange = (seen, batch.weights, staleness)
            adopted = before if self.rule.adopts == "before" else after
        self._ledger.settle(batch)
        workers = [entry.worker for entry in batch.entries]
        recorded = self._remember(*workers, exchange=exchange)
        for observer in self._observers:
            for contribution in seen:
                observer(contribution)
        for entry, staleness, (_, norm) in zip(
            batch.entries, batch.staleness, waiting, strict=True
        ):
            self._forget(entry.worker)
            adopted.readers += 1
            self._answers[entry.worker] = Answer(
                entry.sequence, adopted, staleness, norm, batch.applies, recorded
            )

    def _forget(self, worker: str) -> None:
        answer = self._answers.pop(worker, None)
        if answer is not None:
            answer.version.readers -= 1

    def _prune(self) -> None:
        """Drops the answers that nobody waits for, and messages that are withdrawn."""
        members, pending = self._ledger.members, self._ledger.pending
        for worker, answer in list(self._answers.items()):
            member = members[worker]
            replaced = member.sequence != answer.sequence  # by another life
            if member.gone or replaced or member.acknowledged >= answer.sequence:
                self._forget(worker)
        for worker in self._contributions.keys() - pending.keys():
            del self._contributions[worker]

    # What of it outlives the process, if anything does.

    def _go_on(self, params: PyTree) -> None:
        """With the center that an earlier process has left."""
        if self._keeper is None:
            return
        store = self._keeper.restore(
            self.rule, self._ledger, params, self._dtype, self._device, self._packs
        )
        if store is not None:
            self.life, self._chief = self._keeper.life, self._keeper.chief
            with self._changed:
                self._begin(store)

    def _begin(self, store: Store) -> None:
        """Has a center from now on; nobody has seen it before it is on disk."""
        self._store, self._ledger.version = store, store.current.number
        try:
            if self._keeper is not None:
                self._keeper.begin(self.rule, self._image)
        except BaseException:
            self._store = None
            raise
        self._changed.notify_all()

    def _image(self) -> Image:
        return Image(self._initialized().save(), self._ledger.memory(), self._chief)

    def _remember(self, *workers: str, exchange: tuple[Any, ...] = ()) -> int:
        """What has happened to some workers; returns what to wait for."""
        known = [each for each in workers if each in self._ledger.members]
        if self._keeper is None or not known:
            return 0
        return self._keeper.record(self._ledger.memory(known), *exchange)

    def _recorded(self) -> int:
        return 0 if self._keeper is None else self._keeper.recorded

    def _wait_until_kept(self, recorded: int) -> None:
        keeper = self._keeper
        if keeper is not None:
            with self._changed:
                self._changed.wait_for(lambda: keeper.is_kept(recorded))

    def _check_open(self) -> None:
        if self.failure:
            raise errors.CenterClosedError(self.failure)
        if self._closed:
            raise errors.CenterClosedError(self._closed)

    def _initialized(self) -> Store:
        if self._store is None:
            raise errors.NotInitializedError(
                "this center has no parameters yet: start one worker with "
                "start(params, chief=True), or give the center its parameters"
            )
        return self._store
