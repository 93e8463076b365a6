"""Placement of the center on a mesh: whole on every tower, in shards, or on the host.

With gossip there is no common center: every worker has its own, and workers exchange in
pairs.

`Placement` is the caller's choice, and `Layout` is a placement with the axis of the
workers. The round (`_exchange`) calls the layout's methods and distinguishes no cases:

    part        cut a tree that all towers of a worker have alike to this tower's part
    piece       cut the center to this tower's piece: the worker's share of a part
    combine     combine the messages of all workers to one, of which each tower gets its
                piece; also for encoded contributions, and for two workers in gossip
    unite       join the workers' pieces to a part
    whole       join the towers' parts to the tree

Without shards, all but ``combine`` are the identity.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round import _collectives, _messages
from agn_optax.rules import robust

PyTree = Any
How = robust.Combine | Literal["sum", "mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    r"""Placement of a center that is part of an optimizer state.

    With ``shard_axis``, each of the n towers of that axis keeps 1/n of the center and
    of the center optimizer's state, and moves that part only. Over the axis of the
    workers, messages are reduce-scattered and the new center is all-gathered, which
    together move as much data as the all-reduce of a whole center. Rules that read the
    anchor or the current center gather the center once more before the exchange. Over
    the towers of a data-parallel worker, which have the same gradients, each tower also
    keeps 1/n of the record only, and no reduction is needed.

    The center optimizer and the rule must then work element by element. A rule or
    optimizer that reads a whole tree or a whole leaf (global-norm clipping, trust
    ratios, matrix orthogonalization) raises an error that names it when the state is
    made.

    With ``gossip``, there is no common center. Every worker i keeps its own center, and
    exchanges with one other worker j at a time:

    .. math::
        m_i = \tfrac12 (m(x_i, c_i) + m(x_j, c_j))
            + \gamma \left(c_i - \tfrac12 (c_i + c_j)\right); \qquad
        c_i' = c_i + \text{center}(m_i); \qquad x_i \leftarrow c_i'

    (for a rule that sums, the sum of the two messages takes the place of their mean).
    No collective has more than two workers, and each worker sends one model in float32,
    or in the center's dtype if that is wider, whatever the number of workers. With
    ``rules.average()`` and a gossip of 1 this is gossip averaging,
    :math:`c_i' = (x_i + x_j) / 2`. With a gossip of 1 and DiLoCo's rule under plain
    momentum, ``rules.diloco(optax.sgd(0.7, momentum=0.5))``, it is NoLoCo. Partners
    change in a fixed order: with n = 2, 4, 8, ... workers, information from each worker
    has reached all others after log2(n) exchanges, and with other numbers it has
    reached most of them. (With an odd number, one worker at a time has no partner.)
    NoLoCo draws its pairs at random. The fixed order needs only about log2(n) different
    permutations in the program instead of n - 1.

    The pull goes through the center optimizer, as in NoLoCo, so momentum can drive the
    centers apart. With a momentum of 0.9 and a rate of 0.7, a gossip of 1 drives them
    apart from 5 workers on (with random pairs: 6), and a gossip of 0.3 keeps 64 workers
    together. With a momentum of 0.5, a gossip of 1 keeps as many as were tried (96)
    together. Without momentum any gossip below 2 does, at rates up to 1.

    The centers stay different, and so do parameters and states: keep them with a row
    for each worker, as `Towers` does. A checkpoint of the rows restores exactly.
    `Towers.center_params` gives the mean of the centers. `Towers.unreplicate` and an
    elastic load continue from the means of the centers and of their optimizers' states.

    Args:
      shard_axis: mesh axis, or tuple of axes, over which the center is divided; None
        keeps it whole on every tower. Leaves with fewer elements than towers stay
        whole.
      memory: ``"device"`` or ``"host"``. On the host, the center and the center
        optimizer's state are kept in pinned memory and copied to the device for an
        exchange.
      gossip: :math:`\gamma > 0`, the strength of the pull between the centers of two
        partners, as part of the message; None for one center common to all workers.

    Raises:
      InvalidArgumentError: ``memory`` is neither, or ``gossip`` is out of range or
        given with ``shard_axis``.

    Example:
      >>> import optax, agn_optax
      >>> tx = agn_optax.exchange_every(
      ...     optax.adam(1e-3),
      ...     agn_optax.rules.agn(optax.adam(1e-3)),
      ...     period=10,
      ...     axis_name="workers",
      ...     placement=agn_optax.Placement(shard_axis="workers"),
      ... )
      >>> towers = agn_optax.Towers(workers=4)
      >>> state = towers.create(tx.init, {"w": jnp.ones(10)})
      >>> towers.center_params(state)["w"].shape
      (10,)

    References:
      Samyam Rajbhandari, Jeff Rasley, Olatunji Ruwase, Yuxiong He, *ZeRO: Memory
      Optimizations Toward Training Trillion Parameter Models*, 2020.

      Jari Kolehmainen et al., *NoLoCo: No-all-reduce Low Communication Training Method
      for Large Models*, 2025 (the equation as in its authors' program, where the pull
      of the centers goes through the center optimizer with the message).

      Bicheng Ying, Kun Yuan, Yiming Chen, Hanbin Hu, Pan Pan, Wotao Yin, *Exponential
      Graph is Provably Efficient for Decentralized Deep Training*, 2021 (the order of
      partners).
    """

    shard_axis: Any = None
    memory: Literal["device", "host"] = "device"
    gossip: float | None = None

    def __post_init__(self) -> None:
        if self.gossip is not None:
            check.rate(self.gossip, "gossip", low=0.0, high=math.inf, low_open=True)
            if self.shard_axis is not None:
                raise errors.InvalidArgumentError(
                    "gossip keeps a whole center with every worker: leave out "
                    f"shard_axis={self.shard_axis!r}, or gossip={self.gossip}"
                )
        if self.memory not in ("device", "host"):
            raise errors.InvalidArgumentError(
                f"memory must be 'device' or 'host', got {check.show(self.memory)}"
            )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pieces"],
    meta_fields=["shapes", "axes", "cut"],
)
@dataclasses.dataclass(frozen=True)
class ShardedCenter:
    """One tower's pieces of a center, as an optimizer state keeps them."""

    pieces: PyTree  # like the parameters; leaves [1, ..., 1, elements of a piece]
    shapes: tuple[tuple[int, ...], ...]  # shapes of the whole leaves
    # The axes of the shards within a worker, and those across workers.
    axes: tuple[_collectives.Axes, _collectives.Axes]
    cut: tuple[int, int]  # number of pieces over each of the two


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["center"], meta_fields=["axes"]
)
@dataclasses.dataclass(frozen=True)
class OwnCenter:
    """One worker's own center, with gossip."""

    center: PyTree  # like the parameters
    axes: _collectives.Axes  # axes of the workers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnHost:
    """A tree that an optimizer state keeps in the memory of the host."""

    tree: PyTree  # leaves [1, 1, 1, 1, 1, 1, ...], see `for_host`


