"""The tables of the commands for tapes."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from agn_optax.ops.cli import _table
from agn_optax.tape import Audit, Measured, Share, WhatIf


def of_audit(found: Audit, path: pathlib.Path, *, replayed: bool) -> rich.console.Group:
    """Return the table of an audit, with lines on the tape itself.

    Args:
      found: the audit.
      path: the tape.
      replayed: whether the center was computed from its records.
    """
    number = _table.number
    cells: dict[str, Callable[[Any], str]] = {
        "worker": lambda worker: worker.worker,
        "exchanges": lambda worker: str(worker.exchanges),
        "dropped": lambda worker: str(worker.dropped),
        "rejected": lambda worker: str(worker.rejected),
        "steps": lambda worker: str(worker.steps),
        "weight": lambda worker: number(worker.weight or None),
        "norm": lambda worker: number(worker.norm),
        "moved": lambda worker: number(worker.moved),
        "staleness": lambda worker: number(worker.staleness),
        "max": lambda worker: number(worker.max_staleness),
        "interval": lambda worker: _seconds(worker.interval),
        "longest": lambda worker: _seconds(worker.max_interval),
        "sessions": lambda worker: str(worker.sessions),
    }
    columns = [[title, *map(cell, found.workers)] for title, cell in cells.items()]
    table = _table.fitting(columns, _table.console().width)
    checked = found.checked
    table.title = _table.text(
        f"{path}: version {found.version} after {found.seconds:.1f} s"
    )
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.items())
    lines = [
        f"{checked.records} records ({kinds}) and {checked.snapshots} snapshots are as "
        f"written; {checked.contributions} contributions have their hashes"
        + (f", and {checked.hashes} have only hashes" if checked.hashes else ""),
        "the records lead to the snapshots"
        if replayed
        else "not replayed, as no options say which rule it is: see --rule",
        *(
            f"rejected of {worker.worker}: {reason}"
            for worker in found.workers
            for reason in worker.reasons
        ),
        *(
            f"could not join at {failed.time:.1f} s: {failed.worker}: {failed.reason}"
            for failed in found.failed_joins
        ),
        *(
            [f"{found.more_failed_joins} further joins failed"]
            if found.more_failed_joins
            else []
        ),
    ]
    return rich.console.Group(table, *map(_table.text, lines))


def of_what_if(found: WhatIf) -> rich.console.Group:
    """Return tables of numbers and workers, and where workers part from the tape."""
    shown: list[rich.console.RenderableType] = []
    if found.measured:
        rows: Mapping[str, Sequence[Measured]]
        rows = {"recorded": found.recorded, "what if": found.measured}
        shown.append(of_measured(rows))
    shares = found.workers
    columns = [["worker", *shares]]
    for field in Share._fields:
        columns.append([field, *(str(getattr(s, field)) for s in shares.values())])
    shown.append(_table.fitting(columns, _table.console().width))
    lines = [
        f"version {found.version}; the recorded center had {found.recorded_version}"
    ]
    parted = found.parted
    if parted is None:
        lines.append("all workers would have adopted what they did")
    else:
        lines.append(
            f"from version {parted.version} on ({parted.time:.3f} s), workers would "
            f"have adopted something else: {parted.worker} adopted version "
            f"{parted.recorded_version} of the recorded center. From there on only the "
            "schedule is real"
        )
    return rich.console.Group(*shown, *map(_table.text, lines))


def of_measured(
    lines: Mapping[str, Sequence[Measured]],
) -> rich.console.RenderableType:
    """Return a table of numbers by version, with columns for each line."""
    by_version = {
        label: {row.version: row for row in rows} for label, rows in lines.items()
    }
    versions = sorted({version for rows in by_version.values() for version in rows})
    columns = [["version", *map(str, versions)]]
    for label, rows in by_version.items():
        prefix = f"{label}: " if label else ""
        names = {name: None for row in rows.values() for name in row.numbers}
        times = [_seconds(rows[v].time) if v in rows else "" for v in versions]
        columns.append([f"{prefix}time", *times])
        for name in names:
            cells = [
                _table.number(rows[v].numbers.get(name)) if v in rows else ""
                for v in versions
            ]
            columns.append([f"{prefix}{name}", *cells])
    return _table.fitting(columns, _table.console().width)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"
