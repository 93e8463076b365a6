"""The parts of a checkpoint: workers, centers and towers.

Each part has a description in JSON and a tree of arrays, and can be restored from them.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import Description, Leaf, check, description, trees
from agn_optax.center import CenterState, LocalCenter
from agn_optax.checkpoint import _tree
from agn_optax.rules import Rule, difference, fingerprint
from agn_optax.towers import Towers, alike, cut_for, unstacked
from agn_optax.worker import PartState, Worker, WorkerState

PyTree = Any
Json = dict[str, Any]


class Part(abc.ABC):
    """A part of a checkpoint, to be saved or restored."""

    kind: str

    @abc.abstractmethod
    def taken(self) -> tuple[Json, PyTree]:
        """Return the description and the arrays to save."""

    @abc.abstractmethod
    def expected(self, about: Json, like: PyTree, where: str) -> PyTree:
        """Check that a saved part fits, and return a tree with its containers.

        Args:
          about: the saved description.
          like: parameters with the containers to use; None for the saved containers.
          where: description of the checkpoint for messages.

        Raises:
          RuleMismatchError, TreeMismatchError: the saved part does not fit; the message
            says why.
        """

    @abc.abstractmethod
    def go_on(self, about: Json, tree: PyTree, *, has_center: bool) -> Any:
        """Restore the part.

        Args:
          about: the saved description.
          tree: the saved arrays, in the containers of `expected`.
          has_center: whether the checkpoint has the center, too.
        """


class WorkerPart(Part):
    """A worker, with the parameters and state to save."""

    kind = "worker"

    def __init__(self, worker: Worker, *loop: PyTree, keeps_life: bool = False) -> None:
        self._worker, self._loop, self._keeps_life = worker, loop, keeps_life

    def taken(self) -> tuple[Json, PyTree]:
        worker = self._worker
        saved = worker.save(*self._loop)
        about = {
            "worker": worker.name,
            "rule": _rule(worker.center.rule),
            "life": worker.life,
            "containers": trees.describe(saved.params).structure,
            "fragments": len(worker.fragments or ()),
            "parts": [_numbers(part) for part in saved.parts],
            "turn": saved.turn,
        }
        anchors = [part.anchor for part in saved.parts]
        anchor = anchors[0] if worker.fragments is None else anchors
        return about, {"params": saved.params, "state": saved.state, "anchor": anchor}

    def expected(self, about: Json, like: PyTree, where: str) -> PyTree:
        worker, leaves = self._worker, leaves_of(about)
        what = f"worker {worker.name!r}"
        _check_rule(about, worker.center.rule, where)
        here = worker.fragments
        own, theirs = len(here or ()), about["fragments"]
        if own != theirs:
            raise errors.TreeMismatchError(
                f"{what} exchanges by {own or 'no'} fragments, and the worker in "
                f"{where} by {theirs or 'none'}"
            )
        params = _params(about, like, leaves)

        def anchor_of(part: PyTree, path: str) -> PyTree:
            # In the dtype of the center, which may be wider.
            kept = _under(path, leaves)
            return _of_dtypes(part, kept) if kept else None

        anchor = anchor_of(params, "['anchor']")
        if here is not None:
            parts = enumerate(here.divide(params).cut(params))
            anchor = [anchor_of(part, f"['anchor'][{p}]") for p, part in parts]
        tree = {
            "params": params,
            "state": jax.eval_shape(worker.tx.init, params),
            "anchor": anchor,
        }
        _check_leaves(tree, leaves, what, where)
        return tree

    def go_on(self, about: Json, tree: PyTree, *, has_center: bool) -> Any:
        saved = self._saved(about, **tree)
        # A center that was saved with the worker does not know its session.
        life = about["life"] if self._keeps_life and not has_center else None
        if life is not None and about["worker"] != self._worker.name:
            raise errors.WorkerStateError(
                f"this checkpoint is of worker {about['worker']!r}, and the center "
                "knows its exchanges by that name: give worker "
                f"{self._worker.name!r} the same name"
            )
        try:
            return self._worker.restore(saved, life=life)
        except errors.WorkerStateError as error:
            raise errors.WorkerStateError(
                f"worker {self._worker.name!r} cannot go on from its checkpoint: "
                f"{error}"
            ) from error

    def _saved(self, about: Json, params: PyTree, state: PyTree, anchor: PyTree) -> Any:
        """Return the state that `Worker.save` returned."""
        anchors = [anchor] if self._worker.fragments is None else anchor
        parts = tuple(
            PartState(kept, **_counted(numbers))
            for kept, numbers in zip(anchors, about["parts"], strict=True)
        )
        return WorkerState(params, state, parts, about["turn"])


_NUMBERS = ("anchor_version", "local_steps", "exchanges", "weight", "pace")


def _numbers(saved: PartState) -> Json:
    """Return the fields of a part's state that are not arrays."""
    return {name: getattr(saved, name) for name in _NUMBERS}


def _counted(about: Json) -> Json:
    """Return the fields that `_numbers` saved."""
    numbers = {name: about[name] for name in _NUMBERS}
    if isinstance(version := numbers["anchor_version"], list):
        numbers["anchor_version"] = tuple(version)
    return numbers


