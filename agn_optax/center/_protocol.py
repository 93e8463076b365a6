"""The seam between a worker and the center it shares: `Center`, and what it answers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from agn_optax.rules import Rule

PyTree = Any


class Snapshot(NamedTuple):
    """One version of the center, whole. Its arrays never change; do not donate them."""

    params: PyTree
    version: int  # exchanges applied before this version was current
    staleness: int | None = None  # of the message that this answers; None for a pull


@runtime_checkable
class Center(Protocol):
    """The center variable, outside of any worker's program.

    `agn_optax.LocalCenter` is the implementation in this process. Every implementation
    MUST apply each exchange whole and alone (an exchange never sees half of another),
    MUST answer with one version of the center rather than a mixture, and MUST count
    staleness in the same critical section in which the message is applied.
    """

    rule: Rule

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
        self, contribution: PyTree, *, anchor_version: int, worker: str
    ) -> Snapshot:
        """Applies what a worker contributes and returns what it adopts.

        Args:
          contribution: as the rule's ``contribution`` made it, with the structure and
            shapes of the center. It is read, not kept.
          anchor_version: version of the snapshot that the worker adopted last.
          worker: the worker's name.

        Returns:
          The version that the rule adopts, before or after the message, and its
          staleness.

        Raises:
          NotInitializedError: the center has no parameters yet.
          TreeMismatchError: the contribution does not belong to this center.
          InvalidArgumentError: ``anchor_version`` is of the future.
        """
        ...
