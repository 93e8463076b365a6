"""Dataflow of a program, from its arguments to its results, read from its jaxpr.

Every value of a program has an expression: the operation that computes it, and the
expressions of the operation's inputs, down to arguments and constants. Two values with
equal expressions are equal if their arguments are equal. This is how two programs are
compared, such as one for a whole tree and one for a part of the tree.

An elementwise operation does the same to arrays of any shape, so its expression does
not contain the shape. All other operations are listed in `Reading.across`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from agn_optax import errors

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

T = TypeVar("T")

_log = logging.getLogger("agn_optax")

# Elementwise primitives of JAX.
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh broadcast_in_dim cbrt
    ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv
    erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic
    lt max min mul ne neg nextafter not optimization_barrier or population_count pow
    pvary pcast reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
    xor
    """.split()  # noqa: SIM905 eighty words are easier to read in a block
)
# Parameters of elementwise primitives that depend on the shapes.
_SHAPES = frozenset(("shape", "broadcast_dimensions", "sharding"))

# Primitives that call one program, once, with the operands as its arguments.
_CALLS = frozenset(
    """
    jit pjit closed_call core_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr checkpoint remat remat2
    """.split()  # noqa: SIM905 as above
)


class UnfitError(Exception):
    """A program that lacks a required property; gives the reason."""


# Exceptions of code that is written for a whole tree and traced with a part of it.
_UNTRACEABLE = (
    UnfitError,
    errors.AgnOptaxError,  # our own checks of trees
    TypeError,  # a tree of another structure, None for an array, a value unknown to JAX
    ValueError,  # a tree of another structure, shapes that do not match
    LookupError,  # a leaf that is looked up by its name or index
    AttributeError,  # None has no shape
    ArithmeticError,  # a mean over no leaves
    AssertionError,  # a check of the tree's structure
)


def unless_unfit(what: str, ask: Callable[[], T]) -> T | None:
    """Return ``ask()``; or None, with the reason in the log, if it raises.

    Args:
      what: the step that is skipped if ``ask`` raises, as a text for the log.
      ask: a function that traces programs. It raises `UnfitError` if a program is
        unfit, or another exception if the program cannot be traced.
    """
    try:
        return ask()
    except _UNTRACEABLE as error:
        kind = "" if isinstance(error, UnfitError) else f"{type(error).__name__}: "
        _log.debug("not done: %s, because of %s%s", what, kind, error)
        return None


class Value(NamedTuple):
    """One value in a program."""

    expression: Hashable
    leaves: frozenset[int] = frozenset()  # the arguments' leaves that it depends on
    is_array: bool = True  # False for a scalar


class Reading(NamedTuple):
    """The results of a program, and its operations that are not elementwise."""

    made: dict[str, Value]  # results by their paths
    # Each operation that is not elementwise, with the operation of the outermost
    # program that contains it.
    across: list[tuple[JaxprEqn, JaxprEqn]]
    program: Any  # kept alive, because expressions contain the ids of its constants


def read(
    function: Callable[..., Any], *arguments: Any, given: Sequence[Value] | None = None
) -> Reading:
    """Trace ``function`` and return what its results depend on.

    Args:
      function: the function to trace.
      *arguments: trees of arrays, or of objects with a shape and a dtype.
      given: the values of the arguments' leaves; None identifies each leaf by its path
        and its index.
    """
    program, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if given is None:
        paths = [keystr(path) for path, _ in tree_leaves_with_path(arguments)]
        given = [Value(path, frozenset({i})) for i, path in enumerate(paths)]
    reader = _Reader()
    made = reader.follow(program, given)
    results = [keystr(path) for path, _ in tree_leaves_with_path(out)]
    return Reading(dict(zip(results, made, strict=True)), reader.across, program)


def origin(operation: JaxprEqn) -> str:
    """Return the name of the optimizer that made an operation, as a best guess."""
    traceback = operation.source_info.traceback
    frames: list[Any] = [] if traceback is None else traceback.frames
    outside = [f.function_name for f in frames if "/jax/" not in f.file_name]
    updates = [name for name in outside if name.endswith((".update_fn", ".update"))]
    return updates[0].split(".")[0] if updates else (*outside, "an operation")[0]


def operations(program: Any) -> Iterator[JaxprEqn]:
    """Yield all operations of a jaxpr, including those of programs inside it."""
    from jax.extend.core import jaxprs_in_params  # noqa: PLC0415 slow to import

    for equation in program.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from operations(inner)


