"""Where the center of a mesh lives: whole on every tower, in shards, or on the host.

Or nowhere: with every worker one of its own, which meet in pairs.

`Placement` is the caller's choice, `Layout` the same with the axis of the workers. The
round (`_exchange`) asks the layout for what it needs and knows of no case:

    part        what this tower keeps of a tree that its worker's towers all have alike
    piece       the part of a part that is this worker's; what is kept of the center
    combine     the messages of all workers as one, each tower its piece; also of what
                workers have sent encoded, and of two workers that meet
    unite       the part back from the workers' pieces
    whole       the tree back from the towers' parts

Without shards all of them are the identity, but for those that combine.
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
    r"""Where a center that is part of an optimizer state lives.

    With ``shard_axis``, each of the n towers of that axis keeps 1/n of the center and
    of the center optimizer's state, and moves that part only. Over the axis of the
    workers, messages are reduce-scattered and the new center is all-gathered (as much
    as the all-reduce of a whole center moves); rules that read the anchor or the live
    center gather it once more before. Over the towers of a data-parallel worker, whose
    gradients are alike, 1/n of the record is kept too, and only the gathering is left.

    The center optimizer and the rule must then work element by element; what looks at
    a whole tree or a whole leaf (global-norm clipping, trust ratios, matrix
    orthogonalization) is refused by name when the state is made.

    With ``gossip``, there is no center that all have. Every worker i keeps one of its
    own, and at an exchange meets one other worker j:

    .. math::
        m_i = \tfrac12 (m(x_i, c_i) + m(x_j, c_j))
            + \gamma \left(c_i - \tfrac12 (c_i + c_j)\right); \qquad
        c_i' = c_i + \text{center}(m_i); \qquad x_i \leftarrow c_i'

    (a rule that sums has the sum of the two messages). No collective is of more than
    two workers, and each sends one model in float32, or in the center's dtype if that
    is wider, however many there are. With ``rules.average()`` and 1 this is gossip
    averaging, :math:`c_i' = (x_i + x_j) / 2`; with 1 and DiLoCo's rule under plain
    momentum, ``rules.diloco(optax.sgd(0.7, momentum=0.5))``, it is NoLoCo. Partners
    change by turns: of n = 2, 4, 8, ... workers everyone has heard of everyone after
    log2(n) exchanges, of other numbers nearly so (and of an odd number one at a time
    meets nobody). NoLoCo draws its pairs at random; by turns the program has about
    log2(n) ways of sending and not n - 1.

    The pull goes through the center optimizer, as in NoLoCo, so momentum can swing
    centers apart. With 0.9 and a rate of 0.7, a gossip of 1 does so with 5 workers
    (with random pairs: 6), and 0.3 holds 64 together; with 0.5, a gossip of 1 holds as
    many as were tried (96), and without momentum any below 2 does, at rates up to 1.

    The centers stay different, so parameters and states do, too: keep them with a row
    for each worker, as `Towers` does; a checkpoint of the rows goes on as it was.
    `Towers.center_params` gives their mean. `Towers.unreplicate` and an elastic load go
    on from the means of centers and of their optimizers' states.

    Args:
      shard_axis: mesh axis, or tuple of axes, over which the center is divided; None
        keeps it whole on every tower. Leaves with fewer elements than towers stay
        whole.
      memory: ``"device"``, or ``"host"``: center and center optimizer's state wait in
        the host's pinned memory and visit the device for the exchange.
      gossip: :math:`\gamma > 0`, how far two centers that meet pull at each other, as
        part of the message; None for one center that all workers have.

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
      Graph is Provably Efficient for Decentralized Deep Training*, 2021 (the turns).
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

    pieces: PyTree  # as the parameters; leaves [1, ..., 1, elements of a piece]
    shapes: tuple[tuple[int, ...], ...]  # of the whole leaves
    # The worker's own, and those of the workers.
    axes: tuple[_collectives.Axes, _collectives.Axes]
    cut: tuple[int, int]  # into how many pieces by each


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["center"], meta_fields=["axes"]
)
@dataclasses.dataclass(frozen=True)
class OwnCenter:
    """One worker's own center, where each has another one."""

    center: PyTree  # as the parameters
    axes: _collectives.Axes  # of the workers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnHost:
    """What an optimizer state keeps in the memory of the host."""

    tree: PyTree  # leaves [1, 1, 1, 1, 1, 1, ...], see `for_host`