# JAX gives the buffer of a donated argument to the first output with the same shape and
# dtype, whatever the memory of the two. If a buffer on the host becomes an output on
# the device, the process aborts (JAX 0.10). Therefore arrays on the host have shapes
# that no array on the device has: these dimensions come before their own.
HOST_SHAPE = (1,) * 6


def for_host(tree: PyTree) -> PyTree:
    """Reshape the arrays of a tree to the shapes that they have on the host."""
    return jax.tree.map(
        lambda leaf: jnp.reshape(leaf, (*HOST_SHAPE, *jnp.shape(leaf))), tree
    )


def from_host(tree: PyTree) -> PyTree:
    """Undo `for_host`, also for rows of such trees; arrays stay in their memory."""

    def shaped(leaf: Any) -> jax.Array:
        shape, count = jnp.shape(leaf), len(HOST_SHAPE)
        found = (i for i in range(len(shape)) if shape[i : i + count] == HOST_SHAPE)
        if (first := next(found, None)) is None:  # after the dimensions of the rows
            raise errors.TreeMismatchError(
                f"a leaf of shape {list(shape)} cannot be from the host, where all "
                f"shapes begin with {list(HOST_SHAPE)}"
            )
        return jnp.reshape(leaf, shape[:first] + shape[first + count :])

    return jax.tree.map(shaped, tree)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A placement on a mesh whose workers are the members of ``axis_name``."""

    axis_name: Any = None
    placement: Placement = dataclasses.field(default_factory=Placement)

    @property
    def workers(self) -> _collectives.Axes:
        return _collectives.names(self.axis_name)

    @property
    def within(self) -> _collectives.Axes:
        """Axes of the shards whose towers belong to one worker."""
        shards = _collectives.names(self.placement.shard_axis)
        return tuple(name for name in shards if name not in self.workers)

    @property
    def across(self) -> _collectives.Axes:
        """Axes of the shards whose towers are different workers."""
        shards = _collectives.names(self.placement.shard_axis)
        return tuple(name for name in shards if name in self.workers)

    @property
    def beside(self) -> _collectives.Axes:
        """Axes of the workers that keep the same shards."""
        return tuple(name for name in self.workers if name not in self.across)

    @property
    def sharded(self) -> bool:
        return self.placement.shard_axis is not None

    @property
    def on_host(self) -> bool:
        return self.placement.memory == "host"

    @property
    def in_pairs(self) -> bool:
        return self.placement.gossip is not None

    def own(self, tree: PyTree) -> PyTree:
        """Mark ``tree`` as varying over the workers, if each has its own center."""
        bound = all(map(check.is_bound, self.workers))
        if not (self.in_pairs and bound):
            return tree
        return _collectives.apart(tree, self.workers)

    def check_bound(self) -> None:
        """Check that every axis of this layout is bound while tracing."""
        hint = None
        if self.sharded:
            hint = (
                "a center in shards lives inside the mesh; its state is made by "
                "towers.create(tx.init, params), and updated in Towers' programs"
            )
        check.axis_bound(self.axis_name, hint)
        check.axis_bound(self.placement.shard_axis, hint)

    def check_met(self, rule: str) -> None:
        """Check that all workers of the enclosing mesh take part in exchanges.

        Raises:
          InvalidArgumentError: some do not, and would each train a separate model.
        """
        if unmet := _collectives.unmet(self.workers):
            (name,) = unmet
            raise errors.InvalidArgumentError(
                f"{rule} exchanges over axis_name={self.axis_name!r}, and the workers "
                f"are the {_collectives.size(unmet)} members of {name!r}: each would "
                f"train a model of its own. Give the rule axis_name={name!r}"
            )

    def part(self, tree: PyTree) -> PyTree:
        """Cut ``tree``, which a worker's towers have alike, to this tower's part."""
        return self._own(tree, self.within, _collectives.size(self.across))

    def piece(self, tree: PyTree) -> PyTree:
        """Cut the center ``tree`` to the piece that this tower keeps."""
        return self._own(tree, (*self.within, *self.across), 1)

    def _own(self, tree: PyTree, axes: _collectives.Axes, pieces: int) -> PyTree:
        """Cut every leaf that is sharded to this tower's ``pieces`` of it."""

        def own(leaf: Any) -> jax.Array:
            leaf, length = jnp.asarray(leaf), self._length(leaf)
            if length is None or _collectives.size(axes) == 1:
                return leaf
            return _slice(leaf, _collectives.index(axes), pieces * length, leaf.ndim)

        return jax.tree.map(own, tree)

    def count(self, turn: jax.Array) -> Any:
        """Return the number of workers that take part in one exchange."""
        workers = _collectives.size(self.workers)
        if not self.in_pairs or workers == 1:
            return workers
        return 2 - _collectives.is_alone(self.workers, turn).astype(jnp.int32)

    def mean(self, number: jax.Array, turn: jax.Array) -> jax.Array:
        """Return the mean of a scalar over the workers of one exchange."""
        count = _collectives.size(self.workers)
        if self.in_pairs and count > 1:  # a worker without a partner is its own
            return (number + _collectives.met(number, self.workers, turn)) / 2
        return _collectives.psum(number, self.workers) / count

    def combine(
        self, message: PyTree, how: How, like: PyTree, center: PyTree, turn: jax.Array
    ) -> PyTree:
        """Combine all workers' messages, given as parts, to this tower's piece.

        If an all-reduce cannot combine them, an all-to-all gives each tower all
        messages for its piece. With gossip, ``turn`` determines the partners, and the
        combined message includes the pull of their centers.
        """
        if self.in_pairs:
            return self._combine_two(message, how, center, turn)
        count = _collectives.size(self.workers)
        if isinstance(how, robust.Combine):
            pieces = jax.tree.map(self._collect, like, message)
            return self._together(jax.tree.map(trees.widened, pieces), how, like)

        def combine(m: jax.Array, whole: jax.Array) -> jax.Array:
            length = self._length(whole)
            if length is None:
                m = _collectives.psum(m, (*self.across, *self.beside))
            else:
                flat = _padded(m, length * _collectives.size(self.across))
                m = _line(_collectives.scatter(flat, self.across), whole.ndim)
                m = _collectives.psum(m, self.beside)
            return m / count if how == "mean" else m

        return jax.tree.map(combine, message, like)

    def _combine_two(
        self, message: PyTree, how: How, center: PyTree, turn: jax.Array
    ) -> PyTree:
        """Combine the messages of two partners, with the pull of their centers.

        The pull is sent as part of the message, so that only one model is sent: with a
        gossip of 1, the sum is ``m_i + ((m_j - c_j / 2) + c_i / 2)``. The partner's
        message is thereby rounded to the precision of its center; the own message is
        not.
        """
        if _collectives.size(self.workers) == 1:
            return message
        _check_apart(self.workers, center)
        mean = how == "mean"
        assert self.placement.gossip is not None
        pull = self.placement.gossip if mean else self.placement.gossip / 2
        message = jax.tree.map(trees.widened, message)
        center = jax.tree.map(trees.widened, center)
        sent = jax.tree.map(lambda m, c: m - pull * c, message, center)
        heard = _collectives.met(sent, self.workers, turn)
        alone = _collectives.is_alone(self.workers, turn)

        def both(m: jax.Array, other: jax.Array, c: jax.Array) -> jax.Array:
            total = m + (other + pull * c)
            return jnp.where(alone, m, total / 2 if mean else total)

        return jax.tree.map(both, message, heard, center)

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

        def collect(whole: jax.Array, part: jax.Array) -> jax.Array:
            if self._length(whole) is None:
                return self._gather(part)
            return self._collect(whole, part)

        sent = jax.tree.map(
            lambda whole, part: jax.tree.map(functools.partial(collect, whole), part),
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

            def own(whole: jax.Array, m: jax.Array) -> jax.Array:
                """Return the elements of a message that this tower combines."""
                if self.sharded:
                    return m
                return _collectives.cut(m, count)[_collectives.index(self.workers)]

            pieces = _messages.stacked(
                lambda worker: jax.tree.map(own, like, of(worker)), count
            )
            return self._together(pieces, how, like)
        total = _messages.summed(of, count)
        return jax.tree.map(lambda t: t / count, total) if how == "mean" else total

    def _gather(self, part: jax.Array) -> jax.Array:
        """Gather an array from all workers: [workers, ...]."""
        axes = (*self.beside, *self.across)
        return _collectives.gather(part[None], axes, same=True)

    def _collect(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        """Collect this tower's piece of every worker's part: [workers, ...].

        If the center is whole, it is cut into as many pieces as there are workers, and
        this tower gets one of them.
        """
        if not self.sharded:
            return _collectives.pieces(part, self.workers)
        length = self._length(whole)
        if length is None:
            return self._gather(part)
        count = _collectives.size(self.across)
        flat = _padded(part, length * count).reshape(count, length)
        pieces = _collectives.all_to_all(flat, self.across)
        pieces = pieces.reshape(count, *(1,) * (whole.ndim - 1), length)
        return _collectives.gather(pieces, self.beside)

    def _together(self, pieces: PyTree, how: robust.Combine, like: PyTree) -> PyTree:
        """Combine all workers' messages by a robust rule, from this tower's pieces.

        The rule's global sums are taken over the towers that have the other pieces.
        """

        def total(parts: PyTree) -> jax.Array:
            cut = jax.tree.map(
                lambda whole, p: None if self._is_whole(whole) else p, like, parts
            )
            rest = jax.tree.map(
                lambda whole, p: p if self._is_whole(whole) else None, like, parts
            )
            axes = (*self.within, *self.across) if self.sharded else self.workers
            return _collectives.psum(
                robust.whole_total(cut), axes
            ) + robust.whole_total(rest)

        def finish(whole: jax.Array, m: jax.Array) -> jax.Array:
            if self.sharded:
                return m
            return _shaped(_collectives.gather(m, self.workers, same=True), whole)

        return jax.tree.map(finish, like, how.of(pieces, total))

    def _is_whole(self, leaf: Any) -> bool:
        """Return whether all towers combine all elements of a leaf."""
        return self.sharded and self._length(leaf) is None

    def unite(self, pieces: PyTree, like: PyTree) -> PyTree:
        """Join the pieces of all workers to this tower's part of the center."""

        def unite(piece: jax.Array, whole: Any) -> jax.Array:
            if self._length(whole) is None:
                return piece
            flat = _collectives.gather(piece.reshape(-1), self.across)
            if _collectives.size(self.within) == 1:
                return _shaped(flat, whole)
            return _line(flat, whole.ndim)

        return jax.tree.map(unite, pieces, like)

    def whole(self, parts: PyTree, like: PyTree) -> PyTree:
        """Join the parts of all towers of this worker to the whole tree."""

        def whole(part: jax.Array, whole: Any) -> jax.Array:
            if self._length(whole) is None:
                return part
            flat = _collectives.gather(part.reshape(-1), self.within, same=True)
            return _shaped(flat, whole)

        return jax.tree.map(whole, parts, like)

    def _length(self, leaf: Any) -> int | None:
        """Return the number of elements of a piece; None if the leaf stays whole."""
        pieces = _collectives.size((*self.within, *self.across))
        return piece_length(jnp.shape(leaf), pieces)

    def _cut(self) -> Any:
        """Return the axes of the pieces (within, across), and the pieces over each."""
        axes = (self.within, self.across)
        return axes, tuple(map(_collectives.size, axes))

    def store(self, center: PyTree, center_state: PyTree, like: PyTree) -> Any:
        """Wrap a center and its optimizer's state as an optimizer state keeps them.

        ``like`` is the whole center, or the center as it was stored before.
        """
        if self.sharded:
            _, like = unwrapped(like)
            if isinstance(like, ShardedCenter):
                center = dataclasses.replace(like, pieces=center)
            else:
                shapes = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(like))
                center = ShardedCenter(center, shapes, *self._cut())
        if self.in_pairs:
            center = OwnCenter(center, self.workers)
        if self.on_host:
            center, center_state = map(for_host, (center, center_state))
            center, center_state = OnHost(center), OnHost(center_state)
        return self.settle(center, center_state)

    def settle(self, center: PyTree, center_state: PyTree) -> Any:
        """Move a stored center and state to their memory, such as after a restore."""
        if self.on_host:
            return _to(jax.memory.Space.Host, (center, center_state))
        return center, center_state

    def load(self, center: PyTree, center_state: PyTree) -> Any:
        """Undo `store`: return the center and its optimizer's state, on the device."""
        if self.on_host:
            both = _to(jax.memory.Space.Device, (center.tree, center_state.tree))
            center, center_state = from_host(both)
        return held(center), center_state

    def check_memory(self) -> None:
        """Check that the backend supports the placement's memory."""
        if not self.on_host:
            return
        device = jax.local_devices()[0]
        kinds = [memory.kind for memory in device.addressable_memories()]
        if "pinned_host" not in kinds:
            raise errors.InvalidArgumentError(
                f"memory='host' needs a device with pinned_host memory; {device} has "
                f"{', '.join(kinds)}"
            )
        if not _stays_on_host():
            raise errors.InvalidArgumentError(
                f"memory='host' needs a newer JAX: {jax.__version__} takes to the "
                "device whatever a program leaves on the host"
            )

    def check_center(self, params: PyTree, center: PyTree) -> None:
        """Check that the center of a state matches this layout and the parameters."""
        on_host, center = unwrapped(center)
        sharded = isinstance(center, ShardedCenter)
        is_own = isinstance(center, OwnCenter)
        here = (self.sharded, self.in_pairs, self.on_host)
        if (sharded, is_own, on_host) != here:
            how = "in shards" if sharded else "each worker's own" if is_own else "whole"
            raise errors.TreeMismatchError(
                f"the state's center is {how}, on the "
                f"{'host' if on_host else 'device'}, but the placement is "
                f"{self.placement}"
            )
        if is_own and center.axes != self.workers:
            raise errors.TreeMismatchError(
                f"the state has a center for each worker of {center.axes}, and here "
                f"the workers are those of axis_name={self.axis_name!r}"
            )
        whole = self.check_cut(center) if sharded else held(center)
        check.same_tree(params, whole, "params", "center")

    def check_cut(self, center: ShardedCenter) -> PyTree:
        """Check that this layout made the pieces; return a tree of the whole shapes."""
        here = self._cut()
        if (center.axes, center.cut) != here:
            raise errors.TreeMismatchError(
                f"the state's center is in shards over the axes {center.axes} of sizes "
                f"{center.cut}, and here they are {here[0]} of sizes {here[1]}. Read "
                "it with center_params where it was made, and start anew from that"
            )
        return jax.tree.unflatten(
            jax.tree.structure(center.pieces),
            [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in center.shapes],
        )


def piece_length(shape: tuple[int, ...], pieces: int) -> int | None:
    """Return the elements of each piece of a leaf; None if the leaf stays whole."""
    elements = math.prod(shape)
    if pieces == 1 or not shape or elements < pieces:
        return None
    return -(-elements // pieces)


# The layout of a whole center on the device, with one worker.
WHOLE = Layout()


def whole_center(center: PyTree) -> PyTree:
    """Return the center of an optimizer state, like the parameters, on the device."""
    on_host, center = unwrapped(center)
    if on_host:
        center = _to(jax.memory.Space.Device, center)
    if isinstance(center, OwnCenter):
        return _mean_center(center)
    if not isinstance(center, ShardedCenter):
        return center
    within, across = center.axes
    axes = (*within, *across)
    hint = "this center is in shards over it, use towers.center_params(opt_state)"
    check.axis_bound(axes, hint)
    layout = Layout(across, Placement(shard_axis=axes))
    like = layout.check_cut(center)
    return layout.whole(layout.unite(center.pieces, like), like)


def _mean_center(center: OwnCenter) -> PyTree:
    """Return the workers' mean center if their axes are bound, else this worker's."""
    if not any(map(check.is_bound, center.axes)):
        return center.center  # all rows of a state, or one of them
    check.axis_bound(center.axes, "or leave all of them out for this worker's own")
    workers = _collectives.size(center.axes)

    def mean(c: jax.Array) -> jax.Array:
        total = _collectives.psum(trees.widened(c), center.axes)
        return (total / workers).astype(c.dtype)

    return jax.tree.map(mean, center.center)


def _check_apart(axes: _collectives.Axes, center: PyTree) -> None:
    """Check that a mesh treats the workers' own centers as different arrays.

    Raises:
      InvalidArgumentError: a shard_map treats them as one replicated array.
    """
    for leaf in jax.tree.leaves(center) if _collectives.checked(axes) else []:
        if missing := [n for n in axes if n not in _collectives.varying(leaf)]:
            raise errors.InvalidArgumentError(
                "with gossip every worker has a center of its own, and this state is "
                f"one for all of {missing[0]!r}: make it inside, or give shard_map "
                "in_specs and out_specs with a row of the state for each worker, "
                f"PartitionSpec({missing[0]!r})"
            )


@functools.cache
def _stays_on_host() -> bool:
    """Return whether outputs that a program puts into host memory stay there."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    program = jax.jit(functools.partial(_to, jax.memory.Space.Host)).lower(number)
    return bool(program.compile().output_shardings.memory_kind == "pinned_host")


def unwrapped(center: PyTree) -> tuple[bool, PyTree]:
    """Return whether a stored center is on the host, and the center without wrapper."""
    if isinstance(center, OnHost):
        return True, from_host(center.tree)
    return False, center


def held(center: PyTree) -> PyTree:
    """Return the arrays of a stored center, as a tree like the parameters.

    For a sharded center, these are this tower's pieces.
    """
    _, center = unwrapped(center)
    if isinstance(center, OwnCenter):
        return center.center
    return center.pieces if isinstance(center, ShardedCenter) else center


def _slice(leaf: jax.Array, index: Any, length: int, ndim: int) -> jax.Array:
    """Return the ``index``-th piece of ``length`` elements, padded with zeros."""
    pieces = -(-leaf.size // length)
    flat = _padded(leaf, pieces * length)
    # A slice beyond the last piece would be clamped into the array.
    piece = jax.lax.dynamic_slice_in_dim(flat, index * length, length)
    return _line(jnp.where(index < pieces, piece, 0), ndim)


def _padded(x: jax.Array, length: int) -> jax.Array:
    flat = x.reshape(-1)
    return flat if flat.size == length else jnp.pad(flat, (0, length - flat.size))


def _line(flat: jax.Array, ndim: int) -> jax.Array:
    """Give a flat array as many dimensions as its leaf has.

    Optimizers may read the number of dimensions, such as for a weight decay of matrices
    only.
    """
    return flat.reshape((1,) * (ndim - 1) + (-1,))


def _shaped(flat: jax.Array, like: Any) -> jax.Array:
    """Reshape a flat array, without its padding, to the shape of ``like``."""
    return flat[: math.prod(like.shape)].reshape(like.shape)


def _to(space: Any, tree: PyTree) -> PyTree:
    def move(leaf: Any) -> Any:
        if getattr(jax.typeof(leaf), "memory_space", space) == space:
            return leaf
        return jax.device_put(leaf, space)

    return jax.tree.map(move, tree)
