"""Workers of several processes: their pieces are assembled to whole messages.

Every process has a connection of its own. The core sees one session for all of them,
and one message for each exchange, once all pieces are there. All processes get their
pieces of one version. They agree among themselves whether all have got them; otherwise
all begin the exchange anew, with the next number of `Submission.attempt`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agn_optax import errors
from agn_optax.center import (
    Core,
    KeptAnswer,
    LocalSession,
    Share,
    Submission,
)
from agn_optax.service.server._center_frames import CenterFrames
from agn_optax.service.server._whole import WholeTree, check_cover, check_regions
from agn_optax.service.wire._buffers import Buffers

PyTree = Any
Key = tuple[int, int]  # sequence number of an exchange, and its attempt


class Groups:
    """The groups of processes that have resumed one session after the other.

    If one process of a group is killed, the others may live on for minutes. Then they
    must not take the session back, or end it.

    Args:
      max_workers: number of workers whose groups are kept.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        # By worker: the session id, and the groups, of which the last one has it.
        self._known: dict[str, tuple[str, list[str]]] = {}

    def check(self, worker: str, session_id: str, group: str) -> None:
        """Check that a group may join.

        Raises:
          WorkerStateError: another group has resumed the session.
        """
        if group in self._of(worker, session_id)[:-1]:
            raise errors.WorkerStateError(
                f"other processes have resumed the session of worker {worker!r}: end "
                "these"
            )

    def join(self, worker: str, session_id: str, group: str) -> None:
        """Record that a group has joined; "" for a worker of one process."""
        known = self._of(worker, session_id)
        if group or known:
            others = [other for other in known if other not in ("", group)]
            self._known[worker] = session_id, [*others, group]
        if len(self._known) > self._max_workers:
            del self._known[next(iter(self._known))]

    def may_leave(self, worker: str, session_id: str, group: str) -> bool:
        """Return whether no other group has resumed the session."""
        known = self._of(worker, session_id)
        return not known or group == known[-1]

    def _of(self, worker: str, session_id: str) -> list[str]:
        known_session, groups = self._known.get(worker, ("", []))
        return groups if known_session == session_id else []


