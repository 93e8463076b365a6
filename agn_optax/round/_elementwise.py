"""Does an exchange work element by element? Only then may it see a piece of the center.

Asked of the traced program rather than of a list of known optimizers: arrays may only
go through operations that take each element for itself, and the program of the pieces
must be that of the whole leaves, with the same constants (a division by the size of a
leaf is not).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax import errors
from agn_optax.rules import Rule

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
        one, other = (_meanings(jax.make_jaxpr(move)(t), t) for t in (params, parts))
    except Exception:  # it has a mask for its own tree, say
        return False
    return one is not None and one == other


def _meanings(program: Any, tree: PyTree) -> Any:
    """What a program makes of each leaf, if it is the same of all; else None.

    Every value has a meaning: the operation that makes it, and the meanings of what
    that reads, where a leaf of the tree is just "the leaf". A value that is made of
    several leaves has none.
    """
    leaves = len(jax.tree.leaves(tree))
    given = [Meaning("the leaf", leaf) for leaf in range(leaves)]
    made = follow(program.jaxpr, program.consts, given)
    if made is None:
        return None
    # The updates come first, then the state: of every leaf the same, or of none.
    counted = collections.Counter(meaning.what for meaning in made if meaning.of_array)
    if len({meaning.what for meaning in made[:leaves]}) > 1:
        return None
    if any(times % leaves for times in counted.values()):
        return None
    shared = [meaning.what for meaning in made if not meaning.of_array]
    return {what: times // leaves for what, times in counted.items()}, shared


class Meaning(NamedTuple):
    """Of a value in a program, whatever its shape."""

    what: Any  # hashable
    leaf: int | None = None  # the one that it is made of
    of_array: bool = True


def follow(
    program: Any, consts: Sequence[Any], given: Sequence[Meaning]
) -> list[Meaning] | None:
    """The meanings of a program's results, or None if a value has none."""
    known = dict(zip(program.invars, given, strict=True))
    for variable, value in zip(program.constvars, consts, strict=True):
        if np.ndim(value):
            return None
        what = id(value) if isinstance(value, jax.core.Tracer) else _constant(value)
        known[variable] = Meaning(what, None, False)

    def meaning(variable: Any) -> Meaning:
        if hasattr(variable, "val"):
            return Meaning(_constant(variable.val), None, False)
        return known[variable]

    for equation in program.eqns:
        read = [meaning(variable) for variable in equation.invars]
        inner = [
            value
            for value in equation.params.values()
            if hasattr(value, "eqns") or hasattr(value, "jaxpr")
        ]
        if inner:
            (called,) = inner
            body = getattr(called, "jaxpr", called)
            made = follow(body, getattr(called, "consts", ()), read)
            if made is None:
                return None
        else:
            of = {m.leaf for m in read if m.leaf is not None}
            if len(of) > 1 or not _is_elementwise(equation):
                return None
            settings = [
                (name, str(value))
                for name, value in equation.params.items()
                if name not in ("shape", "broadcast_dimensions", "sharding")
            ]
            what = (equation.primitive.name, *settings, *(m.what for m in read))
            made = [
                Meaning(
                    hash((*what, i, str(v.aval.dtype), bool(v.aval.shape))),
                    next(iter(of), None),
                    bool(v.aval.shape),
                )
                for i, v in enumerate(equation.outvars)
            ]
        known.update(zip(equation.outvars, made, strict=True))
    return [meaning(variable) for variable in program.outvars]


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
