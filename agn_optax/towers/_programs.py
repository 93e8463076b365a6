"""Functions of one tower as programs of all towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import Mesh, PartitionSpec

from agn_optax import errors
from agn_optax.rules import _axes
from agn_optax.rules._forms import scan_round
from agn_optax.towers import _loss, _replicas, _rows

PyTree = Any


def per_tower(
    mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """A program of the mesh.

    Varying axes are not checked, so that code written for pmap or for one device (a
    scan that starts from zeros, say) runs as it is.
    """
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def rows(mesh: Mesh, dimension: int = 0) -> PartitionSpec:
    """One row, or one block of rows, per tower along ``dimension``."""
    return PartitionSpec(*(None,) * dimension, mesh.axis_names)


def row(tree: PyTree) -> PyTree:
    """This tower's row of stacked state."""
    return jax.tree.map(lambda x: x[0], tree)


def as_row(tree: PyTree) -> PyTree:
    """The reverse of `row`; without weak types, for which JAX would compile again."""

    def strong(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if not _replicas.is_key(x):
            x = jax.lax.convert_element_type(x, x.dtype)
        return x[None]

    return jax.tree.map(strong, tree)


def create(mesh: Mesh, make: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """``(*arguments) -> state``, a row for each tower of what ``make`` gives it."""

    def on_tower(*arguments: PyTree) -> PyTree:
        made = jax.tree.map(jnp.asarray, make(*arguments))
        return as_row(_replicas.fold_keys(made, _axes.index(mesh.axis_names)))

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


def step(
    mesh: Mesh, train_step: Callable[..., Any], tower_axes: _axes.Axes
) -> Callable[..., Any]:
    """``(state, batch) -> (state, metrics)`` of all towers."""

    def one_step(state: PyTree, batch: PyTree) -> Any:
        batch = _rows.own_all(batch)
        state, metrics = _checked(train_step, tower_axes)(row(state), batch)
        return as_row(state), as_row(metrics)

    return _of_stacked(mesh, one_step, rows(mesh))


def apply(mesh: Mesh, function: Callable[[PyTree], PyTree]) -> Callable[..., Any]:
    """``state -> state`` of all towers."""

    def on_tower(state: PyTree) -> PyTree:
        return as_row(function(row(state)))

    return _of_stacked(mesh, on_tower)


def _of_stacked(mesh: Mesh, function: Callable[..., Any], *specs: Any) -> Any:
    """A program of state with a row for each tower, and of what ``specs`` lay out."""
    mapped = per_tower(mesh, function, (rows(mesh), *specs), rows(mesh))

    def on_all(state: PyTree, *others: PyTree) -> Any:
        _replicas.check_stacked(state, mesh.size)
        _check_context(mesh)
        return mapped(state, *others)

    return on_all


def _check_context(mesh: Mesh) -> None:
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and dict(context.shape) != dict(mesh.shape):
        raise errors.InvalidArgumentError(
            f"jax.set_mesh has set a mesh {dict(context.shape)}, and these towers have "
            f"{dict(mesh.shape)}: call their programs outside of it"
        )


def whole_round(
    mesh: Mesh,
    train_step: Callable[..., Any],
    period: int,
    exchange: Callable[[PyTree], PyTree] | None,
    unroll: int | bool,
    tower_axes: _axes.Axes,
) -> Callable[..., Any]:
    """``(state, batches) -> (state, metrics)`` of all towers."""
    # The scan of the split form, with everything in one state.
    scanned = scan_round(
        lambda _, state, batch: (None, *train_step(state, _rows.own_all(batch))),
        lambda _, state: (None, state if exchange is None else exchange(state)),
        unroll=unroll,
    )

    def one_round(state: PyTree, batches: PyTree) -> Any:
        for leaf in jax.tree.leaves(batches):
            if leaf.shape[0] != period:
                raise errors.InvalidArgumentError(
                    f"a round of period {period} needs batches with {period} as their "
                    f"first dimension, got {leaf.shape[0]}: towers.shard_round(batches)"
                )

        def run(state: PyTree, batches: PyTree) -> Any:
            return scanned(None, state, batches)[1:]

        state, metrics = _checked(run, tower_axes)(row(state), batches)
        return as_row(state), as_row(metrics)

    return _of_stacked(mesh, one_round, rows(mesh, 1))


def _checked(
    train_step: Callable[..., Any], tower_axes: _axes.Axes
) -> Callable[..., Any]:
    """``train_step``, refused if several towers of a worker never speak.

    Each would train on its own and be thrown away but for the first.
    """

    def run(*arguments: Any) -> Any:
        silent = [name for name in tower_axes if jax.lax.axis_size(name) > 1]
        if not silent:
            return train_step(*arguments)
        traced, shape = jax.make_jaxpr(train_step, return_shape=True)(*arguments)
        heard = _spoken(traced.jaxpr)
        silent = [name for name in silent if name not in heard]
        if silent:
            raise errors.InvalidArgumentError(
                "train_step never communicates over "
                f"{', '.join(map(repr, silent))}, so the towers of a worker would "
                f"drift apart: put all_reduce({tower_axes[0]!r}) first in the "
                "optimizer's chain, or make each tower a worker of its own, "
                "Towers(workers=...)"
            )
        results = jaxpr_as_fun(traced)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def _spoken(jaxpr: Any) -> set[str]:
    """The axes over which a traced program has collectives, a loss's divisor aside."""
    axes: set[str] = set()
    for equation in jaxpr.eqns:
        only_loss = _loss.SCOPE in str(equation.source_info.name_stack)
        if equation.primitive.name != "axis_index" and not only_loss:
            for key in ("axes", "axis_name"):
                named = equation.params.get(key)
                if named is not None:
                    axes.update(n for n in _axes.names(named) if isinstance(n, str))
        for inner in jaxprs_in_params(equation.params):
            axes |= _spoken(inner)
    return axes
