"""The memory of a center between exchanges: the device's, or the host's."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax.round.placements._stored import OnHost, for_host, from_host

PyTree = Any


class DeviceMemory:
    """The device's memory: a center is stored as it is used."""

    name = "device"
    is_at_hand = True  # whether local steps can read the center

    def check(self) -> None:
        """Check that the backend supports this memory."""

    def store(self, center: PyTree, center_state: PyTree) -> tuple[PyTree, PyTree]:
        """Wrap a center and its optimizer's state, and move them to this memory."""
        return center, center_state

    def settle(self, center: PyTree, center_state: PyTree) -> tuple[PyTree, PyTree]:
        """Move a stored center and state to this memory, such as after a restore."""
        return center, center_state

    def load(self, center: PyTree, center_state: PyTree) -> tuple[PyTree, PyTree]:
        """Undo `store`: return center and state on the device."""
        return center, center_state


class HostMemory(DeviceMemory):
    """Pinned memory of the host, from which an exchange copies to the device."""

    name = "host"
    is_at_hand = False

    def check(self) -> None:
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

    def store(self, center: PyTree, center_state: PyTree) -> tuple[PyTree, PyTree]:
        center, center_state = map(for_host, (center, center_state))
        return self.settle(OnHost(center), OnHost(center_state))

    def settle(self, center: PyTree, center_state: PyTree) -> tuple[PyTree, PyTree]:
        center, center_state = _to(jax.memory.Space.Host, (center, center_state))
        return center, center_state

    def load(self, center: PyTree, center_state: PyTree) -> tuple[PyTree, PyTree]:
        center, center_state = from_host(to_device((center.tree, center_state.tree)))
        return center, center_state


MEMORIES = {"device": DeviceMemory(), "host": HostMemory()}


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
    program = jax.jit(functools.partial(_to, jax.memory.Space.Host)).lower(number)
    return bool(program.compile().output_shardings.memory_kind == "pinned_host")
