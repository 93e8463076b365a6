"""The center optimizer `primal_averaging`: averages of an optimizer's iterates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check, trees

PyTree = Any


class PrimalAveragingState(NamedTuple):
    """State of `primal_averaging`."""

    inner_state: PyTree  # state of the wrapped optimizer
    z: PyTree  # like the center: the iterate of the wrapped optimizer
    interpolation: jax.Array  # float scalar: weight of the average in the center


def primal_averaging(
    optimizer: optax.GradientTransformation,
    *,
    averaging: float = 0.9,
    interpolation: float = 0.7,
) -> optax.GradientTransformationExtraArgs:
    r"""Generalized primal averaging (GPA) as a center optimizer.

    .. math::
        z &\leftarrow z + \text{optimizer}(g) \\
        x &\leftarrow \mu_x x + (1 - \mu_x) z \\
        c &= \mu_y x + (1 - \mu_y) z

    The optimizer moves :math:`z`, :math:`x` is an average of the past :math:`z`, and
    workers start at the center :math:`c`, between the two. `evaluated` returns
    :math:`x`. With :math:`\mu_x = 0` it is the wrapped optimizer. With
    :math:`\mu_x = \mu_y` and ``optax.sgd(rate)`` it is DiLoCo's
    ``optax.sgd(rate * (1 - averaging), averaging, nesterov=True)``. Schedule-free
    optimization has :math:`\mu_x = 1 - 1 / t`: use ``optax.contrib.schedule_free``,
    which is a center optimizer as it is.

    Args:
      optimizer: the optimizer that moves :math:`z`; it gets :math:`z` as parameters.
      averaging: :math:`\mu_x`, in [0, 1]. The paper averages at every local step: its
        0.9967 corresponds to 0.9 (the 32nd power) for a center with a period of 32.
      interpolation: :math:`\mu_y`, in (0, 1].

    Returns:
      A center optimizer with `PrimalAveragingState`, which needs the parameters.

    Raises:
      InvalidArgumentError: an argument is out of range.
      InvalidTypeError: ``optimizer`` is not an optax optimizer.
      MissingArgumentError: raised by its ``update`` without parameters.

    Example:
      >>> import optax, agn_optax
      >>> outer = agn_optax.center_optimizers.primal_averaging(optax.sgd(1.0))
      >>> tx = agn_optax.diloco(optax.adamw(4e-4), period=32, center=outer)

    References:
      Aaron Defazio, Konstantin Mishchenko, Parameswaran Raman, Hao-Jun Michael Shi, Lin
      Xiao, *Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs*, 2025.
      In the paper the optimizer runs at every step; here it is the center's.
    """
    optimizer = check.optimizer(optimizer, "optimizer")
    check.rate(averaging, "averaging", low=0.0, high=1.0)
    check.rate(interpolation, "interpolation", low=0.0, high=1.0, low_open=True)

    def init_fn(params: PyTree) -> PrimalAveragingState:
        return PrimalAveragingState(
            optimizer.init(params),
            trees.copy(params),
            jnp.asarray(interpolation, float),
        )

    def update_fn(
        updates: PyTree,
        state: PrimalAveragingState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PrimalAveragingState]:
        check.params_given(params, "primal_averaging")
        z_updates, inner_state = optimizer.update(
            updates, state.inner_state, state.z, **extra_args
        )
        z = optax.apply_updates(state.z, z_updates)

        # With μ_y x = c - (1 - μ_y) z, the equations do not need x:
        # c' - c = (1 - μ_x μ_y) (z' - c) - μ_x (1 - μ_y) (z - c)
        def move(c: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
            ahead = (1 - averaging * interpolation) * (new - c)
            return (ahead - averaging * (1 - interpolation) * (old - c)).astype(c.dtype)

        new_updates = jax.tree.map(move, params, state.z, z)
        return new_updates, PrimalAveragingState(
            inner_state, z, jnp.asarray(interpolation, float)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