# JAX gives the buffer of a donated argument to the first output with its shape and
# dtype, whatever memory the two lie in; where a buffer of the host becomes an output on
# the device, the process aborts (JAX 0.10). So what lies on the host has a shape that
# nothing on the device has: these dimensions come before its own.
HOST_SHAPE = (1,) * 6


def for_host(tree: PyTree) -> PyTree:
    """``tree`` in the shapes that it has on the host."""
    return jax.tree.map(
        lambda leaf: jnp.reshape(leaf, (*HOST_SHAPE, *jnp.shape(leaf))), tree
    )


def from_host(tree: PyTree) -> PyTree:
    """The reverse of `for_host`, also of rows of such trees, where each lies."""

    def shaped(leaf: Any) -> jax.Array:
        shape, count = jnp.shape(leaf), len(HOST_SHAPE)
        found = (i for i in range(len(shape)) if shape[i : i + count] == HOST_SHAPE)
        if (first := next(found, None)) is None:  # behind the rows, if there are any
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
        """Axes of the shards whose towers are one worker together."""
        shards = _collectives.names(self.placement.shard_axis)
        return tuple(name for name in shards if name not in self.workers)

    @property
    def across(self) -> _collectives.Axes:
        """Axes of the shards whose towers are workers of their own."""
        shards = _collectives.names(self.placement.shard_axis)
        return tuple(name for name in shards if name in self.workers)

    @property
    def beside(self) -> _collectives.Axes:
        """Axes of workers that all keep the same shards."""
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
        """What every worker has for itself, where the center is one of its own."""
        bound = all(map(check.is_bound, self.workers))
        if not (self.in_pairs and bound):
            return tree
        return _collectives.apart(tree, self.workers)

    def check_bound(self) -> None:
        """Every axis that this needs is bound where this is traced."""
        hint = None
        if self.sharded:
            hint = (
                "a center in shards lives inside the mesh; its state is made by "
                "towers.create(tx.init, params), and updated in Towers' programs"
            )
        check.axis_bound(self.axis_name, hint)
        check.axis_bound(self.placement.shard_axis, hint)

    def check_met(self, rule: str) -> None:
        """All workers of the mesh around this take part in its exchanges.

        Raises:
          InvalidArgumentError: each would train a model of its own.
        """
        if unmet := _collectives.unmet(self.workers):
            (name,) = unmet
            raise errors.InvalidArgumentError(
                f"{rule} exchanges over axis_name={self.axis_name!r}, and the workers "
                f"are the {_collectives.size(unmet)} members of {name!r}: each would "
                f"train a model of its own. Give the rule axis_name={name!r}"
            )

    def part(self, tree: PyTree) -> PyTree:
        """What this tower keeps of ``tree``, which its worker's towers have alike."""
        return self._own(tree, self.within, _collectives.size(self.across))

    def piece(self, tree: PyTree) -> PyTree:
        """What this tower keeps of the center ``tree``."""
        return self._own(tree, (*self.within, *self.across), 1)

    def _own(self, tree: PyTree, axes: _collectives.Axes, pieces: int) -> PyTree:
        """This tower's share of every leaf that is cut: so many ``pieces`` of it."""

        def own(leaf: Any) -> jax.Array:
            leaf, length = jnp.asarray(leaf), self._length(leaf)
            if length is None or _collectives.size(axes) == 1:
                return leaf
            return _slice(leaf, _collectives.index(axes), pieces * length, leaf.ndim)

        return jax.tree.map(own, tree)

    def count(self, turn: jax.Array) -> Any:
        """Workers that an exchange brings together."""
        workers = _collectives.size(self.workers)
        if not self.in_pairs or workers == 1:
            return workers
        return 2 - _collectives.is_alone(self.workers, turn).astype(jnp.int32)

    def mean(self, number: jax.Array, turn: jax.Array) -> jax.Array:
        """Of a scalar that each worker has, over those of an exchange."""
        count = _collectives.size(self.workers)
        if self.in_pairs and count > 1:  # who is alone meets itself
            return (number + _collectives.met(number, self.workers, turn)) / 2
        return _collectives.psum(number, self.workers) / count

    def combine(
        self, message: PyTree, how: How, like: PyTree, center: PyTree, turn: jax.Array
    ) -> PyTree:
        """This tower's piece of all workers' messages, each given as a part.

        Where they cannot be summed on their way, pieces of them go all to all, so that
        each tower has all messages of its piece. Where workers meet in pairs, ``turn``
        says who meets whom, and their centers pull at each other.
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
        """As `combine`, of two workers that meet, with the pull of their centers.

        What pulls at the other goes with the message, so that one model travels: with
        gossip 1, a sum is ``m_i + ((m_j - c_j / 2) + c_i / 2)``. The other's message is
        rounded to the last bit of its center, one's own is not.
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
        """As `combine`, of what cannot be summed before it is decoded.

        Every tower gets what each worker has sent of the piece that it keeps, and adds
        up the messages in float32 or wider: all in the same order, so that towers that
        keep the same get the same.

        Args:
          encoded: what this tower's worker sends: for each leaf of the part, a tree of
            arrays; these have the leaf's shape where the center is in shards.
          message: ``encoded -> message``, of a piece.
          how: as the rule combines them.
          like: a tree with the shapes of the whole.
          share: of this tower's worker: how much its message counts, scalar; None where
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
                """All that this tower looks at of a message."""
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
        """Every worker's: [workers, ...]."""
        axes = (*self.beside, *self.across)
        return _collectives.gather(part[None], axes, same=True)

    def _collect(self, whole: jax.Array, part: jax.Array) -> jax.Array:
        """This tower's piece of every worker's part: [workers, ...].

        Of a center that is whole, this tower looks at one of as many pieces as there
        are workers.
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
        """The message that all workers' messages are, of which pieces are here."""

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
        """Whether all towers look at the same elements of a leaf, which are all."""
        return self.sharded and self._length(leaf) is None

    def unite(self, pieces: PyTree, like: PyTree) -> PyTree:
        """The part of the center that this worker's tower keeps, from all workers."""

        def unite(piece: jax.Array, whole: Any) -> jax.Array:
            if self._length(whole) is None:
                return piece
            flat = _collectives.gather(piece.reshape(-1), self.across)
            if _collectives.size(self.within) == 1:
                return _shaped(flat, whole)
            return _line(flat, whole.ndim)

        return jax.tree.map(unite, pieces, like)

    def whole(self, parts: PyTree, like: PyTree) -> PyTree:
        """The whole tree, from the parts of all towers of this worker."""

        def whole(part: jax.Array, whole: Any) -> jax.Array:
            if self._length(whole) is None:
                return part
            flat = _collectives.gather(part.reshape(-1), self.within, same=True)
            return _shaped(flat, whole)

        return jax.tree.map(whole, parts, like)

    def _length(self, leaf: Any) -> int | None:
        """Elements of a piece; None for a leaf that stays whole."""
        pieces = _collectives.size((*self.within, *self.across))
        return piece_length(jnp.shape(leaf), pieces)

    def _cut(self) -> Any:
        """The axes of the pieces, and into how many pieces each of them cuts."""
        axes = (self.within, self.across)
        return axes, tuple(map(_collectives.size, axes))

    def store(self, center: PyTree, center_state: PyTree, like: PyTree) -> Any:
        """Pieces and center optimizer's state as an optimizer state keeps them.

        ``like`` is the whole center, or what was stored before.
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
        """Moves what `store` made, and a checkpoint gave back, to where it belongs."""
        if self.on_host:
            return _to(jax.memory.Space.Host, (center, center_state))
        return center, center_state

    def load(self, center: PyTree, center_state: PyTree) -> Any:
        """The reverse of `store`."""
        if self.on_host:
            both = _to(jax.memory.Space.Device, (center.tree, center_state.tree))
            center, center_state = from_host(both)
        return held(center), center_state

    def check_memory(self) -> None:
        """The backend has the memory that was asked for."""
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
        """Parameters and the center of a state belong together."""
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
        """A tree like the whole of a center that was cut as here."""
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
    """Elements of each of so many pieces of a leaf; None if that stays whole."""
    elements = math.prod(shape)
    if pieces == 1 or not shape or elements < pieces:
        return None
    return -(-elements // pieces)


# Of a center that is whole, on the device, and has one worker.
WHOLE = Layout()


def whole_center(center: PyTree) -> PyTree:
    """The center of an optimizer state, as the parameters, on the device."""
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
    """Of all workers where they can be heard, else this one's."""
    if not any(map(check.is_bound, center.axes)):
        return center.center  # the rows of a state, or one of them
    check.axis_bound(center.axes, "or leave all of them out for this worker's own")
    workers = _collectives.size(center.axes)

    def mean(c: jax.Array) -> jax.Array:
        total = _collectives.psum(trees.widened(c), center.axes)
        return (total / workers).astype(c.dtype)

    return jax.tree.map(mean, center.center)