class CenterPart(Part):
    """A center in this process."""

    kind = "center"

    def __init__(self, center: LocalCenter) -> None:
        self._center = center

    def taken(self) -> tuple[Json, PyTree]:
        saved = self._center.save()
        about = {
            "rule": _rule(self._center.rule),
            "version": int(saved.version),
            "containers": trees.describe(saved.params).structure,
        }
        kept = saved._asdict()
        del kept["version"]
        return about, kept

    def expected(self, about: Json, like: PyTree, where: str) -> PyTree:
        center, leaves = self._center, leaves_of(about)
        _check_rule(about, center.rule, where)
        if center.core.is_initialized:
            raise errors.AlreadyInitializedError(
                f"the center has parameters already, at version {center.version}: load "
                "into a new one, LocalCenter(rule)"
            )
        params = _of_dtypes(_params(about, like, leaves), _under("['params']", leaves))
        rule = center.rule
        tree = {
            "params": params,
            "center_state": jax.eval_shape(rule.center.init, params),
            "public": jax.eval_shape(
                functools.partial(rounds.init_public, rule), params
            ),
        }
        _check_leaves(tree, leaves, "the center", where)
        return tree

    def go_on(self, about: Json, tree: PyTree, *, has_center: bool) -> Any:
        del has_center
        self._center.core.restore(CenterState(**tree, version=about["version"]))
        return self._center


class TowersPart(Part):
    """Towers with their state, to be saved or restored."""

    kind = "towers"

    def __init__(self, towers: Towers, state: PyTree, *, elastic: bool) -> None:
        self._towers, self._state, self._elastic = towers, state, elastic

    def taken(self) -> tuple[Json, PyTree]:
        towers = self._towers
        mesh = {name: int(size) for name, size in towers.mesh.shape.items()}
        about: Json = {
            "mesh": mesh,
            "worker_axis": towers.worker_axis,
            "has_rows": towers.workers > 1,
        }
        # Workers differ between their exchanges; the towers of one worker are equal.
        is_one = towers.workers == 1
        state = towers.unreplicate(self._state) if is_one else self._state
        return about, {"state": state}

    def expected(self, about: Json, like: PyTree, where: str) -> PyTree:
        del like
        towers, mesh = self._towers, about["mesh"]
        here, there = dict(towers.mesh.shape), mesh[about["worker_axis"]]
        is_alike = here == mesh if about["has_rows"] else towers.workers == 1
        if not (is_alike or self._elastic):
            raise errors.TreeMismatchError(
                f"{where} has {there} workers, on a mesh {mesh}, and these towers have "
                f"{towers.workers}, on {here}: the workers' own states need the same "
                "number of workers. With elastic=True all go on from the center, and "
                "from the first worker's parameters and state"
            )
        has_rows = about["has_rows"]
        tree = {"state": self._state if has_rows else towers.unreplicate(self._state)}
        names = {f"['state']{path}" for path in alike(self._state)}
        own, theirs = (
            # The shapes of other leaves, such as parts of a center, depend on the mesh.
            [leaf if leaf.path in names else leaf._replace(shape=()) for leaf in leaves]
            for leaves in (_tree.describe(tree), leaves_of(about))
        )
        if has_rows:
            own, theirs = (
                [leaf._replace(shape=leaf.shape[1:]) for leaf in leaves]
                for leaves in (own, theirs)
            )
        _check_same(own, theirs, "the towers' state", where)
        return tree

    def go_on(self, about: Json, tree: PyTree, *, has_center: bool) -> Any:
        del has_center
        state, towers, mesh = tree["state"], self._towers, about["mesh"]
        if about["has_rows"] and dict(towers.mesh.shape) == mesh:
            return jax.tree.map(
                lambda rows, own: jax.device_put(rows, own.sharding), state, self._state
            )
        state = cut_for(state, mesh)
        return towers.replicate(unstacked(state, mesh) if about["has_rows"] else state)


def leaves_of(about: Json) -> list[Leaf]:
    """Return the descriptions of the saved leaves."""
    return [Leaf(path, dtype, tuple(shape)) for path, dtype, shape in about["leaves"]]


def _under(path: str, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the saved leaves under a path."""
    return [leaf for leaf in leaves if leaf.path.startswith(path)]


def _rule(rule: Rule) -> Json:
    return dict(fingerprint(rule))


def _check_rule(about: Json, rule: Rule, where: str) -> None:
    if other := difference(about["rule"], rule):
        raise errors.RuleMismatchError(f"{where} is of another rule: {other}")


def _params(about: Json, like: PyTree, leaves: Sequence[Leaf]) -> PyTree:
    """Return the abstract parameters: those of ``like``, or as they were saved."""
    if like is not None:
        check.float_leaves(like, "like")
        return jax.eval_shape(lambda: like)
    made = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
        for leaf in _under("['params']", leaves)
    ]
    if about["containers"] is None:
        raise errors.MissingArgumentError(
            "the saved parameters are in containers that are not dicts, lists and "
            "tuples: give load(..., like=params) a tree of the same kind"
        )
    return description.rebuild(about["containers"], iter(made))


def _of_dtypes(params: PyTree, leaves: Sequence[Leaf]) -> PyTree:
    """Return an abstract tree like ``params``, with the dtypes of the first leaves."""
    own, treedef = jax.tree.flatten(params)
    dtypes = [jnp.dtype(leaf.dtype) for leaf in leaves[: len(own)]]
    dtypes += [leaf.dtype for leaf in own[len(dtypes) :]]
    return jax.tree.unflatten(
        treedef,
        [jax.ShapeDtypeStruct(x.shape, d) for x, d in zip(own, dtypes, strict=True)],
    )


def _check_leaves(tree: PyTree, leaves: Sequence[Leaf], what: str, where: str) -> None:
    _check_same(_tree.describe(tree), leaves, what, where)


def _check_same(
    own: Sequence[Leaf], theirs: Sequence[Leaf], what: str, where: str
) -> None:
    different = Description(own).difference(
        Description(theirs), f"{what} has", f"{where} has"
    )
    if different is not None:
        raise errors.TreeMismatchError(
            f"this is another model, or another optimizer: {different}"
        )
