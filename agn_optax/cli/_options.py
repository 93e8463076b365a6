"""Records of options: dataclasses that a command line or a file fills in.

A `field` is an option of the same name. Where the library has a default for it, it is
None if it was not given, so that this is written down there only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import pathlib
import tomllib
import typing
from collections.abc import Callable, Collection, Mapping
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


def field(
    help_: str,
    metavar: str | None = None,
    *names: str,
    default: Any = None,
    **more: Any,
) -> Any:
    """A field of a record, as an option.

    Args:
      help_: what it is.
      metavar: what stands for its value; None for its type.
      names: how it is written, where not as `option` says.
      default: the field's value where the option is not given; ``...`` if it must be.
      more: other arguments of `typer.Option`, such as the panel that it is in.
    """
    made: Any = typer.Option(default, *names, help=help_, metavar=metavar, **more)
    return dataclasses.field(default=default, metadata={"option": made})


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are records are options, field by field."""
    parameters = []
    records: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind):
            record = records[name] = typing.cast(Any, kind)
            own = inspect.signature(record, eval_str=True).parameters
            parameters += [
                own[each.name].replace(default=each.metadata["option"])
                for each in dataclasses.fields(record)
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def spread_command(**given: Any) -> None:
        made = {
            name: record(
                **{f.name: given.pop(f.name) for f in dataclasses.fields(record)}
            )
            for name, record in records.items()
        }
        command(**given, **made)

    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    spread_command.__doc__ = "\n\n".join(" ".join(p.split()) for p in paragraphs)
    spread_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_command.__annotations__ = {each.name: each.annotation for each in parameters}
    return spread_command


def given(record: Any) -> dict[str, Any]:
    """The fields of a record that were given."""
    return {name: value for name, value in vars(record).items() if value is not None}


def option(name: str) -> str:
    """The option of a field, as it is written on a command line."""
    return "--" + name.replace("_", "-")


def arguments(record: Any) -> list[str]:
    """The command line that fills in a record as this one is."""
    made = []
    for name, value in given(record).items():
        if isinstance(value, bool):
            made.append(option(name if value else f"no_{name}"))
        else:
            made.append(f"{option(name)}={value}")
    return made


def refuse(
    record: Any,
    why: str,
    *,
    only: Collection[str] | None = None,
    but: Collection[str] = (),
) -> None:
    """No option of a record was given; or none of some, or none but some.

    Raises:
      InvalidArgumentError: one was; says why it must not be.
    """
    for name in given(record):
        if name not in but and (only is None or name in only):
            raise errors.InvalidArgumentError(f"{option(name)} {why}")


def choose(name: str | None, among: Mapping[str, T], what: str) -> T:
    """What has a name.

    Raises:
      InvalidArgumentError: nothing has; says which names there are.
    """
    if name is None or name not in among:
        raise errors.InvalidArgumentError(
            f"{what} must be one of {', '.join(among)}, got {name!r}"
        )
    return among[name]


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
                f"{path} has an unknown key {key!r}{hint}; known keys are "
                f"{', '.join(sorted(known))}"
            )
        name, annotation = known[key]
        values[name] = _converted(value, annotation, f"{key} in {path}")
    return values


def filled(record: T, values: dict[str, Any]) -> T:
    """A record in which values stand where it was not given any."""
    own = {name: value for name, value in values.items() if name in vars(record)}
    return type(record)(**(own | given(record)))


def print_json(value: Any) -> None:
    """One object, on a line of its own; what JSON has no word for is null."""
    typer.echo(json.dumps(_plain(value), allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _converted(value: Any, annotation: Any, what: str) -> Any:
    kind, _ = typing.get_args(annotation)  # and None
    if kind is float and type(value) is int:
        return float(value)
    if kind is pathlib.Path and type(value) is str:
        return pathlib.Path(value)
    if type(value) is not kind:
        raise errors.InvalidArgumentError(
            f"{what} must be of type {kind.__name__}, got {value!r}"
        )
    return value
