"""Advice on rule, period, center rate and codec, from a table of simulated training."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from agn_optax._internal import check

_TABLE = pathlib.Path(__file__).with_name("advice.json")
_ALMOST = 1e-6  # relative: a number at the edge of the range is inside
SOURCE = "simulated training of a small model on digits, all for the same virtual time"


class Setting(NamedTuple):
    """Workers, links, speeds and failures, with times in local steps."""

    workers: int  # number of workers
    exchange: float  # local steps that an exchange takes, without a codec
    spread: float = 1.0  # step time of the slowest worker by that of the fastest one
    failures: float = 0.0  # failures of a worker for each of its local steps


class Loss(NamedTuple):
    """The held-out loss at the end of runs with different seeds."""

    mean: float
    lowest: float
    highest: float


class Choice(NamedTuple):
    """A way to train, with its loss in the nearest setting."""

    rule: str  # name of the rule
    mode: str  # "asynchronous", "synchronous", or "quorum": of three quarters
    period: int  # local steps between exchanges
    center: str  # center optimizer and its rate, or "none"; n stands for the workers
    codec: str  # "none"; "bfloat16"; "4 bits": with error feedback, answers in bfloat16
    overlap: bool  # whether local steps go on during exchanges
    loss: Loss

    def __str__(self) -> str:
        center = "" if self.center == "none" else f", center {self.center}"
        codec = "" if self.codec == "none" else f", codec {self.codec}"
        overlap = ", overlap" if self.overlap else ""
        return f"{self.rule}, {self.mode}, period {self.period}{center}{codec}{overlap}"


class Advice(NamedTuple):
    """The best choices in the simulated setting that is nearest to a cluster."""

    asked: Setting
    nearest: Setting
    # The range that was simulated, for the numbers of ``asked`` that are outside of it.
    outside: dict[str, tuple[float, float]]
    best: tuple[Choice, ...]  # choices of different rules or modes, the best one first
    data_parallel: Loss  # of a synchronous exchange at every step, without a codec
    source: str  # what the losses are of


def advise(
    *, workers: int, exchange: float, spread: float = 1.0, failures: float = 0.0
) -> Advice:
    r"""Return which rule, mode, period, center rate and codec suit a cluster.

    .. math:: \text{nearest} = \arg\min_s |\log n / n_s|,\ |\log e / e_s|,\
        |\log r / r_s|,\ |f - f_s|, \text{ each by itself}

    where :math:`n` are the workers, :math:`e` the local steps of an exchange, :math:`r`
    the spread of speeds and :math:`f` the failures of a worker for each local step. The
    choices are those of this setting: nothing is interpolated, or extrapolated. The
    losses are of a small model, so read their order, not their values.

    Args:
      workers: number of workers.
      exchange: seconds of an exchange without a codec, divided by those of a local step
        of the median worker. If all workers share a link that is the limit, take the
        seconds in which all of them exchange once.
      spread: step time of the slowest worker, divided by that of the fastest one.
      failures: failures of a worker for each of its local steps: step time divided by
        the time between two failures.

    Returns:
      The choices and where they come from. Numbers outside of the simulated range are
      named in ``outside``; the choices are then those at the edge of the range.

    Raises:
      InvalidArgumentError: a number is out of range.

    Example:
      >>> from agn_optax import planning
      >>> advice = planning.advise(workers=6, exchange=150.0)
      >>> advice.nearest
      Setting(workers=8, exchange=100.0, spread=1.0, failures=0.0)
      >>> advice.outside
      {'exchange': (0.1, 100.0)}
    """
    asked = Setting(
        int(check.positive_int(workers, "workers")),
        check.rate(exchange, "exchange", low=0.0, high=math.inf),
        check.rate(spread, "spread", low=1.0, high=math.inf),
        check.rate(failures, "failures", low=0.0, high=1.0),
    )
    cells = _cells()
    grid = {name: sorted({each[name] for each in cells}) for name in Setting._fields}
    nearest = Setting(
        _nearest(asked.workers, grid["workers"]),
        _nearest(asked.exchange, grid["exchange"]),
        _nearest(asked.spread, grid["spread"]),
        min(grid["failures"], key=lambda value: abs(value - asked.failures)),
    )
    outside = {
        name: (min(grid[name]), max(grid[name]))
        for name, value in asked._asdict().items()
        if not _is_inside(value, grid[name])
    }
    (cell,) = (
        each
        for each in cells
        if all(each[name] == value for name, value in nearest._asdict().items())
    )
    best = [Choice(**{**each, "loss": Loss(*each["loss"])}) for each in cell["best"]]
    data_parallel = Loss(*cell["data_parallel"])
    return Advice(asked, nearest, outside, tuple(best), data_parallel, SOURCE)


@functools.cache
def _cells() -> list[dict[str, Any]]:
    """Return the table, which docs/figures/advice.py writes."""
    cells: list[dict[str, Any]] = json.loads(_TABLE.read_text())["cells"]
    return cells


def _nearest(value: float, grid: Sequence[Any]) -> Any:
    """Return the value of a grid that is nearest on a logarithmic scale."""
    return min(grid, key=lambda each: abs(math.log(max(value, 1e-300) / each)))


def _is_inside(value: float, grid: Sequence[float]) -> bool:
    least, most = min(grid), max(grid)
    return least * (1 - _ALMOST) <= value <= most * (1 + _ALMOST)
