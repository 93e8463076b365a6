"""The command ``agn-optax``, which runs and operates centers and workers.

`_app` defines the command and its exit codes; `_serve`, `_status`, `_doctor`, `_plan`
and `_launch_command` are its main subcommands. `_options` reads records of options from
the command line and from files; `_rules` and `_center_options` define two of these
records. `run` runs programs side by side. The command needs the extra
``agn_optax[cli]``.
"""

import contextlib
import os
import sys
import threading

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.ops.launch import Outcome, Program, run

__all__ = ["Outcome", "Program", "main", "run"]


def main() -> None:
    """Run the command line in ``sys.argv``, and exit."""
    # Checked here and not at import, because `run` works without the extra.
    try:
        extras.require("cli", "typer", "rich", "grpc")
    except errors.MissingExtraError as error:
        sys.exit(f"agn-optax: {error}")
    from agn_optax.ops.cli._app import app  # noqa: PLC0415

    try:
        app(prog_name="agn-optax")
    except SystemExit as end:
        others = set(threading.enumerate()) - {threading.main_thread()}
        if end.code and not all(thread.daemon for thread in others):
            # At exit Python joins these threads, and those of a failed save never end.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(int(end.code))
        raise
