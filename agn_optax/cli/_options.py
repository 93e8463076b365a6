"""Records of options: dataclasses that a command line or a file fills in.

A field is an option of the same name, and None if it was not given, so that defaults
are those of the library and written down there only.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import pathlib
import tomllib
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from agn_optax import errors

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Config = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE.toml",
        help="A file with options of a center, such as `learning-rate = 1e-3`. "
        "The command line wins.",
    ),
]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are records are options, field by field."""
    hints = typing.get_type_hints(command, include_extras=True)
    parameters, records = [], {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            records[name] = typing.cast(Any, kind)
            parameters += [
                inspect.Parameter(
                    field,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=annotation,
                )
                for field, annotation in _annotations(kind).items()
            ]
        else:
            parameters.append(
                parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=kind)
            )

    def spread_command(**given: Any) -> None:
        made = {
            name: record(**{field: given.pop(field) for field in _annotations(record)})
            for name, record in records.items()
        }
        command(**given, **made)

    spread_command.__name__ = command.__name__
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    spread_command.__doc__ = "\n\n".join(" ".join(p.split()) for p in paragraphs)
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread_command


def given(record: Any) -> dict[str, Any]:
    """The fields of a record that were given."""
    return {
        field.name: value
        for field in dataclasses.fields(record)
        if (value := getattr(record, field.name)) is not None
    }


def option(field: str) -> str:
    """The option of a field, as it is written on a command line."""
    return "--" + field.replace("_", "-")


def arguments(record: Any) -> list[str]:
    """The command line that fills in a record as this one is."""
    made = []
    for field, value in given(record).items():
        if isinstance(value, bool):
            made.append(option(field) if value else option(f"no_{field}"))
        else:
            made.append(f"{option(field)}={value}")
    return made


def refuse(record: Any, why: str, *, but: tuple[str, ...] = ()) -> None:
    """No option of a record, but these, was given.

    Raises:
      InvalidArgumentError: one was; says why it must not be.
    """
    for field in given(record):
        if field not in but:
            raise errors.InvalidArgumentError(f"{option(field)} {why}")


def read(path: pathlib.Path | None, *kinds: type) -> dict[str, Any]:
    """What a TOML file gives for the fields of some kinds of records.

    Raises:
      InvalidArgumentError: it cannot be read, is not TOML, has a key that is no option,
        or a value of another type than the option's.
    """
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.InvalidArgumentError(f"cannot read {path}: {error}") from None
    known = {
        option(field).removeprefix("--"): (field, annotation)
        for kind in kinds
        for field, annotation in _annotations(kind).items()
    }
    values = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise errors.InvalidArgumentError(
                f"{path} has an unknown key {key!r}{hint}; known keys are "
                f"{', '.join(sorted(known))}"
            )
        field, annotation = known[key]
        values[field] = _converted(value, annotation, f"{key} in {path}")
    return values


def filled(record: T, values: dict[str, Any]) -> T:
    """A record in which values stand where it was not given any."""
    fields = {field.name for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    values = {field: value for field, value in values.items() if field in fields}
    return type(record)(**(values | given(record)))


def print_json(value: Any, *, err: bool = False) -> None:
    """One object, on a line of its own; what JSON has no word for is null."""
    typer.echo(json.dumps(_plain(value), allow_nan=False), err=err)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _annotations(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _converted(value: Any, annotation: Any, what: str) -> Any:
    (kind,) = (
        each
        for each in typing.get_args(typing.get_args(annotation)[0])
        if each is not types.NoneType
    )
    if kind is float and type(value) is int:
        return float(value)
    if kind is pathlib.Path and type(value) is str:
        return pathlib.Path(value)
    if type(value) is not kind:
        raise errors.InvalidArgumentError(
            f"{what} must be of type {kind.__name__}, got {value!r}"
        )
    return value
