"""``agn-optax backup``: a copy of a center on disk."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from agn_optax import center
from agn_optax.ops.cli import _options


def backup(
    directory: Annotated[
        pathlib.Path,
        typer.Argument(help="What --journal or --snapshots of its server named."),
    ],
    to: Annotated[
        pathlib.Path, typer.Argument(help="A directory that is empty, or not there.")
    ],
    json: _options.Json = False,
) -> None:
    """Copy a center on disk, also while a server keeps it there.

    All of it is read on the way, and the copy is checked. A server that is started with
    the copy goes on from there; its workers start again.
    """
    version = center.backup(directory, to)
    if json:
        _options.print_json({"version": version, "directory": str(to)})
    else:
        typer.echo(f"version {version} is in {to}")
