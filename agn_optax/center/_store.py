"""The store: the immutable versions of a center, and the compiled programs.

Only the store moves the center. It knows neither workers nor locks: its owner calls it
from one thread at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.center._message_limits import MAX_NORM
from agn_optax.center._packing import Packed, packing_of
from agn_optax.center._submission import Submission
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule, max_workers

PyTree = Any
_log = logging.getLogger("agn_optax")

_SMALL = 64 << 20  # bytes; the norm of smaller arrays is computed by NumPy
_BLOCK = 1 << 18  # numbers whose squares are summed in float32
_MAX_INT = (1 << 31) - 1
_RUNS, _RUN = 64, 16  # runs of elements in a sample, and elements of a run


class CenterState(NamedTuple):
    """The complete state of a center, as a pytree to save and restore."""

    params: PyTree  # the current version
    center_state: PyTree  # state of the center optimizer
    version: Any  # int: number of updates so far


def log_version(event: str, state: Callable[[], CenterState]) -> None:
    """Log the version and the hash of a center if the log takes information.

    Args:
      event: the reason, as the beginning of the line.
      state: returns a copy of the state; called only if it is logged.
    """
    if _log.isEnabledFor(logging.INFO):
        params, _, version = state()
        _log.info("%s at version %d, hash %s", event, version, trees.digest(params))


@dataclasses.dataclass
class Version:
    """One version of the center, and its readers."""

    params: PyTree  # as the store keeps them; `Store.tree` returns them as a tree
    number: int
    readers: int = 0  # number of readers that will report the end of reading
    escaped: bool = False  # whether it has readers that will not report it


class Store:
    """The versions of a rule's center variable.

    Args:
      rule: the rule.
      params: parameters of the first version, which are copied.
      dtype: floating dtype of the center; None keeps that of ``params``.
      device: device of the center; None leaves it where ``params`` are.
      flatten: flatten the parameters into two arrays, if the rule is elementwise.
      center_state: state of the center optimizer, for the parameters as a tree; None
        for a new state.
      version: number of the first version.

    Attributes:
      current: the newest version.
      packing: the layout of flattened parameters; None if they are kept as a tree.
      like: abstract tree of the parameters.
      contribution_like: abstract tree of a worker's contribution.
      max_norm: norm beyond which a message counts as not finite: `MAX_NORM`, or the
        largest number of the center's dtype if that is smaller.
    """

    def __init__(
        self,
        rule: Rule,
        params: PyTree,
        dtype: Any = None,
        device: Any = None,
        *,
        flatten: bool = False,
        center_state: PyTree = None,
        version: int = 0,
    ) -> None:
        if device is not None:
            params = jax.device_put(params, device)
        self.like = trees.abstract(params, dtype)
        self.contribution_like = rounds.contribution_like(rule, self.like)
        largest = [float(jnp.finfo(x.dtype).max) for x in jax.tree.leaves(self.like)]
        self.max_norm = min([MAX_NORM, *largest])
        # True if all leaves are in the memory of JAX's default CPU device.
        first = SingleDeviceSharding(jax.local_devices()[0])
        self._on_host = jax.default_backend() == "cpu" and all(
            (leaf if isinstance(leaf, jax.Array) else jnp.zeros(())).sharding == first
            for leaf in jax.tree.leaves(params)
        )
        flatten = flatten and self._on_host
        packing = self.packing = packing_of(rule, self.like) if flatten else None
        copied = trees.copy(params, dtype) if packing is None else packing.keep(params)
        self._rule, self._programs = rule, _programs(rule)
        self.current = Version(copied, version)
        if center_state is None:
            self._check_answers()
            # From a copy, because some optimizers keep the parameters in their state.
            center_state = rounds.init_center_state(rule, trees.copy(copied))
        elif packing is not None:
            center_state = packing.pack_state(rule, center_state)
        self._center_state = center_state
        self._max_workers = max_workers(center_state)

    @classmethod
    def restore(
        cls,
        rule: Rule,
        saved: CenterState,
        device: Any = None,
        *,
        flatten: bool = False,
    ) -> Store:
        """Return a store that continues from a state, see `LocalCenter.restore`."""
        check.float_leaves(saved.params, "saved.params")
        params, state = jax.device_put((saved.params, saved.center_state), device)
        check.same_tree(
            state,
            rounds.center_state_like(rule, params),
            "saved.center_state",
            "the rule's center_state",
        )
        version = int(saved.version)
        if version < 0:
            raise errors.InvalidArgumentError(
                f"saved.version must not be negative, got {version}"
            )
        state = trees.copy(state)
        return cls(rule, params, flatten=flatten, center_state=state, version=version)

    def _check_answers(self) -> None:
        """Raise if the first version overflows the dtype in which workers adopt it."""
        codec = self._rule.codec
        if codec.answers is None:
            return
        largest = float(_largest(self.current.params))
        limit = float(jnp.finfo(codec.answers).max)
        if largest > limit:
            raise errors.InvalidArgumentError(
                f"with codec {codec.name!r} workers adopt the center as "
                f"{codec.answers}, which holds numbers up to "
                f"{limit:g}; the first parameters have {largest:g}"
            )

    def save(self) -> CenterState:
        """Return a copy of the complete state, for a checkpoint."""
        return self.unpacked(self.copy())

    def copy(self) -> CenterState:
        """Return a copy of the state as the store keeps it; see `unpacked`."""
        current = self.current
        params, center_state = trees.copy((current.params, self._center_state))
        return CenterState(params, center_state, current.number)

    def unpacked(self, copied: CenterState) -> CenterState:
        """Return a copied state as a tree; wait for the device if it was flattened."""
        if self.packing is None:
            return copied
        params, center_state, number = copied
        params = jax.device_put(self.packing.unpack(params))
        center_state = self.packing.unpack_state(self._rule, center_state)
        return CenterState(params, jax.device_put(center_state), number)

    def tree(self, version: Version) -> PyTree:
        """Return a version's parameters as a tree; the version must have a reader."""
        if self.packing is None:
            return version.params
        return jax.device_put(self.unplace(version.params))

    def current_params(self) -> PyTree:
        """Return the newest version as a tree that no later version changes."""
        self.current.escaped = True
        return self.tree(self.current)

    def answer(self, version: Version) -> PyTree:
        """Return a version's parameters as a worker adopts them at an exchange."""
        params = self.tree(version)
        if self._rule.codec.answers is None:
            return params
        return self._programs.answer(params)

    def check_and_place(self, contribution: PyTree) -> PyTree:
        """Check an encoded contribution, and place it on the center's device.

        Raises:
          TreeMismatchError: the contribution does not match the center.
        """
        if self.packing is None or not self.packing.holds(contribution):
            like = self.like_of(contribution)
            check.same_tree(
                contribution, like, "contribution", "the expected contribution"
            )
            check.same_kinds(contribution, like, "contribution")
        return self.place(contribution)

    def place(self, contribution: PyTree) -> PyTree:
        """Return a contribution on the center's device, flattened if the center is."""
        if self.packing is not None:
            is_packed = self.packing.holds(contribution)
            return contribution if is_packed else self.packing.pack(contribution)
        leaves = jax.tree.leaves(contribution)
        if self._on_host and all(isinstance(leaf, np.ndarray) for leaf in leaves):
            return contribution  # a program takes NumPy arrays directly, and faster
        if isinstance(contribution, rounds.Decoded):
            return contribution._replace(
                contribution=trees.place_like(
                    contribution.contribution, self.current.params
                )
            )
        return trees.place_like(contribution, self.current.params)

    def like_of(self, contribution: PyTree) -> PyTree:
        """Return the shapes and dtypes that a contribution must have."""
        if isinstance(contribution, rounds.Decoded):
            return rounds.Decoded(self.like)
        return self.contribution_like

    def unplace(self, placed: PyTree) -> PyTree:
        """Return a contribution, or parameters of a version, as a tree."""
        return placed if self.packing is None else self.packing.unpack(placed)

    def measure(
        self, contribution: PyTree, center: PyTree, *, samples: bool = True
    ) -> tuple[Any, Any]:
        """Return the norm and a sample of a contribution's message to ``center``.

        The global norm, in float32, is NaN or infinite if the message is not finite. It
        is also infinite if a sum of squares leaves the range of float32. The sample has
        the elements that `sample` takes from the center.

        Args:
          contribution: result of `check_and_place`.
          center: parameters of a version.
          samples: whether the sample is needed; it may be None otherwise.
        """
        if (
            self._rule.message is None
            and isinstance(contribution, Packed)
            and all(p.dtype == np.float32 and p.nbytes < _SMALL for p in contribution)
        ):
            # NumPy takes less time than a call of a compiled program.
            norm = np.sqrt(np.float32(sum(map(_square, contribution))))
            if not samples:
                return norm, None
            return norm, _sample(contribution, np.float32, np.concatenate)
        return self._programs.measure(contribution, center)

    def sample(self) -> jax.Array:
        """Return about a thousand elements of the version, the same ones each time."""
        return self._programs.sample(self.current.params)

    def apply(
        self,
        submissions: Sequence[Submission],
        staleness: Sequence[int],
        weights: Sequence[float] | None = None,
        workers: int = 1,
        indices: Sequence[int] | None = None,
    ) -> None:
        """Compute the next version.

        Args:
          submissions: one message, or those of a round, which the rule combines.
          staleness: staleness of each message.
          weights: factor of each message of a round, ignored if the rule discounts
            messages by their staleness; None if this is no round.
          workers: number of registered workers.
          indices: index of each message's worker; None if unknown.

        Raises:
          CenterFullError: the center optimizer is made for fewer workers.
        """
        before, program = self.current, self._programs.move
        indices = [-1] * len(submissions) if indices is None else indices
        if weights is None:
            self._check_index(indices[0])
        extras = [
            _extra(before.number, stale, submission, workers, index)
            for stale, submission, index in zip(
                staleness, submissions, indices, strict=True
            )
        ]
        data: PyTree = submissions[0].contribution
        extra: Any = extras[0]
        if weights is not None:
            program = self._programs.move_round
            data, extra = self._combine(submissions, extras, weights, workers)
        # Reuse the arrays of the old version, unless it has readers.
        in_place = (
            not before.escaped and not before.readers and self._rule.adopts == "after"
        )
        run = program.in_place if in_place else program.anew
        params, self._center_state = run(data, extra, before.params, self._center_state)
        self.current = Version(params, before.number + 1)

    def _check_index(self, index: int) -> None:
        most = self._max_workers
        if most is not None and index >= most:
            raise errors.CenterFullError(
                f"the center optimizer of rule {self._rule.name!r} is made for {most} "
                f"workers, and this is worker number {index + 1}: the center is "
                "unchanged. Give the center optimizer the largest number of workers"
            )

    def _combine(
        self,
        submissions: Sequence[Submission],
        extras: Sequence[_Extra],
        weights: Sequence[float],
        workers: int,
    ) -> tuple[PyTree, tuple[jax.Array, _Extra]]:
        """Return the sum of a round's messages, or what the rule combines them to.

        Returns:
          The sum, and its divisor with the extra arguments of the center optimizer.
        """
        before, programs, count = self.current, self._programs, len(submissions)
        contributions = [submission.contribution for submission in submissions]
        steps = [max(1, s.steps) for s in submissions]  # missing ones count as 1
        claimed = [submission.weight for submission in submissions]
        counts = rounds.factors_of_round(self._rule, claimed, steps, weights)
        counted = list(zip(extras, map(_on_device, counts.factors), strict=True))
        total: PyTree = None
        if programs.combine is None:
            for contribution, each in zip(contributions, counted, strict=True):
                total = programs.weigh(total, contribution, before.params, *each)
        else:
            relative = list(map(_on_device, counts.weights))
            total = programs.combine(contributions, before.params, counted, relative)
        mean_steps = round(sum(steps) / count)
        combined = Submission(0, total, before.number, mean_steps, counts.mean_weight)
        extra = _extra(before.number, 0, combined, workers, -1)
        return total, (_on_device(counts.divisor), extra)


