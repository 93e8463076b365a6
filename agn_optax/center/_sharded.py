"""A center in shards: one center of several, each with its part of the parameters.

Leaves are assigned by size, and those above a server's share are cut along their first
dimension (`parts.balanced`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax._internal import check, in_background, trees
from agn_optax.center._departures import Departures
from agn_optax.center._protocol import Center, Snapshot
from agn_optax.round import elementwise, parts

PyTree = Any


class ShardedCenter:
    """Several centers as one; made by ``agn_optax.service.connect`` of many addresses.

    A worker pulls from all and exchanges with all of them in parallel. Each shard is
    atomic and counts by itself: a version is a tuple, one number for each, staleness is
    that of the stalest part, and a message that reached some shards only reaches the
    others when it is repeated.

    Args:
      centers: the shards, in an order that is the same for every worker.
      like: a tree with the containers in which `pull` returns the parameters.

    Raises:
      InvalidArgumentError: there are no centers, or their rules differ.
    """

    def __init__(self, centers: Sequence[Center], *, like: PyTree = None) -> None:
        if not centers or any(c.rule.name != centers[0].rule.name for c in centers):
            raise errors.InvalidArgumentError(
                "a center in shards needs one or more centers of one rule, got "
                f"{[c.rule.name for c in centers]}"
            )
        self.rule = centers[0].rule
        self.centers = tuple(centers)
        self._like = like
        self._closed = False
        # An exchange that has not been answered by every shard yet, by worker.
        self._answers: dict[str, dict[int, Future[Snapshot]]] = {}
        self._departures = Departures()
        self._checked: Any = None  # the kind of tree that the rule was checked with
        self._model: PyTree = None  # the center, abstract, once it is known

    def join(
        self, worker: str, params: PyTree = None, *, timeout: float | None = None
    ) -> None:
        """A worker is there: see `Center.join`."""
        own: list[PyTree] = [None] * len(self.centers)
        if params is not None:
            self._check_model(params, "params")
            own = self._cut(params)
        try:
            self._all(
                lambda center, part: center.join(worker, part, timeout=timeout), own
            )
        except BaseException:
            self.leave(worker)
            raise
        self._answers.pop(worker, None)

    def leave(self, worker: str) -> None:
        """A worker goes: see `Center.leave`."""
        self._departures.add(worker)
        if not self._closed:  # by which it has left
            self._all(lambda center, _: center.leave(worker), self.centers)

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives every shard its part of the parameters: see `Center.initialize`."""
        check.float_leaves(params, "params")
        # Who is the chief of the first shard is the chief of all.
        for center, part in zip(self.centers, self._cut(params), strict=True):
            center.initialize(part, worker=worker)
        return self.pull()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once all shards are initialized."""
        return self._join(self._all(lambda c, _: c.wait(timeout), self.centers))

    def pull(self) -> Snapshot:
        """The center as it is: every part is one version of its shard."""
        return self._join(self._all(lambda c, _: c.pull(), self.centers))

    def exchange(
        self,
        contribution: PyTree,
        *,
        anchor_version: Any,
        worker: str,
        steps: int = 0,
    ) -> Snapshot:
        """Gives every shard its part of a contribution: see `Center.exchange`."""
        versions, departures = anchor_version, self._departures.number(worker)
        if not isinstance(versions, tuple) or len(versions) != len(self.centers):
            raise errors.InvalidArgumentError(
                f"anchor_version must be a tuple of {len(self.centers)} versions, one "
                f"for each shard, got {versions!r}"
            )
        self._check_model(contribution, "contribution")
        own = self._cut(contribution)
        if not _is_finite(contribution):  # one shard would refuse it, another take it
            raise errors.MessageRefusedError(
                "the message is not finite; the center stays as it was. Start again "
                "from the center, with a smaller learning rate or with clipping"
            )
        self._departures.check(worker, departures)
        answers = self._answers.setdefault(worker, {})
        for shard, center in enumerate(self.centers):
            # Repeated where it failed; one that was interrupted may be on its way yet.
            if shard not in answers or _failed(answers[shard]):
                exchange = functools.partial(
                    center.exchange,
                    own[shard],
                    anchor_version=versions[shard],
                    worker=worker,
                    steps=steps,
                )
                answers[shard] = in_background(exchange, f"{worker} shard {shard}")
        wait(answers.values())
        try:
            snapshots = [answers[shard].result() for shard in sorted(answers)]
        except errors.CenterUnreachableError:
            raise
        except errors.AgnOptaxError:  # which is not sent again
            self._answers.pop(worker, None)
            raise
        self._answers.pop(worker, None)
        return self._join(snapshots)

    def close(self) -> None:
        """Closes the connections to all shards."""
        self._closed = True
        for center in self.centers:
            if hasattr(center, "close"):
                center.close()

    def __enter__(self) -> ShardedCenter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_model(self, tree: PyTree, what: str) -> None:
        """``tree`` is like the center, whose parts would differ in strange places."""
        if self._model is None:
            with contextlib.suppress(errors.NotInitializedError):
                self.pull()
        if self._model is not None:
            check.float_leaves(tree, what)
            check.same_tree(tree, self._model, what, "center")

    def _all(self, call: Callable[[Center, Any], Any], each: Any) -> list[Any]:
        """``call(center, x)`` of every shard at once; raises when all have ended."""
        if self._closed:
            raise errors.CenterClosedError(
                "the connections to the shards of this center are closed"
            )
        futures = [
            in_background(functools.partial(call, center, x), "agn-optax shard")
            for center, x in zip(self.centers, each, strict=True)
        ]
        wait(futures)
        return [future.result() for future in futures]

    def _cut(self, tree: PyTree) -> list[PyTree]:
        divided = parts.balanced(tree, len(self.centers))
        self._check_rule(tree, divided)
        return divided.cut(tree)

    def _check_rule(self, tree: PyTree, divided: parts.Parts) -> None:
        """The rule can work on parts: asked once for every kind of tree."""
        kind = trees.kinds(tree)
        if self._checked != kind:
            whole = trees.abstract(tree)
            elementwise.check(self.rule, whole, jax.eval_shape(divided.cut, whole))
            self._checked = kind

    def _join(self, snapshots: Sequence[Snapshot]) -> Snapshot:
        staleness = [s.staleness for s in snapshots if s.staleness is not None]
        norms = [s.norm for s in snapshots if s.norm is not None]
        whole = parts.join([snapshot.params for snapshot in snapshots])
        if self._like is not None:
            treedef = jax.tree.structure(self._like)
            whole = jax.tree.unflatten(treedef, jax.tree.leaves(whole))
        if self._model is None:
            self._model = jax.eval_shape(lambda: whole)
        return Snapshot(
            whole,
            tuple(snapshot.version for snapshot in snapshots),
            max(staleness, default=None),
            np.sqrt(np.sum(np.square(norms))) if norms else None,
            all(snapshot.applied for snapshot in snapshots),
        )


def _failed(future: Future[Any]) -> bool:
    return future.done() and future.exception() is not None


@jax.jit
def _is_finite(tree: PyTree) -> jax.Array:
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, finite, jnp.array(True))
