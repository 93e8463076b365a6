"""State with one replica per tower, stacked along a new first dimension.

Most leaves are alike on all towers; some are meant not to be.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax.rules._forms import ExchangeState
from agn_optax.rules._placement import OnHost, ShardedCenter
from agn_optax.towers._all_reduce import AllReduceState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Whether replicas are identical; true in a condition if they are."""

    differs: str | None = None  # path of the first leaf that is not the same everywhere

    def __bool__(self) -> bool:
        """No leaf differs."""
        return self.differs is None

    def __str__(self) -> str:
        if self:
            return "all towers agree"
        return f"towers differ, first in state{self.differs}"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerTower:
    """Rows of all towers, where `unreplicate` finds pieces instead of replicas."""

    rows: PyTree


def is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def fold_keys(tree: PyTree, index: Any) -> PyTree:
    """``tree`` with the random keys of tower ``index``; tower 0 keeps them."""

    def fold(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        folded = jax.random.fold_in if not leaf.ndim else _fold_each
        return jnp.where(index == 0, leaf, folded(leaf, index))

    return jax.tree.map(fold, tree)


def _fold_each(keys: Any, index: Any) -> Any:
    flat = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def _is_own_state(node: Any) -> bool:
    return isinstance(node, ExchangeState | AllReduceState | PerTower)


def pieces_apart(state: PyTree) -> PyTree:
    """``state`` with `PerTower` around the pieces of centers in shards."""

    def wrap(node: Any) -> Any:
        if not isinstance(node, ExchangeState):
            return node
        center = node.center.tree if is_on_host(node.center) else node.center
        if not isinstance(center, ShardedCenter):
            return node
        center = dataclasses.replace(center, pieces=PerTower(center.pieces))
        if is_on_host(node.center):
            center = OnHost(center)
        return node._replace(
            center=center,
            center_state=PerTower(node.center_state),
            local=node.local._replace(record=PerTower(node.local.record)),
        )

    return jax.tree.map(wrap, state, is_leaf=_is_own_state)


def is_on_host(node: Any) -> bool:
    return isinstance(node, OnHost)


def is_per_tower(node: Any) -> bool:
    return isinstance(node, PerTower)


def own(state: PyTree) -> PyTree:
    """One tower's state, of what every tower gets alike and of its `PerTower` rows."""
    return jax.tree.map(
        lambda node: (
            jax.tree.map(lambda x: x[0], node.rows) if is_per_tower(node) else node
        ),
        state,
        is_leaf=is_per_tower,
    )


def is_special(node: Any) -> bool:
    return is_on_host(node) or is_per_tower(node)


def comparable(state: PyTree) -> list[tuple[str, jax.Array]]:
    """The leaves that all towers of a worker have alike.

    Others differ on purpose: random keys, pieces of a center, gradients in flight.
    """
    state = jax.tree.map(
        lambda node: AllReduceState(None) if isinstance(node, AllReduceState) else node,
        state,
        is_leaf=_is_own_state,
    )
    leaves = tree_flatten_with_path(pieces_apart(state), is_leaf=is_per_tower)[0]
    return [
        (keystr(path), leaf)
        for path, leaf in leaves
        if not is_per_tower(leaf) and not is_key(leaf)
    ]


def same_rows(leaf: jax.Array, workers: int) -> jax.Array:
    """Whether the towers of each worker have the same bits."""
    bits = leaf
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return same_rows(leaf.real, workers) & same_rows(leaf.imag, workers)
        unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(leaf, unsigned)
    bits = bits.reshape(workers, -1, *leaf.shape[1:])
    return (bits == bits[:, :1]).all()


def check_stacked(state: PyTree, towers: int) -> None:
    """Every leaf has a row for each tower."""
    for path, leaf in tree_flatten_with_path(state)[0]:
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] != towers:
            raise errors.TreeMismatchError(
                f"state{keystr(path)} has shape {list(shape)}; a first dimension of "
                f"{towers}, one row for each tower, is expected: make it with "
                "towers.replicate(state)"
            )
