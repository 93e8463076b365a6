"""Momentum whose center is the point where workers begin: a step of momentum ahead."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check, trees

PyTree = Any


class LookaheadState(NamedTuple):
    """State of `momentum_lookahead` and `heloco`."""

    momentum: PyTree  # as the center
    reach: jax.Array  # float scalar: by how much of it the center is ahead


def momentum_lookahead(
    learning_rate: float = 0.7, momentum: float = 0.9
) -> optax.GradientTransformationExtraArgs:
    r"""Nesterov's momentum, whose workers begin where it is about to take the center.

    .. math::
        m &\leftarrow \mu m + (1 - \mu) g \\
        b &\leftarrow b - \eta (g + \mu m), \qquad c = b - \eta \mu m

    A message that comes late was made at an old point, and momentum has gone on since.
    So workers do not begin at the base point :math:`b`, but at :math:`c`, where
    momentum alone will have taken it.

    Here the center *is* :math:`c`: put into the equations, it moves by

    .. math:: c \leftarrow c - \eta \left((2 - \mu) g + (2 \mu - 1) m\right)

    so workers adopt it like any other center, in every placement, and nothing else
    travels. :math:`b` is what `evaluated` returns; the two meet as momentum fades. (Of
    a base point that moves by :math:`\eta m` alone, the point ahead is the center of
    ``optax.sgd(learning_rate * (1 - momentum), momentum, nesterov=True)``.)

    Args:
      learning_rate: :math:`\eta`.
      momentum: :math:`\mu`, in [0, 1). Momentum is a mean of messages, so its size is
        that of a message.

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
      The equations are those of the baseline in: Abdullah Al Asif et al., *HeLoCo:
      Efficient asynchronous low-communication training under data and device
      heterogeneity*, 2026.
    """
    check.rate(learning_rate, "learning_rate", low=0.0, high=math.inf)
    check.rate(momentum, "momentum", low=0.0, high=1.0)
    reach = learning_rate * momentum

    def init_fn(params: PyTree) -> LookaheadState:
        return LookaheadState(optax.tree.zeros_like(params), jnp.asarray(reach, float))

    def update_fn(
        updates: PyTree,
        state: LookaheadState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, LookaheadState]:
        del params, extra_args
        new = jax.tree.map(
            lambda m, g: (momentum * m + (1 - momentum) * g).astype(m.dtype),
            *(state.momentum, updates),
        )
        # g + 2 μ m' - μ m, without the m that m' is written over.
        moved = jax.tree.map(
            lambda g, m: -learning_rate * ((2 - momentum) * g + (2 * momentum - 1) * m),
            *(updates, new),
        )
        moved = optax.tree.cast_like(moved, updates)
        return moved, LookaheadState(new, jnp.asarray(reach, float))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def heloco(
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    *,
    messages: int = 1,
    keeps: float = 0.2,
    shrinks: float = 0.5,
    turns: float = 1.0,
    most: float = 0.5,
    caution: float = 3.0,
) -> optax.GradientTransformationExtraArgs:
    r"""`momentum_lookahead` that corrects messages which point elsewhere than momentum.

    Of each leaf, with :math:`u = g / |g|`, :math:`v = m / |m|`, their cosine
    :math:`r = u \cdot v`, and the confidence
    :math:`q = |g| / (|g| + \kappa |m|)`:

    .. math::
        \hat g = \begin{cases}
            g & r \ge r_0 \\
            |g| \, w / |w|, \quad
                w = (1 - \lambda) u + \lambda v, \quad
                \lambda = \min(k_d (1 - r) q, 1) & 0 \le r < r_0 \\
            g - \beta r |g| v, \quad
                \beta = \min(-k_s r q, \beta_\text{max}) & r < 0
        \end{cases}

    so what agrees with momentum passes, what is nearly at right angles with it turns
    towards it and keeps its length, and what opposes it loses a part of its opposition.
    :math:`\hat g / \sqrt n` then goes where `momentum_lookahead` has :math:`g`. (Delays
    weigh less by a `scale_by_staleness` before it in the chain.)

    It looks at whole leaves: a center in shards refuses it.

    Args:
      learning_rate: :math:`\eta`.
      momentum: :math:`\mu`, in [0, 1).
      messages: :math:`n`, of a round: as many as there are workers.
      keeps: :math:`r_0`, in [-1, 1]: the least cosine of a message that passes.
      shrinks: :math:`k_s`, at least 0.
      turns: :math:`k_d`, at least 0.
      most: :math:`\beta_\text{max}`, in [0, 1]: the part of an opposition that is taken
        away at most.
      caution: :math:`\kappa`, at least 0: the larger, the less is a message corrected
        that is small beside the momentum.

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
      and device heterogeneity*, 2026. Its equations and defaults were read in two
      implementations of others.
    """
    ahead = momentum_lookahead(learning_rate, momentum)
    messages = check.positive_int(messages, "messages")
    check.rate(keeps, "keeps", low=-1.0, high=1.0)
    check.rate(shrinks, "shrinks", low=0.0, high=math.inf)
    check.rate(turns, "turns", low=0.0, high=math.inf)
    check.rate(most, "most", low=0.0, high=1.0)
    check.rate(caution, "caution", low=0.0, high=math.inf)
    tiny = float(jnp.finfo(jnp.float32).tiny)

    def correct(message: jax.Array, trusted: jax.Array) -> jax.Array:
        wide = trees.wider(message.dtype, jnp.float32)
        g, m = message.astype(wide), trusted.astype(wide)
        g_norm, m_norm = jnp.sqrt(jnp.sum(g * g)), jnp.sqrt(jnp.sum(m * m))
        cosine = jnp.sum(g * m) / jnp.maximum(g_norm * m_norm, tiny)
        confidence = g_norm / jnp.maximum(g_norm + caution * m_norm, tiny)
        # All that comes of it is so much of the message, and so much of momentum.
        ratio = g_norm / jnp.maximum(m_norm, tiny)
        taken = jnp.minimum(-shrinks * cosine * confidence, most)
        turn = jnp.minimum(turns * (1 - cosine) * confidence, 1)
        rest = 1 - turn
        square = rest * rest + turn * turn + 2 * turn * rest * cosine  # of |w|
        length = jnp.sqrt(jnp.maximum(square, tiny))
        opposes = cosine < 0
        passes = (cosine >= keeps) | (m_norm == 0)  # no momentum has no direction
        own = jnp.where(passes | opposes, 1, rest / length)
        added = jnp.where(opposes, -taken * cosine, turn / length) * ratio
        added = jnp.where(passes, 0, added)
        return ((own * g + added * m) / math.sqrt(messages)).astype(message.dtype)

    def update_fn(
        updates: PyTree,
        state: LookaheadState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, LookaheadState]:
        corrected = jax.tree.map(correct, updates, state.momentum)
        return ahead.update(corrected, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(ahead.init, update_fn)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x))
