"""``agn-optax plan``: show the cost of rare communication with a rule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import rich.console
import rich.table
import rich.text

from agn_optax import rules
from agn_optax._internal import check
from agn_optax.ops import planning, units
from agn_optax.ops.cli import _options, _rules, _table
from agn_optax.ops.cli._options import Group
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.planning import Advice, Cluster, Cost, Loss, Machine
from agn_optax.rules import OPTIMIZERS

_MACHINE = Group(Machine)
_CLUSTER = Group(Cluster, "workers", "latency", "shards")


@_options.record(groups={"machine": _MACHINE, "cluster": _CLUSTER})
class PlanOptions:
    """Options of the model, its workers, their links and the center.

    Options:
      parameters: Number of parameters of the model, such as 1.3e9.
      step_time: Seconds of a local step.
      bandwidth RATE: Rate of each worker's link in either direction, such as 1Gbit,
        100Mb/s or 1.2GB (b is a bit, B a byte).
      center_bandwidth RATE [--bandwidth]: Rate of the center's link in either
        direction, which all workers share; each shard has a link of this rate.
      *cluster
      period [the shortest that hides exchanges]: Local steps between exchanges.
      inner NAME: Optimizer of the workers, by its name in optax.
      dtype: Dtype of the parameters.
      center_dtype [--dtype]: Dtype of the center.
      spread: For the advice: step time of the slowest worker, divided by that of the
        fastest one.
      failures_every SECONDS [no failures]: For the advice: mean seconds between two
        failures of a worker.

    Machine:
      *machine
    """

    parameters: float
    step_time: float
    bandwidth: str
    center_bandwidth: str | None = None
    period: int | None = None
    inner: str = "adam"
    dtype: str = "float32"
    center_dtype: str | None = None
    spread: float = 1.0
    failures_every: float | None = None


def plan(
    rule: RuleOptions,
    options: PlanOptions,
    json: _options.Json = False,
) -> None:
    """Show what a rule will cost: bytes, time and memory.

    The table has: the bytes and seconds of an exchange; the shortest period that hides
    exchanges behind local steps; the fraction of time in local steps, once if workers
    wait for answers and once if exchanges overlap with steps; the bottleneck; and the
    memory of workers and center. Both fractions are at --period, or at the shortest
    period that hides exchanges. Plain data parallelism is the last column. Below, with
    two workers or more: which rule, period, center rate and codec did best in simulated
    training in the nearest setting, of any rule.

    Example: agn-optax plan --rule diloco --parameters 1.3e9 --step-time 0.8
    --bandwidth 1Gbit --workers 8
    """
    planned = _rules.make(rule)
    inner = check.choose(options.inner, OPTIMIZERS, "--inner")(1e-3)
    params = planning.abstract(options.parameters, options.dtype)
    shared = options.center_bandwidth
    cluster = _CLUSTER.build(
        options,
        step_time=options.step_time,
        bandwidth=units.rate(options.bandwidth, "--bandwidth"),
        center_bandwidth=shared and units.rate(shared, "--center-bandwidth"),
        machine=_MACHINE.build(options),
    )
    plan_of = functools.partial(
        planning.plan,
        params=params,
        cluster=cluster,
        inner=inner,
        period=options.period,
        center_dtype=options.center_dtype,
    )
    cost = plan_of(planned)
    reduced = planning.all_reduce(params, cluster, inner=inner, codec=planned.codec)
    costs = [cost, reduced]
    plain = dataclasses.replace(planned, codec=rules.codecs.identity())
    advice = _advise(plan_of(plain), cluster, options)
    if json:
        _options.print_json(
            {
                "parameters": int(options.parameters),
                "dtype": options.dtype,
                "inner": options.inner,
                **dataclasses.asdict(cluster),
                "center_bandwidth": cluster.shared,
                "rules": [_as_dict(cost) for cost in costs],
                "advice": advice and _advice_as_dict(advice),
            }
        )
    else:
        console = _table.console()
        console.print(_report(costs, cluster))
        if advice is not None:
            console.print(_advice_text(advice))


def _advise(bare: Cost, cluster: Cluster, options: PlanOptions) -> Advice | None:
    """Return the advice for a cluster; None for one worker.

    Args:
      bare: the plan without a codec, because the simulated settings are told apart by
        exchanges without one.
      cluster: the workers and their links.
      options: the options.
    """
    every = options.failures_every
    if every is not None:
        check.rate(every, "--failures-every", low=0.0, high=math.inf, low_open=True)
    check.rate(options.spread, "--spread", low=1.0, high=math.inf)
    if cluster.workers == 1:
        return None
    longest = max(bare.exchange, cluster.workers * bare.service)
    return planning.advise(
        workers=cluster.workers,
        exchange=longest / cluster.step_time,
        spread=options.spread,
        failures=min(1.0, cluster.step_time / every) if every else 0.0,
    )


def _advice_as_dict(advice: Advice) -> dict[str, Any]:
    """Return advice as values for JSON."""
    return {
        **advice._asdict(),
        "asked": advice.asked._asdict(),
        "nearest": advice.nearest._asdict(),
        "best": [
            {**each._asdict(), "loss": each.loss._asdict()} for each in advice.best
        ],
        "data_parallel": advice.data_parallel._asdict(),
    }


def _advice_text(advice: Advice) -> str:
    """Return advice as lines, with where it comes from."""
    near, asked = advice.nearest, advice.asked
    often = "no failures"
    if near.failures:
        often = f"a failure in {1 / near.failures:g} steps"
    setting = (
        f"{near.workers} workers, an exchange as long as {near.exchange:g} steps, "
        f"speeds 1 to {near.spread:g}, {often}"
    )
    lines = [f"\nAdvice, from {advice.source}.", f"Nearest setting: {setting}."]
    for name, (least, most) in advice.outside.items():
        lines.append(
            f"Outside of the simulated range: {name} {getattr(asked, name):.3g}, not "
            f"{least:g} to {most:g}."
        )
    lines += [f"  {choice}: loss {_loss(choice.loss)}" for choice in advice.best]
    data_parallel = _loss(advice.data_parallel)
    lines.append(f"  data parallel, an exchange at every step: loss {data_parallel}")
    return "\n".join(lines)


def _loss(loss: Loss) -> str:
    return f"{loss.mean:.2f} ({loss.lowest:.2f} to {loss.highest:.2f})"


def _as_dict(cost: Cost) -> dict[str, Any]:
    """Return a plan as values for JSON, with the totals of memory."""
    worker, center = cost.worker, cost.center
    totals = {"waiting": worker.waiting, "overlapping": worker.overlapping}
    return {
        **cost._asdict(),
        "worker": {**worker._asdict(), **totals},
        "center": {**center._asdict(), "total": center.total},
    }


def _report(costs: Sequence[Cost], cluster: Cluster) -> rich.console.Group:
    shards = cluster.shards
    place = "the center" if shards == 1 else f"each of the center's {shards} shards"
    table = rich.table.Table("")
    for cost in costs:
        table.add_column(rich.text.Text(cost.rule), justify="right")
    for rows in (_TIMES, _MEMORY):
        table.add_section()
        for title, cell in rows.items():
            table.add_row(title, *map(cell, costs))
    return rich.console.Group(
        f"{cluster.workers} workers, {cluster.step_time:g} s a step; "
        f"{_rate(cluster.bandwidth)} each, {_rate(cluster.shared)} at {place}",
        table,
        "Memory does not include activations and gradients.",
    )


def _rate(number: float) -> str:
    return f"{units.in_bytes(number)}/s"


def _size(number: int) -> str:
    return units.in_bytes(number) if number else "-"


# Rows of the table, each a title and the cell of a plan.
_TIMES: dict[str, Callable[[Cost], str]] = {
    "message": lambda cost: units.in_bytes(cost.message),
    "answer": lambda cost: units.in_bytes(cost.answer),
    "exchange": lambda cost: f"{cost.exchange:.3g} s",
    "hidden": lambda cost: str(cost.hidden_period or "never"),
    "period": lambda cost: str(cost.period),
    "busy": lambda cost: f"{cost.utilization:.1%}",
    "overlap": lambda cost: f"{cost.utilization_overlapping:.1%}",
    "bottleneck": lambda cost: cost.bottleneck,
}
_MEMORY: dict[str, Callable[[Cost], str]] = {
    "model and optimizer": lambda c: _size(c.worker.params + c.worker.inner_state),
    "record, anchor": lambda c: _size(
        c.worker.record + c.worker.codec_state + c.worker.anchor
    ),
    "worker": lambda cost: _size(cost.worker.waiting),
    "worker, overlap": lambda cost: _size(cost.worker.overlapping),
    "center": lambda cost: _size(cost.center.total),
}
