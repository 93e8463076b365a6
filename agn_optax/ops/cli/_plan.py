"""``agn-optax plan``: show the cost of rare communication for every rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import rich.console
import rich.table

from agn_optax.ops import planning, units
from agn_optax.ops.cli import _calibrate, _options, _rules, _table
from agn_optax.ops.cli._options import Group
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.planning import (
    Cluster,
    Coding,
    Cost,
    Disk,
    JournalCost,
    Machine,
    Remedies,
)
from agn_optax.rules import codecs

_MACHINE = Group(
    Machine, rates=("endpoint_rate", "apply_rate", "encode_rate", "decode_rate")
)
_CLUSTER = Group(
    Cluster,
    *("workers", "latency", "center_bandwidth", "shards"),
    rates=("center_bandwidth",),
)
_DISK = Group(
    Disk,
    names={"bandwidth": "disk RATE [no journal]", "size": "journal_size"},
    needs="--disk",
    rates=("bandwidth",),
)


@_options.record(groups={"machine": _MACHINE, "cluster": _CLUSTER, "disk": _DISK})
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
      measure: Measure these values on this machine, with a center in another process.

    Journal:
      *disk
    """

    parameters: float
    step_time: float
    bandwidth: str
    period: int | None = None
    inner: str = "adam"
    dtype: str = "float32"
    center_dtype: str | None = None
    measure: bool | None = None


def plan(
    rule: RuleOptions,
    options: PlanOptions,
    json: _options.Json = False,
) -> None:
    """Show what each rule will cost: bytes, time and memory.

    For every rule: the bytes and seconds of an exchange; the shortest period at which
    communication hides behind local steps; the fraction of time that workers spend in
    local steps, both if they wait for answers and if exchanges overlap with steps, at
    --period or else at this shortest period; the bottleneck, and what would help; and
    the memory of workers and center. Plain data parallelism is the last row. With
    --rule or --rule-from, only that rule is planned.

    With --disk the center keeps a journal, and the rate of its writes and the time of a
    restart are shown. With --codec the times of encoding and decoding are shown, and
    the rate of a link below which the codec pays.

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
        machine=_machine(options, codec if given_rule is None else given_rule.codec),
        disk=_DISK.build_if_given("bandwidth", options),
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


def _machine(options: PlanOptions, codec: codecs.Codec) -> Machine:
    if options.measure:
        _MACHINE.reject(options, "does not go with --measure")
        return _calibrate.calibrate(codec)
    machine: Machine = _MACHINE.build(options)
    return machine


def _as_dict(record: Any) -> Any:
    """Return a record of a plan, with its properties, as values for JSON."""
    if not isinstance(record, tuple):
        return record
    if not hasattr(record, "_fields"):
        return [_as_dict(item) for item in record]
    attributes = vars(type(record)).items()
    properties = [name for name, value in attributes if isinstance(value, property)]
    names = (*record._fields, *properties)
    return {name: _as_dict(getattr(record, name)) for name in names}


def _report(costs: Sequence[Cost], cluster: Cluster, width: int) -> rich.console.Group:
    machine, shards = cluster.machine, cluster.shards
    parts: list[rich.console.RenderableType] = []

    def add(text: str, rows: list[_Row]) -> None:
        parts.append(text)
        parts.extend(_tables(rows, width))

    def rows(part: str, *fields: str) -> list[_Row]:
        records = [(cost, getattr(cost, part)) for cost in costs]
        return [_row(cost, record, *fields) for cost, record in records if record]

    place = "the center" if shards == 1 else f"each of the center's {shards} shards"
    add(
        f"{cluster.workers} workers, {cluster.step_time:g} s a step; "
        f"{_rate(cluster.bandwidth)} each, {_rate(cluster.shared)} at {place}",
        [_row(cost, cost, *_TIMES) for cost in costs],
    )
    add(
        "Remedies, each by itself: a longer period; the period with 16 bits both ways; "
        "shards.",
        rows("remedies", *Remedies._fields),
    )
    if coded := rows("coding", *Coding._fields):
        add(
            "Contributions before encoding; the time of the codec, at "
            f"{_rate(machine.encode_rate)} to encode and {_rate(machine.decode_rate)} "
            "to decode;\nand the rate of a link below which the codec pays.",
            coded,
        )
    if cluster.disk is not None:
        add(
            "The journal of the center, on each of its hosts, with a disk of "
            f"{_rate(cluster.disk.bandwidth)}.",
            rows("journal", *JournalCost._fields, "restart"),
        )
    add("Memory, beside activations and gradients.", list(map(_memory, costs)))
    return rich.console.Group(*parts)


def _tables(rows: list[_Row], width: int) -> Iterator[rich.table.Table]:
    """Return tables with a row for each rule, and a section for all-reduce."""
    names = ["rule", *(cost.rule for cost, _ in rows)]
    columns = [[title, *(row[title] for _, row in rows)] for title in rows[0][1]]
    alone = [i for i, (cost, _) in enumerate(rows, 1) if cost.load is None]
    return _table.split([names, *columns], width, alone)


def _rate(number: float) -> str:
    return f"{units.in_bytes(number)}/s"


def _seconds(number: float) -> str:
    return f"{number:.3g} s"


def _below(rate: float | None) -> str:
    return "any rate" if rate is None else _rate(rate) if rate else "none"


def _size(number: int) -> str:
    return units.in_bytes(number) if number else "-"


def _number(number: object) -> str:
    return "-" if number is None else str(number)


_TIMES = (
    *("message", "answer", "exchange", "hidden_period", "period"),
    *("utilization", "utilization_overlapping", "bottleneck"),
)
_TITLES = {
    "hidden_period": "hidden",
    "utilization": "busy",
    "utilization_overlapping": "overlap",
    "bfloat16": "with bfloat16",
    "pays_below": "pays below",
    "size": "journal",
}
_SIZES = ("message", "answer", "contribution", "snapshot", "size")
_SECONDS = (*("exchange", "encode", "decode", "read", "replay", "rejoin", "restart"),)
_FORMATS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(_SIZES, units.in_bytes),
    **dict.fromkeys(_SECONDS, _seconds),
    **dict.fromkeys(("utilization", "utilization_overlapping"), "{:.1%}".format),
    "written": _rate,
    "hidden_period": lambda period: str(period or "never"),
    "pays_below": _below,
}
# A rule's cost, and its row of a table: cells by the titles of the columns.
_Row = tuple[Cost, dict[str, str]]


def _row(cost: Cost, record: Any, *fields: str) -> _Row:
    """Return the row with the fields of a rule's cost, or of a part of it."""
    return cost, {
        _TITLES.get(name, name): _FORMATS.get(name, _number)(getattr(record, name))
        for name in fields
    }


def _memory(cost: Cost) -> _Row:
    worker = cost.worker
    return cost, {
        "model and optimizer": _size(worker.params + worker.inner_state),
        "record, anchor": _size(worker.record + worker.codec_state + worker.anchor),
        "worker": _size(worker.waiting),
        "overlap": _size(worker.overlapping),
        "center": _size(cost.center.total),
    }
