"""Records of options: dataclasses that a command line or a file fills in.

A field is an option of the same name, and None if it was not given, so that defaults
are written down only in the library. The docstring of a record describes its options,
and ``--help`` prints it. A `Group` turns the arguments of a class or function of the
library into options with the same types, defaults and help.
"""

from __future__ import annotations

import builtins
import dataclasses
import difflib
import functools
import inspect
import json
import os
import pathlib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from agn_optax import errors
from agn_optax._internal import arguments

T = TypeVar("T")

# name METAVAR [default]: help
_ENTRY = re.compile(r"(\w+)(?: ([^\s\[]\S*?))?(?: \[(.+?)\])?(?:: (.+))?")
_NONE = re.compile(r"[;.] None (?:for )?(.+?)(?:\. |\.?$)")  # in an argument's help

EVERYDAY = "Options"  # the panel that Typer shows first

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Config = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE.toml",
        help="File with options of a center, such as `learning-rate = 1e-3`. "
        "Options on the command line override it.",
    ),
]


class Flags:
    """A mixin of commands that shows flags without a type.

    Newer releases of Typer show a type for every option, even for ``--page``.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of a command, including ``--help``."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(Flags, TyperCommand):
    """A subcommand."""


class Group:
    """Options that are arguments of a class or function of the library.

    They have the arguments' types and defaults. Their help is the first sentence on the
    argument in the docstring; a clause on None is shown as the default instead.
    Arguments whose type cannot be read from text are not options.

    Args:
      source: the class or function.
      *only: names of arguments; without any, all are options.
      prefix: text before an argument's name in the name of its option.
      names: options that differ from their arguments in name, metavar or default, by
        argument, each as ``"name METAVAR [default]"``.
      needs: the option without which the options of arguments with a default have no
        effect.

    Attributes:
      source: the class or function.
      names: names of the options, by argument.
      fields: type of each option, and arguments of `typer.Option`.
    """

    def __init__(
        self,
        source: Callable[..., Any],
        *only: str,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
        needs: str = "",
    ) -> None:
        self.source, self._needs = source, needs
        self.names: dict[str, str] = {}
        self.fields: dict[str, tuple[Any, dict[str, Any]]] = {}
        parameters = inspect.signature(source).parameters
        hints, described = typing.get_type_hints(source), _argument_help(source)
        for name in only or parameters:
            kind, metavar = _option_type(hints[name])
            if kind is None:
                continue
            entry = (names or {}).get(name, prefix + name)
            option_name, described_as = _parse_entry(entry)
            default, (text, absent) = parameters[name].default, described[name]
            if default is not None:
                absent = _default_text(default, option_name)
            is_optional = default is not inspect.Parameter.empty
            if self._needs and is_optional and option(option_name) != self._needs:
                text = f"With {needs}: {text}"
            self.names[name] = option_name
            self.fields[option_name] = (
                kind | None,
                {
                    "help": text[0].upper() + text[1:],
                    "metavar": described_as["metavar"] or metavar,
                    "show_default": described_as["show_default"] or absent or False,
                },
            )

    def given(self, options: Any) -> dict[str, Any]:
        """Return the arguments that the options of a record give."""
        values = given(options)
        return {
            argument: values[name]
            for argument, name in self.names.items()
            if name in values
        }

    def build(self, options: Any, **more: Any) -> Any:
        """Call the class or function with the given arguments and ``more``."""
        return self.source(**self.given(options), **more)

    def build_if_given(self, argument: str, options: Any, **more: Any) -> Any:
        """Call the class or function if ``argument`` is given; else return None.

        Raises:
          InvalidArgumentError: other options of the group were given without it.
        """
        if argument in self.given(options):
            return self.build(options, **more)
        self.reject(options, f"needs {self._needs}")
        return None

    def reject(self, options: Any, reason: str) -> None:
        """Raise if an option of the group was given.

        Raises:
          InvalidArgumentError: one was given.
        """
        reject(options, reason, only=self.names.values())


def _parse_entry(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name of an option, and the arguments of `typer.Option`."""
    match = _ENTRY.fullmatch(text)
    assert match, text
    name, metavar, default, help_ = match.groups()
    return name, {"help": help_, "metavar": metavar, "show_default": default}


