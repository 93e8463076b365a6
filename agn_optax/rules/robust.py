"""How the messages of a round become one where all of them must be there.

The sum and the mean of messages can be made on their way, of two at a time. What is
here looks at all of them: so that a few bad ones do no harm, for workers that one does
not fully trust, or (`radial`) so that their length is not lost. Each is for the
``combine`` of a `Rule`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, trees

PyTree = Any
Total = Callable[[PyTree], jax.Array]

__all__ = ["Combine", "krum", "median", "radial", "trimmed_mean"]

_NETWORK = 32  # messages; of more, XLA's sort is no slower, and compiles sooner

# Of a mean of unit vectors, its length; shorter ones are no direction. It is far above
# the rounding of such a mean, also in bfloat16.
LEAST_AGREEMENT = 1 / 32


@dataclasses.dataclass(frozen=True)
class Combine:
    r"""How the messages of a round become one: a pure function of all of them.

    .. math:: m = \text{of}(m_1, \ldots, m_n)

    It needs a round: a mesh, or a synchronous center. There each message counts as much
    as it would in a sum (discounted by its staleness, say) before this sees it.

    Attributes:
      of: ``(messages, total) -> message``. ``messages`` is the tree of a message with a
        first dimension of all of them, in float32 or wider, in an order that is the
        same for all leaves. It may be a part of each message, of a tower that has no
        more, so what is added up over elements must go through ``total``: it makes of
        a tree of partial sums (arrays of one shape, a leaf for each) their sum over all
        elements of all leaves.
      name: what it is, with its settings, as workers and center compare it.
      elementwise: whether each element is made of that element of the messages alone;
        if not, it calls ``total``.

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

    of: Callable[[PyTree, Total], PyTree]
    _: dataclasses.KW_ONLY
    name: str
    elementwise: bool = True

    def __str__(self) -> str:
        return self.name


def whole_total(parts: PyTree) -> jax.Array:
    """`Combine.of`'s ``total`` where messages are whole."""
    leaves = jax.tree.leaves(parts)
    wide = trees.wider(jnp.float32, *(leaf.dtype for leaf in leaves))
    return sum((leaf.astype(wide) for leaf in leaves), start=jnp.zeros((), wide))


