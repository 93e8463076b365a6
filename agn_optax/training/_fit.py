"""The training loop `fit`, for users who do not want to write one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from agn_optax import errors
from agn_optax._internal import check
from agn_optax._signals import delay_sigterm
from agn_optax.towers import Towers
from agn_optax.training._trainers import TowersTrainer, WorkerTrainer
from agn_optax.worker import Worker

PyTree = Any
Metrics = Mapping[str, float]
_log = logging.getLogger("agn_optax")


class Fitted(NamedTuple):
    """The result of `fit`."""

    state: PyTree  # after the last step and the last exchange
    metrics: Metrics  # of the last record
    steps: int  # local steps, including those of earlier processes


def fit(
    train_step: Callable[[PyTree, Any], tuple[PyTree, Mapping[str, Any]]],
    state: PyTree,
    data: Iterable[Any],
    *,
    worker: Worker | None = None,
    towers: Towers | None = None,
    chief: bool | None = None,
    evaluate: Callable[[PyTree], Mapping[str, Any]] | None = None,
    every: int = 100,
    callbacks: Sequence[Callable[[int, Metrics], Any]] = (),
    stop: Callable[[Metrics], bool] | None = None,
    directory: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Fitted:
    """Train until the data ends, as a worker of a center or on towers.

    For each batch, `fit` runs the local step, and the exchange if it is due. Every
    ``every`` steps and at the end, it records the metrics of the last step and of the
    center. It does no more than this, so copy its loop if you need another one.

    With a ``directory``, training resumes from the latest checkpoint in it. A worker
    writes a checkpoint before every exchange, as `checkpoint.Resumable` does; towers
    write one every ``every`` steps. The data resumes too if it is an iterator that
    Orbax can save, such as Grain's; other data starts from its beginning.

    SIGTERM, with which engines preempt a worker, ends the loop after the current step.
    The worker then exchanges its partial round and leaves its center, or the towers
    save a checkpoint, and the program ends with exit code 143.

    Args:
      train_step: ``(state, batch) -> (state, metrics)``, with metrics by name; compiled
        here. Its optimizer is ``worker.tx``. On towers, the function that
        `Towers.step` takes.
      state: with a worker, the parameters, and the train step gets ``(params,
        opt_state)``; or a dataclass with these two fields, such as a ``TrainState``.
        On towers, the state with a replica per tower.
      data: an iterable of batches.
      worker: a worker of an embedded or a served center, which has not started yet.
      towers: towers, instead of a worker.
      chief: see `Worker.start`.
      evaluate: ``params -> metrics``, metrics of the center by name. They are recorded
        as ``center/NAME``.
      every: local steps between two records.
      callbacks: functions ``callback(step, metrics)`` that are called with every
        record; the metrics are floats.
      stop: ``metrics -> bool``, called with every periodic record; True ends the
        training early.
      directory: folder for the checkpoints of this worker, or of these towers, and of
        no others; None for no checkpoints.
      progress: whether to show each record as a line: on a terminal, or otherwise by
        the logger ``agn_optax`` at level info.

    Returns:
      The state, the last record, and the number of local steps.

    Raises:
      InvalidArgumentError: neither a worker nor towers, or both; or a number is out of
        range.

    Also raises the errors of the worker and of its checkpoints.

    Example:
      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> center = agn_optax.LocalCenter(agn_optax.rules.agn(optax.adam(0.1)))
      >>> worker = agn_optax.Worker(center, optax.adam(0.1), period=5)
      >>> def train_step(state, batch):
      ...     params, opt_state = state
      ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((w - batch) ** 2))(
      ...         params
      ...     )
      ...     updates, opt_state = worker.tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), {"loss": loss}
      >>> fitted = agn_optax.fit(
      ...     train_step, jnp.zeros(3), [jnp.ones(3)] * 100, worker=worker, chief=True
      ... )
      >>> fitted.steps, bool(fitted.metrics["loss"] < 0.1), center.version
      (100, True, 20)
    """
    if (worker is None) == (towers is None):
        raise errors.InvalidArgumentError(
            "fit needs a worker=, or towers=, and not both, got "
            f"worker={check.show(worker)} and towers={check.show(towers)}"
        )
    check.whole_number(every, "every", least=1, optional=False)
    trainer: WorkerTrainer | TowersTrainer
    if worker is not None:
        trainer = WorkerTrainer(train_step, worker, chief, data, directory)
    else:
        trainer = TowersTrainer(train_step, towers, data, directory)
    metrics: Mapping[str, Any] = {}
    recorded_at, values = -1, dict[str, float]()

    def record() -> dict[str, float]:
        arrays = dict(trainer.mean(metrics))
        if evaluate is not None:
            evaluated = evaluate(trainer.center(state))
            arrays |= {f"center/{name}": value for name, value in evaluated.items()}
        numbers = jax.device_get(list(arrays.values()))  # one transfer for all
        values = dict(zip(arrays, map(float, numbers), strict=True))
        if progress:
            _show(trainer.steps, values)
        for callback in callbacks:
            callback(trainer.steps, values)
        return values

    with trainer:
        state = trainer.start(state)
        with delay_sigterm() as is_terminated:
            for batch in data:
                state, metrics = trainer.step(state, batch)
                trainer.steps += 1
                state = trainer.exchange(state)
                if is_terminated():
                    break
                if trainer.steps % every == 0:
                    trainer.save(state)
                    recorded_at, values = trainer.steps, record()
                    if stop is not None and stop(values):
                        break
            state = trainer.finish(state)
            if is_terminated():
                trainer.leave()
        if recorded_at != trainer.steps:
            values = record()
    return Fitted(state, values, trainer.steps)


def _show(step: int, metrics: Metrics) -> None:
    numbers = [f"{name} {value:.4g}" for name, value in metrics.items()]
    line = ", ".join([f"step {step}", *numbers])
    if sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
    else:
        _log.info(line)
