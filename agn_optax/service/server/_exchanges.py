"""One exchange of a worker: its message is received, applied and answered."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager

from agn_optax import errors
from agn_optax._internal import in_background
from agn_optax.center import Core, KeptAnswer, LocalSession, Submission
from agn_optax.service import center_pb2 as pb
from agn_optax.service._address import WAITING_INTERVAL
from agn_optax.service.server._center_frames import CenterFrames
from agn_optax.service.server._part import ProcessPart
from agn_optax.service.server._status import Traffic, WorkerTraffic
from agn_optax.service.wire._frames import Frame, FrameReader
from agn_optax.service.wire._schema import Schema
from agn_optax.service.wire._submission import submission_of

WAITING = Frame(pb.Header(waiting=pb.Waiting()))
_MAX_NAMED = 64  # processes for which another one waits
_MAX_NAME = 64  # characters of an interface's name
_SENT_AT_ONCE = 1 << 19  # bytes of an answer that transports send in one piece
_MIN_COPIED = 1 << 20  # bytes of a message whose answer may be copied over it


@dataclasses.dataclass
class _Arrival:
    """When a message has arrived."""

    at: float = 0.0  # monotonic seconds


class Exchanges:
    """All exchanges of a center that are under way.

    Args:
      core: the core of the center.
      frames: the center as frames.
      traffic: the traffic of all workers.

    Attributes:
      answering: number of exchanges that are being applied and answered.
      running: number of these, and of those whose message is still being received.
    """

    def __init__(
        self, core: Core, frames: CenterFrames, traffic: WorkerTraffic
    ) -> None:
        self._core = core
        self._frames = frames
        self._traffic = traffic
        self._changed = threading.Condition()
        self.answering = 0
        self.running = 0
        # Held while a large message is applied and its answer copied, because the
        # next in-place update must wait for the copy. No I/O happens while it is held.
        self._applying = threading.Lock()
        # Hashes of the schemas whose programs are compiled.
        self._compiled: set[bytes] = set()

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no exchange is being applied or answered; False if one still is.

        Args:
          timeout: seconds to wait at most.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self.answering, timeout)

    def run(
        self,
        session: LocalSession | ProcessPart,
        message: pb.Message,
        reader: FrameReader,
        on_event: Callable[..., object],
    ) -> Iterator[Frame]:
        """Receive and apply a message, and yield its answer.

        Args:
          session: the worker's session, or the part of one of its processes.
          message: the message without its buffer.
          reader: reader of the buffer.
          on_event: reports an exchange to the monitor.
        """
        traffic = self._traffic.get(session.worker)
        part = session if isinstance(session, ProcessPart) else None
        with self.counting("running"), ExitStack() as stack:
            arrival = _Arrival()
            about = message, reader, stack, traffic, arrival
            if isinstance(session, ProcessPart):
                kept = yield from self._apply_part(session, *about)
            else:
                kept = yield from self._apply(session, *about)
            answer = kept.answer
            if answer.norm is not None:
                traffic.norm = float(answer.norm)
                answer = answer._replace(norm=traffic.norm)
            notices = self._core.notices_for(session.worker)
            answer = answer._replace(notices=notices)
            worker, session_id = session.worker, session.session_id
            if part is None or (part.is_first and message.sequence):
                on_event("exchange", worker, session_id, answer)
            frames = self._frames if part is None else part
            with self._core.reading(kept.version) as version:
                frame = frames.answer_frame(version, answer)
                if frame.nbytes <= _SENT_AT_ONCE:
                    session.wait_until_kept(kept)
                elif kept.recorded:
                    # Only the last part of the answer waits for the disk: an answer
                    # without it cannot be used, so the rest may be sent before.
                    until_kept = functools.partial(session.wait_until_kept, kept)
                    frame.before_last_byte = until_kept
                # Of the answer's own record, unless the answer is sent before that.
                frame.header.snapshot.witness = self._core.witness
                frame.header.snapshot.held = time.monotonic() - arrival.at
                self._traffic.count(traffic, sent=frame.nbytes)
                yield frame

    def _apply(
        self,
        session: LocalSession,
        message: pb.Message,
        reader: FrameReader,
        stack: ExitStack,
        traffic: Traffic,
        arrival: _Arrival,
    ) -> Generator[Frame, None, KeptAnswer]:
        """Receive and apply a message; return its answer.

        The message's memory is not referenced any more when this returns.

        Yields:
          Waiting frames, until the answer is known.
        """
        schema = self._frames.message_schema(message)
        buffer = reader.read_buffer(schema, "a message")
        self._count(schema, stack, traffic, arrival)
        submission = submission_of(message, self._frames.contribution(schema, buffer))
        self._keep_reports(submission, traffic)
        self._keep_link(message, session.worker, traffic)
        self._core.notices.take(session.worker, submission.notices or {})
        submit = functools.partial(session.submit, submission)
        if schema.hash not in self._compiled:  # compilation may take minutes
            yield from _in_background(submit)
            self._compiled.add(schema.hash)
        elif self._frames.is_flat and schema.size >= _MIN_COPIED:
            while not self._applying.acquire(timeout=WAITING_INTERVAL):
                yield WAITING
            try:
                submit()
                kept = session.answer(message.sequence, timeout=0.0)
                if kept is not None and self.running > 1:
                    return self._frames.copy_over_message(session, kept, schema, buffer)
            finally:
                self._applying.release()
        else:
            submit()
        while (kept := session.answer(message.sequence, WAITING_INTERVAL)) is None:
            yield WAITING
        return kept

    def _apply_part(
        self,
        part: ProcessPart,
        message: pb.Message,
        reader: FrameReader,
        stack: ExitStack,
        traffic: Traffic,
        arrival: _Arrival,
    ) -> Generator[Frame, None, KeptAnswer]:
        """Receive one process's part of a message, and return the whole's answer.

        Its errors are those of all processes. Arguments are those of `_apply`.
        """
        part.begin(message)
        try:
            schema = part.message_schema(message)
            contribution = part.receive(schema, reader)
            self._count(schema, stack, traffic, arrival)
            submission = submission_of(message, contribution)
            if message.sequence:
                notices = part.add_notices(submission.notices or {})
                self._core.notices.take(part.worker, notices)
            if part.is_first and message.sequence:
                self._keep_reports(submission, traffic)
                self._keep_link(message, part.worker, traffic)
            # The last process compiles the programs, which may take minutes.
            yield from _in_background(functools.partial(part.submit, submission))
            while (kept := part.answer(message.sequence, WAITING_INTERVAL)) is None:
                yield waiting_for(part.missing())
            return kept
        except errors.AgnOptaxError as error:
            part.fail(error)
            raise
        finally:
            part.end()

    def _count(
        self, schema: Schema, stack: ExitStack, traffic: Traffic, arrival: _Arrival
    ) -> None:
        """Count a message that has been received, until ``stack`` is left."""
        arrival.at = time.monotonic()
        stack.enter_context(self.counting("answering"))
        self._traffic.count(traffic, received=schema.size)

    def _keep_reports(self, submission: Submission, traffic: Traffic) -> None:
        """Keep the numbers that a worker reports: each message has all of them."""
        traffic.period = submission.steps
        traffic.reported = dict(submission.reported or {})

    def _keep_link(self, message: pb.Message, worker: str, traffic: Traffic) -> None:
        """Keep how a worker's last exchange travelled, and compare it with others'."""
        last = message.transfer
        if not (last.nbytes and 0.0 < last.seconds < math.inf):
            return
        traffic.interface = last.interface[:_MAX_NAME]
        traffic.rate = last.nbytes / last.seconds
        if traffic.transport != "memory":
            over = f" over interface {traffic.interface!r}" if last.interface else ""
            route = f"by {traffic.transport!r}{over}"
            self._core.links.add(worker, route, last.nbytes, last.seconds)

    @contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Increase the counter ``name`` within the block."""
        with self._changed:
            setattr(self, name, getattr(self, name) + 1)
        try:
            yield
        finally:
            with self._changed:
                setattr(self, name, getattr(self, name) - 1)
                self._changed.notify_all()


def waiting_for(processes: list[int]) -> Frame:
    """Return the frame for a process that waits for others of its worker."""
    return Frame(pb.Header(waiting=pb.Waiting(missing=processes[:_MAX_NAMED])))


def _in_background(call: Callable[[], None]) -> Iterator[Frame]:
    """Call a function on another thread, and yield waiting frames until it returns."""
    called = in_background(call, "agn-optax submit")
    while wait([called], WAITING_INTERVAL).not_done:
        yield WAITING
    called.result()
