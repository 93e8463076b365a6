"""Combinations of a round's messages that need all messages at once.

Sums and means can be computed two messages at a time, by an all-reduce.
The functions here need all of them: to limit the harm of a few bad messages from
workers that are not fully trusted, or (`radial`) to preserve the length of messages.
Each returns a value for the ``combine`` of a `Rule`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.rules._declared import WIDTHS, Reads

PyTree = Any
Total = Callable[[PyTree], jax.Array]  # partial sums, one for each leaf -> their sum

__all__ = ["Combine", "krum", "median", "radial"]

# The most messages that a sorting network sorts. For more, XLA's sort is no slower and
# compiles faster.
_MAX_IN_NETWORK = 32

# A mean of unit vectors that is shorter than this length has no direction. The bound is
# far above the rounding error of such a mean, even in bfloat16.
_LEAST_AGREEMENT = 1 / 32


@dataclasses.dataclass(frozen=True)
class Combine:
    r"""A combination of a round's messages: a pure function of all of them.

    .. math:: m = f(m_1, \ldots, m_n)

    It needs a round: a mesh, or a synchronous center. Discounts, such as by staleness,
    are applied to each message before the combination.

    Attributes:
      function: ``(messages, total) -> message``. ``messages`` is a tree like one
        message, in float32 or wider, whose leaves have the messages of the round along
        their first axis, in the same order in all leaves. A tower may hold only a part
        of each message, so sums over elements must use ``total``: a function that takes
        a tree of partial sums (arrays of one shape, one for each leaf) and returns
        their sum over all elements of all leaves.
      name: name with settings. Worker and center compare it, to check that they have
        the same combination.
      reads: the part of the messages that an element of the result depends on:
        ``"element"`` for that element alone, ``"leaf"`` for its leaf, ``"tree"`` for
        the whole messages. With the last two, ``function`` calls ``total``.
      weighted: whether the messages count by their weights. Then ``function`` has a
        third argument: the weights relative to their mean, as [messages], or None if
        all count alike.

    Example:
      The largest displacement of each element:

      >>> import dataclasses, jax, jax.numpy as jnp, agn_optax
      >>> largest = agn_optax.robust.Combine(
      ...     lambda messages, total: jax.tree.map(lambda m: m.max(axis=0), messages),
      ...     name="largest",
      ... )
      >>> rule = dataclasses.replace(agn_optax.rules.average(), combine=largest)
      >>> print(rule.combine)
      largest
    """

    function: Callable[..., PyTree]
    _: dataclasses.KW_ONLY
    name: str
    reads: Reads = "element"
    weighted: bool = False

    def __post_init__(self) -> None:
        check.one_of(self.reads, f"reads of {self.name}", WIDTHS)

    def __str__(self) -> str:
        return self.name


def total_of_leaves(parts: PyTree) -> jax.Array:
    """Return the sum of partial sums: the ``total`` for messages that are whole.

    If towers hold parts of the messages, their totals must be summed.
    """
    leaves = jax.tree.leaves(parts)
    wide = trees.wider(jnp.float32, *(leaf.dtype for leaf in leaves))
    return sum((leaf.astype(wide) for leaf in leaves), start=jnp.zeros((), wide))


def median() -> Combine:
    r"""Combine messages by the median of each element.

    .. math:: m^j = \text{median}(m_1^j, \ldots, m_n^j)

    If fewer than half of the messages are bad, each element lies between the elements
    of good messages. The median of an even number of messages is the mean of the two in
    the middle, so two messages are averaged. NaN counts as infinity.

    Returns:
      A value for the ``combine`` of a `Rule`.

    Example:
      >>> import dataclasses, jax.numpy as jnp
      >>> from agn_optax import robust, rules
      >>> rule = dataclasses.replace(rules.average(), combine=robust.median())
      >>> messages = jnp.array([[1.0, 2.0], [3.0, 2.5], [1e9, jnp.nan]])
      >>> print(rule.combine.function(messages, None))
      [3.  2.5]

    References:
      Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett, *Byzantine-Robust
      Distributed Learning: Towards Optimal Statistical Rates*, 2018.
    """

    def of_leaf(messages: jax.Array) -> jax.Array:
        count = messages.shape[0]
        middle = _sorted_rows(messages)[(count - 1) // 2 : count // 2 + 1]
        # Halved first, because the sum could overflow.
        return middle[0] if count % 2 else middle[0] / 2 + middle[1] / 2

    return Combine(
        lambda messages, total: jax.tree.map(of_leaf, messages), name="median"
    )


def krum(faulty: int = 1, *, keep: int = 1) -> Combine:
    r"""Choose the message nearest to its neighbors, or average several such messages.

    .. math:: s_i = \sum_{j \in N_i} \|m_i - m_j\|^2; \qquad
        m = \frac1k \sum_{i \in K} m_i

    where :math:`N_i` are the :math:`n - f - 2` messages nearest to :math:`m_i`, and
    :math:`K` the :math:`k` messages of the least :math:`s_i`: :math:`k = 1` is Krum,
    larger :math:`k` are Multi-Krum. Distances are between whole messages, so a message
    with one bad part is left out as a whole.

    Args:
      faulty: :math:`f`, how many messages may be bad; a positive int. A round must have
        at least :math:`2 f + 3` messages.
      keep: :math:`k`, a positive int, at most :math:`n - f - 2`.

    Returns:
      A value for the ``combine`` of a `Rule`.

    Raises:
      InvalidArgumentError: an argument is not a positive int; or, when called, the
        round has fewer messages.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import robust
      >>> messages = jnp.array([[1.0], [1.1], [1.3], [0.5], [-90.0]])
      >>> print(robust.krum(1).function(messages, lambda distances: distances))
      [1.1]

    References:
      Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer, *Machine
      Learning with Adversaries: Byzantine Tolerant Gradient Descent*, 2017.
    """
    faulty = check.positive_int(faulty, "faulty")
    keep = check.positive_int(keep, "keep")
    name = f"krum({faulty})" if keep == 1 else f"krum({faulty}, keep={keep})"

    def combine(messages: PyTree, total: Total) -> PyTree:
        leaves = jax.tree.leaves(messages)
        if not leaves:
            return messages
        count = leaves[0].shape[0]
        neighbors = count - faulty - 2
        if count < 2 * faulty + 3 or keep > neighbors:
            raise errors.InvalidArgumentError(
                f"{name} needs a round of at least "
                f"{max(2 * faulty + 3, keep + faulty + 2)} messages, got {count}"
            )
        distances = total(jax.tree.map(_distances, messages))  # [count, count]
        distances = jnp.where(jnp.isnan(distances), jnp.inf, distances)
        others = jnp.where(jnp.eye(count, dtype=bool), jnp.inf, distances)
        scores = jnp.sort(others, axis=1)[:, :neighbors].sum(axis=1)
        best = jnp.argsort(scores)[:keep]
        return jax.tree.map(lambda m: m[best].mean(axis=0), messages)

    return Combine(combine, name=name, reads="tree")


def radial() -> Combine:
    r"""Combine messages by their mean length and mean direction, for each leaf.

    .. math:: m = \frac1n \sum_i w_i |m_i| \cdot \frac{u}{\max(|u|, n / 32)}, \qquad
        u = \sum_i w_i m_i / |m_i|

    where :math:`w_i` is the weight of a message relative to the mean of its round, 1
    without weights.

    The mean of n messages that are nearly orthogonal is :math:`\sqrt n` times shorter
    than the messages; this combination is as long as they are on average. If the
    directions cancel, there is no mean direction: below :math:`|u| = n / 32` the result
    becomes shorter in proportion to :math:`|u|`, and it is 0 for :math:`u = 0`, for
    example if two workers move a leaf of one element in opposite directions.
    (:math:`u / |u|` alone would be 0 / 0 there, or have the full mean length and the
    sign of a rounding error.)

    A long message has no more influence on the direction than a short one of the same
    weight, but its length counts in the mean length, and a worker chooses its weight:
    this is no protection against bad messages.

    Returns:
      A value for the ``combine`` of a `Rule`.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import robust
      >>> messages = jnp.array([[3.0, 0.0], [0.0, 1.0]])
      >>> print(robust.radial().function(messages, lambda squares: squares).round(3))
      [1.414 1.414]

    References:
      Arthur Douillard et al., *Decoupled DiLoCo for Resilient Distributed
      Pre-training*, 2026. The formula follows public implementations; the bound
      :math:`n / 32` is ours, and so is the mean length by weight.
    """

    def combine(
        messages: PyTree, total: Total, weights: jax.Array | None = None
    ) -> PyTree:
        leaves, treedef = jax.tree.flatten(messages)
        if not leaves:
            return messages
        count = leaves[0].shape[0]

        def norms(leaves: list[jax.Array], leading_axes: int) -> jax.Array:
            """Return the norms over all but the leading axes: [leaves, ...]."""
            squares = [
                jnp.square(leaf).sum(axis=tuple(range(leading_axes, leaf.ndim)))
                for leaf in leaves
            ]
            # ``total`` sums over all leaves; one-hot rows keep the leaves apart.
            one_hot = jnp.eye(len(leaves), dtype=jnp.result_type(*squares))
            rows = [
                jnp.multiply.outer(row, square)
                for row, square in zip(one_hot, squares, strict=True)
            ]
            return jnp.sqrt(total(jax.tree.unflatten(treedef, rows)))

        # By default, accelerators round the factors of a product to fewer bits.
        total_of = functools.partial(jnp.tensordot, axes=1, precision="highest")
        tiny = float(jnp.finfo(jnp.float32).tiny)
        lengths = norms(leaves, 1)  # [leaves, messages]
        if weights is None:
            weights = jnp.ones(count)
        weights = weights.astype(lengths.dtype)
        directions = [
            total_of(weights / jnp.maximum(lengths_of_leaf, tiny), leaf)
            for lengths_of_leaf, leaf in zip(lengths, leaves, strict=True)
        ]
        direction_norms = jnp.maximum(norms(directions, 0), _LEAST_AGREEMENT * count)
        factors = (weights * lengths).mean(axis=1) / direction_norms
        combined = [
            (factor * direction).astype(leaf.dtype)
            for factor, direction, leaf in zip(factors, directions, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, combined)

    return Combine(combine, name="radial", reads="leaf", weighted=True)


def _sorted_rows(messages: jax.Array) -> list[jax.Array]:
    """Sort the values of each element in ascending order; NaN counts as infinity.

    A sorting network needs one pass over all elements; XLA sorts one element at a time
    (80 times slower for 8 messages, on CPUs).
    """
    rows = [jnp.where(jnp.isnan(m), jnp.inf, m) for m in messages]
    if len(rows) > _MAX_IN_NETWORK:
        return list(jnp.sort(jnp.stack(rows), axis=0))
    for low, high in _comparisons(len(rows)):
        rows[low], rows[high] = (
            jnp.minimum(rows[low], rows[high]),
            jnp.maximum(rows[low], rows[high]),
        )
    return rows


def _comparisons(count: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs to compare, in order, to sort ``count`` values.

    This is Batcher's merge exchange for any number of values, Knuth's Algorithm 5.2.2M.
    """
    top = 1 << max((count - 1).bit_length() - 1, 0)
    step = top
    while step:
        bound, offset, distance = top, 0, step
        while True:
            for i in range(count - distance):
                if i & step == offset:
                    yield i, i + distance
            if bound == step:
                break
            distance, bound, offset = bound - step, bound // 2, step
        step //= 2


def _distances(messages: jax.Array) -> jax.Array:
    """Return the squared distance between every two messages, in one leaf."""

    # |a|² + |b|² - 2ab would round away small distances between large messages.
    def from_all(message: jax.Array) -> jax.Array:
        squares = jnp.square(messages - message)
        return squares.reshape(squares.shape[0], -1).sum(axis=1)

    return jax.lax.map(from_all, messages)
