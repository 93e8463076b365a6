"""``agn-optax plan``: show the cost of rare communication for every rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import rich.cells
import rich.console
import rich.table
import rich.text

from agn_optax.ops import planning, units
from agn_optax.ops.cli import _calibrate, _options, _rules, _table
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.planning import (
    Cluster,
    Coding,
    Cost,
    Disk,
    Kept,
    Level,
    Machine,
    Remedies,
    Tree,
)
from agn_optax.rules import codecs

T = TypeVar("T")
_Column = Callable[[Cost], str]
_TIMES: dict[str, _Column] = {
    "message": lambda cost: units.in_bytes(cost.message),
    "answer": lambda cost: units.in_bytes(cost.answer),
    "exchange": lambda cost: _seconds(cost.exchange),
    "hidden": lambda cost: str(cost.hidden_period or "never"),
    "period": lambda cost: str(cost.period),
    "busy": lambda cost: f"{cost.utilization:.1%}",
    "overlap": lambda cost: f"{cost.utilization_overlapping:.1%}",
    "bottleneck": lambda cost: cost.bottleneck,
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
_REMEDIES: dict[str, Callable[[Remedies], str]] = {
    "period": lambda remedies: _number(remedies.period),
    "with bfloat16": lambda remedies: _number(remedies.bfloat16),
    "shards": lambda remedies: _number(remedies.shards),
    "levels": lambda remedies: _number(remedies.levels),
}
_CODING: dict[str, Callable[[Coding], str]] = {
    "contribution": lambda coding: units.in_bytes(coding.contribution),
    "encode": lambda coding: _seconds(coding.encode),
    "decode": lambda coding: _seconds(coding.decode),
    "pays below": lambda coding: _below(coding.pays_below),
}
_LEVELS: dict[str, Callable[[Level], str]] = {
    "centers": lambda level: str(level.centers),
    "children": lambda level: str(level.children),
    "period": lambda level: str(level.period),
    "interval": lambda level: _seconds(level.interval),
    "exchange": lambda level: _seconds(level.exchange),
    "exchanges/s": lambda level: f"{level.exchanges:.3g}",
    "received": lambda level: _rate(level.received),
    "sent": lambda level: _rate(level.sent),
    "load": lambda level: f"{level.load:.1%}",
    "bottleneck": lambda level: level.bottleneck,
}
_KEPT: dict[str, Callable[[Kept], str]] = {
    "written": lambda kept: _rate(kept.written),
    "snapshot": lambda kept: units.in_bytes(kept.snapshot),
    "journal": lambda kept: units.in_bytes(kept.journal),
    "read": lambda kept: _seconds(kept.read),
    "replay": lambda kept: _seconds(kept.replay),
    "rejoin": lambda kept: _seconds(kept.rejoin),
    "restart": lambda kept: _seconds(kept.restart),
}


def _rate(number: float) -> str:
    return f"{units.in_bytes(number)}/s"


def _seconds(number: float) -> str:
    return f"{number:.3g} s"


def _below(rate: float | None) -> str:
    return "any rate" if rate is None else _rate(rate) if rate else "none"


def _number(number: int | None) -> str:
    return "-" if number is None else str(number)


_DEFAULT = Machine()


@_options.record(
    overhead=str(_DEFAULT.overhead),
    endpoint=_rate(_DEFAULT.endpoint_rate),
    apply=_rate(_DEFAULT.apply_rate),
    encode=_rate(_DEFAULT.encode_rate),
    decode=_rate(_DEFAULT.decode_rate),
)
class MachineOptions:
    """Constants of an exchange, beside those of the links.

    Machine:
      overhead SECONDS [{overhead}]: Time of an empty exchange.
      endpoint_rate RATE [{endpoint}]: Rate of message and answer through both ends.
      apply_rate RATE [{apply}]: Rate at which the center's arithmetic reads and writes.
      encode_rate RATE [{encode}]: Rate at which --codec encodes, in bytes of
        contributions before encoding.
      decode_rate RATE [{decode}]: Rate at which --codec decodes, in the same bytes.
      measure: Measure these on this machine, with a center in another process.
    """

    overhead: float | None = None
    endpoint_rate: str | None = None
    apply_rate: str | None = None
    encode_rate: str | None = None
    decode_rate: str | None = None
    measure: bool | None = None


@_options.record()
class ClusterOptions:
    """Options of the model, its workers and their links.

    Options:
      parameters: Number of parameters of the model, such as 1.3e9.
      step_time: Seconds of a local step.
      bandwidth RATE: Rate of each worker's link in either direction, such as 1Gbit,
        100Mb/s or 1.2GB (b is a bit, B a byte).
      workers: Number of workers.
      period [the shortest that hides exchanges]: Local steps between exchanges.
      latency: Seconds of a round trip.
      center_bandwidth RATE [--bandwidth]: Rate of the center's link, which all workers
        share.
      shards: Number of hosts that share each center, each with a link of its own.
      inner NAME: Optimizer of the workers, by its name in optax.
      dtype: Dtype of the parameters.
      center_dtype [--dtype]: Dtype of the center.

    Tree of centers:
      fan_out: Maximum number of workers, or of centers, at one center.
      levels: Number of levels of centers, instead of --fan-out.
      parent_period [the shortest that hides them]: Exchanges at a center between two
        exchanges with its parent.
      parent_bandwidth RATE [--center-bandwidth]: Rate of a center's link to its parent,
        and of the parent's link, which all its centers share.
      parent_latency [--latency]: Seconds of a round trip between a center and its
        parent.

    Journal:
      disk RATE [no journal]: Rate at which a host of the center writes and reads.
      sync [0]: Seconds until written data is durable.
      journal_size BYTES [1 GiB or four snapshots]: Size after which a snapshot replaces
        the journal.
    """

    parameters: float
    step_time: float
    bandwidth: str
    workers: int = 1
    period: int | None = None
    latency: float = 0.0
    center_bandwidth: str | None = None
    shards: int = 1
    inner: str = "adam"
    dtype: str = "float32"
    center_dtype: str | None = None
    fan_out: int | None = None
    levels: int | None = None
    parent_period: int | None = None
    parent_bandwidth: str | None = None
    parent_latency: float | None = None
    disk: str | None = None
    sync: float | None = None
    journal_size: float | None = None


def plan(
    rule: RuleOptions,
    machine: MachineOptions,
    options: ClusterOptions,
    json: _options.Json = False,
) -> None:
    """Show what each rule will cost: bytes, time and memory.

    For every rule: the bytes and seconds of an exchange; the shortest period at which
    communication hides behind local steps; the fraction of time that workers spend in
    local steps at --period, or else at this shortest period, if they wait for answers
    and if exchanges overlap; the bottleneck, and what would help; and the memory that
    workers and center keep. Plain data parallelism follows below. With --rule or
    --rule-from, only that rule is planned.

    With --fan-out or --levels the center is a tree of centers, and each level has a
    row. With --disk the center keeps a journal, and its rate of writing and the time of
    a restart are shown. With --codec the times of encoding and decoding are shown, and
    the rate of a link below which they pay.

    Example: agn-optax plan --parameters 1.3e9 --step-time 0.8 --bandwidth 1Gbit
    --workers 8
    """
    optimizer = _rules.inner(options.inner)
    params = planning.abstract(options.parameters, options.dtype)
    codec = _rules.codec(rule)
    if _rules.is_given(rule):
        planned = [_rules.make(rule)]
    else:
        _options.refuse(rule, "needs --rule", but=("codec", "answers"))
        planned = [
            dataclasses.replace(each, codec=codec)
            for each in planning.built_in_rules(optimizer, options.workers)
        ]
    cluster = Cluster(
        step_time=options.step_time,
        workers=options.workers,
        latency=options.latency,
        machine=_machine(machine, planned[0].codec),
        shards=options.shards,
        tree=_tree(options),
        disk=_disk(options),
        **_rates(options, "bandwidth", "center_bandwidth"),
    )
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
        console.print(_of(costs, cluster, console.width))


def _machine(options: MachineOptions, codec: codecs.Codec) -> Machine:
    if options.measure:
        _options.refuse(options, "does not go with --measure", but=("measure",))
        return _calibrate.calibrate(codec)
    overhead = _DEFAULT.overhead if options.overhead is None else options.overhead
    rates = _rates(options, "endpoint_rate", "apply_rate", "encode_rate", "decode_rate")
    return Machine(overhead=overhead, **rates)


def _tree(options: ClusterOptions) -> Tree | None:
    if options.fan_out is None and options.levels is None:
        only = ("parent_period", "parent_bandwidth", "parent_latency")
        _options.refuse(options, "needs --fan-out or --levels", only=only)
        return None
    return Tree(
        fan_out=options.fan_out,
        levels=options.levels,
        period=options.parent_period,
        bandwidth=_rates(options, "parent_bandwidth").get("parent_bandwidth"),
        latency=options.parent_latency,
    )


def _disk(options: ClusterOptions) -> Disk | None:
    if options.disk is None:
        _options.refuse(options, "needs --disk", only=("sync", "journal_size"))
        return None
    return Disk(
        bandwidth=units.rate(options.disk, "--disk"),
        sync=options.sync or 0.0,
        size=options.journal_size,
    )


def _rates(options: ClusterOptions | MachineOptions, *names: str) -> dict[str, float]:
    """Return the rates that were given, in bytes per second."""
    given = _options.given(options)
    return {
        name: units.rate(given[name], _options.option(name))
        for name in names
        if name in given
    }


def _as_dict(cost: Cost) -> dict[str, Any]:
    worker, center = cost.worker, cost.center
    kept, remedies = cost.kept, cost.remedies
    sums = {"waiting": worker.waiting, "overlapping": worker.overlapping}
    return {
        **cost._asdict(),
        "worker": worker._asdict() | sums,
        "center": center._asdict() | {"total": center.total},
        "levels": [level._asdict() for level in cost.levels],
        "kept": kept and kept._asdict() | {"restart": kept.restart},
        "remedies": remedies and remedies._asdict(),
        "coding": cost.coding and cost.coding._asdict(),
    }


def _of(costs: Sequence[Cost], cluster: Cluster, width: int) -> rich.console.Group:
    whole = [(cost, cost) for cost in costs]
    machine, shards, tree = cluster.machine, cluster.shards, cluster.tree
    place = "the center" if shards == 1 else f"each of the center's {shards} shards"
    head = (
        f"{cluster.workers} workers, {cluster.step_time:g} s a step; "
        f"{_rate(cluster.bandwidth)} each, {_rate(cluster.shared)} at {place}"
    )
    parts: list[rich.console.RenderableType] = [head, *_tables(whole, _TIMES, width)]
    parts.append(
        "Remedies, each by itself: a longer period; 16 bits both ways, and the period "
        "then; shards; levels of centers."
    )
    helped = _having(costs, lambda cost: cost.remedies)
    parts += _tables(helped, _REMEDIES, width)
    coded = _having(costs, lambda cost: cost.coding)
    if coded:
        parts.append(
            "Contributions before encoding; the time of the codec, at "
            f"{_rate(machine.encode_rate)} to encode and {_rate(machine.decode_rate)} "
            "to decode;\nand the rate of a link below which the codec pays."
        )
        parts += _tables(coded, _CODING, width)
    if tree is not None:
        parts.append(
            "Levels of centers, from the one with the workers up to the root. "
            "Exchanges overlap with local steps; the period is that of each child."
        )
        levels = [(cost, level) for cost in costs for level in cost.levels]
        parts += _tables(levels, _LEVELS, width)
    if cluster.disk is not None:
        parts.append(
            f"The journal of the {'root' if tree else 'center'}, on each of its hosts, "
            f"with a disk of {_rate(cluster.disk.bandwidth)}."
        )
        parts += _tables(_having(costs, lambda cost: cost.kept), _KEPT, width)
    parts.append("Memory, beside activations and gradients.")
    parts += _tables(whole, _MEMORY, width)
    return rich.console.Group(*parts)


def _size(number: int) -> str:
    return units.in_bytes(number) if number else "-"


def _having(
    costs: Sequence[Cost], part: Callable[[Cost], T | None]
) -> list[tuple[Cost, T]]:
    """Return the costs that have a part, each with this part."""
    found = ((cost, part(cost)) for cost in costs)
    return [(cost, own) for cost, own in found if own is not None]


def _tables(
    rows: Sequence[tuple[Cost, T]], columns: dict[str, Callable[[T], str]], width: int
) -> Iterator[rich.table.Table]:
    """Yield tables with a row for each rule, and all-reduce in a section of its own.

    The columns are split over several tables if one table would be too wide.
    """
    names = ["rule", *(cost.rule for cost, _ in rows)]
    groups: list[list[list[str]]] = []
    room = 0
    for name, column in columns.items():
        cells = [name, *(column(part) for _, part in rows)]
        needed = _width(cells)
        if needed > room or not groups:
            groups.append([names])
            room = width - _width(names) - 1
        groups[-1].append(cells)
        room -= needed
    for group in groups:
        table = rich.table.Table()
        for title, *_ in group:
            table.add_column(title, justify="right", no_wrap=True)
        table.columns[0].justify = "left"
        for i, (cost, _) in enumerate(rows, 1):
            if not cost.levels:
                table.add_section()
            table.add_row(*(rich.text.Text(cells[i]) for cells in group))
        yield table


def _width(cells: Sequence[str]) -> int:
    """Return the width of a column with its border."""
    return max(map(rich.cells.cell_len, cells)) + 3
