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
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax.center import (
    Answer,
    Core,
    KeptAnswer,
    LocalSession,
    Region,
    Share,
    Submission,
    Version,
    outside,
    uncovered,
)
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule
from agn_optax.service import center_pb2 as pb
from agn_optax.service.security._call_limits import CHIEF_TIMEOUT
from agn_optax.service.server._center_frames import CenterFrames
from agn_optax.service.wire import _pieces, _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import Frame, FrameReader
from agn_optax.service.wire._schema import Schema
from agn_optax.service.wire._submission import snapshot_of

PyTree = Any
Key = tuple[int, int]  # sequence number of an exchange, and its attempt


class Whole:
    """A buffer in which the pieces of a whole tree are put together.

    Args:
      schema: schema of the tree.
      buffers: where the buffer is taken from.
    """

    def __init__(self, schema: Schema, buffers: Buffers) -> None:
        self.schema = schema
        self.buffer = buffers.take(schema.size)
        schema.clear_gaps(self.buffer)
        self.views = schema.views(self.buffer)

    def places(self, regions: Sequence[Region]) -> list[np.ndarray]:
        """Return views of regions, whose leaves are numbered as in the schema."""
        return [self.views[region.leaf][region.slices] for region in regions]

    def write(self, regions: Sequence[Region], arrays: Sequence[Any]) -> None:
        """Write arrays to their regions."""
        for place, array in zip(self.places(regions), arrays, strict=True):
            place[...] = array


