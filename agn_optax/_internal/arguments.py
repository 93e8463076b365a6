"""Functions whose arguments are the fields of a dataclass of settings.

The dataclass has the name, type, default, check and description of each setting, so
that functions with the same settings cannot differ in them. A type checker knows the
arguments, and `help` shows them.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")


def for_function(
    settings: Callable[P, S],
) -> Callable[[Callable[[S], R]], Callable[P, R]]:
    """Return a decorator by which a function of settings takes their fields instead.

    The descriptions of the fields follow the summary of the function's docstring.

    Args:
      settings: a dataclass that describes its fields in its docstring.
    """

    def decorate(function: Callable[[S], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            _check(call, *args, **kwargs)
            return function(settings(*args, **kwargs))

        _describe(call, settings)
        return call

    return decorate


def for_method(
    settings: Callable[P, S],
) -> Callable[[Callable[[T, S], R]], Callable[Concatenate[T, P], R]]:
    """Return a decorator of a method of settings: see `for_function`."""

    def decorate(method: Callable[[T, S], R]) -> Callable[Concatenate[T, P], R]:
        @functools.wraps(method)
        def call(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            _check(call, self, *args, **kwargs)
            return method(self, settings(*args, **kwargs))

        _describe(call, settings)
        return call

    return decorate


def argument_texts(source: Callable[..., Any]) -> dict[str, str]:
    """Return the text on each argument in the docstring of a function or class.

    A class may leave arguments to the docstring of the class that it extends.
    """
    texts = {}
    owners = inspect.getmro(source)[::-1] if inspect.isclass(source) else [source]
    for owner in owners:
        for title, entries in sections(owner.__doc__ or ""):
            for entry in entries if title in ("Args", "Attributes") else ():
                name, _, texts[name] = entry.partition(": ")
    return texts


def sections(docstring: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the entries of each section of a docstring."""
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        title, is_section, entries = paragraph.partition(":\n  ")
        if is_section:
            lines = re.split(r"\n  (?! )", entries)
            yield title, [" ".join(line.split()) for line in lines]


def _check(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise for arguments that a function does not have, with the function's name.

    Raises:
      TypeError: one is unknown or missing, or given twice.
    """
    try:
        inspect.signature(call).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{call.__qualname__}() {error}") from None


def _describe(call: Any, settings: Callable[..., Any]) -> None:
    """Give a function a signature and a docstring with the fields of settings."""
    types = typing.get_type_hints(settings)
    *owner, _ = inspect.signature(call).parameters.values()  # `self` of a method
    fields = [
        each.replace(annotation=types[name])
        for name, each in inspect.signature(settings).parameters.items()
    ]
    returned = typing.get_type_hints(call)["return"]
    signature = inspect.Signature([*owner, *fields], return_annotation=returned)
    call.__signature__ = signature
    summary, _, rest = inspect.cleandoc(call.__doc__ or "").partition("\n\n")
    wrap = textwrap.TextWrapper(80, initial_indent="  ", subsequent_indent="    ").fill
    entries = [wrap(f"{name}: {t}") for name, t in argument_texts(settings).items()]
    call.__doc__ = "\n\n".join([summary, "\n".join(["Args:", *entries]), rest])
