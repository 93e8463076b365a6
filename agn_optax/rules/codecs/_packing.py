"""Elements in rows, small numbers in bytes, and powers of two."""

from __future__ import annotations

import functools

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


@functools.lru_cache(maxsize=1024)
def block_length(size: int, block: int) -> int:
    """Elements of each block of a leaf of that size, of at most ``block``.

    No less than half of that, if it divides the size, or ``block``.
    """
    if size <= block:
        return max(size, 1)
    lengths = range(block, block // 2, -1)
    return next((length for length in lengths if size % length == 0), block)


def whole_blocks(x: jax.Array, block: int) -> list[jax.Array]:
    """All elements in blocks as rows, and a last one that is shorter, if there is one.

    Most leaves divide into equal ones. Their rows are the leaf itself, where others are
    cut off or filled up first: a pass over the memory, and as much of it besides.
    """
    flat = x.reshape(-1)
    length = block_length(flat.size, block)
    full = flat.size // length * length
    if full == flat.size:
        return [flat.reshape(-1, length)]
    return [flat[:full].reshape(-1, length), flat[full:][None]]


def peaks_of(blocks: jax.Array) -> jax.Array:
    """The largest absolute value of each row, or one that is not finite.

    On CPUs a maximum of a long row of floats may pass over a NaN. A sum does not.
    """
    high = jnp.maximum(jnp.max(blocks, axis=1), -jnp.min(blocks, axis=1))
    return jnp.where(jnp.isnan(jnp.sum(blocks, axis=1)), jnp.nan, high)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """Whole numbers below ``2**bits``, in bytes (uint8) along the last axis.

    The first of them have the lowest bits of all bytes, the next ones those above, and
    so on: each byte is made of numbers that are far apart, and so is a whole register
    of bytes of whole registers of numbers.
    """
    if 8 % bits == 0:
        each = 8 // bits
        *outer, length = codes.shape
        width = -(-length // each)
        filled = jnp.pad(
            codes.astype(jnp.uint8),
            [*((0, 0) for _ in outer), (0, each * width - length)],
        )
        planes = [
            filled[..., i * width : (i + 1) * width] << (i * bits) for i in range(each)
        ]
        return functools.reduce(jnp.bitwise_or, planes)
    digits = (codes[..., None] >> np.arange(bits, dtype=codes.dtype)) & 1
    return packed(digits.reshape(*codes.shape[:-1], -1), 1)


def unpacked(data: jax.Array, bits: int, count: int) -> jax.Array:
    """So many whole numbers, along the last axis, that `packed` took.

    In uint8, or int32 of odd bits.
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
