"""The commands for tapes: replay, audit, diff, fork, what-if and evaluate."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

from agn_optax import errors, tape
from agn_optax._internal import check, find_object, trees
from agn_optax.ops.cli import (
    _center_options,
    _curves,
    _options,
    _progress,
    _recorded,
    _table,
    _tape_tables,
)
from agn_optax.ops.cli._center_options import ModeOptions
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.tape import Tape

TapePath = Annotated[
    pathlib.Path,
    typer.Argument(metavar="TAPE", help="Directory of a center's --journal."),
]
At = Annotated[
    int | None, typer.Option(metavar="VERSION", help="The version. [newest]")
]
Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="S", help="Seconds since the center began, instead of --at VERSION."
    ),
]
Config = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE.toml",
        help="File with the options of the recorded center. [the file that "
        "`agn-optax serve` writes beside the records]",
    ),
]
Every = Annotated[
    int, typer.Option(metavar="N", help="Versions between two calls of the function.")
]
Plot = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE", help="Draw the numbers: a .png, .svg or .pdf. Needs matplotlib."
    ),
]


def replay(
    path: TapePath,
    rule: RuleOptions,
    at: At = None,
    seconds: Seconds = None,
    to: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="DIR",
            help="New directory for a center that `agn-optax serve --journal DIR` "
            "continues from there.",
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Compute from the first snapshot, and compare with all on the way.",
        ),
    ] = False,
    config: Config = None,
    json: _options.Json = False,
) -> None:
    """Compute the center at a recorded version, bit for bit.

    Prints the version and the hash of its parameters, which the log of the center has,
    too. The rule's options are needed only if `agn-optax serve` did not run the center.

    Example: agn-optax replay run --at 1000 --to then
    """
    opened = _open(path)
    made = _recorded.rule_of(opened, rule, config)
    if to is not None:
        tape.check_new(to)
    with _progress.records() as progress:
        found = opened.find(at, seconds, progress=progress)
        state = opened.replay(made, found.version, whole=whole, progress=progress)
    if to is not None:
        with _progress.records() as progress:
            tape.fork(opened, made, to, found.version, progress=progress)
    digest = trees.digest(state.params)
    _options.report(
        json,
        f"version {found.version} at {found.time:.3f} s, hash {digest}"
        + (f"\nagn-optax serve --journal {to} continues it" if to else ""),
        version=found.version,
        time=found.time,
        hash=digest,
        to=None if to is None else str(to),
    )


def fork(
    path: TapePath,
    to: Annotated[
        pathlib.Path, typer.Argument(metavar="DIR", help="New directory for the fork.")
    ],
    rule: RuleOptions,
    at: At = None,
    seconds: Seconds = None,
    config: Config = None,
    json: _options.Json = False,
) -> None:
    """Write a center that goes on from a recorded version.

    The center has a new id, and its tape names the record of TAPE at which it begins.
    Continue it with `agn-optax serve --journal DIR`, perhaps with another
    --center-optimizer, whose state then is new, with another --mode or other limits.
    The rule's options are those of the recorded center.

    Example: agn-optax fork run other --at 1000
    """
    opened = _open(path)
    made = _recorded.rule_of(opened, rule, config)
    with _progress.records() as progress:
        forked = tape.fork(opened, made, to, at, seconds, progress=progress)
    number, digest = forked.parent
    _options.report(
        json,
        f"{to} has version {forked.version} of {path}, after {number} records (digest "
        f"{digest}), as center {forked.center_id}",
        path=str(to),
        version=forked.version,
        center_id=forked.center_id,
        parent=forked.parent,
    )


def audit(
    path: TapePath,
    rule: RuleOptions,
    config: Config = None,
    json: _options.Json = False,
) -> None:
    """Check a tape, and show what each worker did.

    Checks the chain of the records, the hashes of contributions and snapshots, and, if
    the rule is known, that the records lead to each snapshot. The table has for each
    worker: messages that were applied, dropped and rejected; local steps and weight;
    the median norm of its messages, and how far they moved the center in total;
    staleness and seconds between messages, median and maximum.

    Example: agn-optax audit run
    """
    opened = _open(path)
    made = _recorded.find_rule(opened, rule, config)
    with _progress.records() as progress:
        found = tape.audit(opened, made, progress=progress)
    if json:
        rows = {
            name: [row._asdict() for row in getattr(found, name)]
            for name in ("workers", "failed_joins")
        }
        checked = found.checked._asdict()
        _options.print_json({**found._asdict(), "checked": checked, **rows})
        return
    _table.console().print(
        _tape_tables.of_audit(found, path, replayed=made is not None)
    )


def diff(
    first: Annotated[pathlib.Path, typer.Argument(metavar="A", help="A tape.")],
    second: Annotated[pathlib.Path, typer.Argument(metavar="B", help="Another tape.")],
    json: _options.Json = False,
) -> None:
    """Show where two runs part: the first record that differs.

    Says whether it differs in order (another worker came first, or other workers were
    registered), in content (a worker sent something else) or in the answer (the center
    did something else with the same message). Times may differ. The exit code is 1 if
    the runs differ.

    Example: agn-optax diff run again
    """
    with _progress.records() as progress:
        found = tape.diff(_open(first), _open(second), progress=progress)
    _options.report(
        json,
        "the runs are the same" if found is None else str(found),
        same=found is None,
        kind=None if found is None else found.kind,
        record=None if found is None else found.number,
        version=None if found is None else found.version,
        description=None if found is None else str(found),
    )
    if found is not None:
        raise typer.Exit(1)


def what_if(
    path: TapePath,
    rule: RuleOptions,
    mode: ModeOptions,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function of the parameters that returns a number, or a dict of them.",
        ),
    ] = None,
    every: Every = 10,
    plot: Plot = None,
    config: Config = None,
    json: _options.Json = False,
) -> None:
    """Send the recorded contributions through another center.

    The options change the recorded center: its center optimizer, its mode, its limits.
    Says from which version on workers would have adopted something else than they did:
    from there on only the schedule is real, as they would have sent something else,
    too. The tape must have all contributions: see --journal-keep of `agn-optax serve`.

    Example: agn-optax what-if run --center-optimizer sgd --learning-rate 0.5
    """
    opened = _open(path)
    recorded = _recorded.read(opened, config)
    recorded_rule = _recorded.rule_of(opened, RuleOptions(), config)
    made, center_mode, limits = _recorded.changed(recorded, rule, mode)
    function = None if loss is None else _function(loss, "--loss")
    _curves.check(plot, "--loss", loss)
    with _progress.records() as progress:
        found = tape.what_if(
            opened,
            recorded_rule,
            made,
            center_mode,
            limits=limits,
            function=function,
            every=every,
            progress=progress,
        )
    parted = found.parted
    if plot is not None:
        lines = {"recorded": found.recorded, "what if": found.measured}
        _curves.draw(plot, lines, parted=None if parted is None else parted.time)
    if json:
        _options.print_json(
            {
                "parted": None if parted is None else parted._asdict(),
                "recorded_version": found.recorded_version,
                "version": found.version,
                "hash": trees.digest(found.state.params),
                "workers": {n: share._asdict() for n, share in found.workers.items()},
                "recorded": [each._asdict() for each in found.recorded],
                "measured": [each._asdict() for each in found.measured],
            }
        )
        return
    _table.console().print(_tape_tables.of_what_if(found))


def evaluate(
    path: TapePath,
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Function of the parameters that returns a number, or a dict of them; "
            "modules in the current directory are found.",
        ),
    ],
    rule: RuleOptions,
    every: Every = 10,
    plot: Plot = None,
    config: Config = None,
    json: _options.Json = False,
) -> None:
    """Evaluate past versions of a center, after its run or beside it.

    Example: agn-optax evaluate run metrics:accuracy --every 100 --plot accuracy.png
    """
    opened = _open(path)
    made = _recorded.rule_of(opened, rule, config)
    called = _function(function, "MODULE:FUNCTION")
    _curves.check(plot)
    with _progress.records() as progress:
        rows = tape.evaluate(opened, made, called, every=every, progress=progress)
    if plot is not None:
        _curves.draw(plot, {"": rows})
    if json:
        _options.print_json([row._asdict() for row in rows])
        return
    _table.console().print(_tape_tables.of_measured({"": rows}))


def _open(path: pathlib.Path) -> Tape:
    """Read a tape, on the device on which `agn-optax serve` computes by default."""
    _center_options.use_default_device()
    return tape.read(path)


def _function(name: str, label: str) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = find_object(name, label)
    if not callable(function):
        raise errors.InvalidTypeError(
            f"{label} must name a function of parameters, got {check.show(function)}"
        )
    return function
