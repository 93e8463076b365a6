"""The records of an exchange: the submission of a worker, and the center's answer.

Session, wire, core, ledger, store and journal pass on a record's plain fields by name.
A new field is therefore added only here, and in center.proto if it is sent over a
network. Append it last: callers may pass the others by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from agn_optax import errors
from agn_optax._internal import Notice, check

PyTree = Any

_MAX_STEPS = 2**31 - 1  # maximum local steps of a message: programs count in int32
# Fields of the records that are trees, or that the receiver of an answer adds.
_NOT_PLAIN = {"contribution", "reported", "notices", "attempt"}
_NOT_PLAIN |= {"params", "is_partial", "received"}


class Submission(NamedTuple):
    """A message of a worker: its contribution, and the numbers that go with it.

    Args:
      sequence: number of the exchange: one more than that of the session's last
        exchange, or the same number to repeat that exchange.
      contribution: the result of the rule's ``contribution``, with the structure and
        shapes of the center. The center may read it until the answer is collected.
      anchor_version: version of the snapshot that the worker adopted last; for a center
        in shards, a tuple with the version of each shard.
      steps: number of local steps in the message; 0 if unknown.
      weight: weight that the worker claims for its round, such as a number of tokens.
        Must be positive; None counts as 1.
      reported: metrics of the worker by their names, for monitoring.
      notices: texts of what goes wrong at the worker, by the names of its checks.
      attempt: number of times that the processes of a worker have begun this exchange
        anew, together; 0 for a worker of one process.
      late_steps: number of the local steps that were made before the worker adopted its
        anchor, because the answer came while local steps went on; for the tape.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> from agn_optax.center import Submission
      >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour(), jnp.ones(2))
      >>> session = center.join("worker-0")
      >>> answer = session.exchange(Submission(1, jnp.ones(2), anchor_version=0))
      >>> print(answer.params, answer.version, answer.staleness)
      [0. 0.] 1 0
    """

    sequence: int
    contribution: PyTree
    anchor_version: Any
    steps: int = 0
    weight: float | None = None
    reported: Mapping[str, Any] | None = None
    notices: Mapping[str, str] | None = None
    attempt: int = 0
    late_steps: int = 0

    def checked(self) -> Submission:
        """Check the numbers of a submission, and return it with Python numbers.

        The submission must be for one center, such as one shard of a center in shards.

        Raises:
          InvalidArgumentError: ``anchor_version``, ``steps``, ``weight`` or
            ``late_steps`` is out of range.
          InvalidTypeError: ``weight`` is not a number.
        """
        steps, version = _as_int(self.steps), _as_int(self.anchor_version)
        check.whole_number(steps, "steps", least=0, most=_MAX_STEPS, optional=False)
        late = _as_int(self.late_steps)
        check.whole_number(late, "late_steps", least=0, most=steps, optional=False)
        weight = check.weight(self.weight)
        if not (isinstance(version, int) and version >= 0):
            raise errors.InvalidArgumentError(
                "anchor_version must be a version that the center has had, "
                f"got {version!r}"
            )
        return self._replace(
            sequence=_as_int(self.sequence),
            anchor_version=version,
            steps=steps,
            weight=weight,
            late_steps=late,
        )

    def without_arrays(self) -> Submission:
        """Return the plain fields of the submission; the others have no values."""
        if (
            self.contribution is None
            and self.reported is None
            and self.notices is None
            and self.attempt == 0
        ):
            return self
        return self._replace(contribution=None, reported=None, notices=None, attempt=0)


class Snapshot(NamedTuple):
    """One complete version of the center.

    Its arrays never change: do not donate them.
    """

    params: PyTree
    # int: number of updates up to this version; a synchronous round of messages is
    # one update. A center in shards has a tuple with one int per shard.
    version: Any


class Answer(NamedTuple):
    """The answer to a `Submission`: a version, and what was done with the message.

    The worker adopts this version, which is the one before or after its message,
    depending on `Rule.adopts`. Its arrays never change: do not donate them.
    """

    params: PyTree  # of the version
    version: Any  # as in `Snapshot`
    sequence: int  # number of the answered exchange
    staleness: int = 0  # of the message
    norm: Any = None  # float scalar: norm of the message; None if it is not known
    applied: bool = True  # False if the message was dropped or rejected
    rejected: str = ""  # reason for the rejection; "" if the message was not rejected
    # The worker's speed (local steps per second) divided by that of the fastest worker.
    # None until the center has measured it.
    pace: float | None = None
    # True if some shards of the center applied the message and others did not.
    is_partial: bool = False
    received: int | None = None  # bytes received; None if nothing was transferred
    # What goes wrong at the center, and with this worker as the center sees it.
    notices: tuple[Notice, ...] = ()
    # str: a record of the center's journal that is on disk; "" without a journal. A
    # center in shards has a tuple with one str per shard.
    witness: Any = ""

    @property
    def snapshot(self) -> Snapshot:
        """The version that the worker adopts, without the other fields."""
        return Snapshot(self.params, self.version)


ExchangeRecord = Submission | Snapshot | Answer


def plain_fields(record: ExchangeRecord | type[ExchangeRecord]) -> tuple[str, ...]:
    """Return the names of a record's plain fields: the numbers and texts."""
    return tuple(name for name in record._fields if name not in _NOT_PLAIN)


def plain(record: ExchangeRecord) -> dict[str, Any]:
    """Return the plain fields of a record by their names, without converting them."""
    return {name: getattr(record, name) for name in plain_fields(record)}


def _as_int(number: Any) -> Any:
    """Return a NumPy integer as an int, and any other value unchanged."""
    return int(number) if isinstance(number, np.integer) else number
