"""The record `Rule`, and the rules of the literature.

A rule is data: the parts in which one method differs from another. It owns no
parameters, loop, device or clock. Only `agn_optax.round._round` determines the order in
which its parts are called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, combinations, trees
from agn_optax.rules._combinators import (
    accumulate,
    elastic_pull,
    per_step,
    scale_by_staleness,
)
from agn_optax.rules._declared import Reads
from agn_optax.rules.codecs import Codec, check_codec, identity
from agn_optax.rules.robust import Combine, radial

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    r"""One training method: what a worker sends, and how the center moves.

    .. math::
        \text{local step:}\quad & x \leftarrow x + \text{inner}(\text{penalty}(g));
            \qquad r \leftarrow \text{record}(r, g) \\
        \text{exchange:}\quad & k = \text{contribution}(r, x, a, \text{steps});
            \qquad m = \text{message}(k, c) \\
            & c' = c + \text{center}(m);
            \qquad x \leftarrow \text{adopt}(x, c \text{ or } c')

    where :math:`r` is the record, :math:`a` the anchor, :math:`c` the center and
    :math:`k` the contribution, which the center reads after it was encoded and decoded
    by the codec. Messages follow the gradient convention: the center optimizer descends
    along them. A new method is a new ``Rule``, which every placement can run: in an
    optimizer state, on a mesh, and in a center outside the program.

    Attributes:
      name: name of the rule in error texts and logs.
      center: the center optimizer. Its ``update`` gets the message, its own state, the
        center, and these extra arguments, all scalars: ``staleness`` (int32), the
        number of center updates since the worker's anchor; ``steps`` (int32), the local
        steps that the message was made of; ``weight`` (float32, or float64 if JAX has
        it enabled), the weight that the worker gave the message, by default 1;
        ``since`` (int32), the version of the anchor, so that ``since + staleness`` is
        the center's current version; ``workers`` (int32), the current number of
        workers; and ``worker`` (int32), the index of the worker that sent the message,
        a number below ``workers`` unless workers have left. The combined message of a
        round has staleness 0, the mean steps of its messages (rounded, at least 1),
        their mean weight, and -1 as its worker. In an optimizer state, versions count
        exchanges, ``weight`` is an extra argument of the step, or of the exchange, that
        ends the round, and every message is the combined one of a round.
      contribution: ``(record, params, anchor, steps) -> tree``, computed by the worker.
        ``record`` is the state of the transformation ``record``; ``steps`` is the
        number of local steps made, an int32 scalar. Returns a tree with the structure
        and shapes of the center. The function may have a method ``recover(contribution,
        params, anchor, steps)``, which returns the parameters that the contribution was
        made of (in the dtypes of ``params``, the current parameters); then a worker
        keeps no copy of those parameters while an exchange is in flight.
      message: ``(contribution, center) -> message``, computed by the center, for rules
        that need the current center. None if the contribution is the message.
      discount: a stateless optax transformation of every message, applied before the
        messages of a round are combined. It must not make a message larger. It gets the
        extra arguments that the center optimizer gets, with the values of the message
        itself. None for no discount.
      record: an optax transformation that gets the gradients of every local step; its
        state is the record. A fresh ``init`` begins the next round.
      penalty: a stateless optax transformation of every local gradient, applied before
        the inner optimizer. It gets the anchor as the extra argument ``center``. None
        for no penalty.
      combine: how the messages of a round (of the workers of a mesh or of a synchronous
        center) are combined. ``"sum"`` adds them, and ``"mean"`` averages them by their
        ``weight``; both may be computed while messages are transmitted. A `Combine` of
        `agn_optax.robust` needs all messages at once.
      weight: ``(weight, steps) -> weight``, by which a mean or a weighted `Combine`
        counts a message instead of the weight that its worker gave: from that weight,
        or the number of local steps if it gave none, and the local steps. All are
        scalars, of Python or of JAX. None counts the given weight, 1 without one.
      adopt: ``(params, center) -> params``, how a worker adopts the center. None
        replaces the parameters by the center.
      adopts: which center the worker adopts: the one ``"before"`` or the one
        ``"after"`` its own message.
      replaces: whether messages are values and not moves. Then the result of the center
        optimizer replaces the center, to which it is otherwise added; and an answer
        replaces a worker's parameters, even if it has made local steps since its
        message (because of ``overlap`` or a lost center).
      needs_params: whether ``contribution`` reads the worker's parameters. If not, it
        gets None for them, and the drop-in form is faster.
      needs_anchor: whether ``contribution`` or ``penalty`` reads the anchor. If not,
        ``contribution`` gets None, and no copy of the anchor is kept.
      codec: how contributions are encoded, one of `agn_optax.codecs`.
      elementwise: whether ``contribution``, ``message`` and ``adopt`` work element by
        element: each element of their results depends on that element of the arguments
        alone, and on scalars. Only such rules can move a center in shards. If you
        replace one of these functions, make sure that this still holds.

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

      BMUF, block momentum on the mean displacement, which differs from model averaging
      only in its center optimizer:

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
    weight: Callable[[Any, Any], Any] | None = None
    adopt: Callable[[PyTree, PyTree], PyTree] | None = None
    adopts: Literal["before", "after"] = "after"
    replaces: bool = False
    needs_params: bool = True
    needs_anchor: bool = True
    codec: Codec = dataclasses.field(default_factory=identity)
    elementwise: bool = False

    def __post_init__(self) -> None:
        of_rule = f"of rule {self.name!r}"
        if not isinstance(self.combine, Combine):
            hint = ", or one of agn_optax.robust, such as robust.median()"
            check.one_of(self.combine, f"combine {of_rule}", ("sum", "mean"), hint)
        check.one_of(self.adopts, f"adopts {of_rule}", ("before", "after"))
        if self.weight is not None and not self.is_weighted:
            raise errors.InvalidArgumentError(
                f"weight {of_rule} has no effect with combine={str(self.combine)!r}, "
                "which counts all messages alike: leave it out, or combine by 'mean' "
                "or robust.radial()"
            )
        check_codec(self.codec, f"codec {of_rule}")
        if self.codec.of_differences and self.message is not None:
            combinations.reject(
                "a codec that leaves out elements",
                "a rule that sends parameters",
                f"codec {self.codec} {of_rule}",
            )
        # Wrapped once, so that an exchange may pass its extra arguments to every part.
        for field in ("center", "record", "penalty", "discount"):
            part = getattr(self, field)
            if part is not None or field in ("center", "record"):
                wrapped = check.optimizer(part, f"{field} {of_rule}")
                object.__setattr__(self, field, wrapped)

    @property
    def is_summed(self) -> bool:
        """True if the messages of a round may be summed while they are transmitted."""
        return not isinstance(self.combine, Combine)

    @property
    def is_weighted(self) -> bool:
        """True if the messages of a round count by their weights."""
        combine = self.combine
        return combine.weighted if isinstance(combine, Combine) else combine == "mean"

    @property
    def combine_reads(self) -> Reads:
        """The part of a round's messages that an element of the combined one needs."""
        return self.combine.reads if isinstance(self.combine, Combine) else "element"


def check_rule(value: Any) -> None:
    """Raise unless ``value`` is a rule."""
    such_as = "a record of agn_optax.rules, such as rules.downpour()"
    check.instance(value, Rule, f"rule must be {such_as}")


# The extra arguments of a center optimizer: default value and dtype of each.
_EXTRA_ARGUMENTS = {
    "staleness": (0, jnp.int32),
    "steps": (1, jnp.int32),
    "weight": (1.0, float),
    "since": (0, jnp.int32),
    "workers": (1, jnp.int32),
    "worker": (-1, jnp.int32),
}


def extra_arguments(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra arguments of a center optimizer for one message.

    Args:
      metadata: metadata of the message. Missing entries get their defaults; unknown
        ones are kept.
    """
    own = {
        name: jnp.asarray(metadata.get(name, default), dtype)
        for name, (default, dtype) in _EXTRA_ARGUMENTS.items()
    }
    return {**metadata, **own}


def discounted(rule: Rule, message: PyTree, **extra_args: Any) -> PyTree:
    """Return a message scaled by the rule's discount.

    Args:
      rule: the rule.
      message: the message.
      **extra_args: the extra arguments of the center optimizer for the message.
    """
    if rule.discount is None:
        return message
    stateless = rule.discount.init(message)
    return rule.discount.update(message, stateless, **extra_args)[0]


class _Displacement:
    """The contribution ``a - x``, from the anchor and the parameters after the steps.

    If the parameters have a narrower dtype than the center, the worker adopted the
    rounded anchor. The rounding is not part of the displacement, so that the center
    keeps its low bits.

    Args:
      per_step: whether the displacement is divided by the number of steps.
    """

    def __init__(self, *, per_step: bool = False) -> None:
        self.per_step = per_step

    def __call__(
        self, record: PyTree, params: PyTree, anchor: PyTree, steps: jax.Array
    ) -> PyTree:

        def subtract(a: jax.Array, x: jax.Array) -> jax.Array:
            return trees.rounded(a, x.dtype) - x.astype(a.dtype)

        whole = jax.tree.map(subtract, anchor, params)
        return per_step(whole, steps) if self.per_step else whole

    def recover(
        self, contribution: PyTree, params: PyTree, anchor: PyTree, steps: jax.Array
    ) -> PyTree:
        """Return ``a - k``: the parameters, except for the rounding error of ``k``.

        That error was not sent, so it remains in the worker's progress.
        """

        def subtract(a: jax.Array, k: jax.Array, x: jax.Array) -> jax.Array:
            if self.per_step:
                # In float32 or wider, because bfloat16 cannot hold 257.
                k = (trees.widened(k) * steps.astype(trees.wide(k))).astype(k.dtype)
            return (trees.rounded(a, x.dtype) - k).astype(x.dtype)

        return jax.tree.map(subtract, anchor, contribution, params)


class _Parameters:
    """The contribution ``x``: the parameters themselves."""

    def __call__(
        self, record: PyTree, params: PyTree, anchor: PyTree, steps: jax.Array
    ) -> PyTree:
        return params

    def recover(
        self, contribution: PyTree, params: PyTree, anchor: PyTree, steps: jax.Array
    ) -> PyTree:
        """Return the contribution."""
        return contribution


def sends_displacements(rule: Rule) -> bool:
    """Return whether the messages of a rule are whole displacements of its workers."""
    sent = rule.contribution
    return isinstance(sent, _Displacement) and not sent.per_step


def agn(
    center: optax.GradientTransformation,
    *,
    record_dtype: Any = None,
    codec: Codec | None = None,
) -> Rule:
    r"""Return the rule of accumulated gradient normalization, as in TensorFlow.

    .. math::
        s \leftarrow s + g \text{ at every local step}; \qquad m = s / \lambda; \qquad
        c' = c + \text{center}(m); \qquad x \leftarrow c'

    This is the form of TensorFlow's AGNOptimizer.

    Args:
      center: the center optimizer. It gets the mean gradient of the round, so use a
        learning rate for single steps.
      record_dtype: floating dtype of the gradient sum; None keeps the dtype of the
        parameters.
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

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
        contribution=lambda record, params, anchor, steps: per_step(record.sum, steps),
        needs_params=False,
        needs_anchor=False,
        codec=codec or identity(),
        elementwise=True,
    )


def agn_window(*, codec: Codec | None = None) -> Rule:
    r"""Return the rule of accumulated gradient normalization, as in the paper.

    .. math:: m = (a - x) / \lambda; \qquad c' = c - m; \qquad x \leftarrow c'

    It normalizes the updates of the inner optimizer and not the gradients, so it needs
    no record: a message is the mean local update. dist-keras calls this rule ADAG.

    Args:
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

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
    r"""Return the rule DOWNPOUR: the center adds every worker's whole displacement.

    .. math:: m = a - x; \qquad c' = c - m; \qquad x \leftarrow c'

    Args:
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

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
        elementwise=True,
    )


