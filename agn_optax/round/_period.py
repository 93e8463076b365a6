"""Periods: how many local steps stand between two exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax._internal import check

# Exchanges made so far -> local steps of the round that begins.
PeriodSchedule = Callable[[Any], Any]


def as_schedule(period: Any) -> PeriodSchedule:
    """``period`` as a function of the exchanges made so far; a constant is checked now.

    Of a schedule only the first round can be checked before it runs.
    """
    if not callable(period):
        constant = check.positive_int(period, "period")
        return lambda exchanges: constant
    check.positive_int(period(0), "period(0), the first round's period,")
    return period


def steps_of(period: Any) -> Any:
    """A period, as whole steps to compare a counter with."""
    if jnp.issubdtype(jnp.result_type(period), jnp.floating):
        period = jnp.ceil(period)
    return jnp.asarray(period, jnp.int32)


def _either(condition: Any, if_true: int, if_false: int) -> Any:
    """``if_true`` or ``if_false``: an int for ints, an array for arrays."""
    if isinstance(condition, bool | np.bool_):
        return if_true if condition else if_false
    return jnp.where(condition, jnp.int32(if_true), jnp.int32(if_false))


def _check_warmup(period: Any, steps: Any) -> None:
    check.positive_int(period, "period")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise errors.InvalidArgumentError(
            f"steps must be an int of 0 or more, got {steps!r}"
        )


def local_warmup(period: int, *, steps: int) -> PeriodSchedule:
    r"""A period schedule that trains alone for ``steps`` steps before the first round.

    .. math:: \lambda(k) = \begin{cases} \text{steps} + \text{period} & k = 0 \\
              \text{period} & k > 0 \end{cases}

    The first exchange then carries the whole warm-up.

    Args:
      period: local steps of every later round, a positive int.
      steps: local-only steps before the first round.

    Returns:
      A function of the exchanges made so far, for the argument ``period`` of any
      optimizer here. Make ``period`` static under ``inject_hyperparams``, which would
      call it with steps.

    Raises:
      InvalidArgumentError: ``period`` is not positive or ``steps`` is negative.

    Example:
      >>> schedule = local_warmup(10, steps=100)
      >>> schedule(0), schedule(1), schedule(2)
      (110, 10, 10)
    """
    _check_warmup(period, steps)
    return lambda exchanges: _either(exchanges == 0, steps + period, period)


def synchronous_warmup(period: int, *, steps: int) -> PeriodSchedule:
    r"""A period schedule that first exchanges at every step (post-local SGD).

    .. math:: \lambda(k) = \begin{cases} 1 & k < \text{steps} \\
              \text{period} & k \ge \text{steps} \end{cases}

    Args:
      period: local steps of every later round, a positive int.
      steps: steps, and so exchanges, before the first longer round.

    Returns:
      A function of the exchanges made so far, for the argument ``period`` of any
      optimizer here. Make ``period`` static under ``inject_hyperparams``, which would
      call it with steps.

    Raises:
      InvalidArgumentError: ``period`` is not positive or ``steps`` is negative.

    Example:
      >>> schedule = synchronous_warmup(10, steps=3)
      >>> [schedule(exchanges) for exchanges in range(5)]
      [1, 1, 1, 10, 10]

    References:
      Tao Lin, Sebastian U. Stich, Kumar Kshitij Patel, Martin Jaggi, *Don't Use Large
      Mini-Batches, Use Local SGD*, 2018.
    """
    _check_warmup(period, steps)
    return lambda exchanges: _either(exchanges < steps, 1, period)
