"""A worker whose process may be killed at any moment.

Before a message is sent, everything that it was computed from is on disk: the worker's
state, the position in its data, and the number of the exchange. If the process is
killed at any time, there are two cases for the exchange of the last checkpoint. If it
was not applied, it is sent as if nothing had happened. If it was applied, it is sent
again, and the center, which recognizes its number, answers without applying it again.
In both cases the data continues after the last applied exchange, and the local steps
since then are repeated.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

from agn_optax import errors
from agn_optax._internal import check, combinations
from agn_optax.center import LocalCenter, ShardedCenter
from agn_optax.checkpoint import _save
from agn_optax.checkpoint._parts import CenterPart, WorkerPart
from agn_optax.round import LocalState
from agn_optax.worker import StreamingWorker, Worker

PyTree = Any


def _taken() -> frozenset[str]:
    """Return the names that are arguments of the functions that save and load."""
    arguments = [
        name
        for function in (_save.load, _save.Rotation.write)
        for name, argument in inspect.signature(function).parameters.items()
        if argument.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    return frozenset([*arguments, "center", "worker", _save.ABOUT]) - {"self"}


_TAKEN = _taken()
_ALL = "all"  # all fragments, or the whole model


class Resumable:
    """A `Worker` that continues where it was, whenever and however its process ended.

    It writes a checkpoint before each exchange, and `start` continues from the last
    one. If the data can be continued too, such as a Grain iterator, every sample counts
    in the center exactly once, even if the process is killed (SIGKILL) during an
    exchange or while a checkpoint is written.

    This holds as long as the center is not restarted with a loss. The center may be
    served, or outlive its process by a `agn_optax.center.Journal`, or be in this
    process and have no other worker; it is then saved with the worker. For a center in
    shards the same applies to each shard. A center that lost exchanges reports that,
    and `start` raises an error.

    A worker that exchanges by `agn_optax.Fragments` writes a checkpoint for each
    fragment. Answers of fragments in flight are adopted before that, even if their
    delay is not over. With a ``delay``, samples of the local steps between a message
    and its answer count by the share ``mixing``, as they do without checkpoints: the
    adopted answer replaces the rest of the worker's own progress. That holds for rules
    that send displacements and adopt the center after the message, such as downpour and
    diloco.

    A power failure may destroy the last checkpoints, because not all of their files are
    synced to disk.

    Use it in place of the worker: other attributes (``tx``, ``exchanges``, ...) are
    those of the worker. The checkpoint of an exchange takes 0.1 s, and some seconds per
    gigabyte: choose the period accordingly.

    Args:
      worker: the worker. Its name must be unique, and the same in all processes.
      directory: directory of this worker's checkpoints alone, created if necessary.
      keep: number of checkpoints to keep.
      **beside: objects to save with the worker, by name: either checkpointables of
        Orbax that load in place, such as a Grain iterator, or dicts of arrays (batch
        statistics, random keys), which are saved with their values at that time, and
        filled by `start`. Some names are reserved: ``center``, and the arguments of
        `load` and of the function that writes checkpoints.

    Attributes:
      worker: the worker.
      resumed: whether `start` found a checkpoint.
      checkpoints: the checkpoints on disk.

    Raises:
      InvalidArgumentError: ``keep`` is not positive, or a name is reserved.
      MissingExtraError: Orbax is not installed.
      InvalidTypeError: ``worker`` is not a worker.

    Example:
      >>> import tempfile, grain, jax.numpy as jnp, optax, agn_optax
      >>> rule, seen = agn_optax.rules.downpour(), []
      >>> folder = tempfile.TemporaryDirectory()
      >>> for life in range(2):  # in a process each
      ...     center = agn_optax.LocalCenter(rule)
      ...     worker = agn_optax.Worker(center, optax.sgd(1.0), period=2, name="w")
      ...     data = iter(grain.MapDataset.range(6).to_iter_dataset())
      ...     loop = agn_optax.checkpoint.Resumable(worker, folder.name, data=data)
      ...     params, state = loop.start(jnp.zeros(6), chief=True)
      ...     for sample in data:
      ...         grads = -jnp.zeros(6).at[sample].set(1.0)
      ...         updates, state = loop.tx.update(grads, state, params)
      ...         params = optax.apply_updates(params, updates)
      ...         params, state = loop.exchange(params, state)
      ...         if life == 0 and sample == 4:
      ...             break  # its process is killed
      >>> print(center.pull().params, center.version)
      [1. 1. 1. 1. 1. 1.] 3
      >>> folder.cleanup()
    """

    def __init__(
        self,
        worker: Worker,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        **beside: Any,
    ) -> None:
        check.instance(worker, Worker, "worker must be an agn_optax.Worker")
        check.whole_number(keep, "keep", least=1, optional=False)
        for name in beside:
            if name in _TAKEN or name.startswith("center-"):
                raise errors.InvalidArgumentError(
                    f"what is saved beside the worker cannot be named {name!r}: names "
                    f"that are taken are {', '.join(sorted(_TAKEN))} and center-NUMBER"
                )
        self.worker = worker
        self.resumed = False
        self._beside = beside
        # The part of the last checkpoint whose exchange was not answered yet: `_ALL`,
        # or the number of a fragment.
        self._sends: Any = None
        # Params and state for the next call, if the last one failed after a receive.
        self._received: tuple[PyTree, LocalState] | None = None
        self.checkpoints = _save.Rotation(directory, keep)

    def __getattr__(self, name: str) -> Any:
        if name == "worker":  # not set yet
            raise AttributeError(name)
        return getattr(self.worker, name)

    def __repr__(self) -> str:
        """Return a description with the worker and the path of its checkpoints."""
        return f"Resumable({self.worker!r}, {str(self.checkpoints)!r})"

    def start(
        self,
        params: PyTree = None,
        *,
        chief: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[PyTree, LocalState]:
        """Continue from the last checkpoint; without one, start as `Worker.start`.

        The exchange for which the checkpoint was written is made first.

        Args:
          params: see `Worker.start`; they also determine the containers.
          chief: see `Worker.start`.
          timeout: see `Worker.start`.

        Returns:
          The parameters and the state to continue with.

        Raises:
          RuleMismatchError, TreeMismatchError: the checkpoint does not match this
            worker.
          WorkerStateError: the center was restarted with a loss, or has later exchanges
            of this worker.

        Also raises the errors of `Worker.start`.
        """
        self._sends = self._received = None
        latest = self.checkpoints.latest
        if latest is None:
            return self.worker.start(params, chief=chief, timeout=timeout)
        beside: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in self._beside.items()
        }
        parts = {**beside, "worker": _Sending(self.worker)} | self._center_parts
        there = _save.load(latest[1], like=params, **parts)
        for name, value in self._beside.items():
            if isinstance(value, dict):
                value.update(there[name])
        self.resumed = True
        return there["worker"]

    def exchange(
        self,
        params: PyTree,
        state: LocalState,
        *,
        steps: int = 1,
        weight: float | None = None,
    ) -> tuple[PyTree, LocalState]:
        """Exchange as `Worker.exchange` does, with a checkpoint before each message.

        The position in the data must be that after the local steps so far. If the
        center is unreachable and ``patience`` is 0, call this again before the next
        local step.
        """
        check.whole_number(steps, "steps", least=1, optional=False)
        weight = check.weight(weight)
        if self.worker.fills_round(steps):
            params, state = self._finished(params, state, self._turn(steps))
        if not self.worker.fills_round(steps):
            loop = self._received or (params, state)
            loop = self.worker.exchange(*loop, steps=steps, weight=weight)
            self._received = None
            if not self.worker.is_stuck:
                self._sends = None
            return loop
        about = {"more": steps, "weight": weight}
        with self._sending(params, state, self._turn(steps), **about) as loop:
            return self.worker.exchange(*loop, steps=steps, weight=weight)

    def flush(
        self,
        params: PyTree,
        state: LocalState,
        *,
        steps: int | None = None,
        weight: float | None = None,
    ) -> tuple[PyTree, LocalState]:
        """Exchange as `Worker.flush` does, with a checkpoint before each message."""
        weight = self.worker.check_flush(steps, weight)
        params, state = self._finished(params, state, _ALL)
        about = {"flushes": True, "steps": steps, "whole": weight}
        with self._sending(params, state, _ALL, **about) as loop:
            return self.worker.flush(*loop, steps=steps, weight=weight)

    def save(self, params: PyTree, state: LocalState) -> None:
        """Write a checkpoint now, between two exchanges.

        Raises:
          WorkerStateError: an exchange is in flight; `Worker.receive` waits for it.
        """
        self._write(params, state, sends=False)

    def __enter__(self) -> Resumable:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the center; a later process may continue from the last checkpoint."""
        self._received = None
        self.worker.leave()
        self.checkpoints.close()

    @property
    def _ending(self) -> list[LocalCenter]:
        """The center, or its shards, if all of them end with this process."""
        center = self.worker.center
        shards = center.centers if isinstance(center, ShardedCenter) else (center,)
        ending = [
            shard
            for shard in shards
            if isinstance(shard, LocalCenter) and not shard.core.outlives
        ]
        return ending if len(ending) == len(shards) else []

    @property
    def _center_parts(self) -> dict[str, CenterPart]:
        """The parts for the centers in `_ending`, by their names in a checkpoint."""
        center = self.worker.center
        parts: dict[str, CenterPart] = {}
        for number, each in enumerate(self._ending):
            if isinstance(center, ShardedCenter):
                parts[f"center-{number}"] = _ShardPart(each, center, number)
            else:
                parts["center"] = CenterPart(each)
        return parts

    def _turn(self, steps: int) -> Any:
        """Return the fragment that `exchange` sends next, or `_ALL`."""
        worker = self.worker
        return worker.next_full(steps) if isinstance(worker, StreamingWorker) else _ALL

    def _finished(self, params: PyTree, state: LocalState, sends: Any) -> Any:
        """Complete the exchange of the last checkpoint; return params and state.

        Do nothing if the next call repeats that exchange. Other fragments must not be
        sent before they are in a checkpoint.
        """
        worker = self.worker
        if self._sends in (None, sends) or not isinstance(worker, StreamingWorker):
            return params, state
        with self._sending(params, state, self._sends) as loop:
            loop = worker.finish(*loop)
        self._received = loop
        return loop

    @contextlib.contextmanager
    def _sending(
        self, params: PyTree, state: LocalState, sends: Any, **about: Any
    ) -> Iterator[tuple[PyTree, LocalState]]:
        """Yield params and state to exchange; save them first, unless it is a retry."""
        loop = self._received or (params, state)
        if self._sends is None:  # in a retry, the worker has the message's state
            given, loop = loop, self.worker.receive(*loop)
            if loop[0] is not given[0]:  # the given ones are donated: keep these
                self._received = loop
            self._write(*loop, **about)
        self._sends = sends
        try:
            yield loop
        except errors.AgnOptaxError as error:
            # With a rejected fragment, other fragments may have been sent.
            is_lost = isinstance(error, errors.CenterUnreachableError)
            if not (is_lost or self.worker.is_stuck):
                self._sends = None
            raise
        self._sends = self._received = None

    def _write(self, params: PyTree, state: LocalState, **about: Any) -> None:
        """Write a checkpoint of a worker that sends a message next: see `_Sending`."""
        worker = self.worker
        parts: dict[str, Any] = {**self._center_parts}
        present = {name for center in self._ending for name in center.workers}
        if others := present - {worker.name}:
            combinations.refuse(
                "Resumable with a center in memory",
                "other workers of the center",
                f"worker {worker.name!r} beside {sorted(others)}",
            )
        parts["worker"] = _Sending(worker, params, state, **about)
        number = 0 if (last := self.checkpoints.latest) is None else last[0] + 1
        self.checkpoints.write(number, **parts, **self._beside)