def dynsgd(*, codec: Codec | None = None) -> Rule:
    r"""Return the rule DynSGD: DOWNPOUR in which late messages count less.

    .. math:: m = a - x; \qquad c' = c - m / (\tau + 1); \qquad x \leftarrow c'

    where :math:`\tau` is the staleness of each message, counted by the center. On a
    mesh every message has staleness 0, and dynsgd equals downpour.

    Args:
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

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
    r"""Return the rule of model averaging (local SGD).

    .. math:: m = \tfrac1n \sum_i (a - x_i); \qquad c' = c - m = \tfrac1n \sum_i x_i;
        \qquad x \leftarrow c'

    The center becomes the mean of the workers of one mesh, or of the round of a
    synchronous center. An asynchronous center applies messages one by one, so that
    each mean is over one message.

    Args:
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

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
    r"""Return the rule DiLoCo: model averaging with an outer optimizer.

    .. math:: m = \tfrac1n \sum_i (a - x_i); \qquad c' = c + \text{center}(m); \qquad
        x \leftarrow c'

    Args:
      center: the outer optimizer, which gets the mean displacement; None is the paper's
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. Use AdamW as the inner
        optimizer.
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

    Returns:
      The rule. The mean is over the workers of one mesh, or of the round of a
      synchronous center. An asynchronous center applies the displacements of n workers
      one by one and moves n times as far: use ``diloco(optax.sgd(1 / n))``, or a center
      optimizer for such messages, such as `center_optimizers.delayed_nesterov`.

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


class _TokensSquared:
    """The weight ``tokens ** 2 / steps``: tokens times tokens per step."""

    def __call__(self, tokens: Any, steps: Any) -> Any:
        return tokens * (tokens / steps)  # a square of int32 could overflow


def decoupled_diloco(
    center: optax.GradientTransformation | None = None, *, codec: Codec | None = None
) -> Rule:
    r"""Return the rule Decoupled DiLoCo: radial averages by tokens and steps.

    .. math::
        w_i = \frac{t_i^2}{s_i}; \qquad m = \text{radial}(a - x_i; w_i); \qquad
        c' = c + \text{center}(m); \qquad x \leftarrow c'

    where :math:`s_i` are the local steps of a message, and :math:`t_i` the tokens that
    its worker saw in them: the ``weight`` that it gives to each exchange. Without a
    weight, each step counts as one token, so that :math:`w_i = s_i`. `robust.radial` is
    the mean direction with the mean length, for each leaf.

    `agn_optax.center.decoupled_diloco` returns this rule with the mode of its center.

    Args:
      center: the outer optimizer; None is ``optax.sgd(0.7, momentum=0.9,
        nesterov=True)``. Use AdamW as the inner optimizer.
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

    Returns:
      The rule, for a mesh and for a center with ``mode=Synchronous(...)``.

    Raises:
      InvalidTypeError: ``center`` is not an optax optimizer.

    Example:
      >>> from agn_optax import rules
      >>> rule = rules.decoupled_diloco()
      >>> print(rule.combine, rule.weight(512, 4))
      radial 65536.0

    References:
      Arthur Douillard et al., *Decoupled DiLoCo for Resilient Distributed
      Pre-training*, 2026. Abstract and summaries were read; the weight and the radial
      mean follow public implementations.
    """
    return dataclasses.replace(
        diloco(center, codec=codec),
        name="decoupled_diloco",
        combine=radial(),
        weight=_TokensSquared(),
    )


def easgd(moving_rate: Any, *, rho: Any = 0.0, codec: Codec | None = None) -> Rule:
    r"""Return the rule of elastic averaging (EASGD).

    .. math::
        g \leftarrow g + \rho (x - a) \text{ at every local step}; \qquad
        e = \alpha (x - c); \qquad x \leftarrow x - e; \qquad c' = c + e

    Worker and center move towards each other, and neither becomes the other. ``e`` uses
    the center before this worker's message, and that center becomes the worker's
    anchor. With a Nesterov inner optimizer this is EAMSGD.

    Args:
      moving_rate: :math:`\alpha`, in (0, 1].
      rho: :math:`\rho \ge 0`, the elastic penalty towards the anchor in the local
        gradients. TensorFlow's default is ``moving_rate / learning_rate``; 0 is advised
        for asynchronous training.
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

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
    # A rho that is an array may change from step to step; only a Python 0 stays 0.
    penalty = None if isinstance(rho, int | float) and rho == 0 else elastic_pull(rho)

    # Differences are computed in the wider dtype of worker and center, so that neither
    # is rounded to the other's dtype.
    def wide(x: jax.Array, c: jax.Array) -> jax.Array:
        return x.astype(trees.wider(x.dtype, c.dtype))

    def message(params: PyTree, center: PyTree) -> PyTree:
        return jax.tree.map(lambda c, x: wide(c, x) - wide(x, c), center, params)

    def adopt(params: PyTree, center: PyTree) -> PyTree:
        # x - e, where e is the gradient of the spring: a descent step of size 1.
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
        elementwise=True,
    )