def median() -> Combine:
    r"""The median of each element.

    .. math:: m^j = \text{median}(m_1^j, \ldots, m_n^j)

    As long as fewer than half of the messages are bad, each element lies between those
    of good ones; of an even number it is the mean of the two in the middle, so of two
    messages the mean. What is no number counts as infinite.

    Returns:
      How messages become one, for the ``combine`` of a `Rule`.

    Example:
      >>> import dataclasses, jax.numpy as jnp
      >>> from agn_optax import robust, rules
      >>> rule = dataclasses.replace(rules.average(), combine=robust.median())
      >>> messages = jnp.array([[1.0, 2.0], [3.0, 2.5], [1e9, jnp.nan]])
      >>> print(rule.combine.of(messages, None))
      [3.  2.5]

    References:
      Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett, *Byzantine-Robust
      Distributed Learning: Towards Optimal Statistical Rates*, 2018.
    """

    def of_leaf(messages: jax.Array) -> jax.Array:
        count = messages.shape[0]
        middle = _in_order(messages)[(count - 1) // 2 : count // 2 + 1]
        # Halved first, or a sum could overflow.
        return middle[0] if count % 2 else middle[0] / 2 + middle[1] / 2

    return Combine(
        lambda messages, total: jax.tree.map(of_leaf, messages), name="median"
    )


def trimmed_mean(share: float = 0.25) -> Combine:
    r"""The mean of each element without its largest and smallest values.

    .. math:: m^j = \frac1{n - 2b} \sum_{i=b+1}^{n-b} m_{(i)}^j, \qquad
        b = \lceil \beta n \rceil

    of the values of each element in rising order. As long as no more than :math:`b`
    messages are bad, each element lies between those of good ones. The paper leaves
    the rounding of :math:`\beta n` open; upwards, one bad message is left out of any
    number.

    Args:
      share: :math:`\beta`, of the messages that are left out at either end, in
        (0, 0.5).

    Returns:
      How messages become one, for the ``combine`` of a `Rule`. A round of so few that
      none are left is an InvalidArgumentError: three are enough for a third or less.

    Raises:
      InvalidArgumentError: ``share`` is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import robust
      >>> messages = jnp.array([1.0, 2.0, 6.0, -jnp.inf])
      >>> print(robust.trimmed_mean(0.25).of(messages, None))
      1.5

    References:
      Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett, *Byzantine-Robust
      Distributed Learning: Towards Optimal Statistical Rates*, 2018.
    """
    check.rate(share, "share", low=0.0, high=0.5, low_open=True)
    if share == 0.5:
        raise errors.InvalidArgumentError(
            "share must be less than 0.5, or no message is left; median() is its limit"
        )
    name = f"trimmed_mean({share:g})"

    def of_leaf(messages: jax.Array) -> jax.Array:
        count = messages.shape[0]
        left_out = math.ceil(share * count - 1e-9)
        if 2 * left_out >= count:
            raise errors.InvalidArgumentError(
                f"{name} leaves out {left_out} of {count} messages at either end, and "
                "none is left: it needs a round of more workers"
            )
        kept = _in_order(messages)[left_out : count - left_out]
        return sum(kept[1:], start=kept[0]) / len(kept)

    return Combine(lambda messages, total: jax.tree.map(of_leaf, messages), name=name)


def krum(faulty: int = 1, *, keep: int = 1) -> Combine:
    r"""The message that is nearest to its neighbors, or the mean of several such.

    .. math:: s_i = \sum_{j \in N_i} \|m_i - m_j\|^2; \qquad
        m = \frac1k \sum_{i \in K} m_i

    where :math:`N_i` are the :math:`n - f - 2` messages nearest to :math:`m_i`, and
    :math:`K` the :math:`k` messages of the least :math:`s_i`: one is Krum, more are
    Multi-Krum. Distances are of whole messages, so one that is bad anywhere counts
    nowhere.

    Args:
      faulty: :math:`f`, how many messages may be bad; a positive int. It needs rounds
        of :math:`2 f + 3` messages at least.
      keep: :math:`k`, a positive int, at most :math:`n - f - 2`.

    Returns:
      How messages become one, for the ``combine`` of a `Rule`. A round of fewer
      messages is an InvalidArgumentError.

    Raises:
      InvalidArgumentError: an argument is not a positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import robust
      >>> messages = jnp.array([[1.0], [1.1], [1.3], [0.5], [-90.0]])
      >>> print(robust.krum(1).of(messages, lambda distances: distances))
      [1.1]

    References:
      Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer, *Machine
      Learning with Adversaries: Byzantine Tolerant Gradient Descent*, 2017.
    """
    faulty = check.positive_int(faulty, "faulty")
    keep = check.positive_int(keep, "keep")
    name = f"krum({faulty})" if keep == 1 else f"krum({faulty}, keep={keep})"

    def of(messages: PyTree, total: Total) -> PyTree:
        leaves = jax.tree.leaves(messages)
        if not leaves:
            return messages
        count = leaves[0].shape[0]
        near = count - faulty - 2
        if count < 2 * faulty + 3 or keep > near:
            raise errors.InvalidArgumentError(
                f"{name} needs a round of {max(2 * faulty + 3, keep + faulty + 2)} "
                f"messages at least, and here are {count}"
            )
        distances = total(jax.tree.map(_distances, messages))  # [count, count]
        distances = jnp.where(jnp.isnan(distances), jnp.inf, distances)
        others = jnp.where(jnp.eye(count, dtype=bool), jnp.inf, distances)
        scores = jnp.sort(others, axis=1)[:, :near].sum(axis=1)
        best = jnp.argsort(scores)[:keep]
        return jax.tree.map(lambda m: m[best].mean(axis=0), messages)

    return Combine(of, name=name, elementwise=False)


def radial() -> Combine:
    r"""The mean length of messages, in their mean direction: for each leaf.

    .. math:: m = \frac1n \sum_i |m_i| \cdot \frac{w}{\max(|w|, n / 32)}, \qquad
        w = \sum_i m_i / |m_i|

    The mean of n messages that are nearly at right angles is :math:`\sqrt n` times
    shorter than they are; this one is as long as they are on average. Where directions
    cancel, there is no mean direction: below :math:`|w| = n / 32` the message becomes
    shorter in proportion to :math:`|w|`, and it is 0 where nothing is left of them, as
    where two workers move a leaf of one element apart. (:math:`w / |w|` alone would be
    0 / 0 there, and a whole mean length whose sign is the sign of a rounding error.)

    A long message leads no further than a short one, but its length counts in the mean
    of lengths, so this is no protection against bad ones. Where messages come one by
    one, ``center_optimizers.buffered(..., combine="radial")`` makes the same of
    several.

    Returns:
      How messages become one, for the ``combine`` of a `Rule`.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import robust
      >>> messages = jnp.array([[3.0, 0.0], [0.0, 1.0]])
      >>> print(robust.radial().of(messages, lambda squares: squares).round(3))
      [1.414 1.414]

    References:
      Arthur Douillard et al., *Decoupled DiLoCo for Resilient Distributed
      Pre-training*, 2026; as implementations have it, for the paper was not read. The
      bound of :math:`n / 32` is of this project.
    """

    def of(messages: PyTree, total: Total) -> PyTree:
        leaves, treedef = jax.tree.flatten(messages)
        if not leaves:
            return messages
        count = leaves[0].shape[0]

        def norms(parts: list[jax.Array], kept: int) -> jax.Array:
            """Of each leaf: [leaves, ...], over all but the first ``kept`` axes."""
            squares = [
                jnp.square(part).sum(axis=tuple(range(kept, part.ndim)))
                for part in parts
            ]
            # A row for each leaf, as the total is that of all of them.
            rows = jnp.eye(len(parts), dtype=jnp.result_type(*squares))
            apart = [
                jnp.multiply.outer(row, square)
                for row, square in zip(rows, squares, strict=True)
            ]
            return jnp.sqrt(total(jax.tree.unflatten(treedef, apart)))

        tiny = float(jnp.finfo(jnp.float32).tiny)
        lengths = norms(leaves, 1)  # [leaves, messages]
        directions = [
            jnp.tensordot(1 / jnp.maximum(own, tiny), leaf, axes=1)
            for own, leaf in zip(lengths, leaves, strict=True)
        ]
        agreeing = jnp.maximum(norms(directions, 0), LEAST_AGREEMENT * count)
        factors = lengths.mean(axis=1) / agreeing
        combined = [
            (factor * direction).astype(leaf.dtype)
            for factor, direction, leaf in zip(factors, directions, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, combined)

    return Combine(of, name="radial", elementwise=False)


def _in_order(messages: jax.Array) -> list[jax.Array]:
    """Each element's values in rising order; one that is no number is infinite.

    By a network of comparisons, which is one pass over all of them; XLA sorts one
    element at a time (80 times slower for 8 messages, on CPUs).
    """
    rows = [jnp.where(jnp.isnan(m), jnp.inf, m) for m in messages]
    if len(rows) > _NETWORK:
        return list(jnp.sort(jnp.stack(rows), axis=0))
    for low, high in _comparisons(len(rows)):
        rows[low], rows[high] = (
            jnp.minimum(rows[low], rows[high]),
            jnp.maximum(rows[low], rows[high]),
        )
    return rows


def _comparisons(count: int) -> Iterator[tuple[int, int]]:
    """Which two of so many are put in order, one pair after the other.

    Batcher's merge exchange, of any number: Knuth's Algorithm 5.2.2M.
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
    """Squares of the distances of these elements, between every two messages."""

    # Of differences, and not of products: those lose what large messages have alike.
    def to_all(message: jax.Array) -> jax.Array:
        squares = jnp.square(messages - message)
        return squares.reshape(squares.shape[0], -1).sum(axis=1)

    return jax.lax.map(to_all, messages)
