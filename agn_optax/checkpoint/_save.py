"""Checkpoints of several parts at once, each with a description to check."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import Leaf, agreement, check, combinations, extras, trees
from agn_optax._version import __version__
from agn_optax.center import LocalCenter
from agn_optax.checkpoint import _tree
from agn_optax.checkpoint._parts import (
    CenterPart,
    Part,
    TowersPart,
    WorkerPart,
    leaves_of,
)
from agn_optax.towers import Towers
from agn_optax.worker import Worker

PyTree = Any
ABOUT = "agn_optax"  # name of the item that describes the parts of a checkpoint
_FORMAT = 1
# Bytes of the chunks of large arrays, so that a process need not read all of an array
# to load its own shard; and of the arrays that it reads at the same time.
_CHUNK_BYTES, _READ_BYTES = 64 << 20, 256 << 20
_TIMEOUT = 300.0  # s that processes wait for each other, as long as in Orbax


def checkpointables(**parts: Any) -> dict[str, Any]:
    """Return checkpointables of workers, centers and towers for Orbax's functions.

    Use this with Orbax's own `Checkpointer`, or to save in the background. `save`
    passes the result to ``save_checkpointables``.

    Args:
      **parts: parts by name: ``(worker, params, state)`` for a `Worker` in the middle
        of its loop; a `LocalCenter`; ``(towers, state)`` for a state with a replica per
        tower; and anything else that Orbax saves, such as a pytree of arrays or a Grain
        iterator. While a center is saved, no worker may exchange with it, so that the
        parts are consistent.

    Returns:
      One checkpointable per part, and one named ``"agn_optax"`` that describes them:
      the fingerprints of rules, and every leaf.

    Raises:
      InvalidArgumentError: a part is named ``"agn_optax"``.
      InvalidTypeError: a part has an array of one of several processes alone.
      WorkerStateError: a worker has not started, or has an exchange in flight.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour(), jnp.ones(2))
      >>> sorted(agn_optax.checkpoint.checkpointables(center=center))
      ['agn_optax', 'center']
    """
    if ABOUT in parts:
        raise errors.InvalidArgumentError(
            f"the name {ABOUT!r} is reserved; use another"
        )
    saved, about = {}, {}
    for name, value in parts.items():
        part = as_part(value)
        if part is None:
            _tree.check_is_of_all_processes(value, name)
            saved[name] = value
            continue
        description, tree = part.to_save()
        description |= {"kind": part.kind, "leaves": _tree.describe(tree)}
        about[name], saved[name] = description, _tree.saved(tree)
    content = {
        "format": _FORMAT,
        "release": __version__,
        "processes": jax.process_count(),
        "parts": about,
    }
    return {**saved, ABOUT: {"json": json.dumps(content)}}


def save(path: str | os.PathLike[str], **parts: Any) -> None:
    """Save workers, centers, towers and other objects as one checkpoint.

    The checkpoint is written atomically. Orbax can read it without agn_optax:
    parameters are nested dictionaries with the names in the model.

    All processes of a worker call this with the same arguments, in a job of
    `jax.distributed` of their own. Each writes its own shards to the shared directory.

    Args:
      path: a directory that does not exist.
      **parts: see `checkpointables`.

    Raises:
      InvalidArgumentError: ``path`` exists.
      MissingExtraError: Orbax is not installed.
      DurabilityError: the checkpoint cannot be written.

    Also raises the errors of `checkpointables`.

    Example:
      >>> import pathlib, tempfile, jax.numpy as jnp, optax, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> center = agn_optax.LocalCenter(rule)
      >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=2, name="w")
      >>> params, state = worker.start({"w": jnp.ones(3)}, chief=True)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder) / "checkpoint"
      ...     agn_optax.checkpoint.save(
      ...         path, worker=(worker, params, state), center=center
      ...     )
      ...     center = agn_optax.LocalCenter(rule)
      ...     worker = agn_optax.Worker(center, optax.sgd(0.1), period=2, name="w")
      ...     loaded = agn_optax.checkpoint.load(path, worker=worker, center=center)
      >>> params, state = loaded["worker"]
      >>> print(params["w"], center.version)
      [1. 1. 1.] 0
    """
    ocp, folder = orbax(), pathlib.Path(path).resolve()
    if _of_all_processes("a checkpoint", folder.exists)[0]:
        raise errors.InvalidArgumentError(
            f"{folder} exists already: a checkpoint needs a directory of its own"
        )
    try:
        with _context():
            ocp.save_checkpointables(folder, checkpointables(**parts))
    except OSError as error:
        raise errors.DurabilityError(f"cannot write {folder}: {error}") from error


def load(
    path: str | os.PathLike[str],
    *,
    like: PyTree = None,
    **parts: Any,
) -> dict[str, Any]:
    """Restore workers, centers, towers and other objects from a checkpoint.

    Everything in the checkpoint is compared with the given parts before any of them is
    changed. A worker may have another number of processes than when it was saved. All
    of them call this with the same arguments, and each loads its own shards.

    Args:
      path: see `save`; or the ``path`` of a checkpoint of Orbax's `Checkpointer`.
      like: a tree with the containers of the parameters, for models whose containers
        are not dicts, lists and tuples. If its leaves are sharded arrays, parameters,
        and what is like them, are loaded with their shardings; several processes need
        this.
      **parts: parts by the names under which they were saved: a `Worker`; a
        `LocalCenter` that has no parameters yet; ``(towers, state)`` with the state of
        a new run on the same mesh (any number of towers will do for one worker);
        anything else as Orbax's ``load_checkpointables`` takes it: a Grain
        iterator, a tree like the saved one, or None. Workers can only be loaded
        together: pass all saved workers, and the center that was saved with them. Other
        parts may be left out. A worker whose center was not saved joins that center in
        a new session, and adopts it at the next exchange. Messages that the worker sent
        after the checkpoint stay applied, and the repeated steps are sent again;
        `Resumable` avoids that.

    Returns:
      A dict by name: ``(params, state)`` of a worker, to continue with; the center; the
      towers' state; the results of Orbax for other parts.

    Raises:
      RuleMismatchError: a part was saved with another rule; the message names the
        difference.
      TreeMismatchError: a part was saved with another model, or with another number of
        workers or towers; the message names the leaf or the numbers. Or a saved worker
        or its center is missing in ``parts``.
      InvalidArgumentError: the checkpoint has no part of that name and kind; or
        several processes load a worker without sharded arrays in ``like``, or another
        number of them saved a part that each saves by itself, such as an iterator.
      MissingExtraError: Orbax is not installed.
      DurabilityError: there is no checkpoint, or it cannot be read.

    Also raises the errors of `Worker.restore`.

    Example: see `save`.
    """
    ocp, folder = orbax(), pathlib.Path(path).resolve()
    source = f"the checkpoint in {folder}"
    content = read_about(folder)
    about = content["parts"]
    given = {name: as_part(value) for name, value in parts.items()}
    described = {name: part for name, part in given.items() if part is not None}
    others = {name: parts[name] for name, part in given.items() if part is None}
    _check_names(about, described, source)
    expected = {
        name: part.expected(about[name], like, source)
        for name, part in described.items()
    }
    _check_others(others, content.get("processes", 1), source)
    leaves = {name: leaves_of(about[name]) for name in expected}
    abstract = {
        name: _tree.abstract(tree, leaves[name]) for name, tree in expected.items()
    }
    try:
        with _context(_largest(leaves.values(), others)):
            loaded = ocp.load_checkpointables(folder, {**abstract, **others})
    except (OSError, KeyError, ValueError) as error:
        raise errors.DurabilityError(f"cannot read {folder}: {error}") from error
    restored = {name: loaded[name] for name in others}
    # Centers come first, because workers resume at them.
    for name in sorted(expected, key=lambda name: described[name].kind != "center"):
        tree = _tree.filled(expected[name], leaves[name], loaded[name])
        restored[name] = described[name].restore(about[name], tree)
    return restored


class Rotation:
    """Numbered checkpoints in a directory, of which the last ones are kept.

    Args:
      directory: directory for these checkpoints only, created if necessary.
      keep: number of checkpoints to keep.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        ocp = orbax()
        training = ocp.training
        # Compressing floats takes several times as long as writing them.
        context = _context()
        context.array.saving.use_compression = False
        self._checkpointer = training.Checkpointer(
            pathlib.Path(directory).resolve(),
            context=context,
            preservation_policy=training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def __str__(self) -> str:
        return str(self._checkpointer.directory)

    @property
    def latest(self) -> tuple[int, pathlib.Path] | None:
        """Number and path of the last complete checkpoint; None if there is none."""
        latest = self._checkpointer.latest
        return None if latest is None else (latest.step, pathlib.Path(latest.path))

    def check_is_shared(self) -> None:
        """Check that all processes have the same checkpoints, of one shared directory.

        Raises:
          DurabilityError: they do not.
        """
        path = pathlib.Path(self._checkpointer.directory)  # the first process made it
        latest = None if self.latest is None else self.latest[0]
        everyone = _of_all_processes("a checkpoint", lambda: [path.exists(), latest])
        if any(other != everyone[0] for other in everyone):
            raise errors.DurabilityError(
                f"all processes of a worker need one shared directory, but in {self} "
                f"they find [whether it exists, number of the last checkpoint]: "
                f"{everyone}"
            )

    def write(self, number: int, **parts: Any) -> None:
        """Write a checkpoint, with a number higher than those of all earlier ones.

        Raises the errors of `save`.
        """
        saved = checkpointables(**parts)
        try:
            self._checkpointer.save_checkpointables(number, saved, force=True)
        except OSError as error:
            raise errors.DurabilityError(f"cannot write to {self}: {error}") from error

    def close(self) -> None:
        """Release Orbax's checkpointer."""
        self._checkpointer.close()


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """Return the description of a checkpoint, with those of its parts by name.

    Raises:
      DurabilityError: there is no checkpoint, or agn_optax did not write it.
    """
    try:
        loaded = orbax().load_checkpointables(folder, {ABOUT: None})
        content = json.loads(loaded[ABOUT]["json"])
    except (OSError, KeyError, ValueError) as error:
        raise errors.DurabilityError(
            f"there is no checkpoint of agn_optax in {folder}: {error}"
        ) from error
    if content["format"] != _FORMAT:
        raise errors.DurabilityError(
            f"{folder} was written by agn_optax {content['release']}, in a format that "
            f"{__version__} does not read"
        )
    return content


def orbax() -> Any:
    """Return Orbax's API, version 1.

    Raises:
      MissingExtraError: Orbax is not installed.
    """
    extras.require("flax", "orbax.checkpoint")
    from orbax.checkpoint import v1  # noqa: PLC0415 slow to import, optional extra

    return v1


def _context(largest: int | None = None) -> Any:
    """Return options of Orbax, to save, or to load arrays of this size at most."""
    context = orbax().Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    if largest is not None:
        # Orbax counts whole arrays, also if a process needs only a shard.
        context.memory.read_concurrent_bytes = max(_READ_BYTES, largest)
    return context


def _largest(leaves: Iterable[Sequence[Leaf]], others: Mapping[str, Any]) -> int | None:
    """Return the size of the largest array in bytes; None if it is not known."""
    if any(value is None for value in others.values()):  # loads it as it was saved
        return None
    arrays = [*itertools.chain(*leaves), *jax.tree.leaves(dict(others))]
    return max(
        (
            math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
            for array in arrays
            if hasattr(array, "dtype") and not trees.is_key(array)
        ),
        default=0,
    )


def _of_all_processes(what: str, value: Callable[[], Any]) -> list[Any]:
    """Return what a function returns in each process of this job, in their order."""
    count, own = jax.process_count(), value()
    if count == 1:
        return [own]
    processes = agreement.of_job(tuple(range(count)), "checkpoint")
    return processes.gather(own, _TIMEOUT, what)


def as_part(value: Any) -> Part | None:
    """Return the part for a user's object; None for one that Orbax saves directly."""
    if isinstance(value, Part):
        return value
    first, *rest = value if isinstance(value, tuple) and value else (value,)
    if isinstance(first, Worker):
        return WorkerPart(first, *rest)
    if isinstance(first, LocalCenter):
        return CenterPart(first)
    if isinstance(first, Towers):
        if len(rest) != 1:
            raise errors.InvalidTypeError(
                "towers are saved and loaded with their state: (towers, state), got "
                f"{check.show(value)}"
            )
        return TowersPart(first, *rest)
    return None


def _check_others(others: Mapping[str, Any], saved_processes: int, source: str) -> None:
    """Check that this number of processes can load what is not a part.

    Raises:
      InvalidArgumentError: it cannot.
    """
    kind = orbax().handlers.StatefulCheckpointable
    own = [name for name, value in others.items() if isinstance(value, kind)]
    if own and saved_processes != jax.process_count():
        combinations.reject(
            "another number of processes",
            "an object that each process saves by itself",
            f"{own} in {source} of {saved_processes} processes, to be loaded by "
            f"{jax.process_count()}",
        )


def _check_names(
    about: Mapping[str, Any], parts: Mapping[str, Part], source: str
) -> None:
    """Check that requested parts were saved, and that no required part is missing.

    Raises:
      InvalidArgumentError, TreeMismatchError: see `load`.
    """
    for name, part in parts.items():
        kind = about[name]["kind"] if name in about else None
        if kind != part.kind:
            has = ", ".join(f"{name!r} ({a['kind']})" for name, a in about.items())
            raise errors.InvalidArgumentError(
                f"{source} must have a {part.kind} {name!r}, got {has or 'nothing'}"
            )
    kinds = {part.kind for part in parts.values()}
    for kind in ("worker", "center"):
        saved = {name for name, a in about.items() if a["kind"] == kind}
        if "worker" in kinds and not saved <= parts.keys():
            missing = sorted(saved - parts.keys())
            raise errors.TreeMismatchError(
                f"{missing} ({kind}) of {source} must be given as well: workers can "
                "only be loaded together, and with their center"
            )
