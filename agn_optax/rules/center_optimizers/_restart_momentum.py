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
    updates_since_restart: jax.Array  # int32 scalar


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
        restarts = state.updates_since_restart == every
        inner_state = _restarted(restarts, state.inner_state, optimizer.init(params))
        new_updates, inner_state = optimizer.update(
            updates, inner_state, params, **extra_args
        )
        updates_since = jnp.where(restarts, 1, state.updates_since_restart + 1)
        return new_updates, RestartState(inner_state, updates_since)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _restarted(restarts: jax.Array, state: PyTree, fresh: PyTree) -> PyTree:
    """Return ``fresh`` at a restart, else ``state``.

    Counts of schedules and injected hyperparameters are kept in either case.
    """

    def is_kept(node: Any) -> bool:
        return isinstance(node, _INJECTED | _SCHEDULE)

    def restart(old: Any, new: Any) -> Any:
        if isinstance(old, _SCHEDULE):
            return old
        if isinstance(old, _INJECTED):
            inner_state = _restarted(restarts, old.inner_state, new.inner_state)
            return old._replace(inner_state=inner_state)
        return jnp.where(restarts, jnp.asarray(new, jnp.result_type(old)), old)

    return jax.tree.map(restart, state, fresh, is_leaf=is_kept)
