"""Shardings on a mesh for FSDP and tensor parallelism, over all processes."""

from __future__ import annotations

from typing import Any

import jax
import optax
from config import Config
from jax.sharding import AxisType, NamedSharding, PartitionSpec

PyTree = Any


def make_mesh(config: Config) -> jax.sharding.Mesh:
    """Return a mesh of all devices of this worker, and set it as the default."""
    count = len(jax.devices())
    if count % config.tensor or config.batch % (count // config.tensor):
        raise SystemExit(
            f"tensor must divide the {count} devices of this worker, and batch must be "
            f"a multiple of their quotient, got {config.tensor} and {config.batch}"
        )
    axis_types = (AxisType.Auto, AxisType.Auto)
    shape = (count // config.tensor, config.tensor)
    mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=axis_types)
    jax.set_mesh(mesh)
    return mesh


def shardings_of(
    mesh: jax.sharding.Mesh, params: PyTree, tx: optax.GradientTransformation
) -> tuple[PyTree, PyTree, NamedSharding]:
    """Return the shardings of parameters, of the state of ``tx``, and of scalars.

    Leaves of the state that belong to a parameter have the parameter's sharding.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    of_params = jax.tree.map(lambda param: param.sharding, params)
    of_state = optax.tree_utils.tree_map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, params),
        of_params,
        transform_non_params=lambda _: everywhere,
    )
    return of_params, of_state, everywhere


def place_rows(mesh: jax.sharding.Mesh, batch: Any) -> jax.Array:
    """Return a batch that every process has in full as one array over the mesh."""
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    return jax.make_array_from_callback(batch.shape, rows, lambda index: batch[index])
