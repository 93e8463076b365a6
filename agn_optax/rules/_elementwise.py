"""Does an exchange work element by element? Only then may it see a piece of the center.

Asked of the traced program rather than of a list of known optimizers: every operation
on arrays must give an array of the same shape, without moving or mixing elements, and
the program of the pieces must have the same operations as that of the whole leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from agn_optax import errors
from agn_optax.rules._placement import Layout
from agn_optax.rules._rule import Rule

PyTree = Any

# These keep the shape of an array and still move or mix its elements, or number them.
_MIXING = ("cum", "fft", "iota", "random", "rev", "rng", "roll", "sort", "threefry")


def check(rule: Rule, params: PyTree, layout: Layout) -> None:
    """The exchange of ``rule`` may run on the pieces that ``layout`` makes."""

    def exchange(params: PyTree) -> PyTree:
        record = rule.record.init(params)
        steps = jnp.ones((), jnp.int32)
        message = rule.contribution(record, params, params, steps)
        if rule.message is not None:
            message = rule.message(message, params)
        state = rule.center.init(params)
        moved = rule.center.update(
            optax.tree.cast_like(message, params),
            state,
            params,
            staleness=jnp.zeros((), jnp.int32),
        )
        return moved if rule.adopt is None else (moved, rule.adopt(params, params))

    program = jax.make_jaxpr(exchange)(params).jaxpr
    for equation in program.eqns:
        for operation in _operations(equation):
            if not _is_elementwise(operation):
                raise errors.InvalidArgumentError(
                    f"rule {rule.name!r} cannot move a center in shards: "
                    f"{_origin(equation)} looks at more than one element at a time "
                    f"({operation.primitive.name}). Leave it out of the center "
                    "optimizer, or keep the center whole (no shard_axis)"
                )
    pieces = jax.eval_shape(layout.piece, params)
    if _primitives(program) != _primitives(jax.make_jaxpr(exchange)(pieces).jaxpr):
        raise errors.InvalidArgumentError(
            f"rule {rule.name!r} cannot move a center in shards: its optimizer treats "
            "leaves by their shape, and pieces of them otherwise. Keep the center whole"
        )


def _operations(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """An operation, or those of the programs inside it."""
    programs = list(jaxprs_in_params(equation.params))
    if not programs:
        yield equation
    for program in programs:
        for inner in program.eqns:
            yield from _operations(inner)


def _primitives(program: Any) -> list[str]:
    return [o.primitive.name for e in program.eqns for o in _operations(e)]


def _is_elementwise(operation: JaxprEqn) -> bool:
    name = operation.primitive.name
    inputs = _shapes(operation.invars)
    outputs = _shapes(operation.outvars)
    if any(part in name for part in _MIXING):
        return not inputs and not outputs
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
