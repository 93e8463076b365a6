"""The protocol of a placement: what the round asks of the place of its center.

The round (`_round`) calls these methods and distinguishes no cases:

    part        cut a tree that all towers of a worker have alike to this tower's part
    piece       cut the center to this tower's piece: the worker's share of a part
    combine     combine the messages of all workers to one, of which each tower gets its
                piece; also for encoded contributions
    unite       join the workers' pieces to a part
    whole       join the towers' parts to the tree
    store       wrap the center as the optimizer state keeps it, in its memory; `load`
                undoes that
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax

from agn_optax import errors
from agn_optax._internal import check, combinations, trees
from agn_optax.round import _collectives, _messages
from agn_optax.round.placements._host import to_device, to_host
from agn_optax.round.placements._placement import Placement
from agn_optax.round.placements._stored import (
    OnHost,
    for_host,
    from_host,
    held,
    place_of,
    unwrapped,
)
from agn_optax.rules import Rule, robust

PyTree = Any
How = robust.Combine | Literal["sum", "mean"]


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """A placement on a mesh whose workers are the members of ``axis_name``."""

    axis_name: Any = None
    placement: Placement = dataclasses.field(default_factory=Placement)

    kind: ClassVar[str]  # what the center is, for errors

    @property
    def workers(self) -> _collectives.Axes:
        """Axes of the workers."""
        return _collectives.names(self.axis_name)

    @property
    def is_on_host(self) -> bool:
        """True if the host's memory has the center between exchanges."""
        return self.placement.memory == "host"

    @property
    def place(self) -> str:
        """Description of the place of the center, for errors."""
        return f"{self.kind}, on the {self.placement.memory}"

    @property
    def is_default(self) -> bool:
        """True if one center, common to all workers, is whole on every device."""
        return self.placement == Placement()

    @property
    def is_at_hand(self) -> bool:
        """True if a local step can read the whole center in the state."""
        return not self.is_on_host

    def check_rule(self, rule: Rule) -> None:
        """Check that a rule can be used with this placement.

        Raises:
          InvalidArgumentError: it cannot.
        """
        if rule.codec.answer_codec is not None and not self.is_default:
            combinations.reject(
                "a codec that answers in differences",
                "a placement",
                f"{rule.codec}, {self.placement}",
            )

    def check_bound(self) -> None:
        """Check that every axis of this layout is bound while tracing."""
        check.axis_bound(self.axis_name)

    def check_bound_for_steps(self) -> None:
        """Check that the axes that every local step needs are bound while tracing."""
        return  # none; `B027` asks for a body

    def check_met(self, rule: str) -> None:
        """Check that all workers of the enclosing mesh take part in exchanges.

        Raises:
          InvalidArgumentError: some do not, and would each train a separate model.
        """
        if unmet := _collectives.unmet(self.workers):
            (name,) = unmet
            raise errors.InvalidArgumentError(
                f"{rule} exchanges over axis_name={self.axis_name!r}, but the workers "
                f"are the {_collectives.size(unmet)} members of {name!r}: each would "
                f"train a model of its own. Give the rule axis_name={name!r}"
            )

    def check_center(self, params: PyTree, stored: PyTree) -> None:
        """Check that the center of a state matches this layout and the parameters.

        Raises:
          TreeMismatchError: it does not.
        """
        there = place_of(stored)
        if there != self.place:
            raise errors.TreeMismatchError(
                f"the state's center is {there}, but the placement is {self.placement}"
            )
        whole = self._like_whole(unwrapped(stored))
        check.same_tree(params, whole, "params", "center")

    def own(self, tree: PyTree) -> PyTree:
        """Mark ``tree`` as varying over the workers, if each has its own center."""
        return tree

    def cuts(self, params: PyTree) -> list[PyTree]:
        """Return the shapes of this tower's piece in a list, empty without shards."""
        return []

    @abc.abstractmethod
    def part(self, tree: PyTree) -> PyTree:
        """Cut ``tree``, which a worker's towers have alike, to this tower's part."""

    @abc.abstractmethod
    def piece(self, tree: PyTree) -> PyTree:
        """Cut the center ``tree`` to the piece that this tower keeps."""

    @abc.abstractmethod
    def unite(self, pieces: PyTree, like: PyTree) -> PyTree:
        """Join the pieces of all workers to this tower's part of the center."""

    @abc.abstractmethod
    def whole(self, parts: PyTree, like: PyTree) -> PyTree:
        """Join the parts of all towers of this worker to the whole tree."""

    def count(self, turn: jax.Array) -> Any:
        """Return the number of workers that take part in one exchange."""
        return _collectives.size(self.workers)

    def mean(self, number: jax.Array, turn: jax.Array) -> jax.Array:
        """Return the mean of a scalar over the workers of one exchange."""
        count = _collectives.size(self.workers)
        return _collectives.psum(number, self.workers) / count

    def combine(
        self, message: PyTree, how: How, like: PyTree, center: PyTree, turn: jax.Array
    ) -> PyTree:
        """Combine all workers' messages, given as parts, to this tower's piece.

        If an all-reduce cannot combine them, an all-to-all gives each tower all
        messages for its piece. With gossip, ``turn`` determines the partners, and the
        combined message includes the pull of their centers.
        """
        if isinstance(how, robust.Combine):
            pieces = jax.tree.map(self._collect, like, message)
            return self._together(jax.tree.map(trees.widened, pieces), how, like)
        count = _collectives.size(self.workers)

        def combine(m: jax.Array, whole: jax.Array) -> jax.Array:
            total = self._sum(m, whole)
            return total / count if how == "mean" else total

        return jax.tree.map(combine, message, like)

    def combine_encoded(
        self,
        encoded: PyTree,
        message: Callable[[PyTree], PyTree],
        how: How,
        like: PyTree,
        share: jax.Array | None = None,
    ) -> PyTree:
        """Combine encoded contributions, which must be decoded before they are summed.

        Every tower gets all workers' contributions to the piece that it keeps, and adds
        up the messages in float32 or wider. All towers use the same order, so that
        towers with the same piece get the same result.

        Args:
          encoded: the contribution of this tower's worker: for each leaf of the part, a
            tree of arrays. These have the leaf's shape if the center is in shards.
          message: ``encoded -> message``, for a piece.
          how: the rule's way to combine messages.
          like: a tree with the shapes of the whole.
          share: weight of this worker's message relative to the mean, scalar; None if
            all count alike.
        """
        shares = None if share is None else self._gather(share)
        sent = jax.tree.map(
            lambda whole, part: jax.tree.map(
                functools.partial(self._collect_encoded, whole), part
            ),
            like,
            encoded,
        )
        count = _collectives.size(self.workers)

        def of(worker: Any) -> PyTree:
            made = message(jax.tree.map(lambda x: x[worker], sent))
            if shares is None:
                return made

            return trees.scaled(jax.tree.map(trees.widened, made), shares[worker])

        if isinstance(how, robust.Combine):
            pieces = _messages.stacked(
                lambda worker: jax.tree.map(self._share, of(worker)), count
            )
            return self._together(pieces, how, like)
        total = _messages.summed(of, count)
        return jax.tree.map(lambda t: t / count, total) if how == "mean" else total

    def _gather(self, part: jax.Array) -> jax.Array:
        """Gather an array from all workers: [workers, ...]."""
        return _collectives.gather(part[None], self._in_order, same=True)

    @property
    def _in_order(self) -> _collectives.Axes:
        """Axes of the workers, in the order in which their messages are gathered."""
        return self.workers

    @abc.abstractmethod
    def _sum(self, m: jax.Array, whole: jax.Array) -> jax.Array:
        """Sum a leaf of all workers' messages, and return this tower's piece."""

    @abc.abstractmethod
    def _collect(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        """Collect all workers' messages for what this tower combines: [workers, ...].

        ``part`` is one leaf of this worker's message, and ``whole`` has its shape in
        the parameters.
        """

    def _collect_encoded(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        """Collect all workers' encoded contributions to this tower's piece."""
        return self._collect(whole, part)

    def _share(self, m: jax.Array) -> jax.Array:
        """Return the elements of a decoded message that this tower combines."""
        return m

    @abc.abstractmethod
    def _together(self, pieces: PyTree, how: robust.Combine, like: PyTree) -> PyTree:
        """Combine all workers' messages by a robust rule, to this tower's piece.

        ``pieces`` are what this tower combines of each message. The rule's global sums
        are taken over the towers that have the other elements.
        """

    def store(self, center: PyTree, center_state: PyTree, like: PyTree) -> Any:
        """Wrap a center and its optimizer's state as an optimizer state keeps them.

        ``like`` is the whole center, or the center as it was stored before.
        """
        center = self._wrap(center, like)
        if not self.is_on_host:
            return center, center_state
        return to_host((OnHost(for_host(center)), OnHost(for_host(center_state))))

    def settle(self, center: PyTree, center_state: PyTree) -> Any:
        """Move a stored center and state to their memory, such as after a restore."""
        both = center, center_state
        return to_host(both) if self.is_on_host else both

    def load(self, center: PyTree, center_state: PyTree) -> Any:
        """Undo `store`: return the center and its optimizer's state, on the device."""
        if self.is_on_host:
            stored = center.tree, center_state.tree
            center, center_state = from_host(to_device(stored))
        return held(center), center_state

    def _wrap(self, center: PyTree, like: PyTree) -> PyTree:
        """Wrap a center for a state in the memory of the device."""
        return center

    @abc.abstractmethod
    def _like_whole(self, center: PyTree) -> PyTree:
        """Return a tree with the shapes of the whole center, from an unwrapped one.

        Raises:
          TreeMismatchError: another layout has made it.
        """


def shaped(flat: jax.Array, like: Any) -> jax.Array:
    """Reshape a flat array, without its padding, to the shape of ``like``."""
    return flat[: math.prod(like.shape)].reshape(like.shape)
