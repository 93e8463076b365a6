"""Arithmetic of codecs: blocks of elements, codes in bytes, and short numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

TINY = 2.0**-126  # the smallest normal float32; devices may flush smaller ones to 0


def rows(x: jax.Array, length: int) -> jax.Array:
    """Return all elements in rows of ``length``, the last row padded with zeros."""
    count = -(-x.size // length)
    flat = jnp.pad(x.reshape(-1), (0, count * length - x.size))
    return flat.reshape(count, length)


def blocks_of(leaf: jax.Array, block: int) -> jax.Array:
    """Return the elements of a leaf as rows of blocks of at least one element."""
    return rows(leaf, min(block, max(leaf.size, 1)))


def unblocked(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """Return a leaf like ``like`` from rows of blocks, without their padding."""
    return blocks.reshape(-1)[: like.size].reshape(like.shape).astype(like.dtype)


@functools.lru_cache(maxsize=1024)
def block_length(size: int, block: int) -> int:
    """Return the length of the blocks of a leaf, at most ``block``.

    A leaf of at most ``block`` elements is one block. Other leaves have the largest
    length above half of ``block`` that divides their size; if there is none, ``block``.
    """
    if size <= block:
        return max(size, 1)
    lengths = range(block, block // 2, -1)
    return next((length for length in lengths if size % length == 0), block)


def whole_blocks(x: jax.Array, block: int) -> list[jax.Array]:
    """Return all elements in rows of blocks, and a shorter last block if there is one.

    Most leaves divide into equal blocks, and their rows are a reshaped leaf. Slicing or
    padding the others takes a pass over the memory, and as much memory again.
    """
    flat = x.reshape(-1)
    length = block_length(flat.size, block)
    full = flat.size // length * length
    if full == flat.size:
        return [flat.reshape(-1, length)]
    return [flat[:full].reshape(-1, length), flat[full:][None]]


def peaks_of(blocks: jax.Array) -> jax.Array:
    """Return the largest absolute value of each row; not finite if the row is not.

    On CPUs, the maximum of a long row of floats may ignore a NaN. A sum does not.
    """
    high = jnp.maximum(jnp.max(blocks, axis=1), -jnp.min(blocks, axis=1))
    return jnp.where(jnp.isnan(jnp.sum(blocks, axis=1)), jnp.nan, high)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """Pack whole numbers below ``2**bits`` into bytes (uint8) along the last axis.

    If ``bits`` divides 8, the first numbers take the lowest bits of all bytes, the next
    numbers the bits above, and so on. A byte is thus made of numbers that are far
    apart, so that a SIMD register of bytes is made of whole registers of numbers.
    """
    if 8 % bits == 0:
        per_byte = 8 // bits
        *outer, length = codes.shape
        width = -(-length // per_byte)
        filled = jnp.pad(
            codes.astype(jnp.uint8),
            [*((0, 0) for _ in outer), (0, per_byte * width - length)],
        )
        planes = [
            filled[..., i * width : (i + 1) * width] << (i * bits)
            for i in range(per_byte)
        ]
        return functools.reduce(jnp.bitwise_or, planes)
    digits = (codes[..., None] >> np.arange(bits, dtype=codes.dtype)) & 1
    return packed(digits.reshape(*codes.shape[:-1], -1), 1)


def unpacked(data: jax.Array, bits: int, count: int) -> jax.Array:
    """Unpack ``count`` whole numbers along the last axis, the inverse of `packed`.

    They are uint8, or int32 if ``bits`` does not divide 8.
    """
    outer = data.shape[:-1]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        planes = (data[..., None, :] >> shifts) & (2**bits - 1)
        return planes.reshape(*outer, len(shifts) * data.shape[-1])[..., :count]
    digits = unpacked(data, 1, count * bits).reshape(*outer, count, bits)
    shifted = digits.astype(jnp.int32) << np.arange(bits, dtype=np.int32)
    return shifted.sum(axis=-1, dtype=jnp.int32)


def power_of_two(x: jax.Array) -> jax.Array:
    """Return the smallest power of two that is not less than ``x``."""
    return short(x, 0)


def short(x: jax.Array, mantissa_bits: int) -> jax.Array:
    """Return the smallest number of few mantissa bits that is not less than ``x`` > 0.

    Products of two such numbers are exact, so that all programs compute the same.
    """
    nearest = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=mantissa_bits)
    above = nearest * (1 + 2.0**-mantissa_bits)
    above = jax.lax.reduce_precision(above, 8, mantissa_bits)
    return jnp.where(nearest < x, above, nearest)
