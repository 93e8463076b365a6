"""Bounds on the center's movement, from interval arithmetic instead of its arrays.

The norm of a message bounds its elements. The program of the center optimizer is
evaluated with intervals in place of arrays, from the operands of each operation to its
result. If the optimizer's state stays within its own bounds, as Adam's moments do, each
message of at most that norm moves the center by at most a known amount, and the device
need not be asked whether the center is finite.

Operations that are not in the table below give no bounds; the device is then asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import round as rounds
from agn_optax._internal import tracing
from agn_optax.rules import Rule, told

PyTree = Any
Range = tuple[float, float]  # lower and upper bound of the finite numbers of an array

_WIDENINGS = 64  # times that the state's bounds may be widened, each time by a factor 2
_MOST_LEAVES = 16  # of the center: programs of more leaves take long to evaluate
_MOST_VERSIONS = 1 << 30  # most versions that a center is assumed to have
_ANY_COUNT = (0.0, float(_MOST_VERSIONS))
# Ranges of the extra arguments. `weight` has none, because it may be arbitrarily large.
_SAID = {"staleness": _ANY_COUNT, "steps": (1.0, 2.0**31 - 1), "since": _ANY_COUNT}
_SAID["workers"] = (1.0, float(_MOST_VERSIONS))


class Bound(NamedTuple):
    """The bounds that hold for all messages up to a norm."""

    message: float  # maximum norm of a message
    center: float  # maximum absolute value of the center, up to which the bound holds
    update: float  # maximum change of an element of the center by one message


class Reach:
    """The bounds of a rule's messages at a center.

    Args:
      rule: the rule with the center optimizer.
      center: the center's parameters, as the store keeps them.
      state: the state of the center optimizer.

    Raises:
      UnfitError: no bounds can be computed.
    """

    def __init__(self, rule: Rule, center: PyTree, state: PyTree) -> None:
        if rule.message is not None:
            raise tracing.UnfitError("a message that depends on the center")
        if len(jax.tree.leaves(center)) > _MOST_LEAVES:
            raise tracing.UnfitError("a center of many leaves that is not flattened")
        said = told({})

        def update(message: PyTree, state: PyTree, center: PyTree, said: Any) -> PyTree:
            said = {**said, "outside": True}
            message = rounds.weigh(rule, message, said)
            return rounds.descend(rule, message, center, state, said)

        abstract = jax.eval_shape(lambda: (center, state, center, said))
        self._program, made = jax.make_jaxpr(update, return_shape=True)(*abstract)
        self._state = jax.tree.leaves(abstract[1])
        self._center = jax.tree.leaves(center)
        self._updates = len(jax.tree.leaves(made[0]))
        self._said = [_SAID.get(name) for name in sorted(said)]
        zeros: list[Range | None] = [(0.0, 0.0)] * len(self._state)
        if self.bound(1e-3, 1.0, zeros) is None:
            raise tracing.UnfitError("a center optimizer without bounds")

    def bound(
        self, message: float, center: float, state: Sequence[Range | None]
    ) -> Bound | None:
        """Return the bounds of messages up to a norm; None if none can be computed.

        Args:
          message: the maximum norm.
          center: the maximum absolute value of the center's numbers.
          state: the ranges of the leaves of the optimizer's state.
        """
        boxes: list[Range] = []
        for box, leaf in zip(state, self._state, strict=True):
            if box is None:
                return None
            more = 0 if _is_float(leaf) else _MOST_VERSIONS
            boxes.append((box[0], box[1] + more))
        most = 1.01 * message  # allows for rounding in the norm
        for _ in range(_WIDENINGS):
            made = _follow(
                self._program,
                [
                    *[(-most, most)] * len(self._center),
                    *boxes,
                    *[(-center, center)] * len(self._center),
                    *self._said,
                ],
            )
            if None in made:
                return None
            updates, after = made[: self._updates], made[self._updates :]
            wider = [
                _wider(old, new, is_float=_is_float(leaf))
                for old, new, leaf in zip(boxes, after, self._state, strict=True)
            ]
            if wider == boxes:
                moves = [max(-low, high) for low, high in updates]
                # When the update is added to a narrow center, rounding may double it.
                return Bound(message, center, 2.02 * max(moves, default=0.0))
            boxes = wider
        return None


def extremes(leaves: Sequence[jax.Array]) -> list[Range | None]:
    """Return the ranges of arrays, with None for arrays that are not finite."""
    found = jax.device_get(_extremes(list(leaves)))
    return [
        (float(low), float(high)) if is_finite else None
        for low, high, is_finite in found
    ]


@jax.jit
def _extremes(leaves: list[jax.Array]) -> list[tuple[jax.Array, ...]]:
    def of(leaf: jax.Array) -> tuple[jax.Array, ...]:
        if not leaf.size:
            return jnp.zeros(()), jnp.zeros(()), jnp.array(True)
        # On some devices, min and max ignore NaN.
        return leaf.min(), leaf.max(), jnp.isfinite(leaf).all()

    return [of(leaf) for leaf in leaves]


def _wider(old: Range, new: Range, *, is_float: bool) -> Range:
    """Return a leaf's range, widened if its new values lie outside of it."""
    if not is_float:  # counts messages: it may grow by 1
        return (
            old if old[0] <= new[0] and new[1] <= old[1] + 1 else (-math.inf, math.inf)
        )
    # A value that decays towards zero approaches it without crossing it.
    low = old[0] if new[0] >= old[0] else min(2 * new[0], 0.0)
    high = old[1] if new[1] <= old[1] else max(2 * new[1], 0.0)
    return low, high


