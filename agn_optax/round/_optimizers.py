"""Drop-in optimizers: each is `exchange_every` with one rule."""

from __future__ import annotations

from typing import Any

import optax

from agn_optax import errors, rules
from agn_optax._internal import check
from agn_optax.round._forms import exchange_every
from agn_optax.round._fragments import Fragments
from agn_optax.round._moments import Periods
from agn_optax.round.placements import Placement
from agn_optax.rules import codecs

# TensorFlow's ElasticAverageOptimizer: moving_rate = BETA / communication_period /
# num_worker.
_BETA = 0.9


def agn(
    inner: optax.GradientTransformation,
    period: Any,
    *,
    center: optax.GradientTransformation | None = None,
    axis_name: Any = None,
    record_dtype: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    codec: codecs.Codec | None = None,
    fragments: Fragments | None = None,
    moments: Periods | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Accumulated gradient normalization (TensorFlow's AGNOptimizer).

    .. math::
        x \leftarrow x + \text{inner}(g), \; s \leftarrow s + g; \quad
        \text{every } \lambda \text{ steps: }
        c \leftarrow c + \text{center}(s / \lambda), \;
        x \leftarrow c, \; s \leftarrow 0

    Args:
      inner: the inner optimizer; its state is kept across exchanges.
      period: :math:`\lambda`, local steps between exchanges; see `exchange_every`.
      center: the center optimizer; None is the inner one with a separate state, whose
        schedules count local steps (`agn_optax.by_local_steps`). The center makes one
        step where a worker makes :math:`\lambda`. The size of Adam's steps depends on
        its rate and not on the size of the gradients: with Adam, give a center
        optimizer with up to :math:`\lambda` times the inner rate.
      axis_name: mesh axis of the workers, whose mean gradients are summed; None for one
        worker.
      record_dtype: floating dtype of the gradient sum; None keeps the parameters'.
      center_dtype: floating dtype of the center; None keeps the parameters'.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      codec: encoding of contributions, one of `agn_optax.codecs`; None for none.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`; None
        exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too, with
        their periods in exchanges; see `exchange_every`. None exchanges none.

    Returns:
      An optax optimizer with `ExchangeState`, or `FragmentsState`.

    Raises:
      AgnOptaxError: as `exchange_every` does.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> tx = agn_optax.agn(optax.adam(1e-3), period=10)
      >>> state = tx.init({"w": jnp.ones((3, 2))})
      >>> agn_optax.center_params(state)["w"].shape
      (3, 2)

    References:
      Joeri Hermans, Gerasimos Spanakis, Rico Möckel, *Accumulated Gradient
      Normalization*, 2017.
    """
    inner = check.optimizer(inner, "inner")
    if center is None:
        center = rules.by_local_steps(inner)  # the learning rate of the local steps
    rule = rules.agn(center, record_dtype=record_dtype, codec=codec)
    return _drop_in(
        inner, rule, period, axis_name, center_dtype, placement, fragments, moments
    )


def agn_window(
    inner: optax.GradientTransformation,
    period: Any,
    *,
    axis_name: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    codec: codecs.Codec | None = None,
    fragments: Fragments | None = None,
    moments: Periods | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""AGN in the paper's form: displacements divided by the period, without a record.

    .. math:: \text{every } \lambda \text{ steps: }
        c \leftarrow c - \sum_i (c - x_i) / \lambda, \; x_i \leftarrow c

    Args:
      inner: the inner optimizer.
      period: :math:`\lambda`, local steps between exchanges; see `exchange_every`.
      axis_name: mesh axis of the workers, whose messages are summed; None for one
        worker.
      center_dtype: floating dtype of the center; None keeps the parameters'.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      codec: encoding of contributions, one of `agn_optax.codecs`; None for none.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`; None
        exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too, with
        their periods in exchanges; see `exchange_every`. None exchanges none.

    Returns:
      An optax optimizer with `ExchangeState`, or `FragmentsState`.

    Raises:
      AgnOptaxError: as `exchange_every` does.

    Example:
      >>> import optax, agn_optax
      >>> tx = agn_optax.agn_window(optax.sgd(0.1), period=5)

    References:
      Joeri Hermans, Gerasimos Spanakis, Rico Möckel, *Accumulated Gradient
      Normalization*, 2017.
    """
    rule = rules.agn_window(codec=codec)
    return _drop_in(
        inner, rule, period, axis_name, center_dtype, placement, fragments, moments
    )


def downpour(
    inner: optax.GradientTransformation,
    period: Any,
    *,
    axis_name: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    codec: codecs.Codec | None = None,
    fragments: Fragments | None = None,
    moments: Periods | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DOWNPOUR: the whole displacement of every worker is added to the center.

    .. math:: \text{every } \lambda \text{ steps: }
        c \leftarrow c - \sum_i (c - x_i), \; x_i \leftarrow c

    Args:
      inner: the inner optimizer.
      period: :math:`\lambda`, local steps between exchanges; see `exchange_every`.
      axis_name: mesh axis of the workers, whose messages are summed; None for one
        worker.
      center_dtype: floating dtype of the center; None keeps the parameters'.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      codec: encoding of contributions, one of `agn_optax.codecs`; None for none.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`; None
        exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too, with
        their periods in exchanges; see `exchange_every`. None exchanges none.

    Returns:
      An optax optimizer with `ExchangeState`, or `FragmentsState`.

    Raises:
      AgnOptaxError: as `exchange_every` does.

    Example:
      >>> import optax, agn_optax
      >>> tx = agn_optax.downpour(optax.adagrad(0.1), period=5)

    References:
      Jeffrey Dean et al., *Large Scale Distributed Deep Networks*, 2012.
    """
    rule = rules.downpour(codec=codec)
    return _drop_in(
        inner, rule, period, axis_name, center_dtype, placement, fragments, moments
    )


def dynsgd(
    inner: optax.GradientTransformation,
    period: Any,
    *,
    axis_name: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    codec: codecs.Codec | None = None,
    fragments: Fragments | None = None,
    moments: Periods | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DynSGD: DOWNPOUR with messages divided by their staleness plus one.

    .. math:: \text{every } \lambda \text{ steps: }
        c \leftarrow c - \sum_i (c - x_i) / (\tau_i + 1), \; x_i \leftarrow c

    With the center in the optimizer state no message is stale, and the results are
    those of DOWNPOUR. The rules differ on a center that several workers share
    asynchronously (`agn_optax.LocalCenter`).

    Args:
      inner: the inner optimizer.
      period: :math:`\lambda`, local steps between exchanges; see `exchange_every`.
      axis_name: mesh axis of the workers, whose messages are summed; None for one
        worker.
      center_dtype: floating dtype of the center; None keeps the parameters'.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      codec: encoding of contributions, one of `agn_optax.codecs`; None for none.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`; None
        exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too, with
        their periods in exchanges; see `exchange_every`. None exchanges none.

    Returns:
      An optax optimizer with `ExchangeState`, or `FragmentsState`.

    Raises:
      AgnOptaxError: as `exchange_every` does.

    Example:
      >>> import optax, agn_optax
      >>> tx = agn_optax.dynsgd(optax.sgd(0.1), period=5)

    References:
      Jiawei Jiang, Bin Cui, Ce Zhang, Lele Yu, *Heterogeneity-aware Distributed
      Parameter Servers*, 2017.
    """
    rule = rules.dynsgd(codec=codec)
    return _drop_in(
        inner, rule, period, axis_name, center_dtype, placement, fragments, moments
    )


def average(
    inner: optax.GradientTransformation,
    period: Any,
    *,
    axis_name: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    codec: codecs.Codec | None = None,
    fragments: Fragments | None = None,
    moments: Periods | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Model averaging, or local SGD (TensorFlow's ModelAverageOptimizer).

    .. math:: \text{every } \lambda \text{ steps: } c \leftarrow \tfrac1n \sum_i x_i, \;
        x_i \leftarrow c

    Args:
      inner: the inner optimizer.
      period: :math:`\lambda`, local steps between exchanges; see `exchange_every`.
      axis_name: mesh axis of the workers that are averaged; None for one worker.
      center_dtype: floating dtype of the center; None keeps the parameters'.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      codec: encoding of contributions, one of `agn_optax.codecs`; None for none.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`; None
        exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too, with
        their periods in exchanges; see `exchange_every`. None exchanges none.

    Returns:
      An optax optimizer with `ExchangeState`, or `FragmentsState`.

    Raises:
      AgnOptaxError: as `exchange_every` does.

    Example:
      Post-local SGD: average at every step at first, then every 8 steps.

      >>> import jax.numpy as jnp, optax, agn_optax
      >>> tx = agn_optax.average(optax.sgd(0.1), lambda k: jnp.where(k < 1000, 1, 8))

    References:
      Sebastian U. Stich, *Local SGD Converges Fast and Communicates Little*, 2018.
    """
    rule = rules.average(codec=codec)
    return _drop_in(
        inner, rule, period, axis_name, center_dtype, placement, fragments, moments
    )


def diloco(
    inner: optax.GradientTransformation,
    period: Any,
    *,
    center: optax.GradientTransformation | None = None,
    axis_name: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    codec: codecs.Codec | None = None,
    fragments: Fragments | None = None,
    moments: Periods | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo: the workers' mean displacement goes through an outer (center) optimizer.

    .. math:: \text{every } \lambda \text{ steps: }
        c \leftarrow c + \text{center}\big(\tfrac1n \sum_i (c - x_i)\big), \;
        x_i \leftarrow c

    Args:
      inner: the inner optimizer, AdamW in the paper.
      period: :math:`\lambda`, local steps between exchanges (500 in the paper); see
        `exchange_every`.
      center: the outer optimizer; None is ``optax.sgd(0.7, momentum=0.9,
        nesterov=True)``.
      axis_name: mesh axis of the workers, whose displacements are averaged; None for
        one worker.
      center_dtype: floating dtype of the center; None keeps the parameters'.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      codec: encoding of contributions, one of `agn_optax.codecs`; None for none.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`; None
        exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too, with
        their periods in exchanges; see `exchange_every`. None exchanges none.

    Returns:
      An optax optimizer with `ExchangeState`, or `FragmentsState`.

    Raises:
      AgnOptaxError: as `exchange_every` does.

    Example:
      >>> import optax, agn_optax
      >>> tx = agn_optax.diloco(optax.adamw(4e-4), period=500)

    References:
      Arthur Douillard et al., *DiLoCo: Distributed Low-Communication Training of
      Language Models*, 2023.
    """
    rule = rules.diloco(center, codec=codec)
    return _drop_in(
        inner, rule, period, axis_name, center_dtype, placement, fragments, moments
    )


def easgd(
    inner: optax.GradientTransformation,
    period: Any,
    *,
    moving_rate: Any = None,
    num_workers: Any = None,
    rho: Any = 0.0,
    axis_name: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    codec: codecs.Codec | None = None,
    fragments: Fragments | None = None,
    moments: Periods | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Elastic averaging, the counterpart of TensorFlow's ElasticAverageOptimizer.

    .. math::
        g \leftarrow g + \rho (x - a); \quad \text{every } \lambda \text{ steps: }
        e_i = \alpha (x_i - c), \; x_i \leftarrow x_i - e_i, \;
        c \leftarrow c + \sum_i e_i

    Args:
      inner: the inner optimizer. A Nesterov one, ``optax.sgd(lr, 0.9, nesterov=True)``,
        makes this EAMSGD.
      period: :math:`\lambda`, local steps between exchanges; see `exchange_every`.
      moving_rate: :math:`\alpha` in (0, 1]; None is ``0.9 / period / num_workers``, as
        in TensorFlow.
      num_workers: number of workers on the axis, a positive int, used only for the
        default of ``moving_rate``. None is one worker if there is no axis.
      rho: :math:`\rho \ge 0`, the elastic penalty in the local gradients. TensorFlow's
        default is ``moving_rate / learning_rate``.
      axis_name: mesh axis of the workers, whose :math:`e_i` are summed; None for one
        worker.
      center_dtype: floating dtype of the center; None keeps the parameters'.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      codec: encoding of contributions, one of `agn_optax.codecs`; None for none.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`; None
        exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too, with
        their periods in exchanges; see `exchange_every`. None exchanges none.

    Returns:
      An optax optimizer with `ExchangeState`, or `FragmentsState`.

    Raises:
      InvalidArgumentError: ``moving_rate`` or ``rho`` is out of range, or
        ``moving_rate`` has no default because ``num_workers`` is missing or the period
        is a schedule.
      AgnOptaxError: as `exchange_every` does.

    Example:
      EAMSGD for 4 workers of the axis "workers":

      >>> import optax, agn_optax
      >>> inner = optax.sgd(0.01, momentum=0.9, nesterov=True)
      >>> tx = agn_optax.easgd(inner, 10, num_workers=4, axis_name="workers")

    References:
      Sixin Zhang, Anna Choromanska, Yann LeCun, *Deep learning with Elastic Averaging
      SGD*, 2015.
    """
    if num_workers is not None:
        check.positive_int(num_workers, "num_workers")
    if moving_rate is None:
        if num_workers is None and axis_name is not None:
            raise errors.InvalidArgumentError(
                "easgd needs moving_rate or num_workers where axis_name is given, "
                "got neither"
            )
        if callable(period):
            raise errors.InvalidArgumentError(
                "easgd needs moving_rate where period is a schedule, "
                "got moving_rate=None"
            )
        workers = 1 if num_workers is None else num_workers
        moving_rate = _BETA / check.positive_int(period, "period") / workers
    rule = rules.easgd(moving_rate, rho=rho, codec=codec)
    return _drop_in(
        inner, rule, period, axis_name, center_dtype, placement, fragments, moments
    )


def _drop_in(
    inner: optax.GradientTransformation,
    rule: rules.Rule,
    period: Any,
    axis_name: Any,
    center_dtype: Any,
    placement: Placement | None,
    fragments: Fragments | None,
    moments: Periods | None,
) -> optax.GradientTransformationExtraArgs:
    return exchange_every(
        inner,
        rule,
        period,
        axis_name=axis_name,
        center_dtype=center_dtype,
        placement=placement,
        fragments=fragments,
        moments=moments,
    )
