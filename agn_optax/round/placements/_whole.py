"""Whole centers on every tower: one for all workers, or one for each worker."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, combinations, trees
from agn_optax.round import _collectives
from agn_optax.round.placements._layout import (
    CombineMessages,
    CombineMethod,
    Layout,
    shaped,
)
from agn_optax.round.placements._stored import StoredCenter, WholeCenter
from agn_optax.rules import Rule, robust

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Whole(Layout):
    """One center, whole on every tower: a part or piece is the whole center."""

    kind: ClassVar[str] = WholeCenter.kind

    def cut_part(self, tree: PyTree) -> PyTree:
        return jax.tree.map(jnp.asarray, tree)

    def cut_piece(self, tree: PyTree) -> PyTree:
        return jax.tree.map(jnp.asarray, tree)

    def join_pieces(self, pieces: PyTree, like: PyTree) -> PyTree:
        return pieces

    def join_parts(self, parts: PyTree, like: PyTree) -> PyTree:
        return parts

    def _sum_leaf(self, m: jax.Array, whole: jax.Array) -> jax.Array:
        return _collectives.psum(m, self.workers)

    def _gather_encoded(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        return self.gather(part)

    # The work of a robust method is divided among the workers: each combines an equal
    # piece of every leaf, and all gather the results.

    def _gather_messages(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        return _collectives.pieces(part, self.workers)

    def _elements_to_combine(self, m: jax.Array) -> jax.Array:
        pieces = _collectives.cut(m, _collectives.size(self.workers))
        return pieces[_collectives.index(self.workers)]

    def _combine_gathered(
        self, pieces: PyTree, method: CombineMessages, like: PyTree
    ) -> PyTree:
        def total(parts: PyTree) -> jax.Array:
            return _collectives.psum(robust.total_of_leaves(parts), self.workers)

        def finish(whole: jax.Array, m: jax.Array) -> jax.Array:
            return shaped(_collectives.gather(m, self.workers, same=True), whole)

        return jax.tree.map(finish, like, method(pieces, total))

    def _whole_shapes(self, center: Any) -> PyTree:
        return center.arrays


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["center"], meta_fields=["axes"]
)
@dataclasses.dataclass(frozen=True)
class OwnCenter(StoredCenter):
    """One worker's own center, with gossip."""

    center: PyTree  # like the parameters
    axes: _collectives.Axes  # axes of the workers

    kind: ClassVar[str] = "each worker's own"

    def whole(self) -> PyTree:
        """Return the workers' mean center if their axes are bound, else this one."""
        if not any(map(check.is_bound, self.axes)):
            return self.center  # all rows of a state, or one of them
        hint = "bind all of them for the mean center, or none for this worker's own"
        check.axis_bound(self.axes, hint)
        workers = _collectives.size(self.axes)

        def mean(c: jax.Array) -> jax.Array:
            total = _collectives.psum(trees.widened(c), self.axes)
            return (total / workers).astype(c.dtype)

        return jax.tree.map(mean, self.center)

    def mark_differing(self, state: Any, pieces: Any, own: Any) -> Any:
        return state._replace(
            center=dataclasses.replace(self, center=own(self.center)),
            center_state=own(state.center_state),
        )


@dataclasses.dataclass(frozen=True)
class Gossip(Whole):
    """One center for each worker; workers exchange in pairs, which change."""

    kind: ClassVar[str] = OwnCenter.kind

    @property
    def gossip(self) -> float:
        """Strength of the pull between the centers of two partners."""
        assert self.placement.gossip is not None
        return self.placement.gossip

    def check_rule(self, rule: Rule) -> None:
        if not self.workers:
            raise errors.InvalidArgumentError(
                f"gossip={self.gossip} needs the axis of the workers that exchange in "
                "pairs: give axis_name"
            )
        if not rule.codec.is_identity:
            got = f"gossip={self.gossip}, rule {rule.name!r} with codec {rule.codec}"
            combinations.reject("gossip", "a codec", got)
        if not rule.is_summed:
            got = f"gossip={self.gossip}, rule {rule.name!r} with {rule.combine}"
            combinations.reject("gossip", "a robust combine", got)

    def vary_over_workers(self, tree: PyTree) -> PyTree:
        bound = all(map(check.is_bound, self.workers))
        return _collectives.mark_varying(tree, self.workers) if bound else tree

    def num_participants(self, exchanges: jax.Array) -> Any:
        if (workers := _collectives.size(self.workers)) == 1:
            return workers
        return 2 - _collectives.has_no_partner(self.workers, exchanges).astype(
            jnp.int32
        )

    def mean_over_participants(
        self, number: jax.Array, exchanges: jax.Array
    ) -> jax.Array:
        if _collectives.size(self.workers) == 1:
            return super().mean_over_participants(number, exchanges)
        # A worker without a partner is its own partner.
        return (number + _collectives.from_partner(number, self.workers, exchanges)) / 2

    def combine(
        self,
        message: PyTree,
        method: CombineMethod,
        like: PyTree,
        center: PyTree,
        exchanges: jax.Array,
    ) -> PyTree:
        """Combine the messages of two partners, with the pull of their centers.

        The pull is sent as part of the message, so that only one model is sent: with a
        gossip of 1, the sum is ``m_i + ((m_j - c_j / 2) + c_i / 2)``. This rounds the
        partner's message to the precision of its center, but not this worker's message.
        """
        if _collectives.size(self.workers) == 1:
            return message
        self._check_apart(center)
        mean = method == "mean"
        pull = self.gossip if mean else self.gossip / 2
        message = jax.tree.map(trees.widened, message)
        center = jax.tree.map(trees.widened, center)
        sent = jax.tree.map(lambda m, c: m - pull * c, message, center)
        received = _collectives.from_partner(sent, self.workers, exchanges)
        has_no_partner = _collectives.has_no_partner(self.workers, exchanges)

        def combine_leaf(m: jax.Array, received: jax.Array, c: jax.Array) -> jax.Array:
            total = m + (received + pull * c)
            return jnp.where(has_no_partner, m, total / 2 if mean else total)

        return jax.tree.map(combine_leaf, message, received, center)

    def _check_apart(self, center: PyTree) -> None:
        """Check that an enclosing shard_map lets the workers' centers differ.

        Raises:
          InvalidArgumentError: the shard_map takes them for one replicated array.
        """
        if not _collectives.is_checked(self.workers):
            return
        for leaf in jax.tree.leaves(center):
            varying = _collectives.varying(leaf)
            if missing := [name for name in self.workers if name not in varying]:
                raise errors.InvalidArgumentError(
                    "with gossip every worker has a center of its own, but all workers "
                    f"of {missing[0]!r} share this state: create it inside shard_map, "
                    "or give shard_map in_specs and out_specs with a row of the state "
                    f"for each worker, PartitionSpec({missing[0]!r})"
                )

    def _wrap(self, center: PyTree, like: PyTree) -> PyTree:
        return OwnCenter(center, self.workers)

    def _whole_shapes(self, center: OwnCenter) -> PyTree:
        if center.axes != self.workers:
            raise errors.TreeMismatchError(
                f"the state has a center for each worker of {center.axes}, but here "
                f"the workers are those of axis_name={self.axis_name!r}"
            )
        return center.arrays
