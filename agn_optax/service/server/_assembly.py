"""Workers of several processes: their pieces are assembled to whole messages.

Every process has a connection of its own. The core sees one session for all of them,
and one message for each exchange, once all pieces are there. All processes get their
pieces of one version. They agree among themselves whether all have got them; otherwise
all begin the exchange anew, with the next number of `Submission.attempt`.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
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
from agn_optax.service.server._center_frames import CenterFrames
from agn_optax.service.wire import _pieces, _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._frames import Frame
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

    def write(self, regions: Sequence[Region], arrays: Sequence[Any]) -> None:
        """Write arrays to their regions, whose leaves are numbered as in the schema."""
        for region, array in zip(regions, arrays, strict=True):
            self.views[region.leaf][region.slices] = array


class FirstParameters:
    """The first parameters of a center, while a chief's processes send their pieces.

    Args:
      group: id of the chief's processes.
      schema: schema of the parameters.
      buffers: buffers.
    """

    def __init__(self, group: str, schema: Schema, buffers: Buffers) -> None:
        self.group = group
        self._whole = Whole(schema, buffers)
        self._owned: dict[int, tuple[Region, ...]] = {}  # by process

    def add(self, share: Share, arrays: Sequence[np.ndarray]) -> PyTree:
        """Add the pieces of a process; return the parameters once all are there.

        Raises:
          InvalidArgumentError: the shares do not cover each leaf once.
        """
        schema = self._whole.schema
        self._whole.write(share.owned, arrays)
        self._owned[share.process] = share.owned
        if len(self._owned) < share.processes:
            return None
        _check_cover(self._owned.values(), schema)
        return _trees.build(schema, self._whole.views)


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
        self._is_checked = False
        # The exchange under way.
        self._key: Key = (-1, 0)
        self._about: Submission | None = None  # plain fields, equal in all processes
        self._whole: Whole | None = None
        self._arriving: set[int] = set()  # processes that have begun to send
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

        Raises:
          InvalidArgumentError: they do not cover each leaf once.
        """
        if not self._is_checked:
            shares, schema = [*self._shares.values()], self._frames.schemas.center
            for share in shares:
                check_regions(share, schema)
            _check_cover([share.owned for share in shares], schema)
            self._is_checked = True

    # An exchange.

    def begin(self, process: int, key: Key) -> None:
        """Record that a process begins to send its pieces of an exchange.

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
                self._arriving, self._arrived = set(), set()
                self._is_submitted = False
                self._acknowledged = set()
                self._kept = self._failure = None
            self._arriving.add(process)
            self._changed.notify_all()

    def add(self, share: Share, key: Key, submission: Submission, arrays: Any) -> None:
        """Add a process's pieces; the last process submits the whole message.

        Raises:
          WorkerStateError: another process gave other numbers for the same exchange.
        """
        is_over = key[0] <= self._session.completed()
        with self._changed:
            if self._key != key or self._kept or share.process in self._arrived:
                return
            about = submission.without_arrays()
            self._about = self._about or about
            if about != self._about:
                error = errors.InvalidArgumentError(
                    f"the processes of worker {self.worker!r} disagree about "
                    f"exchange {key[0]}: {_difference(about, self._about)}"
                )
                self._fail(error)
                raise error
            if self._whole is None and not is_over:
                self._whole = Whole(
                    self._frames.assembled_schema(arrays), self._buffers
                )
            whole = self._whole
        if not is_over:
            assert whole is not None
            whole.write(share.owned, arrays)
        with self._changed:
            if self._key != key:
                return
            self._arrived.add(share.process)
            is_last = len(self._arrived) == self.processes and not is_over
            if is_last:
                self._whole = None
        if is_last:
            assert whole is not None
            contribution = self._frames.assembled(whole.schema, whole.buffer)
            try:
                self._session.submit(submission._replace(contribution=contribution))
            except Exception as error:
                with self._changed:
                    self._fail(error)
                raise
            with self._changed:
                self._is_submitted = self._key == key
                self._changed.notify_all()

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
        """Return the processes that have not begun to send their pieces."""
        with self._changed:
            if self._is_whole(key):
                return []
            return [i for i in range(self.processes) if i not in self._arriving]

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

    @property
    def is_first(self) -> bool:
        """True for the process whose exchanges count as those of the worker."""
        return self._share.process == 0

    # As a session.

    def begin(self, message: pb.Message) -> None:
        """Begin to receive a message."""
        self._key = message.sequence, message.attempt
        self._assembly.begin(self._share.process, self._key)

    def submit(self, submission: Submission) -> None:
        """Add this process's pieces to the message."""
        contribution = submission.contribution
        self._assembly.add(self._share, self._key, submission.checked(), contribution)

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

    def contribution(self, schema: Schema, buffer: np.ndarray) -> PyTree:
        """Return the pieces in a received buffer, decoded if they are encoded."""
        frames = self._assembly._frames
        if not schema.leaves:
            return []
        rule, dtypes = frames.rule, frames.schemas.center.numpy_dtypes
        like = [
            jax.ShapeDtypeStruct(r.shape, dtypes[r.leaf]) for r in self._share.owned
        ]
        pieces = _trees.build(
            schema, schema.views(buffer), rounds.contribution_like(rule, like)
        )
        if frames.sends_elements:
            return pieces
        shapes = tuple((r.shape, dtypes[r.leaf]) for r in self._share.owned)
        return _decode(rule, shapes)(pieces)

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
