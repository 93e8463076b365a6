"""A table of optax transformations, and how much of a tree each one reads.

A transformation is identified by the function that made its ``update``. If it is not in
the table, it counts as reading the whole tree, unless its author declares it by
`elementwise`. tests/rules/test_declared.py verifies the table numerically.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import optax

from agn_optax._internal import check

PyTree = Any
Reads = Literal["element", "leaf", "tree"]
Variables = Mapping[str, Any]  # the variables that an update function closes over

WIDTHS: tuple[Reads, ...] = ("element", "leaf", "tree")


class Declaration(NamedTuple):
    """The declared properties of the transformations that one function makes."""

    # The part of the arguments that an element of the result depends on: that element,
    # its leaf, or the whole tree. All may depend on scalars, such as counts.
    reads: Reads | Callable[[Variables], Reads] = "element"
    # The variable that has inner transformations, or a function that returns them.
    inner: str | Callable[[Variables], Any] | None = None


class Part(NamedTuple):
    """A transformation that is a part of another one, or the whole of it."""

    maker: str  # the function that made it, such as "optax.scale_by_adam"
    reads: Reads


def _made_by_factory(own: Variables) -> Any:
    """Return the inner transformation of ``inject_hyperparams``.

    Its hyperparameters are arbitrary: they are traced at each update, so the kind of
    transformation cannot depend on them.
    """
    try:
        factory, fixed = own["inner_factory"], own["other_hps"]
        names = inspect.signature(factory).parameters.keys() - fixed.keys()
        return factory(**fixed, **dict.fromkeys(names, 0.5))
    except Exception:  # the user's function may raise anything
        return _unknown


def _unknown() -> None:
    """Stand for a transformation that is not in the table."""


_ELEMENT = Declaration()
_LEAF = Declaration("leaf")

TABLE: dict[str, Declaration] = {
    # Functions that combine or wrap other transformations.
    "optax.chain": Declaration(inner="update_fns"),
    "optax.with_extra_args_support": Declaration(inner="tx"),
    "optax.named_chain": Declaration(inner="transforms"),
    "optax.conditionally_mask": Declaration(inner="inner"),
    "optax.conditionally_transform": Declaration(inner="inner"),
    "optax.inject_hyperparams": Declaration(inner=_made_by_factory),
    # A mask may depend on the names and shapes of leaves, and on their number.
    "optax.masked": Declaration(
        lambda own: "element" if isinstance(own.get("mask"), bool) else "tree",
        inner="inner",
    ),
    "optax.schedule_free": Declaration(inner="base_optimizer"),
    "agn_optax.buffered": Declaration(inner="optimizer"),
    "agn_optax.by_local_steps": Declaration(inner="optimizer"),
    "agn_optax.elementwise": Declaration(inner="optimizer"),
    "agn_optax.rennala": Declaration(inner="buffer"),
    "agn_optax.restart_momentum": Declaration(inner="optimizer"),
    "agn_optax.stateless": Declaration(inner="update"),
    # Transformations of each element.
    "agn_optax.accumulate": _ELEMENT,
    "agn_optax.delayed_nesterov": _ELEMENT,
    "agn_optax.elastic_pull": _ELEMENT,
    "agn_optax.momentum_lookahead": _ELEMENT,
    "agn_optax.normalize": _ELEMENT,
    "agn_optax.ordered_momentum": _ELEMENT,
    "agn_optax.scale_by_staleness": _ELEMENT,
    "agn_optax.scale_by_turnaround": _ELEMENT,
    "agn_optax.scale_by_weight": _ELEMENT,
    "optax.add_decayed_weights": _ELEMENT,
    "optax.apply_every": _ELEMENT,
    "optax.clip": _ELEMENT,
    "optax.ema": _ELEMENT,
    "optax.identity": _ELEMENT,
    "optax.keep_params_nonnegative": _ELEMENT,
    "optax.reduce_on_plateau": _ELEMENT,
    "optax.scale": _ELEMENT,
    "optax.scale_by_acprop": _ELEMENT,
    "optax.scale_by_adadelta": _ELEMENT,
    "optax.scale_by_adam": _ELEMENT,
    "optax.scale_by_adamax": _ELEMENT,
    "optax.scale_by_adan": _ELEMENT,
    "optax.scale_by_ademamix": _ELEMENT,
    "optax.scale_by_adopt": _ELEMENT,
    "optax.scale_by_amsgrad": _ELEMENT,
    "optax.scale_by_belief": _ELEMENT,
    "optax.scale_by_cocob": _ELEMENT,
    "optax.scale_by_lion": _ELEMENT,
    "optax.scale_by_madgrad": _ELEMENT,
    "optax.scale_by_optimistic_gradient": _ELEMENT,
    "optax.scale_by_radam": _ELEMENT,
    "optax.scale_by_rms": _ELEMENT,
    "optax.scale_by_rprop": _ELEMENT,
    "optax.scale_by_rss": _ELEMENT,
    "optax.scale_by_schedule": _ELEMENT,
    "optax.scale_by_sign": _ELEMENT,
    "optax.scale_by_simplified_ademamix": _ELEMENT,
    "optax.scale_by_stddev": _ELEMENT,
    "optax.scale_by_yogi": _ELEMENT,
    "optax.set_to_zero": _ELEMENT,
    "optax.trace": _ELEMENT,
    # Transformations of each leaf.
    "agn_optax.heloco": _LEAF,
    "agn_optax.isoloco": _LEAF,
    "optax.adaptive_grad_clip": _LEAF,
    "optax.centralize": _LEAF,
    "optax.clip_by_block_rms": _LEAF,
    "optax.scale_by_distance_over_gradients": _LEAF,
    "optax.scale_by_factored_rms": _LEAF,
    "optax.scale_by_muon": _LEAF,
    "optax.scale_by_novograd": _LEAF,
    "optax.scale_by_param_block_norm": _LEAF,
    "optax.scale_by_param_block_rms": _LEAF,
    "optax.scale_by_sm3": _LEAF,
    "optax.scale_by_trust_ratio": _LEAF,
    "optax.zero_nans": _LEAF,  # its state has a flag for each leaf
}


def widest(*reads: Reads) -> Reads:
    """Return the widest of some values; "element" if there are none."""
    return max(reads, key=WIDTHS.index, default="element")


def parts_of(update: Any, *, trusting: bool = False) -> Iterator[Part]:
    """Yield a transformation, and then all transformations inside it.

    Args:
      update: a transformation, or its ``update`` function.
      trusting: whether to believe what users declare by `elementwise`.
    """
    while _is_transform(update):
        update = update.update
    maker, own = _origin(update)
    entry = TABLE.get(maker, Declaration("tree"))
    reads = entry.reads(own) if callable(entry.reads) else entry.reads
    yield Part(maker, reads)
    if entry.inner is None or (trusting and maker == "agn_optax.elementwise"):
        return
    if callable(entry.inner):
        inner = entry.inner(own)
    else:
        inner = own.get(entry.inner, _unknown)
    for each in jax.tree.leaves(inner, is_leaf=_is_transform):
        if not isinstance(each, str):  # a name in a named chain
            yield from parts_of(each, trusting=trusting)


def _origin(update: Any) -> tuple[str, Variables]:
    """Return the function that made an ``update`` function, and its variables.

    Both come from its code, because a decorator may copy another function's name.
    """
    code = getattr(update, "__code__", None)
    if code is None:
        return type(update).__qualname__, {}
    package = update.__globals__.get("__name__", "").split(".")[0]
    cells = zip(code.co_freevars, update.__closure__ or (), strict=True)
    variables = {name: cell.cell_contents for name, cell in cells}
    return f"{package}.{code.co_qualname.split('.')[0]}", variables


def _is_transform(node: Any) -> bool:
    return callable(getattr(node, "update", None))


def elementwise(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Declare that an optimizer works element by element.

    .. math:: u'_i, s'_i = f(u_i, s_i, x_i)

    for each element :math:`i`, with one function :math:`f` of the update, the state and
    the parameter, which may also depend on scalars such as counts. Only such center
    optimizers can move a center in shards. Elementwise transformations of optax and
    agn_optax are known, and so are chains of them. Declare others: ``MultiSteps``, your
    own, and masks, which may depend on the path of a leaf and on its number of
    dimensions, but not on its sizes.

    Nothing checks the declaration: an optimizer that reads several elements at once, as
    for a norm, would get only those of one shard.

    Args:
      optimizer: an optimizer whose state has scalars, and arrays with the shapes of the
        parameters.

    Returns:
      The optimizer, with the same state and the same numbers.

    Raises:
      InvalidTypeError: ``optimizer`` is not an optax optimizer.

    Example:
      >>> import optax, agn_optax
      >>> twice = optax.MultiSteps(optax.sgd(0.7), 2).gradient_transformation()
      >>> rule = agn_optax.rules.diloco(agn_optax.elementwise(twice))
    """
    optimizer = check.optimizer(optimizer, "optimizer")

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        return optimizer.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