class FirstParameters:
    """The first parameters of a center, while a chief's processes send their pieces.

    Args:
      buffers: buffers.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._changed = threading.Lock()
        self._group = ""  # id of the chief's processes
        self._received = -math.inf  # time when its last pieces came; monotonic seconds
        self._whole: Whole | None = None
        self._owned: dict[int, tuple[Region, ...]] = {}  # by process

    @property
    def is_empty(self) -> bool:
        """True if no process waits for others of its chief."""
        return self._whole is None

    def forget(self) -> None:
        """Release the pieces of a chief that has failed."""
        self._whole = None

    def places(self, share: Share, schema: Schema) -> list[np.ndarray]:
        """Return the arrays into which a process's pieces are received.

        Raises:
          CenterBusyError: another chief is sending its first parameters.
          InvalidArgumentError: other processes have parameters of another schema.
        """
        now = time.monotonic()
        with self._changed:
            if self._group != share.group or self._whole is None:
                if self._whole is not None and now - self._received < CHIEF_TIMEOUT:
                    raise other_chief()
                self._group, self._owned = share.group, {}
                self._whole = Whole(schema, self._buffers)
            if difference := schema.difference(
                self._whole.schema,
                f"process {share.process} has",
                "another process has",
            ):
                self._whole = None
                raise errors.InvalidArgumentError(
                    "the processes of a chief disagree about the parameters: "
                    f"{difference}"
                )
            self._received = now
            return self._whole.places(share.owned)

    def add(self, share: Share) -> PyTree:
        """Record that a process's pieces are there; return the parameters once all are.

        Raises:
          InvalidArgumentError: the shares do not cover each leaf once.
        """
        with self._changed:
            whole, self._received = self._whole, time.monotonic()
            if self._group != share.group or whole is None:
                return None
            self._owned[share.process] = share.owned
            if len(self._owned) < share.processes:
                return None
            self._whole = None
            _check_cover(self._owned.values(), whole.schema)
        return _trees.build(whole.schema, whole.views)


def other_chief() -> errors.CenterBusyError:
    """Return the error of a chief that comes while another one sends.

    The client retries until its timeout, because the other chief may fail.
    """
    return errors.CenterBusyError(
        "another worker is initializing this center; try again"
    )


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
        self.is_closed = False  # whether its session has ended or was replaced
        self.worker, self.session_id = worker, session_id
        self._core, self._frames, self._buffers = core, frames, buffers
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
        self._whole: Whole | None = None
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
    ) -> Part:
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
        return Part(self, share, close_connection)

    def _close(self, number: int) -> None:
        """Close all connections, because the session has ended or was replaced."""
        # Called under the core's lock, which threads take that hold this object's lock.
        if number == self._joins:  # else a process has joined again
            self.is_closed = True
            self._whole = self._kept = None
            for close in [*self._closers.values()]:
                close()

    def disconnect(self, process: int, closer: Callable[[], None]) -> None:
        """Report that a process has lost its newest connection."""
        with self._changed:
            is_newest = self._closers.get(process) is closer
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
            shares, schema = [*self._shares.values()], self._frames.schemas.center
            for share in shares:
                check_regions(share, schema)
            if len(shares) == self.processes:
                _check_cover([share.owned for share in shares], schema)
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
    def writing(self, process: int, key: Key, dtype: str) -> Iterator[Whole | None]:
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
                schema = self._frames.assembled_schema(dtype)
                whole = self._whole = self._whole or Whole(schema, self._buffers)
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
            whole = whole or Whole(self._frames.assembled_schema(""), self._buffers)
            contribution = self._frames.assembled(whole.schema, whole.buffer)
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
        self._failure = self._failure or error
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


class Part:
    """One process's connection to its `Assembly`, used like a `LocalSession`.

    It also converts the process's pieces to frames, like `CenterFrames`.

    Args:
      assembly: the assembly.
      share: the process's share.
      closer: closes the connection.
    """

    def __init__(
        self, assembly: Assembly, share: Share, closer: Callable[[], None]
    ) -> None:
        self._assembly, self._share, self._closer = assembly, share, closer
        self.worker, self.session_id = assembly.worker, assembly.session_id
        self._key: Key = (0, 0)
        self._dtype = ""  # of the message

    @property
    def is_first(self) -> bool:
        """True for the process whose exchanges count as those of the worker."""
        return self._share.process == 0

    # As a session.

    def begin(self, message: pb.Message) -> None:
        """Begin to receive a message."""
        self._key = message.sequence, message.attempt
        self._dtype = message.dtype
        self._assembly.begin(self._share.process, self._key, self)

    def end(self) -> None:
        """Receive no more of a message."""
        self._assembly.end(self._share.process, self)

    def add_notices(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Add this process's notices to the others: see `Assembly.add_notices`."""
        return self._assembly.add_notices(self._share.process, texts)

    def submit(self, submission: Submission) -> None:
        """Add this process's pieces to the message."""
        if submission.contribution is not None:  # else `receive` has written them
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in self._like())
            pieces = _decode(self._assembly._frames.rule, shapes)(
                submission.contribution
            )
            with self._writing() as whole:
                if whole is not None:
                    whole.write(self._share.owned, pieces)
        self._assembly.add(self._share, self._key, submission.checked())

    def answer(self, sequence: int, timeout: float) -> KeptAnswer | None:
        """Return the answer to this process's exchange: see `LocalSession.answer`."""
        assert self._key[0] == sequence
        return self._assembly.answer(self._key, timeout)

    def fail(self, error: Exception) -> None:
        """Let the exchange fail in all processes."""
        self._assembly.fail(self._key, error)

    def missing(self) -> list[int]:
        """Return the processes for whose pieces this one waits."""
        return self._assembly.missing(self._key)

    def wait_for_processes(self, timeout: float) -> list[int]:
        """Wait for the other processes: see `Assembly.wait_for_processes`."""
        return self._assembly.wait_for_processes(timeout)

    def wait_until_kept(self, kept: KeptAnswer) -> None:
        """Wait until an answer is on disk: see `LocalSession.wait_until_kept`."""
        self._assembly.wait_until_kept(kept)

    def acknowledge(self, sequence: int) -> None:
        """Record that this process has its answer."""
        self._assembly.acknowledge(self._share.process, sequence)

    def disconnect(self) -> None:
        """Report a broken connection."""
        self._assembly.disconnect(self._share.process, self._closer)

    # As frames.

    @functools.cached_property
    def schemas(self) -> _trees.WireSchemas:
        """The schemas of this process's messages and answers."""
        self._assembly.check()
        frames = self._assembly._frames
        return _pieces.piece_schemas(
            frames.rule, frames.schemas.center, self._share
        ).schemas

    is_flat = False  # an answer is not copied over its message

    def message_schema(self, message: pb.Message) -> Schema:
        """Return the schema of a message: see `CenterFrames.message_schema`."""
        if not message.sequence:
            return Schema([])
        return self._assembly._frames.checked_schema(message, self.schemas.message)

    def receive(self, schema: Schema, reader: FrameReader) -> PyTree:
        """Receive this process's pieces of a message, and write them to the message.

        Encoded pieces are returned instead, for `submit` to decode and write them.
        """
        frames = self._assembly._frames
        if not schema.leaves:
            reader.read_buffer(schema, "a message")
            return None
        if not frames.sends_elements:
            like = rounds.contribution_like(frames.rule, self._like())
            buffer = reader.read_buffer(schema, "a message")
            return _trees.build(schema, schema.views(buffer), like)
        with self._writing() as whole:
            if whole is None:
                reader.read_buffer(schema, "a message")
            else:
                places = whole.places(self._share.owned)
                reader.read_into(schema, places, "a message")
        return None

    def _writing(self) -> contextlib.AbstractContextManager[Whole | None]:
        return self._assembly.writing(self._share.process, self._key, self._dtype)

    def _like(self) -> list[jax.ShapeDtypeStruct]:
        """Return this process's own pieces of the center, abstract."""
        dtypes = self._assembly._frames.schemas.center.numpy_dtypes
        return [
            jax.ShapeDtypeStruct(r.shape, dtypes[r.leaf]) for r in self._share.owned
        ]

    def answer_frame(self, version: Version, answer: Answer) -> Frame:
        """Return the frame with this process's pieces of an answer."""
        # The first center is sent exactly, as by a pull.
        schema = self.schemas.answer if answer.sequence else self.schemas.center
        leaves = self._assembly._frames.host_leaves(version)
        arrays = [leaves[r.leaf][r.slices] for r in self._share.wanted]
        snapshot = snapshot_of(answer, schema_hash=schema.hash)
        return Frame(pb.Header(snapshot=snapshot), schema, arrays)


