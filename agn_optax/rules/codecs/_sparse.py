"""Codecs that send a few elements of each block, or one bit of each element."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agn_optax._internal import check, trees
from agn_optax.rules.codecs._codec import Codec, of_leaves
from agn_optax.rules.codecs._packing import (
    TINY,
    blocks_of,
    packed,
    peaks_of,
    unblocked,
    unpacked,
)

PyTree = Any


def top_k(k: int = 64, *, block: int = 4096) -> Codec:
    r"""Send the elements of each block that have the largest absolute values.

    .. math:: I = \text{positions of the } K \text{ largest } |k_i|; \qquad
        m = (I, k_I); \qquad \hat k_i = k_i \text{ for } i \in I \text{, else } 0

    where :math:`k` is a block of the contribution, and :math:`K` the argument ``k``.
    All other elements are lost, so wrap the codec in `error_feedback`. Use
    ``chain_codecs(top_k(64), quantize(2))`` to send the values in fewer bits.

    Args:
      k: number of elements to send of each block, a positive int.
      block: elements of a block, a positive int; blocks do not span leaves.

    Returns:
      A codec without state. For each leaf it sends the ``indices`` within the blocks
      (:math:`\lceil \log_2 \text{block} \rceil` bits each, packed into uint8) and the
      ``values`` (in the leaf's dtype). If a block is not finite, its values are NaN.

    Raises:
      InvalidArgumentError: an argument is not a positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec, like = codecs.top_k(2, block=4), jnp.zeros(4)
      >>> sent, _ = codec.encode(jnp.array([1.0, -3.0, 0.5, 2.0]), codec.init(like))
      >>> print(sent["indices"].nbytes, sent["values"], codec.decode(sent, like))
      1 [-3.  2.] [ 0. -3.  0.  2.]

    References:
      Sebastian U. Stich, Jean-Baptiste Cordonnier, Martin Jaggi, *Sparsified SGD with
      Memory*, 2018.
    """
    k, block = check.positive_int(k, "k"), check.positive_int(block, "block")

    def encode(leaf: Any) -> PyTree:
        leaf = jnp.asarray(leaf)
        blocks = blocks_of(leaf, block)
        sizes = jnp.abs(blocks)
        length = blocks.shape[1]
        _, indices = jax.lax.top_k(sizes, min(k, length))
        values = jnp.take_along_axis(blocks, indices, axis=1)
        # In a block that is not finite, all values become NaN: `top_k` may skip a NaN.
        finite = jnp.isfinite(peaks_of(blocks))[:, None]
        values = jnp.where(finite, values, jnp.nan)
        return {
            "indices": packed(indices.reshape(-1), _bits(length)),
            "values": values.reshape(-1),
        }

    def decode(sent: PyTree, like: Any) -> jax.Array:
        count, length, kept = _sizes(like.size, block, k)
        indices = unpacked(sent["indices"], _bits(length), count * kept)
        at = jnp.arange(count)[:, None], indices.astype(jnp.int32).reshape(count, kept)
        values = sent["values"].reshape(count, kept).astype(like.dtype)
        blocks = jnp.zeros((count, length), like.dtype).at[at].set(values)
        return unblocked(blocks, like)

    name = f"top_k({k}, block={block})"
    return of_leaves(name, encode, decode, of_differences=True)


def sign(*, block: int = 4096) -> Codec:
    r"""Send the sign of each element, and the mean absolute value of each block.

    .. math:: s = \text{mean} |k|; \qquad m = (s, k \ge 0); \qquad
        \hat k = \pm s

    Without `error_feedback`, training does not converge on some convex problems.

    Args:
      block: elements that share a mean, a positive int; blocks do not span leaves.

    Returns:
      A codec without state. For each leaf it sends the ``signs`` (uint8, eight elements
      in each) and the ``scales`` (float32, one for each block). If a block is not
      finite, neither is its scale.

    Raises:
      InvalidArgumentError: ``block`` is not a positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec, like = codecs.sign(), jnp.zeros(3)
      >>> sent, _ = codec.encode(jnp.array([1.0, -3.0, 0.5]), codec.init(like))
      >>> print(sent["signs"].nbytes, codec.decode(sent, like))
      1 [ 1.5 -1.5  1.5]

    References:
      Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian U. Stich, Martin Jaggi,
      *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*, 2019.
    """
    block = check.positive_int(block, "block")

    def encode(leaf: Any) -> PyTree:
        leaf = jnp.asarray(leaf)
        wide = trees.widened(leaf)
        blocks = jnp.abs(blocks_of(wide, block))
        count, length = blocks.shape
        last = leaf.size - (count - 1) * length  # elements of the last block
        sizes = jnp.full(count, length, wide.dtype).at[-1:].set(max(last, 1))
        # Blocks are divided by their peaks first, so that sums of finite numbers stay
        # finite.
        peaks = jnp.maximum(jnp.max(blocks, axis=1), TINY)
        means = (blocks / peaks[:, None]).sum(axis=1) / sizes
        return {
            "signs": packed((wide >= 0).reshape(-1), 1),
            "scales": (means * peaks).astype(jnp.float32),
        }

    def decode(sent: PyTree, like: Any) -> jax.Array:
        signs = unpacked(sent["signs"], 1, like.size).astype(jnp.float32) * 2 - 1
        return unblocked(blocks_of(signs, block) * sent["scales"][:, None], like)

    name = f"sign(block={block})"
    return of_leaves(name, encode, decode, of_differences=True)


def _sizes(size: int, block: int, k: int) -> tuple[int, int, int]:
    """Return a leaf's number of blocks, their length, and the elements sent of each."""
    length = min(block, max(size, 1))
    return -(-size // length), length, min(k, length)


def _bits(length: int) -> int:
    """Return the number of bits of an index below ``length``."""
    return max(1, (length - 1).bit_length())
