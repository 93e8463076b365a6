"""Lookup of the slots of an optimizer state by name, inside any wrappers."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import (
    DictKey,
    GetAttrKey,
    keystr,
    tree_flatten_with_path,
)

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.round._fragments import FragmentsState
from agn_optax.round._round import ExchangeState, LocalState
from agn_optax.round.placements import center_arrays
from agn_optax.rules import AccumulateState

PyTree = Any
_Path = tuple[Any, ...]  # keys of JAX


class _PartName(str):
    """The name of a part of the round, as a key in a path."""

    __slots__ = ()


def slots(opt_state: PyTree, params: PyTree = None) -> dict[str, PyTree]:
    """Return the slots of an optimizer state by name.

    A *slot* is a tree like the parameters, with an array for each parameter: a moment,
    a momentum, a sum of gradients, the center. It is named after its field in the
    state, such as ``"mu"``, ``"nu"`` and ``"trace"``. The slots of a rule have a prefix
    that names the part of the round:

    ========================  ======================================================
    ``inner/...``             slots of the inner optimizer: ``inner/mu``
    ``record/...``            the record: AGN's gradient sum is ``record/sum``
    ``anchor``                the center as last adopted, if the state keeps it
    ``codec/...``             slots of the codec: ``codec/residual``
    ``center``                the center
    ``center_optimizer/...``  slots of the center optimizer: ``center_optimizer/mu``
    ``in_flight/...``         the message in flight: ``in_flight/message``
    ========================  ======================================================

    Labels of ``multi_transform`` and names of ``named_chain`` come before this prefix
    (``"decoder/inner/mu"``). Wrappers that only contain another state add nothing to
    the name. If two slots would have the same name, both are named by their paths
    (``"[0].trace"`` and ``"[2].trace"``), so that no slot hides another. The slots of
    fragments are joined to whole trees.

    Args:
      opt_state: state of any optax optimizer, of one of this package's, or of a
        `Worker`; also a state that contains one. In a state of `Towers`, arrays have a
        row for every tower.
      params: the parameters, or a tree with their structure. None takes the structure
        from the center, anchor or gradient sum in the state, one of which must be
        complete, without masked leaves.

    Returns:
      A dictionary from names to trees, in the order of the state. The arrays are those
      of the state itself: copy them if you donate it. Masked leaves are
      ``optax.MaskedNode()``. The slots of a sharded center, and of its optimizer, are
      this tower's pieces. (If the parameters are one array, all floating arrays are
      returned, and if they are one scalar, floating scalars too.)

    Raises:
      MissingArgumentError: ``params`` is None, and the state has no complete tree like
        the parameters, or several different ones.
      TreeMismatchError: ``params`` has another structure than the center.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> params = {"w": jnp.ones(2)}
      >>> tx = agn_optax.agn(optax.adam(0.1), period=3, center=optax.sgd(0.1, 0.9))
      >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
      >>> found = agn_optax.slots(state)
      >>> print(*found)
      inner/mu inner/nu record/sum center center_optimizer/trace
      >>> print(found["record/sum"]["w"])
      [1. 1.]
      >>> print(*agn_optax.slots(optax.adam(0.1).init(params), params))
      mu nu
    """
    opt_state = trees.map_nodes(_join_fragments, opt_state, FragmentsState)
    known_trees = _known_trees(opt_state)
    like = _structure_of(known_trees) if params is None else params
    for tree in known_trees:
        if not _is_like(tree, like):
            raise errors.TreeMismatchError(
                "params must have the same tree as the parameters of the state: got "
                f"{jax.tree.structure(like)}, expected {jax.tree.structure(tree)}"
            )
    is_bare = jax.tree_util.treedef_is_leaf(jax.tree.structure(like))
    min_ndim = min(jnp.ndim(like), 1) if is_bare else 0  # of a slot

    def is_slot(node: PyTree) -> bool:
        if not is_bare:
            return bool(jax.tree.leaves(node)) and _is_like(node, like)
        dtype = getattr(node, "dtype", type(node))
        return jnp.issubdtype(dtype, jnp.inexact) and jnp.ndim(node) >= min_ndim

    named = trees.map_nodes(_by_part, opt_state, ExchangeState | LocalState)
    is_tree = None if is_bare else is_slot
    nodes = tree_flatten_with_path(named, is_leaf=is_tree)[0]
    found = [(path, node) for path, node in nodes if is_slot(node)]
    names = [_name(path) for path, _ in found]
    return {
        name if names.count(name) == 1 else keystr(path): node
        for name, (path, node) in zip(names, found, strict=True)
    }


def _join_fragments(state: FragmentsState) -> ExchangeState:
    """Join the states of all fragments to the state of the whole tree."""
    fragments = [
        fragment._replace(
            center=center_arrays(fragment.center),
            center_state=center_arrays(fragment.center_state),
        )
        for fragment in state.fragments
    ]
    # Each fragment has its own counts. The first are kept: counts are not slots.
    whole: ExchangeState = jax.tree.map(
        lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None),
        *fragments,
        is_leaf=lambda node: node is None,
    )
    return whole._replace(local=whole.local._replace(inner_state=state.inner_state))


def _known_trees(opt_state: PyTree) -> list[PyTree]:
    """Return the trees in a state that are like the parameters, except for masks."""
    centers = [node.center for _, node in trees.nodes(opt_state, ExchangeState)]
    anchors = [node.anchor for _, node in trees.nodes(opt_state, LocalState)]
    sums = [record.sum for _, record in trees.nodes(opt_state, AccumulateState)]
    found = [*map(center_arrays, centers), *anchors, *sums]
    return [tree for tree in found if tree is not None]


def _structure_of(known_trees: list[PyTree]) -> PyTree:
    whole = [tree for tree in known_trees if not trees.nodes(tree, optax.MaskedNode)]
    if not whole or any(not _is_like(tree, whole[0]) for tree in whole):
        raise errors.MissingArgumentError(
            "slots needs params to find the trees with their structure: the state has "
            f"{'several trees' if whole else 'no tree'} that could have it. Call "
            "slots(opt_state, params)"
        )
    return whole[0]


def _is_like(tree: PyTree, like: PyTree) -> bool:
    """Return whether a tree has the structure of another, except for masked nodes."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    def is_leaf(node: Any, part: PyTree) -> bool:
        treedef: Any = jax.tree.structure(part)
        return is_masked(node) or jax.tree_util.treedef_is_leaf(treedef)

    try:
        same = jax.tree.map(is_leaf, tree, like, is_leaf=is_masked)
    except ValueError:  # other containers
        return False
    return all(jax.tree.leaves(same))


def _by_part(state: ExchangeState | LocalState) -> PyTree:
    """Return the fields of a rule's state by the names of the parts of the round."""
    if isinstance(state, LocalState):
        fields = {
            "inner": state.inner_state,
            "record": state.record,
            "anchor": state.anchor,
            "codec": state.codec_state,
        }
    else:
        fields = {
            **_by_part(state.local),
            "center": center_arrays(state.center),
            "center_optimizer": center_arrays(state.center_state),
            "in_flight": state.in_flight,
        }
    # An OrderedDict, because JAX sorts the keys of other dictionaries.
    return collections.OrderedDict((_PartName(k), v) for k, v in fields.items())


def _name(path: _Path) -> str:
    """Join the labels of a path, its last field, and all keys after that."""
    fields = [
        i
        for i, key in enumerate(path)
        if isinstance(key, GetAttrKey)
        or isinstance(getattr(key, "key", None), _PartName)
    ]
    last = max(fields, default=0)
    kept = [key for i, key in enumerate(path) if i >= last or isinstance(key, DictKey)]
    return keystr(tuple(kept), simple=True, separator="/")