class Assembly:
    """The processes of one worker, in one session.

    Args:
      core: the core of the center.
      frames: the center as frames.
      buffers: buffers for whole messages.
      worker: the worker's name.
      session_id: the session id.
      share: the share of one of its processes.

    Attributes:
      group, processes, worker, session_id, frames: as given.
      is_closed: whether the session has ended or was replaced.
    """

    def __init__(
        self,
        core: Core,
        frames: CenterFrames,
        buffers: Buffers,
        worker: str,
        session_id: str,
        share: Share,
    ) -> None:
        self.group, self.processes = share.group, share.processes
        self.is_closed = False
        self.worker, self.session_id = worker, session_id
        self.frames = frames
        self._core, self._buffers = core, buffers
        self._changed = threading.Condition()
        self._session: LocalSession
        self._joins = 0  # number of joins of all processes
        self._closers: dict[int, Callable[[], None]] = {}  # by process
        self._shares: dict[int, Share] = {}  # by process, of all that have joined
        self._checking, self._is_checked = threading.Lock(), False
        self._notices: dict[int, Mapping[str, str]] = {}  # the last ones, by process
        # The exchange under way.
        self._key: Key = (-1, 0)
        self._about: Submission | None = None  # plain fields, equal in all processes
        self._whole: WholeTree | None = None
        self._arriving: dict[int, object] = {}  # parts that send, by process
        self._writing: set[int] = set()  # processes whose pieces are being written
        self._written: set[int] = set()  # processes whose pieces have been
        self._arrived: set[int] = set()
        self._is_submitted = False  # whether the core has the whole message
        self._acknowledged: set[int] = set()
        self._kept: KeptAnswer | None = None
        self._failure: Exception | None = None

    def join(
        self, share: Share, close_connection: Callable[[], None], **how: Any
    ) -> None:
        """Let a process join, or join again after its connection broke.

        Arguments other than ``share`` are those of `Core.join`.
        """
        if share.processes != self.processes:
            raise errors.WorkerStateError(
                f"the processes of worker {self.worker!r} disagree about their number: "
                f"{share.processes} and {self.processes}"
            )
        with self._changed:
            if self._shares.get(share.process, share) != share:
                raise errors.WorkerStateError(
                    f"process {share.process} of worker {self.worker!r} has joined "
                    "again with other regions; start() again with all processes"
                )
            self._joins += 1
            number = self._joins
            close_old = self._closers.get(share.process)
        session = self._core.join(
            self.worker,
            self.session_id,
            close_connection=functools.partial(self._close, number),
            **how,
        )
        with self._changed:
            self._session = session
            self._shares[share.process] = share
            self._closers[share.process] = close_connection
            self._changed.notify_all()
        if close_old is not None:
            close_old()

    def _close(self, number: int) -> None:
        """Close all connections, because the session has ended or was replaced."""
        # Called under the core's lock, which threads take that hold this object's lock.
        if number == self._joins:  # else a process has joined again
            self.is_closed = True
            self._whole = self._kept = self._failure = None
            for close in [*self._closers.values()]:
                close()

    def disconnect(self, process: int, closer: Callable[[], None]) -> None:
        """Report that a process has lost its newest connection."""
        with self._changed:
            is_newest = self._closers.get(process) is closer
            if is_newest:
                del self._closers[process]  # it keeps the connection in memory
        if is_newest:
            self._session.disconnect()

    def wait_for_processes(self, timeout: float) -> list[int]:
        """Wait until all processes have joined; return those that have not in time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._shares) == self.processes, timeout)
            return [i for i in range(self.processes) if i not in self._shares]

    def check(self) -> None:
        """Check the shares of all processes against the center's tree, once.

        After a restart of the center some may not have joined again.

        Raises:
          InvalidArgumentError: they do not cover each leaf once.
        """
        with self._checking:
            if self._is_checked:
                return
            shares, schema = [*self._shares.values()], self.frames.schemas.center
            for share in shares:
                check_regions(share, schema)
            if len(shares) == self.processes:
                check_cover([share.owned for share in shares], schema)
                self._is_checked = True

    def add_notices(self, process: int, texts: Mapping[str, str]) -> dict[str, str]:
        """Keep a process's notices, and return those of all processes, by check.

        If several processes have the same notice, it is that of the first of them.
        """
        with self._changed:
            self._notices[process] = texts
            return {
                check: f"process {number}: {text}"
                for number, found in sorted(self._notices.items(), reverse=True)
                for check, text in found.items()
            }

    # An exchange.

    def begin(self, process: int, key: Key, part: object) -> None:
        """Record that a part of this begins to receive a process's pieces.

        Raises:
          WorkerStateError: the other processes have gone on to a later exchange.
        """
        with self._changed:
            if key < self._key:
                raise errors.WorkerStateError(
                    f"process {process} of worker {self.worker!r} is at exchange "
                    f"{key[0]}, and others at {self._key[0]}: all processes must make "
                    "the same calls"
                )
            if key > self._key:
                self._key, self._about, self._whole = key, None, None
                self._arriving, self._written, self._arrived = {}, set(), set()
                self._is_submitted = False
                self._acknowledged = set()
                self._kept = self._failure = None
            self._arriving[process] = part
            self._changed.notify_all()

    def end(self, process: int, part: object) -> None:
        """Record that a part receives no more: its connection may have broken."""
        with self._changed:
            if self._arriving.get(process) is part:
                del self._arriving[process]

    @contextlib.contextmanager
    def writing(self, process: int, key: Key, dtype: str) -> Iterator[WholeTree | None]:
        """Lend the whole message within the block, to write a process's pieces.

        Lend None if these are not needed: they are there, or the exchange is over. A
        connection that was replaced has ended before the next one may write.

        Args:
          process: the process.
          key: the exchange.
          dtype: dtype of its message, see `center.proto`.

        Raises:
          InvalidArgumentError: another process has sent another dtype.
        """
        is_over = key[0] <= self._session.completed()
        with self._changed:
            self._changed.wait_for(lambda: process not in self._writing)
            whole = None
            is_needed = self._key == key and process not in self._written
            if is_needed and not (is_over or self.is_closed or self._failure):
                schema = self.frames.assembled_schema(dtype)
                whole = self._whole = self._whole or WholeTree(schema, self._buffers)
                if whole.schema.hash != schema.hash:
                    raise self._disagreement(
                        f"dtypes are {[*schema.dtypes]} and {[*whole.schema.dtypes]}"
                    )
            self._writing.add(process)
        try:
            yield whole
            with self._changed:
                if whole is not None and whole is self._whole:
                    self._written.add(process)
        finally:
            with self._changed:
                self._writing.discard(process)
                self._changed.notify_all()

    def add(self, share: Share, key: Key, submission: Submission) -> None:
        """Record that a process's pieces are there; the last one submits the message.

        Raises:
          WorkerStateError: another process gave other numbers for the same exchange.
        """
        is_over = key[0] <= self._session.completed()
        with self._changed:
            if self._failure is not None and self._key == key:
                raise copy.copy(self._failure)
            is_known = self._kept or share.process in self._arrived
            if self.is_closed or self._key != key or is_known:
                return
            about = submission.without_arrays()
            self._about = self._about or about
            if difference := _difference(about, self._about):
                raise self._disagreement(difference)
            self._arrived.add(share.process)
            is_last = len(self._arrived) == self.processes and not is_over
            whole, self._whole = self._whole, None if is_last else self._whole
        if is_last and not self.is_closed:
            whole = whole or WholeTree(self.frames.assembled_schema(""), self._buffers)
            contribution = self.frames.assembled(whole.schema, whole.buffer)
            try:
                self.check()
                self._session.submit(submission._replace(contribution=contribution))
            except Exception as error:
                with self._changed:
                    self._fail(error)
                raise
            with self._changed:
                self._is_submitted = self._key == key
                self._changed.notify_all()

    def _disagreement(self, difference: str) -> errors.InvalidArgumentError:
        """Let the exchange fail, because its processes differ; return the error."""
        error = errors.InvalidArgumentError(
            f"the processes of worker {self.worker!r} disagree about exchange "
            f"{self._key[0]}: {difference}"
        )
        self._fail(error)
        return error

    def fail(self, key: Key, error: Exception) -> None:
        """Let an exchange fail in all processes."""
        with self._changed:
            if self._key == key:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        # A copy, because a raised error keeps frames and their arrays.
        self._failure = self._failure or copy.copy(error)
        self._changed.notify_all()

    def answer(self, key: Key, timeout: float) -> KeptAnswer | None:
        """Return the answer, the same for all processes; None if there is none yet."""
        sequence = key[0]
        with self._changed:
            self._changed.wait_for(lambda: self._is_whole(key), timeout)
            if self._key != key:
                raise errors.WorkerStateError(
                    f"the processes of worker {self.worker!r} have gone on from "
                    f"exchange {sequence}"
                )
            if self._failure is not None:
                raise copy.copy(self._failure)
            if self._kept is not None:
                return self._kept
            if not self._is_whole(key):
                self._core.check_open()
                return None
        if sequence:
            kept = self._session.answer(sequence, timeout)
        else:
            is_there = self._core.wait_until_initialized(timeout)
            kept = self._session.current() if is_there else None
        with self._changed:
            if self._key == key:
                self._kept = self._kept or kept
                return self._kept
        return kept

    def _is_whole(self, key: Key) -> bool:
        """Return whether nobody waits for pieces of an exchange."""
        if self._key != key or self._failure or self._kept:
            return True
        return self._is_submitted or key[0] <= self._session.completed()

    def missing(self, key: Key) -> list[int]:
        """Return the processes that have not sent their pieces, and do not send."""
        with self._changed:
            if self._is_whole(key):
                return []
            known = self._arrived | self._arriving.keys()
            return [i for i in range(self.processes) if i not in known]

    def acknowledge(self, process: int, sequence: int) -> None:
        """Release the answer once all processes have acknowledged it."""
        with self._changed:
            if self._key[0] != sequence:
                return
            self._acknowledged.add(process)
            if len(self._acknowledged) < self.processes:
                return
            self._kept = None
        self._session.acknowledge(sequence)

    def wait_until_kept(self, kept: KeptAnswer) -> None:
        """Wait until an answer is on disk: see `LocalSession.wait_until_kept`."""
        self._session.wait_until_kept(kept)


def _difference(one: Submission, other: Submission) -> str:
    pairs = zip(one._fields, one, other, strict=True)
    return ", ".join(f"{name} is {a} and {b}" for name, a, b in pairs if a != b)
