"""Records of options: dataclasses that a command line or a file fills in.

A field is an option of the same name, and None if it was not given, so that defaults
are written down only in the library. The docstring of a record describes its options,
and ``--help`` prints it. An option that is an argument of a class or function of the
library takes its type, default and help from there, by a `Group`.

"""

from __future__ import annotations

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from agn_optax import errors

T = TypeVar("T")

_HEAD = r"(\w+)(?: ([^\s\[]\S*?))?(?: \[(.+?)\])?"  # name METAVAR [default]
_NAME, _ENTRY = re.compile(_HEAD), re.compile(_HEAD + ": (.+)")
_NONE = re.compile(r"[;.] None (?:for )?(.+?)(?:\. |\.?$)")  # of an argument

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


class Group:
    """Options that are arguments of a class or function of the library.

    They have the arguments' types and defaults. Their help is the first sentence of the
    docstring on the argument, without its clause on None, which is shown as the
    default. A flag that is False by default has no ``--no-`` form. Arguments of a type
    that text cannot give are not options.

    Args:
      source: the class or function.
      *only: names of arguments; without any, all are options.
      prefix: what options have before the names of their arguments.
      names: options of other names, by argument, each as ``"name METAVAR [default]"``.
      needs: the option without which options of arguments with a default have no
        effect.

    Attributes:
      names: names of the options, by argument.
      fields: type of each option, whether it is a switch, and arguments of
        `typer.Option`.
    """

    def __init__(
        self,
        source: Callable[..., Any],
        *only: str,
        prefix: str = "",
        names: Mapping[str, str] | None = None,
        needs: str = "",
    ) -> None:
        self._source, self._needs = source, needs
        self.names: dict[str, str] = {}
        self.fields: dict[str, tuple[Any, bool, dict[str, Any]]] = {}
        parameters = inspect.signature(source).parameters
        hints, described = typing.get_type_hints(source), _arguments(source)
        for name in only or parameters:
            if (kind := _type_of(hints[name])) is None:
                continue
            found = _NAME.fullmatch((names or {}).get(name, prefix + name))
            assert found, name
            own, metavar, shown = found.groups()
            default, (said, absent) = parameters[name].default, described[name]
            if default is not None:
                absent = _shown(default, own)
            if needs and default is not inspect.Parameter.empty:
                said = f"With {needs}: {said}"
            self.names[name] = own
            self.fields[own] = (
                kind,
                default is False,
                {
                    "help": said[0].upper() + said[1:],
                    "metavar": metavar or _choices(hints[name]),
                    "show_default": shown or absent or False,
                },
            )

    def given(self, options: Any) -> dict[str, Any]:
        """Return the arguments that the options of a record give."""
        every = given(options)
        return {name: every[own] for name, own in self.names.items() if own in every}

    def made(self, options: Any, **more: Any) -> Any:
        """Call the class or function with these arguments and ``more``."""
        return self._source(**self.given(options), **more)

    def refuse(self, options: Any, why: str = "") -> None:
        """Raise if an option of the group was given.

        Raises:
          InvalidArgumentError: one was given; the error has the reason ``why``, or the
            option that it needs.
        """
        refuse(options, why or f"needs {self._needs}", only=self.names.values())


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the entries of each section of a docstring."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        title, is_section, entries = paragraph.partition(":\n  ")
        if is_section:
            lines = re.split(r"\n  (?! )", entries)
            yield title, [" ".join(line.split()) for line in lines]


def _arguments(source: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """Return the help on each argument and on its absence, as docstrings have them.

    A class may leave arguments to the docstring of the class that it extends.
    """
    owners: Sequence[Any] = [source]
    if inspect.isclass(source):
        owners = inspect.getmro(source)
    described: dict[str, tuple[str, str]] = {}
    for title, entries in (
        each for own in owners for each in _sections(own.__doc__ or "")
    ):
        if title not in ("Args", "Attributes"):
            continue
        for entry in entries:
            name, _, said = entry.replace("`", "").partition(": ")
            absent = _NONE.search(said)
            first = _NONE.sub(". ", said).partition(". ")[0].rstrip(".")
            described.setdefault(name, (f"{first}.", absent[1] if absent else ""))
    return described


def _type_of(hint: Any) -> Any:
    """Return the type of an argument's option; None if text cannot give it."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    cases = typing.get_args(hint) if is_union else (hint,)
    origins = [typing.get_origin(case) for case in cases]
    if os.PathLike in origins or pathlib.Path in cases:
        return pathlib.Path
    for case, origin in zip(cases, origins, strict=True):
        if case in (bool, int, float, str):
            return case
        if case is Any or origin is typing.Literal:
            return str
    return None


def _choices(hint: Any) -> str | None:
    """Return the metavar of an argument that is one of a few words, else None."""
    is_choice = typing.get_origin(hint) is typing.Literal
    return "|".join(typing.get_args(hint)) if is_choice else None


def _shown(default: Any, name: str) -> str:
    """Return a default other than None as ``--help`` shows it; "" for none."""
    if default is inspect.Parameter.empty or default is False:
        return ""
    if default is True:
        return option(name).removeprefix("--")
    return f"{default:g}" if isinstance(default, float) else str(default)


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(switch,)
)
def record(
    groups: Mapping[str, Group] | None = None, **words: str
) -> Callable[[type[T]], type[T]]:
    """Return a decorator that turns a class into a record of options.

    The class's docstring describes the fields, in their order. Each paragraph after the
    first is a panel of ``--help``: its title, and ``name METAVAR [default]: help`` for
    each option below it. METAVAR and [default] are optional. A line ``*name`` stands
    for the options of a group.

    Args:
      groups: groups of options by name.
      words: text that replaces ``{name}`` in the docstring.
    """

    def make(kind: type[T]) -> type[T]:
        fields: dict[str, Any] = dict(kind.__annotations__)
        described: dict[str, dict[str, Any]] = {}
        for panel, entries in _sections(kind.__doc__ or ""):
            for entry in entries:
                own: dict[str, dict[str, Any]] = {}
                if entry.startswith("*"):
                    for name, field in (groups or {})[entry[1:]].fields.items():
                        of, is_switch, own[name] = field
                        fields[name] = of | None
                        setattr(kind, name, switch() if is_switch else None)
                else:
                    name, own[name] = _written(entry.format(**words))
                described |= {
                    name: {**said, "rich_help_panel": panel}
                    for name, said in own.items()
                }
        unknown = described.keys() - fields.keys()
        assert not unknown, unknown
        kind.__annotations__ = {name: fields[name] for name in described} | fields
        made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
        made.__options__ = {
            field.name: _option_of(field, described.get(field.name, {}))
            for field in dataclasses.fields(made)
        }
        return made

    return make


def _written(entry: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of `typer.Option` from an option's entry."""
    found = _ENTRY.fullmatch(entry)
    assert found, entry
    name, metavar, default, said = found.groups()
    return name, {"help": said, "metavar": metavar, "show_default": default or True}


def _option_of(field: dataclasses.Field[Any], described: dict[str, Any]) -> Any:
    names = [option(field.name)] if field.metadata.get("is_switch") else []
    default = ... if field.default is dataclasses.MISSING else field.default
    return typer.Option(default, *names, **described)


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
