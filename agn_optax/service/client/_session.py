"""A worker's session at a remote center, with the interface of a local one."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from agn_optax import errors
from agn_optax.center import (
    Answer,
    Session,
    Share,
    Snapshot,
    Submission,
    Transfer,
    newest,
)
from agn_optax.service import _address
from agn_optax.service import center_pb2 as pb
from agn_optax.service.client._remote import Remote
from agn_optax.service.transports import Link
from agn_optax.service.transports._connection import (
    FIRST_RESPONSE_TIMEOUT,
    SHORT_TIMEOUT,
)
from agn_optax.service.wire import _pieces
from agn_optax.service.wire._frames import Frame, bytes_schema
from agn_optax.service.wire._submission import answer_of
from agn_optax.service.wire._trees import WireSchemas, to_device

PyTree = Any
_log = logging.getLogger("agn_optax")
# Minimum size in bytes of a message whose answer is acknowledged at once, so that the
# center can free the answer before the next exchange.
_MIN_ACKNOWLEDGED = 64 << 10


class RemoteSession(Session):
    """One session of one worker, over as many connections as it needs.

    A call that does not reach the center is retried for two seconds. If a connection
    breaks, the exchange in flight is sent again; the center recognizes an exchange that
    it has already applied. Only one thread at a time may submit and collect; any thread
    may leave.

    Args:
      remote: the center.
      worker: the worker's name.
      like: a tree with the worker's containers; None for those of the center.
      resume_token: `Session.resume_token` of a session to resume from another process;
        None begins a new session.
      share: what this process has of a worker of several processes. Contributions and
        answers are then lists of its pieces, the latter in host memory. None for a
        worker of one process.
      on_left: called with the session id and None once the worker has left; must drop
        the session, which may hold a contribution.
    """

    def __init__(
        self,
        remote: Remote,
        worker: str,
        like: PyTree,
        resume_token: Any = None,
        *,
        share: Share | None = None,
        on_left: Callable[[str, None], object] = lambda session_id, none: None,
    ) -> None:
        self.worker = worker
        # The id of the center, "" before the first join; and the id of the session.
        self._center_id: str
        # Tokens of earlier releases have no witness.
        token = resume_token or ("", uuid.uuid4().hex)
        self._center_id, self.session_id, *witness = token
        self._witness = "".join(witness)  # until the session has joined
        self._remote = remote
        self._like = like
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._share = share
        # Called with the processes for whose pieces the center waits; may raise.
        self.while_missing: Callable[[Sequence[int]], object] = lambda missing: None
        self._piece_schemas: WireSchemas | None = None
        self._missing_since = math.inf  # time since which other processes are missing
        # The number of the exchange in flight, and its frame.
        self._in_flight: tuple[int, Frame] | None = None
        self._sent_over: Link | None = None  # link over which its answer is expected
        self._sent_at = 0.0  # when it was sent; monotonic seconds
        self._transfer: Transfer | None = None  # of the last exchange
        self.has_left = False  # whether it has left, or is about to
        self._on_left = on_left

    @property
    def transport(self) -> str:
        """Name of the transport in use; "" while there is no connection."""
        return "" if self._link is None else self._link.transport

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The messages of the last exchange: see `Session.transfers`."""
        return () if self._transfer is None else (self._transfer,)

    @property
    def resume_token(self) -> Any:
        """The ids of center and session, and a witness: see `Session.resume_token`."""
        witness = self._remote.witness
        return [self._center_id, self.session_id, self._witness or witness]

    def join(self, timeout: float | None) -> None:
        """Join the center: see `Center.join`."""
        within = math.inf if timeout is None else timeout
        until = time.monotonic() + within
        try:
            self._remote.connection.retry(lambda: self._open(until), within)
        except TimeoutError:
            barrier = self._remote.describe().barrier
            raise errors.NotInitializedError(
                f"worker {self.worker!r} waited {timeout} s for {barrier} workers "
                "to start together"
            ) from None

    def submit(self, submission: Submission) -> None:
        """Submit an exchange: see `Session.submit`."""
        submission = submission.checked()
        with self._lock:
            previous = self._in_flight
            if previous is None or previous[0] != submission.sequence:
                self._sent_over = None
            elif submission.attempt and self._sent_over is not None:
                # The answer to the attempt before must not be taken for this one's.
                self._sent_over.cancel()
                self._sent_over = None
            # A repeated exchange whose answer is still expected over the same link is
            # not sent again, because it would be answered twice.
            frame = self._remote.frame(submission, self.worker, self._schemas())
            if self._transfer is not None:
                last = self._transfer
                frame.header.message.transfer.MergeFrom(
                    pb.Transfer(
                        interface=last.interface or "",
                        nbytes=last.nbytes,
                        seconds=last.seconds,
                    )
                )
            self._in_flight = submission.sequence, frame
            self._missing_since = math.inf
            self._remote.connection.retry(self._send, within=SHORT_TIMEOUT)

    def collect(self, sequence: int, timeout: float | None = None) -> Answer | None:
        """Return the answer to an exchange: see `Session.collect`.

        The timeout is checked only when the center reports that the exchange still
        waits, which it does every two seconds, so this may return that much later.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self._in_flight is None or self._in_flight[0] != sequence:
                raise errors.WorkerStateError(
                    f"worker {self.worker!r} has not submitted exchange {sequence}"
                )
            answer = self._remote.connection.retry(
                lambda: self._receive(until), within=SHORT_TIMEOUT
            )
            if answer is None:
                return None
            snapshot, arrays = answer
            received = sum(array.nbytes for array in arrays)
            self._measure(snapshot, received)
            if self._share is not None:
                self._remote.check_dtypes()
                return answer_of(snapshot, arrays, received)
            wide = self._remote.in_center_dtype(arrays, self._schemas())
            params = self._remote.as_tree(to_device(wide), self._like)
            return answer_of(snapshot, params, received)

    def pull(self, attempt: int, timeout: float | None = None) -> Snapshot:
        """Return this process's pieces of a version that all processes get.

        Args:
          attempt: see `Submission`.
          timeout: seconds to wait for the first parameters; None for no limit.

        Raises:
          NotInitializedError: the center has no parameters in time.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        message = pb.Message(attempt=attempt)
        with self._lock:
            self._in_flight = 0, Frame(pb.Header(message=message))
            self._sent_over, self._missing_since = None, math.inf
            answer = self._remote.connection.retry(
                lambda: self._receive(until), within=SHORT_TIMEOUT
            )
        if answer is None:
            raise errors.NotInitializedError(
                f"no chief has initialized the center at {self._remote.address} within "
                f"{timeout} s; one worker must call start(params, chief=True)"
            )
        self._remote.check_dtypes()
        return Snapshot(answer[1], answer[0].version)

    def _schemas(self) -> WireSchemas:
        """Return the schemas of this worker's messages and answers."""
        if self._share is None:
            return self._remote.known_schemas()
        if self._piece_schemas is None:
            center = self._remote.known_schemas().center
            self._remote.check_model(self._share.like, self.worker)
            share = _pieces.in_schema_order(self._share)
            self._piece_schemas = _pieces.piece_schemas(
                self._remote.rule, center, share
            ).schemas
        return self._piece_schemas

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge an answer: see `Session.acknowledge`.

        Small exchanges are not acknowledged here, because the next message does so.
        """
        with self._lock:
            if self._in_flight is None or self._in_flight[0] != sequence:
                return
            size, link = self._in_flight[1].nbytes, self._link
            self._in_flight = self._sent_over = None
            # The center keeps a whole version until all processes have acknowledged it.
            is_small = size < _MIN_ACKNOWLEDGED and self._share is None
            if link is None or is_small:
                return
            try:
                link.send(Frame(pb.Header(acknowledge=sequence)))
            except link.end_errors:  # the next exchange opens another link
                link.cancel()

    def disconnect(self) -> None:
        """Close the link: see `Session.disconnect`."""
        if self._link is not None:
            self._link.cancel()

    def leave(self, timeout: float = 1.0) -> None:
        """Leave the center, in ``timeout`` seconds at most: see `Session.leave`."""
        self.has_left = True
        try:
            request = pb.LeaveRequest(
                worker=self.worker,
                session_id=self.session_id,
                group="" if self._share is None else self._share.group,
            )
            with contextlib.suppress(errors.AgnOptaxError):
                self._remote.connection.unary("Leave", request, pb.LeaveReply, timeout)
        finally:
            self.disconnect()
            self._on_left(self.session_id, None)

    def _open(self, until: float = math.inf) -> Link:
        """Open a link and join over it, in place of a link that has broken.

        Raises:
          TimeoutError: too few workers had joined for the barrier by ``until``.
        """
        remote = self._remote
        if self._link is not None:
            self._link.cancel()
        link = self._link = remote.dial()
        if self.has_left or remote.connection.closed:  # by another thread, meanwhile
            link.cancel()
        join = pb.Join(
            protocol=_address.PROTOCOL,
            worker=self.worker,
            session_id=self.session_id,
            center=self._center_id,
            # The connection may have seen a newer record, but of another history.
            witnesses=filter(None, {remote.witness, self._witness}),
        )
        frame = Frame(pb.Header(join=join))
        if self._share is not None:
            share = _pieces.to_bytes(self._share)
            join.share_size = share.size
            frame = Frame(pb.Header(join=join), bytes_schema(share.size), [share])
        with self._watching(link, until, FIRST_RESPONSE_TIMEOUT):
            link.send(frame)
            header, is_told = link.read_header(), False
            while header.HasField("waiting"):
                if not (self._is_missing(header.waiting) or is_told):
                    is_told = True
                    _log.warning(
                        "worker %r waits at the center at %s until enough workers for "
                        "its barrier have joined",
                        self.worker,
                        remote.address,
                    )
                header = link.read_header()
        self._center_id = header.joined.center
        remote.witness = newest(self._witness, remote.witness)
        self._witness = ""
        return link

    def _send(self) -> Link:
        """Send the exchange in flight if necessary; return the link that took it."""
        assert self._in_flight is not None
        (_, frame), link = self._in_flight, self._link
        # A link that ended after the exchange was sent over it is kept: it may hold the
        # answer, or the reason why there is none.
        if link is None or (link.is_done() and self._sent_over is not link):
            link = self._open()
        if self._sent_over is not link:
            self._sent_at = time.monotonic()
            with self._watching(link):
                link.send(frame.copy())
            self._sent_over = link
        return link

    def _receive(self, until: float) -> tuple[pb.Snapshot, list[np.ndarray]] | None:
        """Return the answer to the exchange in flight; None if none by ``until``."""
        assert self._in_flight is not None
        (sequence, _), link = self._in_flight, self._send()
        self._sent_over = None  # if receiving fails, the exchange is sent again
        with self._watching(link):
            while (header := link.read_header()).HasField("waiting"):
                self._is_missing(header.waiting)
                if time.monotonic() >= until:
                    self._sent_over = link  # the answer is still expected
                    return None
            schemas = self._schemas()
            schema = schemas.answer if sequence else schemas.center
            return self._remote.answer_in(header, link, sequence, schema)

    def _is_missing(self, waiting: pb.Waiting) -> bool:
        """Return whether the center waits for other processes of this worker.

        Raises:
          CenterError: it has waited for longer than the timeout of the connection.
        """
        now, timeout = time.monotonic(), self._remote.connection.timeout
        if not waiting.missing:
            self._missing_since = math.inf
            return False
        self.while_missing(waiting.missing)
        self._missing_since = min(self._missing_since, now)
        if now - self._missing_since >= timeout:
            self._missing_since = math.inf
            raise errors.CenterError(
                f"processes {list(waiting.missing)} of worker {self.worker!r} have not "
                f"joined, or not sent their pieces, within {timeout:g} s: all "
                "processes of a worker must make the same calls of start, exchange "
                "and flush"
            )
        return True

    def _measure(self, snapshot: pb.Snapshot, received: int) -> None:
        """Record how the exchange in flight travelled, when its answer has come."""
        assert self._in_flight is not None
        assert self._link is not None
        seconds = time.monotonic() - self._sent_at - snapshot.held
        self._transfer = Transfer(
            self._remote.address,
            self._link.transport,
            self._link.interface,
            self._in_flight[1].nbytes + received,
            max(seconds, 0.0),
            self._remote.expected,
            self._link.detour,
            self._remote.connection.round_trip,
        )

    @contextlib.contextmanager
    def _watching(
        self, link: Link, until: float = math.inf, response_timeout: float = math.inf
    ) -> Iterator[None]:
        """Use a link within the block, with timeouts: see `Connection.watching`.

        Raises:
          WorkerStateError: the worker has left meanwhile.
        """
        try:
            with self._remote.connection.watching(link, until, response_timeout):
                yield
        except errors.CenterUnreachableError:
            if self._remote.connection.closed or not self.has_left:
                raise
            raise errors.WorkerStateError(
                f"worker {self.worker!r} has left the center; start() joins again"
            ) from None
