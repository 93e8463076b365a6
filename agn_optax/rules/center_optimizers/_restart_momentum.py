"""The center optimizer `restart_momentum`: periodic resets of an optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check

PyTree = Any
_INJECTED = optax.schedules.InjectStatefulHyperparamsState
_SCHEDULE = optax.ScaleByScheduleState


class RestartState(NamedTuple):
    """State of `restart_momentum`."""

    inner_state: PyTree  # state of the wrapped optimizer
    held: jax.Array  # int32 scalar: number of updates since the last restart


def restart_momentum(
    optimizer: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    r"""Reset the state of a center optimizer after every n updates.

    .. math:: \text{before update } t \text{, if } t > 0 \text{ and } t \bmod n = 0:
        \quad s \leftarrow \text{init}(c)

    A center's momentum contains displacements of many rounds. In directions of large
    curvature it overshoots and oscillates. Restarts damp the oscillation and keep the
    speed in between. The whole state of the optimizer is reset, such as Adam's moments
    together with the count of their bias correction. Schedules continue, and so do
    hyperparameters of ``optax.inject_hyperparams``.

    Args:
      optimizer: the center optimizer.
      every: n, updates between two restarts: exchanges in an optimizer state, messages
        (or rounds) in a center outside the program.

    Returns:
      A center optimizer with `RestartState`, which needs the parameters.

    Raises:
      InvalidArgumentError: ``every`` is not a positive whole number.
      InvalidTypeError: ``optimizer`` is not an optax optimizer.
      MissingArgumentError: raised by its ``update`` without parameters.

    Example:
      >>> import optax, agn_optax
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> outer = agn_optax.center_optimizers.restart_momentum(outer, every=20)
      >>> tx = agn_optax.diloco(optax.adamw(4e-4), period=500, center=outer)

    References:
      Brendan O'Donoghue, Emmanuel Candès, *Adaptive Restart for Accelerated Gradient
      Schemes*, 2015, for restarts at fixed intervals.
      *Outer-Momentum Restarting in High-Dimensional Two-Phase Optimization*, 2026
      (arXiv 2605.28585), for centers. Only the abstract was read.
    """
    optimizer = check.optimizer(optimizer, "optimizer")
    every = check.positive_int(every, "every")

    def init_fn(params: PyTree) -> RestartState:
        return RestartState(optimizer.init(params), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree, state: RestartState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, RestartState]:
        check.params_given(params, "restart_momentum")
        begins = state.held == every
        inner_state = _renewed(begins, state.inner_state, optimizer.init(params))
        moved, inner_state = optimizer.update(
            updates, inner_state, params, **extra_args
        )
        held = jnp.where(begins, 1, state.held + 1)
        return moved, RestartState(inner_state, held)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _renewed(begins: jax.Array, state: PyTree, fresh: PyTree) -> PyTree:
    """Return ``fresh`` at a restart, else ``state``.

    Counts of schedules and injected hyperparameters are kept in either case.
    """

    def goes_on(node: Any) -> bool:
        return isinstance(node, _INJECTED | _SCHEDULE)

    def renew(old: Any, new: Any) -> Any:
        if isinstance(old, _SCHEDULE):
            return old
        if isinstance(old, _INJECTED):
            inner_state = _renewed(begins, old.inner_state, new.inner_state)
            return old._replace(inner_state=inner_state)
        return jnp.where(begins, jnp.asarray(new, jnp.result_type(old)), old)

    return jax.tree.map(renew, state, fresh, is_leaf=goes_on)