@functools.lru_cache(maxsize=64)
def _decode(rule: Rule, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> Any:
    """Return a program that decodes a list of pieces of these shapes and dtypes."""

    def decode(pieces: PyTree) -> PyTree:
        like = [jnp.zeros(shape, dtype) for shape, dtype in shapes]
        return rounds.decode(rule, pieces, like)

    return jax.jit(decode)


def check_regions(share: Share, schema: Schema) -> None:
    """Check that the regions of a share are within the leaves of a schema.

    Raises:
      InvalidArgumentError: one of them is not.
    """
    shapes = [leaf.shape for leaf in schema.leaves]
    if problem := outside([*share.owned, *share.wanted], shapes):
        raise errors.InvalidArgumentError(f"{problem}, which a process has joined with")


def _check_cover(owned: Any, schema: Schema) -> None:
    regions = [region for of_process in owned for region in of_process]
    if problem := uncovered(regions, [leaf.shape for leaf in schema.leaves]):
        raise errors.InvalidArgumentError(
            f"the processes of a worker must own every element once: {problem}. The "
            f"leaves are {[leaf.path for leaf in schema.leaves][:8]}, ..."
        )


def _difference(one: Submission, other: Submission) -> str:
    pairs = zip(one._fields, one, other, strict=True)
    return ", ".join(f"{name} is {a} and {b}" for name, a, b in pairs if a != b)
