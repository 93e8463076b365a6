"""Moves of a center to pinned memory of the host, and back for an exchange."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors

PyTree = Any


def check_host_memory() -> None:
    """Check that the device has pinned memory of the host, and that JAX supports it.

    Raises:
      InvalidArgumentError: the device has none, or this JAX does not support it.
    """
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if "pinned_host" not in kinds:
        raise errors.InvalidArgumentError(
            f"memory='host' needs a device with pinned_host memory; {device} has "
            f"{', '.join(kinds)}"
        )
    if not _stays_on_host():
        raise errors.InvalidArgumentError(
            f"memory='host' needs a newer JAX: {jax.__version__} moves the outputs "
            "of a program from the host to the device"
        )


def to_host(tree: PyTree) -> PyTree:
    """Move the arrays of a tree to pinned memory of the host."""
    return _to(jax.memory.Space.Host, tree)


def to_device(tree: PyTree) -> PyTree:
    """Move the arrays of a tree to the device."""
    return _to(jax.memory.Space.Device, tree)


def _to(space: Any, tree: PyTree) -> PyTree:
    def move(leaf: Any) -> Any:
        if getattr(jax.typeof(leaf), "memory_space", space) == space:
            return leaf
        return jax.device_put(leaf, space)

    return jax.tree.map(move, tree)


@functools.cache
def _stays_on_host() -> bool:
    """Return whether outputs that a program puts into host memory stay there."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    program = jax.jit(to_host).lower(number)
    return bool(program.compile().output_shardings.memory_kind == "pinned_host")
