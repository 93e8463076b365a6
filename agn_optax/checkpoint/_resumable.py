"""A worker whose process may be killed at any moment.

Before a message is sent, everything from which it is computed is written to disk: the
worker's state, the position in its data, and the number of the exchange. If the process
is killed, the next process sends the exchange of the last checkpoint again. If the
center has applied it already, it recognizes the number, and only answers. The data
continues after that exchange: the local steps made since the checkpoint are repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from agn_optax import errors
from agn_optax._internal import check, combinations
from agn_optax.center import LocalCenter, ShardedCenter
from agn_optax.checkpoint import _save
from agn_optax.checkpoint._parts import WorkerPart
from agn_optax.round import LocalState
from agn_optax.worker import Worker

PyTree = Any


# Names of the arguments of `load` and `Rotation.write`, and of this module's own parts.
_RESERVED = {"path", "like", "number", "worker", _save.ABOUT}


class Resumable:
    """A `Worker` that continues where it was, whenever and however its process ended.

    It writes a checkpoint before each exchange, and `start` continues from the last
    one. If the data can resume too, as a Grain iterator can, every sample counts
    in the center exactly once, even if the process is killed (SIGKILL) during an
    exchange or while a checkpoint is written.

    This holds as long as the center never loses applied exchanges at a restart. The
    center may be

    - served by another process,
    - or in this process, with an `agn_optax.center.Journal`.

    For a center in shards the same applies to each shard. If a center has lost
    exchanges, `start` raises an error.

    A worker that exchanges by `agn_optax.Fragments` writes a checkpoint for each
    fragment. Before that it adopts the answers of fragments in flight, even if their
    delay is not over. There is one exception to "exactly once", with and without
    checkpoints: if a rule sends displacements and adopts the center after its message,
    as downpour and diloco do, a ``delay`` lets the local steps between a message and
    its answer count only by the fraction ``mixing``.

    A power failure may destroy the last checkpoints, because not all of their files are
    synced to disk.

    All processes of a worker of several make the same calls, with the same shared
    directory. Each writes and loads its own shards. The worker may continue with
    another number of processes, and another sharding: those of the ``params`` given to
    `start`.

    Use it in place of the worker: other attributes (``tx``, ``exchange``, ``flush``,
    ...) are those of the worker. At each call of ``exchange`` and ``flush``, the data
    iterator must be right after the samples of the local steps so far. If a call raises
    because the center is unreachable (``patience`` is 0), repeat the call before the
    next local step. Writing a checkpoint takes 0.1 s, and some seconds per gigabyte:
    choose the period accordingly.

    Args:
      worker: the worker. Its name must be unique, and the same in all processes.
      directory: directory for this worker's checkpoints only, created if necessary.
      keep: number of checkpoints to keep.
      **others: objects to save with the worker, by name: either checkpointables of
        Orbax that load in place, such as a Grain iterator, or dicts of arrays (batch
        statistics, random keys). A dict is saved with its values at each checkpoint,
        and `start` writes the restored arrays into it. With several processes, an
        iterator is saved by each process, and cannot be loaded by another number of
        them; NumPy arrays are those of the first process. Reserved names are
        ``agn_optax``, ``like``, ``number``, ``path`` and ``worker``.

    Attributes:
      worker: the worker.
      resumed: whether `start` found a checkpoint.
      checkpoints: the checkpoints on disk.

    Raises:
      InvalidArgumentError: ``keep`` is not positive, or a name is reserved; or the
        center would be lost with this process.
      MissingExtraError: Orbax is not installed.
      InvalidTypeError: ``worker`` is not a worker.

    Example:
      >>> import tempfile, grain, jax.numpy as jnp, optax, agn_optax
      >>> folder = tempfile.TemporaryDirectory()
      >>> for attempt in range(2):  # really in two processes
      ...     journal = agn_optax.center.Journal(f"{folder.name}/journal")
      ...     center = agn_optax.LocalCenter(
      ...         agn_optax.rules.downpour(), jnp.zeros(6), durability=journal
      ...     )
      ...     worker = agn_optax.Worker(center, optax.sgd(1.0), period=2, name="w")
      ...     data = iter(grain.MapDataset.range(6).to_iter_dataset())
      ...     resumable = agn_optax.checkpoint.Resumable(
      ...         worker, f"{folder.name}/worker", data=data
      ...     )
      ...     params, state = resumable.start()
      ...     for sample in data:
      ...         grads = -jnp.zeros(6).at[sample].set(1.0)
      ...         updates, state = resumable.tx.update(grads, state, params)
      ...         params = optax.apply_updates(params, updates)
      ...         params, state = resumable.exchange(params, state)
      ...         if attempt == 0 and sample == 4:
      ...             break  # its process is killed
      ...     center.close()
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
        **others: Any,
    ) -> None:
        check.instance(worker, Worker, "worker must be an agn_optax.Worker")
        check.whole_number(keep, "keep", least=1, optional=False)
        for name in others:
            if name in _RESERVED:
                raise errors.InvalidArgumentError(
                    f"an object cannot be saved as {name!r}: the names "
                    f"{', '.join(sorted(_RESERVED))} are reserved"
                )
        center: Any = worker.center
        shards = center.centers if isinstance(center, ShardedCenter) else [center]
        if any(map(_is_in_memory_only, shards)):
            combinations.reject(
                "Resumable", "a center in memory", f"worker {worker.name!r} at {center}"
            )
        self.worker = worker
        self.resumed = False
        self._others = others
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
        """Continue from the last checkpoint; without one, start like `Worker.start`.

        It first repeats the exchange for which the checkpoint was written.

        Args:
          params: see `Worker.start`; the result has the same containers and shardings.
          chief: see `Worker.start`.
          timeout: see `Worker.start`.

        Returns:
          The parameters and the state to continue with.

        Raises:
          RuleMismatchError, TreeMismatchError: the checkpoint does not match this
            worker.
          DurabilityError: the checkpoint cannot be read, or the processes of the worker
            do not share the directory.
          WorkerStateError: the center has lost exchanges at a restart, or has exchanges
            that this worker made after its last checkpoint; or the worker's name has
            changed.

        Also raises the errors of `Worker.start`.
        """
        self.checkpoints.check_is_shared()
        self.worker.before_send = self._before_send
        latest = self.checkpoints.latest
        if latest is None:
            return self.worker.start(params, chief=chief, timeout=timeout)
        others: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in self._others.items()
        }
        worker = _ResumablePart(self.worker)
        loaded = _save.load(latest[1], like=params, worker=worker, **others)
        for name, value in self._others.items():
            if isinstance(value, dict):
                value.update(loaded[name])
        self.resumed = True
        return loaded["worker"]

    def save(self, params: PyTree, state: LocalState) -> None:
        """Write a checkpoint now, between two exchanges.

        Raises:
          WorkerStateError: an exchange is in flight; `Worker.receive` waits for it.
        """
        self._before_send((), params, state)

    def __enter__(self) -> Resumable:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the center; a later process may continue from the last checkpoint."""
        if self.worker.before_send == self._before_send:
            self.worker.before_send = None
        self.checkpoints.close()
        self.worker.leave()

    def _before_send(
        self, fragments: Iterable[int], params: PyTree, state: LocalState
    ) -> None:
        """Write a checkpoint; the worker calls this before the fragments' messages."""
        part = _ResumablePart(self.worker, params, state, fragments=fragments)
        number = 0 if (last := self.checkpoints.latest) is None else last[0] + 1
        self.checkpoints.write(number, worker=part, **self._others)


