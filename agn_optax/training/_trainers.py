"""Training by `fit`, as a worker of a center or on towers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import checkpoint, flax
from agn_optax._internal import check
from agn_optax.towers import Towers
from agn_optax.worker import Worker

PyTree = Any
_log = logging.getLogger("agn_optax")


class WorkerTrainer(contextlib.AbstractContextManager["WorkerTrainer"]):
    """Training as a worker, with a dataclass or ``(params, opt_state)`` as state.

    Attributes:
      steps: local steps so far.
      step: the compiled train step.
    """

    def __init__(
        self, train_step: Any, worker: Worker, chief: Any, data: Any, directory: Any
    ) -> None:
        check.instance(worker, Worker, "worker must be an agn_optax.Worker")
        self.steps = 0
        self.step = jax.jit(train_step, donate_argnums=0)
        self._chief, self._data = chief, data
        # Arrays for checkpoints that are not in the worker's state: the number of
        # steps, and other fields of a dataclass.
        self._extra_arrays: dict[str, Any] = {}
        self._worker: Any = worker
        if directory is not None:
            self._worker = checkpoint.Resumable(
                worker, directory, extra_arrays=self._extra_arrays, **_data_part(data)
            )

    def start(self, state: PyTree) -> PyTree:
        self._store_extra_arrays(state)
        if _has_fields(state):
            state = flax.start(self._worker, state, chief=self._chief)
        else:
            state = self._worker.start(state, chief=self._chief)
        if getattr(self._worker, "resumed", False):
            _check_data(self._data)
        self.steps = int(self._extra_arrays.pop("steps"))
        if not _has_fields(state):
            return state
        # A copy, because the train step donates it.
        rest = jax.tree.map(
            lambda x: jnp.array(x, copy=True), self._extra_arrays["rest"]
        )
        return dataclasses.replace(rest, params=state.params, opt_state=state.opt_state)

    def exchange(self, state: PyTree) -> PyTree:
        if not self._worker.due:  # no exchange: the worker only counts the step
            self._worker.exchange(None, None)
            return state
        return self._call(state, flax.exchange, self._worker.exchange)

    def save(self, state: PyTree) -> None:
        """Do nothing: a worker saves at its exchanges."""

    def finish(self, state: PyTree) -> PyTree:
        return self._call(state, flax.flush, self._worker.flush)

    def _call(self, state: PyTree, with_fields: Any, with_pair: Any) -> PyTree:
        self._store_extra_arrays(state)
        if _has_fields(state):
            return with_fields(self._worker, state)
        return with_pair(*state)

    def leave(self) -> None:
        self._worker.leave()

    def center(self, state: PyTree) -> PyTree:
        del state
        return self._worker.center.pull().params

    def mean(self, metrics: PyTree) -> PyTree:
        return metrics

    def __exit__(self, *exception: object) -> None:
        if isinstance(self._worker, checkpoint.Resumable):
            self._worker.detach()

    def _store_extra_arrays(self, state: PyTree) -> None:
        self._extra_arrays["steps"] = jnp.asarray(self.steps)
        if _has_fields(state):
            rest = dataclasses.replace(state, params=None, opt_state=None)
            self._extra_arrays["rest"] = jax.tree.map(jnp.asarray, rest)


class TowersTrainer(contextlib.AbstractContextManager["TowersTrainer"]):
    """Training on towers, with a state that has a replica for each tower."""

    def __init__(self, train_step: Any, towers: Any, data: Any, directory: Any) -> None:
        check.instance(towers, Towers, "towers must be agn_optax.Towers(...)")
        self.steps = 0
        self._towers, self._data, self._data_part = towers, data, _data_part(data)
        self._program = towers.step(train_step)
        self._checkpoints = None
        if directory is not None:
            self._checkpoints = checkpoint.Rotation(directory)

    def start(self, state: PyTree) -> PyTree:
        if self._checkpoints is None or self._checkpoints.latest is None:
            return state
        _check_data(self._data)
        self.steps, path = self._checkpoints.latest
        loaded = checkpoint.load(path, towers=(self._towers, state), **self._data_part)
        return loaded["towers"]

    def step(self, state: PyTree, batch: Any) -> tuple[PyTree, PyTree]:
        return self._program(state, self._towers.shard(batch))

    def exchange(self, state: PyTree) -> PyTree:
        """Return the state: towers exchange within their steps."""
        return state

    def save(self, state: PyTree) -> None:
        if self._checkpoints is not None:
            parts = {"towers": (self._towers, state), **self._data_part}
            self._checkpoints.write(self.steps, **parts)

    def finish(self, state: PyTree) -> PyTree:
        latest = None if self._checkpoints is None else self._checkpoints.latest
        if latest is None or latest[0] != self.steps:
            self.save(state)
        return state

    def leave(self) -> None:
        """Do nothing: towers have no center outside the program to leave."""

    def center(self, state: PyTree) -> PyTree:
        return self._towers.center_params(state)

    def mean(self, metrics: PyTree) -> PyTree:
        return self._towers.mean(metrics)

    def __exit__(self, *exception: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()


def _has_fields(state: PyTree) -> bool:
    return dataclasses.is_dataclass(state) and hasattr(state, "opt_state")


def _data_part(data: Any) -> dict[str, Any]:
    """Return the data as a part of a checkpoint, if Orbax can save its position."""
    return {"data": data} if hasattr(data, "save") and hasattr(data, "load") else {}


def _check_data(data: Any) -> None:
    """Warn if the data of a resumed run starts from its beginning."""
    if not _data_part(data):
        _log.warning(
            "the run resumes from its checkpoint, but its data starts from the "
            "beginning: pass an iterator that Orbax can save, such as Grain's, got %s",
            check.show(data),
        )