def _check_apart(axes: _collectives.Axes, center: PyTree) -> None:
    """Of centers that workers have of their own, no mesh takes them for one.

    Raises:
      InvalidArgumentError: one does.
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
    """Whether what a program puts into the host's memory is there when it ends."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    program = jax.jit(functools.partial(_to, jax.memory.Space.Host)).lower(number)
    return bool(program.compile().output_shardings.memory_kind == "pinned_host")


def unwrapped(center: PyTree) -> tuple[bool, PyTree]:
    """Whether a stored center is on the host, and what it is there."""
    if isinstance(center, OnHost):
        return True, from_host(center.tree)
    return False, center


def held(center: PyTree) -> PyTree:
    """What a state holds of a center, as a tree like the parameters."""
    _, center = unwrapped(center)
    if isinstance(center, OwnCenter):
        return center.center
    return center.pieces if isinstance(center, ShardedCenter) else center


def _slice(leaf: jax.Array, index: Any, length: int, ndim: int) -> jax.Array:
    """The ``index``-th piece of ``length`` elements, filled up with zeros."""
    pieces = -(-leaf.size // length)
    flat = _padded(leaf, pieces * length)
    # Beyond the last one a slice would be moved back into the array.
    piece = jax.lax.dynamic_slice_in_dim(flat, index * length, length)
    return _line(jnp.where(index < pieces, piece, 0), ndim)


def _padded(x: jax.Array, length: int) -> jax.Array:
    flat = x.reshape(-1)
    return flat if flat.size == length else jnp.pad(flat, (0, length - flat.size))


def _line(flat: jax.Array, ndim: int) -> jax.Array:
    """With the dimensions of its leaf, which optimizers may look at.

    A weight decay for matrices only does, say.
    """
    return flat.reshape((1,) * (ndim - 1) + (-1,))


def _shaped(flat: jax.Array, like: Any) -> jax.Array:
    """A line, and perhaps zeros behind it, in the shape of ``like``."""
    return flat[: math.prod(like.shape)].reshape(like.shape)


def _to(space: Any, tree: PyTree) -> PyTree:
    def move(leaf: Any) -> Any:
        if getattr(jax.typeof(leaf), "memory_space", space) == space:
            return leaf
        return jax.device_put(leaf, space)

    return jax.tree.map(move, tree)
