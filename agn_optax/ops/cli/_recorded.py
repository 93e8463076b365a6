"""Options of a served center that are written beside its records, for tapes.

The file has the form that ``--config`` reads. The records themselves have only a
fingerprint of the rule, by which a rule that is made from the options is checked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from agn_optax import errors
from agn_optax._internal import write_whole
from agn_optax.center import Limits, Mode
from agn_optax.ops.cli import _center_options, _options, _rules
from agn_optax.ops.cli._center_options import CenterOptions, ModeOptions
from agn_optax.ops.cli._rules import RuleOptions
from agn_optax.rules import OPTIMIZER_SETTINGS, Rule
from agn_optax.tape import Tape

_FILE = "options.toml"


def write(
    directory: str | os.PathLike[str], rule: RuleOptions, center: CenterOptions
) -> None:
    """Write the options of the rule, the mode and the limits on messages.

    Raises:
      DurabilityError: the file cannot be written.
    """
    names = [field.name for field in dataclasses.fields(ModeOptions)]
    values = _options.given(rule) | {
        name: value for name, value in _options.given(center).items() if name in names
    }
    lines = ["# Options of this center, by which `agn-optax replay` makes its rule."]
    for name, value in values.items():
        lines.append(f"{_options.option(name)[2:]} = {json.dumps(value)}")
    path = pathlib.Path(directory) / _FILE
    try:
        write_whole(path, "\n".join([*lines, ""]), 0o644)
    except OSError as error:
        raise errors.DurabilityError(f"cannot write {path}: {error}") from error


def read(tape: Tape, config: pathlib.Path | None) -> dict[str, Any]:
    """Return the options of a recorded center; none if it was not served.

    Args:
      tape: the tape.
      config: a file to read instead; None for the file beside the records.
    """
    path = tape.path / _FILE
    if config is None and not path.exists():
        return {}
    return _options.read_file(config or path, RuleOptions, ModeOptions)


def find_rule(
    tape: Tape, options: RuleOptions, config: pathlib.Path | None
) -> Rule | None:
    """Return the rule of a recorded center; None if no options say which it has.

    Args:
      tape: the tape.
      options: options of the rule; those of the recorded center if no rule is named.
      config: see `read`.
    """
    if not _rules.is_given(options):
        options = _options.with_defaults(options, read(tape, config))
    return _rules.make(options) if _rules.is_given(options) else None


def rule_of(tape: Tape, options: RuleOptions, config: pathlib.Path | None) -> Rule:
    """Return the rule of a recorded center: see `find_rule`.

    Raises:
      InvalidArgumentError: no options say which rule it has.
    """
    rule = find_rule(tape, options, config)
    if rule is None:
        raise errors.InvalidArgumentError(
            f"{tape.path} does not say with which options its rule was made, since "
            "`agn-optax serve` did not run it: give the rule's options, or a file with "
            "--config"
        )
    return rule


def changed(
    recorded: dict[str, Any], rule: RuleOptions, mode: ModeOptions
) -> tuple[Rule, Mode, Limits]:
    """Return rule, mode and limits of a recorded center with some other options.

    Args:
      recorded: options of the recorded center.
      rule: other options of the rule. Another center optimizer takes no settings from
        the recorded one.
      mode: other options of the mode, and of the limits on messages. Another mode takes
        no settings from the recorded one.
    """
    given = _options.given(rule)
    left_out: set[str] = set()
    if _rules.is_given(rule):
        left_out |= {field.name for field in dataclasses.fields(RuleOptions)}
    elif "center_optimizer" in given:
        left_out |= {"rule_from", *OPTIMIZER_SETTINGS}
    if mode.mode is not None:
        left_out |= _center_options.MODE_SETTINGS
    kept = {name: value for name, value in recorded.items() if name not in left_out}
    mode = _options.with_defaults(mode, kept)
    return (
        _rules.make(_options.with_defaults(rule, kept)),
        _center_options.mode_of(mode),
        Limits(messages=_center_options.message_limits(mode)),
    )
