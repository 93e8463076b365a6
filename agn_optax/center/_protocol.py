"""The seam between a worker and the center it shares: `Center`, and its `Session`."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from agn_optax.rules import Rule

PyTree = Any

MOST_REPORTED = 64  # numbers that a worker reports, and characters of a name


class Snapshot(NamedTuple):
    """One version of the center, whole. Its arrays never change; do not donate them."""

    params: PyTree
    # Exchanges applied before this version was current. Of a center in shards, one
    # number for each.
    version: Any
    staleness: int | None = None  # of the message that this answers; None for a pull
    norm: Any = None  # float scalar: of the message that this answers; None for a pull
    applied: bool = True  # False if the message was dropped: then this is a pull
    refused: str = ""  # why the center did not want the message, if it did not
    # The worker's speed as a share of the fastest one's, in local steps a second; None
    # for a pull, and as long as the center does not know.
    pace: float | None = None
    # Whether shards have applied some of the message, and not all.
    in_part: bool = False
    received: int | None = None  # bytes that it came in; None if it did not travel


class Session(abc.ABC):
    """One life of one worker at a center, from `Center.join` until it leaves.

    An exchange is known by its worker, the worker's incarnation and a sequence number,
    and by nothing else. The exchanges of a life are numbered 1, 2, 3, ...; one of them
    is under way at most. To repeat one is always safe: it is applied once.

    Attributes:
      worker: the worker's name.
      incarnation: of this life of it.
      life: names this life, and the life of the center that it has joined: what
        `Center.join` takes to go on with it in another process. JSON can write it.
      before: the last life of that worker before this one that has settled an
        exchange: its incarnation, and the last exchange of it that was settled. Where
        none has, the first life that the center knew, and 0; None where it knew none.
        Of a center in shards, a list of them; of another one, a tuple.
    """

    worker: str
    incarnation: str
    life: Any
    before: Any = None

    @abc.abstractmethod
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
        """Hands in an exchange; `collect` has its answer.

        Args:
          sequence: of the exchange: that of the last one, or one more.
          contribution: as the rule's ``contribution`` made it, with the structure and
            shapes of the center. It is read until the exchange is collected.
          anchor_version: version of the snapshot that the worker adopted last.
          steps: local steps that the message was made of; 0 where nobody says so.
          weight: what the worker says that its round counts, such as its tokens: a
            positive number; None where it says nothing, which counts 1.
          reported: numbers of the worker's own by their names, for whoever watches.
          anchor: the public center of that version, as this life of the center has had
            it. The answer may then travel as differences from it. None has it travel
            whole.

        Raises:
          NotInitializedError: the center has no parameters yet.
          TreeMismatchError: the contribution does not belong to this center.
          InvalidArgumentError: ``anchor_version`` is of the future, or ``steps`` or
            ``weight`` is out of range.
          WorkerStateError: this life is over, or ``sequence`` is neither its last
            exchange nor the next.
          CenterUnreachableError: a remote center does not answer.
        """

    @abc.abstractmethod
    def collect(self, sequence: int, timeout: float | None = None) -> Snapshot | None:
        """The answer to an exchange: the version that the rule adopts.

        Args:
          sequence: of an exchange that was handed in.
          timeout: seconds to wait at most; None waits for good.

        Returns:
          The version before or after the message, with the staleness and the norm of
          the message, whether it was applied, and why not if it was refused; None if it
          still waits.

        Raises:
          MessageRefusedError: the center has refused too many messages of this worker
            in a row. The exchange is as if it had never come.
          WorkerStateError: this life is over.
          CenterUnreachableError: a remote center does not answer.
        """

    @abc.abstractmethod
    def acknowledge(self, sequence: int) -> None:
        """The worker has the answer, which the center need not keep any more."""

    @abc.abstractmethod
    def disconnect(self) -> None:
        """The connection broke; the worker has until its lease ends to be back."""

    @abc.abstractmethod
    def leave(self) -> None:
        """The worker goes, and nobody waits for it any more. May be said twice."""

    def exchange(
        self,
        sequence: int,
        contribution: PyTree,
        *,
        anchor_version: Any,
        steps: int = 0,
        weight: float | None = None,
        reported: Mapping[str, Any] | None = None,
        anchor: PyTree = None,
    ) -> Snapshot:
        """Submits, collects and acknowledges: a whole exchange. May be repeated."""
        self.submit(
            sequence,
            contribution,
            anchor_version=anchor_version,
            steps=steps,
            weight=weight,
            reported=reported,
            anchor=anchor,
        )
        snapshot = self.collect(sequence)
        assert snapshot is not None  # it waits for good
        self.acknowledge(sequence)
        return snapshot


@runtime_checkable
class Center(Protocol):
    """The center variable, outside of any worker's program.

    `agn_optax.LocalCenter` is the implementation in this process. Every implementation
    MUST apply each exchange whole and alone (an exchange never sees half of another),
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
        life: Any = None,
    ) -> Session:
        """A worker is there, and waits for the others if the center has a barrier.

        Args:
          worker: the worker's name, which no other one of this center has.
          params: the parameters that it will adopt the center into, for their
            structure, shapes and dtypes; None if it takes what comes.
          timeout: seconds to wait at most for the others; None waits for good.
          life: `Session.life` of a worker that is back, in another process, with the
            exchange that it was in: what was applied of it is not applied again. None
            begins a new one.

        Returns:
          A new life of that worker, or the one that it goes on with.

        Raises:
          NameTakenError: another worker has that name.
          WorkerStateError: the center knows nothing of ``life``: it was started anew,
            another life of the worker has begun, or too many workers left since.
          CenterFullError: there is no room for one more.
          TreeMismatchError: ``params`` does not belong to this center.
          NotInitializedError: the others did not come in time.
        """

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives the center its first parameters, which it copies.

        The worker that did so may ask again (it may have crashed and come back): the
        center stays as it is.

        Returns:
          The center as workers have it: see `pull`.

        Raises:
          AlreadyInitializedError: somebody else initialized it.
          TreeMismatchError: leaves that are not real floating arrays.
        """

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once it is initialized.

        Args:
          timeout: seconds to wait at most; None waits for good.

        Returns:
          The center as workers have it: see `pull`.

        Raises:
          NotInitializedError: nobody initialized the center in time.
        """

    def pull(self, *, public: bool = False) -> Snapshot:
        """The center as it is.

        Args:
          public: as all workers have it, where the rule's codec answers in differences
            (`agn_optax.codecs.two_way`); with any other codec nothing changes. Without
            it the center is exact.

        Raises:
          NotInitializedError: it has no parameters yet.
        """