def _is_in_memory_only(center: Any) -> bool:
    """Return whether a center is lost when this process ends."""
    return isinstance(center, LocalCenter) and center.core.keeper is None


class _ResumablePart(WorkerPart):
    """A worker right before it sends messages.

    Args:
      worker: the worker.
      *loop: its parameters and state.
      fragments: the fragments whose messages are sent next.
    """

    def __init__(
        self, worker: Worker, *loop: PyTree, fragments: Iterable[int] = ()
    ) -> None:
        super().__init__(worker, *loop)
        self._fragments = list(fragments)

    def to_save(self) -> tuple[dict[str, Any], PyTree]:
        about, tree = super().to_save()
        return about | {"fragments_to_send": self._fragments}, tree

    def restore(self, about: Any, tree: PyTree) -> Any:
        worker = self._worker
        if about["worker"] != worker.name:
            raise errors.WorkerStateError(
                f"this checkpoint is of worker {about['worker']!r}, and the center "
                f"knows its exchanges by that name: give worker {worker.name!r} the "
                "same name"
            )
        params, state = self.restore_worker(about, tree, about["resume_token"])
        try:
            return worker.resend(params, state, about["fragments_to_send"])
        except errors.WorkerStateError as error:
            worker.leave()
            raise errors.WorkerStateError(
                f"the center has exchanges that worker {worker.name!r} made after its "
                f"last checkpoint, so the worker cannot resume from it: {error}"
            ) from error
