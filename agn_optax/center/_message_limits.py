"""Message limits: their settings, and the decision which messages are rejected.

Like the ledger, which calls it, this module holds no arrays, no lock and no clock.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center._submission import Submission

_MAX_NORMS = 100  # maximum number of norms in the median
MAX_NORM = 1e17  # float32 can sum the squares of 34,000 such messages
_MIN_NORMS = 10  # applied messages before a norm is compared with the median


@dataclasses.dataclass(frozen=True)
class MessageLimits:
    """Limits of messages; the center rejects the messages that exceed one.

    A rejected message does not move the center. Its worker gets the reason, discards
    its progress since its last exchange, adopts the center and continues.

    Args:
      nonfinite: reject messages that are not finite or far too large: their norm is
        beyond 1e17, so that sums of messages, and of their squares in an optimizer's
        state, stay finite. For a center of float16 the limit is 65504, its largest
        number, so the center and the squares may overflow: give such a center
        ``dtype="float32"``. The results of the center optimizer and of a `Combine` are
        not checked: one of your own that amplifies or divides by zero may move the
        center to numbers that are not finite.
      norm: maximum global norm of a message; None for no limit.
      times_median: maximum norm of a message as a multiple of the median norm of the
        last 100 applied messages. Takes effect after 10 applied messages, also when a
        center continues from disk; None for no limit.
      steps: maximum number of local steps that a message may claim; None for no limit.
      weight: maximum weight that a message may claim; None for no limit.
      in_a_row: number of consecutive rejections of a worker's messages at which its
        exchange raises `MessageRejectedError`.

    Raises:
      InvalidArgumentError: a value is out of range.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> from agn_optax.center import Limits, MessageLimits
      >>> limits = Limits(messages=MessageLimits(norm=10.0))
      >>> rule = agn_optax.rules.downpour()
      >>> center = agn_optax.LocalCenter(rule, jnp.zeros(3), limits=limits)
      >>> session = center.join("worker-0")
      >>> message = agn_optax.center.Submission(1, jnp.full(3, 100.0), anchor_version=0)
      >>> answer = session.exchange(message)
      >>> print(answer.rejected)
      its norm is 173.2, and this center takes 10 at most
      >>> print(answer.params, answer.version)
      [0. 0. 0.] 0
    """

    nonfinite: bool = True
    norm: float | None = None
    times_median: float | None = None
    in_a_row: int = 10
    steps: int | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.nonfinite, bool):
            raise errors.InvalidTypeError(
                f"nonfinite must be True or False, got {self.nonfinite!r}"
            )
        for name in ("norm", "times_median", "weight"):
            if (bound := getattr(self, name)) is not None:
                low = 1.0 if name == "times_median" else 0.0
                check.rate(bound, name, low=low, high=math.inf, low_open=True)
        check.whole_number(self.in_a_row, "in_a_row", least=1, optional=False)
        check.whole_number(self.steps, "steps", least=1)

    @property
    def measures(self) -> bool:
        """True if the limits need the norms of messages, to be read from the device."""
        bounds = (self.norm, self.times_median)
        return self.nonfinite or any(bound is not None for bound in bounds)


class Rejection(NamedTuple):
    """The rejection of a message."""

    kind: str  # name of the exceeded limit in `MessageLimits`
    reason: str
    is_last: bool = False  # whether the worker's exchange raises an error


class Rejections:
    """The decisions of a center on rejections.

    Args:
      limits: the limits.

    Attributes:
      limits: the limits.
      counts: number of messages rejected in this process, by the exceeded limit.
      max_norm: norm beyond which a message counts as not finite; the center sets it to
        `Store.max_norm`.
    """

    def __init__(self, limits: MessageLimits) -> None:
        self.limits = limits
        self.counts: dict[str, int] = {}
        self.max_norm = MAX_NORM
        self._norms: deque[float] = deque(maxlen=_MAX_NORMS)

    def decide(self, submission: Submission, norm: float | None) -> Rejection | None:
        """Return the rejection of a message; None if the message is accepted.

        Args:
          submission: the message, of which only the plain fields are read.
          norm: norm of the message; None if it was not measured.
        """
        limits = self.limits
        if limits.steps is not None and submission.steps > limits.steps:
            found = f"it claims steps={submission.steps}"
            return _exceeds("steps", found, limits.steps)
        if limits.weight is not None and (submission.weight or 0.0) > limits.weight:
            weight = submission.weight
            return _exceeds("weight", f"it claims weight={weight:g}", limits.weight)
        if norm is None:
            return None
        if limits.nonfinite and not norm <= self.max_norm:  # also true for NaN
            larger = "" if math.isnan(norm) else f", or beyond {self.max_norm:.3g}"
            reason = f"it is not finite{larger} (its norm is {norm:.4g})"
            return Rejection("nonfinite", reason)
        # `not a <= b` is also true for NaN.
        limit = limits.norm
        if limit is not None and not norm <= limit:
            return _exceeds("norm", f"its norm is {norm:.4g}", limit)
        if limits.times_median is not None and len(self._norms) >= _MIN_NORMS:
            median = statistics.median(self._norms)
            if median > 0 and not norm <= limits.times_median * median:
                return Rejection(
                    "times_median",
                    f"its norm is {norm:.4g}, more than {limits.times_median:g} times "
                    f"{median:.4g}, the median norm of the last {len(self._norms)} "
                    "messages",
                )
        return None

    def count(self, rejection: Rejection) -> None:
        """Count a rejected message."""
        self.counts[rejection.kind] = self.counts.get(rejection.kind, 0) + 1

    def add_norms(self, norms: Iterable[float | None]) -> None:
        """Record the norms of applied messages."""
        if self.limits.times_median is not None:
            finite = [n for n in norms if n is not None and math.isfinite(n)]
            self._norms.extend(finite)


def _exceeds(kind: str, found: str, limit: float) -> Rejection:
    return Rejection(kind, f"{found}, and this center takes {limit:g} at most")
