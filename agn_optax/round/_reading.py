"""Find the axes over which a traced program has collectives, by reading its jaxpr.

An operation is a collective if its parameter ``axes`` or ``axis_name`` names an axis;
``axis_index`` and ``pvary`` do not communicate. JAX does not promise these names.
tests/towers/test_reading.py fails if a version of JAX has a collective that is not
found here, or other names for these parameters. No other module inspects operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agn_optax.round._collectives import names

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Operations that name an axis and do not communicate; `jax.lax.pcast` makes ``pvary``.
_SILENT = ("axis_index", "pvary")


def axes_of_collectives(jaxpr: Any, *, ignored_scope: str | None = None) -> set[str]:
    """Return the axes over which a jaxpr has collectives.

    Operations in a name scope that contains ``ignored_scope`` do not count.
    """
    axes: set[str] = set()
    for operation in _operations(jaxpr):
        scope = str(operation.source_info.name_stack)
        is_ignored = ignored_scope is not None and ignored_scope in scope
        if operation.primitive.name not in _SILENT and not is_ignored:
            for key in ("axes", "axis_name"):
                params = names(operation.params.get(key))
                axes.update(name for name in params if isinstance(name, str))
    return axes


def _operations(program: Any) -> Iterator[JaxprEqn]:
    """Yield all operations of a jaxpr, including those of programs inside it."""
    from jax.extend.core import jaxprs_in_params  # noqa: PLC0415 slow to import

    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _operations(inner)
