"""Records of options: dataclasses that a command line or a file fills in.

A field is an option of the same name. If the library has a default for it, the field is
None unless it was given, so that the default is written down only in the library. The
docstring of a record describes its options, and ``--help`` prints it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import pathlib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from agn_optax import errors

T = TypeVar("T")

_ENTRY = re.compile(
    r"(\w+)(?: ([^\s\[]\S*?))?(?: \[(.+?)\])?: (.+)"  # name METAVAR [default]: help
)

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
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class Command(Flags, TyperCommand):
    """A subcommand."""


def switch() -> Any:
    """Return a field for a flag that has no ``--no-`` form."""
    return dataclasses.field(default=None, metadata={"is_switch": True})


def at_least(least: float, default: Any = dataclasses.MISSING) -> Any:
    """Return a field with a smallest value."""
    return dataclasses.field(default=default, metadata={"min": least})


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(switch, at_least)
)
def record(**words: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that turns a class into a record of options.

    The class's docstring describes the fields. Each paragraph after the first is a
    panel of ``--help``: its title, and ``name METAVAR [default]: help`` for each option
    below it. METAVAR and [default] are optional.

    Args:
      words: text that replaces ``{name}`` in the docstring.
    """

    def make(kind: type[T]) -> type[T]:
        made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
        described = _described(made.__doc__, words)
        made.__options__ = {
            field.name: _option_of(field, described.pop(field.name, {}))
            for field in dataclasses.fields(made)
        }
        assert not described, described
        return made

    return make


def _described(text: str, words: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the arguments of `typer.Option` that a docstring describes, by option."""
    described = {}
    for paragraph in inspect.cleandoc(text).split("\n\n")[1:]:
        panel, entries = paragraph.split(":\n  ", maxsplit=1)
        for entry in re.split(r"\n  (?! )", entries):
            found = _ENTRY.fullmatch(" ".join(entry.split()).format(**words))
            assert found, entry
            name, metavar, default, said = found.groups()
            described[name] = {
                "help": said,
                "metavar": metavar,
                "show_default": default or True,
                "rich_help_panel": panel,
            }
    return described


def _option_of(field: dataclasses.Field[Any], described: dict[str, Any]) -> Any:
    more = dict(field.metadata)
    names = [option(field.name)] if more.pop("is_switch", False) else []
    default = ... if field.default is dataclasses.MISSING else field.default
    return typer.Option(default, *names, **described, **more)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which the fields of each record are options of their own."""
    parameters = []
    records: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind):
            own = records[name] = typing.cast(Any, kind)
            parameters += [
                each.replace(default=own.__options__[each.name])
                for each in inspect.signature(own, eval_str=True).parameters.values()
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def spread_command(**given: Any) -> None:
        made = {
            name: kind(**{each: given.pop(each) for each in kind.__options__})
            for name, kind in records.items()
        }
        command(**given, **made)

    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    spread_command.__doc__ = "\n\n".join(" ".join(p.split()) for p in paragraphs)
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {each.name: each.annotation for each in parameters}
    return spread_command


def given(record: Any) -> dict[str, Any]:
    """Return the fields of a record that were given; a switch only if it is on."""
    absent = {
        field.name: (None, False) if field.metadata.get("is_switch") else (None,)
        for field in dataclasses.fields(record)
    }
    return {
        name: value
        for name, value in vars(record).items()
        if not any(value is each for each in absent[name])
    }


def option(name: str) -> str:
    """Return the option of a field, as it is written on a command line."""
    return "--" + name.replace("_", "-")


def refuse(
    record: Any,
    why: str,
    *,
    only: Collection[str] | None = None,
    but: Collection[str] = (),
) -> None:
    """Raise if an option of a record was given that must not be.

    Args:
      record: the record of options.
      why: the reason, which follows the option's name in the error.
      only: names of the options that must not be given; None for all options.
      but: names of options that may be given.

    Raises:
      InvalidArgumentError: one of these options was given.
    """
    for name in given(record):
        if name not in but and (only is None or name in only):
            raise errors.InvalidArgumentError(f"{option(name)} {why}")


def read(path: pathlib.Path | None, *kinds: type) -> dict[str, Any]:
    """Return the values that a TOML file gives for the fields of some record classes.

    Raises:
      InvalidArgumentError: the file cannot be read, is not TOML, has a key that is not
        an option, or a value of another type than the option's.
    """
    return {} if path is None else taken(loaded(path), str(path), *kinds)


def loaded(path: pathlib.Path) -> dict[str, Any]:
    """Load a TOML file.

    Raises:
      InvalidArgumentError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: deep nesting
        raise errors.InvalidArgumentError(f"cannot read {path}: {error}") from None


def taken(table: dict[str, Any], where: str, *kinds: type) -> dict[str, Any]:
    """Return the values that a TOML table gives for the fields of some record classes.

    Raises:
      InvalidArgumentError: the table has a key that is not a field, or a value of
        another type than the field's; the error names ``where``.
    """
    known = {
        option(name).removeprefix("--"): (name, annotation)
        for kind in kinds
        for name, annotation in typing.get_type_hints(kind).items()
    }
    values = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise errors.InvalidArgumentError(
                f"{where} has an unknown key {key!r}{hint}; known keys are "
                f"{', '.join(sorted(known))}"
            )
        name, annotation = known[key]
        values[name] = _converted(value, annotation, f"{key} in {where}")
    return values


def filled(record: T, values: dict[str, Any]) -> T:
    """Return a record with ``values`` for the fields that were not given."""
    own = {name: value for name, value in values.items() if name in vars(record)}
    return type(record)(**(own | given(record)))


def print_json(value: Any) -> None:
    """Print an object as one line of JSON, with null for NaN and infinities."""
    # Python's json writes and reads NaN and Infinity, which JSON does not have.
    plain = json.loads(json.dumps(value), parse_constant=lambda constant: None)
    typer.echo(json.dumps(plain))


def _converted(value: Any, annotation: Any, what: str) -> Any:
    kinds = [each for each in typing.get_args(annotation) if each is not type(None)]
    kind = kinds[0] if typing.get_origin(annotation) is types.UnionType else annotation
    of = typing.get_args(kind)
    if typing.get_origin(kind) is list and type(value) is list:
        return [_converted(each, of[0], f"{what}[{i}]") for i, each in enumerate(value)]
    if typing.get_origin(kind) is dict and type(value) is dict:
        return {
            n: _converted(each, of[1], f"{n} of {what}") for n, each in value.items()
        }
    if kind is float and type(value) is int:
        return float(value)
    if kind is pathlib.Path and type(value) is str:
        return pathlib.Path(value)
    if kind is not Any and type(value) is not kind:
        wanted = str(kind) if of else kind.__name__
        raise errors.InvalidArgumentError(
            f"{what} must be of type {wanted}, got {value!r}"
        )
    return value
