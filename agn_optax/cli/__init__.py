"""The command ``agn-optax``: centers and launched workers from a shell.

`_app` is the command and its exit codes, `_serve`, `_status`, `_doctor` and
`_launch_command` its subcommands. `_options` makes records of options out of command
lines and files, `_rules`, `_center_options` and `_tls` are such records. `_launch` runs
programs side by side. Needs the extra ``agn_optax[cli]``.
"""

__all__ = ["main"]


def main() -> None:
    """Runs the command that ``sys.argv`` names, and exits."""
    # Here, as `_launch` and `_guard` do without all that the command needs.
    from agn_optax.cli._app import app  # noqa: PLC0415

    app(prog_name="agn-optax")
