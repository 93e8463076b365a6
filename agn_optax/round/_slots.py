"""Lookup of the slots of an optimizer state by name, inside any wrappers."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, GetAttrKey, keystr, tree_flatten_with_path

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.round._fragments import FragmentsState
from agn_optax.round._round import ExchangeState, LocalState
from agn_optax.round.placements import held, unwrapped
from agn_optax.rules import AccumulateState

PyTree = Any


def slots(opt_state: PyTree, params: PyTree = None) -> dict[str, PyTree]:
    """Return the slots of an optimizer state by name.

    A *slot* is a tree like the parameters, kept for each parameter: a moment, a
    momentum, a sum of gradients, the center. It is named after its field in the state,
    such as ``"mu"``, ``"nu"`` and ``"trace"``. The slots of a rule have a prefix that
    names the part of the round:

    ========================  ===================================================
    ``inner/...``             of the inner optimizer: ``inner/mu``
    ``record/...``            of the record: AGN's gradient sum is ``record/sum``
    ``anchor``                the center as last adopted, if the state keeps it
    ``codec/...``             of the codec: ``codec/residual``
    ``center``                the center
    ``public``                the broadcast parameters, if workers adopt these
    ``center_optimizer/...``  of the center optimizer: ``center_optimizer/mu``
    ``in_flight/...``         of messages in flight: ``in_flight/message``
    ========================  ===================================================

    Labels of ``multi_transform`` and names of ``named_chain`` come before this prefix
    (``"decoder/inner/mu"``). Wrappers that only contain another state add nothing to
    the name. If two slots would have the same name, both names also get their positions
    (``"0/trace"`` and ``"2/trace"``), so that no slot hides another. The slots of
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
      this tower's pieces. Floating arrays outside of such trees, such as those of a
      factored moment, have an entry each. Counts, keys and hyperparameters are left
      out: integers outside of such trees, and scalars. (If the parameters are one
      scalar, floating scalars cannot be distinguished from slots, and all of them are
      returned.)

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
    opt_state = trees.map_nodes(_put_together, opt_state, FragmentsState)
    known = list(_known(opt_state))
    if params is None:
        like = _structure_of(known)
    else:
        like = params
        for tree in known:
            if not _is_like(tree, params):
                raise errors.TreeMismatchError(
                    "params must have the same tree as the parameters of the state: "
                    f"got {jax.tree.structure(params)}, expected "
                    f"{jax.tree.structure(tree)}"
                )
    return _named(list(_found(opt_state, (), _Test(like))))


def _put_together(state: FragmentsState) -> ExchangeState:
    """Join the states of all fragments to the state of the whole tree."""
    apart = [
        each._replace(
            center=held(each.center), center_state=unwrapped(each.center_state)
        )
        for each in state.fragments
    ]
    # For the counts, which all fragments have, any will do: they are no slots.
    whole: ExchangeState = jax.tree.map(
        lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None),
        *apart,
        is_leaf=lambda node: node is None,
    )
    return whole._replace(local=whole.local._replace(inner_state=state.inner_state))


def _known(opt_state: PyTree) -> Iterator[PyTree]:
    """Yield the trees in a state that are like the parameters, except for masks."""
    for _, state in trees.nodes(opt_state, ExchangeState):
        yield held(state.center)
    for _, local in trees.nodes(opt_state, LocalState):
        if local.anchor is not None:
            yield local.anchor
    for _, record in trees.nodes(opt_state, AccumulateState):
        yield record.sum


def _structure_of(known: list[PyTree]) -> PyTree:
    whole = [tree for tree in known if not trees.nodes(tree, optax.MaskedNode)]
    if not whole or any(not _is_like(tree, whole[0]) for tree in whole):
        raise errors.MissingArgumentError(
            "slots needs params to find the trees like them: the state has "
            f"{'several trees' if whole else 'no tree'} that could be the parameters'. "
            "Call slots(opt_state, params)"
        )
    return whole[0]


def _children(node: PyTree) -> list[tuple[Any, Any]]:
    """Return a node's children with their keys; for a leaf, the leaf itself."""
    return tree_flatten_with_path(node, is_leaf=lambda other: other is not node)[0]


