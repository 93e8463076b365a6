"""The command, its subcommands and its exit codes."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agn_optax import errors
from agn_optax._version import __version__
from agn_optax.ops.cli import (
    _doctor,
    _keys,
    _launch_command,
    _options,
    _plan,
    _serve,
    _simulate,
    _status,
    _tape,
)


class _Commands(_options.Flags, TyperGroup):
    """A group of subcommands that prints an error of this package in one line.

    The exit code is then 2 for wrong usage, and 1 otherwise.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand."""
        try:
            return super().invoke(ctx)
        except errors.AgnOptaxError as error:
            typer.echo(f"agn-optax: {error}", err=True)
            wrong_usage = isinstance(error, errors.InvalidArgumentError)
            raise typer.Exit(2 if wrong_usage else 1) from None


app = typer.Typer(
    cls=_Commands,
    help="Asynchronous training with a center: serve, watch and check a center, launch "
    "workers, plan what training will cost, and repeat what a tape has recorded.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # other exceptions keep Python's own traceback
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agn-optax {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    del version


for subcommand in (
    *(_serve.serve, _status.status, _status.watch, _status.drain),
    *(_doctor.doctor, _plan.plan, _keys.keys),
    *(_tape.replay, _tape.audit, _tape.diff, _tape.fork),
    *(_tape.what_if, _tape.evaluate),
):
    app.command(cls=_options.Command)(_options.as_command(subcommand))
app.command("simulate", cls=_options.Command)(
    _options.as_command(_simulate.simulate_command)
)
# Options after the program's name belong to the program.
app.command(
    "launch",
    cls=_launch_command.LaunchCommand,
    context_settings={"allow_interspersed_args": False},
)(_options.as_command(_launch_command.launch_command))