def moments(*, codec: Codec | None = None) -> Rule:
    r"""Return the rule for moments of inner optimizers: the center becomes their mean.

    .. math:: k = x; \qquad c' = \tfrac1n \sum_i x_i; \qquad x \leftarrow c'

    It is for workers whose parameters are fields of the states of inner optimizers
    (`agn_optax.moments_of`), in rounds. Workers send the values themselves, and all
    messages count alike, whatever their weight. So the center is exactly their mean.
    With displacements, as in `average`, it has rounding errors of the size of the
    earlier center. Adam's second moments, which may have become much smaller since,
    could be negative, and Adam's next step would not be finite. For the same reason a
    worker does not add its changes since a message to the answer of this message.

    Args:
      codec: how contributions are encoded, one of `agn_optax.codecs` that sends all
        elements; None sends them unchanged.

    Returns:
      The rule, for a center with ``mode=Synchronous()``. A center that takes messages
      one by one has no rounds, and rejects this rule.

    Raises:
      InvalidArgumentError: the codec leaves out elements.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> center = agn_optax.LocalCenter(
      ...     agn_optax.rules.moments(), mode=agn_optax.center.Synchronous()
      ... )

    References:
      Alex Iacob et al., *DES-LOC: Desynced Low Communication Adaptive Optimizers for
      Training Foundation Models*, 2025 (see `exchange_every`).
    """

    def mean(messages: PyTree, total: Any) -> PyTree:
        return jax.tree.map(lambda x: x.mean(axis=0), messages)

    return Rule(
        name="moments",
        center=optax.identity(),
        contribution=_Parameters(),
        message=lambda contribution, c: contribution,
        discount=optax.identity(),  # values count in full, however old
        combine=Combine(mean, name="mean of all"),
        replaces=True,
        needs_anchor=False,
        codec=codec or identity(),
        elementwise=True,
    )
