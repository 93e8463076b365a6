"""A run, described by a file or by the options of ``agn-optax launch``."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from agn_optax import errors
from agn_optax.ops import units
from agn_optax.ops.cli import _center_options, _options, _rules, _save
from agn_optax.ops.cli._center_options import CenterOptions
from agn_optax.ops.cli._options import Group
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.ops.engines import ENGINES, Engine, Resources, Run
from agn_optax.service import tokens

_RUN = Group(
    Run,
    *("workers", "tls_ca", "restarts", "center_restarts"),
    *("stop_grace", "storage"),
)


@_options.record(groups={"run": _RUN})
class RunOptions:
    """Options of the workers, and of how tasks are started and ended.

    Options:
      *run
      name [the program's name]: Name of the run.
    """

    name: str | None = None


_TABLES = ("rule", "center", "cluster", "resources", *ENGINES)


class _FileKeys:
    """Keys at the top of a run's file, beside those of `RunOptions`."""

    program: str
    arguments: list[str]
    environment: dict[str, str]


class _ResourceTables:
    """Tables of resources."""

    worker: dict[str, Any]
    center: dict[str, Any]


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a run's file; return its tables by name, and the values at its top.

    The tables of the rule and of the center have been parsed.

    Raises:
      InvalidArgumentError: the file cannot be read, or is not valid.
    """
    table = _options.load_toml(path)
    tables = {name: table.pop(name, {}) for name in _TABLES}
    values = _options.parse_table(table, str(path), _FileKeys, RunOptions)
    for name, kind in (("rule", RuleOptions), ("center", CenterOptions)):
        where = f"[{name}] of {path}"
        tables[name] = _options.parse_table(tables[name], where, kind)
    return tables, values


def engine_of_file(
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
      InvalidArgumentError: the file is not valid, or the engine cannot do this run.
    """
    tables, values = read(path)

    def parsed(name: str, kind: type) -> dict[str, Any]:
        return _options.parse_table(tables[name], f"[{name}] of {path}", kind)

    if "program" not in values:
        raise errors.InvalidArgumentError(
            f"{path} must have a program, which each worker runs"
        )
    return engine_of_options(
        [values["program"], *values.get("arguments", ())],
        _options.with_defaults(rule, tables["rule"]),
        _options.with_defaults(center, tables["center"]),
        _options.with_defaults(options, values),
        on,
        settings=parsed(on, ENGINES[on].Settings),
        environment=values.get("environment", {}),
        **{
            f"{task}_resources": _resources(table, f"[resources.{task}] of {path}")
            for task, table in parsed("resources", _ResourceTables).items()
        },
    )


def engine_of_options(
    program: list[str],
    rule: RuleOptions,
    center: CenterOptions,
    options: RunOptions,
    on: str,
    **more: Any,
) -> Engine:
    """Return the engine for the run that options describe.

    Args:
      program: program of each worker with its arguments.
      rule: options of the center's rule.
      center: options of the center.
      options: options of the run.
      on: name of the engine.
      **more: arguments of `Run` that are no options.

    Raises:
      InvalidArgumentError: options exclude each other, or the engine cannot do this
        run.
    """
    given = _options.given(options)
    if "workers" not in given:
        raise errors.InvalidArgumentError(
            "the number of workers is missing: give --workers, before the program "
            "(options after it are the program's)"
        )
    given["name"] = options.name or _name(program)
    _check(rule, center)
    run = Run(
        program=program,
        rule=_options.given(rule),
        serve=_options.given(center),
        **given,
        **more,
    )
    return ENGINES[on](run)


def _name(program: list[str]) -> str:
    """Return a name for the run, made of its program's name."""
    what = program[1] if program[0] == "-m" and len(program) > 1 else program[0]
    plain = re.sub(r"[^a-z0-9]+", "-", pathlib.PurePath(what).stem.lower())
    return plain.strip("-")[:40].strip("-") or "run"


def _resources(table: dict[str, Any], where: str) -> Resources:
    if isinstance(table.get("memory"), str):
        table["memory"] = units.size(table["memory"], f"memory in {where}")
    values = _options.parse_table(table, where, Resources)
    for name, value in values.items():
        if value < (0 if name == "gpus" else 1):
            raise errors.InvalidArgumentError(
                f"{name} in {where} must be positive (gpus may be 0), got {value}"
            )
    return Resources(**values)


def _check(rule: RuleOptions, center: CenterOptions) -> None:
    """Raise for wrong options, before anything is started."""
    if not _rules.is_given(rule):
        raise errors.InvalidArgumentError(
            "the center has no rule: give --rule NAME or --rule-from MODULE:OBJECT, "
            "as for `agn-optax serve`"
        )
    if rule.rule_from is None:
        _rules.make(rule)
    _center_options.settings(center)
    if center.save is not None:
        # `serve` makes the other checks, on the machine of the center.
        _save.check(center.save, is_here=False)
    _center_options.access(center, tokens.generate())
