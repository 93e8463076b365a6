"""What a center is: a chain of immutable versions, and the programs that make them.

Nobody else calls the rule where the center is. The store knows neither workers nor
locks: its owner calls it from one thread at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, trees
from agn_optax.center._packing import Packed, packing_of
from agn_optax.center._reach import Bound, Reach, extremes, reach_of
from agn_optax.center._refusals import UNSAID, Claim
from agn_optax.round import Public
from agn_optax.rules import Rule, codecs, discounted, downpour, robust, told

PyTree = Any

_SMALL = 64 << 20  # bytes
_BLOCK = 1 << 18  # numbers whose squares are added up in float32
_MOST = (1 << 31) - _BLOCK  # numbers of an array whose blocks int32 can count
_MOST_INT = (1 << 31) - 1
_LEAST_NORM = 1e-12  # of smaller ones float32 has no squares
_AT_ONCE = 16.0  # times the norm of a message, for which others may have bounds, too
_MOST_NORM = float(np.finfo(np.float32).max)
_MISSES = 100  # looks at messages before bounds are looked for again


class CenterState(NamedTuple):
    """All that a center is, as a pytree to save and to restore from."""

    params: PyTree  # the current version
    center_state: PyTree  # the center optimizer's
    version: Any  # int: exchanges applied
    # As workers adopt it, with the codec's state, where the rule's codec answers in
    # differences; else None.
    public: Public | None = None


@dataclasses.dataclass
class Version:
    """One version of the center, and whether somebody may still look at it."""

    params: PyTree  # as the store keeps them: `Store.tree` makes what they stand for
    number: int
    readers: int = 0  # who say when they have finished
    escaped: bool = False  # given to somebody who need not say
    public: Public | None = None  # of the same number; read and moved as this is


class Prepared(NamedTuple):
    """All that makes one version of another: see `Store.prepare`."""

    before: Version
    program: SimpleNamespace
    one: PyTree  # a contribution, or the sum of a round's messages
    about: Any  # what the center optimizer is told of it
    norm: float  # that its messages have together, at most


class Known(NamedTuple):
    """A bound of messages at a center that has been looked at."""

    bound: Bound
    largest: float  # absolute value of its numbers, at most

    def after(self, norm: float) -> Known | None:
        """The same after messages of that norm; None if they may be too much."""
        reached = self.largest + self.bound.update
        fits = norm <= self.bound.message and reached < self.bound.center
        return Known(self.bound, reached) if fits else None


class Store:
    """The center variable of a rule, version after version.

    Args:
      rule: whose center it is.
      params: of the first version; copied.
      dtype: floating dtype of the center; None keeps that of ``params``.
      device: where the center lives; None leaves it where ``params`` are.
      packs: keeps the parameters packed, where the rule does the same to all elements.
      center_state: of the rule's center optimizer, and of the tree; None for a new one.
      version: of the parameters.
      public: what workers have of it, where they hear of differences; None for all of
        it.

    Attributes:
      current: the newest version.
      packing: how the parameters are packed; None if they are kept as their tree.
      like: the tree of parameters, abstract.
      contribution_like: what workers send, abstract.
      difference_like: between two public centers, abstract; None if none travel.
    """

    def __init__(
        self,
        rule: Rule,
        params: PyTree,
        dtype: Any = None,
        device: Any = None,
        *,
        packs: bool = False,
        center_state: PyTree = None,
        version: int = 0,
        public: Public | None = None,
    ) -> None:
        if device is not None:
            params = jax.device_put(params, device)
        self.like = jax.eval_shape(lambda: trees.copy(params, dtype))
        self.contribution_like = rounds.contribution_like(rule, self.like)
        # In the memory of the CPU that programs use when they are not told otherwise.
        here, new = SingleDeviceSharding(jax.local_devices()[0]), jnp.zeros(()).sharding
        self._on_host = jax.default_backend() == "cpu" and all(
            getattr(leaf, "sharding", new) == here for leaf in jax.tree.leaves(params)
        )
        packs = packs and self._on_host
        packing = self.packing = packing_of(rule, self.like) if packs else None
        kept = trees.copy(params, dtype) if packing is None else packing.keep(params)
        self._rule, self._programs = rule, _programs(rule)
        self._known: Known | None = None  # of the current version
        # The norm for which no bounds were found, and looks until they are looked for.
        self._missed, self._misses = 0.0, 0
        if public is None:
            public = rounds.init_public(rule, kept)
        self.current = Version(kept, version, public=public)
        self.difference_like = rounds.difference_like(rule, self.like)
        # The last differences, by the versions that they make: less than all of it.
        size, whole = map(trees.nbytes, (self.difference_like, self.like))
        most = (whole - 1) // size if 0 < size <= whole else 0
        self._differences: deque[tuple[int, PyTree]] = deque(maxlen=most)
        if center_state is None:
            self._check_answers()
            # Of a copy: some optimizers keep the parameters that they are shown.
            center_state = rule.center.init(trees.copy(kept))
        elif packing is not None:
            center_state = packing.pack_state(rule, center_state)
        self._center_state = center_state

    @classmethod
    def restore(
        cls, rule: Rule, saved: CenterState, device: Any = None, *, packs: bool = False
    ) -> Store:
        """The store that `save` was asked of; see `LocalCenter.restore`."""
        check.float_leaves(saved.params, "saved.params")
        params, state, public = jax.device_put(
            (saved.params, saved.center_state, saved.public), device
        )
        expected = jax.eval_shape(rule.center.init, params)
        check.same_tree(
            state, expected, "saved.center_state", "the rule's center_state"
        )
        if public is not None:
            expected = jax.eval_shape(
                functools.partial(rounds.init_public, rule), params
            )
            what = "the rule's public center"
            check.same_tree(public, expected, "saved.public", what)
        version = int(saved.version)
        if version < 0:
            raise errors.InvalidArgumentError(
                f"saved.version must not be negative, got {version}"
            )
        state, public = trees.copy((state, public))
        return cls(
            rule,
            params,
            packs=packs,
            center_state=state,
            version=version,
            public=public,
        )

    def _check_answers(self) -> None:
        """Workers can adopt the first version, in the dtype that it travels in."""
        codec = self._rule.codec
        if codec.answer_dtype is None:
            return
        largest = float(_largest(self.current.params))
        most = float(jnp.finfo(codec.answer_dtype).max)
        if largest > most:
            raise errors.InvalidArgumentError(
                f"by codec {codec.name!r} workers adopt the center as "
                f"{jnp.dtype(codec.answer_dtype)}, which holds numbers up to "
                f"{most:g}; the first parameters have {largest:g}"
            )

    @property
    def state_bytes(self) -> int:
        """Of the center optimizer's state."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._center_state))

    def save(self) -> CenterState:
        """A copy of everything, for a checkpoint."""
        return self.unpacked(self.copy())

    def copy(self) -> CenterState:
        """A copy of everything as it is kept, which nobody moves; see `unpacked`."""
        current = self.current
        params, center_state, public = trees.copy(
            (current.params, self._center_state, current.public)
        )
        return CenterState(params, center_state, current.number, public)

    def unpacked(self, copied: CenterState) -> CenterState:
        """Return a copy as a tree; wait for the device where it was packed."""
        if self.packing is None:
            return copied
        params, center_state, number, public = copied
        params = jax.device_put(self.packing.unpack(params))
        center_state = self.packing.unpack_state(self._rule, center_state)
        return CenterState(params, jax.device_put(center_state), number, public)

    def tree(self, version: Version) -> PyTree:
        """The parameters of a version, which must not be moved in place any more."""
        if self.packing is None:
            return version.params
        return jax.device_put(self.unplace(version.params))

    def answer(self, version: Version) -> PyTree:
        """The parameters of a version as a worker adopts them at an exchange."""
        params = self.public(version)
        if self._rule.codec.answer_dtype is None:
            return params
        return self._programs.answer(params)

    def public(self, version: Version) -> PyTree:
        """The parameters of a version as all workers have it; the exact ones if so."""
        return self.tree(version) if version.public is None else version.public.params

    def differences(self, since: int, version: Version) -> list[PyTree] | None:
        """By which the public center of a number becomes that of a version.

        None where they are not kept any more, or would be more than all of it.
        """
        if version.public is None:
            return None
        made = [each for n, each in self._differences if since < n <= version.number]
        return made if len(made) == version.number - since else None

    def take(self, contribution: PyTree) -> PyTree:
        """A contribution, encoded, if it belongs to this center, where the center is.

        Raises:
          TreeMismatchError: it does not.
        """
        if self.packing is None or not self.packing.holds(contribution):
            like = self.contribution_like
            check.same_tree(
                contribution, like, "contribution", "what this center takes"
            )
            check.same_kinds(contribution, like, "contribution")
        return self.place(contribution)

    def place(self, contribution: PyTree) -> PyTree:
        """A contribution where the center is, as the center is kept."""
        if self.packing is not None:
            is_packed = self.packing.holds(contribution)
            return contribution if is_packed else self.packing.pack(contribution)
        leaves = jax.tree.leaves(contribution)
        if self._on_host and all(isinstance(leaf, np.ndarray) for leaf in leaves):
            return contribution  # programs take it as it is, in less time
        return trees.place_like(contribution, self.current.params)

    def unplace(self, kept: PyTree) -> PyTree:
        """As a tree, for others: a contribution, or parameters as this keeps them."""
        return kept if self.packing is None else self.packing.unpack(kept)

    def norm(self, contribution: PyTree, center: PyTree) -> jax.Array:
        """Global norm of the message that a contribution is to ``center``, float32.

        It is finite if, and only if, the message is: of a finite message whose norm is
        beyond float32 it is float32's largest number.
        """
        if (
            self._rule.message is None
            and isinstance(contribution, Packed)
            and all(p.dtype == np.float32 and p.nbytes < _SMALL for p in contribution)
        ):
            # A program takes longer to call.
            norm = np.sqrt(np.float32(sum(map(_square, contribution))))
            if _LEAST_NORM < norm < math.inf:
                return norm
        return self._programs.norm(contribution, center)

    def measure(
        self, contribution: PyTree, center: PyTree, *, elements: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """The `norm`, and if asked for the largest absolute value of an element."""
        if elements:
            return self._programs.measure(contribution, center)
        return self.norm(contribution, center), None

    def apply(
        self,
        contributions: Sequence[PyTree],
        staleness: Sequence[int],
        weights: Sequence[float] | None = None,
        claims: Sequence[Claim] | None = None,
        workers: int = 1,
    ) -> None:
        """Makes the next version, whatever it is: `prepare`, and `move`."""
        self.move(self.prepare(contributions, staleness, weights, claims, workers))

    def prepare(
        self,
        contributions: Sequence[PyTree],
        staleness: Sequence[int],
        weights: Sequence[float] | None = None,
        claims: Sequence[Claim] | None = None,
        workers: int = 1,
        norm: float = math.inf,
    ) -> Prepared:
        """All that makes the next version of the current one; nothing moves yet.

        Args:
          contributions: one; or those of a round, whose messages become one, as the
            rule combines them.
          staleness: of each of them.
          weights: of each message of a round; None if this is none. A rule that
            discounts messages by their staleness needs no others.
          claims: of their workers; None where nothing is said.
          workers: that are there.
          norm: that the messages have together, at most.
        """
        before, programs = self.current, self._programs
        claims = claims or [UNSAID] * len(contributions)
        abouts = [
            _about(before.number, stale, claim.steps, claim.weight, workers)
            for stale, claim in zip(staleness, claims, strict=True)
        ]
        if weights is None:
            (one,) = contributions
            return Prepared(before, programs.move, one, abouts[0], norm)
        one, count = None, len(contributions)
        # Of those that say nothing, 1.
        steps = [max(1, claim.steps) for claim in claims]
        own = [1.0 if claim.weight is None else claim.weight for claim in claims]
        is_mean, mean = self._rule.combine == "mean", math.fsum(own) / count
        counted = []
        for told_of, weight, weighs in zip(abouts, weights, own, strict=True):
            counts = 1.0 if self._rule.discount else weight
            counts *= weighs / mean if is_mean else 1.0
            counted.append((told_of, _on_device(counts)))
        if programs.combine is None:
            for contribution, each in zip(contributions, counted, strict=True):
                one = programs.weigh(one, contribution, before.params, *each)
        else:
            one = programs.combine(list(contributions), before.params, counted)
        mean_steps = max(1, round(sum(steps) / count))
        about = (
            _on_device(float(count if is_mean else 1)),
            _about(before.number, 0, mean_steps, mean, workers),
        )
        # A discount may lengthen each message, and what is not a sum all of them.
        if self._rule.discount is not None or not self._rule.is_summed:
            norm = math.inf
        return Prepared(before, programs.move_round, one, about, norm)

    def move(self, prepared: Prepared) -> None:
        """Makes the version that was prepared, of the one that is still current."""
        before = prepared.before
        assert before is self.current
        # Whoever was promised the old version keeps it; else it is written over.
        in_place = (
            not before.escaped and not before.readers and self._rule.adopts == "after"
        )
        run = prepared.program.in_place if in_place else prepared.program.anew
        params, self._center_state, public, made = run(
            prepared.one,
            prepared.about,
            before.params,
            self._center_state,
            before.public,
        )
        self._becomes(params, public, made)

    def look(self, prepared: Prepared) -> tuple[bool, Known | None]:
        """Return whether a version would be finite, and the bound found with it.

        Waits for the device, so it is not for those who hold a lock; nobody may `move`
        meanwhile. Changes nothing that others read: see `learn`.
        """
        before = prepared.before
        found = self._find_bound(before, prepared.norm)
        if found is not None:
            return True, found
        is_finite = prepared.program.stays_finite(
            prepared.one,
            prepared.about,
            before.params,
            self._center_state,
            before.public,
        )
        return bool(is_finite), None

    def learn(self, known: Known | None) -> None:
        """Keep the bound that `look` has found of the version that is made next."""
        self._known = known

    def _becomes(self, params: PyTree, public: Public | None, made: PyTree) -> None:
        """The next version is there, and by which difference workers hear of it."""
        number = self.current.number + 1
        self.current = Version(params, number, public=public)
        if public is not None:
            self._differences.append((number, made))

    @functools.cached_property
    def _reach(self) -> tuple[Reach | None, float]:
        """The bounds of messages, if there are any; and how far these may go."""
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(self.current.params)]
        if self._rule.codec.answer_dtype is not None:
            dtypes.append(self._rule.codec.answer_dtype)
        most = min((float(jnp.finfo(dtype).max) for dtype in dtypes), default=0.0)
        if _is_narrower(self.difference_like, self.like):
            return None, most / 2  # a difference may have no room
        reach = reach_of(self._rule, self.current.params, self._center_state)
        return reach, most / 2

    def is_bounded(self, prepared: Prepared) -> bool:
        """Return whether a version is known to be finite; then it must be made.

        By how far all messages since can have carried the center from where `look` has
        found it; nobody waits for the device.
        """
        after = self._known and self._known.after(prepared.norm)
        if after is not None:
            self._known = after
        return after is not None

    def _find_bound(self, before: Version, norm: float) -> Known | None:
        """Bounds of messages of a norm and more, by looking at the center."""
        if not norm < _MOST_NORM:
            return None
        if self._misses > 0 and norm > self._missed / 2:
            self._misses -= 1
            return None
        reach, most = self._reach
        if reach is None:
            return None
        params = jax.tree.leaves(before.params)
        found = extremes([*params, *jax.tree.leaves(self._center_state)])
        boxes, state = found[: len(params)], found[len(params) :]
        if None not in boxes:
            largest = max((max(-box[0], box[1]) for box in boxes if box), default=0.0)
            # With a weight decay, less is known of a larger center.
            for message in (_AT_ONCE * norm, norm):
                for center in (most, min(most, 2 * largest + 1)):
                    bound = reach.bound(message, center, state)
                    known = bound and Known(bound, largest).after(norm)
                    if known is not None:
                        return known
        self._missed, self._misses = norm, _MISSES
        return None

    def shift(self, adopted: PyTree, sent: PyTree) -> None:
        """Makes the next version: ``adopted`` in place of ``sent``, and all since.

        Args:
          adopted: as `place` returns it.
          sent: as `place` returns it.
        """
        params = _with_progress(adopted, self.current.params, sent)
        self._becomes(params, *self._programs.publish(params, self.current.public))
        self._known = None


