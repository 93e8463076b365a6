"""The rule record, and the rules: what tells one method from another, and no more.

A rule is data. It owns no parameters, no loop, no device and no clock; `_round` is
the one place that says in which order its parts are called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check, combinations, trees
from agn_optax.rules._combinators import (
    accumulate,
    elastic_pull,
    normalize,
    scale_by_staleness,
)
from agn_optax.rules.codecs import Codec, check_codec, identity
from agn_optax.rules.robust import Combine

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    r"""One method: what a worker keeps and sends, and what the center makes of it.

    .. math::
        \text{local step:}\quad & x \leftarrow x + \text{inner}(\text{penalty}(g));
            \qquad r \leftarrow \text{record}(r, g) \\
        \text{exchange:}\quad & k = \text{contribution}(r, x, a, \text{steps});
            \qquad m = \text{message}(k, c) \\
            & c' = c + \text{center}(m);
            \qquad x \leftarrow \text{adopt}(x, c \text{ or } c')

    where :math:`\hat k` is :math:`k` encoded and decoded by the codec. Messages follow
    the gradient convention: the center optimizer descends along them. A
    new method is a new ``Rule``; every placement (in an optimizer state, on a mesh, in
    a center outside the program) then runs it.

    Attributes:
      name: shown in messages.
      center: the center optimizer. ``update`` gets the message, its own state, the
        center, and as extra arguments, all scalars: ``staleness`` (int32), how many
        versions the center has moved since the worker's anchor; ``steps`` (int32), the
        local steps that the message was made of; ``weight`` (float32, or float64 where
        JAX has it enabled), what its worker says that they count, 1 if it says nothing;
        ``since`` (int32), the version of the anchor, so that ``since + staleness`` is
        the center's now; and ``workers`` (int32), how many there are. The one message
        of a round has staleness 0, the mean steps of its messages (rounded, 1 at least)
        and their mean weight. In an optimizer state versions are exchanges, and
        ``weight`` is an extra argument of the step, or of the exchange, that ends the
        round.
      contribution: ``(record, params, anchor, steps) -> tree``, made where the worker
        is. ``record`` is the state of the transformation ``record``; ``steps`` the
        local steps really made, an int32 scalar. Returns a tree with the structure and
        shapes of the center. If it has a method ``recover(contribution, params, anchor,
        steps)``, which tells the parameters that it was made of (in the dtypes of
        ``params``, the later ones), a worker keeps no copy of them while it overlaps.
      message: ``(contribution, center) -> message``, made where the center is, for
        rules that need the center as it is now; None if the contribution is the
        message.
      discount: a stateless optax transformation of every message, before those of a
        round become one, which makes none of them larger; gets the extra arguments
        that the center optimizer gets, those of the message itself. None for none.
      record: an optax transformation that is fed the gradients of every local step and
        whose state is the record; a fresh ``init`` begins the next window.
      penalty: a stateless optax transformation of every local gradient, before the
        inner optimizer; gets the anchor as the extra argument ``center``. None for
        none.
      combine: how the messages of a round become one, those of the workers of a mesh or
        of a synchronous center: ``"sum"``, in which each counts whole, or ``"mean"``,
        in which each counts by its ``weight``, which may be made on their way; or one
        of `agn_optax.robust`, which needs all of them at a time.
      adopt: ``(params, center) -> params``, how a worker takes the center back, or
        None: the parameters become the center.
      adopts: whether the worker adopts the center as it was before or after its own
        message.
      needs_params: whether ``contribution`` reads the worker's parameters; if not, it
        gets None for them, and the drop-in form is faster.
      needs_anchor: whether ``contribution`` or ``penalty`` reads the anchor; if not, it
        gets None, and no copy of the anchor is kept.
      codec: how contributions travel, one of `agn_optax.codecs`.

    All functions are traced, so they must be pure.

    Example:
      A new method, which sends only the sign of its displacement:

      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> sign = agn_optax.rules.Rule(
      ...     name="sign",
      ...     center=optax.sgd(0.01),
      ...     contribution=lambda record, params, anchor, steps: jax.tree.map(
      ...         lambda a, x: jnp.sign(a - x), anchor, params
      ...     ),
      ... )
      >>> tx = agn_optax.exchange_every(optax.sgd(0.1), sign, period=3)

      And BMUF, block momentum on the mean displacement, which differs from model
      averaging in its center optimizer only:

      >>> import dataclasses
      >>> momentum = optax.sgd(1.0, momentum=0.5)
      >>> average = agn_optax.rules.average()
      >>> bmuf = dataclasses.replace(average, name="bmuf", center=momentum)
    """

    name: str
    center: optax.GradientTransformation
    contribution: Callable[[PyTree, PyTree, PyTree, jax.Array], PyTree]
    message: Callable[[PyTree, PyTree], PyTree] | None = None
    discount: optax.GradientTransformation | None = None
    record: optax.GradientTransformation = dataclasses.field(
        default_factory=optax.identity
    )
    penalty: optax.GradientTransformation | None = None
    combine: Combine | Literal["sum", "mean"] = "sum"
    adopt: Callable[[PyTree, PyTree], PyTree] | None = None
    adopts: Literal["before", "after"] = "after"
    needs_params: bool = True
    needs_anchor: bool = True
    codec: Codec = dataclasses.field(default_factory=identity)

    def __post_init__(self) -> None:
        of_rule = f"of rule {self.name!r}"
        if not isinstance(self.combine, Combine):
            hint = ", or one of agn_optax.robust, such as robust.median()"
            check.one_of(self.combine, f"combine {of_rule}", ("sum", "mean"), hint)
        check.one_of(self.adopts, f"adopts {of_rule}", ("before", "after"))
        check_codec(self.codec, f"codec {of_rule}")
        if self.codec.of_differences and self.message is not None:
            combinations.refuse(
                "a codec that leaves out elements",
                "a rule that sends parameters",
                f"codec {self.codec} {of_rule}",
            )
        # Wrapped here, once, so that the round may hand every part the extra arguments
        # it has.
        for field in ("center", "record", "penalty", "discount"):
            part = getattr(self, field)
            if part is not None or field in ("center", "record"):
                wrapped = check.optimizer(part, f"{field} {of_rule}")
                object.__setattr__(self, field, wrapped)

    @property
    def is_summed(self) -> bool:
        """Whether the messages of a round may be added up on their way."""
        return not isinstance(self.combine, Combine)

    @property
    def combines_elements(self) -> bool:
        """Whether each element of a round's message is made of that element alone."""
        return not isinstance(self.combine, Combine) or self.combine.elementwise


def check_rule(value: Any) -> None:
    """``value`` is a rule."""
    such_as = "a record of agn_optax.rules, such as rules.downpour()"
    check.instance(value, Rule, f"rule must be {such_as}")


# What a center optimizer is told of a message: where nobody says so, and as what.
_TOLD = {
    "staleness": (0, jnp.int32),
    "steps": (1, jnp.int32),
    "weight": (1.0, float),
    "since": (0, jnp.int32),
    "workers": (1, jnp.int32),
}


def told(said: Mapping[str, Any]) -> dict[str, Any]:
    """The extra arguments of a center optimizer: what is said, and all that it gets."""
    own = {
        name: jnp.asarray(said.get(name, unsaid), dtype)
        for name, (unsaid, dtype) in _TOLD.items()
    }
    return {**said, **own}


def discounted(rule: Rule, message: PyTree, **extra_args: Any) -> PyTree:
    """A message as much as it counts, of which so much is said."""
    if rule.discount is None:
        return message
    stateless = rule.discount.init(message)
    return rule.discount.update(message, stateless, **extra_args)[0]


class _Displacement:
    """``a - x``: what the local steps took away from the anchor.

    Under parameters of a narrower dtype than the center's, the worker adopted the
    rounded anchor, so the rounding is not part of its displacement: the center keeps
    its low bits.

    Args:
      per_step: whether it is divided by the steps.
    """

    def __init__(self, *, per_step: bool = False) -> None:
        self.per_step = per_step

    def __call__(
        self, record: PyTree, params: PyTree, anchor: PyTree, steps: jax.Array
    ) -> PyTree:
        del record

        def subtract(a: jax.Array, x: jax.Array) -> jax.Array:
            return trees.rounded(a, x.dtype) - x.astype(a.dtype)

        whole = jax.tree.map(subtract, anchor, params)
        return _per_step(whole, steps) if self.per_step else whole

    def recover(
        self, contribution: PyTree, params: PyTree, anchor: PyTree, steps: jax.Array
    ) -> PyTree:
        """``a - k``: what rounding kept from the center is not counted as sent."""

        def subtract(a: jax.Array, k: jax.Array, x: jax.Array) -> jax.Array:
            if self.per_step:
                wide = trees.wider(k.dtype, jnp.float32)  # bfloat16 has no 257
                k = (k.astype(wide) * steps.astype(wide)).astype(k.dtype)
            return (trees.rounded(a, x.dtype) - k).astype(x.dtype)

        return jax.tree.map(subtract, anchor, contribution, params)


class _Parameters:
    """``x``."""

    def __call__(
        self, record: PyTree, params: PyTree, anchor: PyTree, steps: jax.Array
    ) -> PyTree:
        del record, anchor, steps
        return params

    def recover(
        self, contribution: PyTree, params: PyTree, anchor: PyTree, steps: jax.Array
    ) -> PyTree:
        """Themselves."""
        del params, anchor, steps
        return contribution


def _per_step(tree: PyTree, steps: jax.Array) -> PyTree:
    transformation = normalize()
    return transformation.update(tree, transformation.init(tree), steps=steps)[0]


def agn(
    center: optax.GradientTransformation,
    *,
    record_dtype: Any = None,
    codec: Codec | None = None,
) -> Rule:
    r"""Accumulated gradient normalization as TensorFlow's AGNOptimizer does it.

    .. math::
        s \leftarrow s + g \text{ at every local step}; \qquad m = s / \lambda; \qquad
        c' = c + \text{center}(m); \qquad x \leftarrow c'

    Args:
      center: the center optimizer; it sees the mean gradient of the window, so its
        learning rate means what it means for a single step.
      record_dtype: floating dtype of the gradient sum; None keeps the parameters'.
      codec: how contributions travel, one of `agn_optax.codecs`; None as they are.

    Returns:
      The rule, with messages of the size of the parameters.

    Raises:
      InvalidTypeError: ``center`` is not an optax optimizer.

    Example:
      >>> import optax
      >>> from agn_optax import rules
      >>> rules.agn(optax.adam(1e-3)).name
      'agn'

    References:
      Joeri Hermans, Gerasimos Spanakis, Rico Möckel, *Accumulated Gradient
      Normalization*, 2017.
    """
    return Rule(
        name="agn",
        center=center,
        record=accumulate(dtype=record_dtype),
        contribution=lambda record, params, anchor, steps: _per_step(record.sum, steps),
        needs_params=False,
        needs_anchor=False,
        codec=codec or identity(),
    )


def agn_window(*, codec: Codec | None = None) -> Rule:
    r"""Accumulated gradient normalization in the paper's form: the mean local update.

    .. math:: m = (a - x) / \lambda; \qquad c' = c - m; \qquad x \leftarrow c'

    It normalizes what the inner optimizer did with the gradients rather than the
    gradients, so it needs no record. dist-keras calls it ADAG.

    Args:
      codec: how contributions travel, one of `agn_optax.codecs`; None as they are.

    Returns:
      The rule.

    Example:
      >>> from agn_optax import rules
      >>> rules.agn_window().needs_anchor
      True

    References:
      Joeri Hermans, Gerasimos Spanakis, Rico Möckel, *Accumulated Gradient
      Normalization*, 2017.
    """
    per_step = _Displacement(per_step=True)
    whole = downpour(codec=codec)
    return dataclasses.replace(whole, name="agn_window", contribution=per_step)


def downpour(*, codec: Codec | None = None) -> Rule:
    r"""DOWNPOUR: the center takes every worker's displacement whole.

    .. math:: m = a - x; \qquad c' = c - m; \qquad x \leftarrow c'

    Args:
      codec: how contributions travel, one of `agn_optax.codecs`; None as they are.

    Returns:
      The rule.

    Example:
      >>> from agn_optax import rules
      >>> rules.downpour().combine
      'sum'

    References:
      Jeffrey Dean et al., *Large Scale Distributed Deep Networks*, 2012.
    """
    return Rule(
        name="downpour",
        center=optax.sgd(1.0),
        contribution=_Displacement(),
        codec=codec or identity(),
    )


def dynsgd(*, codec: Codec | None = None) -> Rule:
    r"""DynSGD: DOWNPOUR that trusts late messages less.

    .. math:: m = a - x; \qquad c' = c - m / (\tau + 1); \qquad x \leftarrow c'

    where :math:`\tau` is each message's staleness, counted where the center is. On a
    mesh every message is fresh, and dynsgd is downpour.

    Args:
      codec: how contributions travel, one of `agn_optax.codecs`; None as they are.

    Returns:
      The rule.

    Example:
      >>> from agn_optax import rules
      >>> rules.dynsgd().name
      'dynsgd'

    References:
      Jiawei Jiang, Bin Cui, Ce Zhang, Lele Yu, *Heterogeneity-aware Distributed
      Parameter Servers*, 2017.
    """
    return dataclasses.replace(
        downpour(codec=codec), name="dynsgd", discount=scale_by_staleness()
    )


def average(*, codec: Codec | None = None) -> Rule:
    r"""Model averaging (local SGD): the center becomes the mean of the workers.

    .. math:: m = \tfrac1n \sum_i (a - x_i); \qquad c' = c - m = \tfrac1n \sum_i x_i;
        \qquad x \leftarrow c'

    The mean is over the workers of one mesh; a center outside the program takes
    messages one by one, and each is then a mean of one.

    Args:
      codec: how contributions travel, one of `agn_optax.codecs`; None as they are.

    Returns:
      The rule.

    Example:
      >>> from agn_optax import rules
      >>> rules.average().combine
      'mean'

    References:
      Sebastian U. Stich, *Local SGD Converges Fast and Communicates Little*, 2018.
    """
    return dataclasses.replace(downpour(codec=codec), name="average", combine="mean")


def diloco(
    center: optax.GradientTransformation | None = None, *, codec: Codec | None = None
) -> Rule:
    r"""DiLoCo: model averaging whose mean displacement goes through an outer optimizer.

    .. math:: m = \tfrac1n \sum_i (a - x_i); \qquad c' = c + \text{center}(m); \qquad
        x \leftarrow c'

    Args:
      center: the outer optimizer; None is the paper's
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. Use AdamW as the inner one.
      codec: how contributions travel, one of `agn_optax.codecs`; None as they are.

    Returns:
      The rule. The mean is over the workers of one mesh; a center outside the program
      takes the displacements of n workers one by one and moves n times as far.

    Raises:
      InvalidTypeError: ``center`` is not an optax optimizer.

    Example:
      >>> from agn_optax import rules
      >>> rules.diloco().combine
      'mean'

    References:
      Arthur Douillard et al., *DiLoCo: Distributed Low-Communication Training of
      Language Models*, 2023.
    """
    if center is None:
        center = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return dataclasses.replace(average(codec=codec), name="diloco", center=center)


def easgd(moving_rate: Any, *, rho: Any = 0.0, codec: Codec | None = None) -> Rule:
    r"""Elastic averaging: worker and center pull at each other and neither gives in.

    .. math::
        g \leftarrow g + \rho (x - a) \text{ at every local step}; \qquad
        e = \alpha (x - c); \qquad x \leftarrow x - e; \qquad c' = c + e

    ``e`` uses the center before this worker's message, and that is what the worker
    adopts as its anchor. With a Nesterov inner optimizer this is EAMSGD.

    Args:
      moving_rate: :math:`\alpha`, in (0, 1].
      rho: :math:`\rho \ge 0`, the elastic penalty towards the anchor in the local
        gradients. TensorFlow's default is ``moving_rate / learning_rate``; 0 is advised
        when asynchronous.
      codec: how contributions travel, one of `agn_optax.codecs`; None as they are.

    Returns:
      The rule.

    Raises:
      InvalidArgumentError: ``moving_rate`` or ``rho`` is out of range.

    Example:
      >>> from agn_optax import rules
      >>> rules.easgd(0.1).adopts
      'before'

    References:
      Sixin Zhang, Anna Choromanska, Yann LeCun, *Deep learning with Elastic Averaging
      SGD*, 2015.
    """
    check.rate(moving_rate, "moving_rate", low=0.0, high=1.0, low_open=True)
    check.rate(rho, "rho", low=0.0, high=float("inf"))
    # A rho that is an array may change from step to step; only a plain 0 is known to
    # stay away.
    penalty = None if isinstance(rho, int | float) and rho == 0 else elastic_pull(rho)

    # Differences are taken in the wider of the dtypes of worker and center, so that
    # neither is rounded to the other's.
    def wide(x: jax.Array, c: jax.Array) -> jax.Array:
        return x.astype(trees.wider(x.dtype, c.dtype))

    def message(params: PyTree, center: PyTree) -> PyTree:
        return jax.tree.map(lambda c, x: wide(c, x) - wide(x, c), center, params)

    def adopt(params: PyTree, center: PyTree) -> PyTree:
        # x - e, with e the gradient of the spring: a descent step of size 1.
        pull = elastic_pull(moving_rate)
        none = jax.tree.map(jnp.zeros_like, jax.tree.map(wide, params, center))
        force, _ = pull.update(none, pull.init(params), params, center=center)
        return jax.tree.map(
            lambda x, e: (x.astype(e.dtype) - e).astype(x.dtype), params, force
        )

    return Rule(
        name="easgd",
        center=optax.sgd(moving_rate),
        contribution=_Parameters(),
        message=message,
        penalty=penalty,
        adopt=adopt,
        adopts="before",
        needs_anchor=penalty is not None,
        codec=codec or identity(),
    )
