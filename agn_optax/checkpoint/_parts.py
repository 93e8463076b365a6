"""The parts of a checkpoint: workers, centers and towers.

Each part has a description in JSON and a tree of arrays, and is restored from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import (
    Description,
    Leaf,
    check,
    combinations,
    description,
    trees,
)
from agn_optax.center import CenterState, LocalCenter
from agn_optax.checkpoint import _tree
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule, difference, fingerprint
from agn_optax.towers import Towers, common_leaves
from agn_optax.worker import (
    FragmentState,
    ParamShardings,
    Worker,
    WorkerState,
    shardings_of,
)

PyTree = Any
Json = dict[str, Any]


class WorkerPart:
    """A worker, with the parameters and state to save."""

    kind = "worker"

    def __init__(self, worker: Worker, *loop: PyTree) -> None:
        self._worker, self._loop = worker, loop

    def to_save(self) -> tuple[Json, PyTree]:
        """Return the description and the arrays to save."""
        worker = self._worker
        saved = worker.save(*self._loop)
        _shardings_in_job(worker, saved.params)
        about = {
            "worker": worker.name,
            "rule": dict(fingerprint(worker.center.rule)),
            "resume_token": worker.resume_token,
            "containers": trees.describe(saved.params).structure,
            "fragment_count": len(worker.fragments or ()),
            "fragments": [f._replace(anchor=None)._asdict() for f in saved.fragments],
            "turn": saved.turn,
        }
        anchors = [fragment.anchor for fragment in saved.fragments]
        return about, {"params": saved.params, "state": saved.state, "anchors": anchors}

    def expected(self, about: Json, like: PyTree, source: str) -> PyTree:
        """Check that a saved part matches, and return the abstract tree to load.

        Args:
          about: the saved description.
          like: parameters with the containers and shardings to use; None for the saved
            containers.
          source: description of the checkpoint for error texts.

        Raises:
          RuleMismatchError, TreeMismatchError: the saved part does not match; the error
            says why.
        """
        worker, leaves = self._worker, leaves_of(about)
        name, fragments = f"worker {worker.name!r}", worker.fragments
        shardings = _shardings_in_job(worker, like)
        _check_rule(about, worker.center.rule, source)
        count, saved_count = len(fragments or ()), about["fragment_count"]
        if count != saved_count:
            raise errors.TreeMismatchError(
                f"{name} has {count or 'no'} fragments, and the worker in {source} has "
                f"{saved_count or 'none'}"
            )
        params = _params(about, like, leaves)
        split = [params] if fragments is None else fragments.divide(params).cut(params)
        anchors = []
        for f, fragment in enumerate(split):
            saved = _under(f"['anchors'][{f}]", leaves)
            # Anchors have the dtype of the center, which may be wider.
            anchors.append(_with_dtypes(fragment, saved) if saved else None)
        state = jax.eval_shape(worker.tx.init, params)
        tree = {"params": params, "state": state, "anchors": anchors}
        _check_same(_tree.describe(tree), leaves, name, source)
        # A process loads only its own shards.
        return tree if shardings is None else shardings.placed(tree)

    def restore(self, about: Json, tree: PyTree) -> Any:
        """Restore the part.

        Args:
          about: the saved description.
          tree: the saved arrays, in the containers that `expected` returned.
        """
        return self.restore_worker(about, tree, token=None)

    def restore_worker(self, about: Json, tree: PyTree, token: Any) -> Any:
        """Restore the worker in the session of ``token``, or in a new one for None."""
        pairs = zip(about["fragments"], tree["anchors"], strict=True)
        fragments = tuple(_fragment_state(numbers, anchor) for numbers, anchor in pairs)
        saved = WorkerState(tree["params"], tree["state"], fragments, about["turn"])
        try:
            return self._worker.restore(saved, resume_token=token)
        except errors.WorkerStateError as error:
            raise errors.WorkerStateError(
                f"worker {self._worker.name!r} cannot resume from its checkpoint: "
                f"{error}"
            ) from error


class CenterPart:
    """A center in this process; the methods are those of `WorkerPart`."""

    kind = "center"

    def __init__(self, center: LocalCenter) -> None:
        self.center = center

    def to_save(self) -> tuple[Json, PyTree]:
        saved = self.center.save()._asdict()
        about = {
            "rule": dict(fingerprint(self.center.rule)),
            "version": int(saved.pop("version")),
            "containers": trees.describe(saved["params"]).structure,
        }
        return about, saved

    def expected(self, about: Json, like: PyTree, source: str) -> PyTree:
        center, leaves = self.center, leaves_of(about)
        _check_rule(about, center.rule, source)
        if center.core.is_initialized:
            raise errors.AlreadyInitializedError(
                f"the center already has parameters, at version {center.version}: load "
                "into a new one, LocalCenter(rule)"
            )
        rule, saved = center.rule, _under("['params']", leaves)
        params = _with_dtypes(_params(about, like, leaves), saved)
        state = rounds.center_state_like(rule, params)
        tree = {"params": params, "center_state": state}
        _check_same(_tree.describe(tree), leaves, "the center", source)
        return tree

    def restore(self, about: Json, tree: PyTree) -> LocalCenter:
        self.center.core.restore(CenterState(**tree, version=about["version"]))
        return self.center


class TowersPart:
    """Towers with their state; the methods are those of `WorkerPart`."""

    kind = "towers"

    def __init__(self, towers: Towers, state: PyTree) -> None:
        self._towers, self._state = towers, state

    def to_save(self) -> tuple[Json, PyTree]:
        towers = self._towers
        # Workers differ between their exchanges; the towers of one worker are equal.
        has_rows = towers.workers > 1
        state = self._state if has_rows else towers.unreplicate(self._state)
        about: Json = {
            "mesh": {name: int(size) for name, size in towers.mesh.shape.items()},
            "worker_axis": towers.worker_axis,
            "has_rows": has_rows,  # whether leaves have a row for each tower
        }
        return about, {"state": state}

    def expected(self, about: Json, like: PyTree, source: str) -> PyTree:
        del like
        towers, has_rows = self._towers, about["has_rows"]
        mesh, saved_mesh = dict(towers.mesh.shape), about["mesh"]
        is_same = mesh == saved_mesh if has_rows else towers.workers == 1
        if not is_same:
            raise errors.TreeMismatchError(
                f"{source} has workers={saved_mesh[about['worker_axis']]} on mesh "
                f"{saved_mesh}, and these towers have workers={towers.workers} on mesh "
                f"{mesh}: several workers' states need the same mesh, and the state of "
                "one worker needs workers=1. Load onto such towers, of CPU devices "
                "for example, and continue with towers.replicate(old.unreplicate(...))"
            )
        tree = {"state": self._state if has_rows else towers.unreplicate(self._state)}
        paths = {f"['state']{path}" for path in common_leaves(self._state)}

        def comparable(leaves: Sequence[Leaf]) -> list[Leaf]:
            # On another number of towers, other leaves, such as parts of a center,
            # have other shapes.
            return [
                leaf if has_rows or leaf.path in paths else leaf._replace(shape=())
                for leaf in leaves
            ]

        expected, saved = _tree.describe(tree), leaves_of(about)
        _check_same(
            comparable(expected), comparable(saved), "the towers' state", source
        )
        return tree

    def restore(self, about: Json, tree: PyTree) -> PyTree:
        if not about["has_rows"]:
            return self._towers.replicate(tree["state"])
        return jax.tree.map(
            lambda rows, new: jax.device_put(rows, new.sharding),
            *(tree["state"], self._state),
        )


Part = WorkerPart | CenterPart | TowersPart


def leaves_of(about: Json) -> list[Leaf]:
    """Return the descriptions of the saved leaves."""
    return [Leaf(path, dtype, tuple(shape)) for path, dtype, shape in about["leaves"]]


def _under(path: str, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the saved leaves under a path."""
    return [leaf for leaf in leaves if leaf.path.startswith(path)]


