"""Traced programs: what is skipped if a program is unfit, and the operations of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

T = TypeVar("T")

_log = logging.getLogger("agn_optax")


class UnfitError(Exception):
    """A program that lacks a required property; gives the reason."""


def unless_unfit(what: str, ask: Callable[[], T]) -> T | None:
    """Return ``ask()``; or None, with the reason in the log, if it raises.

    Args:
      what: the step that is skipped if ``ask`` raises, as a text for the log.
      ask: a function that raises `UnfitError` if a program is unfit. Any other
        exception counts as well, because code that is written for a whole tree may
        raise anything for a part of it.
    """
    try:
        return ask()
    except Exception as error:
        kind = "" if isinstance(error, UnfitError) else f"{type(error).__name__}: "
        _log.debug("not done: %s, because of %s%s", what, kind, error)
        return None


def operations(program: Any) -> Iterator[JaxprEqn]:
    """Yield all operations of a jaxpr, including those of programs inside it."""
    from jax.extend.core import jaxprs_in_params  # noqa: PLC0415 slow to import

    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from operations(inner)
