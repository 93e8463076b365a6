"""A run, described by a file or by the options of ``agn-optax launch``."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from agn_optax import errors
from agn_optax.ops import units
from agn_optax.ops.cli import _center_options, _export, _options, _rules
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._options import Group
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.engines import ENGINES, Engine, Local, Resources, Run, Slurm
from agn_optax.service import tokens

_RUN = Group(
    Run,
    *("workers", "token_file", "tls_ca", "restarts", "center_restarts"),
    *("stop_grace", "storage"),
    names={
        "token_file": "token_file FILE",
        "tls_ca": "tls_ca FILE.pem",
        "storage": "storage DIRECTORY",
    },
)
# Options for one engine only: in a file, they stand in its table.
_OF_ENGINES = {
    "local": Group(
        Local.Settings,
        names={"on_failure": "on_failure WHAT"},
    ),
    "slurm": Group(Slurm.Settings, "wait"),
}
_OWN = {
    option: engine
    for engine, group in _OF_ENGINES.items()
    for option in group.names.values()
}


@_options.record(groups={"run": _RUN, **_OF_ENGINES})
class RunOptions:
    """Options of the workers, and of how tasks are started and ended.

    Options:
      center embedded|HOST:PORT [embedded]: Start a center for this run, or use the one
        at this address.
      *run
      name [the program's name]: Name of the run.

    Local:
      *local

    SLURM:
      *slurm
    """

    center: str | None = None
    name: str | None = None


_TABLES = ("rule", "center", "resources", *ENGINES)


@_options.record()
class _Top:
    """Keys at the top of a run's file, beside those of `RunOptions`.

    Options:
      program: Program that each worker runs, as after ``python``.
      module: Module that each worker runs instead, as after ``python -m``.
      arguments: Arguments of the program or module.
      transports: Transports that exchanges may use.
      environment: Environment variables of every worker.
    """

    program: str | None = None
    module: str | None = None
    arguments: list[str] | None = None
    transports: list[str] | None = None
    environment: dict[str, str] | None = None


@_options.record()
class _ResourceOptions:
    """Resources of a task.

    Options:
      cpus: Number of cores.
      memory: Bytes, as text: 16GiB.
      gpus: Number of GPUs.
      processes: Number of processes of a worker.
      seconds: Time after which the task may be ended.
    """

    cpus: int | None = None
    memory: str | None = None
    gpus: int | None = None
    processes: int | None = None
    seconds: float | None = None


def read(
    path: pathlib.Path,
    rule: RuleOptions,
    center: CenterOptions,
    options: RunOptions,
    on: str,
) -> Engine:
    """Return the engine for the run that a file describes.

    Args:
      path: path of the file.
      rule: the rule's options on the command line, which override the file.
      center: the center's options on the command line, likewise.
      options: the run's options on the command line, likewise.
      on: name of the engine.

    Raises:
      InvalidArgumentError: the file is not valid, or the engine cannot run it.
    """
    table = _options.loaded(path)
    tables = {name: table.pop(name, {}) for name in _TABLES}
    where = str(path)
    if isinstance(tables["center"], str):  # the address of a center elsewhere
        table["center"], tables["center"] = tables["center"], {}
    for name, each in tables.items():
        if not isinstance(each, dict):
            raise errors.InvalidArgumentError(
                f"{name} in {path} must be a table, [{name}], got {each!r}"
            )
    top = _options.taken(table, where, _Top, RunOptions)
    program = _program(top, where)
    for name, engine in _OWN.items():
        if name in top:
            raise errors.InvalidArgumentError(
                f"{name} in {path} must be in its table [{engine}]"
            )
    resources = tables["resources"]
    settings = _options.taken(tables[on], f"[{on}] of {path}", ENGINES[on].Settings)
    return _engine(
        on,
        program,
        _options.filled(rule, _options.taken(tables["rule"], where, RuleOptions)),
        _options.filled(center, _options.taken(tables["center"], where, CenterOptions)),
        _options.filled(options, top),
        settings,
        transports=top.get("transports"),
        environment=top.get("environment") or {},
        **{
            f"{task}_resources": _resources(resources.pop(task, {}), task, where)
            for task in ("worker", "center")
        },
    )


def of_options(
    program: list[str],
    rule: RuleOptions,
    center: CenterOptions,
    options: RunOptions,
    config: pathlib.Path | None,
    on: str,
) -> Engine:
    """Return the engine for the run that options describe.

    Raises:
      InvalidArgumentError: options exclude each other, or the engine cannot run it.
    """
    if (options.center or "embedded") != "embedded" and config is not None:
        raise errors.InvalidArgumentError(
            f"--config is for an embedded center, and --center is {options.center}"
        )
    values = _options.read(config, RuleOptions, CenterOptions)
    rule, center = _options.filled(rule, values), _options.filled(center, values)
    return _engine(on, program, rule, center, options, {})


def _engine(
    on: str,
    program: list[str],
    rule: RuleOptions,
    center: CenterOptions,
    options: RunOptions,
    settings: dict[str, Any],
    **more: Any,
) -> Engine:
    given = _options.given(options)
    if "workers" not in given:
        raise errors.InvalidArgumentError(
            "the number of workers is missing: give --workers"
        )
    address = None if options.center in (None, "embedded") else options.center
    _check(rule, center, options, address)
    own = {name: given.pop(name) for name in _OWN if name in given}
    for name in own:
        if on != _OWN[name]:
            raise errors.InvalidArgumentError(
                f"{_options.option(name)} is for --on {_OWN[name]}"
            )
    given["name"] = options.name or _name(program)
    given["center"] = address
    run = Run(
        program=program,
        rule=_options.given(rule),
        serve=_options.given(center),
        settings=settings | own,
        **given,
        **more,
    )
    return ENGINES[on](run)


def _program(top: dict[str, Any], where: str) -> list[str]:
    module, program = top.pop("module", None), top.pop("program", None)
    if (module is None) == (program is None):
        raise errors.InvalidArgumentError(
            f"{where} must have a program or a module, which each worker runs, and not "
            "both"
        )
    given = top.pop("arguments", None) or []
    return [*(["-m", module] if program is None else [program]), *given]


def _name(program: list[str]) -> str:
    """Return a name for the run, made of its program's name."""
    what = program[1] if program[0] == "-m" and len(program) > 1 else program[0]
    plain = re.sub(r"[^a-z0-9]+", "-", pathlib.PurePath(what).stem.lower())
    return plain.strip("-")[:40].strip("-") or "run"


def _resources(table: Any, task: str, where: str) -> Resources:
    said = f"[resources.{task}] of {where}"
    if not isinstance(table, dict):
        raise errors.InvalidArgumentError(f"{said} must be a table, got {table!r}")
    values = _options.taken(table, said, _ResourceOptions)
    if "memory" in values:
        values["memory"] = units.size(values["memory"], f"memory in {said}")
    for name, value in values.items():
        if value < (0 if name == "gpus" else 1):
            raise errors.InvalidArgumentError(
                f"{name} in {said} must be positive, got {value}"
            )
    return Resources(**values)


def _check(
    rule: RuleOptions, center: CenterOptions, options: RunOptions, address: str | None
) -> None:
    """Raise for wrong options, before anything is started."""
    if address is None:
        why = (
            "is for --center HOST:PORT: with an embedded center every worker gets a "
            "token of its own"
        )
        _options.refuse(options, why, only=("token_file",))
    else:
        why = f"is for an embedded center, and --center is {address}"
        _options.refuse(rule, why)
        _options.refuse(center, why)
        _options.refuse(options, why, only=("center_restarts",))
        return
    if not _rules.is_given(rule):
        raise errors.InvalidArgumentError(
            "the embedded center has no rule: give --rule NAME or --rule-from "
            "MODULE:OBJECT, on the command line or in a file with --config, as for "
            "`agn-optax serve`; or give --center HOST:PORT"
        )
    if rule.rule_from is None:
        _rules.make(rule)
    _center_options.settings(center)
    if center.save is not None:
        _export.check_is_free(center.save)  # `serve` does the rest, on its machine
    _center_options.access(center, tokens.generated())
