"""The codec `quantize`: few bits for each element, and a scale for each block."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.rules.codecs._codec import Codec, of_leaves
from agn_optax.rules.codecs._packing import (
    TINY,
    block_length,
    packed,
    peaks_of,
    power_of_two,
    short,
    unpacked,
    whole_blocks,
)

PyTree = Any
Format = Literal["linear", "e3m0", "codebook"]

_SHORT = 7  # mantissa bits; products of two numbers with so few are exact in float32

# The formats that are not linear: their levels in ascending order, and their bits.
_POWERS = 2.0 ** np.arange(-6, 1, dtype=np.float32)
_LEVELS = {
    "e3m0": np.concatenate([-_POWERS[::-1], np.zeros(1, np.float32), _POWERS]),
    "codebook": np.array([-1.5078125, -0.453125, 0.453125, 1.5078125], np.float32),
}
_BITS = {"e3m0": 4, "codebook": 2}


def quantize(
    bits: int = 8,
    *,
    block: int = 4096,
    format: Format = "linear",  # noqa: A002 the usual word
) -> Codec:
    r"""Round each element to one of a few levels, with a scale for each block.

    .. math::
        s = \text{scale}(k); \qquad
        m = (s, \text{round}_L(k / s)); \qquad \hat k = s \, \text{round}_L(k / s)

    for each block of a leaf, where :math:`\text{round}_L` rounds to the nearest level.
    The formats have these levels :math:`L` and scales :math:`s`:

    ``"linear"``
        The levels are the whole numbers from :math:`-n` to
        :math:`n = 2^{\text{bits} - 1} - 1`. The scale is the smallest power of two that
        is not less than :math:`\max |k| / n`.
    ``"e3m0"``
        The levels have a sign and three bits of exponent: 0 and
        :math:`\pm 2^0, ..., \pm 2^{-6}`. The scale is :math:`\max |k|`. For 4 bits
        only.
    ``"codebook"``
        The levels are the four of the least mean square error for a normal distribution
        (Lloyd's and Max's). For 2 bits only. The scale is the root mean square of
        :math:`k`. Elements beyond the last level are clipped, so use `error_feedback`.

    Scales and levels have few bits, so that decoding is exact: all programs decode a
    message to the same numbers, and the loss of an element is exactly its difference
    from the decoded one. Rounding loses the remainder, so small elements of a block may
    never be sent: wrap the codec in `error_feedback`.

    Args:
      bits: bits of an element: 8, 4 or 2.
      block: elements that share a scale, a positive int; blocks do not span leaves. In
        a leaf whose size is not a multiple of ``block``, blocks have the largest length
        below ``block`` that divides the size, if it is more than half of ``block``.
      format: ``"linear"``, ``"e3m0"`` or ``"codebook"``.

    Returns:
      A codec without state. For each leaf it sends ``codes`` (uint8 [blocks, bytes],
      ``8 // bits`` elements in each) and their ``scales`` (float32 [blocks]), and both
      again as ``rest`` for a shorter last block. If a block is not finite, neither is
      its scale.

    Raises:
      InvalidArgumentError: an argument is not one of these, or ``block`` is not
        positive.

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
      Arthur Douillard et al., *Streaming DiLoCo with Overlapping Communication*, 2025,
      for E3M0.
      Joel Max, *Quantizing for Minimum Distortion*, 1960.
    """
    if bits not in (2, 4, 8):
        raise errors.InvalidArgumentError(f"bits must be 8, 4 or 2, got {bits!r}")
    block = check.positive_int(block, "block")
    check.one_of(format, "format", ("linear", "e3m0", "codebook"))
    if bits != (own := _BITS.get(format, bits)):
        raise errors.InvalidArgumentError(
            f"format {format!r} has {own} bits, got bits={bits}"
        )
    levels = _LEVELS.get(format)
    largest = 2 ** (bits - 1) - 1  # the largest level; code 0 stands for -largest

    def scales_of(blocks: jax.Array, peaks: jax.Array) -> jax.Array:
        if format == "linear":
            return jnp.maximum(power_of_two(peaks / largest), TINY)
        peaks = jnp.maximum(peaks, TINY)
        if format == "e3m0":
            return short(peaks, _SHORT)
        squares = jnp.mean(jnp.square(blocks / peaks[:, None]), axis=1)
        return jnp.maximum(short(peaks * jnp.sqrt(squares), _SHORT), TINY)

    # Each block stays a row, so that XLA reads its scale once for the whole row.
    def encode_blocks(blocks: jax.Array) -> PyTree:
        peaks = peaks_of(blocks)  # [blocks]
        finite = jnp.isfinite(peaks)
        scales = scales_of(blocks, peaks)
        x = blocks * (1 / scales)[:, None]
        # No rounded |x| exceeds the largest level: the scale ensures it.
        codes = jnp.round(x) + largest if levels is None else _nearest(x, levels)
        codes = jnp.where(finite[:, None], codes, 0).astype(jnp.uint8)
        return {
            "codes": packed(codes, bits),  # [blocks, bytes]
            "scales": jnp.where(finite, scales, peaks).astype(jnp.float32),
        }

    def encode(leaf: Any) -> PyTree:
        first, *rest = whole_blocks(trees.widened(leaf), block)
        sent = encode_blocks(first)
        if rest:
            sent["rest"] = encode_blocks(rest[0])
        return sent

    def decode_blocks(sent: PyTree, length: int) -> jax.Array:
        codes = unpacked(sent["codes"], bits, length)
        if levels is None:
            numbers = codes.astype(jnp.float32) - largest
        else:
            numbers = jnp.asarray(levels)[codes]
        return numbers * sent["scales"][:, None]

    def decode(sent: PyTree, like: Any) -> jax.Array:
        length = block_length(like.size, block)
        numbers = decode_blocks(sent, length).reshape(-1)
        if "rest" in sent:
            rest = decode_blocks(sent["rest"], like.size % length)
            numbers = jnp.concatenate([numbers, rest.reshape(-1)])
        return numbers.reshape(like.shape).astype(like.dtype)

    name = f"quantize({bits}, block={block}"
    name += "" if format == "linear" else f", format={format}"
    return of_leaves(f"{name})", encode, decode)


def _nearest(x: jax.Array, levels: np.ndarray) -> jax.Array:
    """Return the index of the nearest of the ascending ``levels``."""
    levels = levels.astype(x.dtype)  # exact: they have few bits
    bounds = (levels[1:] + levels[:-1]) / 2
    return sum((x > bound).astype(jnp.int32) for bound in bounds)
