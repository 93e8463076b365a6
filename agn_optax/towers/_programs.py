"""Functions for one tower, compiled as programs for all towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.round import axes_of_collectives, collectives
from agn_optax.towers import _loss, _mesh, _replicas

PyTree = Any


@dataclasses.dataclass(frozen=True)
class MeshProgram:
    """A compiled program of a state, and in some cases a batch.

    Attributes:
      mesh: the mesh that the program runs on.
      jitted: the function that `jax.jit` returned.
    """

    mesh: Mesh
    jitted: Any

    @_mesh.on_own_mesh
    def __call__(self, state: PyTree, *batch: PyTree) -> Any:
        """Run the program; raise if the state was donated: on CPUs it would crash."""
        for leaf in jax.tree.leaves(state)[:1]:
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise errors.InvalidArgumentError(
                    "state has been donated to an earlier call: go on with what that "
                    "call returned, or compile with donate=False"
                )
        return self.jitted(state, *batch)

    @_mesh.on_own_mesh
    def lower(self, *arguments: Any) -> Any:
        """Lower the program, like the ``lower`` of a jitted function."""
        return self.jitted.lower(*arguments)


def per_tower(
    mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return ``function`` mapped over the towers of the mesh.

    Varying axes are not checked, so that code for pmap or for one device works
    unchanged, such as a scan that starts from zeros.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def rows(mesh: Mesh) -> PartitionSpec:
    """Return the spec of one row, or block of rows, per tower."""
    return PartitionSpec(mesh.axis_names)


def row(tree: PyTree) -> PyTree:
    """Return this tower's row of stacked state."""
    return jax.tree.map(lambda x: x[0], tree)


def as_row(tree: PyTree) -> PyTree:
    """Undo `row`, and remove weak types, for which JAX would compile again."""

    def strong(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if not trees.is_key(x):
            x = jax.lax.convert_element_type(x, x.dtype)
        return x[None]

    return jax.tree.map(strong, tree)


def create(mesh: Mesh, make: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return ``(*arguments) -> state``, with a row for each tower from ``make``."""

    def on_tower(*arguments: PyTree) -> PyTree:
        state = jax.tree.map(jnp.asarray, make(*arguments))
        return as_row(_replicas.fold_keys(state, collectives.index(mesh.axis_names)))

    def on_all(*arguments: PyTree) -> PyTree:
        specs = jax.tree.map(
            lambda node: PartitionSpec(
                *(node.axes if _replicas.is_per_tower(node) else ())
            ),
            arguments,
            is_leaf=_replicas.is_per_tower,
        )
        return per_tower(mesh, on_tower, specs, rows(mesh))(*arguments)

    return jax.jit(on_all)


def apply(
    mesh: Mesh, function: Callable[..., Any], *specs: PartitionSpec, donate: bool
) -> MeshProgram:
    """Compile ``function`` for stacked state, and for batches with these ``specs``."""

    def on_tower(state: PyTree, *batches: PyTree) -> Any:
        with collectives.declare_workers(mesh.axis_names[:1]):
            return as_row(function(row(state), *batches))

    mapped = per_tower(mesh, on_tower, (rows(mesh), *specs), rows(mesh))

    def on_all(state: PyTree, *batches: PyTree) -> Any:
        _replicas.check_stacked(state, mesh.size)
        _check_batch(batches, mesh.size)
        return mapped(state, *batches)

    return MeshProgram(mesh, jax.jit(on_all, donate_argnums=(0,) if donate else ()))


def _check_batch(batches: tuple[PyTree, ...], towers: int) -> None:
    """Raise unless the batch, if there is one, has rows for every tower."""
    for path, leaf in tree_flatten_with_path(batches)[0]:
        shape = jnp.shape(leaf)
        if not shape or shape[0] % towers:
            raise errors.InvalidArgumentError(
                f"batch{keystr(path[1:])} has shape {list(shape)}; rows for {towers} "
                "towers are expected: lay it out with towers.shard(batch)"
            )


def call_checked(
    train_step: Callable[..., Any], axes: collectives.Axes, *arguments: PyTree
) -> Any:
    """Return ``train_step(*arguments)``; raise if an axis has no collective.

    Without a collective over one of ``axes``, each of its members would train alone,
    and all but the first would be discarded.
    """
    required = [name for name in axes if jax.lax.axis_size(name) > 1]
    if not required:
        return train_step(*arguments)
    traced, shape = jax.make_jaxpr(train_step, return_shape=True)(*arguments)
    reduced = axes_of_collectives(traced.jaxpr, ignored_scope=_loss.SCOPE)
    silent = [name for name in required if name not in reduced]
    if silent:
        raise errors.InvalidArgumentError(
            "train_step never communicates over "
            f"{', '.join(map(repr, silent))}: towers of one worker would drift "
            "apart. They need all_reduce(axis_name) first in the optimizer's chain, or "
            "to be workers of their own, Towers(workers=...)"
        )
    from jax.extend.core import jaxpr_as_fun  # noqa: PLC0415 slow to import

    results = jaxpr_as_fun(traced)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shape), results)
