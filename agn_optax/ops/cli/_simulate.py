"""``agn-optax simulate``: show how a run that a file describes will go."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import optax
import rich.console
import rich.table
import typer

from agn_optax import errors, simulate
from agn_optax._internal import check
from agn_optax.ops import planning, units
from agn_optax.ops.cli import (
    _center_options,
    _options,
    _progress,
    _rules,
    _run_file,
    _table,
)
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._options import Group
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.engines import worker_limit
from agn_optax.round import Fragments, dynamic_period
from agn_optax.simulate import Schedule

_UNLIMITED = 1e18  # bytes per second
_LINK = Group(simulate.Link, "latency")
_FAILURES = Group(
    simulate.Failures,
    *("every", "down", "together", "announced"),
    names={
        "every": "failures_every",
        "down": "failures_down",
        "together": "failures_together",
        "announced": "failures_announced",
    },
    needs="--failures-every",
)


@_options.record(groups={"link": _LINK, "failures": _FAILURES})
class ClusterOptions:
    """Options of the simulated workers, their links and the center's host.

    Cluster:
      step_time: Seconds of a local step; the median with --sigma.
      sigma: Standard deviation of the logarithm of a round's step time.
      memory: Correlation of the step times of successive rounds.
      period: Local steps between exchanges.
      dynamic [no-dynamic]: Take --period as the period of the fastest worker, and let
        those of the others follow their speeds.
      overlap [no-overlap]: Send in the background while local steps go on.
      patience [the period]: Local steps without an answer after which a worker waits.
      fragments [1]: Number of equal parts of the model that are exchanged in turns.
      fragments_delay [0]: Local steps between sending a fragment and adopting the
        answer.
      parameters: Number of parameters of the model, such as 1.3e9.
      parameter_dtype [float32]: Dtype of the parameters.
      *link
      bandwidth RATE [no limit]: Rate of each worker's link in either direction, such as
        1Gbit, 100Mb/s or 1.2GB (b is a bit, B a byte).
      center_bandwidth RATE [no limit]: Rate of the center's link in either direction,
        which all workers share.
      center_seconds [as planned]: Seconds that a message takes at the center; by
        default those of `agn-optax plan`.
      *failures

    Simulation:
      exchanges: Messages after which the simulation ends.
      steps: Local steps in messages after which it ends.
      seconds: Simulated seconds after which it ends.
      seed [0]: Seed of all random numbers.
    """

    step_time: float | None = None
    sigma: float | None = None
    memory: float | None = None
    period: int | None = None
    dynamic: bool | None = None
    overlap: bool | None = None
    patience: int | None = None
    fragments: int | None = None
    fragments_delay: int | None = None
    parameters: float | None = None
    parameter_dtype: str | None = None
    bandwidth: str | None = None
    center_bandwidth: str | None = None
    center_seconds: float | None = None
    exchanges: int | None = None
    steps: int | None = None
    seconds: float | None = None
    seed: int | None = None


class _FileKeys:
    """Keys of the table [cluster], beside those of `ClusterOptions`."""

    step_times: list[float]  # of each worker, instead of step_time


def simulate_command(
    file: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="RUN.toml",
            help="File that describes the run, as for `agn-optax launch`, with a table "
            r"\[cluster] of these options.",
        ),
    ],
    options: ClusterOptions,
    rule: RuleOptions,
    center: CenterOptions,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Number of workers.")
    ] = None,
    json: _options.Json = False,
) -> None:
    """Show how a run will go: who exchanges when, on a virtual clock.

    Modes, leases, rounds and periods are decided by the code of real centers and
    workers. No model is trained. The table has exchanges, staleness, waiting and bytes;
    the digest is of all that happens, and the same for the same file and seed.

    Example: agn-optax simulate run.toml --seconds 3600 --seed 1
    """
    tables, run = _run_file.read(file)
    kinds = ClusterOptions, _FileKeys
    given = _options.parse_table(tables["cluster"], f"[cluster] of {file}", *kinds)
    options = _options.with_defaults(options, given)
    if workers is None:
        workers = run.get("workers")
    if workers is None:
        raise errors.InvalidArgumentError(
            f"the number of workers is missing: give --workers, or workers in {file}"
        )
    rule = _options.with_defaults(rule, tables["rule"])
    center = _options.with_defaults(center, worker_limit(workers) | tables["center"])
    settings = _center_options.settings(center)
    found = _schedule(options, given.get("step_times"), workers, rule, settings)
    if json:
        _options.print_json(
            {"seed": found.seed, "digest": found.digest, **found.summary()}
        )
    else:
        _table.console().print(_report(found))


def _schedule(
    options: ClusterOptions,
    step_times: list[float] | None,
    workers: int,
    rule: RuleOptions,
    settings: dict[str, Any],
) -> Schedule:
    """Simulate, and show the progress if it takes long."""
    made, fragments = _rules.make(rule), _fragments(options)
    params = _params(options)
    if options.period is None:
        raise errors.InvalidArgumentError("--period is missing, or period in [cluster]")
    host_seconds = options.center_seconds
    if host_seconds is None:
        host = planning.Cluster(step_time=1.0, bandwidth=_UNLIMITED)
        part = planning.abstract(1) if params is None else params[0]
        host_seconds = planning.plan(made, part, host, inner=optax.sgd(0.1)).service
    cluster = simulate.Cluster(
        workers=workers,
        speed=_speeds(options, step_times, workers),
        link=_LINK.build(options, bandwidth=_rate(options, "bandwidth")),
        center=simulate.CenterHost(
            seconds=host_seconds, bandwidth=_rate(options, "center_bandwidth")
        ),
        failures=_FAILURES.build_if_given("every", options) or simulate.Failures(),
    )
    period: Any = options.period
    if options.dynamic:
        period = dynamic_period(period)
    with _progress.fraction("simulating") as progress:
        return simulate.schedule(
            cluster,
            period=period,
            mode=settings["mode"],
            rule=made,
            params=params,
            exchanges=options.exchanges,
            steps=options.steps,
            seconds=options.seconds,
            seed=options.seed or 0,
            overlap=bool(options.overlap),
            patience=options.patience,
            fragments=fragments,
            limits=settings["limits"],
            barrier=settings.get("barrier", 0),
            progress=progress,
        )


def _fragments(options: ClusterOptions) -> Fragments | None:
    if options.fragments is None:
        _options.reject(options, "needs --fragments", only=["fragments_delay"])
        return None
    check.positive_int(options.fragments, "fragments")
    return Fragments(options.fragments, delay=options.fragments_delay or 0)


def _params(options: ClusterOptions) -> Any:
    """Return trees of the model's parameters, one for each fragment; or None."""
    if options.parameters is None:
        return None
    dtype, count = options.parameter_dtype or "float32", options.fragments or 1
    whole = planning.abstract(options.parameters, dtype)  # checks the number
    if count == 1:
        return [whole]
    size, rest = divmod(int(options.parameters), count)
    return [planning.abstract(size + (i < rest), dtype) for i in range(count)]


