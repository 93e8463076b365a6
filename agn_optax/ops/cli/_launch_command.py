"""``agn-optax launch``: start a center and its workers, here or on an engine."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import rich.text
import typer

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.ops.cli import _options, _run_file, _table
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.cli._run_file import RunOptions
from agn_optax.ops.engines import ENGINES, local_address, serving_event

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_CENTER = "center"


class LaunchCommand(_options.Command):
    """The command ``launch``: arguments after a program's name are the program's.

    Arguments after a run's file are options of the command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options, and return the remaining arguments."""
        parsed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        ctx.allow_interspersed_args = _is_file(parsed.get("command") or ())
        return super().parse_args(ctx, args)


def launch_command(
    options: RunOptions,
    rule: RuleOptions,
    center: CenterOptions,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.toml | PROGRAM.py [ARGUMENTS]...",
            help="File that describes the run; or a program that each worker runs, "
            "with its own options after it, as after `python` (-- -m MODULE).",
        ),
    ] = None,
    on: Annotated[
        str, typer.Option(metavar="ENGINE", help=f"One of {', '.join(ENGINES)}.")
    ] = "local",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be done."),
    ] = False,
    json: _options.Json = False,
) -> None:
    """Start a center and workers around it, here or on an engine.

    The environment of each worker has AGN_OPTAX_CENTER (the center's address),
    AGN_OPTAX_RANK, AGN_OPTAX_WORKERS, AGN_OPTAX_WORKER (the worker's name) and
    AGN_OPTAX_RULE (the center's rule), which agn_optax.service.environment() reads; and
    AGN_OPTAX_TOKEN or AGN_OPTAX_TOKEN_FILE, by which the center knows the worker's
    name. worker-0 may be the chief. On this machine all programs are ended together,
    and the exit code is that of the first of these that failed: the center during the
    run, a worker, the center at its end. With --json, a summary is printed to stdout,
    and all other lines go to stderr.

    Example: agn-optax launch --workers 4 --rule downpour train.py --epochs 3

    Example: agn-optax launch run.toml --on slurm --dry-run
    """
    check.choose(on, ENGINES, "--on")
    run = command or []
    if not run:
        raise errors.InvalidArgumentError(
            "nothing to run: give PROGRAM.py, or -- -m MODULE, after the options"
        )
    if _is_file(run):
        if len(run) > 1:
            raise errors.InvalidArgumentError(
                f"{run[0]} describes the whole run: {' '.join(run[1:])} does not go "
                "with it"
            )
        engine = _run_file.engine_of_file(
            pathlib.Path(run[0]), rule, center, options, on
        )
    else:
        engine = _run_file.engine_of_options(run, rule, center, options, on)
    if dry_run:
        for name, text in engine.files().items():
            typer.echo(f"# {name}\n{text}")
        typer.echo("\n".join(["# Commands", *engine.commands()]))
        return
    names = [_CENTER, *engine.run.worker_names]
    summary = engine.launch(_Output(names, json))
    if json:
        _options.print_json(summary)
    if summary["returncode"]:
        raise typer.Exit(summary["returncode"])


def _is_file(run: Sequence[str]) -> bool:
    """Return whether a file describes the run."""
    return bool(run) and run[0].endswith(".toml")


class _Output:
    """A printer of the lines of several programs, each after its program's name."""

    def __init__(self, names: Sequence[str], stderr: bool) -> None:
        self._console = _table.console(stderr=stderr)
        if isinstance(self._console.file, io.TextIOWrapper):
            # A program may write characters that the terminal's encoding lacks.
            self._console.file.reconfigure(errors="backslashreplace")
        self._width = max(map(len, names))
        self._styles = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}

    def __call__(self, name: str, line: str) -> None:
        if name == _CENTER and (event := serving_event(line)):
            line = f"serving at {local_address(event)}"  # instead of JSON
            if page := event.get("page"):
                line += f", page at {page}"
                token = event.get("page_token")
                line += f" with token {token}" if token else ""
        prefix = (f"{name:<{self._width}} | ", self._styles.get(name, "white"))
        try:  # keeps the program's own colors, if on a terminal
            colored = rich.text.Text.from_ansi(line)
        except ValueError:  # an escape with a number that Python cannot parse
            colored = rich.text.Text(line)
        text = rich.text.Text.assemble(prefix, colored)
        self._console.print(text, soft_wrap=True)
