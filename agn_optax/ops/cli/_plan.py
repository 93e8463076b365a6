"""``agn-optax plan``: show the cost of rare communication for every rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import rich.console
import rich.table

from agn_optax.ops import planning, units
from agn_optax.ops.cli import _options, _rules, _table
from agn_optax.ops.cli._options import Group
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.planning import Cluster, Cost, Machine

_MACHINE = Group(
    Machine, rates=("endpoint_rate", "apply_rate", "encode_rate", "decode_rate")
)
_CLUSTER = Group(
    Cluster,
    *("workers", "latency", "center_bandwidth", "shards"),
    rates=("center_bandwidth",),
)


@_options.record(groups={"machine": _MACHINE, "cluster": _CLUSTER})
class PlanOptions:
    """Options of the model, its workers, their links and the center.

    Options:
      parameters: Number of parameters of the model, such as 1.3e9.
      step_time: Seconds of a local step.
      bandwidth RATE: Rate of each worker's link in either direction, such as 1Gbit,
        100Mb/s or 1.2GB (b is a bit, B a byte).
      *cluster
      period [the shortest that hides exchanges]: Local steps between exchanges.
      inner NAME: Optimizer of the workers, by its name in optax.
      dtype: Dtype of the parameters.
      center_dtype [--dtype]: Dtype of the center.

    Machine:
      *machine
    """

    parameters: float
    step_time: float
    bandwidth: str
    period: int | None = None
    inner: str = "adam"
    dtype: str = "float32"
    center_dtype: str | None = None


def plan(
    rule: RuleOptions,
    options: PlanOptions,
    json: _options.Json = False,
) -> None:
    """Show what each rule will cost: bytes, time and memory.

    For every rule: the bytes and seconds of an exchange; the shortest period at which
    communication hides behind local steps; the fraction of time that workers spend in
    local steps, both if they wait for answers and if exchanges overlap with steps, at
    --period or else at this shortest period; the bottleneck; and the memory of workers
    and center. Plain data parallelism is the last row. With --rule or --rule-from, only
    that rule is planned.

    Example: agn-optax plan --parameters 1.3e9 --step-time 0.8 --bandwidth 1Gbit
    --workers 8
    """
    optimizer = _rules.inner(options.inner)
    params = planning.abstract(options.parameters, options.dtype)
    codec = _rules.codec(rule)
    given_rule = _rules.make(rule) if _rules.is_given(rule) else None
    if given_rule is None:
        settings_of_rules = vars(rule).keys() - {"codec", "answers"}
        _options.reject(rule, "needs --rule", only=settings_of_rules)
    cluster = _CLUSTER.build(
        options,
        step_time=options.step_time,
        bandwidth=units.rate(options.bandwidth, "--bandwidth"),
        machine=_MACHINE.build(options),
    )
    if given_rule is None:
        built_in = planning.built_in_rules(optimizer, cluster.workers)
        planned = [dataclasses.replace(r, codec=codec) for r in built_in]
    else:
        planned = [given_rule]
    settings = {
        "inner": optimizer,
        "period": options.period,
        "center_dtype": options.center_dtype,
    }
    costs = [planning.plan(r, params, cluster, **settings) for r in planned]
    costs.append(planning.all_reduce(params, cluster, inner=optimizer, codec=codec))
    if json:
        _options.print_json(
            {
                "parameters": int(options.parameters),
                "dtype": options.dtype,
                "inner": options.inner,
                **dataclasses.asdict(cluster),
                "center_bandwidth": cluster.shared,
                "rules": [_as_dict(cost) for cost in costs],
            }
        )
    else:
        console = _table.console()
        console.print(_report(costs, cluster, console.width))


def _as_dict(cost: Cost) -> dict[str, Any]:
    """Return a plan as values for JSON, with the totals of memory."""
    worker, center = cost.worker, cost.center
    totals = {"waiting": worker.waiting, "overlapping": worker.overlapping}
    return {
        **cost._asdict(),
        "worker": {**worker._asdict(), **totals},
        "center": {**center._asdict(), "total": center.total},
    }


def _report(costs: Sequence[Cost], cluster: Cluster, width: int) -> rich.console.Group:
    shards = cluster.shards
    place = "the center" if shards == 1 else f"each of the center's {shards} shards"
    return rich.console.Group(
        f"{cluster.workers} workers, {cluster.step_time:g} s a step; "
        f"{_rate(cluster.bandwidth)} each, {_rate(cluster.shared)} at {place}",
        *_tables([_times(cost) for cost in costs], width),
        "Memory, beside activations and gradients.",
        *_tables([_memory(cost) for cost in costs], width),
    )


def _tables(rows: Sequence[dict[str, str]], width: int) -> Iterator[rich.table.Table]:
    """Return tables with a row for each rule; the last row is a section."""
    columns = [[title, *(row[title] for row in rows)] for title in rows[0]]
    return _table.split(columns, width, sections=[len(rows)])


def _times(cost: Cost) -> dict[str, str]:
    return {
        "rule": cost.rule,
        "message": units.in_bytes(cost.message),
        "answer": units.in_bytes(cost.answer),
        "exchange": f"{cost.exchange:.3g} s",
        "hidden": str(cost.hidden_period or "never"),
        "period": str(cost.period),
        "busy": f"{cost.utilization:.1%}",
        "overlap": f"{cost.utilization_overlapping:.1%}",
        "bottleneck": cost.bottleneck,
    }


def _memory(cost: Cost) -> dict[str, str]:
    worker = cost.worker
    return {
        "rule": cost.rule,
        "model and optimizer": _size(worker.params + worker.inner_state),
        "record, anchor": _size(worker.record + worker.codec_state + worker.anchor),
        "worker": _size(worker.waiting),
        "overlap": _size(worker.overlapping),
        "center": _size(cost.center.total),
    }


def _rate(number: float) -> str:
    return f"{units.in_bytes(number)}/s"


def _size(number: int) -> str:
    return units.in_bytes(number) if number else "-"
