"""The record, and the codecs that need no arithmetic of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Codec:
    r"""How contributions are encoded: three pure functions.

    .. math:: (m, e) \leftarrow \text{encode}(k, e); \qquad
        \hat k = \text{decode}(m)

    where :math:`k` is the contribution, :math:`m` what is sent, :math:`e` the codec's
    state, which stays with the worker from one exchange to the next, and
    :math:`\hat k` what the center takes for the contribution.

    Attributes:
      init: ``params -> state``. Like an optax ``init`` it touches leaves only inside
        ``jax.tree.map``.
      encode: ``(contribution, state) -> (encoded, state)``. ``encoded`` is the tree of
        the contribution with a tree of arrays, of any dtypes and shapes, in place of
        each leaf. The shapes, and the dtypes that are not floating, follow from the
        shapes of the contribution.
      decode: ``(encoded, like) -> contribution``, in the structure and shapes of
        ``like``, which is the center or a piece of it.
      name: what it is, with its settings, as workers and center compare it.
      answers: floating dtype to which the center is rounded where a worker adopts it at
        an exchange, and in which it travels back; None leaves it exact.
      returned: ``(encoded, state) -> state``, of a message that the center has dropped:
        what it had goes into a later one. None where it is lost.

    Raises:
      InvalidArgumentError: ``answers`` is not a floating dtype.

    Example:
      A codec that sends signs, and the mean size of a leaf's elements:

      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> def encode(tree, state):
      ...     send = lambda x: {"signs": x > 0, "size": jnp.abs(x).mean()}
      ...     return jax.tree.map(send, tree), state
      >>> def decode(encoded, like):
      ...     read = lambda x, sent: jnp.where(sent["signs"], 1, -1) * sent["size"]
      ...     return jax.tree.map(read, like, encoded)
      >>> signs = agn_optax.codecs.Codec(
      ...     lambda params: optax.EmptyState(), encode, decode, name="signs"
      ... )
      >>> rule = agn_optax.rules.downpour(codec=signs)

    References:
      Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, *1-Bit Stochastic Gradient
      Descent and its Application to Data-Parallel Distributed Training of Speech DNNs*,
      2014.
    """

    init: Callable[[PyTree], PyTree]
    encode: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    decode: Callable[[PyTree, PyTree], PyTree]
    _: dataclasses.KW_ONLY
    name: str
    answers: Any = None
    returned: Callable[[PyTree, PyTree], PyTree] | None = None

    def __post_init__(self) -> None:
        answers = check.float_dtype(self.answers, f"answers of codec {self.name!r}")
        object.__setattr__(self, "answers", answers)

    def __str__(self) -> str:
        return self.name

    @property
    def is_identity(self) -> bool:
        """Whether contributions travel as they are."""
        return self == _IDENTITY

    @property
    def is_cast(self) -> bool:
        """Whether contributions travel in another dtype, and else as they are.

        Only what is sent by such a codec, or as it is, may be added up on its way.
        """
        return self.answers is not None and self == _cast(self.answers)


def check_codec(value: Any, argument: str) -> None:
    """``value`` is a codec."""
    such_as = "one of agn_optax.codecs, such as codecs.cast('bfloat16')"
    check.instance(value, Codec, f"{argument} must be {such_as}")


_IDENTITY = Codec(
    optax.init_empty_state,
    lambda contribution, state: (contribution, state),
    lambda encoded, like: encoded,
    name="identity",
)


def identity() -> Codec:
    r"""Contributions travel as they are: what a rule does that is not told otherwise.

    .. math:: m = k; \qquad \hat k = m

    Returns:
      The codec, always the same one.

    Example:
      >>> from agn_optax import codecs, rules
      >>> rules.downpour().codec == codecs.identity()
      True
    """
    return _IDENTITY


def cast(dtype: Any) -> Codec:
    r"""Contributions, and the centers that workers adopt, travel in another dtype.

    .. math:: m = \text{round}(k); \qquad \hat k = m; \qquad
        x \leftarrow \text{adopt}(x, \text{round}(c))

    The center itself keeps its own dtype: what it loses in rounding is what it is told,
    and never what it is.

    Args:
      dtype: floating; bfloat16 halves what float32 sends, and keeps its range.

    Returns:
      A codec without state.

    Raises:
      InvalidTypeError: ``dtype`` is not a dtype.
      InvalidArgumentError: ``dtype`` is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec = codecs.cast("bfloat16")
      >>> sent, _ = codec.encode(jnp.array([1.0, 0.1]), codec.init(jnp.zeros(2)))
      >>> print(codec.decode(sent, jnp.zeros(2)))
      [1.         0.10009766]

    References:
      Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic, *QSGD:
      Communication-Efficient SGD via Gradient Quantization and Encoding*, 2017.
    """
    if dtype is None:
        raise errors.InvalidTypeError("dtype must be a floating dtype, got None")
    return _cast(check.float_dtype(dtype, "dtype"))


@functools.cache
def _cast(dtype: Any) -> Codec:
    """Always the same one for a dtype."""

    def encode(leaf: Any) -> jax.Array:
        # Rounded first: XLA may leave out a cast there and back.
        return trees.rounded(jnp.asarray(leaf), dtype).astype(dtype)

    return of_leaves(
        f"cast({dtype.name})",
        encode,
        lambda sent, like: sent.astype(like.dtype),
        answers=dtype,
    )


def of_leaves(
    name: str,
    encode: Callable[[Any], PyTree],
    decode: Callable[[PyTree, Any], jax.Array],
    answers: Any = None,
) -> Codec:
    """A codec without state that treats every leaf alike, and for itself."""
    return Codec(
        optax.init_empty_state,
        lambda contribution, state: (jax.tree.map(encode, contribution), state),
        _leafwise(decode),
        name=name,
        answers=answers,
    )


class StochasticState(NamedTuple):
    """State of a codec that draws random numbers."""

    encoded: jax.Array  # int32 scalar: how many contributions


def of_random_leaves(name: str, encode: Any, decode: Any) -> Codec:
    """A codec that treats every leaf for itself, each with a random key of its own."""

    def encode_all(
        contribution: PyTree, state: StochasticState
    ) -> tuple[PyTree, StochasticState]:
        leaves, treedef = jax.tree.flatten(contribution)
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), state.encoded)
        # Workers draw other numbers where they have other contributions.
        encoded = [
            encode(leaf, jax.random.fold_in(jax.random.fold_in(key, i), _digest(leaf)))
            for i, leaf in enumerate(leaves)
        ]
        state = StochasticState(optax.safe_increment(state.encoded))
        return jax.tree.unflatten(treedef, encoded), state

    return Codec(
        lambda params: StochasticState(jnp.zeros((), jnp.int32)),
        encode_all,
        _leafwise(decode),
        name=name,
    )


def _digest(leaf: Any) -> jax.Array:
    """A number that depends on the bits of all elements, in whatever order."""
    bits = jax.lax.bitcast_convert_type(jnp.asarray(leaf, jnp.float32), jnp.uint32)
    return bits.sum(dtype=jnp.uint32)


def _leafwise(decode: Callable[[PyTree, Any], jax.Array]) -> Callable[..., PyTree]:
    """Decodes a whole message, leaf by leaf."""
    return lambda encoded, like: jax.tree.map(
        lambda leaf, sent: decode(sent, leaf), like, encoded
    )
