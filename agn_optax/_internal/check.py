"""Checks of callers' arguments: each raises before anything changes, or returns."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import trees

PyTree = Any
T = TypeVar("T")

_MAX_INT = 2**31 - 1  # counters are int32
# The smallest and the largest normal float32.
_LEAST_WEIGHT = float(np.finfo(np.float32).smallest_normal)
_MOST_WEIGHT = float(np.finfo(np.float32).max)


def show(value: Any) -> str:
    """Return a short text of ``value`` for an error message."""
    if isinstance(value, str | numbers.Number) or value is None:
        return repr(value)
    name = getattr(value, "__name__", None)
    return f"{type(value).__name__} {name}" if name else type(value).__name__


def instance(value: Any, kind: type, message: str) -> None:
    """Raise unless ``value`` is an instance of ``kind``, and no class.

    The error suggests a call if ``value`` is callable, such as an uncalled factory. A
    class may look like an instance of a protocol.
    """
    if not isinstance(value, kind) or isinstance(value, type):
        hint = "; call it first" if callable(value) else ""
        raise errors.InvalidTypeError(f"{message}, got {show(value)}{hint}")


@dataclasses.dataclass(frozen=True)
class _Promoting:
    """An ``update`` that may mix dtypes even under JAX's strict dtype promotion.

    Optimizers of optax do mix dtypes: Adam raises a float to the power of an int32.
    """

    update: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return self.update(*args, **kwargs)


def optimizer(value: Any, argument: str) -> optax.GradientTransformationExtraArgs:
    """Return ``value`` as an optimizer that ignores unknown extra arguments."""
    example = "an optax.GradientTransformation, such as optax.sgd(0.1)"
    instance(value, optax.GradientTransformation, f"{argument} must be {example}")
    if isinstance(value.update, _Promoting):
        return value
    init, update = optax.with_extra_args_support(value)
    return optax.GradientTransformationExtraArgs(init, _Promoting(update))


def is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def one_of(value: Any, argument: str, choices: tuple[Any, ...], hint: str = "") -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if isinstance(value, bool) or value not in choices:
        raise errors.InvalidArgumentError(
            f"{argument} must be one of {choices}, got {show(value)}{hint}"
        )


def choose(name: object, among: Mapping[str, T], what: str) -> T:
    """Return the value of ``name`` in ``among``.

    Raises:
      InvalidArgumentError: ``among`` has no such name; the error lists its names.
    """
    if not isinstance(name, str) or name not in among:
        raise errors.InvalidArgumentError(
            f"{what} must be one of {', '.join(among)}, got {name!r}"
        )
    return among[name]


def is_real(dtype: Any) -> bool:
    """Return whether ``dtype`` is an integer or a real floating dtype."""
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def _number(value: Any, message: str) -> Any:
    """Return ``value`` as a real number; a real scalar array is converted."""
    number = value.item() if _is_scalar_array(value, message) else value
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise errors.InvalidTypeError(message + show(value))
    return number


def _is_scalar_array(value: Any, message: str) -> bool:
    """Return whether ``value`` is an array; raise if it is not a real scalar one."""
    if not isinstance(value, jax.Array | np.ndarray):
        return False
    if value.shape != () or not is_real(value.dtype):
        raise errors.InvalidTypeError(
            f"{message}an array {value.dtype}{list(value.shape)}"
        )
    return True


def real_scalar(value: Any, argument: str) -> None:
    """Raise unless ``value`` is one real number; do not wait for a device."""
    message = f"{argument} must be a real number, got "
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number or _is_scalar_array(value, message)):
        raise errors.InvalidTypeError(message + show(value))


def positive_int(value: Any, argument: str) -> Any:
    """Return ``value`` if it is a positive whole number.

    Scalar arrays pass too, because ``inject_hyperparams`` passes them. A traced value
    passes unchecked.
    """
    if is_traced(value):
        return value
    message = f"{argument} must be a positive int, got "
    number = _number(value, message)
    if not isinstance(number, int | float | np.integer):
        raise errors.InvalidTypeError(message + show(value))
    is_array = number is not value
    is_whole = not isinstance(number, float) or (is_array and number % 1 == 0)
    if not is_whole or not 1 <= number <= _MAX_INT:
        raise errors.InvalidArgumentError(f"{message}{number!r}")
    return value if is_array else int(value)


def whole_number(
    value: object,
    argument: str,
    *,
    least: int,
    most: int | None = None,
    optional: bool = True,
) -> None:
    """Raise unless ``value`` is an int in a range, or None where None is valid.

    Args:
      value: the value to check.
      argument: its name, for the error.
      least: the smallest valid value.
      most: the largest valid value; None for no limit.
      optional: whether None is valid.
    """
    if value is None and optional:
        return
    is_int = isinstance(value, int) and not isinstance(value, bool)
    high = math.inf if most is None else most
    if not is_int or not least <= cast(int, value) <= high:
        bound = "" if most is None else f" and <= {most}"
        raise errors.InvalidArgumentError(
            f"{argument} must be a whole number >= {least}{bound}, got {value!r}"
        )


def seconds(value: object, argument: str, *, positive: bool = False) -> None:
    """Raise unless ``value`` is a finite number >= 0, or > 0 if ``positive``."""
    is_number = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < math.inf
    )
    if not is_number or (positive and not value):
        kind = "positive number of seconds" if positive else "number of seconds >= 0"
        raise errors.InvalidArgumentError(f"{argument} must be a {kind}, got {value!r}")


def rate(
    value: Any,
    argument: str,
    *,
    low: float,
    high: float,
    low_open: bool = False,
    high_open: bool = False,
) -> Any:
    """Return ``value`` if it is a number from ``low`` to ``high``, or traced."""
    if is_traced(value):
        return value
    high_open = high_open or math.isinf(high)
    opens, closes = "(" if low_open else "[", ")" if high_open else "]"
    message = f"{argument} must be a number in {opens}{low:g}, {high:g}{closes}, got "
    number = float(_number(value, message))
    above = number > low if low_open else number >= low
    below = number < high if high_open else number <= high
    if not (above and below):
        raise errors.InvalidArgumentError(f"{message}{number!r}")
    return value


def weight(value: Any, argument: str = "weight") -> float | None:
    """Return ``value`` as a positive float in the range of float32, or None.

    Arrays are not valid.
    """
    if value is None:
        return None
    message = f"{argument} must be a positive number on the host, got "
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise errors.InvalidTypeError(message + show(value))
    if not _LEAST_WEIGHT <= (number := float(value)) <= _MOST_WEIGHT:
        raise errors.InvalidArgumentError(
            f"{message}{number!r}; the range of float32 is {_LEAST_WEIGHT:.3g} to "
            f"{_MOST_WEIGHT:.3g}"
        )
    return number


def float_dtype(value: Any, argument: str) -> Any:
    """Return ``value`` as a floating dtype, or None if it is None."""
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise errors.InvalidTypeError(
            f"{argument} must be a floating dtype or None, got {show(value)}"
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise errors.InvalidArgumentError(
            f"{argument} must be a floating dtype, got {dtype}"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise errors.InvalidArgumentError(
            f"{argument} {dtype} needs jax.config.update('jax_enable_x64', True)"
        )
    return dtype


def float_leaves(tree: PyTree, what: str) -> None:
    """Raise unless every leaf of ``tree`` is a real floating array."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        try:
            dtype: Any = jnp.result_type(leaf)
        except TypeError:
            dtype = None
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise errors.TreeMismatchError(
                f"{what}{keystr(path)} has dtype {dtype or show(leaf)}; real floating "
                "leaves are expected. Leave others out with optax.masked or "
                "optax.multi_transform"
            )


