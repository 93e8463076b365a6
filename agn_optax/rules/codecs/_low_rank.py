"""The codec `low_rank`: matrices as products of two thin matrices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agn_optax._internal import check, trees
from agn_optax.rules.codecs._codec import Codec

PyTree = Any


class LowRankState(NamedTuple):
    """State of `low_rank`."""

    right: PyTree  # per leaf, [n, rank] of the last message; [0] if sent whole


def low_rank(rank: int = 4) -> Codec:
    r"""Send matrices as products of two thin matrices, by one power iteration each.

    .. math::
        P = \text{orthonormal}(K Q); \qquad Q \leftarrow K^\top P; \qquad
        m = (P, Q); \qquad \hat K = P Q^\top

    for each leaf :math:`K` of two dimensions or more; all dimensions but the last are
    merged into one. The worker keeps :math:`Q` and starts the next iteration with it,
    so that over several messages :math:`P` converges to the leading singular vectors.
    Leaves of fewer dimensions, and leaves so small that the factors would have as many
    elements, are sent whole. The rest of a matrix is lost: wrap the codec in
    `error_feedback`.

    Programs may multiply matrices in different orders, so two programs decode a message
    to numbers that may differ in the last place.

    Args:
      rank: columns of the factors, a positive int.

    Returns:
      A codec with `LowRankState`. For each leaf it sends ``left`` [m, rank] and
      ``right`` [n, rank] (float32 or wider), or the leaf itself as ``whole``.

    Raises:
      InvalidArgumentError: ``rank`` is not a positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec = codecs.low_rank(1)
      >>> matrix = jnp.outer(jnp.arange(4.0), jnp.arange(6.0))
      >>> sent, _ = codec.encode(matrix, codec.init(matrix))
      >>> sent["left"].shape, sent["right"].shape
      ((4, 1), (6, 1))
      >>> bool(jnp.allclose(codec.decode(sent, matrix), matrix, atol=1e-4))
      True

    References:
      Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi, *PowerSGD: Practical
      Low-Rank Gradient Compression for Distributed Optimization*, 2019.
    """
    rank = check.positive_int(rank, "rank")

    def init(params: PyTree) -> LowRankState:
        def right(leaf: Any) -> jax.Array:
            dtype = trees.wide(leaf)
            if (shape := _factors(jnp.shape(leaf), rank)) is None:
                return jnp.zeros(0, dtype)
            key = jax.random.key(0, impl="threefry2x32")
            return jax.random.normal(key, (shape[1], rank), dtype)

        return LowRankState(jax.tree.map(right, params))

    def encode(contribution: PyTree, state: LowRankState) -> tuple[PyTree, Any]:
        def of_leaf(leaf: Any, right: jax.Array) -> PyTree:
            leaf = jnp.asarray(leaf)
            if (shape := _factors(leaf.shape, rank)) is None:
                return {"whole": leaf}
            matrix = leaf.astype(right.dtype).reshape(shape)
            left, _ = jnp.linalg.qr(matrix @ right)
            return {"left": left, "right": matrix.T @ left}

        encoded = jax.tree.map(of_leaf, contribution, state.right)
        right = jax.tree.map(
            lambda old, sent: _next_right(sent.get("right"), old), state.right, encoded
        )
        return encoded, LowRankState(right)

    def decode(encoded: PyTree, like: PyTree) -> PyTree:
        def of_leaf(leaf: Any, sent: PyTree) -> jax.Array:
            if "whole" in sent:
                return sent["whole"].astype(leaf.dtype)
            product = sent["left"] @ sent["right"].T
            return product.reshape(leaf.shape).astype(leaf.dtype)

        return jax.tree.map(of_leaf, like, encoded)

    return Codec(
        init,
        encode,
        decode,
        name=f"low_rank({rank})",
        of_differences=True,
        is_exact=False,
        reads="leaf",
    )


def _factors(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Return the rows and columns of a leaf as a matrix; None if it is sent whole."""
    if len(shape) < 2:
        return None
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return (rows, columns) if rank * (rows + columns) < rows * columns else None


def _next_right(new: Any, old: jax.Array) -> jax.Array:
    """Return ``new`` if it is finite and not 0, else ``old``, as the next start."""
    if new is None:
        return old
    is_good = jnp.isfinite(new).all() & (jnp.abs(new).max() > 0)
    return jnp.where(is_good, new, old)
