"""``agn-optax export``: write a center's parameters as an Orbax checkpoint."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from typing import Annotated, Any

import typer

from agn_optax import center, errors, service
from agn_optax._internal import extras
from agn_optax.ops.cli import _options, _rules, _status
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.cli._status import Reached
from agn_optax.rules import Rule

PyTree = Any


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|ADDRESS",
            help="Directory of --journal or --snapshots, or address of a running "
            "center; for a sharded center all addresses, separated by commas.",
        ),
    ],
    to: Annotated[
        pathlib.Path,
        typer.Argument(help="Directory for the checkpoint, which must not exist yet."),
    ],
    rule: RuleOptions,
    reached: Reached,
    config: _options.Config = None,
    timeout: _status.Timeout = 600.0,
    json: _options.Json = False,
) -> None:
    """Write a center's parameters as a checkpoint that Orbax reads.

    The parameters keep their names: `orbax.checkpoint.v1.load(TO)` returns the tree of
    the model. The rule is needed for a directory with exchanges since its last
    snapshot, and for a sharded center. A running center requires the role of a reader.
    Needs the extra flax.

    Example: agn-optax export center.example:5000 checkpoint
    """
    given = _options.with_defaults(
        rule, _options.read_file(config, RuleOptions, CenterOptions)
    )
    center_rule = _rules.make(given) if _rules.is_given(given) else None
    check(to)
    if pathlib.Path(source).is_dir():
        stored = center.read(source, center_rule)
        params, version = stored.params, stored.version
    else:
        params, version = _pull(source, center_rule, reached, timeout)
    write(params, to)
    text = f"version {version} is in {to}"
    _options.report(json, text, version=version, directory=str(to))


def check(to: pathlib.Path, *, is_here: bool = True) -> None:
    """Raise unless a checkpoint can be written at a path.

    Args:
      to: the path.
      is_here: whether the path is on this machine, where making a directory is tried.

    Raises:
      InvalidArgumentError: something exists at the path, or no directory can be made
        there.
      MissingExtraError: Orbax is not installed.
    """
    with contextlib.suppress(OSError):  # a path that cannot be read is reported below
        if to.exists():
            raise errors.InvalidArgumentError(
                f"{to} exists already: a checkpoint needs a directory of its own"
            )
    extras.require("flax", "orbax.checkpoint")
    try:
        if is_here:
            _make_directory_beside(to)
    except OSError as error:
        raise errors.InvalidArgumentError(
            "a checkpoint needs a directory that can be made, got "
            f"{str(to)!r} ({error.strerror}): give one in a folder that can be written"
        ) from None


def write(params: PyTree, to: pathlib.Path) -> None:
    """Write a checkpoint.

    Raises:
      DurabilityError: the checkpoint cannot be written.
    """
    from orbax.checkpoint import v1  # noqa: PLC0415 a heavy, optional dependency

    try:
        # Orbax's threads would wait forever for a directory that it cannot make.
        _make_directory_beside(to)
        v1.save(to.resolve(), params)
    except (OSError, ValueError) as error:
        raise errors.DurabilityError(f"cannot write {to}: {error}") from error


def _make_directory_beside(to: pathlib.Path) -> None:
    """Make the parent directory of a path, and try to make a directory in it.

    Raises:
      OSError: one of these directories cannot be made.
    """
    to = to.resolve()
    to.parent.mkdir(parents=True, exist_ok=True)
    # The name is as long as that of Orbax's own temporary directory.
    prefix = f"{to.name}.agn-optax-tmp-"
    pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=to.parent)).rmdir()


def _pull(
    source: str, rule: Rule | None, reached: Reached, timeout: float
) -> tuple[PyTree, Any]:
    """Pull the parameters of a running center, and their version."""
    addresses = source.split(",")
    if len(addresses) == 1:
        with _status.observer(source, reached, timeout) as observer:
            return observer.pull()
    if rule is None:
        raise errors.InvalidArgumentError(
            "a sharded center needs its rule: give --rule, as for `agn-optax serve`"
        )
    settings = _status.settings(reached)
    with service.connect(addresses, rule, timeout=timeout, **settings) as sharded:
        return sharded.pull()
