"""``agn-optax backup``: copy a center on disk."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from agn_optax import center
from agn_optax.ops.cli import _options


def backup(
    directory: Annotated[
        pathlib.Path,
        typer.Argument(help="Directory of the server's --journal or --snapshots."),
    ],
    to: Annotated[
        pathlib.Path,
        typer.Argument(help="Directory for the copy, empty or new."),
    ],
    json: _options.Json = False,
) -> None:
    """Copy the directory of a center, even while its server runs.

    The whole directory is read, and the copy is verified. A server that is started with
    the copy continues from it, and its workers have to be started again.
    """
    version = center.backup(directory, to)
    text = f"version {version} is in {to}"
    _options.report(json, text, version=version, directory=str(to))
