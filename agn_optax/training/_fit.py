"""A training loop, for whoever wants none of their own. Nobody must use it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from agn_optax import errors
from agn_optax._internal import check, told_to_end
from agn_optax.towers import Towers
from agn_optax.training._places import OfTowers, OfWorker
from agn_optax.training._progress import showing
from agn_optax.worker import Worker

PyTree = Any
Metrics = Mapping[str, float]


class Fitted(NamedTuple):
    """What `fit` has made."""

    state: PyTree  # as the last step, or the last exchange, left it
    metrics: Metrics  # those that were recorded last
    steps: int  # local steps, of earlier processes too


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
    """Trains until the data ends, as a worker of a center or on towers.

    For each batch: the local step, and the exchange if it is due. Every ``every`` steps
    and at the end: the metrics of the last step and of the center. It is this loop and
    nothing more, so take its lines when they do not fit.

    With a ``directory`` it goes on by itself from the checkpoint that it finds there.
    A worker writes one before every exchange, as `checkpoint.Resumable` does; towers
    every ``every`` steps. Data goes on as well if it is an iterator that Orbax can
    save, such as Grain's, and begins anew otherwise.

    SIGTERM, by which engines take a worker's place away, ends it after the step that
    runs: what the worker has is sent or saved, it leaves its center, and the program
    ends with the exit code 143.

    Args:
      train_step: ``(state, batch) -> (state, metrics)``, metrics by name; compiled
        here. Its optimizer is ``worker.tx``; on towers, it is what `Towers.step` takes.
      state: with a worker, the parameters, of which the train step gets ``(params,
        opt_state)``; or a dataclass with these two, such as a ``TrainState``. With
        towers, state with a replica per tower.
      data: batches, until it ends.
      worker: a worker, of an embedded or a served center, that has not started.
      towers: towers, instead of a worker.
      chief: as of `Worker.start`.
      evaluate: metrics of the center, by name: ``params -> metrics``. They are recorded
        as ``center/NAME``.
      every: local steps between two records.
      callbacks: called with every record: ``callback(step, metrics)``, the metrics as
        floats.
      stop: whether to end early, asked of every record.
      directory: of the checkpoints of this worker, or of these towers, alone; None for
        none.
      progress: whether to show the records: on a terminal with rich if that is
        installed, each in the place of the one before, of which the last one stays;
        else as lines of the logger ``agn_optax``, at level info.

    Returns:
      State, the last record, and the number of local steps.

    Raises:
      InvalidArgumentError: neither a worker nor towers, or both; or a number is out of
        range.

    Also raises what the worker and its checkpoints do.

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
    place: OfWorker | OfTowers
    if worker is not None:
        place = OfWorker(train_step, worker, chief, data, directory)
    else:
        place = OfTowers(train_step, towers, data, directory)
    metrics: Mapping[str, Any] = {}
    recorded, said = -1, dict[str, float]()

    def record() -> dict[str, float]:
        own = dict(place.mean(metrics))
        if evaluate is not None:
            measured = evaluate(place.center(state))
            own |= {f"center/{name}": value for name, value in measured.items()}
        values = jax.device_get(list(own.values()))  # at once
        said = dict(zip(own, map(float, values), strict=True))
        for callback in (show, *callbacks):
            callback(place.steps, said)
        return said

    with showing(progress) as show, place:
        state = place.start(state)
        with told_to_end() as told:
            for batch in data:
                state, metrics = place.step(state, batch)
                place.steps += 1
                state = place.exchange(state)
                if told():
                    break
                if place.steps % every == 0:
                    place.save(state)
                    recorded, said = place.steps, record()
                    if stop is not None and stop(said):
                        break
            state = place.finish(state)
            if told():
                place.leave()
        if recorded != place.steps:
            said = record()
    return Fitted(state, said, place.steps)
