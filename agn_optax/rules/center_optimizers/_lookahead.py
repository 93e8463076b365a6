"""Momentum with lookahead: workers start a momentum step ahead of the base point."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees

PyTree = Any


class LookaheadState(NamedTuple):
    """State of `momentum_lookahead` and `heloco`."""

    momentum: PyTree  # shapes and dtypes of the center
    reach: jax.Array  # float scalar: the center is ahead by reach * momentum


def momentum_lookahead(
    learning_rate: float = 0.7, momentum: float = 0.9
) -> optax.GradientTransformationExtraArgs:
    r"""Nesterov momentum in which workers start one momentum step ahead.

    .. math::
        m &\leftarrow \mu m + (1 - \mu) g \\
        b &\leftarrow b - \eta (g + \mu m), \qquad c = b - \eta \mu m

    A late message was computed at an old point, and momentum has moved on since then.
    Therefore workers do not start at the base point :math:`b` but at :math:`c`, the
    point that momentum alone will reach.

    Here the center *is* :math:`c`. The equations above give its update

    .. math:: c \leftarrow c - \eta \left((2 - \mu) g + (2 \mu - 1) m\right)

    so workers adopt it like any other center, in every placement, and nothing else is
    sent. `evaluated` returns :math:`b`; the two points converge as momentum fades. (If
    the base point moved by :math:`\eta m` alone, the point ahead would be the center of
    ``optax.sgd(learning_rate * (1 - momentum), momentum, nesterov=True)``.)

    Args:
      learning_rate: :math:`\eta`.
      momentum: :math:`\mu`, in [0, 1). The momentum is a mean of messages, so it has
        the size of a message.

    Returns:
      A center optimizer with `LookaheadState`.

    Raises:
      InvalidArgumentError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> ahead = agn_optax.center_optimizers.momentum_lookahead(0.5, 0.5)
      >>> center = agn_optax.LocalCenter(agn_optax.rules.diloco(ahead), jnp.zeros(1))
      >>> session = center.join("worker-0")
      >>> sent = agn_optax.center.Submission(1, jnp.ones(1), anchor_version=0)
      >>> print(session.exchange(sent).params)
      [-0.75]
      >>> state = center.save()
      >>> print(agn_optax.center_optimizers.evaluated(state.center_state, state.params))
      [-0.625]

    References:
      Thalaiyasingam Ajanthan, Sameera Ramasinghe, Gil Avraham, Yan Zuo, Alexander Long,
      *Momentum Look-Ahead for Asynchronous Distributed Low-Communication Training*,
      2025.
      Abdullah Al Asif et al., *HeLoCo: Efficient asynchronous low-communication
      training under data and device heterogeneity*, 2026. The equations are those of
      its baseline.
    """
    check.rate(learning_rate, "learning_rate", low=0.0, high=math.inf)
    check.rate(momentum, "momentum", low=0.0, high=1.0, high_open=True)
    reach = learning_rate * momentum

    def init_fn(params: PyTree) -> LookaheadState:
        return LookaheadState(optax.tree.zeros_like(params), jnp.asarray(reach, float))

    def update_fn(
        updates: PyTree, state: LookaheadState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LookaheadState]:
        new = jax.tree.map(
            lambda m, g: (momentum * m + (1 - momentum) * g).astype(m.dtype),
            *(state.momentum, updates),
        )
        # g + 2 μ m' - μ m, rewritten without m, so that m' may overwrite m.
        new_updates = jax.tree.map(
            lambda g, m: -learning_rate * ((2 - momentum) * g + (2 * momentum - 1) * m),
            *(updates, new),
        )
        new_updates = optax.tree.cast_like(new_updates, updates)
        return new_updates, LookaheadState(new, jnp.asarray(reach, float))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def heloco(
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    *,
    messages: int = 1,
) -> optax.GradientTransformationExtraArgs:
    r"""`momentum_lookahead` that corrects messages which disagree with momentum.

    For each leaf, with :math:`u = g / |g|`, :math:`v = m / |m|`, their cosine
    :math:`r = u \cdot v`, and the confidence :math:`q = |g| / (|g| + 3 |m|)`:

    .. math::
        \hat g = \begin{cases}
            g & r \ge 0.2 \\
            |g| \, w / |w|, \quad
                w = (1 - \lambda) u + \lambda v, \quad
                \lambda = (1 - r) q & 0 \le r < 0.2 \\
            g + \tfrac12 r^2 q |g| v & r < 0
        \end{cases}

    A message that agrees with momentum passes unchanged. A message that is nearly
    orthogonal to momentum is turned towards it and keeps its length. A message that
    opposes momentum loses a part of its component against it. Then
    :math:`\hat g / \sqrt n` takes the place of :math:`g` in `momentum_lookahead`. (Put
    a `scale_by_staleness` before it in the chain if late messages should count less.)

    It needs whole leaves, so a sharded center rejects it.

    Args:
      learning_rate: :math:`\eta`.
      momentum: :math:`\mu`, in [0, 1).
      messages: :math:`n`, messages of a round, which is the number of workers.

    Returns:
      A center optimizer with `LookaheadState`.

    Raises:
      InvalidArgumentError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> outer = agn_optax.center_optimizers.heloco(0.7, 0.9, messages=4)
      >>> outer = optax.chain(agn_optax.scale_by_staleness(exponent=0.5), outer)
      >>> rule = agn_optax.rules.diloco(outer)
      >>> center = agn_optax.LocalCenter(rule, jnp.zeros(2))

    References:
      Abdullah Al Asif, Patrick Diem, Juan Pablo Muñoz, Felix Wolf, Ali Jannesari, Arya
      Mazaheri, *HeLoCo: Efficient asynchronous low-communication training under data
      and device heterogeneity*, 2026. The equations and constants were read from
      two implementations by others.
    """
    ahead = momentum_lookahead(learning_rate, momentum)
    messages = check.positive_int(messages, "messages")
    tiny = float(jnp.finfo(jnp.float32).tiny)

    def correct(message: jax.Array, momentum: jax.Array) -> jax.Array:
        g, m = trees.widened(message), momentum.astype(trees.wide(message))
        g_norm, m_norm = jnp.sqrt(jnp.sum(g * g)), jnp.sqrt(jnp.sum(m * m))
        cosine = jnp.sum(g * m) / jnp.maximum(g_norm * m_norm, tiny)
        confidence = g_norm / jnp.maximum(g_norm + 3 * m_norm, tiny)
        # In every case the result is a combination of message and momentum.
        ratio = g_norm / jnp.maximum(m_norm, tiny)
        beta = -0.5 * cosine * confidence
        lambda_ = (1 - cosine) * confidence
        rest = 1 - lambda_
        square = rest * rest + lambda_ * lambda_ + 2 * lambda_ * rest * cosine  # |w|²
        length = jnp.sqrt(jnp.maximum(square, tiny))
        opposes = cosine < 0
        passes = (cosine >= 0.2) | (m_norm == 0)  # zero momentum has no direction
        of_message = jnp.where(passes | opposes, 1, rest / length)
        of_momentum = jnp.where(opposes, -beta * cosine, lambda_ / length) * ratio
        of_momentum = jnp.where(passes, 0, of_momentum)
        return ((of_message * g + of_momentum * m) / math.sqrt(messages)).astype(
            message.dtype
        )

    def update_fn(
        updates: PyTree, state: LookaheadState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LookaheadState]:
        corrected = jax.tree.map(correct, updates, state.momentum)
        return ahead.update(corrected, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(ahead.init, update_fn)


def evaluated(center_state: PyTree, center: PyTree) -> PyTree:
    r"""Return the parameters to evaluate if these are not the center.

    With most center optimizers, the center is evaluated. With `momentum_lookahead` and
    `heloco`, the center is the point where workers start, and the base point
    :math:`c + \eta \mu m` is evaluated. (For ``optax.contrib.schedule_free`` it is
    ``optax.contrib.schedule_free_eval_params(center_state, center)``.)

    Args:
      center_state: the center optimizer's state, such as ``state.center_state`` of a
        drop-in, or the ``center_state`` of ``LocalCenter.save()``.
      center: the center that belongs to this state.

    Returns:
      Parameters with the structure, shapes and dtypes of the center.

    Raises:
      InvalidArgumentError: the state has neither of these optimizers, or several.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> outer = agn_optax.center_optimizers.momentum_lookahead(0.5, 0.5)
      >>> tx = agn_optax.diloco(optax.sgd(1.0), period=1, center=outer)
      >>> params = jnp.zeros(1)
      >>> updates, state = tx.update(jnp.ones(1), tx.init(params), params)
      >>> print(state.center)
      [-0.75]
      >>> x = agn_optax.center_optimizers.evaluated(state.center_state, state.center)
      >>> print(x)
      [-0.625]
    """
    found = [node for _, node in trees.nodes(center_state, LookaheadState)]
    if len(found) != 1:
        raise errors.InvalidArgumentError(
            "center_state must have one state of momentum_lookahead or heloco, got "
            f"{len(found)}; with other center optimizers evaluate the center"
        )
    (state,) = found

    def base_point(c: jax.Array, momentum: jax.Array) -> jax.Array:
        wide = trees.wide(c)
        base = c.astype(wide) + state.reach.astype(wide) * momentum.astype(wide)
        return base.astype(c.dtype)

    return jax.tree.map(base_point, center, state.momentum)
