"""Centers in pinned memory of the host between exchanges."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from agn_optax import errors
from agn_optax.round.placements._stored import StoredCenter, as_stored

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


# JAX gives the buffer of a donated argument to the first output with the same shape and
# dtype, even in another memory. If a buffer on the host becomes an output on the
# device, the process aborts (JAX 0.10). Therefore arrays on the host have shapes that
# no array on the device has: their shapes begin with these dimensions.
HOST_SHAPE = (1,) * 6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnHost(StoredCenter):
    """A tree in the host's memory: a center or its shards, or its optimizer's state."""

    leading: ClassVar[tuple[int, ...]] = HOST_SHAPE

    tree: PyTree  # leaves [1, 1, 1, 1, 1, 1, ...], see `for_host`

    @property
    def place(self) -> str:
        return f"{as_stored(self.tree).kind}, on the host"

    @property
    def unwrapped(self) -> StoredCenter:
        return as_stored(from_host(self.tree))

    @property
    def arrays(self) -> PyTree:
        return self.unwrapped.arrays

    def whole(self) -> PyTree:
        return as_stored(to_device(from_host(self.tree))).whole()

    def mark_differing(self, state: Any, pieces: Any, own: Any) -> Any:
        state = as_stored(self.tree).mark_differing(state, pieces, own)
        return state._replace(center=OnHost(state.center))

    def sharding(self, sharding: NamedSharding) -> NamedSharding:
        """Return the sharding of the arrays, from that of the tree around them."""
        return sharding.with_memory_kind("pinned_host")


def for_host(tree: PyTree) -> PyTree:
    """Reshape the arrays of a tree to the shapes that they have on the host."""
    return jax.tree.map(
        lambda leaf: jnp.reshape(leaf, (*HOST_SHAPE, *jnp.shape(leaf))), tree
    )


def from_host(tree: PyTree) -> PyTree:
    """Undo `for_host`, also for rows of such trees; arrays stay in their memory."""

    def shaped(leaf: Any) -> jax.Array:
        shape, count = jnp.shape(leaf), len(HOST_SHAPE)
        found = (i for i in range(len(shape)) if shape[i : i + count] == HOST_SHAPE)
        if (first := next(found, None)) is None:  # after the dimensions of the rows
            raise errors.TreeMismatchError(
                f"a leaf of shape {list(shape)} cannot be from the host, where all "
                f"shapes begin with {list(HOST_SHAPE)}"
            )
        return jnp.reshape(leaf, shape[:first] + shape[first + count :])

    return jax.tree.map(shaped, tree)


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
