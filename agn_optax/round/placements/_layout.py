"""The protocol of a placement: the operations that a round needs from it.

The round (`_round`) calls these methods and distinguishes no cases. With two workers of
two towers each, and a center in shards over both axes, a leaf ``abcd`` is cut twice:

                               worker 0             worker 1
                          tower 0  tower 1     tower 0  tower 1
    the whole leaf         abcd     abcd        abcd     abcd
    `cut_part`             ab       cd          ab       cd
    `cut_piece`            a        c           b        d

    `join_pieces`          piece -> part    communication between workers
    `join_parts`           part -> whole    communication within a worker
    `combine`              every worker's message as parts -> this tower's piece

A center that is not in shards has one part and one piece: all of it. `store` converts
the center to the form that the optimizer state holds, and `load` undoes that.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round import _collectives
from agn_optax.round.placements._host import (
    OnHost,
    check_host_memory,
    for_host,
    to_device,
    to_host,
)
from agn_optax.round.placements._placement import Placement
from agn_optax.round.placements._stored import as_stored, center_arrays
from agn_optax.rules import Rule

PyTree = Any
# (all messages, total) -> message, as `robust.Combine.function`.
CombineMessages = Callable[[PyTree, Callable[[PyTree], jax.Array]], PyTree]
CombineMethod = CombineMessages | Literal["sum", "mean"]


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """A placement on a mesh whose workers are the members of ``axis_name``."""

    axis_name: Any = None
    placement: Placement = dataclasses.field(default_factory=Placement)

    kind: ClassVar[str]  # such as "in shards", for errors

    @property
    def workers(self) -> _collectives.Axes:
        """Axes of the workers."""
        return _collectives.names(self.axis_name)

    @property
    def is_on_host(self) -> bool:
        """True if the center is in the host's memory between exchanges."""
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
    def is_readable_in_step(self) -> bool:
        """True if a local step can read the whole center in the state."""
        return not self.is_on_host

    def check_rule(self, rule: Rule) -> None:
        """Check that a rule can be used with this placement.

        Raises:
          InvalidArgumentError: the rule cannot be used with this placement.
        """
        return  # by default, any rule can be used

    def check_memory(self) -> None:
        """Check that the device has the memory of the center.

        Raises:
          InvalidArgumentError: the device does not have it.
        """
        if self.is_on_host:
            check_host_memory()

    def check_bound(self) -> None:
        """Check that every axis of this layout is bound while tracing."""
        check.axis_bound(self.axis_name)

    def check_bound_for_steps(self) -> None:
        """Check that the axes that every local step needs are bound while tracing."""
        return  # by default, local steps need no axes

    def check_all_workers_exchange(self, rule: str) -> None:
        """Check that all workers of the enclosing mesh take part in exchanges.

        Raises:
          InvalidArgumentError: workers over another axis would each train a model of
            their own.
        """
        if others := _collectives.declared_workers_outside(self.workers):
            (name,) = others
            raise errors.InvalidArgumentError(
                f"{rule} exchanges over axis_name={self.axis_name!r}, but the workers "
                f"are the {_collectives.size(others)} members of {name!r}: each would "
                f"train a model of its own. Give the rule axis_name={name!r}"
            )

    def check_center(self, params: PyTree, stored: PyTree) -> None:
        """Check that the center of a state matches this layout and the parameters.

        Raises:
          TreeMismatchError: the center does not match.
        """
        center = as_stored(stored)
        if center.place != self.place:
            raise errors.TreeMismatchError(
                f"the state's center is {center.place}, but the placement is "
                f"{self.placement}"
            )
        whole = self._whole_shapes(center.unwrapped)
        check.same_tree(params, whole, "params", "center")

    def vary_over_workers(self, tree: PyTree) -> PyTree:
        """Mark ``tree`` as varying over the workers, if each has its own center."""
        return tree

    def piece_shapes(self, params: PyTree) -> list[PyTree]:
        """Return a list with this tower's piece as shapes; empty for a whole center."""
        return []

    @abc.abstractmethod
    def cut_part(self, tree: PyTree) -> PyTree:
        """Return this tower's part of a tree that a worker's towers have in common."""

    @abc.abstractmethod
    def cut_piece(self, tree: PyTree) -> PyTree:
        """Return this tower's piece of a center that all towers have in common."""

    @abc.abstractmethod
    def join_pieces(self, pieces: PyTree, like: PyTree) -> PyTree:
        """Return this tower's part of the center from the pieces of all workers."""

    @abc.abstractmethod
    def join_parts(self, parts: PyTree, like: PyTree) -> PyTree:
        """Return the whole tree from the parts of all towers of this worker."""

    def num_participants(self, exchanges: jax.Array) -> Any:
        """Return the number of workers whose messages are combined in an exchange.

        ``exchanges`` is the number of earlier exchanges, which determines the pairs of
        gossip.
        """
        return _collectives.size(self.workers)

    def mean_over_participants(
        self, number: jax.Array, exchanges: jax.Array
    ) -> jax.Array:
        """Return the mean of an array over the workers of `num_participants`."""
        count = _collectives.size(self.workers)
        return _collectives.psum(number, self.workers) / count

    def combine(
        self,
        message: PyTree,
        method: CombineMethod,
        like: PyTree,
        center: PyTree,
        exchanges: jax.Array,
    ) -> PyTree:
        """Combine all workers' messages, and return this tower's piece of the result.

        ``message`` is this tower's part of its worker's message. If an all-reduce
        cannot combine the messages, an all-to-all gives each tower all messages for its
        piece. With gossip, ``exchanges`` determines the partners, and the combined
        message includes the pull between their centers.
        """
        if not isinstance(method, str):
            pieces = jax.tree.map(self._gather_messages, like, message)
            return self._combine_gathered(
                jax.tree.map(trees.widened, pieces), method, like
            )
        count = _collectives.size(self.workers)

        def combine_leaf(m: jax.Array, whole: jax.Array) -> jax.Array:
            total = self._sum_leaf(m, whole)
            return total / count if method == "mean" else total

        return jax.tree.map(combine_leaf, message, like)

    def combine_encoded(
        self,
        encoded: PyTree,
        decode: Callable[[PyTree], PyTree],
        method: CombineMethod,
        like: PyTree,
        weight: jax.Array | None = None,
    ) -> PyTree:
        """Combine encoded contributions, which must be decoded before they are summed.

        Every tower gets all workers' contributions to the piece that it keeps, and adds
        up the messages in float32 or wider. All towers use the same order, so that
        towers with the same piece get the same result.

        Args:
          encoded: the contribution of this tower's worker: for each leaf of the part, a
            tree of arrays. If the center is in shards, these have the leaf's shape,
            because they are cut as the leaf is.
          decode: ``encoded -> message``, for a piece.
          method: how to combine the messages.
          like: a tree with the shapes of the whole.
          weight: weight of this worker's message relative to the mean, scalar; None if
            all count alike.
        """
        weights = None if weight is None else self.gather(weight)
        gathered = jax.tree.map(
            lambda whole, part: jax.tree.map(
                functools.partial(self._gather_encoded, whole), part
            ),
            like,
            encoded,
        )
        count = _collectives.size(self.workers)

        def message_of(worker: Any) -> PyTree:
            message = decode(jax.tree.map(lambda x: x[worker], gathered))
            if weights is None:
                return message
            return trees.scaled(jax.tree.map(trees.widened, message), weights[worker])

        if not isinstance(method, str):
            pieces = _stacked(
                lambda worker: jax.tree.map(
                    self._elements_to_combine, message_of(worker)
                ),
                count,
            )
            return self._combine_gathered(pieces, method, like)
        total = _summed(message_of, count)
        return jax.tree.map(lambda t: t / count, total) if method == "mean" else total

    def gather(self, part: jax.Array) -> jax.Array:
        """Gather an array from all workers: [workers, ...]."""
        return _collectives.gather(part[None], self._gather_axes, same=True)

    @property
    def _gather_axes(self) -> _collectives.Axes:
        """Axes of the workers, in the order in which their messages are gathered."""
        return self.workers

    @abc.abstractmethod
    def _sum_leaf(self, m: jax.Array, whole: jax.Array) -> jax.Array:
        """Sum one leaf of all workers' messages, and return this tower's piece."""

    @abc.abstractmethod
    def _gather_messages(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        """Gather the elements of all messages that this tower combines: [workers, ...].

        ``part`` is one leaf of this worker's message, and ``whole`` has the shape of
        that leaf in the parameters.
        """

    def _gather_encoded(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        """Gather one leaf of all encoded contributions to this tower's piece."""
        return self._gather_messages(whole, part)

    def _elements_to_combine(self, m: jax.Array) -> jax.Array:
        """Return the elements of a decoded message that this tower combines."""
        return m

    @abc.abstractmethod
    def _combine_gathered(
        self, pieces: PyTree, method: CombineMessages, like: PyTree
    ) -> PyTree:
        """Combine all messages by a robust method, and return this tower's piece.

        ``pieces`` has the elements of each message that this tower combines. Sums over
        all elements (`robust.Total`) include the towers with the other elements.
        """

    def store(self, center: PyTree, center_state: PyTree, like: PyTree) -> Any:
        """Convert a center and its optimizer's state to the form that is stored.

        ``like`` gives the shapes: a whole center, or a stored one.
        """
        stored = self._wrap(center, like), center_state
        if not self.is_on_host:
            return stored
        return to_host(tuple(OnHost(for_host(tree)) for tree in stored))

    def load(self, center: PyTree, center_state: PyTree) -> Any:
        """Undo `store`: return the center and its optimizer's state, on the device."""
        return tuple(map(center_arrays, to_device((center, center_state))))

    def _wrap(self, center: PyTree, like: PyTree) -> PyTree:
        """Wrap a center for a state in the memory of the device."""
        return center

    @abc.abstractmethod
    def _whole_shapes(self, center: Any) -> PyTree:
        """Return a tree with the shapes of the whole center, from an unwrapped one.

        Raises:
          TreeMismatchError: the center was stored by another layout.
        """


def shaped(flat: jax.Array, like: Any) -> jax.Array:
    """Reshape a flat array, without its padding, to the shape of ``like``."""
    return flat[: math.prod(like.shape)].reshape(like.shape)


def _summed(message: Callable[[Any], PyTree], count: int) -> PyTree:
    """Return ``message(0) + ... + message(count - 1)``, in float32 or wider.

    The sum is taken in the order of the indices, so every device that adds the same
    messages gets the same bits.
    """
    total = jax.tree.map(trees.widened, message(0))
    if count == 1:
        return total
    return jax.lax.fori_loop(
        1,
        count,
        lambda i, total: jax.tree.map(
            lambda t, m: t + trees.widened(m), total, message(i)
        ),
        total,
    )


def _stacked(message: Callable[[Any], PyTree], count: int) -> PyTree:
    """Stack messages 0 to ``count - 1`` as [count, ...], in float32 or wider."""
    return jax.lax.map(
        lambda i: jax.tree.map(trees.widened, message(i)), jnp.arange(count)
    )
