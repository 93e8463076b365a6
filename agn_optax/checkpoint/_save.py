"""Checkpoints of several things at once, with what tells them from others inside."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Awaitable, Mapping
from typing import Any

import jax

from agn_optax import errors
from agn_optax._internal import check, extras
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
ABOUT = "agn_optax"  # the name under which a checkpoint says what is in it
_FILE = "about.json"
_FORMAT = 1


def checkpointables(**parts: Any) -> dict[str, Any]:
    """What Orbax's own functions save of workers, centers and towers.

    For who has a `Checkpointer` of Orbax, or saves in the background; `save` gives it
    to ``save_checkpointables``.

    Args:
      **parts: by name: ``(worker, params, state)`` for a `Worker` in the middle of its
        loop, a `LocalCenter`, ``(towers, state)`` for state with a replica per tower;
        and anything else that Orbax saves, such as a pytree of arrays or a Grain
        iterator. What belongs together must stand still: no worker exchanges meanwhile.

    Returns:
      One checkpointable for each, and one named ``"agn_optax"`` that says what they
      are: rules by their fingerprints, and every leaf.

    Raises:
      InvalidArgumentError: a name is that one.
      WorkerStateError: a worker has not started, or has an exchange in flight.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> center = agn_optax.LocalCenter(agn_optax.rules.downpour(), jnp.ones(2))
      >>> sorted(agn_optax.checkpoint.checkpointables(center=center))
      ['agn_optax', 'center']
    """
    if ABOUT in parts:
        raise errors.InvalidArgumentError(f"the name {ABOUT!r} is taken; use another")
    saved, about = {}, {}
    for name, value in parts.items():
        part = as_part(value)
        if part is None:
            saved[name] = value
            continue
        said, tree = part.taken()
        said |= {"kind": part.kind, "leaves": _tree.describe(tree)}
        about[name], saved[name] = said, _tree.nested(tree)
    whole = {"format": _FORMAT, "release": __version__, "parts": about}
    return {**saved, ABOUT: _About(json.dumps(whole))}


def save(path: str | os.PathLike[str], **parts: Any) -> None:
    """Saves workers, centers, towers, and whatever goes with them, as one checkpoint.

    It is there whole or not at all, and Orbax alone can read it too: parameters are
    nested dictionaries under the names of the model.

    Args:
      path: a directory that is not there.
      **parts: as of `checkpointables`.

    Raises:
      InvalidArgumentError: there is something at ``path``.
      MissingExtraError: Orbax is not installed.
      DurabilityError: it cannot be written.

    Also raises what `checkpointables` does.

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
      ...     there = agn_optax.checkpoint.load(path, worker=worker, center=center)
      >>> params, state = there["worker"]
      >>> print(params["w"], center.version)
      [1. 1. 1.] 0
    """
    ocp, folder = orbax(), pathlib.Path(path).resolve()
    if folder.exists():
        raise errors.InvalidArgumentError(
            f"{folder} is there already: a checkpoint takes a directory of its own"
        )
    try:
        ocp.save_checkpointables(folder, checkpointables(**parts))
    except OSError as error:
        raise errors.DurabilityError(f"cannot write {folder}: {error}") from error


def load(
    path: str | os.PathLike[str],
    *,
    like: PyTree = None,
    elastic: bool = False,
    **parts: Any,
) -> dict[str, Any]:
    """Goes on from a checkpoint, after everything in it was compared with what is here.

    Args:
      path: as of `save`, or the ``path`` of a checkpoint of Orbax's `Checkpointer`.
      like: a tree with the containers of the parameters, for models whose containers
        are not dicts, lists and tuples.
      elastic: towers may be fewer or more than those that were saved, also where each
        is a worker: all go on from the center, with its optimizer's state, and from the
        first worker's parameters and inner state. (The towers of one data-parallel
        worker may always be.)
      **parts: by the names under which they were saved: a `Worker`; a `LocalCenter`
        that has no parameters yet; ``(towers, state)`` with state as a new run begins
        with it; anything else as Orbax's ``load_checkpointables`` takes it: a Grain
        iterator, a tree like the one that was saved, or None. If a worker is asked for,
        all of them must be, and the center that was saved with it. Others may be left
        out. A worker whose center was not saved begins another life there, and adopts
        at its next exchange what has become of the center; what it had sent after it
        was saved is in it, and is sent again (`Resumable` is for whoever minds).

    Returns:
      By name: ``(params, state)`` of a worker, with which to go on; the center; the
      towers' state; what Orbax has made of the others.

    Raises:
      RuleMismatchError: something was saved of another rule; names what differs.
      TreeMismatchError: it was another model, or another number of workers or towers;
        names the leaf, or the numbers.
      InvalidArgumentError: there is no such thing in the checkpoint.
      MissingExtraError: Orbax is not installed.
      DurabilityError: there is no checkpoint, or it cannot be read.

    Also raises what `Worker.restore` does.

    Example: see `save`.
    """
    ocp, folder = orbax(), pathlib.Path(path).resolve()
    where = f"the checkpoint in {folder}"
    about = read_about(folder)
    given = {name: as_part(value, elastic) for name, value in parts.items()}
    own = {name: part for name, part in given.items() if part is not None}
    _check_names(about, own, where)
    expected = {
        name: part.expected(about[name], like, where) for name, part in own.items()
    }
    others = {name: value for name, value in parts.items() if name not in own}
    abstract = {
        name: _tree.abstract(expected[name], leaves_of(about[name])) for name in own
    }
    try:
        kept = ocp.load_checkpointables(folder, {**abstract, **others})
    except (OSError, KeyError, ValueError) as error:
        raise errors.DurabilityError(f"cannot read {folder}: {error}") from error
    has_center = any(part.kind == "center" for part in own.values())
    there = {name: kept[name] for name in others}
    # Whoever goes on with a center finds it there.
    for name in sorted(own, key=lambda name: own[name].kind != "center"):
        tree = _tree.filled(expected[name], leaves_of(about[name]), kept[name])
        there[name] = own[name].go_on(about[name], tree, has_center=has_center)
    return there


class Rotation:
    """Numbered checkpoints in a directory, of which the last ones stay.

    Args:
      directory: of these alone; made if need be.
      keep: how many stay.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        ocp = orbax()
        training, options = ocp.training, ocp.options.ArrayOptions
        # To compress floating numbers takes several times as long as to write them.
        plain = options(saving=options.Saving(use_compression=False))
        self._kept = training.Checkpointer(
            pathlib.Path(directory).resolve(),
            context=ocp.Context(array_options=plain),
            preservation_policy=training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def __str__(self) -> str:
        return str(self._kept.directory)

    @property
    def latest(self) -> tuple[int, pathlib.Path] | None:
        """Number and path of the last one that is whole; None if there is none."""
        latest = self._kept.latest
        return None if latest is None else (latest.step, pathlib.Path(latest.path))

    def write(self, number: int, **parts: Any) -> None:
        """One more, with a higher number than those before.

        Raises what `save` does.
        """
        saved = checkpointables(**parts)
        try:
            self._kept.save_checkpointables(number, saved, force=True)
        except OSError as error:
            raise errors.DurabilityError(f"cannot write to {self}: {error}") from error

    def close(self) -> None:
        """Writes nothing more."""
        self._kept.close()


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """What a checkpoint says is in it, by name.

    Raises:
      DurabilityError: there is none, or it is not one of ours.
    """
    try:
        kept = orbax().load_checkpointables(folder, {ABOUT: _About()})
        whole = json.loads(kept[ABOUT].text)
    except (OSError, KeyError, ValueError) as error:
        raise errors.DurabilityError(
            f"there is no checkpoint of agn_optax in {folder}: {error}"
        ) from error
    if whole["format"] != _FORMAT:
        raise errors.DurabilityError(
            f"{folder} was written by agn_optax {whole['release']}, in a format that "
            f"{__version__} does not read"
        )
    return whole["parts"]


def orbax() -> Any:
    """Orbax's API, version 1.

    Raises:
      MissingExtraError: it is not installed.
    """
    extras.require("flax", "orbax.checkpoint")
    from orbax.checkpoint import v1  # noqa: PLC0415 heavy, an extra of its own

    return v1


def as_part(value: Any, elastic: bool = False) -> Part | None:
    """What a user gives to save or to load; None for what Orbax knows by itself."""
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
        return TowersPart(first, *rest, elastic=elastic)
    return None


class _About:
    """A file that says what is in a checkpoint; Orbax asks it to write and to read."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            folder = await directory.await_creation()
            if jax.process_index() == 0:
                (folder / _FILE).write_text(self.text)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            self.text = (directory / _FILE).read_text()

        return read()


def _check_names(
    about: Mapping[str, Any], parts: Mapping[str, Part], where: str
) -> None:
    """What is asked for was saved, and all of it that belongs together.

    Raises:
      InvalidArgumentError, TreeMismatchError: see `load`.
    """
    for name, part in parts.items():
        kind = about[name]["kind"] if name in about else None
        if kind != part.kind:
            has = ", ".join(f"{name!r} ({of['kind']})" for name, of in about.items())
            raise errors.InvalidArgumentError(
                f"{name!r} is to be a {part.kind}; {where} has {has or 'nothing'}"
            )
    kinds = {part.kind for part in parts.values()}
    for kind in ("worker", "center"):
        saved = {name for name, of in about.items() if of["kind"] == kind}
        if "worker" in kinds and not saved <= parts.keys():
            missing = sorted(saved - parts.keys())
            raise errors.TreeMismatchError(
                f"{where} has {len(saved)} {kind}s, and of these {missing} are not "
                f"asked for: workers go on together, and with their center"
            )
