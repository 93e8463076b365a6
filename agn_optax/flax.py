"""Exchanges of a `Worker` with the state of Flax training loops.

    linen   a `TrainState`: a new one is returned, with other params and opt_state
    nnx     a model and its `nnx.Optimizer`: both are updated in place, as nnx does

An exchange changes only trained parameters and the state of the worker's optimizer.
Everything else (batch statistics, random keys, counters) stays local to the worker.
Give every worker its own random keys, and recompute the batch statistics with the
center's parameters before the center is evaluated or shipped: docs/loops.md shows how.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from agn_optax import errors
from agn_optax._internal import check

PyTree = Any
Worker = Any  # an agn_optax.Worker, or a stand-in such as checkpoint.Resumable

__all__ = ["exchange", "flush", "start"]


def start(
    worker: Worker,
    state: Any,
    optimizer: Any = None,
    *,
    chief: bool | None = None,
    timeout: float | None = None,
) -> Any:
    """Call `Worker.start` with the parameters of a state or of a model.

    Args:
      worker: a `Worker`, or a `checkpoint.Resumable` in its place.
      state: a dataclass with the fields ``params`` and ``opt_state``, such as a linen
        ``TrainState`` made with ``tx=worker.tx``; or an nnx model.
      optimizer: the model's ``nnx.Optimizer(model, worker.tx, wrt=...)``; None for a
        state.
      chief: see `Worker.start`.
      timeout: see `Worker.start`.

    Returns:
      The state with the center's parameters and a fresh optimizer state. For a model,
      the same model: it and its optimizer are updated in place.

    Raises:
      InvalidTypeError: ``state`` has no ``params`` and ``opt_state``, or ``optimizer``
        is not an ``nnx.Optimizer``.
      InvalidArgumentError: the optimizer was not made with ``worker.tx``.

    Also raises the errors of `Worker.start`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax, agn_optax
      >>> from flax.training.train_state import TrainState
      >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour())
      >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=2)
      >>> model = nn.Dense(1)
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> state = TrainState.create(
      ...     apply_fn=model.apply, params=params, tx=worker.tx
      ... )
      >>> state = agn_optax.flax.start(worker, state, chief=True)
      >>> for _ in range(4):
      ...     grads = jax.tree.map(jnp.ones_like, state.params)
      ...     state = state.apply_gradients(grads=grads)
      ...     state = agn_optax.flax.exchange(worker, state)
      >>> center.version, int(state.step)
      (2, 4)
    """
    params, _ = _params_and_state(worker, state, optimizer)
    loop = worker.start(params, chief=chief, timeout=timeout)
    return _updated(state, optimizer, *loop)


def exchange(
    worker: Worker,
    state: Any,
    optimizer: Any = None,
    *,
    steps: int = 1,
    weight: float | None = None,
) -> Any:
    """Call `Worker.exchange` with a state or a model, after every local step.

    Args:
      worker: the worker.
      state: a state or a model as for `start`, after the local step. A call
        that makes an exchange donates its ``params`` and ``opt_state``.
      optimizer: see `start`.
      steps: see `Worker.exchange`.
      weight: see `Worker.exchange`.

    Returns:
      The state for the next local step; or the same model.

    Raises the errors of `start` and `Worker.exchange`.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> from flax import nnx
      >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour())
      >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=2)
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, worker.tx, wrt=nnx.Param)
      >>> model = agn_optax.flax.start(worker, model, optimizer, chief=True)
      >>> for _ in range(4):
      ...     grads = nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(model)
      ...     _ = optimizer.update(model, grads)
      ...     model = agn_optax.flax.exchange(worker, model, optimizer)
      >>> center.version
      2
    """
    if steps == 1 and not worker.due:  # no exchange: the worker only counts the step
        opt_state = (state if optimizer is None else optimizer).opt_state
        worker.exchange(None, opt_state, weight=weight)
        return state
    loop = _params_and_state(worker, state, optimizer)
    loop = worker.exchange(*loop, steps=steps, weight=weight)
    return _updated(state, optimizer, *loop)


def flush(worker: Worker, state: Any, optimizer: Any = None) -> Any:
    """Call `Worker.flush` with a state or a model, to exchange a partial round.

    Args:
      worker: the worker.
      state: see `exchange`.
      optimizer: see `exchange`.

    Returns:
      The state after the exchange; or the same model.

    Raises the errors of `start` and `Worker.flush`.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> from flax import nnx
      >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour())
      >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=10)
      >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, worker.tx, wrt=nnx.Param)
      >>> model = agn_optax.flax.start(worker, model, optimizer, chief=True)
      >>> grads = nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(model)
      >>> _ = optimizer.update(model, grads)
      >>> model = agn_optax.flax.exchange(worker, model, optimizer)
      >>> model = agn_optax.flax.flush(worker, model, optimizer)
      >>> center.version
      1
    """
    loop = worker.flush(*_params_and_state(worker, state, optimizer))
    return _updated(state, optimizer, *loop)


def _params_and_state(
    worker: Worker, state: Any, optimizer: Any
) -> tuple[PyTree, PyTree]:
    """Return the parameters and the optimizer state of a state or a model.

    Raises:
      InvalidTypeError, InvalidArgumentError: see `start`.
    """
    if optimizer is not None:
        from flax import nnx  # noqa: PLC0415 slow to import, and an extra

        wanted = "optimizer must be an nnx.Optimizer of the model"
        check.instance(optimizer, nnx.Optimizer, wanted)
        _check_tx(
            worker, optimizer.tx, "nnx.Optimizer(model, worker.tx, wrt=nnx.Param)"
        )
        params = nnx.state(state, optimizer.wrt, **_graph_mode(optimizer))
        return _arrays(params), _arrays(optimizer.opt_state)
    is_state = dataclasses.is_dataclass(state) and not isinstance(state, type)
    if not (is_state and hasattr(state, "params") and hasattr(state, "opt_state")):
        raise errors.InvalidTypeError(
            "state must be a dataclass with params and opt_state, such as a TrainState "
            "of Flax, or an nnx model passed with its optimizer, got "
            f"{check.show(state)}"
        )
    if hasattr(state, "tx"):
        _check_tx(worker, state.tx, "TrainState.create(..., tx=worker.tx)")
    return state.params, state.opt_state


def _updated(state: Any, optimizer: Any, params: PyTree, opt_state: PyTree) -> Any:
    """Return the state or the model with new parameters and optimizer state."""
    if optimizer is None:
        return dataclasses.replace(state, params=params, opt_state=opt_state)
    from flax import nnx  # noqa: PLC0415

    nnx.update(state, params)
    nnx.update(optimizer.opt_state, nnx.state(opt_state, **_graph_mode(optimizer)))
    return state


def _arrays(variables: PyTree) -> PyTree:
    """Return a tree with each nnx variable replaced by its value."""
    from flax import nnx  # noqa: PLC0415

    as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # its name in Flax 0.12.5
    return as_pure(variables)


def _graph_mode(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's graph or tree mode; older Flax has only one mode."""
    return {"graph": optimizer.graph} if hasattr(optimizer, "graph") else {}


def _check_tx(worker: Worker, tx: Any, wanted: str) -> None:
    if tx != worker.tx:  # equality: older Flax keeps an equal copy
        raise errors.InvalidArgumentError(
            f"the optimizer does not belong to worker {worker.name!r}, whose tx "
            f"records what the worker sends: make it as {wanted}. Pass gradient "
            "transformations to the worker: Worker(..., gradients=...)"
        )