def _blocks(array: np.ndarray) -> list[np.ndarray]:
    flat = array.reshape(-1)
    return [flat[i : i + _BLOCK] for i in range(0, flat.size, _BLOCK)]


def _square(part: np.ndarray) -> float:
    """Return the square of a norm, with blocks summed in float64 to round less."""
    with np.errstate(over="ignore", invalid="ignore"):
        return sum(float(np.dot(block, block)) for block in _blocks(part))


class _Extra(NamedTuple):
    """Extra arguments of the center optimizer for a message, on the device."""

    staleness: jax.Array
    steps: jax.Array
    weight: jax.Array
    since: tuple[jax.Array, jax.Array]  # a multiple of `_VERSIONS`, and the remainder
    workers: jax.Array
    worker: jax.Array

    def as_dict(self) -> dict[str, Any]:
        """Return the extra arguments of a center outside the workers' programs."""
        return {**self._asdict(), "since": sum(self.since), "outside": True}


_VERSIONS = 256  # divisor of `since`: both parts repeat, so few are transferred anew


def _extra(
    version: int, stale: int, submission: Submission, workers: int, index: int
) -> _Extra:
    since = min(max(version - stale, 0), _MAX_INT)
    rest, weight = since % _VERSIONS, submission.weight
    return _Extra(
        _on_device(stale),
        _on_device(submission.steps or 1),
        _on_device(1.0 if weight is None else weight),
        (_on_device(since - rest), _on_device(rest)),
        _on_device(workers),
        _on_device(index),
    )


