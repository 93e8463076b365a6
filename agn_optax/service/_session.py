"""A worker's life at a center that is somewhere else: the same verbs as embedded."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center import Session, Snapshot
from agn_optax.service import _address
from agn_optax.service import center_pb2 as pb
from agn_optax.service._connection import FIRST_WORD, SOON
from agn_optax.service._remote import Exchange, Remote
from agn_optax.service.transports import Link
from agn_optax.service.wire._packets import Parcel
from agn_optax.service.wire._trees import to_device

PyTree = Any
_log = logging.getLogger("agn_optax")
# Bytes of an exchange whose answer the center had better not keep until the next one.
_LEAST_ACKNOWLEDGED = 64 << 10


class RemoteSession(Session):
    """One life of one worker, over as many connections as it needs.

    Calls that find nobody are tried again for two seconds, and what broke in the middle
    is sent again: the center knows an exchange that it has applied. One thread at a
    time submits and collects; any other may leave.

    Args:
      remote: the center.
      worker: the worker's name.
      like: a tree with the worker's containers; None for those of the center.
      life: of a worker that is back from another process; None for a new one.
      left: told of this session once it has left.
    """

    def __init__(
        self,
        remote: Remote,
        worker: str,
        like: PyTree,
        life: Any = None,
        *,
        left: Callable[[RemoteSession], object] = lambda session: None,
    ) -> None:
        self.worker = worker
        # The life of the center that it has joined, and of this worker there.
        self._life: str
        self._life, self.incarnation = life or ("", uuid.uuid4().hex)
        self._remote = remote
        self._like = like
        self._using = threading.Lock()
        self._link: Link | None = None
        self._exchange: Exchange | None = None  # that is under way
        self._anchor: PyTree = None  # from which its answer may differ
        self._sent_over: Link | None = None  # where that is on its way
        self.left = False  # or about to
        self._tell_left = left

    @property
    def transport(self) -> str:
        """By which its exchanges travel; "" while there is no connection."""
        return "" if self._link is None else self._link.transport

    @property
    def life(self) -> Any:
        """As `Session.life`."""
        return [self._life, self.incarnation]

    def join(self, timeout: float | None) -> None:
        """As `Center.join`."""
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
        """As `Session.submit`.

        Raises:
          ProtocolError: the center is of a release that takes no weights.
        """
        check.whole_number(steps, "steps", least=0)
        check.weight(weight)
        if weight is not None and not self._remote.description.takes_weights:
            raise errors.ProtocolError(
                f"the center at {self._remote.address} runs release "
                f"{self._remote.description.release}, which takes no weights: leave "
                "weight= out, or update the center"
            )
        if not (isinstance(anchor_version, int | np.integer) and anchor_version >= 0):
            raise errors.InvalidArgumentError(
                "anchor_version must be a version that the center has had, "
                f"got {anchor_version!r}"
            )
        with self._using:
            old = self._exchange
            if old is None or old.message.sequence != sequence:
                self._sent_over = None
            # A repeated one whose answer is still to come over the same link is not
            # sent again there: it would be answered twice.
            self._anchor = anchor
            self._exchange = self._remote.as_message(
                contribution,
                self.worker,
                sequence=sequence,
                anchor_version=int(anchor_version),
                steps=steps,
                weight=weight,
                reported={k: float(v) for k, v in (reported or {}).items()},
                has_anchor=anchor is not None,
            )
            self._remote.connection.retry(self._send, within=SOON)

    def collect(self, sequence: int, timeout: float | None = None) -> Snapshot | None:
        """As `Session.collect`; the center says every two seconds that it still waits.

        So a ``timeout`` may be over by that much before it is noticed.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self._using:
            if self._exchange is None or self._exchange.message.sequence != sequence:
                raise errors.WorkerStateError(
                    f"worker {self.worker!r} has not submitted exchange {sequence}"
                )
            answer = self._remote.connection.retry(
                lambda: self._receive(until), within=SOON
            )
            if answer is None:
                return None
            said, arrays = answer
            if said.HasField("differences"):
                count = said.differences
                params = self._remote.followed(self._anchor, count, arrays)
            else:
                leaves = to_device(self._remote.widened(arrays))
                params = self._remote.as_tree(leaves, self._like)
            return Snapshot(
                params,
                said.version,
                said.staleness,
                np.float32(said.norm) if said.HasField("norm") else None,
                said.applied,
                said.refused,
                said.pace if said.HasField("pace") else None,
                received=sum(array.nbytes for array in arrays),
            )

    def acknowledge(self, sequence: int) -> None:
        """As `Session.acknowledge`; of small messages the next one says the same."""
        with self._using:
            exchange, link = self._exchange, self._link
            if exchange is None or exchange.message.sequence != sequence:
                return
            self._exchange = self._sent_over = self._anchor = None
            if link is None or exchange.schema.size < _LEAST_ACKNOWLEDGED:
                return
            try:
                link.send(Parcel(pb.Frame(acknowledge=sequence)))
            except link.ended:  # the next exchange has another link
                link.cancel()

    def disconnect(self) -> None:
        """As `Session.disconnect`."""
        if self._link is not None:
            self._link.cancel()

    def leave(self, timeout: float = 1.0) -> None:
        """As `Session.leave`; says so to the center for ``timeout`` seconds at most."""
        self.left = True
        try:
            request = pb.LeaveRequest(worker=self.worker, incarnation=self.incarnation)
            with contextlib.suppress(errors.AgnOptaxError):
                self._remote.connection.unary("Leave", request, pb.LeaveReply, timeout)
        finally:
            self.disconnect()
            self._tell_left(self)

    def _open(self, until: float = math.inf) -> Link:
        """A connection in which the worker lives; the old one, if any, has broken.

        Raises:
          TimeoutError: the center still had not enough workers ``until`` then.
        """
        remote = self._remote
        if self._link is not None:
            self._link.cancel()
        link, failed = remote.dial()
        self._link = link
        if self.left or remote.connection.closed:  # meanwhile
            link.cancel()
        join = pb.Join(
            protocol=_address.PROTOCOL,
            worker=self.worker,
            incarnation=self.incarnation,
            center=self._life,
            serves_at=remote.serves_at,
        )
        with self._watching(link, until, FIRST_WORD):
            link.send(Parcel(pb.Frame(join=join)))
            if (said := link.control()).HasField("waiting"):
                _log.warning(
                    "worker %r waits at the center at %s until there are as many as "
                    "its barrier wants",
                    self.worker,
                    remote.address,
                )
            while said.HasField("waiting"):
                said = link.control()
        self._life, before = said.joined.center, said.joined.before
        self.before = (before, said.joined.settled) if before else None
        remote.useless |= failed
        return link

    def _send(self) -> Link:
        """The connection over which the exchange under way was sent."""
        assert self._exchange is not None
        message, schema, arrays = self._exchange
        link = self._link
        # One that has ended since may have the answer, or the reason why there is none.
        if link is None or (link.done() and self._sent_over is not link):
            link = self._open()
        if self._sent_over is not link:
            with self._watching(link):
                wanted = self._remote.travels().answer.size
                frame = pb.Frame(message=message)
                link.send(Parcel(frame, schema, arrays, wanted=wanted))
            self._sent_over = link
        return link

    def _receive(self, until: float) -> tuple[pb.Snapshot, list[np.ndarray]] | None:
        """The answer to the exchange under way; None if there is none by ``until``."""
        link = self._send()
        self._sent_over = None  # asked for again, it is to be sent again
        with self._watching(link):
            while (said := link.control()).HasField("waiting"):
                if time.monotonic() >= until:
                    self._sent_over = link  # its answer is still to come
                    return None
            answer = self._remote.answer_in(said, link)
            self._check_sequence(answer[0].sequence)
            if answer[0].HasField("differences") and self._anchor is None:
                raise errors.ProtocolError("differences came, and none were asked for")
        return answer

    def _check_sequence(self, sequence: int) -> None:
        assert self._exchange is not None
        if sequence != (own := self._exchange.message.sequence):
            raise errors.ProtocolError(
                f"an answer to exchange {own} was expected, got one to {sequence}"
            )

    @contextlib.contextmanager
    def _watching(
        self, link: Link, until: float = math.inf, patience: float = math.inf
    ) -> Iterator[None]:
        """Around a use of a link, which ends with the worker, too."""
        try:
            with self._remote.connection.watching(link, until, patience):
                yield
        except errors.CenterUnreachableError:
            if self._remote.connection.closed or not self.left:
                raise
            raise errors.WorkerStateError(
                f"worker {self.worker!r} has left the center; start() joins again"
            ) from None
