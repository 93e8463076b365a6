"""``agn-optax plan``: what rare communication will cost, for every rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import rich.console
import rich.table
import rich.text

from agn_optax import planning
from agn_optax.cli import _calibrate, _options, _rules, _table, _units
from agn_optax.cli._rules import RuleOptions
from agn_optax.planning import Cluster, Cost, Machine

_Column = Callable[[Cost], str]
_TIMES: dict[str, _Column] = {
    "message": lambda cost: _table.size(cost.message),
    "answer": lambda cost: _table.size(cost.answer),
    "exchange": lambda cost: f"{cost.exchange:.3g} s",
    "hidden": lambda cost: str(cost.hidden_period or "never"),
    "period": lambda cost: str(cost.period),
    "busy": lambda cost: f"{cost.utilization:.1%}",
    "overlap": lambda cost: f"{cost.utilization_overlapping:.1%}",
}
_MEMORY: dict[str, _Column] = {
    "model and optimizer": lambda cost: _size(
        cost.worker.params + cost.worker.inner_state
    ),
    "record, anchor": lambda cost: _size(
        cost.worker.record + cost.worker.codec_state + cost.worker.anchor
    ),
    "worker": lambda cost: _size(cost.worker.waiting),
    "overlap": lambda cost: _size(cost.worker.overlapping),
    "center": lambda cost: _size(cost.center.total),
}


def _rate(number: float) -> str:
    return f"{_table.size(number)}/s"


_DEFAULT = Machine()


@_options.record(
    overhead=str(_DEFAULT.overhead),
    endpoint=_rate(_DEFAULT.endpoint_rate),
    apply=_rate(_DEFAULT.apply_rate),
)
class MachineOptions:
    """What an exchange takes beside the links.

    Machine:
      overhead SECONDS [{overhead}]: Of an exchange of nothing.
      endpoint_rate RATE [{endpoint}]: Message and answer, through both ends.
      apply_rate RATE [{apply}]: What the center's arithmetic reads and writes.
      measure: Measure these on this machine, with a center in another process.
    """

    overhead: float | None = None
    endpoint_rate: str | None = None
    apply_rate: str | None = None
    measure: bool | None = _options.switch()


@_options.record()
class ClusterOptions:
    """The model, its workers and their links.

    Options:
      parameters: Of the model; 1.3e9, say.
      step_time: Seconds of a local step.
      bandwidth RATE: Of each worker's link, either way: 1Gbit, 100Mb/s, 1.2GB (b is a
        bit, B a byte).
      workers: How many.
      period [each rule's hidden one]: Local steps between exchanges.
      latency: Seconds of a round trip.
      center_bandwidth RATE [--bandwidth]: Of the center's link, for all workers.
      inner NAME: The workers' optimizer, of optax.
      dtype: Of the parameters.
      center_dtype [--dtype]: Of the center.
    """

    parameters: float
    step_time: float
    bandwidth: str
    workers: int = 1
    period: int | None = None
    latency: float = 0.0
    center_bandwidth: str | None = None
    inner: str = "adam"
    dtype: str = "float32"
    center_dtype: str | None = None


def plan(
    rule: RuleOptions,
    machine: MachineOptions,
    options: ClusterOptions,
    json: _options.Json = False,
) -> None:
    """Say what each rule will cost: bytes, time and memory.

    For every rule: the bytes and seconds of an exchange, the shortest period at which
    communication hides behind local steps, the part of the time that workers are busy
    with these, at --period or at that one, where they wait for their answers and where
    they overlap, and the memory that workers and center keep. Plain data parallelism
    stands below. With --rule or --rule-from, only that rule is planned.

    Example: agn-optax plan --parameters 1.3e9 --step-time 0.8 --bandwidth 1Gbit
    --workers 8
    """
    optimizer = _rules.inner(options.inner)
    params = planning.abstract(options.parameters, options.dtype)
    cluster = Cluster(
        step_time=options.step_time,
        workers=options.workers,
        latency=options.latency,
        machine=_machine(machine),
        **_rates(options, "bandwidth", "center_bandwidth"),
    )
    codec = _rules.codec(rule)
    if _rules.is_given(rule):
        planned = [_rules.make(rule)]
    else:
        _options.refuse(rule, "needs --rule", but=("codec",))
        planned = [
            dataclasses.replace(each, codec=codec)
            for each in planning.built_in_rules(optimizer, options.workers)
        ]
    costs = [
        planning.plan(
            each,
            params,
            cluster,
            inner=optimizer,
            period=options.period,
            center_dtype=options.center_dtype,
        )
        for each in planned
    ]
    costs.append(
        planning.all_reduce(params, cluster, inner=optimizer, wire_dtype=codec.answers)
    )
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
        _table.console().print(_of(costs, cluster))


def _machine(options: MachineOptions) -> Machine:
    if options.measure:
        _options.refuse(options, "does not go with --measure", but=("measure",))
        return _calibrate.calibrate()
    rates = _rates(options, "endpoint_rate", "apply_rate")
    return Machine(**(_options.given(options) | rates))


def _rates(options: ClusterOptions | MachineOptions, *names: str) -> dict[str, float]:
    """Those that were given, in bytes a second."""
    given = _options.given(options)
    return {
        name: _units.rate(given[name], _options.option(name))
        for name in names
        if name in given
    }


def _as_dict(cost: Cost) -> dict[str, Any]:
    worker, center = cost.worker, cost.center
    sums = {"waiting": worker.waiting, "overlapping": worker.overlapping}
    return {
        **cost._asdict(),
        "worker": worker._asdict() | sums,
        "center": center._asdict() | {"total": center.total},
    }


def _of(costs: Sequence[Cost], cluster: Cluster) -> rich.console.Group:
    machine = cluster.machine
    return rich.console.Group(
        f"{cluster.workers} workers, {cluster.step_time:g} s a step; "
        f"{_rate(cluster.bandwidth)} each, {_rate(cluster.shared)} at the center",
        _as_table(costs, _TIMES),
        f"An exchange of nothing takes {cluster.latency:g} s on its way and "
        f"{machine.overhead:.2g} s at its ends, which take "
        f"{_rate(machine.endpoint_rate)}; the center's arithmetic takes "
        f"{_rate(machine.apply_rate)}.",
        _as_table(costs, _MEMORY),
        "Beside activations and gradients. The center's has a message of every worker.",
    )


def _size(number: int) -> str:
    return _table.size(number) if number else "-"


def _as_table(costs: Sequence[Cost], columns: dict[str, _Column]) -> rich.table.Table:
    """A row for each rule, and what they are compared with at the end."""
    table = rich.table.Table()
    table.add_column("rule", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for cost in costs:
        if cost is costs[-1]:
            table.add_section()
        cells = [cost.rule, *(column(cost) for column in columns.values())]
        table.add_row(*map(rich.text.Text, cells))
    return table