def _fragment_state(numbers: Json, anchor: PyTree) -> FragmentState:
    """Return the state of a fragment, from its numbers in JSON and its anchor."""
    state = FragmentState(**numbers | {"anchor": anchor})
    if isinstance(version := state.anchor_version, list):
        return state._replace(anchor_version=tuple(version))
    return state


def _shardings_in_job(worker: Worker, params: PyTree) -> ParamShardings | None:
    """Return the shardings of parameters, in a job with which Orbax can save them."""
    shardings, job = shardings_of(params), jax.process_count()
    processes = [jax.process_index()] if shardings is None else [*shardings.processes]
    if len(processes) < job:
        combinations.reject(
            "a checkpoint",
            "a worker of a part of its job's processes",
            f"worker {worker.name!r} of processes {processes}, in a job of {job}",
        )
    return shardings


def _check_rule(about: Json, rule: Rule, source: str) -> None:
    if other := difference(about["rule"], rule):
        raise errors.RuleMismatchError(f"{source} was saved with another rule: {other}")


def _params(about: Json, like: PyTree, leaves: Sequence[Leaf]) -> PyTree:
    """Return the abstract parameters: those of ``like``, or as they were saved."""
    if like is not None:
        check.float_leaves(like, "like")
        return jax.eval_shape(lambda: like)
    abstract = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
        for leaf in _under("['params']", leaves)
    ]
    if about["containers"] is None:
        raise errors.MissingArgumentError(
            "the saved parameters are in containers that are not dicts, lists and "
            "tuples: give load(..., like=params) a tree with the same containers"
        )
    return description.rebuild(about["containers"], iter(abstract))


def _with_dtypes(params: PyTree, leaves: Sequence[Leaf]) -> PyTree:
    """Return an abstract tree like ``params``, with the dtypes of saved leaves."""
    arrays, treedef = jax.tree.flatten(params)
    if len(arrays) != len(leaves):
        return params  # `_check_same` names the difference
    abstract = [
        jax.ShapeDtypeStruct(array.shape, jnp.dtype(leaf.dtype))
        for array, leaf in zip(arrays, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, abstract)


def _check_same(
    expected: Sequence[Leaf], saved: Sequence[Leaf], name: str, source: str
) -> None:
    different = Description(expected).difference(
        Description(saved), f"{name} has", f"{source} has"
    )
    if different is not None:
        raise errors.TreeMismatchError(
            f"the model or the optimizer differs from the saved one: {different}"
        )