def _follow(program: Any, given: Sequence[Range | None]) -> list[Any]:
    """Return the ranges of a program's results, with None for unknown ones."""
    consts = getattr(program, "consts", ())
    program = getattr(program, "jaxpr", program)
    known: dict[Any, Range | None] = {
        variable: _fits(box, variable.aval)
        for variable, box in zip(program.invars, given, strict=True)
    }
    known.update(
        (variable, _of_number(value))
        for variable, value in zip(program.constvars, consts, strict=True)
    )

    def box(atom: Any) -> Range | None:
        return _of_number(atom.val) if hasattr(atom, "val") else known[atom]

    for operation in program.eqns:
        boxes = [box(atom) for atom in operation.invars]
        inner = tracing.called(operation)
        if inner is not None:
            made = _follow(inner, boxes)
        elif len(operation.outvars) == 1:
            made = [_made(operation, boxes)]
        else:
            made = [None] * len(operation.outvars)
        known.update(
            (variable, _fits(each, variable.aval))
            for variable, each in zip(operation.outvars, made, strict=True)
        )
    return [box(atom) for atom in program.outvars]


def _made(operation: Any, boxes: list[Range | None]) -> Range | None:
    """Return the range of an operation's only result; None if unknown."""
    name = operation.primitive.name
    if _is_bool(operation.outvars[0].aval):
        return _decided(name, boxes)
    if name == "select_n":
        which, *boxes = boxes
        if which is not None and which[0] == which[1]:
            return boxes[int(which[0])]
    if name not in _RANGES or None in boxes:
        return None
    try:
        return _RANGES[name](operation, *boxes)
    except (ArithmeticError, ValueError):  # division by zero, root of a negative number
        return None


def _decided(name: str, boxes: list[Range | None]) -> Range:
    """Return the range of a comparison: 1 is true, 0 is false, (0, 1) is undecided."""
    if name not in _ORDERS or None in boxes:
        return 0.0, 1.0
    first, second = boxes if _ORDERS[name] == "less" else reversed(boxes)
    assert first is not None
    assert second is not None
    return float(first[1] < second[0]), float(first[0] <= second[1])


def _fits(box: Range | None, aval: Any) -> Range | None:
    """Return a range with the rounding of a dtype; None if the dtype may overflow."""
    dtype = getattr(aval, "dtype", None)
    if box is None or dtype is None or math.isnan(box[0]) or math.isnan(box[1]):
        return None
    low, high = box
    if _is_bool(aval):
        return box
    if jnp.issubdtype(dtype, jnp.integer):
        whole = jnp.iinfo(dtype)
        if whole.min <= low and high <= whole.max:
            return float(math.trunc(low)), float(math.trunc(high))
        return float(whole.min), float(whole.max)  # integers may wrap around
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    info = jnp.finfo(dtype)
    eps, least = 2 * float(info.eps), float(info.smallest_normal)
    low, high = low - eps * abs(low), high + eps * abs(high)
    # Subnormal numbers may be flushed to zero.
    low = 0.0 if 0 < low < least else -least if -least < low < 0 else low
    high = 0.0 if -least < high < 0 else least if 0 < high < least else high
    return (low, high) if max(-low, high) < 0.75 * float(info.max) else None