_with_progress = jax.jit(rounds.with_progress)


def _square(part: np.ndarray) -> float:
    """The square of a norm, with little to round: blocks are added up in float64."""
    blocks = (part[i : i + _BLOCK] for i in range(0, part.size, _BLOCK))
    with np.errstate(over="ignore", invalid="ignore"):
        return sum(float(np.dot(block, block)) for block in blocks)


def _by_blocks(
    square: Callable[..., jax.Array], arrays: Sequence[jax.Array], dtype: Any
) -> jax.Array:
    """The sum of ``square`` of arrays of one length, some numbers at a time."""
    count = arrays[0].size
    size = min(_BLOCK, count)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        begin = i * size
        start = jnp.minimum(begin, count - size)  # the last one goes back a little
        blocks = [jax.lax.dynamic_slice(a, (start,), (size,)) for a in arrays]
        is_new = jnp.arange(size, dtype=begin.dtype) >= begin - start
        return total + jnp.sum(jnp.where(is_new, square(*blocks), 0.0))

    return jax.lax.fori_loop(0, -(-count // size), add, jnp.zeros((), dtype))


def _floats(tree: PyTree) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _is_narrower(difference: PyTree, center: PyTree) -> bool:
    """Whether something of a difference has room for smaller numbers only."""
    most = min((jnp.finfo(x.dtype).maxexp for x in _floats(center)), default=0)
    return any(jnp.finfo(x.dtype).maxexp < most for x in _floats(difference))


class _About(NamedTuple):
    """What a center optimizer is told of a message, as arrays of the device."""

    staleness: jax.Array
    steps: jax.Array
    weight: jax.Array
    since: tuple[jax.Array, jax.Array]  # a multiple of a block, and the rest
    workers: jax.Array

    def said(self) -> dict[str, Any]:
        """As extra arguments, and that this is a center outside the program."""
        return {**self._asdict(), "since": sum(self.since), "outside": True}


_VERSIONS = 256  # in a block: so rarely something new goes to the device


def _about(
    version: int, stale: int, steps: int, weight: float | None, workers: int
) -> _About:
    since = min(max(version - stale, 0), _MOST_INT)
    rest = since % _VERSIONS
    return _About(
        _on_device(stale),
        _on_device(steps or 1),
        _on_device(1.0 if weight is None else weight),
        (_on_device(since - rest), _on_device(rest)),
        _on_device(workers),
    )


@functools.lru_cache(maxsize=1024, typed=True)
def _on_device(number: float) -> jax.Array:
    if isinstance(number, int):  # of a staleness beyond int32, the largest int32
        return jax.device_put(np.int32(min(number, _MOST_INT)))
    return jax.device_put(np.float64(number))


@jax.jit
def _largest(center: PyTree) -> jax.Array:
    leaves = jax.tree.leaves(center)
    wide = trees.wider(jnp.float32, *(leaf.dtype for leaf in leaves))
    each = [jnp.abs(leaf).max(initial=0).astype(wide) for leaf in leaves]
    return functools.reduce(jnp.maximum, each, jnp.zeros((), wide))


_ANY = downpour()  # for what a measure does not read of a rule


@functools.lru_cache(maxsize=32)
def _measures(rule: Rule) -> dict[str, Any]:
    """What is measured of messages, shared by all rules that make the same of them."""

    def norm(contribution: PyTree, center: PyTree) -> jax.Array:
        def messages(sent: PyTree, center: PyTree) -> list[jax.Array]:
            made = jax.tree.leaves(rounds.message_of(rule, sent, center))
            wide = trees.wider(jnp.float32, *(m.dtype for m in made))
            return [m.astype(wide) for m in made]

        def root(squares: Sequence[jax.Array]) -> jax.Array:
            none = jnp.zeros((), squares[0].dtype if squares else jnp.float32)
            return jnp.sqrt(sum(squares, none))

        plain = root([jnp.sum(m**2) for m in messages(contribution, center)])
        # Where squares overflow, or vanish: of numbers closer to 1.
        digits = int(jnp.finfo(plain.dtype).maxexp)
        # The squares of numbers below `_LEAST_NORM`, about 2^-40, stay finite.
        up, down = 2.0 ** (0.5 * digits + 32), 2.0 ** (-0.625 * digits)
        scale = jnp.where(plain < 1, up, down).astype(plain.dtype)

        def carefully() -> jax.Array:
            def square(*block: jax.Array) -> jax.Array:
                (message,) = messages(*block)
                return (message * scale) ** 2

            # XLA scales all of an array before it adds anything up.
            if (
                isinstance(contribution, Packed)
                and max(map(jnp.size, contribution)) < _MOST
            ):
                pairs = zip(contribution, center, strict=True)
                found = root([_by_blocks(square, pair, plain.dtype) for pair in pairs])
            else:
                made = messages(contribution, center)
                found = root([jnp.sum((m * scale) ** 2) for m in made])
            return jnp.where(jnp.isfinite(found), at_most(found / scale), found)

        def at_most(norm: jax.Array) -> jax.Array:
            return jnp.minimum(norm, jnp.asarray(_MOST_NORM, norm.dtype))

        is_plain = (plain > _LEAST_NORM) & (plain < jnp.inf)
        made = jax.lax.cond(is_plain, lambda: plain, carefully)
        made = jnp.where(jnp.isfinite(made), at_most(made), made)
        return made.astype(jnp.float32)

    def measure(contribution: PyTree, center: PyTree) -> tuple[jax.Array, jax.Array]:
        message = rounds.message_of(rule, contribution, center)
        return norm(contribution, center), _largest(message)

    return {"norm": jax.jit(norm), "measure": jax.jit(measure)}


@functools.lru_cache(maxsize=32)
def _programs(rule: Rule) -> SimpleNamespace:
    """What the stores of one rule compile, shared by them."""

    def counted(
        contribution: PyTree, center: PyTree, about: _About, weight: Any
    ) -> PyTree:
        """A message of a round, as much as it counts, in float32 at least."""
        message = rounds.message_of(rule, contribution, center)
        message = jax.tree.map(
            lambda m, c: m.astype(trees.wider(c.dtype, jnp.float32)), message, center
        )
        message = discounted(rule, message, **told(about.said()))
        return jax.tree.map(lambda m: m * weight.astype(m.dtype), message)

    # Added to the others, and divided once.
    def weigh(
        total: PyTree, contribution: PyTree, center: PyTree, about: _About, weight: Any
    ) -> PyTree:
        message = counted(contribution, center, about, weight)
        return message if total is None else jax.tree.map(jnp.add, total, message)

    # All at a time, for rules whose messages are not summed.
    def combine(
        how: robust.Combine, contributions: list[PyTree], center: PyTree, counts: Any
    ) -> PyTree:
        messages = [
            counted(contribution, center, *each)
            for contribution, each in zip(contributions, counts, strict=True)
        ]
        together = jax.tree.map(lambda *m: jnp.stack(m), *messages)
        return how.of(together, robust.whole_total)

    def move(one: PyTree, about: _About, center: PyTree, state: PyTree) -> PyTree:
        return rounds.move_center(rule, one, center, state, extra_args=about.said())

    made = dataclasses.replace(
        rule, message=None, discount=None, codec=codecs.identity()
    )

    def move_round(
        total: PyTree, of_round: tuple[Any, _About], center: PyTree, state: PyTree
    ) -> PyTree:
        parts, about = of_round
        message = jax.tree.map(lambda t: t / parts.astype(t.dtype), total)
        said = about.said()
        return rounds.move_center(made, message, center, state, extra_args=said)

    def compiled(program: Any) -> SimpleNamespace:
        """One program three times: ``(one, about, center, center_state, public)``."""

        def whole(
            one: PyTree, about: Any, center: PyTree, state: PyTree, public: PyTree
        ) -> PyTree:
            moved, state = program(one, about, center, state)
            return moved, state, *rounds.publish(rule, moved, public)

        def stays_finite(
            one: PyTree, about: Any, center: PyTree, state: PyTree, public: PyTree
        ) -> Any:
            moved, moved_state, _, made = whole(one, about, center, state, public)
            # As workers adopt it: a narrow answer has no room for a large center.
            old = jax.tree.leaves((rounds.answer_of(rule, center), state))
            new = jax.tree.leaves((rounds.answer_of(rule, moved), moved_state))
            stay = [
                (jnp.isfinite(n) | ~jnp.isfinite(o)).all()
                for n, o in zip(new, old, strict=True)
                if jnp.issubdtype(n.dtype, jnp.floating)
            ]
            if _is_narrower(made, center):
                stay += [jnp.isfinite(x).all() for x in _floats(made)]
            return jnp.stack([*stay, jnp.array(True)]).all()

        # The center optimizer's state has no readers, so it is always updated in place.
        # Versions may have.
        return SimpleNamespace(
            in_place=jax.jit(whole, donate_argnums=(2, 3, 4)),
            anew=jax.jit(whole, donate_argnums=3),
            stays_finite=jax.jit(stays_finite),  # what is finite; nothing moves
        )

    return SimpleNamespace(
        **_measures(dataclasses.replace(_ANY, message=rule.message, codec=rule.codec)),
        weigh=jax.jit(weigh, donate_argnums=0),
        # One program for each number of them; None where messages are summed.
        combine=jax.jit(functools.partial(combine, rule.combine))
        if isinstance(rule.combine, robust.Combine)
        else None,
        move=compiled(move),  # by a contribution
        move_round=compiled(move_round),  # by the sum of a round's
        answer=jax.jit(functools.partial(rounds.answer_of, rule)),
        publish=jax.jit(functools.partial(rounds.publish, rule)),
    )
