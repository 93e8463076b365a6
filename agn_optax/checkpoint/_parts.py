"""The parts of a checkpoint: workers, centers and towers.

Each part has a description in JSON and a tree of arrays, and can be restored from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import Description, Leaf, check, description, trees
from agn_optax.center import CenterState, LocalCenter
from agn_optax.checkpoint import _tree
from agn_optax.rules import Rule, difference, fingerprint
from agn_optax.towers import Towers, common_leaves, unreplicate, with_cut_of
from agn_optax.worker import PartState, Worker, WorkerState

PyTree = Any
Json = dict[str, Any]


class WorkerPart:
    """A worker, with the parameters and state to save."""

    kind = "worker"

    def __init__(self, worker: Worker, *loop: PyTree) -> None:
        self._worker, self._loop = worker, loop

    def taken(self) -> tuple[Json, PyTree]:
        """Return the description and the arrays to save."""
        worker = self._worker
        saved = worker.save(*self._loop)
        about = {
            "worker": worker.name,
            "rule": dict(fingerprint(worker.center.rule)),
            "resume_token": worker.resume_token,
            "containers": trees.describe(saved.params).structure,
            "fragments": len(worker.fragments or ()),
            "parts": [part._replace(anchor=None)._asdict() for part in saved.parts],
            "turn": saved.turn,
        }
        anchors = [part.anchor for part in saved.parts]
        return about, {"params": saved.params, "state": saved.state, "anchors": anchors}

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
        worker, leaves = self._worker, leaves_of(about)
        what, fragments = f"worker {worker.name!r}", worker.fragments
        _check_rule(about, worker.center.rule, where)
        own, saved = len(fragments or ()), about["fragments"]
        if own != saved:
            raise errors.TreeMismatchError(
                f"{what} exchanges by {own or 'no'} fragments, and the worker in "
                f"{where} by {saved or 'none'}"
            )
        params = _params(about, like, leaves)
        cut = [params] if fragments is None else fragments.divide(params).cut(params)
        # Anchors have the dtype of the center, which may be wider.
        anchors = [_under(f"['anchors'][{p}]", leaves) for p in range(len(cut))]
        tree = {
            "params": params,
            "state": jax.eval_shape(worker.tx.init, params),
            "anchors": [
                _of_dtypes(part, anchor) if anchor else None
                for part, anchor in zip(cut, anchors, strict=True)
            ],
        }
        _check_same(_tree.describe(tree), leaves, what, where)
        return tree

    def go_on(self, about: Json, tree: PyTree) -> Any:
        """Restore the part.

        Args:
          about: the saved description.
          tree: the saved arrays, in the containers of `expected`.
        """
        return self.restored(about, tree, token=None)

    def restored(self, about: Json, tree: PyTree, token: Any) -> Any:
        """Restore the worker, in a new session or in that of ``token``."""
        pairs = zip(about["parts"], tree["anchors"], strict=True)
        parts = tuple(_part_state(numbers, anchor) for numbers, anchor in pairs)
        saved = WorkerState(tree["params"], tree["state"], parts, about["turn"])
        try:
            return self._worker.restore(saved, resume_token=token)
        except errors.WorkerStateError as error:
            raise errors.WorkerStateError(
                f"worker {self._worker.name!r} cannot go on from its checkpoint: "
                f"{error}"
            ) from error


class CenterPart:
    """A center in this process, or a shard; the methods are those of `WorkerPart`.

    Args:
      center: the center.
      cut: whole parameters -> those of this shard.
    """

    kind = "center"

    def __init__(
        self, center: LocalCenter, cut: Callable[[PyTree], PyTree] = lambda like: like
    ) -> None:
        self.center, self._cut = center, cut

    def taken(self) -> tuple[Json, PyTree]:
        saved = self.center.save()._asdict()
        about = {
            "rule": dict(fingerprint(self.center.rule)),
            "version": int(saved.pop("version")),
            "containers": trees.describe(saved["params"]).structure,
        }
        return about, saved

    def expected(self, about: Json, like: PyTree, where: str) -> PyTree:
        center, leaves = self.center, leaves_of(about)
        _check_rule(about, center.rule, where)
        if center.core.is_initialized:
            raise errors.AlreadyInitializedError(
                f"the center has parameters already, at version {center.version}: load "
                "into a new one, LocalCenter(rule)"
            )
        like = None if like is None else self._cut(like)
        params = _of_dtypes(_params(about, like, leaves), _under("['params']", leaves))
        rule = center.rule
        tree = {
            "params": params,
            "center_state": jax.eval_shape(rule.center.init, params),
            "broadcast": jax.eval_shape(
                functools.partial(rounds.init_broadcast, rule), params
            ),
        }
        _check_same(_tree.describe(tree), leaves, "the center", where)
        return tree

    def go_on(self, about: Json, tree: PyTree) -> LocalCenter:
        self.center.core.restore(CenterState(**tree, version=about["version"]))
        return self.center


class TowersPart:
    """Towers with their state; the methods are those of `WorkerPart`."""

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
        names = {f"['state']{path}" for path in common_leaves(self._state)}

        def comparable(leaves: Sequence[Leaf]) -> list[Leaf]:
            # The shapes of other leaves, such as parts of a center, depend on the mesh.
            shapes = [
                leaf.shape[has_rows:] if leaf.path in names else () for leaf in leaves
            ]
            pairs = zip(leaves, shapes, strict=True)
            return [leaf._replace(shape=shape) for leaf, shape in pairs]

        own, saved = comparable(_tree.describe(tree)), comparable(leaves_of(about))
        _check_same(own, saved, "the towers' state", where)
        return tree

    def go_on(self, about: Json, tree: PyTree) -> PyTree:
        state, towers, mesh = tree["state"], self._towers, about["mesh"]
        if about["has_rows"] and dict(towers.mesh.shape) == mesh:
            return jax.tree.map(
                lambda rows, own: jax.device_put(rows, own.sharding), state, self._state
            )
        state = with_cut_of(state, mesh)
        return towers.replicate(
            unreplicate(state, mesh) if about["has_rows"] else state
        )


Part = WorkerPart | CenterPart | TowersPart


def leaves_of(about: Json) -> list[Leaf]:
    """Return the descriptions of the saved leaves."""
    return [Leaf(path, dtype, tuple(shape)) for path, dtype, shape in about["leaves"]]


def _under(path: str, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the saved leaves under a path."""
    return [leaf for leaf in leaves if leaf.path.startswith(path)]


def _part_state(numbers: Json, anchor: PyTree) -> PartState:
    """Return the state of a part, of its numbers as JSON has them."""
    state = PartState(**numbers | {"anchor": anchor})
    if isinstance(version := state.anchor_version, list):
        return state._replace(anchor_version=tuple(version))
    return state


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
    """Return an abstract tree like ``params``, with the dtypes of saved leaves."""
    own, treedef = jax.tree.flatten(params)
    if len(own) != len(leaves):
        return params  # `_check_same` names the difference
    made = [
        jax.ShapeDtypeStruct(x.shape, jnp.dtype(leaf.dtype))
        for x, leaf in zip(own, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, made)


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
