"""The interface between a worker and its center: `Center`, and its sessions."""

from __future__ import annotations

import abc
from typing import Any, Protocol, runtime_checkable

from agn_optax.center._submission import Answer, Snapshot, Submission
from agn_optax.center._transfer import Transfer
from agn_optax.rules import Rule

PyTree = Any

MAX_REPORTED = 64  # maximum number of metrics of a worker, and of characters of a name


class WorkerSession(abc.ABC):
    """A session as its worker uses it, from `Center.join` until the worker leaves.

    An exchange is identified by the worker's name, the session id and a sequence
    number, and by nothing else. The exchanges of a session are numbered 1, 2, 3, ...,
    and at most one of them is in flight. Repeating an exchange is always safe: it is
    applied once.

    Attributes:
      worker: the worker's name.
      session_id: the session id.
      resume_token: a JSON-serializable token that holds the center id, the session id
        and the newest `Answer.witness`. `Center.join` takes it to resume the session in
        another process.
    """

    worker: str
    session_id: str
    resume_token: Any

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers of the last exchange, by shard; none within this process."""
        return ()

    @abc.abstractmethod
    def exchange(self, submission: Submission) -> Answer:
        """Exchange with the center, and return the version that the worker adopts.

        May be repeated. The answer says which version it is, before or after the
        message depending on the rule, with the message's staleness and norm, whether
        it was applied, and the reason if it was rejected.

        Raises:
          NotInitializedError: the center has no parameters yet.
          TreeMismatchError: the contribution does not match the center.
          InvalidArgumentError: ``anchor_version`` is later than the center's version,
            or ``steps`` or ``weight`` is out of range.
          MessageRejectedError: the center has rejected too many messages of this worker
            in a row. The exchange has no effect, as if it had not been submitted.
          WorkerStateError: the session is over, or ``sequence`` is neither its last
            exchange nor the next.
          CenterUnreachableError: a remote center does not answer, or the center has
            been closed.
        """

    def is_answered(self, done: bool) -> bool:
        """Return ``done``, or for a worker of several processes that of the first.

        Args:
          done: whether the exchange in flight has been answered.
        """
        return done

    def decide(self, flag: bool) -> bool:
        """Return ``flag``, or for a worker of several processes that of the first."""
        return flag

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Report a broken connection: the worker has until its lease ends to return."""

    @abc.abstractmethod
    def leave(self) -> None:
        """End the session, so that no other worker waits for this one. Idempotent."""


class Session(WorkerSession):
    """A session whose exchanges can be made in three calls.

    The shards of a center get all parts of a message before any of them is waited for.
    """

    @abc.abstractmethod
    def submit(self, submission: Submission) -> None:
        """Submit an exchange; `collect` returns the answer.

        Errors are those of `exchange`.
        """

    @abc.abstractmethod
    def collect(self, sequence: int, timeout: float | None = None) -> Answer | None:
        """Return the answer to an exchange: see `exchange`.

        Args:
          sequence: number of a submitted exchange.
          timeout: maximum time to wait, in seconds; None waits without a limit.

        Returns:
          The answer. None if the message still waits when the timeout is over.

        Raises:
          MessageRejectedError: see `exchange`.
          WorkerStateError: the session is over.
          CenterUnreachableError: a remote center does not answer, or the center has
            been closed.
        """

    @abc.abstractmethod
    def acknowledge(self, sequence: int) -> None:
        """Confirm that the worker has the answer, so that the center may release it."""

    def exchange(self, submission: Submission) -> Answer:
        """Submit an exchange, collect and acknowledge its answer."""
        self.submit(submission)
        answer = self.collect(submission.sequence)
        assert answer is not None  # there is no timeout
        self.acknowledge(submission.sequence)
        return answer


@runtime_checkable
class Center(Protocol):
    """The center variable, outside of the workers' programs.

    `agn_optax.LocalCenter` is the implementation in this process. Every implementation
    MUST apply each exchange atomically (an exchange never sees half of another one),
    MUST answer with one version of the center rather than a mixture, and MUST count
    staleness in the same critical section in which the message is applied.
    """

    rule: Rule

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        resume_token: Any = None,
    ) -> Session:
        """Register a worker; block until the barrier is reached, if there is one.

        Args:
          worker: the worker's name, unique at this center.
          params: the parameters that the worker will replace with the center's. Their
            structure and shapes are checked, and a served center also checks their
            dtypes. None skips the check.
          timeout: maximum time to wait for the other workers, in seconds; None waits
            without a limit.
          resume_token: the `Session.resume_token` of a session to resume, for a worker
            that restarts in another process in the middle of an exchange: if the
            exchange was applied, it is not applied again. None starts a new session.

        Returns:
          The new or resumed session.

        Raises:
          NameTakenError: another worker has that name.
          WorkerStateError: the center does not know ``resume_token``: the center was
            restarted, the worker has started another session, or too many workers have
            left since.
          OtherHistoryError: the center does not have what this worker has seen: its
            directory is an old copy, or another center has continued from a copy.
          CenterFullError: the center has no room for another worker.
          TreeMismatchError: ``params`` does not match the center.
          NotInitializedError: the other workers did not join in time.
        """

    def initialize(self, params: PyTree, *, worker: str) -> None:
        """Set the center's first parameters, which are copied.

        The worker that initialized the center may call this again, for example after a
        crash: the center then keeps its parameters.

        Raises:
          AlreadyInitializedError: another worker initialized the center, or the center
            was created with its parameters.
          TreeMismatchError: a leaf is not a real floating array.
        """

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait until the center is initialized, and return its current version.

        Args:
          timeout: maximum time to wait, in seconds; None waits without a limit.

        Returns:
          The parameters and their version.

        Raises:
          NotInitializedError: the center was not initialized in time.
        """

    def pull(self) -> Snapshot:
        """Return the current version of the center.

        Raises:
          NotInitializedError: the center has no parameters yet.
        """

    def describe(self) -> Snapshot:
        """Return the current version with abstract arrays, which takes no transfer.

        Raises:
          NotInitializedError: the center has no parameters yet.
        """