def _is_like(tree: PyTree, like: PyTree) -> bool:
    """Return whether a tree has the structure of another, except for masked nodes."""
    if isinstance(tree, optax.MaskedNode):
        return True
    parts, parts_like = _children(tree), _children(like)
    if [path for path, _ in parts] != [path for path, _ in parts_like]:
        return False
    if any(not path for path, _ in parts):  # both are leaves
        return True
    return type(tree) is type(like) and all(
        _is_like(part, other)
        for (_, part), (_, other) in zip(parts, parts_like, strict=True)
    )


class _Test:
    """Test whether a node of a state is a slot."""

    def __init__(self, like: PyTree) -> None:
        self._like = like
        self._is_bare = jax.tree_util.treedef_is_leaf(jax.tree.structure(like))
        self._is_scalar = self._is_bare and not jnp.shape(like)

    def leaf(self, leaf: Any) -> bool:
        """Return whether an array outside of trees like the parameters is a slot."""
        is_float = jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact)
        return is_float and (self._is_scalar or bool(jnp.shape(leaf)))

    def tree(self, node: PyTree) -> bool:
        has_arrays = bool(jax.tree.leaves(node))
        return not self._is_bare and has_arrays and _is_like(node, self._like)


class _Step(NamedTuple):
    """One key in the path from a state to a slot."""

    key: Any
    text: str
    kind: Literal["label", "position", "field"]


_Path = tuple[_Step, ...]


class _Slot(NamedTuple):
    path: _Path
    tree: PyTree


def _found(node: PyTree, path: _Path, is_slot: _Test) -> Iterator[_Slot]:
    """Yield all slots at a node and below it."""
    if isinstance(node, ExchangeState | LocalState):
        yield from _of_round(node, path, is_slot)
        return
    children = _children(node)
    if any(not key for key, _ in children):
        if is_slot.leaf(node):
            yield _Slot(path, node)
    elif is_slot.tree(node):
        yield _Slot(path, node)
    else:
        for (key,), child in children:
            yield from _found(child, (*path, _step(key)), is_slot)


def _of_round(
    state: ExchangeState | LocalState, path: _Path, is_slot: _Test
) -> Iterator[_Slot]:
    """Yield the slots of a rule's state, which have names of their own."""

    def within(name: str, field: str, tree: PyTree) -> Iterator[_Slot]:
        step = _Step(GetAttrKey(field), name, "label")
        yield from _found(tree, (*path, step), is_slot)

    def whole(name: str, tree: PyTree) -> Iterator[_Slot]:
        if jax.tree.leaves(tree):
            yield _Slot((*path, _Step(GetAttrKey(name), name, "field")), tree)

    if isinstance(state, ExchangeState):
        yield from _of_round(state.local, path, is_slot)
        yield from whole("center", held(state.center))
        if state.public is not None:
            yield from whole("public", state.public.params)
        center_state = unwrapped(state.center_state)
        yield from within("center_optimizer", "center_state", center_state)
        yield from within("in_flight", "in_flight", state.in_flight)
    else:
        yield from within("inner", "inner_state", state.inner_state)
        yield from within("record", "record", state.record)
        yield from whole("anchor", state.anchor)
        yield from within("codec", "codec_state", state.codec_state)


def _step(key: Any) -> _Step:
    if isinstance(key, GetAttrKey):
        return _Step(key, key.name, "field")
    if isinstance(key, DictKey):
        return _Step(key, str(key.key), "label")
    return _Step(key, keystr((key,), simple=True), "position")


def _short(path: _Path) -> str:
    """Join the labels, the last field, and all keys after it."""
    return _joined(path, ("label",))


def _longer(path: _Path) -> str:
    return _joined(path, ("label", "position"))


def _joined(path: _Path, kinds: tuple[str, ...]) -> str:
    last = max((i for i, step in enumerate(path) if step.kind == "field"), default=0)
    return "/".join(s.text for i, s in enumerate(path) if i >= last or s.kind in kinds)


def _full(path: _Path) -> str:
    """Return the whole path as JAX writes it, which is unique in a tree."""
    return keystr(tuple(step.key for step in path))


def _named(found: list[_Slot]) -> dict[str, PyTree]:
    """Give each slot the shortest name that is unique."""
    forms = (_short, _longer, _full)
    chosen = [0] * len(found)
    while True:
        names = [forms[n](slot.path) for n, slot in zip(chosen, found, strict=True)]
        count = collections.Counter(names)
        if len(count) == len(names):
            return {name: slot.tree for name, slot in zip(names, found, strict=True)}
        last = len(forms) - 1
        for i, name in enumerate(names):
            if count[name] > 1:
                chosen[i] = min(chosen[i] + 1, last)
