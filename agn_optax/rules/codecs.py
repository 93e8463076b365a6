"""Codecs: in which form a contribution leaves its worker, and how it is read.

A codec is as functional as an optax transformation. Where a rule has one, a worker
encodes its contribution once for each exchange, and the center decodes what it gets;
`agn_optax.round` has the order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax import errors
from agn_optax._internal import check, trees

PyTree = Any

__all__ = [
    "Codec",
    "ErrorFeedbackState",
    "cast",
    "error_feedback",
    "identity",
    "quantize",
]


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

    def __post_init__(self) -> None:
        answers = check.float_dtype(self.answers, f"answers of codec {self.name!r}")
        object.__setattr__(self, "answers", answers)

    def __str__(self) -> str:
        return self.name

    @property
    def is_identity(self) -> bool:
        """Whether contributions travel as they are."""
        return self == _IDENTITY


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
    dtype = check.float_dtype(dtype, "dtype")

    def encode(leaf: Any) -> jax.Array:
        # Rounded first: XLA may leave out a cast there and back.
        return trees.rounded(jnp.asarray(leaf), dtype).astype(dtype)

    return _of_leaves(
        f"cast({dtype.name})",
        encode,
        lambda sent, like: sent.astype(like.dtype),
        answers=dtype,
    )


def _of_leaves(
    name: str,
    encode: Callable[[Any], PyTree],
    decode: Callable[[PyTree, Any], jax.Array],
    answers: Any = None,
) -> Codec:
    """A codec without state that treats every leaf alike, and for itself."""
    return Codec(
        optax.init_empty_state,
        lambda contribution, state: (jax.tree.map(encode, contribution), state),
        lambda encoded, like: jax.tree.map(
            lambda leaf, sent: decode(sent, leaf), like, encoded
        ),
        name=name,
        answers=answers,
    )


def quantize(bits: int = 8, *, block: int = 4096) -> Codec:
    r"""Contributions travel as small whole numbers, with a scale for each block.

    .. math::
        s = 2^{\lceil \log_2 (\max |k| / n) \rceil}; \qquad
        m = (s, \text{round}(k / s)); \qquad \hat k = s \, \text{round}(k / s)

    for each block of a leaf, with :math:`n = 2^{\text{bits} - 1} - 1`. Scales are
    powers of two, so that decoding is exact: all programs that decode one message get
    the same numbers, and what an element lost is exactly the difference. The same
    contribution always gives the same bits.

    Alone it forgets what it rounds away, so small elements of a block may never be
    sent: wrap it in `error_feedback`.

    Args:
      bits: of an element: 8, 4 or 2.
      block: elements that share a scale, a positive int; blocks do not span leaves.

    Returns:
      A codec without state, which sends for each leaf its ``codes`` (uint8, of
      ``8 // bits`` elements each) and their ``scales`` (float32, one for each block).
      A block that is not finite has a scale that is not.

    Raises:
      InvalidArgumentError: ``bits`` is none of these, or ``block`` not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec, like = codecs.quantize(4), jnp.zeros(3)
      >>> sent, _ = codec.encode(jnp.array([1.0, -3.5, 0.1]), codec.init(like))
      >>> print(sent["codes"].nbytes, sent["scales"], codec.decode(sent, like))
      2 [0.5] [ 1.  -3.5  0. ]

    References:
      Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic, *QSGD:
      Communication-Efficient SGD via Gradient Quantization and Encoding*, 2017.
      Bita Darvish Rouhani et al., *Microscaling Data Formats for Deep Learning*, 2023,
      for scales that are powers of two.
    """
    if bits not in (2, 4, 8):
        raise errors.InvalidArgumentError(f"bits must be 8, 4 or 2, got {bits!r}")
    block = check.positive_int(block, "block")
    largest = 2 ** (bits - 1) - 1  # code; 0 stands for -largest
    shifts = np.arange(0, 8, bits, dtype=np.uint8)  # of the codes in a byte

    def encode(leaf: Any) -> PyTree:
        leaf = jnp.asarray(leaf)
        wide = leaf.astype(trees.wider(leaf.dtype, jnp.float32))
        blocks = _rows(wide, min(block, max(leaf.size, 1)))  # [blocks, block]
        peaks = jnp.max(jnp.abs(blocks), axis=1)  # [blocks]
        scales = jnp.maximum(_power_of_two(peaks / largest), _TINY)
        codes = jnp.round(blocks / scales[:, None]).clip(-largest, largest) + largest
        finite = jnp.isfinite(peaks)
        codes = jnp.where(finite[:, None], codes, 0).astype(jnp.uint8)
        bytes_ = _rows(codes.reshape(-1)[: leaf.size], len(shifts)) << shifts
        return {
            "codes": bytes_.sum(axis=1, dtype=jnp.uint8),
            "scales": jnp.where(finite, scales, peaks).astype(jnp.float32),
        }

    def decode(sent: PyTree, like: Any) -> jax.Array:
        size = math.prod(like.shape)
        codes = (sent["codes"][:, None] >> shifts) & (2 * largest + 1)
        numbers = codes.reshape(-1)[:size].astype(jnp.float32) - largest
        blocks = _rows(numbers, min(block, max(size, 1))) * sent["scales"][:, None]
        return blocks.reshape(-1)[:size].reshape(like.shape).astype(like.dtype)

    return _of_leaves(f"quantize({bits}, block={block})", encode, decode)


_TINY = 2.0**-126  # smallest float32 that every device takes for a number


def _power_of_two(x: jax.Array) -> jax.Array:
    """The smallest power of two that is no less than ``x``."""
    near = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=0)
    return jnp.where(near < x, 2 * near, near)


def _rows(x: jax.Array, length: int) -> jax.Array:
    """All elements in rows of a length, the last filled up with zeros."""
    rows = -(-x.size // length)
    flat = jnp.pad(x.reshape(-1), (0, rows * length - x.size))
    return flat.reshape(rows, length)


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`."""

    residual: PyTree  # as the parameters, float32 or wider: what has not been sent yet
    codec_state: PyTree  # of the codec inside


def error_feedback(codec: Codec) -> Codec:
    r"""What a codec loses is kept, and goes into the next contribution.

    .. math:: m = \text{encode}(k + e); \qquad e \leftarrow k + e - \text{decode}(m)

    So nothing is lost for good: what has been sent and the residual :math:`e` are
    together all that was contributed.

    Args:
      codec: loses something, such as `quantize`.

    Returns:
      A codec with `ErrorFeedbackState`, which takes float32 or more for each parameter.

    Raises:
      InvalidTypeError: ``codec`` is not a codec.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec, like = codecs.error_feedback(codecs.quantize(2)), jnp.zeros(2)
      >>> state = codec.init(like)
      >>> for _ in range(3):
      ...     sent, state = codec.encode(jnp.array([1.0, 0.375]), state)
      ...     print(codec.decode(sent, like), state.residual)
      [1. 0.] [0.    0.375]
      [1. 1.] [ 0.   -0.25]
      [1. 0.] [0.    0.125]

    References:
      Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, *1-Bit Stochastic Gradient
      Descent and its Application to Data-Parallel Distributed Training of Speech DNNs*,
      2014.
      Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian U. Stich, Martin Jaggi,
      *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*, 2019.
    """
    check_codec(codec, "codec")

    def init(params: PyTree) -> ErrorFeedbackState:
        def zeros(leaf: Any) -> jax.Array:
            dtype = trees.wider(jnp.result_type(leaf), jnp.float32)
            return jnp.zeros_like(leaf, dtype=dtype)

        return ErrorFeedbackState(jax.tree.map(zeros, params), codec.init(params))

    def encode(contribution: PyTree, state: ErrorFeedbackState) -> tuple[PyTree, Any]:
        owed = jax.tree.map(
            lambda e, k: e + jnp.asarray(k, e.dtype), state.residual, contribution
        )
        encoded, codec_state = codec.encode(owed, state.codec_state)
        sent = codec.decode(encoded, owed)
        residual = jax.tree.map(lambda o, s: o - s.astype(o.dtype), owed, sent)
        return encoded, ErrorFeedbackState(residual, codec_state)

    return Codec(
        init,
        encode,
        codec.decode,
        name=f"error_feedback({codec})",
        answers=codec.answers,
    )
