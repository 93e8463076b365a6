"""The seam between a worker and the center it shares: `Center`, and what it answers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from agn_optax.rules import Rule

PyTree = Any


class Snapshot(NamedTuple):
    """One version of the center, whole. Its arrays never change; do not donate them."""

    params: PyTree
    # Exchanges applied before this version was current. Of a center in shards, one
    # number for each.
    version: Any
    staleness: int | None = None  # of the message that this answers; None for a pull
    norm: Any = None  # float scalar: of the message that this answers; None for a pull
    applied: bool = True  # False if the message was dropped: then this is a pull


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
        self, worker: str, params: PyTree = None, *, timeout: float | None = None
    ) -> None:
        """A worker is there, and waits for the others if the center has a barrier.

        Args:
          worker: the worker's name, which no other one of this center has.
          params: the parameters that it will adopt the center into, for their
            structure, shapes and dtypes; None if it takes what comes.
          timeout: seconds to wait at most for the others; None waits for good.

        Raises:
          NameTakenError: another worker has that name.
          CenterFullError: there is no room for one more.
          TreeMismatchError: ``params`` does not belong to this center.
          NotInitializedError: the others did not come in time.
        """
        ...

    def leave(self, worker: str) -> None:
        """A worker goes, and nobody waits for it any more. May be said twice."""
        ...

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives the center its first parameters, which it copies.

        The worker that did so may ask again (it may have crashed and come back): the
        center stays as it is.

        Raises:
          AlreadyInitializedError: somebody else initialized it.
          TreeMismatchError: leaves that are not real floating arrays.
        """
        ...

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once it is initialized.

        Args:
          timeout: seconds to wait at most; None waits for good.

        Raises:
          NotInitializedError: nobody initialized the center in time.
        """
        ...

    def pull(self) -> Snapshot:
        """The center as it is.

        Raises:
          NotInitializedError: it has no parameters yet.
        """
        ...

    def exchange(
        self,
        contribution: PyTree,
        *,
        anchor_version: Any,
        worker: str,
        steps: int = 0,
    ) -> Snapshot:
        """Applies what a worker contributes and returns what it adopts.

        Args:
          contribution: as the rule's ``contribution`` made it, with the structure and
            shapes of the center. It is read, not kept.
          anchor_version: version of the snapshot that the worker adopted last.
          worker: the worker's name.
          steps: local steps that the worker made, for whoever watches.

        Returns:
          The version that the rule adopts, before or after the message, with the
          staleness and the norm of the message, and whether it was applied.

        Raises:
          NotInitializedError: the center has no parameters yet.
          TreeMismatchError: the contribution does not belong to this center.
          InvalidArgumentError: ``anchor_version`` is of the future.
          MessageRefusedError: the message is not finite, where that is refused.
          CenterUnreachableError: a remote center does not answer. A repeated call with
            the same contribution is applied once only.
        """
        ...
