"""``agn-optax keys``: make certificates and tokens."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from agn_optax.ops.cli import _options


@_options.record()
class Names:
    """Names for which files are made, each of any number.

    Names:
      host NAME: Host name or address by which workers reach the center.
      chief NAME: Name of a worker that may start as chief.
      worker NAME: Name of a worker.
      operator NAME: Name of an operator, who may watch, pull and drain.
    """

    host: list[str] | None = None
    chief: list[str] | None = None
    worker: list[str] | None = None
    operator: list[str] | None = None


def keys(
    directory: Annotated[
        pathlib.Path,
        typer.Argument(metavar="DIRECTORY", help="Directory for the files."),
    ],
    names: Names,
    days: Annotated[
        int, typer.Option(min=1, help="Days that the certificates are valid.")
    ] = 365,
    json: _options.Json = False,
) -> None:
    """Make certificates and tokens for a center, its workers and its operators.

    The directory gets ca.pem and ca.key (the certificate authority), center.pem and
    center.key if --host is given, and NAME.pem, NAME.key and NAME.token for each name;
    the file tokens, for serve --tokens, has a line for each name. --host, --chief,
    --worker and --operator may each be given several times. Only the owner of the files
    can read keys and tokens. A second run with new names on the same directory adds to
    its files. Needs the extra keys.

    Example: agn-optax keys keys --host center.example --chief anna --worker bert
    """
    from agn_optax.ops import keys as certificates  # noqa: PLC0415 needs an extra

    callers = {
        "chief": names.chief or [],
        "worker": names.worker or [],
        "operator": names.operator or [],
    }
    paths = certificates.make(directory, names.host or [], callers, days)
    files = [str(path) for path in paths]
    _options.report(json, "\n".join(files), files=files)