def _argument_help(source: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """Return the help on each argument, and on None for it, from the docstrings."""
    described = {}
    for name, text in arguments.argument_texts(source).items():
        absent = _NONE.search(text.replace("`", ""))
        first = _NONE.sub(". ", text.replace("`", "")).partition(". ")[0].rstrip(".")
        described[name] = (f"{first}.", absent[1] if absent else "")
    return described


def _option_type(hint: Any) -> tuple[Any, str | None]:
    """Return an option's type (None if text cannot give it) and its choices, if any."""
    cases = typing.get_args(hint) or (hint,)
    given = [case for case in cases if case is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return str, "|".join(cases)
    if [typing.get_origin(case) for case in given] == [typing.Literal]:
        return str, "|".join(typing.get_args(given[0]))
    if any((typing.get_origin(c) or c) in (os.PathLike, pathlib.Path) for c in cases):
        return pathlib.Path, None
    plain = (str if case is Any else case for case in cases)
    return next((c for c in plain if c in (bool, int, float, str)), None), None


def _default_text(default: Any, name: str) -> str:
    """Return a default, other than None, as ``--help`` shows it; "" to show none."""
    if default is inspect.Parameter.empty or default is False:
        return ""
    if default is True:
        return option(name).removeprefix("--")
    return f"{default:g}" if isinstance(default, float) else str(default)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def record(
    groups: Mapping[str, Group] | None = None,
    everyday: Collection[str] = (),
    **words: str,
) -> Callable[[type[T]], type[T]]:
    """Return a decorator that turns a class into a record of options.

    The class's docstring describes the fields, in their order. Each paragraph after the
    first is a panel of ``--help``: its title, and ``name METAVAR [default]: help`` for
    each option below it. METAVAR and [default] are optional. A line ``*name`` stands
    for the options of a group.

    Args:
      groups: groups of options by name.
      everyday: names of the options that most centers need. They are in the first
        panel, before the panels by topic.
      words: text that replaces ``{name}`` in the docstring.
    """

    def make(kind: type[T]) -> type[T]:
        own_fields = dict(kind.__annotations__)
        annotations: dict[str, Any] = {}
        options: dict[str, dict[str, Any]] = {}
        for panel, entries in arguments.sections(kind.__doc__ or ""):
            for entry in entries:
                if entry.startswith("*"):
                    fields = (groups or {})[entry[1:]].fields
                    for name in fields:
                        setattr(kind, name, None)  # the default
                else:
                    name, described = _parse_entry(entry.format(**words))
                    assert name in own_fields, name
                    described["show_default"] = described["show_default"] or True
                    fields = {name: (own_fields[name], described)}
                for name, (annotation, described) in fields.items():
                    annotations[name] = annotation
                    shown_in = EVERYDAY if name in everyday else panel
                    options[name] = {**described, "rich_help_panel": shown_in}
        kind.__annotations__ = annotations | own_fields
        options_class: Any = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
        options_class.__options__ = {
            field.name: typer.Option(
                ... if field.default is dataclasses.MISSING else field.default,
                **options.get(field.name, {}),
            )
            for field in dataclasses.fields(options_class)
        }
        return options_class

    return make


def as_command(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which the fields of each record are options of their own."""
    parameters = []
    records: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind):
            record = records[name] = typing.cast(Any, kind)
            parameters += [
                field.replace(default=record.__options__[field.name])
                for field in inspect.signature(
                    record, eval_str=True
                ).parameters.values()
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def flat_command(**values: Any) -> None:
        filled = {
            name: kind(**{field: values.pop(field) for field in kind.__options__})
            for name, kind in records.items()
        }
        command(**values, **filled)

    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    flat_command.__doc__ = "\n\n".join(" ".join(p.split()) for p in paragraphs)
    flat_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat_command


def given(record: Any) -> dict[str, Any]:
    """Return the fields of a record that were given."""
    return {name: value for name, value in vars(record).items() if value is not None}


def option(name: str) -> str:
    """Return the option of a field, as it is written on a command line."""
    return "--" + name.replace("_", "-")


def reject(record: Any, reason: str, *, only: Collection[str] | None = None) -> None:
    """Raise if an option that must not be given is in a record.

    Args:
      record: the record of options.
      reason: the text that follows the option's name in the error.
      only: names of the options that must not be given; None for all options.

    Raises:
      InvalidArgumentError: one of these options was given.
    """
    for name in given(record):
        if only is None or name in only:
            raise errors.InvalidArgumentError(f"{option(name)} {reason}")


def read_file(path: pathlib.Path | None, *kinds: type) -> dict[str, Any]:
    """Return the values that a TOML file gives for the fields of some record classes.

    Raises:
      InvalidArgumentError: the file cannot be read, is not TOML, has a key that is not
        an option, or a value of another type than the option's.
    """
    return {} if path is None else parse_table(load_toml(path), str(path), *kinds)


def load_toml(path: pathlib.Path) -> dict[str, Any]:
    """Load a TOML file.

    Raises:
      InvalidArgumentError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: deep nesting
        raise errors.InvalidArgumentError(f"cannot read {path}: {error}") from None


def parse_table(table: Any, where: str, *kinds: type) -> dict[str, Any]:
    """Return the values that a TOML table gives for the fields of some record classes.

    Raises:
      InvalidArgumentError: ``table`` is not a table, or has a key that is not a field
        or a value of another type than the field's; the error names ``where``.
    """
    if not isinstance(table, dict):
        raise errors.InvalidArgumentError(f"{where} must be a table, got {table!r}")
    fields = {
        option(name).removeprefix("--"): (name, annotation)
        for kind in kinds
        for name, annotation in typing.get_type_hints(kind).items()
    }
    for key in [key for key in table if key not in fields]:
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise errors.InvalidArgumentError(
            f"{where} has an unknown key {key!r}{hint}; known keys are "
            f"{', '.join(sorted(fields))}"
        )
    return {
        fields[key][0]: _convert(value, fields[key][1], f"{key} in {where}")
        for key, value in table.items()
    }


def with_defaults(record: T, values: dict[str, Any]) -> T:
    """Return a record in which ``values`` replace fields that were not given."""
    defaults = {name: v for name, v in values.items() if name in vars(record)}
    return type(record)(**(defaults | given(record)))


def print_json(value: Any) -> None:
    """Print an object as one line of JSON, with null for NaN and infinities."""
    # Python's json writes and reads NaN and Infinity, which JSON does not have.
    plain = json.loads(json.dumps(value), parse_constant=lambda constant: None)
    typer.echo(json.dumps(plain))


def report(json: bool, text: str, **values: Any) -> None:
    """Print the outcome of a command: values as JSON, or else a text."""
    if json:
        print_json(values)
    else:
        typer.echo(text)


def _convert(value: Any, annotation: Any, what: str) -> Any:
    """Convert a value of a TOML file to a field's type, which may be optional."""
    cases = [annotation]
    if isinstance(annotation, types.UnionType):
        cases = [case for case in typing.get_args(annotation) if case is not type(None)]
    kind, inner = cases[0], typing.get_args(cases[0])
    match typing.get_origin(kind) or kind, value:
        case builtins.list, list():
            return [_convert(v, inner[0], f"{what}[{i}]") for i, v in enumerate(value)]
        case builtins.dict, dict():
            return {
                k: _convert(v, inner[1], f"{k} of {what}") for k, v in value.items()
            }
        case pathlib.Path, str():
            return pathlib.Path(value)
        case builtins.float, int() if not isinstance(value, bool):
            return float(value)
    if kind is not Any and type(value) is not kind:
        wanted = str(kind) if inner else kind.__name__
        raise errors.InvalidArgumentError(
            f"{what} must be of type {wanted}, got {value!r}"
        )
    return value