class _Reader:
    """An interpreter that follows values through programs.

    Attributes:
      across: the operations found that are not elementwise, see `Reading`.
    """

    def __init__(self) -> None:
        self.across: list[tuple[JaxprEqn, JaxprEqn]] = []
        self._outermost: list[JaxprEqn] = []  # enclosing operations, outermost first

    def follow(self, program: Any, given: Sequence[Value]) -> list[Value]:
        """Return the results of a program for the arguments ``given``."""
        consts = map(_constant, getattr(program, "consts", ()))
        program = getattr(program, "jaxpr", program)
        known = dict(zip(program.invars, given, strict=True))
        known.update(zip(program.constvars, consts, strict=True))

        def value(atom: Any) -> Value:
            return _constant(atom.val) if hasattr(atom, "val") else known[atom]

        for equation in program.eqns:
            self._outermost.append(equation)
            made = self._results(equation, [value(atom) for atom in equation.invars])
            self._outermost.pop()
            known.update(zip(equation.outvars, made, strict=True))
        return [value(atom) for atom in program.outvars]

    def _results(self, equation: JaxprEqn, read: list[Value]) -> list[Value]:
        name = equation.primitive.name
        if name in _CALLS:
            (called,) = _programs(equation)
            return self.follow(called, read)
        if name == "cond":
            index, *operands = read
            branches = [self.follow(b, operands) for b in equation.params["branches"]]
            return [
                _made(variable, name, [index, *results])
                for variable, *results in zip(equation.outvars, *branches, strict=True)
            ]
        told: list[Any] = [name]
        if name in ("scan", "while"):
            # Iterations are not followed one by one: every result may depend on every
            # operand.
            for body in _programs(equation):
                inputs = [
                    Value(("input", i), is_array=_is_array(variable))
                    for i, variable in enumerate(getattr(body, "jaxpr", body).invars)
                ]
                told += [value.expression for value in self.follow(body, inputs)]
            told += [
                (setting, str(value))
                for setting, value in equation.params.items()
                if not hasattr(value, "eqns")
            ]
            is_elementwise = name == "while" or _scans_nothing(equation)
        else:
            is_elementwise = _is_elementwise(equation)
            told += [
                (setting, str(value))
                for setting, value in equation.params.items()
                if not (is_elementwise and setting in _SHAPES)
            ]
        if not is_elementwise:
            self.across.append((equation, self._outermost[0]))
        what = hash(tuple(told))
        return [
            _made(variable, (what, i), read)
            for i, variable in enumerate(equation.outvars)
        ]


def _made(variable: Any, what: Hashable, read: Sequence[Value]) -> Value:
    """Return the value of a result: ``what`` computes it from the values ``read``."""
    is_array = _is_array(variable)
    dtype = str(getattr(variable.aval, "dtype", ""))
    told = (what, dtype, is_array, *(value.expression for value in read))
    leaves = frozenset[int]().union(*(value.leaves for value in read))
    return Value(hash(told), leaves, is_array)


def _constant(value: Any) -> Value:
    is_array = bool(np.ndim(value))
    if isinstance(value, jax.core.Tracer):
        return Value(("traced", id(value)), is_array=is_array)
    array = np.asarray(value)
    told = str(array.dtype), array.shape, array.tobytes()
    return Value(told, is_array=is_array)


def _programs(equation: JaxprEqn) -> list[Any]:
    """Return the programs that an operation calls, with their constants."""
    return [value for value in equation.params.values() if hasattr(value, "eqns")]


def _scans_nothing(scan: JaxprEqn) -> bool:
    """Return whether a scan has only carries: no array is split or stacked."""
    (body,) = (getattr(each, "jaxpr", each) for each in _programs(scan))
    taken, made = map(_shape, scan.invars), map(_shape, scan.outvars)
    return [*taken] == [*map(_shape, body.invars)] and [*made] == [
        *map(_shape, body.outvars)
    ]


def _is_elementwise(operation: JaxprEqn) -> bool:
    inputs = {_shape(variable) for variable in operation.invars} - {()}
    outputs = {_shape(variable) for variable in operation.outvars} - {()}
    if not inputs and not outputs:
        return not calls_back(operation)
    if operation.primitive.name not in _ELEMENTWISE:
        return False
    return not inputs or (len(inputs) == 1 and outputs == inputs)


def calls_back(operation: JaxprEqn) -> bool:
    """Return whether an operation calls back into Python, which may do anything."""
    return "callback" in operation.primitive.name


def _is_array(variable: Any) -> bool:
    return bool(_shape(variable))


def _shape(variable: Any) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())
