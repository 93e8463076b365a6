"""Does an exchange work element by element? Only then may it see a piece of the center.

Asked of the traced program rather than of a list of known optimizers: arrays may only
go through operations that take each element for itself, and the program of the pieces
must be that of the whole leaves, with the same constants (a division by the size of a
leaf is not).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax import errors
from agn_optax.rules._rule import Rule

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

PyTree = Any

# Primitives of JAX that take each element for itself.
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh broadcast_in_dim cbrt
    ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic
    lt max min mul ne neg nextafter not optimization_barrier or population_count pow
    pvary pcast reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
    xor
    """.split()  # noqa: SIM905 eighty words are easier to read so
)


def check(rule: Rule, params: PyTree, piece: Callable[[PyTree], PyTree]) -> None:
    """The exchange of ``rule`` may run on the pieces that ``piece`` makes of a tree.

    Raises:
      InvalidArgumentError: it may not; names the optimizer that looks further.
    """
    exchange = functools.partial(_exchange, rule)
    program = jax.make_jaxpr(exchange)(params)
    for equation in program.jaxpr.eqns:
        for operation in _operations(equation):
            if not _is_elementwise(operation):
                raise errors.InvalidArgumentError(
                    f"rule {rule.name!r} cannot move a center in shards: "
                    f"{_origin(equation)} looks at more than one element at a time "
                    f"({operation.primitive.name}). Leave it out of the center "
                    "optimizer, or keep the center whole"
                )
    pieces = jax.eval_shape(piece, params)
    try:
        same = _signature(program) == _signature(jax.make_jaxpr(exchange)(pieces))
    except (TypeError, ValueError, IndexError):  # it cannot even be traced on pieces
        same = False
    if not same:
        raise errors.InvalidArgumentError(
            f"rule {rule.name!r} cannot move a center in shards: it treats leaves by "
            "their shape, and pieces of them otherwise. Keep the center whole"
        )


def is_uniform(rule: Rule, params: PyTree, parts: PyTree) -> bool:
    """Whether ``rule`` moves the leaves of a center as it does all their elements.

    Args:
      rule: the rule.
      params: a tree, abstract.
      parts: another one with all the same elements, abstract.
    """
    move = functools.partial(_move, rule)
    try:
        program, packed = (jax.make_jaxpr(move)(tree) for tree in (params, parts))
    except Exception:  # it has a mask for its own tree, say
        return False
    if not all(map(_is_elementwise, _all_operations(program))):
        return False
    if [_constant(c) for c in program.consts] != [_constant(c) for c in packed.consts]:
        return False
    # What is done to numbers is done once, or for every leaf; to arrays for every one.
    leaves, pieces = len(jax.tree.leaves(params)), len(jax.tree.leaves(parts))
    of_tree, of_parts = (
        collections.Counter(map(_what, _all_operations(traced)))
        for traced in (program, packed)
    )
    return of_tree.keys() == of_parts.keys() and all(
        of_tree[what] * pieces == times * leaves
        or (what.of_numbers and of_tree[what] == times)
        for what, times in of_parts.items()
    )


class _What(NamedTuple):
    """An operation, whatever the shapes."""

    of_numbers: bool
    name: str
    details: tuple[Any, ...]


def _what(operation: JaxprEqn) -> _What:
    shapes = _shapes(operation.invars) | _shapes(operation.outvars)
    constants = [_constant(v.val) for v in operation.invars if hasattr(v, "val")]
    settings = [
        (name, str(value))
        for name, value in operation.params.items()
        if name not in ("shape", "broadcast_dimensions", "sharding")
    ]
    dtypes = [str(variable.aval.dtype) for variable in operation.outvars]  # type: ignore[attr-defined]
    return _What(not shapes, operation.primitive.name, (*constants, *settings, *dtypes))


def _all_operations(program: Any) -> list[JaxprEqn]:
    return [o for equation in program.jaxpr.eqns for o in _operations(equation)]


def _exchange(rule: Rule, params: PyTree) -> PyTree:
    _, record = rule.record.update(params, rule.record.init(params), params)
    steps = jnp.ones((), jnp.int32)
    message = rule.contribution(record, params, params, steps)
    return _move(rule, params, message), record


def _move(rule: Rule, params: PyTree, message: PyTree = None) -> PyTree:
    message = params if message is None else message
    if rule.message is not None:
        message = rule.message(message, params)
    return rule.center.update(
        optax.tree.cast_like(message, params),
        rule.center.init(params),
        params,
        staleness=jnp.zeros((), jnp.int32),
    )


def _operations(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """An operation, or those of the programs inside it."""
    from jax.extend.core import jaxprs_in_params  # noqa: PLC0415 slow to import

    programs = list(jaxprs_in_params(equation.params))
    if not programs:
        yield equation
    for program in programs:
        for inner in program.eqns:
            yield from _operations(inner)


def _signature(program: Any) -> list[Any]:
    """What a program does, whatever the shapes: its operations and constants."""
    said: list[Any] = [_constant(value) for value in program.consts]
    for equation in program.jaxpr.eqns:
        for operation in _operations(equation):
            said.append(operation.primitive.name)
            said += [
                _constant(variable.val)
                for variable in operation.invars
                if hasattr(variable, "val")
            ]
    return said


def _constant(value: Any) -> Any:
    return (str(np.asarray(value).dtype), np.asarray(value).tobytes())


def _is_elementwise(operation: JaxprEqn) -> bool:
    inputs = _shapes(operation.invars)
    outputs = _shapes(operation.outvars)
    if not inputs and not outputs:
        return "callback" not in operation.primitive.name
    if operation.primitive.name not in _ELEMENTWISE:
        return False
    return not inputs or (len(inputs) == 1 and outputs == inputs)


def _shapes(variables: Any) -> set[tuple[int, ...]]:
    shapes = {getattr(v.aval, "shape", ()) for v in variables}
    return shapes - {()}


def _origin(operation: JaxprEqn) -> str:
    """The optimizer that an operation comes from, as well as it can be told."""
    traceback = operation.source_info.traceback
    frames: list[Any] = [] if traceback is None else traceback.frames
    outside = [f.function_name for f in frames if "/jax/" not in f.file_name]
    for name in outside:
        if name.endswith((".update_fn", ".update")):
            return name.split(".")[0]
    return outside[0] if outside else "an operation"