@functools.lru_cache(maxsize=1024, typed=True)
def _on_device(number: float) -> jax.Array:
    if isinstance(number, int):  # a larger number becomes the largest int32
        return jax.device_put(np.int32(min(number, _MAX_INT)))
    return jax.device_put(np.float64(number))


@functools.lru_cache(maxsize=64)
def _sampled(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, Any]]:
    """Return leaves, by their numbers, with indices of the elements that are sampled.

    The runs of elements begin at equal distances in all leaves together.
    """
    sizes = [min(math.prod(shape), _MAX_INT) for shape in shapes]
    ends = np.cumsum([0, *sizes])
    step = max(1, -(-int(ends[-1]) // _RUNS))
    places: dict[int, set[int]] = {}
    for begin in range(0, int(ends[-1]), step):
        leaf = int(np.searchsorted(ends, begin, side="right")) - 1
        first = begin - int(ends[leaf])
        run = range(first, min(first + _RUN, sizes[leaf]))
        places.setdefault(leaf, set()).update(run)
    return [
        (leaf, tuple(x.astype(np.int32) for x in np.unravel_index(sorted(at), shape)))
        if (shape := shapes[leaf])
        else (leaf, ())  # a scalar
        for leaf, at in places.items()
    ]


def _sample(leaves: Sequence[Any], dtype: Any, concatenate: Any) -> Any:
    """Return the sampled elements of leaves, which are arrays of NumPy or JAX."""
    places = _sampled(tuple(leaf.shape for leaf in leaves))
    parts = [leaves[leaf][index].reshape(-1).astype(dtype) for leaf, index in places]
    return concatenate([*parts, np.zeros(1, dtype)])  # there may be no leaf


@jax.jit
def _largest(center: PyTree) -> jax.Array:
    leaves = jax.tree.leaves(center)
    wide = trees.wider(jnp.float32, *(leaf.dtype for leaf in leaves))
    maxima = [jnp.abs(leaf).max(initial=0).astype(wide) for leaf in leaves]
    return functools.reduce(jnp.maximum, maxima, jnp.zeros((), wide))


@functools.lru_cache(maxsize=32)
def _programs(rule: Rule) -> SimpleNamespace:
    """Return the compiled programs of a rule, shared by its stores."""

    def measure(contribution: PyTree, center: PyTree) -> tuple[jax.Array, jax.Array]:
        message = jax.tree.leaves(rounds.message_of(rule, contribution, center))
        wide = trees.wider(jnp.float32, *(m.dtype for m in message))
        squares = [jnp.sum(m.astype(wide) ** 2) for m in message]
        norm = jnp.sqrt(sum(squares, jnp.zeros((), wide))).astype(jnp.float32)
        return norm, _sample(message, wide, jnp.concatenate)

    def sample(center: PyTree) -> jax.Array:
        leaves = jax.tree.leaves(center)
        wide = trees.wider(jnp.float32, *(leaf.dtype for leaf in leaves))
        return _sample(leaves, wide, jnp.concatenate)

    def weigh(
        total: PyTree, contribution: PyTree, center: PyTree, extra: _Extra, weight: Any
    ) -> PyTree:
        about = extra.as_dict()
        return rounds.add_message(rule, total, contribution, center, about, weight)

    def combine(
        contributions: list[PyTree], center: PyTree, counts: Any, weights: Any
    ) -> PyTree:
        pairs = zip(contributions, counts, strict=True)
        messages = [weigh(None, sent, center, *count) for sent, count in pairs]
        return rounds.combine_round(rule, messages, weights)

    def move(
        data: PyTree, extra: _Extra, center: PyTree, state: PyTree
    ) -> tuple[PyTree, PyTree]:
        return rounds.receive(rule, data, center, state, extra.as_dict())

    def move_round(
        total: PyTree,
        divisor_and_extra: tuple[Any, _Extra],
        center: PyTree,
        state: PyTree,
    ) -> tuple[PyTree, PyTree]:
        divisor, extra = divisor_and_extra
        about = extra.as_dict()
        return rounds.receive_round(rule, total, divisor, center, state, about)

    def compiled(program: Any) -> SimpleNamespace:
        """Compile a program in two forms: in place and anew."""
        # The optimizer's state has no readers and is always donated; versions may have
        # readers.
        return SimpleNamespace(
            in_place=jax.jit(program, donate_argnums=(2, 3)),
            anew=jax.jit(program, donate_argnums=3),
        )

    return SimpleNamespace(
        measure=jax.jit(measure),
        sample=jax.jit(sample),
        weigh=jax.jit(weigh, donate_argnums=0),
        # Compiled for each number of messages; None if messages are summed.
        combine=None if rule.is_summed else jax.jit(combine),
        move=compiled(move),  # takes a contribution
        move_round=compiled(move_round),  # takes the sum of a round's messages
        answer=jax.jit(functools.partial(rounds.answer_of, rule)),
    )