class _ShardPart(CenterPart):
    """A shard in this process, with its part of the parameters."""

    def __init__(self, shard: LocalCenter, whole: ShardedCenter, number: int) -> None:
        super().__init__(shard)
        self._whole, self._number = whole, number

    def expected(self, about: Any, like: PyTree, where: str) -> PyTree:
        if like is not None:
            like = self._whole.cut(like)[self._number]
        return super().expected(about, like, where)


class _Sending(WorkerPart):
    """A worker that is about to send a message.

    Args:
      worker: the worker.
      *loop: its parameters and state.
      sends: whether it is about to send; otherwise its state is saved unchanged.
      flushes: whether it sends all fragments instead of the next one.
      steps: local steps of the round; None for those that the worker has counted.
      more: local steps to add to these.
      whole: weight of the round; None for the one that the worker has summed.
      weight: weight to add to that; None for none.
    """

    def __init__(
        self,
        worker: Worker,
        *loop: PyTree,
        sends: bool = True,
        flushes: bool = False,
        steps: int | None = None,
        more: int = 0,
        whole: float | None = None,
        weight: float | None = None,
    ) -> None:
        super().__init__(worker, *loop, keeps_life=True)
        self._sends, self._flushes = sends, flushes
        self._steps, self._more = steps, more
        self._whole, self._weight = whole, weight

    def taken(self) -> tuple[dict[str, Any], PyTree]:
        about, tree = super().taken()
        if not self._sends:
            return about | {"sends": 0}, tree
        for numbers in about.get("fragments", [about]):
            self._count(numbers)
        if isinstance(self._worker, StreamingWorker):
            turn = None if self._flushes else self._worker.next_full(self._more)
            sends = self._flushes or turn is not None
            return about | {"sends": int(sends), "fragment": turn}, tree
        return about | {"sends": about["local_steps"]}, tree

    def _count(self, numbers: dict[str, Any]) -> None:
        """Add the steps and the weight that the sending call passes for a round."""
        if self._steps is not None:
            numbers["local_steps"] = self._steps
        numbers["local_steps"] += self._more
        if self._whole is not None:
            numbers["weight"] = self._whole
        if self._weight is not None:
            numbers["weight"] = (numbers["weight"] or 0.0) + self._weight

    def go_on(self, about: Any, tree: PyTree, *, has_center: bool) -> Any:
        loop = super().go_on(about, tree, has_center=has_center)
        if not about["sends"]:
            return loop
        try:
            if isinstance(self._worker, StreamingWorker):
                if (fragment := about["fragment"]) is None:
                    return self._worker.flush(*loop)
                return self._worker.flush_fragment(fragment, *loop)
            weight = about.get("sent_weight", about.get("weight"))
            return self._worker.flush(*loop, steps=about["sends"], weight=weight)
        except errors.WorkerStateError as error:
            self._worker.leave()
            raise errors.WorkerStateError(
                f"worker {self._worker.name!r} has exchanged since its last checkpoint "
                f"was written, and cannot go on from that: {error}"
            ) from error