def _of_number(value: Any) -> Range | None:
    try:
        array = np.asarray(value).astype(np.float64)
    except (TypeError, ValueError):
        return None
    if not array.size or not np.isfinite(array).all():
        return None
    return float(array.min()), float(array.max())


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_bool(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == np.dtype(bool)


def _hull(*boxes: Range) -> Range:
    return min(low for low, _ in boxes), max(high for _, high in boxes)


def _product(a: Range, b: Range) -> Range:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _inverse(box: Range) -> Range:
    low, high = box
    if low <= 0 <= high:
        raise ZeroDivisionError
    return 1 / high, 1 / low


def _square(box: Range) -> Range:
    low, high = sorted(map(abs, box))
    return (0.0 if box[0] <= 0 <= box[1] else low**2), high**2


def _power(box: Range, exponent: int) -> Range:
    if exponent < 0:
        return _inverse(_power(box, -exponent))
    made = (1.0, 1.0) if exponent % 2 == 0 else box
    for _ in range(exponent // 2):
        made = _product(made, _square(box))
    return made


def _decay(base: Range, exponent: Range) -> Range:
    """Return the range of a base in [0, 1] to the power of a count."""
    if exponent[0] == exponent[1] == int(exponent[0]):
        return _power(base, int(exponent[0]))
    if not 0 <= base[0] <= base[1] <= 1 or exponent[0] < 0:
        raise ArithmeticError
    return base[0] ** exponent[1], base[1] ** exponent[0]


def _absolute(box: Range) -> Range:
    low, high = sorted(map(abs, box))
    return (0.0 if box[0] <= 0 <= box[1] else low), high


def _sum(operation: Any, box: Range) -> Range:
    (before,), (after,) = operation.invars, operation.outvars
    count = before.aval.size // max(after.aval.size, 1)
    return count * min(box[0], 0.0), count * max(box[1], 0.0)


def _of(call: Callable[..., Range]) -> Callable[..., Range]:
    return lambda operation, *boxes: call(*boxes)


def _monotone(call: Callable[[float], float]) -> Callable[..., Range]:
    return lambda operation, box: (call(box[0]), call(box[1]))


_same = _of(lambda box, *_: box)
_add = _of(lambda a, b: (a[0] + b[0], a[1] + b[1]))
_largest = _of(lambda a, b: (max(a[0], b[0]), max(a[1], b[1])))
_smallest = _of(lambda a, b: (min(a[0], b[0]), min(a[1], b[1])))
_unit = _of(lambda box: (-1.0, 1.0))

_ORDERS = {"lt": "less", "le": "less", "gt": "greater", "ge": "greater"}
# Functions from an operation and the ranges of its operands to the range of its result.
_RANGES: dict[str, Callable[..., Range]] = {
    **dict.fromkeys(
        """
        broadcast_in_dim convert_element_type copy copy_p expand_dims pcast pvary
        reduce_max reduce_min reshape squeeze stop_gradient transpose
        """.split(),  # noqa: SIM905 easier to read
        _same,
    ),
    "abs": _of(_absolute),
    "add": _add,
    "add_any": _add,
    "sub": _of(lambda a, b: (a[0] - b[1], a[1] - b[0])),
    "mul": _of(_product),
    "div": _of(lambda a, b: _product(a, _inverse(b))),
    "neg": _of(lambda box: (-box[1], -box[0])),
    "max": _largest,
    "min": _smallest,
    "clamp": _of(
        lambda low, x, high: (
            min(max(x[0], low[0]), high[0]),
            min(max(x[1], low[1]), high[1]),
        )
    ),
    "select_n": _of(_hull),
    "square": _of(_square),
    "integer_pow": lambda operation, box: _power(box, operation.params["y"]),
    "pow": _of(_decay),
    "sqrt": _monotone(math.sqrt),
    "rsqrt": _of(lambda box: _inverse((math.sqrt(box[0]), math.sqrt(box[1])))),
    "exp": _monotone(math.exp),
    "reduce_sum": _sum,
    **dict.fromkeys(("sign", "sin", "cos", "tanh"), _unit),
    "logistic": _of(lambda box: (0.0, 1.0)),
}


def reach_of(rule: Rule, center: PyTree, state: PyTree) -> Reach | None:
    """Return the bounds of a rule's messages; None if there are none."""
    what = f"bounds by norms at a center of rule {rule.name!r}"
    return tracing.unless_unfit(what, functools.partial(Reach, rule, center, state))
