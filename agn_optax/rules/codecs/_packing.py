"""Elements in rows, small numbers in bytes, and powers of two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

TINY = 2.0**-126  # smallest float32 that every device takes for a number


def rows(x: jax.Array, length: int) -> jax.Array:
    """All elements in rows of a length, the last filled up with zeros."""
    count = -(-x.size // length)
    flat = jnp.pad(x.reshape(-1), (0, count * length - x.size))
    return flat.reshape(count, length)


def blocks_of(leaf: jax.Array, block: int) -> jax.Array:
    """The elements of a leaf in blocks, one at least in each."""
    return rows(leaf, min(block, max(leaf.size, 1)))


def peaks_of(blocks: jax.Array) -> jax.Array:
    """The largest absolute value of each row, or one that is not finite.

    Of their bits as whole numbers, which rise as they do, and NaN is beyond infinity:
    on CPUs, a maximum of a long row of floats may pass over a NaN.
    """
    width = 8 * blocks.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), f"uint{width}")
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=1), blocks.dtype)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """Whole numbers below ``2**bits``, one after the other in bytes (uint8)."""
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        spread = rows(codes.astype(jnp.uint8), len(shifts)) << shifts
        return spread.sum(axis=1, dtype=jnp.uint8)
    digits = (codes.reshape(-1)[:, None] >> np.arange(bits)) & 1
    return packed(digits.reshape(-1), 1)


def unpacked(data: jax.Array, bits: int, count: int) -> jax.Array:
    """So many whole numbers that `packed` took (uint8, or int32 of odd bits)."""
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((data[:, None] >> shifts) & (2**bits - 1)).reshape(-1)[:count]
    digits = unpacked(data, 1, count * bits).reshape(count, bits).astype(jnp.int32)
    return (digits << np.arange(bits)).sum(axis=1, dtype=jnp.int32)


def power_of_two(x: jax.Array) -> jax.Array:
    """The smallest power of two that is no less than ``x``."""
    return short(x, 0)


def short(x: jax.Array, mantissa_bits: int) -> jax.Array:
    """The smallest number of so many bits that is no less than ``x``, positive.

    Products of two short numbers are exact, so that all programs get the same ones.
    """
    near = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=mantissa_bits)
    above = near * (1 + 2.0**-mantissa_bits)
    above = jax.lax.reduce_precision(above, 8, mantissa_bits)
    return jnp.where(near < x, above, near)
