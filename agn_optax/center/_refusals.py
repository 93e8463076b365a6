"""Which messages a center refuses: settings, and decisions from numbers alone.

Like the ledger, which asks and has its memory, this holds no arrays, no lock and no
clock.
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

_RECENT = 100  # messages that are recent
_ENOUGH = 10  # messages that must have been applied before others are compared to them
FADES = 1 - 1 / _RECENT  # how much of a movement counts one version later


@dataclasses.dataclass(frozen=True)
class Refuse:
    """Which messages a center refuses.

    A message that is refused does not move the center. Its worker is told why, forgets
    what it has done since its last exchange, adopts the center and goes on.

    Args:
      nonfinite: those with elements that are not finite, and those after which the
        center would not be finite.
      norm: those with a larger global norm; None for no bound.
      times_median: those whose norm is more than so many times the median of the last
        100 that were applied, once there have been 10; None for no bound.
      element: those with an element of a larger absolute value; None for no bound.
      staleness: those made of a center that is more than so many versions old, as
        `BoundedStaleness` counts them; None for no bound.
      share: those after which their worker would have made more than this share, in
        (0, 1), of all recent movement, the sum of the norms of what was applied, in
        which a message counts 1 % less with every version since. Only of workers that
        are there, once they have made 10 exchanges, and never of one alone. Of n equal
        workers each has 1 / n, so a bound has to be well above that; while there are so
        few that none could keep it (n <= 1 / share), it is not asked. None for no
        bound.
      steps: those that claim to be made of more local steps; None for no bound.
      weight: those that claim a larger weight; None for no bound.
      in_a_row: so many messages of a worker are refused, one after the other, until its
        exchange raises `MessageRefusedError` instead.

    Raises:
      InvalidArgumentError: a value is out of range.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> refuse = agn_optax.center.Refuse(norm=10.0)
      >>> rule = agn_optax.rules.downpour()
      >>> center = agn_optax.LocalCenter(rule, jnp.zeros(3), refuse=refuse)
      >>> session = center.join("worker-0")
      >>> answer = session.exchange(1, jnp.full(3, 100.0), anchor_version=0)
      >>> print(answer.refused)
      its norm is 173.2, and this center takes 10 at most
      >>> print(answer.params, answer.version)
      [0. 0. 0.] 0
    """

    nonfinite: bool = True
    norm: float | None = None
    times_median: float | None = None
    element: float | None = None
    staleness: int | None = None
    share: float | None = None
    in_a_row: int = 10
    steps: int | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.nonfinite, bool):
            raise errors.InvalidTypeError(
                f"nonfinite must be True or False, got {self.nonfinite!r}"
            )
        for name in ("norm", "times_median", "element", "weight"):
            if (bound := getattr(self, name)) is not None:
                low = 1.0 if name == "times_median" else 0.0
                check.rate(bound, name, low=low, high=math.inf, low_open=True)
        if self.share is not None:
            check.rate(self.share, "share", low=0.0, high=1.0, low_open=True)
            if self.share == 1.0:
                raise errors.InvalidArgumentError(
                    "share must be less than 1, which bounds nothing; None is no bound"
                )
        check.whole_number(self.staleness, "staleness", least=0)
        check.whole_number(self.in_a_row, "in_a_row", least=1, optional=False)
        check.whole_number(self.steps, "steps", least=1)

    @property
    def measures(self) -> bool:
        """Whether it must be known how large messages are; else nobody waits for it."""
        bounds = (self.norm, self.times_median, self.element, self.share)
        return self.nonfinite or any(bound is not None for bound in bounds)


class Claim(NamedTuple):
    """What a worker says of its message, which nobody can check but for its range."""

    steps: int = 0  # local steps that it was made of; 0 where nobody says so
    weight: float | None = None  # what it counts; None where nobody says so


UNSAID = Claim()


class Size(NamedTuple):
    """How large a message is."""

    norm: float
    largest: float | None  # of its elements; None where nobody asks


class Refusal(NamedTuple):
    """That a message was refused, and why."""

    kind: str  # the setting of `Refuse` that it was refused by
    why: str
    is_last: bool = False  # its worker is told by an error


def _claims_more(kind: str, claimed: float | None, most: float) -> Refusal:
    return Refusal(
        kind, f"it claims {kind} of {claimed:g}, and this center takes {most:g} at most"
    )


class Refusals:
    """The decisions of a center.

    Args:
      refuse: by which.

    Attributes:
      refuse: by which.
      counts: messages that were refused in this process, by the setting.
    """

    def __init__(self, refuse: Refuse) -> None:
        self.refuse = refuse
        self.counts: dict[str, int] = {}
        self._norms: deque[float] = deque(maxlen=_RECENT)
        self._new: list[float] = []  # of them, since `memory` was asked

    def judge(
        self,
        size: Size | None,
        missed: int,
        own: float,
        others: float,
        exchanges: int,
        claim: Claim,
    ) -> Refusal | None:
        """Whether a message is refused.

        Args:
          size: of it; None where it was not measured.
          missed: versions that were made since its worker's round began.
          own: recent movement of its worker.
          others: recent movement of all others that are there.
          exchanges: that all of them have made.
          claim: of it.
        """
        refuse = self.refuse
        if refuse.steps is not None and claim.steps > refuse.steps:
            return _claims_more("steps", claim.steps, refuse.steps)
        if refuse.weight is not None and (claim.weight or 0.0) > refuse.weight:
            return _claims_more("weight", claim.weight, refuse.weight)
        if refuse.staleness is not None and missed > refuse.staleness:
            return Refusal(
                "staleness",
                f"it is {missed} versions late, and this center takes "
                f"{refuse.staleness} at most",
            )
        if size is None:
            return None
        norm, largest = size
        if refuse.nonfinite and not math.isfinite(norm):
            return Refusal("nonfinite", f"it is not finite (its norm is {norm})")
        # Each of these holds of NaN, too.
        if refuse.norm is not None and not norm <= refuse.norm:
            return Refusal(
                "norm",
                f"its norm is {norm:.4g}, and this center takes {refuse.norm:g} at "
                "most",
            )
        bound = refuse.element
        if bound is not None and largest is not None and not largest <= bound:
            return Refusal(
                "element",
                f"it has an element of {largest:.4g}, and this center takes "
                f"{bound:g} at most",
            )
        if refuse.times_median is not None and len(self._norms) >= _ENOUGH:
            median = statistics.median(self._norms)
            if median > 0 and not norm <= refuse.times_median * median:
                return Refusal(
                    "times_median",
                    f"its norm is {norm:.4g}, more than {refuse.times_median:g} times "
                    f"{median:.4g}, the median of the last {len(self._norms)}",
                )
        if refuse.share is not None and others > 0 and exchanges >= _ENOUGH:
            share = (own + norm) / (own + norm + others)
            if not share <= refuse.share:
                return Refusal(
                    "share",
                    f"with it {share:.0%} of all movement would be its worker's, and "
                    f"this center takes {refuse.share:.0%} of one worker at most",
                )
        return None

    def count(self, refusal: Refusal) -> None:
        """A message has been refused."""
        self.counts[refusal.kind] = self.counts.get(refusal.kind, 0) + 1

    def took(self, norms: Iterable[float]) -> None:
        """Messages of these norms have been applied."""
        if self.refuse.times_median is not None:
            self._new = [norm for norm in norms if math.isfinite(norm)]
            self._norms.extend(self._new)

    def memory(self, *, whole: bool) -> list[float]:
        """What outlives a process: all of it, or what is new since this was asked."""
        new, self._new = self._new, []
        return list(self._norms) if whole else new

    def recall(self, norms: Iterable[float]) -> None:
        """What `memory` returned in an earlier process, from the first to the last."""
        self._norms.extend(norms)