def array_leaves(tree: PyTree, what: str) -> None:
    """Raise unless every leaf of ``tree`` is an array or a number."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            continue
        if not isinstance(leaf, numbers.Number):
            raise errors.InvalidTypeError(
                f"{what}{keystr(path)} is {show(leaf)}, which no device can hold; "
                "arrays and numbers are expected. Keep other values out of the tree by "
                "static fields of a dataclass (pytree_node=False in Flax), nnx.split, "
                "or equinox.partition(tree, equinox.is_array)"
            )


def same_kinds(tree: PyTree, like: PyTree, what: str) -> None:
    """Raise unless the leaves' dtypes match those of ``like``.

    Any floating dtype matches a floating leaf of ``like``; other dtypes must be equal.
    The trees must have passed `same_tree`.
    """
    pairs = zip(tree_flatten_with_path(tree)[0], jax.tree.leaves(like), strict=True)
    for (path, leaf), other in pairs:
        if jnp.issubdtype(other.dtype, jnp.floating):
            float_leaves(leaf, f"{what}{keystr(path)}")
        elif jnp.result_type(leaf) != other.dtype:
            raise errors.TreeMismatchError(
                f"{what}{keystr(path)} has dtype {jnp.result_type(leaf)}; "
                f"{other.dtype} is expected"
            )


def same_tree(tree: PyTree, like: PyTree, what: str, like_what: str) -> None:
    """Raise unless ``tree`` has the structure and shapes of ``like``."""
    leaves, others = jax.tree.leaves(tree), jax.tree.leaves(like)
    structure: Any = jax.tree.structure(tree)
    like_structure: Any = jax.tree.structure(like)
    same = structure == like_structure
    if same and [*map(jnp.shape, leaves)] == [*map(jnp.shape, others)]:
        return
    difference = trees.describe(tree).difference(
        trees.describe(like), f"{what} has", f"{like_what} has", dtypes=False
    )
    if difference is None:
        difference = (
            f"the same leaves in different containers, {structure} and {like_structure}"
        )
    raise errors.TreeMismatchError(
        f"{what} and {like_what} are different trees: {difference}"
    )


def params_given(params: PyTree, caller: str) -> None:
    if params is None:
        raise errors.MissingArgumentError(
            f"{caller} needs the current parameters: call "
            "update(grads, state, params), got params=None"
        )


def extra_argument_given(value: Any, example: str, caller: str) -> None:
    """Raise if ``value``, an extra argument of ``update``, is None.

    Args:
      value: the extra argument.
      example: an example of it for the error, such as ``"staleness=0"``.
      caller: the transformation that needs it.
    """
    if value is None:
        name = example.partition("=")[0]
        raise errors.MissingArgumentError(
            f"{caller} needs the extra argument {name}: "
            f"update(grads, state, params, {example}), got none"
        )


def axis_bound(axis_name: Any, hint: str | None = None) -> None:
    """Raise unless ``axis_name`` is None or bound in the current trace."""
    if axis_name is not None and not is_bound(axis_name):
        raise errors.UnboundAxisError(
            f"axis_name {axis_name!r} is not bound here: "
            + (
                hint
                or "call update inside jax.shard_map, jax.pmap or jax.vmap with that "
                "axis name, or leave axis_name out for a single worker"
            )
        )


def is_bound(axis_name: Any) -> bool:
    """Return whether ``axis_name``, one name or several, is bound in this trace."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True