def _rate(options: ClusterOptions, name: str) -> float | None:
    text = getattr(options, name)
    return None if text is None else units.rate(text, _options.option(name))


def _speeds(
    options: ClusterOptions, step_times: list[float] | None, workers: int
) -> Any:
    """Return the speed of all workers, or a list with that of each."""
    if (options.step_time is None) == (step_times is None):
        raise errors.InvalidArgumentError(
            "give the seconds of a local step: --step-time, or step-times in [cluster] "
            "with those of each worker"
        )
    if options.memory is not None and options.sigma is None:
        raise errors.InvalidArgumentError("--memory needs --sigma")

    def speed(seconds: float) -> simulate.Speed:
        if options.sigma is None:
            return simulate.Fixed(seconds)
        if options.memory is None:
            return simulate.LogNormal(seconds, options.sigma)
        return simulate.Drifting(seconds, options.sigma, options.memory)

    if options.step_time is not None:
        check.seconds(options.step_time, "step-time", positive=True)
        return speed(options.step_time)
    assert step_times is not None
    if len(step_times) != workers:
        raise errors.InvalidArgumentError(
            f"step-times must have a number for each of the {workers} workers, got "
            f"{len(step_times)}"
        )
    for each in step_times:
        check.seconds(each, "each of step-times", positive=True)
    return [*map(speed, step_times)]


def _report(found: Schedule) -> rich.console.Group:
    table = rich.table.Table("", "", show_header=False)
    table.columns[1].justify = "right"
    for name, value in found.summary().items():
        shown = str(value) if isinstance(value, int) else _table.number(value)
        if name.startswith("bytes"):
            shown = units.in_bytes(value)
        elif name == "utilization":
            shown = f"{value:.1%}"
        table.add_row(name.replace("_", " "), shown)
    return rich.console.Group(f"seed {found.seed}, digest {found.digest}", table)
