"""Periods: the number of local steps between two exchanges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, combinations

# Exchanges made so far -> local steps of the next round.
PeriodSchedule = Callable[[Any], Any]


def as_schedule(period: Any) -> PeriodSchedule:
    """Return ``period`` as a function of the exchanges made so far.

    A constant is checked now. For a schedule, only the first round can be checked
    before it runs.
    """
    if isinstance(period, DynamicPeriod):
        combinations.reject(
            "dynamic_period",
            "workers of one program",
            f"period={period}",
            errors.InvalidTypeError,
        )
    if not callable(period):
        constant = check.positive_int(period, "period")
        return lambda exchanges: constant
    check.positive_int(period(0), "period(0), the first round's period,")
    return period


@dataclasses.dataclass(frozen=True)
class DynamicPeriod:
    """Periods that follow a worker's speed: see `dynamic_period`.

    Attributes:
      longest: local steps in a round of the fastest worker.
      first: local steps in a round of a worker whose speed is not known yet.
    """

    longest: int
    first: int

    def __call__(self, pace: float | None) -> int:
        """Return the local steps of a round at a pace relative to the fastest worker.

        ``pace`` is None as long as the center has not measured it.
        """
        return self.first if pace is None else max(1, int(pace * self.longest))


def dynamic_period(longest: int, *, first: int | None = None) -> DynamicPeriod:
    r"""Make a period that follows the speed of each worker.

    In a round, a worker makes as many local steps as it can make while the fastest
    worker makes ``longest``:

    .. math:: \lambda_w = \max(1, \lfloor v_w / \max_i v_i \cdot H \rfloor)

    where :math:`v_w` is the speed of worker w in local steps per second. The center
    measures this speed between an answer and the worker's next message, and takes the
    median of the last three rounds. Each answer carries the worker's speed as a share
    of the fastest registered worker's, which sets the length of the next round.

    Args:
      longest: :math:`H`, local steps in a round of the fastest worker.
      first: local steps in each of a worker's first two rounds, in which the center
        does not know its speed yet; None is ``longest``.

    Returns:
      A value for the argument ``period`` of a `Worker`. Optimizers do not take it,
      because all workers of one program make their steps together. A worker with
      fragments does not take it either, because fragments have their turns within one
      period.

    Raises:
      InvalidArgumentError: ``longest`` or ``first`` is not a positive int, or ``first``
        is more than ``longest``.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> center = agn_optax.LocalCenter(agn_optax.rules.dynsgd(), jnp.zeros(3))
      >>> worker = agn_optax.Worker(
      ...     center, optax.sgd(0.1), period=agn_optax.dynamic_period(100, first=10)
      ... )

    References:
      Bo Liu, Rachita Chhaparia, Arthur Douillard, Satyen Kale, Andrei A. Rusu, Jiajun
      Shen, Arthur Szlam, Marc'Aurelio Ranzato, *Asynchronous Local-SGD Training for
      Language Modeling*, 2024 (dynamic local updates, DyLU).
    """
    longest = int(check.positive_int(longest, "longest"))
    first = longest if first is None else int(check.positive_int(first, "first"))
    if first > longest:
        raise errors.InvalidArgumentError(
            f"first must be at most longest, {longest}, got {first}"
        )
    return DynamicPeriod(longest, first)


def steps_of(period: Any) -> Any:
    """Round a period up to whole steps, as an int32 array."""
    if jnp.issubdtype(jnp.result_type(period), jnp.floating):
        period = jnp.ceil(period)
    return jnp.asarray(period, jnp.int32)
